/* The C ABI of the dot interaction on a device. Its description is the CPU's (sparselift_interaction.h), with two more rules: rows of the
 * runs ascend and their columns follow one another without gaps, and there are at most SL_CUDA_MOST_VECTORS vectors; vectors and output have
 * less than 2**31 - 32 columns. The description is read on the host before a call returns; matrices are device memory. Calls only enqueue
 * work, and sizes below 0 are statuses, as in sparselift_cuda.h.
 */
#ifndef SPARSELIFT_CUDA_INTERACTION_H
#define SPARSELIFT_CUDA_INTERACTION_H

#include "sparselift_cuda.h"
#include "sparselift_interaction.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SL_CUDA_MOST_VECTORS = 512 };

/* Device memory that the two functions below take in their context. */
int64_t sl_cuda_interaction_workspace_bytes(const sl_interaction* shape);

/* out (B, .): the passed vector, and <vector i, vector j> of every pair. `vectors`: V matrices (B, D). */
sl_status sl_cuda_interaction_forward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix out, const sl_cuda_context* context);

/* From the gradient of that output to those of the vectors: V matrices (B, D), written, not added to; data NULL: not wanted. */
sl_status sl_cuda_interaction_backward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix grad, const sl_matrix* vector_grads,
                                       const sl_cuda_context* context);

#ifdef __cplusplus
}
#endif

#endif
