/* The C ABI of output buffers and huge pages. */
#ifndef SPARSELIFT_MEMORY_H
#define SPARSELIFT_MEMORY_H

#include <stdint.h>

#include "dlpack_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SL_RING_MAX_DIMS = 8 };

typedef struct sl_ring sl_ring;

/* A ring keeps at most `max_idle_bytes` of buffers that came back. NULL when memory is out. */
sl_ring* sl_ring_create(int64_t max_idle_bytes);

/* Buffers that are still out stay valid. */
void sl_ring_destroy(sl_ring* ring);

/* A C-contiguous float32 tensor with undefined contents; its deleter, which any thread may call, gives the buffer back.
 * NULL when memory is out. At most SL_RING_MAX_DIMS dimensions. */
sl_dl_managed* sl_ring_take(sl_ring* ring, const int64_t* shape, int32_t ndim);

void sl_ring_bytes(sl_ring* ring, int64_t* idle, int64_t* total);

/* Bytes in huge pages of [begin, end), or -1 where the kernel does not tell (PAGEMAP_SCAN, Linux 6.7). */
int64_t sl_huge_bytes(uintptr_t begin, uintptr_t end);

/* Asks for huge pages in [begin, end), multiples of 2 MiB: now, by moving what is there. 0, or the errno of the first failure. */
int32_t sl_collapse(uintptr_t begin, uintptr_t end);

/* Splits the huge pages of [begin, end), multiples of 2 MiB, and forbids new ones. 0, or an errno. */
int32_t sl_split(uintptr_t begin, uintptr_t end);

#ifdef __cplusplus
}
#endif

#endif
