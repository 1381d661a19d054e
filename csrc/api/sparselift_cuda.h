/* The C ABI of the CUDA kernels: plain structs of pointers, sizes and enums in, a status out. Statuses, enums and structs that the
 * CPU kernels have too are theirs.
 *
 * Letters: T tables, F features, B bags of a feature, K ids of a feature, D columns and R rows of a table. Strides are in elements.
 * Arrays of T or F entries, and what they hold beside data, are read on the host before a call returns. Data (ids, offsets,
 * weights, tables, states, gradients, outputs, workspaces) is device memory, and every call only enqueues work on the stream of
 * its context: no call waits for the device, and none allocates device memory. Functions that end in _bytes say how much
 * workspace or memory the call of that name takes; a size below 0 is minus the status of what went wrong. A program serves one thread at
 * a time.
 */
#ifndef SPARSELIFT_CUDA_H
#define SPARSELIFT_CUDA_H

#include "sparselift_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SL_CUDA_STATUS_BYTES = 64 };
enum { SL_CUDA_MOST_DENSE_ROWS = 2048, SL_CUDA_MOST_DENSE_COLUMNS = 2048 };

typedef struct sl_cuda_program sl_cuda_program;
typedef struct sl_cuda_batch sl_cuda_batch;

/* coalesce: SL_COALESCE_SORT, SL_COALESCE_DENSE (no sort; up to the rows and columns above), or SL_COALESCE_CHAIN: dense where every table
 * of an update is small, so that it needs no sort at all. The bits are the same. The last two are as in sl_cuda_shape, for this table alone;
 * 0: what the program's shape says. */
typedef struct {
    int64_t rows;
    int64_t dim;
    int32_t dtype;
    int32_t coalesce;
    int32_t vector_bytes;
    int32_t bags_per_group;
} sl_cuda_table;

/* How kernels are laid out on the device. 0: what sl_cuda_default_shape says. Two choices change the order of sums: chunk_lookups in bags
 * and rows longer than a chunk, and vector_bytes in the mean square of row-wise Adagrad. */
typedef struct {
    int32_t vector_bytes;      /* of one load of a row: 16 where rows and pointers are aligned, or 4: an element at a time */
    int32_t block_threads;     /* 64, 128, 256 or 512 */
    int32_t bags_per_group;    /* bags that a group of lanes pools one after the other; 0: 4 where bags have one id each, else 1 */
    int32_t loads_in_flight;   /* of one lane: 4 or 8 vectors */
    int32_t chunk_lookups;     /* multiple of 32: longer bags, and rows used more often, are summed in chunks of so many */
} sl_cuda_shape;

/* The first fault of the first batch that had one since it was cleared: an id that is no row, or a bag boundary that is less than
 * `previous`, passes K (`count`) or does not end there. Written by the device; `status` last. */
typedef struct {
    int64_t feature;
    int64_t position;
    int64_t value;
    int64_t previous;
    int64_t count;
    int32_t status;            /* SL_OK, SL_BAD_ID or SL_BAD_OFFSET */
    int32_t reserved;
} sl_cuda_fault;

/* What a call runs on. Since a fault, and until sl_cuda_clear_fault, updates change nothing. */
typedef struct {
    void* stream;
    void* status;              /* device, SL_CUDA_STATUS_BYTES, cleared once before the first call */
    sl_cuda_fault* fault;      /* of sl_cuda_fault_create */
    void* workspace;           /* device, 16-byte aligned */
    int64_t workspace_bytes;
} sl_cuda_context;

typedef struct {
    const void* data;          /* (R, D), contiguous */
    sl_state state;            /* unread by sl_cuda_forward */
} sl_cuda_weights;

/* The gradient of one backward. */
typedef struct {
    const sl_cuda_batch* batch;
    const sl_matrix* grads;    /* (F,) of (B, D) */
    const float* scales;       /* (T,), or NULL: 1 */
} sl_cuda_segment;

/* SL_OK where kernels can run, else SL_UNSUPPORTED and what is missing in sl_error_text. */
sl_status sl_cuda_check_device(void);

