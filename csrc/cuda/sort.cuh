// Radix sort of (key, value) pairs: 8 bits of the key a pass, one launch a pass, stable.
//
// Grid: a block a tile of 2,048 pairs, in the order of tickets. A tile ranks its keys, says how many it has of each digit, learns how many
// the tiles before it have by looking back at what those said, and writes its pairs to where they belong, through shared memory, so that
// neighbouring threads write neighbouring pairs. Bytes: 12 read and 12 written a pair and pass. How often each digit comes among all keys
// is counted once, for every pass, by the kernel that makes the keys, or by count_digits_kernel.
#pragma once

#include "digits.cuh"

namespace sparselift::cuda {

constexpr int kSortThreads = kDigits;      // a thread a digit
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kSortItems = 8;              // pairs of a thread
constexpr int kSortTile = kSortThreads * kSortItems;

// What a tile says of a digit: nothing yet (0), how many keys it has, or how many it and all tiles before it have.
constexpr unsigned long long kTileCount = 1ull << 62, kRunningCount = 2ull << 62;

struct RadixPass {
    const uint64_t* keys_in;
    const uint32_t* values_in;
    uint64_t* keys_out;
    uint32_t* values_out;
    const uint32_t* counts;            // (kDigits,) of all keys
    unsigned long long* said;          // (tiles, kDigits), zero
    unsigned long long* said_next;     // the same for the next pass, to be zeroed
    uint32_t* ticket;                  // zero
    int64_t count;
    int32_t shift;
};

/// The keys of one digit in the tiles before `tile`. Those have taken their tickets earlier, so they run, and wait for no later one.
__device__ inline uint32_t count_before(const unsigned long long* said, int64_t tile, int32_t digit) {
    uint32_t before = 0;
    for (int64_t other = tile - 1; other >= 0;) {
        const unsigned long long state = *static_cast<const volatile unsigned long long*>(said + other * kDigits + digit);
        if (state == 0) continue;
        before += static_cast<uint32_t>(state);
        if (state & kRunningCount) break;
        --other;
    }
    return before;
}

/// The values of lower threads of the block, summed. All threads call it.
__device__ inline uint32_t sum_before(uint32_t value, const Shared<uint32_t>& warp_sums) {
    const int32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    uint32_t sum = value;
    for (int32_t distance = 1; distance < kWarp; distance *= 2) {
        const uint32_t lower = __shfl_up_sync(kWholeWarp, sum, static_cast<unsigned>(distance));
        if (lane >= distance) sum += lower;
    }
    if (lane == kWarp - 1) warp_sums.store(warp, sum);
    __syncthreads();
    uint32_t before = sum - value;
    for (int32_t w = 0; w < warp; ++w) before += warp_sums.load(w);
    __syncthreads();
    return before;
}

/// Loads a warp's keys, and ranks each among those of its digit. `seen` (kDigits,) ends as the warp's counts. The keys that there are.
__device__ inline int32_t rank_keys(const RadixPass& pass, int64_t first, const Shared<uint32_t>& seen, uint64_t (&keys)[kSortItems],
                                    uint32_t (&ranks)[kSortItems]) {
    const int32_t lane = threadIdx.x % kWarp;
    int32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kSortItems; ++i) {
        const int64_t at = first + i * kWarp + lane;
        if (first + i * kWarp >= pass.count) break;
        const bool is_there = at < pass.count;
        mine += is_there;
        keys[i] = is_there ? pass.keys_in[at] : 0;
        const int32_t digit = is_there ? digit_of(keys[i], pass.shift) : kDigits;
        const unsigned equal = __match_any_sync(kWholeWarp, digit);
        const int32_t leader = __ffs(static_cast<int>(equal)) - 1;
        uint32_t before = 0;
        if (is_there && lane == leader) {
            before = seen.load(digit);
            seen.store(digit, before + static_cast<uint32_t>(__popc(equal)));
        }
        ranks[i] = __shfl_sync(kWholeWarp, before, leader) + static_cast<uint32_t>(__popc(equal & ((1u << lane) - 1)));
        __syncwarp();
    }
    return mine;
}

__global__ void __launch_bounds__(kSortThreads, 3) radix_pass_kernel(RadixPass pass) {
    SL_SHARED(uint32_t, seen, kSortWarps * kDigits);
    SL_SHARED(uint64_t, sorted_keys, kSortTile);
    SL_SHARED(uint32_t, sorted_values, kSortTile);
    SL_SHARED(uint32_t, shifts, kDigits);      // from the place in the tile to the place among all
    SL_SHARED(uint32_t, warp_sums, kSortWarps);
    SL_SHARED(uint32_t, ticket, 1);
    const auto thread = static_cast<int32_t>(threadIdx.x), digit = thread, warp = thread / kWarp;
    if (thread == 0) ticket.store(0, atomicAdd(pass.ticket, 1u));
    for (int32_t w = 0; w < kSortWarps; ++w) seen.store(w * kDigits + digit, 0);
    __syncthreads();
    const int64_t tile = ticket.load(0), first = tile * kSortTile;
    pass.said_next[tile * kDigits + digit] = 0;

    uint64_t keys[kSortItems];
    uint32_t ranks[kSortItems];
    const int64_t first_of_warp = first + warp * (kSortTile / kSortWarps);
    const int32_t mine = rank_keys(pass, first_of_warp, seen.part(warp * kDigits, kDigits), keys, ranks);
    __syncthreads();

    uint32_t total = 0;
    for (int32_t w = 0; w < kSortWarps; ++w) total += seen.load(w * kDigits + digit);
    volatile unsigned long long* said = pass.said + tile * kDigits + digit;
    *said = (tile == 0 ? kRunningCount : kTileCount) | total;
    const uint32_t first_in_tile = sum_before(total, warp_sums), first_of_all = sum_before(pass.counts[digit], warp_sums);
    const uint32_t before = count_before(pass.said, tile, digit);
    if (tile > 0) *said = kRunningCount | (before + total);
    shifts.store(digit, first_of_all + before - first_in_tile);
    uint32_t place = first_in_tile;
    for (int32_t w = 0; w < kSortWarps; ++w) {
        const uint32_t of_warp = seen.load(w * kDigits + digit);
        seen.store(w * kDigits + digit, place);
        place += of_warp;
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kSortItems; ++i) {
        if (i >= mine) continue;
        const auto to = static_cast<int32_t>(seen.load(warp * kDigits + digit_of(keys[i], pass.shift)) + ranks[i]);
        sorted_keys.store(to, keys[i]);
        sorted_values.store(to, pass.values_in[first_of_warp + i * kWarp + thread % kWarp]);
    }
    __syncthreads();
    for (int32_t i = thread; i < kSortTile && first + i < pass.count; i += kSortThreads) {
        const uint64_t key = sorted_keys.load(i);
        const uint32_t to = shifts.load(digit_of(key, pass.shift)) + static_cast<uint32_t>(i);
        pass.keys_out[to] = key;
        pass.values_out[to] = sorted_values.load(i);
    }
}

/// Grid: a thread four keys. Bytes: 8 a key read.
__global__ void __launch_bounds__(kMaxThreads) count_digits_kernel(const uint64_t* keys, int64_t count, SortStart start) {
    SL_SHARED(uint32_t, counts, kMostPasses * kDigits);
    const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x, thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const DigitCounter counter(start, counts);
    for (int64_t i = thread; i < count; i += threads) counter.add(keys[i]);
    counter.flush();
    clear_said(start, thread, threads);
}

}  // namespace sparselift::cuda
