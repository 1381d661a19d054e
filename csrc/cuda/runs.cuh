// Runs of equal keys among sorted lookups, 32 positions at a time: where each begins, and which piece of it (chunks.cuh) begins where.
#pragma once

#include "args.h"
#include "chunks.cuh"
#include "platform.h"

namespace sparselift::cuda {

/// What one lane knows of its position.
struct RunPosition {
    uint64_t key;
    int32_t run_begin;         // position of the first lookup of the run
    int32_t piece_count;       // lookups of the piece that begins here
    bool begins_piece;
    bool is_long;              // the run has several pieces
};

/// The position where the run of `key` begins, which `position` is in: 32 guesses at a time. All lanes of a warp call it.
__device__ inline int32_t find_run_begin(const RunArgs& args, int32_t position, uint64_t key, int32_t lane) {
    int32_t low = 0, high = position;      // it is in [low, high]
    while (low < high) {
        const int32_t step = (high - low + kWarp - 1) / kWarp;
        const int64_t guess = low + static_cast<int64_t>(lane) * step;
        const unsigned equal = __ballot_sync(kWholeWarp, guess < high && args.keys[guess < high ? guess : high] == key);
        if (equal == 0) {
            low += (high - low - 1) / step * step + 1;
            continue;
        }
        const int32_t first = __ffs(static_cast<int>(equal)) - 1;
        high = low + first * step;
        if (first > 0) low = high - step + 1;
    }
    return low;
}

/// How many positions from `position` on hold `key`, at most `chunk` or up to 31 more. All lanes of a warp call it.
__device__ inline int32_t count_ahead(const RunArgs& args, int32_t position, uint64_t key, int32_t lane) {
    int32_t found = 0;
    while (found < args.chunk) {
        const int64_t at = static_cast<int64_t>(position) + found + lane;
        const unsigned equal = __ballot_sync(kWholeWarp, at < args.count && args.keys[at] == key);
        if (equal != kWholeWarp) return found + __ffs(static_cast<int>(~equal)) - 1;
        found += kWarp;
    }
    return found;
}

/// Lane l describes position first + l. All lanes of a warp call it.
__device__ inline RunPosition read_run(const RunArgs& args, int32_t first, int32_t lane) {
    const int64_t position = static_cast<int64_t>(first) + lane;
    RunPosition at;
    at.key = position < args.count ? args.keys[position] : args.unused;
    const bool is_used = at.key != args.unused;
    uint64_t before = __shfl_up_sync(kWholeWarp, at.key, 1);
    if (lane == 0) before = first > 0 ? args.keys[first - 1] : ~at.key;
    const unsigned heads = __ballot_sync(kWholeWarp, is_used && at.key != before);
    const unsigned used = __ballot_sync(kWholeWarp, is_used);      // the lowest lanes: unused lookups come last

    const uint64_t first_key = __shfl_sync(kWholeWarp, at.key, 0), last_key = __shfl_sync(kWholeWarp, at.key, kWarp - 1);
    const int32_t inherited = (used & ~heads & 1) ? find_run_begin(args, first, first_key, lane) : first;
    const int32_t ahead = used == kWholeWarp ? count_ahead(args, first + kWarp, last_key, lane) : 0;

    const unsigned up_to_here = 2u * (1u << lane) - 1, heads_before = heads & up_to_here, heads_after = heads & ~up_to_here;
    at.run_begin = heads_before ? first + kWarp - 1 - __clz(static_cast<int>(heads_before)) : inherited;
    const int32_t run_end = heads_after ? __ffs(static_cast<int>(heads_after)) - 1 : __popc(used) + ahead;
    const auto since_begin = static_cast<int32_t>(position - at.run_begin);
    const int32_t left = run_end - lane;
    at.begins_piece = is_used && since_begin % args.chunk == 0;
    at.piece_count = left < args.chunk ? left : args.chunk;
    at.is_long = since_begin + left > args.chunk;
    return at;
}

}  // namespace sparselift::cuda
