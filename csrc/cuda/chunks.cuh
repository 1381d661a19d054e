// Long sums in chunks: a bag, or a run of equal keys, of more than `chunk` members is cut from its own beginning into pieces of
// `chunk`, the last one shorter. Different groups of lanes sum the pieces, and one adds up the pieces in order: the result depends
// on the members alone, not on where they lie or on who is first.
//
// Positions are divided into cells of `chunk`. A long sequence is longer than a cell, so in any cell at most one begins, and at most
// one that began earlier has a piece that begins there: two slots a cell hold all pieces.
#pragma once

#include <cstdint>

#include "platform.h"

namespace sparselift::cuda {

__device__ inline int64_t slot_of(int32_t position, bool is_first, int32_t chunk) {
    return 2 * static_cast<int64_t>(position / chunk) + (is_first ? 1 : 0);
}

/// How many cells cover `count` positions.
inline int64_t num_cells(int64_t count, int64_t chunk) { return (count + chunk - 1) / chunk; }

}  // namespace sparselift::cuda
