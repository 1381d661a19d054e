# Mirrors csrc/api/sparselift_cpu.h.

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "api/sparselift_cpu.h" nogil:
    ctypedef int32_t sl_status
    enum: SL_OK, SL_BAD_ID, SL_BAD_OFFSET, SL_BAD_ARGUMENT, SL_NO_MEMORY, SL_UNSUPPORTED, SL_INTERNAL
    enum: SL_FLOAT32, SL_FLOAT16, SL_BFLOAT16
    enum: SL_SUM, SL_MEAN, SL_NONE, SL_MAX
    enum: SL_COALESCE_CHAIN, SL_COALESCE_NONE
    enum: SL_PARTITION_BAG, SL_PARTITION_TABLE
    enum: SL_RULE_ABSENT, SL_SGD, SL_ADAGRAD, SL_ROWWISE_ADAGRAD, SL_ADAM
    enum: SL_NUM_ISAS

    ctypedef struct sl_program
    ctypedef struct sl_batch

    ctypedef struct sl_table:
        int64_t rows
        int64_t dim
        int32_t coalesce
        int32_t partition
        int32_t prefetch
        int32_t dedup
        int32_t stores
        int32_t dtype

    ctypedef struct sl_feature:
        int32_t table
        int32_t pooling
        int32_t weighted
        int32_t include_last_offset
        int64_t padding_idx

    ctypedef struct sl_index_input:
        const void* ids
        int64_t num_ids
        int64_t id_stride
        int32_t ids_are_64
        int32_t offsets_are_64
        const void* offsets
        int64_t num_offsets
        int64_t offset_stride
        int64_t bag_length
        const float* weights
        int64_t weight_stride

    ctypedef struct sl_fault:
        int64_t feature
        int64_t position
        int64_t value
        int64_t previous

    ctypedef struct sl_matrix:
        float* data
        int64_t row_stride

    ctypedef struct sl_rule:
        int32_t kind
        int32_t maximize
        float lr
        float eps
        float weight_decay
        float first_gain
        float second_gain
        int32_t stochastic
        uint64_t noise_key

    ctypedef struct sl_state:
        float* first
        float* second

    ctypedef struct sl_segment:
        const sl_batch* batch
        const sl_matrix* grads
        const float* scales

    const char* sl_error_text()
    int32_t sl_isa_runnable(int32_t isa)
    const char* sl_isa_name(int32_t isa)
    const char* sl_openmp_runtime()
    int32_t sl_probe_threads(int32_t threads)

    sl_status sl_program_create(const sl_table* tables, int64_t num_tables, const sl_feature* features, int64_t num_features,
                                int32_t isa, sl_program** program)
    void sl_program_destroy(sl_program* program)
    int64_t sl_program_workspace_bytes(const sl_program* program)

    sl_status sl_prepare(sl_program* program, const sl_index_input* inputs, int32_t threads, sl_batch** batch, sl_fault* fault)
    sl_status sl_arrange(sl_program* program, sl_batch* batch)
    void sl_batch_destroy(sl_batch* batch)
    int64_t sl_batch_bytes(const sl_batch* batch)
    int64_t sl_batch_num_bags(const sl_batch* batch, int64_t feature)
    int64_t sl_batch_num_lookups(const sl_batch* batch, int64_t feature)
    void sl_batch_indices(const sl_batch* batch, int64_t feature, int64_t* indices)
    void sl_batch_offsets(const sl_batch* batch, int64_t feature, int64_t* offsets)
    void sl_batch_maxima(const sl_batch* batch, int64_t feature, int64_t* positions)

    sl_status sl_forward(sl_program* program, const void* const* tables, const sl_batch* batch, const sl_matrix* outputs,
                         int32_t threads)
    sl_status sl_weight_grad(sl_program* program, const void* table, const sl_batch* batch, int64_t feature, sl_matrix grad,
                             float* out, int32_t threads)
    sl_status sl_update(sl_program* program, void* const* tables, const sl_state* states, const sl_rule* rules,
                        const sl_segment* segments, int64_t num_segments, int32_t threads)
    sl_status sl_count_lookups(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments, int64_t* count)
    sl_status sl_count_rows(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments, int64_t* count)
    sl_status sl_expanded_grad(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments,
                               int64_t* ids, float* grads, int32_t threads)
    sl_status sl_coalesced_grad(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments,
                                int64_t* rows, float* grads)
