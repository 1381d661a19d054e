// What may be flagged among positions, for ranks (rank.cu).
#pragma once

#include "args.h"
#include "platform.h"

namespace sparselift::cuda {

/// Flags the first lookup of every run of equal keys.
struct RunHeads {
    const uint64_t* keys;
    uint64_t unused;
    __device__ bool operator()(int64_t i) const { return keys[i] != unused && (i == 0 || keys[i - 1] != keys[i]); }
};

/// Flags lookups that add to a row.
struct UsedLookups {
    const uint64_t* keys;
    uint64_t unused;
    __device__ bool operator()(int64_t i) const { return keys[i] != unused; }
};

}  // namespace sparselift::cuda
