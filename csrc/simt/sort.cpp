// The host's stand-in for csrc/cuda/sort.cu.
#include "../cuda/sort.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace sparselift::cuda {
namespace {

template <typename Key>
cudaError_t sort(const SortPairs<Key>& pairs, void* workspace, std::size_t workspace_bytes) {
    if (workspace_bytes < sort_workspace_bytes<Key>(pairs.count) || (!workspace && pairs.count)) return cudaErrorInvalidValue;
    constexpr int kKeyBits = 8 * sizeof(Key);
    if (pairs.key_bits < 1 || pairs.key_bits > kKeyBits) return cudaErrorInvalidValue;
    const Key mask = ~Key{0} >> (kKeyBits - pairs.key_bits);
    std::vector<std::int64_t> order(static_cast<std::size_t>(pairs.count));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return (pairs.keys_in[a] & mask) < (pairs.keys_in[b] & mask); });
    for (std::int64_t i = 0; i < pairs.count; ++i) {
        pairs.keys_out[i] = pairs.keys_in[order[static_cast<std::size_t>(i)]];
        pairs.values_out[i] = pairs.values_in[order[static_cast<std::size_t>(i)]];
    }
    return cudaSuccess;
}

}  // namespace

template <typename Key>
std::size_t sort_workspace_bytes(std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(Key);    // unused, but callers that forget it are found
}

template <typename Key>
cudaError_t sort_pairs(const SortPairs<Key>& pairs, void* workspace, std::size_t workspace_bytes, cudaStream_t) {
    return sort(pairs, workspace, workspace_bytes);
}

template std::size_t sort_workspace_bytes<std::uint64_t>(std::int64_t);
template cudaError_t sort_pairs(const SortPairs<std::uint64_t>&, void*, std::size_t, cudaStream_t);

}  // namespace sparselift::cuda
