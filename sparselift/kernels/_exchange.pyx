# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What surrounds an exchange on the CPU, by address: integers in, the lock dropped, the status checked. Every call ends with the number of
an instruction set and of threads. Arguments are checked by `exchange.py`; whoever calls this module directly answers for them.
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free, malloc

from sparselift.kernels._cpu cimport sl_matrix, sl_openmp_runtime, sl_status
from sparselift.kernels._status cimport check

sl_openmp_runtime()      # found now, so that a later fork is noticed


def dedup(uintptr_t ids, int64_t num_ids, bint are_64, int64_t rows, uintptr_t distinct, uintptr_t slots, uintptr_t count, int32_t isa,
          int32_t threads):
    """Distinct ids (int64), which of them each id is (int32), and how many there are (int64). Every instruction set has the same one."""
    cdef sl_ids given = sl_ids(<const void*>ids, num_ids, rows, are_64)
    cdef void* workspace = malloc(sl_dedup_workspace_bytes(&given, threads))
    cdef sl_status status
    if workspace == NULL:
        raise MemoryError()
    with nogil:
        status = sl_dedup(&given, <int64_t*>distinct, <int32_t*>slots, <int64_t*>count, workspace, threads)
        free(workspace)
    check(status)


def bucketize(uintptr_t ids, int64_t num_ids, bint are_64, int64_t rows, uintptr_t bounds, int64_t num_bags, bint bounds_are_64,
              int64_t num_owners, int64_t rows_per_owner, bint modulo, uintptr_t owned_rows, uintptr_t sources, uintptr_t places,
              uintptr_t lengths, int32_t isa, int32_t threads):
    """Rows (int64) by owner, where each came from and went to (int32), and lengths (owners, bags) int32. As for the instruction set, see
    `dedup`."""
    cdef sl_ids given = sl_ids(<const void*>ids, num_ids, rows, are_64)
    cdef sl_boundaries bags = sl_boundaries(<const void*>bounds, num_bags, bounds_are_64)
    cdef sl_owners owners = sl_owners(num_owners, rows_per_owner, modulo)
    cdef sl_buckets buckets = sl_buckets(<int64_t*>owned_rows, <int32_t*>sources, <int32_t*>places, <int32_t*>lengths)
    cdef void* workspace = malloc(sl_bucketize_workspace_bytes(&given, &owners, threads))
    cdef sl_status status
    if workspace == NULL:
        raise MemoryError()
    with nogil:
        status = sl_bucketize(&given, &bags, &owners, &buckets, workspace, threads)
        free(workspace)
    check(status)


def pack(uintptr_t parts, int64_t num_parts, uintptr_t buffer, int64_t buffer_bytes, int32_t isa, int32_t threads):
    """`parts`: an array of sl_part."""
    cdef sl_status status
    with nogil:
        status = sl_pack(<const sl_part*>parts, num_parts, <void*>buffer, buffer_bytes, isa, threads)
    check(status)


def unpack(uintptr_t parts, int64_t num_parts, uintptr_t buffer, int64_t buffer_bytes, int32_t isa, int32_t threads):
    cdef sl_status status
    with nogil:
        status = sl_unpack(<const sl_part*>parts, num_parts, <const void*>buffer, buffer_bytes, isa, threads)
    check(status)


def regroup(uintptr_t ranges, int64_t num_ranges, uintptr_t terms, int64_t num_terms, uintptr_t given, uintptr_t results, int64_t batch,
            int32_t isa, int32_t threads):
    """Arrays of sl_range, sl_term (`num_terms` of them) and, twice, sl_matrix."""
    cdef sl_status status
    with nogil:
        status = sl_regroup(<const sl_range*>ranges, num_ranges, <const sl_term*>terms, <const sl_matrix*>given, <const sl_matrix*>results,
                            batch, isa, threads)
    check(status)