/* The DLPack device type of the memory that kernels read: 2 (CUDA), or 1 (CPU) where they were compiled for the emulator. */
int32_t sl_cuda_device_type(void);

/* Host memory that the device can write to. */
sl_status sl_cuda_fault_create(sl_cuda_fault** fault);
void sl_cuda_fault_destroy(sl_cuda_fault* fault);
sl_status sl_cuda_clear_fault(const sl_cuda_context* context);

sl_cuda_shape sl_cuda_default_shape(void);

sl_status sl_cuda_program_create(const sl_cuda_table* tables, int64_t num_tables, const sl_feature* features, int64_t num_features,
                                 const sl_cuda_shape* shape, sl_cuda_program** program);
void sl_cuda_program_destroy(sl_cuda_program* program);

/* Validates, narrows and copies the ids of F inputs into `memory`, 16-byte aligned, which belongs to the batch from then on. Faults
 * are found by the device: ids that are no row are skipped, and bags with wrong boundaries are empty. */
int64_t sl_cuda_batch_bytes(const sl_cuda_program* program, const sl_index_input* inputs);
sl_status sl_cuda_prepare(const sl_cuda_program* program, const sl_index_input* inputs, void* memory, const sl_cuda_context* context,
                          sl_cuda_batch** batch);
void sl_cuda_batch_destroy(sl_cuda_batch* batch);
int64_t sl_cuda_batch_num_bags(const sl_cuda_batch* batch, int64_t feature);
int64_t sl_cuda_batch_num_lookups(const sl_cuda_batch* batch, int64_t feature);

/* (K,), (B + 1,) and, with pooling max, (B, D) device outputs: where in the ids each maximum of the last forward came from, or -1. */
sl_status sl_cuda_batch_indices(const sl_cuda_batch* batch, int64_t feature, int64_t* indices, const sl_cuda_context* context);
sl_status sl_cuda_batch_offsets(const sl_cuda_batch* batch, int64_t feature, int64_t* offsets, const sl_cuda_context* context);
sl_status sl_cuda_batch_maxima(const sl_cuda_batch* batch, int64_t feature, int64_t* maxima, const sl_cuda_context* context);

/* Pooled rows into F outputs (B, D). */
int64_t sl_cuda_forward_workspace_bytes(const sl_cuda_program* program, const sl_cuda_batch* batch);
sl_status sl_cuda_forward(const sl_cuda_program* program, const sl_cuda_weights* tables, const sl_cuda_batch* batch,
                          const sl_matrix* outputs, const sl_cuda_context* context);

/* out[k] = <grad[bag of k], table[id of k]>, 0 for padding. */
sl_status sl_cuda_weight_grad(const sl_cuda_program* program, const void* table, const sl_cuda_batch* batch, int64_t feature,
                              sl_matrix grad, float* out, const sl_cuda_context* context);

/* One step of the rules on every row that the segments touch: nothing, where one of their batches had a fault. */
int64_t sl_cuda_update_workspace_bytes(const sl_cuda_program* program, const sl_rule* rules, const sl_cuda_segment* segments,
                                       int64_t num_segments);
sl_status sl_cuda_update(const sl_cuda_program* program, const sl_cuda_weights* tables, const sl_rule* rules,
                         const sl_cuda_segment* segments, int64_t num_segments, const sl_cuda_context* context);

/* Ids and (., D) gradients of one table: of every lookup, in order; of every distinct row, ascending. The outputs have room for as
 * many as there are lookups (sl_cuda_count_lookups); how many were written goes to `count`, device. */
int64_t sl_cuda_count_lookups(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments);
int64_t sl_cuda_gradient_workspace_bytes(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments,
                                         int64_t num_segments);
sl_status sl_cuda_expanded_grad(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments,
                                int64_t* ids, float* grads, int64_t* count, const sl_cuda_context* context);
sl_status sl_cuda_coalesced_grad(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments,
                                 int64_t* rows, float* grads, int64_t* count, const sl_cuda_context* context);

#ifdef __cplusplus
}
#endif

#endif
