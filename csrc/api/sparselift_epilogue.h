/* The C ABI of what a linear layer does around its matrix products on the CPU: bias and ReLU after the first, the ReLU's gradient and the
 * bias's before the others. Each is one pass over the layer's output, where a call for each part reads or writes it two or three times.
 *
 * Letters: B rows, O columns. Matrices are float32 with a last stride of 1. No function throws or allocates; calls share nothing.
 */
#ifndef SPARSELIFT_EPILOGUE_H
#define SPARSELIFT_EPILOGUE_H

#include <stdint.h>

#include "sparselift_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out (B, O) = out + bias, and its ReLU if `relu`. `bias`: (O,), or NULL. A NaN stays one. */
sl_status sl_epilogue_forward(sl_matrix out, int64_t rows, int64_t columns, const float* bias, int32_t relu, int32_t isa, int32_t threads);

/* Rows that a sum is cut into, whatever the threads: the error of a long sum grows with the number of its parts. */
#define SL_EPILOGUE_ROWS 64

/* masked = grad where out > 0 or is NaN, else 0; sums (1 or more, O): its first row becomes the column sums of that, the same at any number
 * of threads; the others, one for each SL_EPILOGUE_ROWS rows or part of them, are working memory. All matrices (B, O).
 * out.data NULL: there was no ReLU, and masked is not written. sums NULL: not wanted. */
sl_status sl_epilogue_backward(sl_matrix grad, sl_matrix out, sl_matrix masked, float* sums, int64_t rows, int64_t columns, int32_t isa,
                               int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
