// Creating and destroying programs; what runs here; tables of structs for the device.
#include "program.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "put.cuh"

namespace sparselift::cuda {
namespace {

/// Four loads of 16 bytes a lane and 1,024 threads keep 64 KiB a multiprocessor under way, twice what 4.8 TB/s at 800 ns take. Blocks of
/// eight warps end soon enough that uneven bags do not hold a multiprocessor up. Chunks are long beside the sums of their pieces.
constexpr sl_cuda_shape kDefaultShape{16, 256, 0, 4, 256};

sl_status check_shape(const sl_cuda_shape& shape) {
    if (shape.vector_bytes != 16 && shape.vector_bytes != 4)
        return fail(SL_BAD_ARGUMENT, "vector_bytes must be 4 or 16; got %d", shape.vector_bytes);
    if (shape.block_threads != 64 && shape.block_threads != 128 && shape.block_threads != 256 && shape.block_threads != 512)
        return fail(SL_BAD_ARGUMENT, "block_threads must be 64, 128, 256 or 512; got %d", shape.block_threads);
    if (shape.bags_per_group < 0) return fail(SL_BAD_ARGUMENT, "bags_per_group must be at least 1; got %d", shape.bags_per_group);
    if (shape.loads_in_flight != 4 && shape.loads_in_flight != 8)
        return fail(SL_BAD_ARGUMENT, "loads_in_flight must be 4 or 8; got %d", shape.loads_in_flight);
    if (shape.chunk_lookups < kWarp || shape.chunk_lookups % kWarp != 0)
        return fail(SL_BAD_ARGUMENT, "chunk_lookups must be a multiple of 32; got %d", shape.chunk_lookups);
    return SL_OK;
}

sl_status check_table(const sl_cuda_table& table, int64_t number) {
    if (table.vector_bytes != 16 && table.vector_bytes != 4)
        return fail(SL_BAD_ARGUMENT, "table %lld: vector_bytes must be 4 or 16; got %d", static_cast<long long>(number), table.vector_bytes);
    if (table.bags_per_group < 0)
        return fail(SL_BAD_ARGUMENT, "table %lld: bags_per_group must be at least 1; got %d", static_cast<long long>(number), table.bags_per_group);
    if (table.coalesce == SL_COALESCE_NONE)
        return fail(SL_BAD_ARGUMENT, "table %lld: lookups of one row run at the same time, so its gradients are summed", static_cast<long long>(number));
    if (table.coalesce == SL_COALESCE_DENSE && (table.rows > SL_CUDA_MOST_DENSE_ROWS || table.dim > SL_CUDA_MOST_DENSE_COLUMNS))
        return fail(SL_BAD_ARGUMENT, "table %lld: dense sums take up to %d rows of %d columns; got %lld of %lld", static_cast<long long>(number),
                    SL_CUDA_MOST_DENSE_ROWS, SL_CUDA_MOST_DENSE_COLUMNS, static_cast<long long>(table.rows), static_cast<long long>(table.dim));
    return SL_OK;
}

/// `given` with its zeros replaced.
sl_cuda_shape complete(const sl_cuda_shape* given) {
    sl_cuda_shape shape = kDefaultShape;
    if (!given) return shape;
    if (given->vector_bytes) shape.vector_bytes = given->vector_bytes;
    if (given->block_threads) shape.block_threads = given->block_threads;
    if (given->bags_per_group) shape.bags_per_group = given->bags_per_group;
    if (given->loads_in_flight) shape.loads_in_flight = given->loads_in_flight;
    if (given->chunk_lookups) shape.chunk_lookups = given->chunk_lookups;
    return shape;
}

}  // namespace

Columns columns_of(int64_t dim, int32_t dtype, bool in_vectors, bool in_fours, int max_columns) {
    const int64_t width = in_vectors ? 16 / element_bytes(dtype) : 1, loads = divide_up(dim, width);
    int lanes_log2 = 0;
    while (lanes_log2 < 5 && (int64_t{1} << lanes_log2) < loads) ++lanes_log2;
    const int64_t wanted = std::min<int64_t>(divide_up(loads, int64_t{1} << lanes_log2), max_columns / width);
    Columns columns{};
    columns.dim = static_cast<int32_t>(dim);
    columns.lanes_log2 = static_cast<int16_t>(lanes_log2);
    columns.vectors = static_cast<int16_t>(wanted > 2 ? 4 : wanted);
    columns.vector_loads = in_vectors;
    columns.vector_floats = in_fours;
    return columns;
}

namespace {

template <int kWords>
sl_status put_part(void* to, const void* from, int64_t bytes, cudaStream_t stream, Zeros zeros) {
    PutArgs<kWords> args{};
    args.to = static_cast<uint32_t*>(to);
    args.count = static_cast<int32_t>(divide_up(bytes, 4));
    args.zeros = zeros.at;
    args.num_zeros = zeros.count;
    if (bytes > 0) std::memcpy(args.words, from, static_cast<size_t>(bytes));
    const int64_t threads = std::min(divide_up(std::max(args.count, args.num_zeros), kWarp) * kWarp, int64_t{kMaxThreads});
    return launch<&put_kernel<kWords>>(1, static_cast<unsigned>(threads), 0, stream, args);
}

}  // namespace

sl_status put(void* to, const void* from, int64_t bytes, cudaStream_t stream, Zeros zeros) {
    constexpr int64_t kMostBytes = kMostPutWords * 4;
    if (bytes <= kPutWords * 4 && (bytes > 0 || zeros.count > 0)) return put_part<kPutWords>(to, from, bytes, stream, zeros);
    for (int64_t at = 0; at < bytes; at += kMostBytes) {
        const int64_t part = std::min(bytes - at, kMostBytes);
        SL_TRY(put_part<kMostPutWords>(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, part, stream, at == 0 ? zeros : Zeros{}));
    }
    return SL_OK;
}

sl_status check_alignment(const char* what, const void* memory) {
    if (is_aligned(memory)) return SL_OK;
    return fail(SL_BAD_ARGUMENT, "%s must begin at a multiple of %d bytes; its address is %p", what, kAlignment, memory);
}

sl_status check_workspace(const sl_cuda_context& context, int64_t needed) {
    if (context.workspace_bytes >= needed) return check_alignment("a workspace", context.workspace);
    return fail(SL_BAD_ARGUMENT, "a workspace of %lld bytes is needed; got %lld", static_cast<long long>(needed),
                static_cast<long long>(context.workspace_bytes));
}

}  // namespace sparselift::cuda

