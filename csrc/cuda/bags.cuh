// Which lookups make a bag, and which bag a lookup is in.
#pragma once

#include "args.h"
#include "platform.h"

namespace sparselift::cuda {

struct Bounds {
    int32_t begin;
    int32_t end;
    __device__ int32_t count() const { return end - begin; }
};

/// The lookups of a bag; none where its boundaries are wrong.
__device__ inline Bounds bounds_of(const Lookups& lookups, int32_t bag) {
    if (!lookups.offsets) return {bag * lookups.length, (bag + 1) * lookups.length};
    const Bounds bounds{lookups.offsets[bag], lookups.offsets[bag + 1]};
    if (bounds.begin < 0 || bounds.end < bounds.begin) return {0, 0};
    return bounds;
}

/// The bag that holds lookup k, or -1: by bisection, in about log2(B) loads, most of them from the first-level cache.
__device__ inline int32_t bag_of(const Lookups& lookups, int32_t k) {
    if (!lookups.offsets) return k / lookups.length;
    int32_t low = 0, high = lookups.num_bags;      // the last bag that begins at or before k is in [low, high)
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (lookups.offsets[middle] <= k) low = middle;
        else high = middle;
    }
    if (low >= lookups.num_bags) return -1;
    const Bounds bounds = bounds_of(lookups, low);
    return bounds.begin <= k && k < bounds.end ? low : -1;
}

/// The id that does not count in the sum of its bag, or -1. Without pooling, padding gives its row like any other.
__device__ inline int32_t skipped_id(const Lookups& lookups) { return lookups.pooling == SL_NONE ? -1 : lookups.padding; }

/// Lookups that count in the sum of their bag.
__device__ inline int32_t count_of(const Lookups& lookups, Bounds bounds) {
    const int32_t skipped = skipped_id(lookups);
    int32_t counted = 0;
    for (int32_t k = bounds.begin; k < bounds.end; ++k) counted += lookups.ids[k] >= 0 && lookups.ids[k] != skipped;
    return counted;
}

}  // namespace sparselift::cuda
