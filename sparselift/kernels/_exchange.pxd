# Mirrors csrc/api/sparselift_exchange.h.

from libc.stdint cimport int32_t, int64_t

from sparselift.kernels._cpu cimport sl_matrix, sl_status


cdef extern from "api/sparselift_exchange.h" nogil:
    enum: SL_BAD_BUFFER

    ctypedef struct sl_ids:
        const void* data
        int64_t count
        int64_t rows
        int64_t are_64

    ctypedef struct sl_boundaries:
        const void* data
        int64_t num_bags
        int64_t are_64

    ctypedef struct sl_owners:
        int64_t count
        int64_t rows_per_owner
        int64_t modulo

    ctypedef struct sl_buckets:
        int64_t* rows
        int32_t* sources
        int32_t* places
        int32_t* lengths

    ctypedef struct sl_part
    ctypedef struct sl_range
    ctypedef struct sl_term

    int64_t sl_dedup_workspace_bytes(const sl_ids* ids, int32_t threads)
    sl_status sl_dedup(const sl_ids* ids, int64_t* distinct, int32_t* slots, int64_t* count, void* workspace, int32_t threads)
    int64_t sl_bucketize_workspace_bytes(const sl_ids* ids, const sl_owners* owners, int32_t threads)
    sl_status sl_bucketize(const sl_ids* ids, const sl_boundaries* bags, const sl_owners* owners, const sl_buckets* buckets,
                           void* workspace, int32_t threads)
    sl_status sl_pack(const sl_part* parts, int64_t num_parts, void* buffer, int64_t buffer_bytes, int32_t isa, int32_t threads)
    sl_status sl_unpack(const sl_part* parts, int64_t num_parts, const void* buffer, int64_t buffer_bytes, int32_t isa, int32_t threads)
    sl_status sl_regroup(const sl_range* ranges, int64_t num_ranges, const sl_term* terms, const sl_matrix* given, const sl_matrix* results,
                         int64_t batch, int32_t isa, int32_t threads)
