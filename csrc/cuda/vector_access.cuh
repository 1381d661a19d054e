// Vector loads and stores of global memory, as the device has them. All of a kernel's wide accesses go through here: the emulator's twin
// (csrc/simt/global_memory.h) checks their alignment.
#pragma once

#ifdef SPARSELIFT_SIMT
#include "../simt/global_memory.h"
#else
namespace sparselift::cuda {

/// The vector at `address`, a multiple of sizeof(V), of memory that no kernel in flight writes.
template <typename V, typename T>
__device__ __forceinline__ V load_vector(const T* address) {
    return __ldg(reinterpret_cast<const V*>(address));
}

/// The same of memory that this kernel may write.
template <typename V, typename T>
__device__ __forceinline__ V load_vector_coherent(const T* address) {
    return __ldcg(reinterpret_cast<const V*>(address));
}

template <typename V, typename T>
__device__ __forceinline__ void store_vector(T* address, V value) {
    __stcg(reinterpret_cast<V*>(address), value);
}

/// Past the caches as far as they allow: for what is not read again soon.
template <typename V, typename T>
__device__ __forceinline__ void stream_vector(T* address, V value) {
    __stcs(reinterpret_cast<V*>(address), value);
}

}  // namespace sparselift::cuda

#endif
