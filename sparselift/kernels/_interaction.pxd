# Mirrors csrc/api/sparselift_interaction.h.

from libc.stdint cimport int32_t, int64_t

from sparselift.kernels._cpu cimport sl_matrix, sl_status


cdef extern from "api/sparselift_interaction.h" nogil:
    ctypedef struct sl_pair_run:
        int64_t row
        int64_t first
        int64_t count
        int64_t column

    ctypedef struct sl_interaction:
        int64_t batch
        int64_t num_vectors
        int64_t dim
        int64_t passed
        const sl_pair_run* runs
        int64_t num_runs

    int64_t sl_interaction_workspace_bytes(const sl_interaction* shape, int32_t threads)
    sl_status sl_interaction_forward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix out, void* workspace, int32_t isa,
                                     int32_t threads)
    sl_status sl_interaction_backward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix grad,
                                      const sl_matrix* vector_grads, void* workspace, int32_t isa, int32_t threads)
