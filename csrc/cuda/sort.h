// Sorting on the device: the kernels of sort.cuh behind a few calls.
#pragma once

#include <cstdint>

#include "../api/status.h"
#include "platform.h"

namespace sparselift::cuda {

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;       // of a pass
constexpr int kMostPasses = 8;

/// Pairs to be sorted: ascending by the digits that the low `key_bits` bits of a key are in, equal ones in their order. Inputs and outputs are
/// distinct.
struct SortPairs {
    const uint64_t* keys_in;
    uint64_t* keys_out;
    const uint32_t* values_in;
    uint32_t* values_out;
    int64_t count;
    int key_bits;
};

/// What a kernel that makes keys does for the sort to come: counts their digits (DigitCounter), and clears `said` (clear_said).
struct SortStart {
    uint32_t* counts;          // (passes, kDigits), and the passes' tickets behind them: zeroed before that kernel, words_to_clear() in all
    unsigned long long* said;
    int64_t num_said;
    int32_t passes;            // 0: nothing will be sorted
};

int bits_of(uint64_t value);

/// Passes over keys of so many bits. Each is one launch.
int sort_passes(int key_bits);

inline int32_t words_to_clear(const SortStart& start) { return start.passes * (kDigits + 1); }

/// Device memory that a sort of `count` pairs, or of fewer, needs.
int64_t sort_workspace_bytes(int64_t count);

/// Where in its workspace a sort begins.
SortStart start_sort(void* workspace, int64_t count, int key_bits);

/// Sorts on `stream`; nothing waits.
sl_status sort(const SortPairs& pairs, void* workspace, int64_t workspace_bytes, cudaStream_t stream);

/// The same after a kernel has done what SortStart says: two launches less.
sl_status sort_counted(const SortPairs& pairs, void* workspace, int64_t workspace_bytes, cudaStream_t stream);

}  // namespace sparselift::cuda
