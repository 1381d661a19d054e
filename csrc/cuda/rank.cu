// Ranks of flagged positions, in order: how many flagged ones come before each. Counts of tiles, their running sum by one warp, and
// ranks within the tiles. For gradients that are handed out and distinct ids; updates need none of it.
#include "rank.h"

namespace sparselift::cuda {
namespace {

constexpr int32_t kTile = 256;      // positions of one warp
constexpr unsigned kThreads = 256;

/// Grid: a warp a tile.
template <typename Flags>
__global__ void __launch_bounds__(kMaxThreads) count_flags_kernel(Flags flags, int32_t count, int32_t* tile_counts) {
    const int64_t tile = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
    const int32_t lane = threadIdx.x % kWarp;
    if (tile * kTile >= count) return;
    int32_t flagged = 0;
    for (int64_t first = tile * kTile; first < (tile + 1) * kTile && first < count; first += kWarp) {
        const int64_t i = first + lane;
        flagged += __popc(__ballot_sync(kWholeWarp, i < count && flags(i)));
    }
    if (lane == 0) tile_counts[tile] = flagged;
}

/// Counts become the flags before each tile. Grid: one warp.
__global__ void __launch_bounds__(kWarp) scan_tiles_kernel(int32_t* tile_counts, int32_t num_tiles, int64_t* total) {
    const auto lane = static_cast<int32_t>(threadIdx.x);
    int32_t before = 0;
    for (int32_t first = 0; first < num_tiles; first += kWarp) {
        const int32_t tile = first + lane;
        const int32_t mine = tile < num_tiles ? tile_counts[tile] : 0;
        int32_t sum = mine;
        for (int32_t distance = 1; distance < kWarp; distance *= 2) {
            const int32_t lower = __shfl_up_sync(kWholeWarp, sum, static_cast<unsigned>(distance));
            if (lane >= distance) sum += lower;
        }
        if (tile < num_tiles) tile_counts[tile] = before + sum - mine;
        before += __shfl_sync(kWholeWarp, sum, kWarp - 1);
    }
    if (lane == 0) *total = before;
}

/// ranks[i]: flagged positions up to and including i, less one. Grid: a warp a tile.
template <typename Flags>
__global__ void __launch_bounds__(kMaxThreads) write_ranks_kernel(Flags flags, int32_t count, const int32_t* tile_offsets, int32_t* ranks) {
    const int64_t tile = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
    const int32_t lane = threadIdx.x % kWarp;
    if (tile * kTile >= count) return;
    int32_t before = tile_offsets[tile];
    for (int64_t first = tile * kTile; first < (tile + 1) * kTile && first < count; first += kWarp) {
        const int64_t i = first + lane;
        const unsigned flagged = __ballot_sync(kWholeWarp, i < count && flags(i)), up_to_here = 2u * (1u << lane) - 1;
        if (i < count) ranks[i] = before + __popc(flagged & up_to_here) - 1;
        before += __popc(flagged);
    }
}

template <typename Flags>
sl_status rank_flagged(const Flags& flags, int64_t count, const RankSpace& space, int64_t* total, cudaStream_t stream) {
    const int64_t tiles = divide_up(count, kTile);
    const auto blocks = static_cast<unsigned>(divide_up(tiles, kThreads / kWarp));
    const auto positions = static_cast<int32_t>(count);
    SL_TRY((launch<&count_flags_kernel<Flags>>(blocks, kThreads, 0, stream, flags, positions, space.tile_counts)));
    SL_TRY(launch<&scan_tiles_kernel>(1, kWarp, 0, stream, space.tile_counts, static_cast<int32_t>(tiles), total));
    return launch<&write_ranks_kernel<Flags>>(blocks, kThreads, 0, stream, flags, positions, space.tile_counts, space.ranks);
}

}  // namespace

RankSpace lay_out_ranks(Layout& layout, int64_t count) {
    RankSpace space{};
    space.ranks = layout.take<int32_t>(count);
    space.tile_counts = layout.take<int32_t>(divide_up(count, kTile));
    return space;
}

sl_status rank(const RunHeads& flags, int64_t count, const RankSpace& space, int64_t* total, cudaStream_t stream) {
    return rank_flagged(flags, count, space, total, stream);
}

sl_status rank(const UsedLookups& flags, int64_t count, const RankSpace& space, int64_t* total, cudaStream_t stream) {
    return rank_flagged(flags, count, space, total, stream);
}

}  // namespace sparselift::cuda
