# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What linear layers do around their products on the CPU, by address: integers in, the lock dropped, the status checked. Arguments are
checked by `epilogue.py`; whoever calls this module directly answers for them. A matrix is (address, row stride in elements).
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from sparselift.kernels._cpu cimport sl_matrix, sl_openmp_runtime, sl_status
from sparselift.kernels._status cimport check


cdef extern from "api/sparselift_epilogue.h" nogil:
    enum: SL_EPILOGUE_ROWS
    sl_status sl_epilogue_forward(sl_matrix out, int64_t rows, int64_t columns, const float* bias, int32_t relu, int32_t isa,
                                  int32_t threads)
    sl_status sl_epilogue_backward(sl_matrix grad, sl_matrix out, sl_matrix masked, float* sums, int64_t rows, int64_t columns,
                                   int32_t isa, int32_t threads)

CHUNK_ROWS = SL_EPILOGUE_ROWS

sl_openmp_runtime()      # found now, so that a later fork is noticed


cdef sl_matrix matrix_of(tuple given):
    cdef uintptr_t address = given[0]
    return sl_matrix(<float*>address, given[1])


def forward(tuple out, int64_t rows, int64_t columns, uintptr_t bias, bint relu, int32_t isa, int32_t threads):
    cdef sl_matrix into = matrix_of(out)
    cdef sl_status status
    with nogil:
        status = sl_epilogue_forward(into, rows, columns, <const float*>bias, relu, isa, threads)
    check(status)


def backward(tuple grad, tuple out, tuple masked, uintptr_t sums, int64_t rows, int64_t columns, int32_t isa, int32_t threads):
    cdef sl_matrix given = matrix_of(grad), result = matrix_of(out), into = matrix_of(masked)
    cdef sl_status status
    with nogil:
        status = sl_epilogue_backward(given, result, into, <float*>sums, rows, columns, isa, threads)
    check(status)
