#include "sort.h"

#include <cub/device/device_radix_sort.cuh>

namespace sparselift::cuda {

template <typename Key>
std::size_t sort_workspace_bytes(std::int64_t count) {
    std::size_t bytes = 0;
    const Key* keys = nullptr;
    const std::uint32_t* values = nullptr;
    const cudaError_t error = cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, static_cast<Key*>(nullptr), values,
                                                              static_cast<std::uint32_t*>(nullptr), count);
    return error == cudaSuccess ? bytes : 0;
}

template <typename Key>
cudaError_t sort_pairs(const SortPairs<Key>& pairs, void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(workspace, workspace_bytes, pairs.keys_in, pairs.keys_out, pairs.values_in, pairs.values_out,
                                           pairs.count, 0, pairs.key_bits, stream);
}

template std::size_t sort_workspace_bytes<std::uint64_t>(std::int64_t);
template cudaError_t sort_pairs(const SortPairs<std::uint64_t>&, void*, std::size_t, cudaStream_t);

}  // namespace sparselift::cuda
