// Sort keys of lookups: where their gradients go, and where they come from.
//
// Grid: a thread a lookup in x, sources in y. Bytes a lookup: 4 read, and what finding its bag reads from cache; 20 written.
#pragma once

#include "bags.cuh"

namespace sparselift::cuda {

__global__ void __launch_bounds__(kMaxThreads) lookup_keys_kernel(KeyArgs args) {
    const Source& source = args.sources[blockIdx.y];
    const Lookups& lookups = source.lookups;
    const int64_t k = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (k >= lookups.count) return;
    const int64_t position = source.first + k;
    const int32_t id = lookups.ids[k], bag = bag_of(lookups, static_cast<int32_t>(k));
    const bool is_used = id >= 0 && id != lookups.padding && bag >= 0 && source.batch_fault->first == kNoFault;
    args.keys[position] = is_used ? static_cast<uint64_t>(source.table) << args.row_bits | static_cast<uint64_t>(id) : args.unused;
    args.positions[position] = static_cast<uint32_t>(position);
    args.origins[position] = Origin{static_cast<int32_t>(blockIdx.y), bag};
    if (args.long_runs && position % args.chunk == 0) args.long_runs[position / args.chunk] = 0;
}

}  // namespace sparselift::cuda
