// What a kernel that makes keys does for their sort (SortStart): it counts their digits, for every pass.
#pragma once

#include "args.h"
#include "platform.h"

namespace sparselift::cuda {

constexpr int kKeysPerThread = 4;          // so that counts are flushed less often than keys are made

__device__ inline int32_t digit_of(uint64_t key, int32_t shift) { return static_cast<int32_t>(key >> shift & (kDigits - 1)); }

/// Zeroes what the tiles of the first pass say. The threads of a grid share it, `thread` of `threads`.
__device__ inline void clear_said(const SortStart& start, int64_t thread, int64_t threads) {
    for (int64_t i = thread; i < start.num_said; i += threads) start.said[i] = 0;
}

/// Counts digits of the keys of a block in shared memory, and adds them to those of all: integers, so the order does not matter. All
/// threads construct it, add any number of keys, and flush.
class DigitCounter {
  public:
    __device__ DigitCounter(const SortStart& start, const Shared<uint32_t>& counts) : start_(start), counts_(counts) {
        for (int32_t i = threadIdx.x; i < start.passes * kDigits; i += blockDim.x) counts.store(i, 0);
        __syncthreads();
    }
    __device__ void add(uint64_t key) const {
        for (int32_t pass = 0; pass < start_.passes; ++pass) counts_.atomic_add(pass * kDigits + digit_of(key, pass * kDigitBits), 1u);
    }
    __device__ void flush() const {
        __syncthreads();
        for (int32_t i = threadIdx.x; i < start_.passes * kDigits; i += blockDim.x) {
            const uint32_t count = counts_.load(i);
            if (count > 0) atomicAdd(start_.counts + i, count);
        }
    }

  private:
    const SortStart& start_;
    const Shared<uint32_t>& counts_;
};

}  // namespace sparselift::cuda
