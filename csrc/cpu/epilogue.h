// What one build of the epilogue kernels (an instruction set) offers to epilogue.cpp.
//
// As in kernels.h: plain structs alone, since this is included by sources compiled with different instruction sets.
#pragma once

#include <stdint.h>

#include "../api/sparselift_epilogue.h"

namespace sparselift {

/// Rows [first_row, last_row) of a forward, or chunks of SL_EPILOGUE_ROWS rows of a backward.
struct EpilogueArgs {
    sl_matrix grad, out, masked;
    const float* bias;
    float* sums;              // (chunks, columns); null: not wanted
    int64_t rows, columns;
    int64_t first_row, last_row;
    int64_t first_chunk, last_chunk;
    int32_t relu;
};

struct EpilogueKernels {
    void (*forward)(const EpilogueArgs& args);
    void (*backward)(const EpilogueArgs& args);
};

namespace portable {
const EpilogueKernels* epilogue_kernels();
}
#ifdef __x86_64__
namespace avx2 {
const EpilogueKernels* epilogue_kernels();
}
namespace avx512 {
const EpilogueKernels* epilogue_kernels();
}
#endif

}  // namespace sparselift
