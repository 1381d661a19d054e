// Columns of pooled outputs into the groups that consumers want, and their gradients back.
//
// Grid: groups of 8 lanes, a sample each, in x; ranges of columns in y. A lane takes four columns at a time, of every 32. Bytes: each term
// read once, each result written once. Terms are added in their order.
#pragma once

#include "pack.cuh"

namespace sparselift::cuda {

struct RegroupTerm {
    const float* from;         // the first column
    int64_t stride;
};

struct RegroupRange {
    float* to;
    int64_t stride;
    const RegroupTerm* terms;
    int32_t num_terms;
    int32_t width;
    int32_t in_fours;          // the result and every term
    int32_t reserved;
};

__global__ void __launch_bounds__(kMaxThreads) regroup_kernel(const RegroupRange* ranges, int64_t batch) {
    const RegroupRange& range = ranges[blockIdx.y];
    const int64_t sample = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kRowLanes;
    if (sample >= batch) return;
    const auto lane = static_cast<int32_t>(threadIdx.x % kRowLanes);
    float* const to = range.to + sample * range.stride;
    for (int32_t column = lane * kRowColumns; column < range.width; column += kRowLanes * kRowColumns) {
        Values<kRowColumns> total = zeros<kRowColumns>();
        for (int32_t t = 0; t < range.num_terms; ++t) {
            const RegroupTerm term = range.terms[t];
            const auto values = load_columns(term.from + sample * term.stride, column, range.width, range.in_fours);
#pragma unroll
            for (int i = 0; i < kRowColumns; ++i) total.v[i] = t == 0 ? values.v[i] : total.v[i] + values.v[i];
        }
        store_columns(to, column, range.width, range.in_fours, total);
    }
}

}  // namespace sparselift::cuda
