// What one build of the interaction kernels (an instruction set) offers to interaction.cpp.
//
// As in kernels.h: plain structs alone, since this is included by sources compiled with different instruction sets.
#pragma once

#include <stdint.h>

#include "../api/sparselift_interaction.h"

namespace sparselift {

/// Columns of vectors that are transposed at a time.
constexpr int64_t kInteractionColumns = 64;

/// Columns [first, last) of one row of the V x V products that pairs name; empty where first == last.
struct ProductRange {
    int64_t first, last;
};

/// Samples [first_sample, last_sample) of one call.
struct InteractionArgs {
    const sl_interaction* shape;
    const ProductRange* ranges;        // (V,)
    const sl_matrix* vectors;          // (V,) of (B, D)
    const sl_matrix* vector_grads;     // the same; backward alone
    sl_matrix output;                  // or its gradient
    int64_t first_sample, last_sample;
    int64_t width;                     // V, rounded up to whole vectors of any instruction set
    float* square;                     // (width, width)
    float* transposed;                 // (kInteractionColumns, width)
    const float** rows;                // (V,) the sample at hand
    float** grad_rows;                 // (V,)
};

struct InteractionKernels {
    void (*forward)(const InteractionArgs& args);
    void (*backward)(const InteractionArgs& args);
};

namespace portable {
const InteractionKernels* interaction_kernels();
}
#ifdef __x86_64__
namespace avx2 {
const InteractionKernels* interaction_kernels();
}
namespace avx512 {
const InteractionKernels* interaction_kernels();
}
#endif

}  // namespace sparselift
