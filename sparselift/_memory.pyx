# cython: language_level=3
"""Output buffers that are reused when nobody holds them, and huge pages under existing tensors, in C."""

from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int32_t, int64_t, uintptr_t

from sparselift._dlpack cimport exchange_of, sl_dl_exchange, sl_dl_managed

import torch


cdef extern from "api/sparselift_memory.h" nogil:
    int SL_RING_MAX_DIMS
    ctypedef struct sl_ring
    sl_ring* sl_ring_create(int64_t max_idle_bytes)
    void sl_ring_destroy(sl_ring* ring)
    sl_dl_managed* sl_ring_take(sl_ring* ring, const int64_t* shape, int32_t ndim)
    void sl_ring_bytes(sl_ring* ring, int64_t* idle, int64_t* total)
    int64_t sl_huge_bytes(uintptr_t begin, uintptr_t end)
    int32_t sl_collapse(uintptr_t begin, uintptr_t end)
    int32_t sl_split(uintptr_t begin, uintptr_t end)


cdef sl_dl_exchange* exchange = exchange_of(torch.Tensor)


cdef object adopt(sl_dl_managed* managed):
    """A torch tensor that owns `managed`."""
    cdef void* made = NULL
    if exchange == NULL:
        return torch.from_dlpack(PyCapsule_New(managed, "dltensor_versioned", NULL))
    exchange.object_from_managed(managed, &made)
    tensor = <object>made
    Py_DECREF(tensor)      # the call gave us a reference, the cast took another
    return tensor


cdef class Ring:
    """See sparselift.memory.OutputRing."""

    cdef sl_ring* handle

    def __cinit__(self, int64_t max_idle_bytes):
        self.handle = sl_ring_create(max_idle_bytes)
        if self.handle == NULL:
            raise MemoryError()

    def __dealloc__(self):
        sl_ring_destroy(self.handle)

    def take(self, tuple shape):
        cdef int64_t[8] sizes
        cdef int32_t ndim = len(shape), i
        cdef int64_t count = 1
        cdef sl_dl_managed* managed
        if ndim > SL_RING_MAX_DIMS:
            raise ValueError(f"a buffer has at most {SL_RING_MAX_DIMS} dimensions; got {ndim}")
        for i in range(ndim):
            sizes[i] = shape[i]
            if sizes[i] < 0:
                raise ValueError(f"a shape must not be negative; got {shape}")
            count *= sizes[i]
        managed = sl_ring_take(self.handle, sizes, ndim)
        if managed == NULL:
            raise MemoryError(f"no memory for {4 * count} bytes of output")
        return adopt(managed)

    def bytes(self) -> tuple:
        """(idle, total) bytes."""
        cdef int64_t idle = 0, total = 0
        sl_ring_bytes(self.handle, &idle, &total)
        return idle, total


def huge_bytes(uintptr_t begin, uintptr_t end) -> int:
    """Bytes of [begin, end) in huge pages, or -1 where the kernel does not tell."""
    cdef int64_t found
    with nogil:
        found = sl_huge_bytes(begin, end)
    return found


def collapse(uintptr_t begin, uintptr_t end) -> int:
    """Moves [begin, end) into huge pages. 0, or an errno."""
    cdef int32_t failure
    with nogil:
        failure = sl_collapse(begin, end)
    return failure


def split(uintptr_t begin, uintptr_t end) -> int:
    """Breaks the huge pages of [begin, end) up. 0, or an errno."""
    return sl_split(begin, end)
