// Sorting on the device: the only door to CUB, whose headers take a minute to compile. The emulator has its own behind it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "platform.h"

namespace sparselift::cuda {

/// Pairs to be sorted: ascending by the low `key_bits` bits of the key, equal ones in their order. Inputs and outputs are distinct.
template <typename Key>
struct SortPairs {
    const Key* keys_in;
    Key* keys_out;
    const std::uint32_t* values_in;
    std::uint32_t* values_out;
    std::int64_t count;
    int key_bits;
};

/// Device memory that a sort of `count` pairs, or of fewer, needs. Key is uint64_t: each other one would compile for ten seconds more an
/// architecture.
template <typename Key>
std::size_t sort_workspace_bytes(std::int64_t count);

/// Sorts on `stream`; nothing waits. cudaErrorInvalidValue when the workspace is too small.
template <typename Key>
cudaError_t sort_pairs(const SortPairs<Key>& pairs, void* workspace, std::size_t workspace_bytes, cudaStream_t stream);

}  // namespace sparselift::cuda
