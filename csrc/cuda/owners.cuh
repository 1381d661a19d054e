// Distinct ids, and ids by owner: what a stable sort of (value, position) needs around it.
#pragma once

#include "../api/sparselift_exchange.h"
#include "args.h"
#include "platform.h"

namespace sparselift::cuda {

struct IdKeyArgs {
    const void* ids;
    int32_t are_64;
    int32_t count;
    int64_t rows;
    int64_t divisor;           // the key of id i is i / divisor, or i % divisor
    int32_t modulo;
    uint64_t unused;           // the key of what is no row: after all others
    uint64_t* keys;
    uint32_t* positions;
};

__device__ inline int64_t id_at(const void* ids, bool are_64, int64_t i) {
    return are_64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

/// Grid: a thread an id. Bytes: 8 or 4 read, 12 written.
__global__ void __launch_bounds__(kMaxThreads) id_keys_kernel(IdKeyArgs args) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= args.count) return;
    const int64_t id = id_at(args.ids, args.are_64 != 0, i);
    const int64_t key = args.modulo ? id % args.divisor : id / args.divisor;
    args.keys[i] = id >= 0 && id < args.rows ? static_cast<uint64_t>(key) : args.unused;
    args.positions[i] = static_cast<uint32_t>(i);
}

struct DedupArgs {
    const uint64_t* keys;      // sorted
    const uint32_t* positions; // likewise
    const int32_t* ranks;      // of the runs of equal keys
    uint64_t unused;
    int32_t count;
    int64_t* distinct;
    int32_t* slots;
};

/// Grid: a thread a sorted position. Bytes: 16 read, 4 written at the id's own place, 8 a distinct id.
__global__ void __launch_bounds__(kMaxThreads) slots_kernel(DedupArgs args) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= args.count) return;
    const uint64_t key = args.keys[i];
    const bool is_row = key != args.unused;
    args.slots[args.positions[i]] = is_row ? args.ranks[i] : -1;
    if (is_row && (i == 0 || args.keys[i - 1] != key)) args.distinct[args.ranks[i]] = static_cast<int64_t>(key);
}

struct OwnerArgs {
    const void* ids;
    const uint64_t* keys;      // owners, sorted
    const uint32_t* positions; // of ids, ascending within an owner
    const void* offsets;
    int32_t are_64;
    int32_t offsets_are_64;
    int32_t count;
    int32_t num_bags;
    sl_owners owners;
    sl_buckets out;
};

/// Grid: a thread a sorted position. Bytes: 12 read, the id from its own place, 12 written, and 4 at the id's own place.
__global__ void __launch_bounds__(kMaxThreads) owned_rows_kernel(OwnerArgs args) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= args.count) return;
    const uint32_t position = args.positions[i];
    const auto owner = static_cast<int64_t>(args.keys[i]);
    const int64_t id = id_at(args.ids, args.are_64 != 0, position);
    const int64_t row = args.owners.modulo ? id / args.owners.count : id - owner * args.owners.rows_per_owner;
    args.out.rows[i] = owner < args.owners.count ? row : -1;
    args.out.sources[i] = static_cast<int32_t>(position);
    args.out.places[position] = static_cast<int32_t>(i);
}

/// The first sorted position whose (owner, position among the ids) is not less than the given.
__device__ inline int32_t lower_bound(const OwnerArgs& args, uint64_t owner, uint32_t position) {
    int32_t low = 0, high = args.count;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        const uint64_t key = args.keys[middle];
        if (key < owner || (key == owner && args.positions[middle] < position)) low = middle + 1;
        else high = middle;
    }
    return low;
}

/// How many ids of each bag an owner has: two bisections, no atomics. Grid: a thread a bag in x, owners in y.
__global__ void __launch_bounds__(kMaxThreads) owned_lengths_kernel(OwnerArgs args) {
    const int64_t bag = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (bag >= args.num_bags) return;
    const uint64_t owner = blockIdx.y;
    const auto begin = static_cast<uint32_t>(id_at(args.offsets, args.offsets_are_64 != 0, bag));
    const auto end = static_cast<uint32_t>(id_at(args.offsets, args.offsets_are_64 != 0, bag + 1));
    args.out.lengths[static_cast<int64_t>(owner) * args.num_bags + bag] = lower_bound(args, owner, end) - lower_bound(args, owner, begin);
}

}  // namespace sparselift::cuda
