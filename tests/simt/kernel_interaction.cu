// The interaction's kernels by themselves: two samples of five vectors of 36 columns, all pairs below the diagonal.
#include "cuda/interaction.cuh"
#include "harness.h"

namespace sparselift::cuda {
namespace {

constexpr int kSamples = 2, kVectors = 5, kDim = 36, kPairs = kVectors * (kVectors - 1) / 2, kWidth = kDim + kPairs;

int value(int sample, int vector, int column) { return (sample * 31 + vector * 7 + column * 3) % 9 - 4; }

int grad(int sample, int column) { return (sample * 5 + column) % 7 - 3; }

/// What both kernels read, and the first vector passed on.
struct Given {
    std::vector<float> values, out;
    std::vector<InteractionVector> vectors;
    std::vector<Tile> tiles{{0, 0}, {1, 0}, {1, 1}};
    InteractionArgs args{};

    explicit Given(float* grads) : out(kSamples * kWidth, -77.0f) {
        for (int i = 0; i < kSamples * kVectors * kDim; ++i)
            values.push_back(static_cast<float>(value(i / (kVectors * kDim), i / kDim % kVectors, i % kDim)));
        for (int v = 0; v < kVectors; ++v)
            vectors.push_back({values.data() + v * kDim, grads ? grads + v * kDim : nullptr, kVectors * kDim, kVectors * kDim, 0, v,
                               kDim + v * (v - 1) / 2, 0, 0, 0});
        args = {vectors.data(), tiles.data(), out.data(), kWidth, kSamples, kVectors, 3, 2, kDim, 0, kDim, kPairs, 3, 0, 8};
        args.sample_floats = 8 * kSliceStride + (grads ? kVectors * 8 : 0);
    }
    template <auto kKernel>
    sl_status run() {
        return launch<kKernel>(1, 32, 4 * static_cast<std::size_t>(args.sample_floats) * sizeof(float), nullptr, args);
    }
};

int product(int sample, int i, int j) {
    int sum = 0;
    for (int column = 0; column < kDim; ++column) sum += value(sample, i, column) * value(sample, j, column);
    return sum;
}

Outcome forward() {
    Given given(nullptr);
    Outcome outcome;
    outcome.status = given.run<&interaction_forward_kernel>();
    outcome.right = outcome.status != SL_OK || is_right(given.out, [](std::size_t at) {
        const int sample = static_cast<int>(at) / kWidth, column = static_cast<int>(at) % kWidth;
        if (column < kDim) return value(sample, 0, column);
        int i = 1, pair = column - kDim;
        for (; pair >= i; ++i) pair -= i;
        return product(sample, i, pair);
    });
    return outcome;
}

Outcome backward() {
    std::vector<float> grads(kSamples * kVectors * kDim, -77.0f);
    Given given(grads.data());
    for (int i = 0; i < kSamples * kWidth; ++i) given.out[static_cast<std::size_t>(i)] = static_cast<float>(grad(i / kWidth, i % kWidth));
    Outcome outcome;
    outcome.status = given.run<&interaction_backward_kernel>();
    outcome.right = outcome.status != SL_OK || is_right(grads, [](std::size_t at) {
        const int sample = static_cast<int>(at) / (kVectors * kDim), vector = static_cast<int>(at) / kDim % kVectors;
        const int column = static_cast<int>(at) % kDim;
        int sum = vector == 0 ? grad(sample, column) : 0;
        for (int other = 0; other < kVectors; ++other) {
            const int low = vector < other ? vector : other, high = vector < other ? other : vector;
            if (low != high) sum += grad(sample, kDim + high * (high - 1) / 2 + low) * value(sample, other, column);
        }
        return sum;
    });
    return outcome;
}

}  // namespace

const std::vector<Case> interaction_cases = {{"interaction forward", forward}, {"interaction backward", backward}};

}  // namespace sparselift::cuda
