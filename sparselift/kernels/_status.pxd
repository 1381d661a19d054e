# What every extension does with statuses of the C ABI, and with memory for the structs that it fills.

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc

from ._cpu cimport SL_BAD_ARGUMENT, SL_BAD_OFFSET, SL_INTERNAL, SL_NO_MEMORY, SL_OK, sl_error_text, sl_status
from ._exchange cimport SL_BAD_BUFFER


cdef inline int check(sl_status status) except -1:
    """Raises MemoryError, ValueError, ExchangeError, RuntimeError (an internal error) or KernelError, with the text of the call that gave
    the status."""
    if status == SL_OK:
        return 0
    from sparselift.errors import ExchangeError, KernelError
    text = sl_error_text().decode()
    if status == SL_NO_MEMORY:
        raise MemoryError(text)
    if status == SL_BAD_ARGUMENT or status == SL_BAD_OFFSET:
        raise ValueError(text)
    if status == SL_BAD_BUFFER:
        raise ExchangeError(text)
    if status == SL_INTERNAL:
        raise RuntimeError(text)
    raise KernelError(text)


cdef inline int64_t checked_size(int64_t size) except -1:
    """A size of the C ABI. Where it is minus a status, raises as `check` does."""
    if size < 0:
        check(<sl_status>-size)
    return size


cdef inline void* allocate(size_t count, size_t size) except NULL:
    """Zeroed memory for `count` structs, to be freed."""
    cdef void* memory = calloc(count if count > 0 else 1, size)
    if memory == NULL:
        raise MemoryError()
    return memory
