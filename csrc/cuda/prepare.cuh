// Validates the ids and bag boundaries of a batch, narrows and copies them, and reports the first fault.
//
// Grid: a thread an id and a boundary in x, features in y. Bytes: 8 K or 4 K of ids and as much of boundaries read, 4 each written.
#pragma once

#include "args.h"
#include "platform.h"

namespace sparselift::cuda {

constexpr int kPositionBits = 33;

/// Orders faults as a reader of the batch would meet them: by feature, boundaries before ids, by position.
__device__ inline unsigned long long fault_key(uint32_t feature, bool is_id, int64_t position) {
    return static_cast<unsigned long long>(feature) << (kPositionBits + 1) | static_cast<unsigned long long>(is_id) << kPositionBits |
           static_cast<unsigned long long>(position);
}

__device__ inline int64_t raw_id(const PrepareFeature& feature, int64_t k) {
    const int64_t at = k * feature.id_stride;
    return feature.ids_are_64 ? static_cast<const int64_t*>(feature.ids)[at] : static_cast<const int32_t*>(feature.ids)[at];
}

/// Boundary `i` of the bags; the last one may be implied.
__device__ inline int64_t raw_boundary(const PrepareFeature& feature, int64_t i) {
    if (i >= feature.num_offsets) return feature.lookups.count;
    const int64_t at = i * feature.offset_stride;
    return feature.offsets_are_64 ? static_cast<const int64_t*>(feature.offsets)[at] : static_cast<const int32_t*>(feature.offsets)[at];
}

__device__ inline void prepare_lookup(const PrepareArgs& args, const PrepareFeature& feature, int64_t k) {
    const Lookups& lookups = feature.lookups;
    const int64_t id = raw_id(feature, k);
    const bool is_row = id >= 0 && id < feature.rows;
    const_cast<int32_t*>(lookups.ids)[k] = is_row ? static_cast<int32_t>(id) : -1;
    if (lookups.weights) const_cast<float*>(lookups.weights)[k] = feature.weights[k * feature.weight_stride];
    if (!is_row) atomicMin(&args.batch_fault->first, fault_key(blockIdx.y, true, k));
}

__device__ inline void prepare_boundary(const PrepareArgs& args, const PrepareFeature& feature, int64_t i) {
    const Lookups& lookups = feature.lookups;
    const int64_t boundary = raw_boundary(feature, i), before = i > 0 ? raw_boundary(feature, i - 1) : 0;
    const bool is_inside = boundary >= 0 && boundary <= lookups.count;
    const_cast<int32_t*>(lookups.offsets)[i] = is_inside ? static_cast<int32_t>(boundary) : -1;
    const bool is_end = (i == 0 && boundary != 0) || (i == lookups.num_bags && boundary != lookups.count);
    if (!is_inside || boundary < before || is_end) atomicMin(&args.batch_fault->first, fault_key(blockIdx.y, false, i));
}

/// 1 / the ids of a bag that count.
__device__ inline void prepare_inverse(const PrepareFeature& feature, int64_t bag) {
    const Lookups& lookups = feature.lookups;
    const int64_t begin = lookups.offsets ? raw_boundary(feature, bag) : bag * lookups.length;
    const int64_t end = lookups.offsets ? raw_boundary(feature, bag + 1) : begin + lookups.length;
    auto counted = static_cast<int32_t>(begin >= 0 && end <= lookups.count ? end - begin : 0);
    if (lookups.padding >= 0 && counted > 0) {
#pragma unroll 1    // several ids at a time take more registers than the rest of the kernel leaves
        for (int64_t k = begin; k < end; ++k) counted -= raw_id(feature, k) == lookups.padding;
    }
    const_cast<float*>(lookups.inverse)[bag] = 1.0f / static_cast<float>(counted > 1 ? counted : 1);
}

/// No maximum comes from anywhere yet. The threads of a feature share the elements.
__device__ inline void clear_maxima(const PrepareFeature& feature, int64_t thread) {
    const int64_t count = static_cast<int64_t>(feature.lookups.num_bags) * feature.dim, threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = thread; i < count; i += threads) feature.lookups.maxima[i] = -1;
}

/// Tells the host about the batch's first fault, unless it has not yet dealt with an earlier batch's.
__device__ inline void report(const PrepareArgs& args, unsigned long long first) {
    if (first == kNoFault || args.status->faulted) return;
    const auto position = static_cast<int64_t>(first & ((1ull << kPositionBits) - 1));
    const bool is_id = (first >> kPositionBits & 1) != 0;
    const auto number = static_cast<int64_t>(first >> (kPositionBits + 1));
    const PrepareFeature& feature = args.features[number];
    sl_cuda_fault* fault = args.fault;
    fault->feature = number;
    fault->position = position;
    fault->value = is_id ? raw_id(feature, position) : raw_boundary(feature, position);
    fault->previous = is_id || position == 0 ? 0 : raw_boundary(feature, position - 1);
    fault->count = feature.lookups.count;
    __threadfence_system();
    *static_cast<volatile int32_t*>(&fault->status) = is_id ? SL_BAD_ID : SL_BAD_OFFSET;
    args.status->faulted = 1;
}

__global__ void __launch_bounds__(kMaxThreads) prepare_kernel(PrepareArgs args) {
    const PrepareFeature& feature = args.features[blockIdx.y];
    const Lookups& lookups = feature.lookups;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < lookups.count) prepare_lookup(args, feature, i);
    if (lookups.offsets && i <= lookups.num_bags) prepare_boundary(args, feature, i);
    if (lookups.inverse && i < lookups.num_bags) prepare_inverse(feature, i);
    if (lookups.maxima) clear_maxima(feature, i);
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    // The last block to get here has seen every other one's faults.
    const bool is_last = atomicAdd(&args.batch_fault->blocks_done, 1u) == gridDim.x * gridDim.y - 1;
    if (is_last) report(args, atomicMin(&args.batch_fault->first, kNoFault));
}

/// Numbers as callers have them: out[i] = from[i], or i * step where `from` is null. Grid: a thread an element.
__global__ void __launch_bounds__(kMaxThreads) widen_kernel(const int32_t* from, int64_t step, int64_t count, int64_t* out) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = from ? from[i] : i * step;
}

}  // namespace sparselift::cuda
