# cython: language_level=3
"""Scattered rows as fast as memory gives them, in C. See sparselift.probe."""

from libc.stdint cimport int32_t, int64_t, uintptr_t


cdef extern from "api/sparselift_probe.h" nogil:
    int SL_PROBE_READ
    int SL_PROBE_UPDATE
    float sl_probe_rows(float* table, int64_t dim, const int32_t* ids, int64_t count, int32_t ahead, int32_t access, int32_t threads)


def visit_rows(table, ids, int32_t ahead, bint update, int32_t threads):
    """Read, or add 1 to, the rows `ids` (int32) of a contiguous float32 table (R, 16 n) at a 64-byte boundary."""
    cdef int64_t dim = table.shape[1], count = len(ids)
    cdef uintptr_t rows = table.data_ptr(), first = ids.data_ptr()
    if dim % 16 or rows % 64 or not table.is_contiguous() or not ids.is_contiguous():
        raise ValueError(f"rows must be whole cache lines of a contiguous table; got {tuple(table.shape)} with strides {table.stride()}")
    if count and (int(ids.min()) < 0 or int(ids.max()) >= len(table)):
        raise IndexError(f"ids must be rows of a table of {len(table)}; got {int(ids.min())} to {int(ids.max())}")
    with nogil:
        sl_probe_rows(<float*>rows, dim, <const int32_t*>first, count, ahead, SL_PROBE_UPDATE if update else SL_PROBE_READ, threads)
