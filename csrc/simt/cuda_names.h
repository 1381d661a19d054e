// What a kernel file includes in place of CUDA's own headers when g++ compiles it (-DSPARSELIFT_SIMT). For tests alone.
//
// A kernel is a plain function here. run_grid() calls it as each thread of a grid, one block after another; the threads of a block are
// fibers that change at barriers, warp collectives and atomics, in the order that the schedule says. See docs/cuda.md.
#pragma once

#ifndef SPARSELIFT_SIMT
#error "csrc/simt stands in for CUDA in tests only: compile with -DSPARSELIFT_SIMT"
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#include "atomics.h"
#include "global_memory.h"
#include "half_types.h"
#include "intrinsics.h"
#include "runtime_api.h"
#include "shared_array.h"
#include "vector_types.h"
#include "warp.h"

#define threadIdx (::sparselift::simt::current_thread->index)
#define blockIdx (::sparselift::simt::current_grid.block_index)
#define blockDim (::sparselift::simt::current_grid.block)
#define gridDim (::sparselift::simt::current_grid.grid)
#define warpSize 32

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
    using sparselift::simt::SharedMemory;
    if (bytes < 0 || bytes > static_cast<int>(SharedMemory::kBlockBytes)) return cudaErrorInvalidValue;
    SharedMemory::asked_bytes = static_cast<std::size_t>(bytes);
    return cudaSuccess;
}
