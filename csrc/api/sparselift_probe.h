/* Reads and updates scattered rows as fast as this machine can, to measure its memory. */
#ifndef SPARSELIFT_PROBE_H
#define SPARSELIFT_PROBE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SL_PROBE_READ = 0, SL_PROBE_UPDATE };

/* Reads every line of the rows `ids`, or adds 1 to every element of them. No id may come twice in an update by several threads.
 *
 * table: (R, dim) float32, 64-byte aligned, dim a multiple of 16. ahead: how many rows before its use a row is prefetched; 0: never.
 * Returns the sum of what was read, so that it must be read.
 */
float sl_probe_rows(float* table, int64_t dim, const int32_t* ids, int64_t count, int32_t ahead, int32_t access, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
