/* The C ABI of the dot interaction on the CPU: dot products of pairs of vectors, sample by sample.
 *
 * Letters: B samples, V vectors of a sample, D columns of a vector, P pairs.
 * No function throws or allocates; calls share nothing, so that any number of threads may make them.
 */
#ifndef SPARSELIFT_INTERACTION_H
#define SPARSELIFT_INTERACTION_H

#include <stdint.h>

#include "sparselift_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The pairs (row, first), (row, first + 1) ... of vectors, `count` of them; their products are columns `column`, `column + 1` ... */
typedef struct {
    int64_t row;
    int64_t first;
    int64_t count;
    int64_t column;
} sl_pair_run;

typedef struct {
    int64_t batch;             /* B */
    int64_t num_vectors;       /* V */
    int64_t dim;               /* D */
    int64_t passed;            /* this vector is columns [0, D) of the output, too; -1: none */
    const sl_pair_run* runs;
    int64_t num_runs;
} sl_interaction;

/* What the two functions below need of working memory for that many threads. */
int64_t sl_interaction_workspace_bytes(const sl_interaction* shape, int32_t threads);

/* out (B, .): the passed vector, and <vector i, vector j> of every pair. `vectors`: V matrices (B, D). */
sl_status sl_interaction_forward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix out, void* workspace, int32_t isa,
                                 int32_t threads);

/* From the gradient of that output to those of the vectors: V matrices (B, D), written, not added to; data NULL: not wanted. */
sl_status sl_interaction_backward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix grad, const sl_matrix* vector_grads,
                                  void* workspace, int32_t isa, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
