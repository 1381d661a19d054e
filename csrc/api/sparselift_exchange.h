/* The C ABI of what surrounds an exchange of rows between ranks, on the CPU: distinct ids, ids by owner, rows of many matrices in one
 * buffer, and pooled columns by consumer. sparselift_cuda_exchange.h has the same for a device, over the same structs.
 *
 * Letters: K ids, B bags, W owners (ranks). Strides are in elements. No function throws or allocates: working memory is passed in, as much
 * as the function that ends in _workspace_bytes says; those without such a function need none. Calls share nothing, so that any number of
 * threads may make them. Results depend neither on the number of threads nor on the instruction set.
 */
#ifndef SPARSELIFT_EXCHANGE_H
#define SPARSELIFT_EXCHANGE_H

#include "sparselift_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SL_BAD_BUFFER = SL_INTERNAL + 1 };      /* beside the statuses of sparselift_cpu.h */
enum { SL_WIRE_FLOAT32 = 0, SL_WIRE_FLOAT16, SL_WIRE_BFLOAT16, SL_WIRE_INT8, SL_NUM_WIRES };

/* K ids, contiguous; those outside of [0, rows) are no row. At most 2**31 - 1. */
typedef struct {
    const void* data;
    int64_t count;
    int64_t rows;
    int64_t are_64;            /* else int32 */
} sl_ids;

/* ---------------------------------------------------------------------------------------------------- distinct ids */

/* The distinct ids, ascending, into `distinct`, which has room for K; how many there are into `count`; into `slots` (K,) which of them each
 * id is. Ids that are no row are left out, and have slot -1. */
int64_t sl_dedup_workspace_bytes(const sl_ids* ids, int32_t threads);
sl_status sl_dedup(const sl_ids* ids, int64_t* distinct, int32_t* slots, int64_t* count, void* workspace, int32_t threads);

/* ---------------------------------------------------------------------------------------------------- ids by owner */

/* Bag b has ids [data[b], data[b + 1]). */
typedef struct {
    const void* data;          /* (B + 1,), contiguous */
    int64_t num_bags;
    int64_t are_64;            /* else int32 */
} sl_boundaries;

/* Who owns row i, and which of the owner's rows it is: i / rows_per_owner and i % rows_per_owner, or, modulo, i % count and i / count. */
typedef struct {
    int64_t count;             /* W */
    int64_t rows_per_owner;
    int64_t modulo;
} sl_owners;

/* What comes out. Ids that are no row come last, as row -1, and no owner has them. */
typedef struct {
    int64_t* rows;             /* (K,) the owners' own numbers of the rows, by owner, bag and position */
    int32_t* sources;          /* (K,) where among the given ids each comes from */
    int32_t* places;           /* (K,) the inverse: where each of the given ids has gone */
    int32_t* lengths;          /* (W, B) how many ids each owner has of each bag */
} sl_buckets;

int64_t sl_bucketize_workspace_bytes(const sl_ids* ids, const sl_owners* owners, int32_t threads);
/* SL_BAD_OFFSET for boundaries that do not begin at 0, decrease, or do not end at K; nothing is written then. */
sl_status sl_bucketize(const sl_ids* ids, const sl_boundaries* bags, const sl_owners* owners, const sl_buckets* buckets, void* workspace,
                       int32_t threads);

/* ---------------------------------------------------------------------------------------------------- packed buffers */

/* Rows of one matrix outside of a buffer, and what they are inside. packed_header.h says where. */
typedef struct {
    float* rows;               /* (num_rows, dim), last stride 1 */
    int64_t row_stride;
    int64_t num_rows;
    int64_t dim;
    int64_t wire;              /* SL_WIRE_* */
} sl_part;

/* The size of the buffer, header included; -1 where a part has a negative size, no known wire, or more bytes than a buffer can have. */
int64_t sl_packed_bytes(const sl_part* parts, int64_t num_parts);

/* Header and all rows into a buffer, 16-byte aligned, that has room; and out of one. Unpacking takes nothing from a buffer but elements: a
 * header that is not the one of these parts is SL_BAD_BUFFER, and nothing is written. */
sl_status sl_pack(const sl_part* parts, int64_t num_parts, void* buffer, int64_t buffer_bytes, int32_t isa, int32_t threads);
sl_status sl_unpack(const sl_part* parts, int64_t num_parts, const void* buffer, int64_t buffer_bytes, int32_t isa, int32_t threads);

/* ---------------------------------------------------------------------------------------------------- regrouped columns */

/* Columns of one matrix `from`. */
typedef struct {
    int64_t matrix;
    int64_t column;
} sl_term;

/* Columns [column, column + width) of one matrix `to`, as the sum of these terms, added up in their order; zeros, where there are none. */
typedef struct {
    int64_t matrix;
    int64_t column;
    int64_t width;
    int64_t first_term;
    int64_t num_terms;
} sl_range;

/* Matrices of B rows. One of `to` without data is left out; a term of `from` without data is not added. */
sl_status sl_regroup(const sl_range* ranges, int64_t num_ranges, const sl_term* terms, const sl_matrix* from, const sl_matrix* to,
                     int64_t batch, int32_t isa, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
