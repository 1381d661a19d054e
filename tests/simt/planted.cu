// One kernel of the shape of the real ones, and what a slip of the pen makes of it. The right one passes under every schedule, and each
// wrong one is caught.
#include "harness.h"

namespace sparselift::cuda {
namespace {

enum class Fault { none, deleted_barrier, off_by_one_row, missing_tail, unaligned_vector, shared_race };

struct BagArgs {
    const float* weight;       // (R, D)
    const int* indices;        // (K,)
    const int* offsets;        // (B + 1,)
    int dim;
};

constexpr int kWarps = 2, kMaxDim = 256;

/// pooled[b, :] = sum of weight[indices[i], :] for i in [offsets[b], offsets[b + 1]).
/// Grid: one block a bag, whose warps take every kWarps-th id each. Lane l owns columns 4l .. 4l + 3 of each 128, and one of the tail's.
template <Fault kFault>
__global__ void bag_sum_kernel(float* pooled, BagArgs args) {
    SL_SHARED(float, partial, kWarps * kMaxDim);
    const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y), bag = static_cast<int>(blockIdx.x);
    const int slot = kFault == Fault::shared_race ? 0 : warp * kMaxDim;
    const bool aligned = args.dim % 4 == 0 || kFault == Fault::unaligned_vector;
    const int vectors = aligned ? args.dim / 4 : 0;
    const int tail = kFault == Fault::missing_tail ? args.dim / 32 * 32 : args.dim;
    for (int v = lane; v < vectors; v += 32) {
        float4 sum{0, 0, 0, 0};
        for (int i = args.offsets[bag] + warp; i < args.offsets[bag + 1]; i += kWarps) {
            const int row = args.indices[i] + (kFault == Fault::off_by_one_row);
            const float4 value = load_vector<float4>(args.weight + static_cast<std::int64_t>(row) * args.dim + 4 * v);
            sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
        }
        partial.store_as(slot + 4 * v, sum);
    }
    for (int column = 4 * vectors + lane; column < tail; column += 32) {
        float sum = 0;
        for (int i = args.offsets[bag] + warp; i < args.offsets[bag + 1]; i += kWarps)
            sum += args.weight[static_cast<std::int64_t>(args.indices[i]) * args.dim + column];
        partial.store(slot + column, sum);
    }
    if (kFault != Fault::deleted_barrier) __syncthreads();
    for (int column = warp * 32 + lane; column < tail; column += kWarps * 32) {
        float sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += partial.load((kFault == Fault::shared_race ? 0 : w * kMaxDim) + column);
        pooled[static_cast<std::int64_t>(bag) * args.dim + column] = sum;
    }
}

/// Small integers, so that sums are exact in any order. The last row is used, and there is an empty bag.
template <Fault kFault, int kDim>
Outcome bag_sum() {
    constexpr int kRows = 11, kBags = 4;
    const std::vector<int> offsets{0, 5, 5, 6, 13}, indices{0, 10, 3, 3, 7, 10, 1, 2, 4, 5, 6, 8, 9};
    std::vector<float> weight(kRows * kDim);
    for (int i = 0; i < kRows * kDim; ++i) weight[static_cast<std::size_t>(i)] = static_cast<float>(i * 37 % 101 - 50);
    const auto expected = [&](int at) {
        float sum = 0;
        for (int i = offsets[static_cast<std::size_t>(at / kDim)]; i < offsets[static_cast<std::size_t>(at / kDim + 1)]; ++i)
            sum += weight[static_cast<std::size_t>(indices[static_cast<std::size_t>(i)] * kDim + at % kDim)];
        return sum;
    };
    return run_and_compare<bag_sum_kernel<kFault>, float>(kBags, {32, kWarps}, 0, kBags * kDim, expected,
                                                          BagArgs{weight.data(), indices.data(), offsets.data(), kDim});
}

}  // namespace

const std::vector<Case> planted_cases = {
    {"bag sum 64", bag_sum<Fault::none, 64>},
    {"bag sum 256", bag_sum<Fault::none, 256>},
    {"bag sum 45", bag_sum<Fault::none, 45>},
    {"bag sum 1", bag_sum<Fault::none, 1>},
    {"planted deleted barrier", bag_sum<Fault::deleted_barrier, 64>},
    {"planted off-by-one row", bag_sum<Fault::off_by_one_row, 64>},
    {"planted missing tail", bag_sum<Fault::missing_tail, 45>},
    {"planted unaligned vector", bag_sum<Fault::unaligned_vector, 45>},
    {"planted shared race", bag_sum<Fault::shared_race, 64>},
};

}  // namespace sparselift::cuda
