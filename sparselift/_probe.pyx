# cython: language_level=3
"""Scattered rows as fast as memory gives them, in C. See sparselift.probe."""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from torch import float32, int32


cdef extern from "api/sparselift_probe.h" nogil:
    int SL_PROBE_READ
    int SL_PROBE_UPDATE
    float sl_probe_rows(float* table, int64_t dim, const int32_t* ids, int64_t count, int32_t ahead, int32_t access, int32_t threads)


def visit_rows(table, ids, int32_t ahead, bint update, int32_t threads):
    cdef int64_t dim = table.shape[1], count = len(ids)
    cdef uintptr_t rows = table.data_ptr(), first = ids.data_ptr()
    if table.dtype is not float32 or not table.is_cpu or dim % 16 or rows % 64 or not table.is_contiguous():
        raise ValueError("rows must be whole cache lines of a contiguous float32 table on the CPU; got "
                         f"{table.dtype} {tuple(table.shape)} with strides {table.stride()} at {rows:#x} on {table.device}")
    if ids.dtype is not int32 or not ids.is_cpu or ids.dim() != 1 or not ids.is_contiguous():
        raise ValueError(f"ids must be a contiguous int32 vector on the CPU; got {ids.dtype} {tuple(ids.shape)} on {ids.device}")
    if count and (int(ids.min()) < 0 or int(ids.max()) >= len(table)):
        raise IndexError(f"ids must be rows of a table of {len(table)}; got {int(ids.min())} to {int(ids.max())}")
    with nogil:
        sl_probe_rows(<float*>rows, dim, <const int32_t*>first, count, ahead, SL_PROBE_UPDATE if update else SL_PROBE_READ, threads)
