// CUDA's names, from nvcc's headers or, for tests without a GPU, from the emulator's. Every file of csrc/cuda begins here, so that both
// compilers read the same source.
#pragma once

#ifdef SPARSELIFT_SIMT
#include "../simt/cuda_names.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include "shared.cuh"
#include "vector_access.cuh"
