// Arrays in shared memory, as the device has them. The emulator's twin (csrc/simt/shared_array.h) checks every access: bounds, alignment,
// reads of what was never written, and races. Kernels therefore use these and no bare __shared__.
#pragma once

#ifdef SPARSELIFT_SIMT
#include "../simt/shared_array.h"
#else
#include <cstddef>

namespace sparselift::cuda {

/// `size()` elements of T in the shared memory of the block.
template <typename T>
class Shared {
  public:
    __device__ __forceinline__ Shared(T* data, int size) : data_(data), size_(size) {}

    __device__ __forceinline__ int size() const { return size_; }
    __device__ __forceinline__ T load(int i) const { return data_[i]; }
    __device__ __forceinline__ void store(int i, T value) const { data_[i] = value; }

    /// A vector that begins with element i, at a multiple of its own size.
    template <typename V>
    __device__ __forceinline__ V load_as(int i) const {
        return *reinterpret_cast<const V*>(data_ + i);
    }
    template <typename V>
    __device__ __forceinline__ void store_as(int i, V value) const {
        *reinterpret_cast<V*>(data_ + i) = value;
    }

    /// Integers only, as all atomics here. The value before.
    __device__ __forceinline__ T atomic_add(int i, T value) const { return atomicAdd(data_ + i, value); }

    __device__ __forceinline__ Shared part(int first, int size) const { return {data_ + first, size}; }

  private:
    T* data_;
    int size_;
};

extern __shared__ uint4 dynamic_shared_memory[];

/// `size` elements from byte `offset_bytes`, a multiple of their alignment, of the launch's dynamic shared memory.
template <typename T>
__device__ __forceinline__ Shared<T> dynamic_shared(std::size_t offset_bytes, int size) {
    return {reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(dynamic_shared_memory) + offset_bytes), size};
}

/// Declares `name`, a Shared<type> of `size` elements (a constant), aligned to 16 bytes; one a block.
#define SL_SHARED(type, name, size)                      \
    __shared__ __align__(16) type name##_storage[size];  \
    const ::sparselift::cuda::Shared<type> name { name##_storage, size }

}  // namespace sparselift::cuda

#endif
