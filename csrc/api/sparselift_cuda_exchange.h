/* The C ABI of the CUDA kernels around an exchange between ranks: distinct ids, ids by owner, and rows of many tables in one buffer.
 *
 * As in sparselift_cuda.h: data is device memory, calls only enqueue work, and *_bytes says what workspace a call takes. Of the
 * context, stream and workspace are read.
 */
#ifndef SPARSELIFT_CUDA_EXCHANGE_H
#define SPARSELIFT_CUDA_EXCHANGE_H

#include "sparselift_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SL_INT8_ROWWISE = SL_NUM_DTYPES };

/* K ids, contiguous. */
typedef struct {
    const void* data;
    int64_t count;
    int32_t are_64;            /* else int32 */
    int32_t reserved;
    int64_t rows;              /* ids are in [0, rows) */
} sl_cuda_ids;

/* The distinct ids, ascending, into `distinct`, which has room for all; how many there are into `count`; and into `slots` which of them
 * each id is. Ids that are no row are left out, and have slot -1. */
int64_t sl_cuda_dedup_workspace_bytes(int64_t num_ids);
sl_status sl_cuda_dedup(const sl_cuda_ids* ids, int64_t* distinct, int32_t* slots, int64_t* count, const sl_cuda_context* context);

/* Ids of B bags by owner: owner r has rows [r * rows_per_owner, (r + 1) * rows_per_owner). `rows`: ids by owner, bag and position, counted
 * from the owner's first row; `sources` the position of each among the given ids; `lengths` (owners, B) how many each owner has of each
 * bag. Ids that are no row come last, as row -1, and no owner has them. Boundaries are (B + 1,) int32 and valid. */
int64_t sl_cuda_bucketize_workspace_bytes(int64_t num_ids);
sl_status sl_cuda_bucketize(const sl_cuda_ids* ids, const int32_t* offsets, int64_t num_bags, int64_t rows_per_owner, int64_t num_owners,
                            int64_t* rows, int32_t* sources, int32_t* lengths, const sl_cuda_context* context);

/* Rows of one matrix outside of a packed buffer, and where they lie inside: row i begins at offset + i * sl_cuda_packed_row_bytes. */
typedef struct {
    float* rows;               /* (num_rows, dim), last stride 1 */
    int64_t row_stride;
    int64_t num_rows;
    int64_t offset_bytes;      /* multiple of 16 */
    int32_t dim;
    int32_t dtype;             /* inside: SL_FLOAT32, SL_FLOAT16, SL_BFLOAT16 or SL_INT8_ROWWISE */
} sl_cuda_part;

/* Elements and, for SL_INT8_ROWWISE, a scale and a bias (float32) before them; a multiple of 16. */
int64_t sl_cuda_packed_row_bytes(int64_t dim, int32_t dtype);

/* All parts into one buffer, or out of it, in one launch. int8: x is round((x - min) / scale) with scale = (max - min) / 255 of its row. */
int64_t sl_cuda_pack_workspace_bytes(int64_t num_parts);
sl_status sl_cuda_pack(const sl_cuda_part* parts, int64_t num_parts, void* buffer, const sl_cuda_context* context);
sl_status sl_cuda_unpack(const sl_cuda_part* parts, int64_t num_parts, const void* buffer, const sl_cuda_context* context);

#ifdef __cplusplus
}
#endif

#endif
