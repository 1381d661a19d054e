// Output buffers that come back when their last owner lets go, as DLPack tensors.
#include <cstring>
#include <new>

#include "../api/sparselift_memory.h"
#include "pool.h"

namespace sparselift {
namespace {

/// What DLPack hands around, and where the memory behind it goes back to.
struct RingTensor {
    sl_dl_managed managed;
    int64_t shape[SL_RING_MAX_DIMS];
    int64_t strides[SL_RING_MAX_DIMS];
    Block* block;
};

void give_back(sl_dl_managed* managed) {
    auto* tensor = static_cast<RingTensor*>(managed->manager_ctx);
    pool_give(tensor->block);
    delete tensor;
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" sl_ring* sl_ring_create(int64_t max_idle_bytes) {
    return reinterpret_cast<sl_ring*>(pool_create(static_cast<size_t>(max_idle_bytes)));
}

extern "C" void sl_ring_destroy(sl_ring* ring) {
    if (ring) pool_release(reinterpret_cast<Pool*>(ring));
}

extern "C" sl_dl_managed* sl_ring_take(sl_ring* ring, const int64_t* shape, int32_t ndim) {
    auto* tensor = new (std::nothrow) RingTensor{};
    if (!tensor) return nullptr;
    int64_t count = 1;
    for (int32_t i = ndim - 1; i >= 0; --i) {
        tensor->shape[i] = shape[i];
        tensor->strides[i] = count;
        count *= shape[i];
    }
    tensor->block = pool_take(reinterpret_cast<Pool*>(ring), static_cast<size_t>(count) * sizeof(float));
    if (!tensor->block) {
        delete tensor;
        return nullptr;
    }
    sl_dl_managed& managed = tensor->managed;
    managed.version = {SL_DLPACK_MAJOR, 0};
    managed.manager_ctx = tensor;
    managed.deleter = give_back;
    managed.tensor = {tensor->block->data, SL_DL_CPU, 0, ndim, SL_DL_FLOAT, 32, 1, tensor->shape, tensor->strides, 0};
    return &managed;
}

extern "C" void sl_ring_bytes(sl_ring* ring, int64_t* idle, int64_t* total) {
    size_t idle_bytes = 0, total_bytes = 0;
    pool_bytes(reinterpret_cast<Pool*>(ring), &idle_bytes, &total_bytes);
    *idle = static_cast<int64_t>(idle_bytes);
    *total = static_cast<int64_t>(total_bytes);
}
