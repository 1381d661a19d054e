// What the host knows: the static structure of a group of lookups, and where the parts of a batch lie in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../api/guarded.h"
#include "args.h"
#include "launch.cuh"

struct sl_cuda_program {
    std::vector<sl_cuda_table> tables;
    std::vector<sl_feature> features;
    sl_cuda_shape shape;
};

struct sl_cuda_batch {
    const sl_cuda_program* program;
    std::vector<sparselift::cuda::Lookups> lookups;      // device pointers
    sparselift::cuda::BatchFault* fault;                 // device
};

namespace sparselift::cuda {

constexpr int64_t kMaxGridY = 65535;

/// Hands out 256-byte aligned parts of a block of device memory one after the other. On a null base it only counts.
class Layout {
  public:
    explicit Layout(void* base) : base_(static_cast<char*>(base)) {}
    template <typename T>
    T* take(int64_t count) {
        char* at = base_ ? base_ + used_ : nullptr;
        used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
        return reinterpret_cast<T*>(at);
    }
    int64_t used() const { return static_cast<int64_t>(used_); }

  private:
    char* base_;
    size_t used_ = 0;
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline cudaStream_t stream_of(const sl_cuda_context& context) { return static_cast<cudaStream_t>(context.stream); }

inline int64_t element_bytes(int32_t dtype) { return dtype == SL_FLOAT32 ? 4 : 2; }

constexpr int kAlignment = 16;     // of the widest loads

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0; }

/// Whether rows of `dim` float32, `stride` apart, can be read in aligned vectors of four.
inline bool are_in_fours(const float* data, int64_t stride, int64_t dim) { return is_aligned(data) && stride % 4 == 0 && dim % 4 == 0; }

/// Whether rows of a table can be read in aligned loads of 16 bytes.
inline bool are_in_vectors(const void* table, int64_t dim, int32_t dtype) {
    return is_aligned(table) && dim * element_bytes(dtype) % 16 == 0;
}

/// As many lanes as a row has loads, up to a warp; then as many loads a lane as are left, up to `max_columns`.
Columns columns_of(int64_t dim, int32_t dtype, bool in_vectors, bool in_fours, int max_columns);

/// Words of device memory to be zeroed.
struct Zeros {
    uint32_t* at;
    int32_t count;
};

/// Copies a table of structs to the device, and zeroes words there, in the order of the stream.
sl_status put(void* to, const void* from, int64_t bytes, cudaStream_t stream, Zeros zeros = {});

/// Tables of structs that go to the device together: they lie one after the other in a layout.
class Parcel {
  public:
    explicit Parcel(Layout& layout) : layout_(layout), begin_(layout.used()) {}

    /// Where the items will be.
    template <typename T>
    T* add(const std::vector<T>& items) {
        const auto offset = static_cast<size_t>(layout_.used() - begin_);
        T* at = layout_.take<T>(static_cast<int64_t>(items.size()));
        if (offset == 0) to_ = at;
        bytes_.resize(offset + items.size() * sizeof(T));
        if (!items.empty()) std::memcpy(bytes_.data() + offset, items.data(), items.size() * sizeof(T));
        return at;
    }

    sl_status send(cudaStream_t stream, Zeros zeros = {}) const {
        return put(to_, bytes_.data(), static_cast<int64_t>(bytes_.size()), stream, zeros);
    }

  private:
    Layout& layout_;
    int64_t begin_;
    void* to_ = nullptr;
    std::vector<char> bytes_;
};

/// SL_OK, or SL_BAD_ARGUMENT where memory that kernels lay out is not aligned.
sl_status check_alignment(const char* what, const void* memory);

/// Likewise, or where the workspace of a context is smaller than `needed`.
sl_status check_workspace(const sl_cuda_context& context, int64_t needed);

/// Runs `step` and leaves the function with its status if that is not SL_OK.
#define SL_TRY(step)                                          \
    do {                                                      \
        const sl_status sl_try_status = (step);               \
        if (sl_try_status != SL_OK) return sl_try_status;     \
    } while (false)

/// Calls visit with an element of a table's type.
template <typename Visit>
sl_status visit_dtype(int32_t dtype, const Visit& visit) {
    if (dtype == SL_FLOAT16) return visit(__half{});
    if (dtype == SL_BFLOAT16) return visit(__nv_bfloat16{});
    return visit(float{});
}

}  // namespace sparselift::cuda
