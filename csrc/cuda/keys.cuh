// Sort keys of lookups: where their gradients go, and where they come from.
//
// Grid: a thread four lookups in x, sources in y. Bytes a lookup: 4 read, and what finding its bag reads from cache; 20 written.
#pragma once

#include "bags.cuh"
#include "digits.cuh"

namespace sparselift::cuda {

/// Writes the key, the position and the origin of lookup k of a source. The key.
__device__ inline uint64_t make_key(const KeyArgs& args, const Source& source, int32_t k) {
    const Lookups& lookups = source.lookups;
    const int64_t position = source.first + k;
    const int32_t id = lookups.ids[k], bag = bag_of(lookups, k);
    const bool is_used = id >= 0 && id != lookups.padding && bag >= 0 && source.batch_fault->first == kNoFault;
    const uint64_t key = is_used ? static_cast<uint64_t>(source.table) << args.row_bits | static_cast<uint64_t>(id) : args.unused;
    args.keys[position] = key;
    args.positions[position] = static_cast<uint32_t>(position);
    args.origins[position] = Origin{static_cast<int32_t>(blockIdx.y), bag};
    if (position % args.chunk == 0) args.long_runs[position / args.chunk] = 0;
    return key;
}

/// Makes all keys, and begins their sort: counts digits, and clears what tiles will say of them.
__global__ void __launch_bounds__(kMaxThreads) lookup_keys_kernel(KeyArgs args) {
    SL_SHARED(uint32_t, counts, kMostPasses * kDigits);
    const Source& source = args.sources[blockIdx.y];
    const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x, thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const DigitCounter counter(args.sort, counts);
    for (int64_t k = thread; k < source.lookups.count; k += threads) counter.add(make_key(args, source, static_cast<int32_t>(k)));
    counter.flush();
    clear_said(args.sort, blockIdx.y * threads + thread, gridDim.y * threads);
}

}  // namespace sparselift::cuda