using namespace sparselift;
using namespace sparselift::cuda;

extern "C" sl_status sl_cuda_check_device(void) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) return fail(SL_UNSUPPORTED, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
    if (count == 0) return fail(SL_UNSUPPORTED, "no CUDA device is visible");
    return SL_OK;
}

extern "C" int32_t sl_cuda_device_type(void) {
#ifdef SPARSELIFT_SIMT
    return 1;
#else
    return 2;
#endif
}

extern "C" sl_status sl_cuda_fault_create(sl_cuda_fault** fault) {
    void* memory = nullptr;
    const cudaError_t error = cudaHostAlloc(&memory, sizeof(sl_cuda_fault), cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) return fail(SL_DEVICE_ERROR, "%s in cudaHostAlloc: %s", cudaGetErrorName(error), cudaGetErrorString(error));
    *fault = new (memory) sl_cuda_fault{};
    return SL_OK;
}

extern "C" void sl_cuda_fault_destroy(sl_cuda_fault* fault) { cudaFreeHost(fault); }

extern "C" sl_status sl_cuda_clear_fault(const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        context->fault->status = SL_OK;
        const Status none{};
        return put(context->status, &none, sizeof none, stream_of(*context));
    });
}

extern "C" sl_cuda_shape sl_cuda_default_shape(void) { return kDefaultShape; }

extern "C" sl_status sl_cuda_program_create(const sl_cuda_table* tables, int64_t num_tables, const sl_feature* features, int64_t num_features,
                                            const sl_cuda_shape* shape, sl_cuda_program** program) {
    return guarded([&]() -> sl_status {
        if (num_features > kMaxGridY)
            return fail(SL_BAD_ARGUMENT, "at most %lld features a program; got %lld", static_cast<long long>(kMaxGridY),
                        static_cast<long long>(num_features));
        auto created = std::make_unique<sl_cuda_program>();
        created->tables.assign(tables, tables + num_tables);
        created->features.assign(features, features + num_features);
        created->shape = complete(shape);
        SL_TRY(check_shape(created->shape));
        for (size_t t = 0; t < created->tables.size(); ++t) {
            sl_cuda_table& table = created->tables[t];
            if (!table.vector_bytes) table.vector_bytes = created->shape.vector_bytes;
            if (!table.bags_per_group) table.bags_per_group = created->shape.bags_per_group;
            SL_TRY(check_table(table, static_cast<int64_t>(t)));
        }
        *program = created.release();
        return SL_OK;
    });
}

extern "C" void sl_cuda_program_destroy(sl_cuda_program* program) { delete program; }
