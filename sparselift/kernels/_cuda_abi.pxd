# Mirrors csrc/api/sparselift_cuda.h.

from libc.stdint cimport int32_t, int64_t

from ._cpu cimport sl_feature, sl_index_input, sl_matrix, sl_rule, sl_state, sl_status
from ._exchange cimport sl_boundaries, sl_buckets, sl_ids, sl_owners, sl_part, sl_range, sl_term
from ._interaction cimport sl_interaction


cdef extern from "api/sparselift_cuda.h" nogil:
    enum: SL_OK, SL_BAD_ID, SL_BAD_ARGUMENT, SL_NO_MEMORY
    enum: SL_RULE_ABSENT
    enum: SL_CUDA_STATUS_BYTES

    ctypedef struct sl_cuda_program
    ctypedef struct sl_cuda_batch

    ctypedef struct sl_cuda_table:
        int64_t rows
        int64_t dim
        int32_t dtype
        int32_t coalesce
        int32_t vector_bytes
        int32_t bags_per_group

    ctypedef struct sl_cuda_shape:
        int32_t vector_bytes
        int32_t block_threads
        int32_t bags_per_group
        int32_t loads_in_flight
        int32_t chunk_lookups

    ctypedef struct sl_cuda_fault:
        int64_t feature
        int64_t position
        int64_t value
        int64_t previous
        int64_t count
        int32_t status

    ctypedef struct sl_cuda_context:
        void* stream
        void* status
        sl_cuda_fault* fault
        void* workspace
        int64_t workspace_bytes

    ctypedef struct sl_cuda_weights:
        const void* data
        sl_state state

    ctypedef struct sl_cuda_segment:
        const sl_cuda_batch* batch
        const sl_matrix* grads
        const float* scales

    const char* sl_error_text()
    sl_status sl_cuda_check_device()
    int32_t sl_cuda_device_type()
    sl_status sl_cuda_fault_create(sl_cuda_fault** fault)
    void sl_cuda_fault_destroy(sl_cuda_fault* fault)
    sl_status sl_cuda_clear_fault(const sl_cuda_context* context)
    sl_cuda_shape sl_cuda_default_shape()

    sl_status sl_cuda_program_create(const sl_cuda_table* tables, int64_t num_tables, const sl_feature* features, int64_t num_features,
                                     const sl_cuda_shape* shape, sl_cuda_program** program)
    void sl_cuda_program_destroy(sl_cuda_program* program)

    int64_t sl_cuda_batch_bytes(const sl_cuda_program* program, const sl_index_input* inputs)
    sl_status sl_cuda_prepare(const sl_cuda_program* program, const sl_index_input* inputs, void* memory, const sl_cuda_context* context,
                              sl_cuda_batch** batch)
    void sl_cuda_batch_destroy(sl_cuda_batch* batch)
    int64_t sl_cuda_batch_num_bags(const sl_cuda_batch* batch, int64_t feature)
    int64_t sl_cuda_batch_num_lookups(const sl_cuda_batch* batch, int64_t feature)
    sl_status sl_cuda_batch_indices(const sl_cuda_batch* batch, int64_t feature, int64_t* indices, const sl_cuda_context* context)
    sl_status sl_cuda_batch_offsets(const sl_cuda_batch* batch, int64_t feature, int64_t* offsets, const sl_cuda_context* context)

    sl_status sl_cuda_batch_maxima(const sl_cuda_batch* batch, int64_t feature, int64_t* maxima, const sl_cuda_context* context)

    int64_t sl_cuda_forward_workspace_bytes(const sl_cuda_program* program, const sl_cuda_batch* batch)
    sl_status sl_cuda_forward(const sl_cuda_program* program, const sl_cuda_weights* tables, const sl_cuda_batch* batch,
                              const sl_matrix* outputs, const sl_cuda_context* context)
    sl_status sl_cuda_weight_grad(const sl_cuda_program* program, const void* table, const sl_cuda_batch* batch, int64_t feature,
                                  sl_matrix grad, float* out, const sl_cuda_context* context)

    int64_t sl_cuda_update_workspace_bytes(const sl_cuda_program* program, const sl_rule* rules, const sl_cuda_segment* segments,
                                           int64_t num_segments)
    sl_status sl_cuda_update(const sl_cuda_program* program, const sl_cuda_weights* tables, const sl_rule* rules,
                             const sl_cuda_segment* segments, int64_t num_segments, const sl_cuda_context* context)

    int64_t sl_cuda_count_lookups(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments)
    int64_t sl_cuda_gradient_workspace_bytes(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments,
                                             int64_t num_segments)
    sl_status sl_cuda_expanded_grad(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments,
                                    int64_t* ids, float* grads, int64_t* count, const sl_cuda_context* context)
    sl_status sl_cuda_coalesced_grad(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments,
                                     int64_t* rows, float* grads, int64_t* count, const sl_cuda_context* context)


# Mirrors csrc/api/sparselift_cuda_exchange.h.
cdef extern from "api/sparselift_cuda_exchange.h" nogil:
    int64_t sl_cuda_dedup_workspace_bytes(int64_t num_ids)
    sl_status sl_cuda_dedup(const sl_ids* ids, int64_t* distinct, int32_t* slots, int64_t* count, const sl_cuda_context* context)
    int64_t sl_cuda_bucketize_workspace_bytes(int64_t num_ids)
    sl_status sl_cuda_bucketize(const sl_ids* ids, const sl_boundaries* bags, const sl_owners* owners, const sl_buckets* buckets,
                                const sl_cuda_context* context)
    int64_t sl_cuda_pack_workspace_bytes(int64_t num_parts)
    sl_status sl_cuda_pack(const sl_part* parts, int64_t num_parts, void* buffer, int64_t buffer_bytes, const sl_cuda_context* context)
    int64_t sl_cuda_unpack_workspace_bytes(int64_t num_parts)
    sl_status sl_cuda_unpack(const sl_part* parts, int64_t num_parts, const void* buffer, int64_t buffer_bytes,
                             const sl_cuda_context* context)
    sl_status sl_cuda_buffer_fault(const sl_cuda_fault* fault)
    int64_t sl_cuda_regroup_workspace_bytes(int64_t num_ranges, int64_t num_terms)
    sl_status sl_cuda_regroup(const sl_range* ranges, int64_t num_ranges, const sl_term* terms, int64_t num_terms, const sl_matrix* given,
                              const sl_matrix* results, int64_t batch, const sl_cuda_context* context)


# Mirrors csrc/api/sparselift_cuda_interaction.h.
cdef extern from "api/sparselift_cuda_interaction.h" nogil:
    int64_t sl_cuda_interaction_workspace_bytes(const sl_interaction* shape)
    sl_status sl_cuda_interaction_forward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix out,
                                          const sl_cuda_context* context)
    sl_status sl_cuda_interaction_backward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix grad,
                                           const sl_matrix* vector_grads, const sl_cuda_context* context)
