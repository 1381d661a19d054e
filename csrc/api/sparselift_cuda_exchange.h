/* The C ABI of what surrounds an exchange of rows between ranks, on a device: sparselift_exchange.h has the structs, and says what comes out.
 *
 * As in sparselift_cuda.h: ids, boundaries, rows, buffers and outputs are device memory, calls only enqueue work, and *_bytes says what
 * workspace a call takes. Arrays of structs are read on the host before a call returns. Of the context, stream and workspace are read.
 */
#ifndef SPARSELIFT_CUDA_EXCHANGE_H
#define SPARSELIFT_CUDA_EXCHANGE_H

#include "sparselift_cuda.h"
#include "sparselift_exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `count` is device memory, too. */
int64_t sl_cuda_dedup_workspace_bytes(int64_t num_ids);
sl_status sl_cuda_dedup(const sl_ids* ids, int64_t* distinct, int32_t* slots, int64_t* count, const sl_cuda_context* context);

/* Boundaries are not looked at on the host: where they are wrong, lengths mean nothing. */
int64_t sl_cuda_bucketize_workspace_bytes(int64_t num_ids);
sl_status sl_cuda_bucketize(const sl_ids* ids, const sl_boundaries* bags, const sl_owners* owners, const sl_buckets* buckets,
                            const sl_cuda_context* context);

int64_t sl_cuda_pack_workspace_bytes(int64_t num_parts);
sl_status sl_cuda_pack(const sl_part* parts, int64_t num_parts, void* buffer, int64_t buffer_bytes, const sl_cuda_context* context);

/* Of the context, status and fault too. A header that is not the one of these parts is written to the fault, unless there is one already;
 * parts whose own entry is right may be written. sl_cuda_buffer_fault puts a fault into words: SL_BAD_BUFFER, or SL_OK where there is none. */
int64_t sl_cuda_unpack_workspace_bytes(int64_t num_parts);
sl_status sl_cuda_unpack(const sl_part* parts, int64_t num_parts, const void* buffer, int64_t buffer_bytes, const sl_cuda_context* context);
sl_status sl_cuda_buffer_fault(const sl_cuda_fault* fault);

int64_t sl_cuda_regroup_workspace_bytes(int64_t num_ranges, int64_t num_terms);
sl_status sl_cuda_regroup(const sl_range* ranges, int64_t num_ranges, const sl_term* terms, int64_t num_terms, const sl_matrix* from,
                          const sl_matrix* to, int64_t batch, const sl_cuda_context* context);

#ifdef __cplusplus
}
#endif

#endif
