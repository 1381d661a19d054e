// Gradient of per-sample weights: out[k] = <grad[bag of k, :], table[ids[k], :]>.
//
// Grid: a group of 1 to 32 lanes a lookup, as many as a row has loads. Bytes: K rows and K gradient rows read (a bag's is mostly cached).
#pragma once

#include "bags.cuh"
#include "rules.cuh"

namespace sparselift::cuda {

constexpr int kDotColumns = 16;

template <typename Weight>
__global__ void __launch_bounds__(kMaxThreads) weight_grad_kernel(WeightGradArgs args) {
    const Columns columns = args.columns;
    const int64_t k = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> columns.lanes_log2;
    const int32_t lanes = 1 << columns.lanes_log2, lane = threadIdx.x & (lanes - 1);
    const int32_t id = k < args.lookups.count ? args.lookups.ids[k] : -1;
    const int32_t bag = id >= 0 && id != args.lookups.padding ? bag_of(args.lookups, static_cast<int32_t>(k)) : -1;
    float total = 0.0f;
    visit_columns<Weight, kDotColumns>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        if (bag < 0) return;
        const auto* row = static_cast<const Weight*>(args.table) + static_cast<int64_t>(id) * columns.dim;
        const float* grad = args.grad + bag * args.grad_stride;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * kWidth * lanes) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int32_t at = column + v * kWidth * lanes;
                if (at >= columns.dim) break;
                const auto weights = load_packed<Weight, kWidth>(row + at);
                const auto grads = load_columns<kWidth>(grad, at, kWidth * lanes, columns.dim, columns.vector_floats);
#pragma unroll
                for (int i = 0; i < kWidth; ++i) total = fmaf(weights.value(i), grads.v[i], total);
            }
        }
    });
    total = group_sum(total, lanes);
    if (k < args.lookups.count && lane == 0) args.out[k] = total;
}

}  // namespace sparselift::cuda
