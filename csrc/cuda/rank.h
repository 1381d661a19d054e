// Ranks of flagged positions, for launches of several files.
#pragma once

#include "flags.cuh"
#include "program.h"

namespace sparselift::cuda {

/// Where ranks of `count` positions are made.
struct RankSpace {
    int32_t* ranks;
    int32_t* tile_counts;
};

RankSpace lay_out_ranks(Layout& layout, int64_t count);

/// Ranks of the flagged among `count` positions, and how many are flagged into `total`, device.
sl_status rank(const RunHeads& flags, int64_t count, const RankSpace& space, int64_t* total, cudaStream_t stream);
sl_status rank(const UsedLookups& flags, int64_t count, const RankSpace& space, int64_t* total, cudaStream_t stream);

}  // namespace sparselift::cuda
