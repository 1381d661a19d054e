/* The C ABI of the CPU kernels: plain structs of pointers, sizes and enums in, a status out.
 *
 * Letters: T tables, F features, B bags of a feature, K ids of a feature, D columns and R rows of a table.
 * Strides are in elements. No function throws, and none allocates but through the handles it is given: a program owns
 * its workspaces, a batch its ids. A program serves one thread at a time, and beside it one that calls sl_prepare and sl_arrange; a batch
 * may be read by any number of threads.
 */
#ifndef SPARSELIFT_CPU_H
#define SPARSELIFT_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t sl_status;

/* SL_NO_MEMORY, and SL_INTERNAL for any other exception inside, are no fault of the caller. */
enum { SL_OK = 0, SL_BAD_ID, SL_BAD_OFFSET, SL_BAD_ARGUMENT, SL_NO_MEMORY, SL_UNSUPPORTED, SL_DEVICE_ERROR, SL_INTERNAL };
enum { SL_FLOAT32 = 0, SL_FLOAT16, SL_BFLOAT16, SL_NUM_DTYPES };      /* of a table's weights */
enum { SL_SUM = 0, SL_MEAN, SL_NONE, SL_MAX };
enum { SL_COALESCE_CHAIN = 0, SL_COALESCE_NONE, SL_COALESCE_SORT, SL_COALESCE_DENSE };
enum { SL_PARTITION_BAG = 0, SL_PARTITION_TABLE };
enum { SL_STORES_AUTO = 0, SL_STORES_CACHED, SL_STORES_STREAMED };
enum { SL_RULE_ABSENT = 0, SL_SGD, SL_ADAGRAD, SL_ROWWISE_ADAGRAD, SL_ADAM };
enum { SL_ISA_PORTABLE = 0, SL_ISA_AVX2, SL_ISA_AVX512, SL_NUM_ISAS };

typedef struct sl_program sl_program;
typedef struct sl_batch sl_batch;

typedef struct {
    int64_t rows;
    int64_t dim;
    int32_t coalesce;
    int32_t partition;
    int32_t prefetch;      /* rows ahead of use; 0: off */
    int32_t dedup;
    int32_t stores;        /* how outputs in whole, aligned cache lines are written */
    int32_t dtype;
} sl_table;

typedef struct {
    int32_t table;
    int32_t pooling;
    int32_t weighted;
    int32_t include_last_offset;
    int64_t padding_idx;   /* -1: none */
} sl_feature;

/* The ids of one feature as the caller has them. */
typedef struct {
    const void* ids;       /* (K,) */
    int64_t num_ids;
    int64_t id_stride;
    int32_t ids_are_64;    /* else int32 */
    int32_t offsets_are_64;
    const void* offsets;   /* (B,), or (B + 1,) with include_last_offset; unread where bag_length > 0 */
    int64_t num_offsets;
    int64_t offset_stride;
    int64_t bag_length;    /* > 0: every bag has that many ids, and K is a multiple of it */
    const float* weights;  /* (K,); unread where the feature is not weighted */
    int64_t weight_stride;
} sl_index_input;

/* The first fault of a batch: an id that is no row, or a bag boundary that is less than `previous`, passes K or does not end there. */
typedef struct {
    int64_t feature;
    int64_t position;
    int64_t value;
    int64_t previous;
} sl_fault;

/* A float32 matrix with last stride 1; data is NULL where there is none. */
typedef struct {
    float* data;
    int64_t row_stride;
} sl_matrix;

typedef struct {
    int32_t kind;
    int32_t maximize;
    float lr;
    float eps;
    float weight_decay;
    float first_gain;      /* Adam: 1 - beta1, 1 - beta2 */
    float second_gain;
    int32_t stochastic;    /* weights of 16 bits are rounded up or down by chance, not to the nearest */
    uint64_t noise_key;    /* what chance is drawn from, with the row and the column: see sparselift/kernels/noise.py */
} sl_rule;

/* What a rule keeps of a table: Adagrad's sums, (R, D); row-wise Adagrad's, (R,); Adam's first and second moments, (R, D) each. */
typedef struct {
    float* first;
    float* second;
} sl_state;

/* The gradient of one backward. */
typedef struct {
    const sl_batch* batch;
    const sl_matrix* grads;    /* (F,) of (B, D) */
    const float* scales;       /* (T,), or NULL: 1 */
} sl_segment;

/* What went wrong in the last call of this thread that did not return SL_OK. */
const char* sl_error_text(void);

int32_t sl_isa_runnable(int32_t isa);
const char* sl_isa_name(int32_t isa);

/* Where parallel regions run: the file of the OpenMP runtime that torch has loaded, or "" (then regions run inline). */
const char* sl_openmp_runtime(void);

/* Runs an empty region and tells how many threads it got. */
int32_t sl_probe_threads(int32_t threads);

sl_status sl_program_create(const sl_table* tables, int64_t num_tables, const sl_feature* features, int64_t num_features,
                            int32_t isa, sl_program** program);
void sl_program_destroy(sl_program* program);
int64_t sl_program_workspace_bytes(const sl_program* program);

/* Validates, narrows and copies the ids of F inputs. SL_BAD_ID and SL_BAD_OFFSET fill `fault`. */
sl_status sl_prepare(sl_program* program, const sl_index_input* inputs, int32_t threads, sl_batch** batch, sl_fault* fault);

/* Does what needs the batch's ids alone, for its forward and its update, on the calling thread alone. Results are the same bits without it. */
sl_status sl_arrange(sl_program* program, sl_batch* batch);
void sl_batch_destroy(sl_batch* batch);
int64_t sl_batch_bytes(const sl_batch* batch);
int64_t sl_batch_num_bags(const sl_batch* batch, int64_t feature);
int64_t sl_batch_num_lookups(const sl_batch* batch, int64_t feature);
void sl_batch_indices(const sl_batch* batch, int64_t feature, int64_t* indices);      /* (K,) */
void sl_batch_offsets(const sl_batch* batch, int64_t feature, int64_t* offsets);      /* (B + 1,) */

/* (B, D) positions of the ids whose rows gave the maxima in the last forward; -1 where none did, or before one. SL_MAX only. */
void sl_batch_maxima(const sl_batch* batch, int64_t feature, int64_t* positions);

/* Pooled rows into F outputs (B, D). Features with SL_MAX note in the batch where their maxima came from, for the gradients below. */
sl_status sl_forward(sl_program* program, const void* const* tables, const sl_batch* batch, const sl_matrix* outputs,
                     int32_t threads);

/* out[k] = <grad[bag of k], table[id of k]>, 0 for padding. */
sl_status sl_weight_grad(sl_program* program, const void* table, const sl_batch* batch, int64_t feature, sl_matrix grad, float* out,
                         int32_t threads);

/* One step of the rules on every row that the segments touch. SL_COALESCE_NONE is for SGD on SL_FLOAT32 alone. */
sl_status sl_update(sl_program* program, void* const* tables, const sl_state* states, const sl_rule* rules,
                    const sl_segment* segments, int64_t num_segments, int32_t threads);

/* How many rows the two functions below write. */
sl_status sl_count_lookups(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments, int64_t* count);
sl_status sl_count_rows(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments, int64_t* count);

/* Ids and (., D) gradients: of every lookup, in order; of every distinct row, ascending. */
sl_status sl_expanded_grad(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments,
                           int64_t* ids, float* grads, int32_t threads);
sl_status sl_coalesced_grad(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments,
                            int64_t* rows, float* grads);

#ifdef __cplusplus
}
#endif

#endif
