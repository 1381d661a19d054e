// Loads and stores through the cache operators of PTX. A vector access at an address that is no multiple of its size is a fault, as on the
// device; x86 would carry it out.
#pragma once

#include <cstdint>

#include "warp.h"

namespace sparselift::simt {

template <typename T>
void check_alignment(const T* address, Site site) {
    if (reinterpret_cast<std::uintptr_t>(address) % alignof(T))
        fault(cudaErrorMisalignedAddress, site, "access of %zu bytes at address %p, no multiple of %zu", sizeof(T),
              static_cast<const void*>(address), alignof(T));
}

template <typename T>
T load_global(const T* address, Site site) {
    check_alignment(address, site);
    if (counts_traffic) note_traffic(false, address, sizeof(T), site);
    return *address;
}

template <typename T>
void store_global(T* address, T value, Site site) {
    check_alignment(address, site);
    if (counts_traffic) note_traffic(true, address, sizeof(T), site);
    *address = value;
}

}  // namespace sparselift::simt

template <typename T>
T __ldg(const T* address, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::load_global(address, site);
}

template <typename T>
T __ldcg(const T* address, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::load_global(address, site);
}

template <typename T>
T __ldcs(const T* address, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::load_global(address, site);
}

template <typename T>
void __stcg(T* address, T value, SPARSELIFT_SIMT_SITE) {
    sparselift::simt::store_global(address, value, site);
}

template <typename T>
void __stcs(T* address, T value, SPARSELIFT_SIMT_SITE) {
    sparselift::simt::store_global(address, value, site);
}

// The twins of csrc/cuda/vector_access.cuh.
namespace sparselift::cuda {

template <typename V, typename T>
V load_vector(const T* address, SPARSELIFT_SIMT_SITE) {
    return __ldg(reinterpret_cast<const V*>(address), site);
}

template <typename V, typename T>
V load_vector_coherent(const T* address, SPARSELIFT_SIMT_SITE) {
    return __ldcg(reinterpret_cast<const V*>(address), site);
}

template <typename V, typename T>
void store_vector(T* address, V value, SPARSELIFT_SIMT_SITE) {
    __stcg(reinterpret_cast<V*>(address), value, site);
}

template <typename V, typename T>
void stream_vector(T* address, V value, SPARSELIFT_SIMT_SITE) {
    __stcs(reinterpret_cast<V*>(address), value, site);
}

}  // namespace sparselift::cuda
