// Checked arrays in shared memory: csrc/cuda/shared.cuh says what they are for.
#pragma once

#include <cstring>

#include "atomics.h"
#include "warp.h"

namespace sparselift::cuda {

/// `size()` elements of T in the shared memory of the block. There is no way to a raw pointer, so every access is checked.
template <typename T>
class Shared {
  public:
    Shared(std::size_t offset_bytes, int size) : offset_bytes_(offset_bytes), size_(size) {}

    int size() const { return size_; }

    T load(int i, SPARSELIFT_SIMT_SITE) const { return load_as<T>(i, site); }

    void store(int i, T value, SPARSELIFT_SIMT_SITE) const { store_as(i, value, site); }

    template <typename V>
    V load_as(int i, SPARSELIFT_SIMT_SITE) const {
        V value;
        std::memcpy(&value, address<V>(simt::Access::read, i, site), sizeof value);
        return value;
    }

    template <typename V>
    void store_as(int i, V value, SPARSELIFT_SIMT_SITE) const {
        std::memcpy(address<V>(simt::Access::write, i, site), &value, sizeof value);
    }

    T atomic_add(int i, T value, SPARSELIFT_SIMT_SITE) const {
        return atomicAdd(reinterpret_cast<T*>(address<T>(simt::Access::atomic, i, site)), value);
    }

    Shared part(int first, int size, SPARSELIFT_SIMT_SITE) const {
        if (first < 0 || size < 0 || first > size_ - size)
            simt::fault(cudaErrorIllegalAddress, site, "part of %d elements from %d on of a shared array of %d", size, first, size_);
        return {offset_bytes_ + static_cast<std::size_t>(first) * sizeof(T), size};
    }

  private:
    template <typename V>
    unsigned char* address(simt::Access access, int i, simt::Site site) const {
        constexpr int kElements = static_cast<int>((sizeof(V) + sizeof(T) - 1) / sizeof(T));
        if (i < 0 || i > size_ - kElements)
            simt::fault(cudaErrorIllegalAddress, site, "element %d of a shared array of %d%s", i, size_,
                        kElements > 1 ? ", as a vector" : "");
        const std::size_t offset = offset_bytes_ + static_cast<std::size_t>(i) * sizeof(T);
        if (offset % alignof(V))
            simt::fault(cudaErrorMisalignedAddress, site, "shared access of %zu bytes at byte %zu, no multiple of %zu", sizeof(V), offset,
                        alignof(V));
        return simt::shared_access(access, offset, sizeof(V), site);
    }

    std::size_t offset_bytes_;
    int size_;
};

template <typename T>
Shared<T> static_shared(const void* key, int size, const char* name, simt::Site site) {
    constexpr std::size_t kAlignment = 16;
    return {simt::static_shared(key, static_cast<std::size_t>(size) * sizeof(T), kAlignment, name, site), size};
}

template <typename T>
Shared<T> dynamic_shared(std::size_t offset_bytes, int size, SPARSELIFT_SIMT_SITE) {
    simt::check_dynamic_shared(offset_bytes, static_cast<std::size_t>(size) * sizeof(T), alignof(T), site);
    return {offset_bytes, size};
}

#define SL_SHARED(type, name, size)                                                                             \
    static const char name##_key = 0;                                                                           \
    const ::sparselift::cuda::Shared<type> name =                                                               \
        ::sparselift::cuda::static_shared<type>(&name##_key, size, #name, ::sparselift::simt::Site{__FILE__, __LINE__})

}  // namespace sparselift::cuda
