// The update without a sort by itself: three rows of which each warp of a block has an eighth.
#include "cuda/dense.cuh"
#include "harness.h"

namespace sparselift::cuda {
namespace {

constexpr int kRows = 3, kDim = 8, kLookups = 1900, kChunk = 32;

int row_of(int lookup) { return lookup * lookup % 7 % kRows; }

int grad(int lookup, int column) { return (lookup * 5 + column) % 7 - 3; }

Outcome update() {
    std::vector<float> grads, weights(kRows * kDim, 1.0f);
    std::vector<int32_t> ids;
    for (int k = 0; k < kLookups; ++k) ids.push_back(row_of(k));
    for (int i = 0; i < kLookups * kDim; ++i) grads.push_back(static_cast<float>(grad(i / kDim, i % kDim)));
    const BatchFault fault{kNoFault, 0, 0};
    const Status status{};
    Source source{};
    source.lookups.ids = ids.data();
    source.lookups.num_bags = source.lookups.count = kLookups;
    source.lookups.length = 1;
    source.lookups.padding = -1;
    source.grad = grads.data();
    source.grad_stride = kDim;
    source.batch_fault = &fault;
    source.scale = 1.0f;
    TableUpdate table{};
    table.columns = {kDim, 3, 1, 0, 0};
    table.weights = weights.data();
    table.rule.kind = SL_SGD;
    table.rule.lr = 2.0f;
    const DenseTable dense{0, kRows, 0, 1, 3, kDim};
    Outcome outcome;
    outcome.status = launch<&dense_rows_kernel<float, ApplyRule>>(kRows, kDenseThreads, static_cast<std::size_t>(dense_shared_bytes(dense)), nullptr,
                                                       DenseArgs{&dense, &source, &table, &status, kChunk}, SL_FLOAT32);
    outcome.right = outcome.status != SL_OK || is_right(weights, [](std::size_t at) {
        int sum = 0;
        for (int k = 0; k < kLookups; ++k) sum += row_of(k) == static_cast<int>(at) / kDim ? grad(k, static_cast<int>(at) % kDim) : 0;
        return 1 - 2 * sum;
    });
    return outcome;
}

}  // namespace

const std::vector<Case> dense_cases = {{"dense rows", update}};

}  // namespace sparselift::cuda
