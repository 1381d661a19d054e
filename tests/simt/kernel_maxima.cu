// Maxima of one long bag by themselves, of sixteen-bit rows whose outputs pairs of lanes write together.
#include <cmath>

#include "cuda/forward.cuh"
#include "harness.h"

namespace sparselift::cuda {
namespace {

constexpr int kRows = 40, kDim = 32, kLookups = 150, kChunk = 32, kCells = (kLookups + kChunk - 1) / kChunk;
constexpr int kNanRow = 39, kLargeRow = 38;

/// The third piece begins with NaNs, and has the largest row of all.
int row_of(int lookup) { return lookup == 2 * kChunk ? kNanRow : lookup == 2 * kChunk + 5 ? kLargeRow : lookup * 7 % kLargeRow; }

int value(int row, int column) { return (row * 11 + column * 5) % 23 - 11 + (row == kLargeRow && column % 2 ? 40 : 0); }

Outcome maxima() {
    std::vector<__half> table;
    for (int i = 0; i < kRows * kDim; ++i)
        table.push_back(__float2half_rn(i / kDim == kNanRow ? NAN : static_cast<float>(value(i / kDim, i % kDim))));
    std::vector<int32_t> ids, offsets{0, kLookups}, from(kDim, -1), positions(2 * kCells * kDim);
    for (int k = 0; k < kLookups; ++k) ids.push_back(row_of(k));
    std::vector<float> out(kDim, -77.0f), partials(2 * kCells * kDim);
    ForwardArgs args{};
    args.chunk = kChunk;
    args.bag_blocks = 1;
    ForwardFeature& feature = args.features[0];
    feature.lookups.ids = ids.data();
    feature.lookups.offsets = offsets.data();
    feature.lookups.maxima = from.data();
    feature.lookups.num_bags = 1;
    feature.lookups.count = kLookups;
    feature.lookups.padding = -1;
    feature.lookups.pooling = SL_MAX;
    feature.columns = {kDim, 2, 1, 1, 1};
    feature.table = table.data();
    feature.out = out.data();
    feature.out_stride = kDim;
    feature.partials = partials.data();
    feature.counts = positions.data();
    feature.bags_per_group = 1;
    Outcome outcome;
    outcome.status = launch<&bag_max_kernel<__half>>(3, 64, 0, nullptr, args);     // one block of bags, two of pieces
    if (outcome.status == SL_OK) outcome.status = launch<&long_maxima_kernel<__half>>(1, 64, 0, nullptr, args);
    if (outcome.status != SL_OK) return outcome;
    std::vector<int> best(kDim, 0);
    for (int column = 0; column < kDim; ++column) {
        for (int k = 1; k < kLookups; ++k) {
            if (row_of(k) != kNanRow && value(row_of(k), column) > value(row_of(best[static_cast<std::size_t>(column)]), column))
                best[static_cast<std::size_t>(column)] = k;
        }
    }
    outcome.right = is_right(from, [&](std::size_t i) { return best[i]; }) &&
                    is_right(out, [&](std::size_t i) { return value(row_of(best[i]), static_cast<int>(i)); });
    return outcome;
}

}  // namespace

const std::vector<Case> maxima_cases = {{"long maxima", maxima}};

}  // namespace sparselift::cuda
