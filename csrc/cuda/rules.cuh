// The formulas of the optimizers, with torch's roundings: see UpdateRule in sparselift/kernels/base.py.
#pragma once

#include "noise.cuh"

namespace sparselift::cuda {

/// The columns of one row that a lane has.
template <typename Weight, int kWidth, int kVectors>
struct RowPart {
    Weight* weights;           // of the whole row
    sl_state state;            // likewise, where the rule keeps elements for each weight
    int32_t column;
    int32_t stripe;
    int32_t dim;
    bool vector_floats;
    int32_t row;
};

template <typename Weight, int kWidth, int kVectors>
__device__ inline void load_weights(const RowPart<Weight, kWidth, kVectors>& part, Values<kWidth> (&weights)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int32_t at = part.column + v * part.stripe;
        weights[v] = at < part.dim ? load_elements<Weight, kWidth>(part.weights + at) : zeros<kWidth>();
    }
}

/// The gradient as the rule wants it.
template <int kWidth, int kVectors>
__device__ inline void adjust(const sl_rule& rule, const Values<kWidth> (&weights)[kVectors], Values<kWidth> (&grads)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            if (rule.maximize) grads[v].v[i] = -grads[v].v[i];
            if (rule.weight_decay != 0.0f) grads[v].v[i] = grads[v].v[i] + rule.weight_decay * weights[v].v[i];
        }
    }
}

template <int kWidth, int kVectors>
__device__ inline float sum_of_squares(const Values<kWidth> (&grads)[kVectors]) {
    float total = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) total = total + grads[v].v[i] * grads[v].v[i];
    }
    return total;
}

/// Sum over each aligned group of `lanes` lanes, in every one of them and in one order. All lanes of a warp call it.
__device__ inline float group_sum(float value, int32_t lanes) {
    for (int32_t distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kWholeWarp, value, distance);
    return value;
}

/// One step on a lane's columns. `scale` is row-wise Adagrad's factor.
template <bool kByChance, typename Weight, int kWidth, int kVectors>
__device__ inline void step_columns(const sl_rule& rule, const RowPart<Weight, kWidth, kVectors>& part, float scale,
                                    Values<kWidth> (&weights)[kVectors], const Values<kWidth> (&grads)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int32_t at = part.column + v * part.stripe;
        if (at >= part.dim) continue;
        Values<kWidth>& w = weights[v];
        const Values<kWidth>& g = grads[v];
        if (rule.kind == SL_ADAGRAD) {
            Values<kWidth> sums = load_columns<kWidth>(part.state.first, at, part.stripe, part.dim, part.vector_floats);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                sums.v[i] = sums.v[i] + g.v[i] * g.v[i];
                w.v[i] = fmaf(-rule.lr, g.v[i] / (sqrtf(sums.v[i]) + rule.eps), w.v[i]);
            }
            store_columns<kWidth>(part.state.first, at, part.stripe, part.dim, sums, part.vector_floats);
        } else if (rule.kind == SL_ADAM) {
            Values<kWidth> first = load_columns<kWidth>(part.state.first, at, part.stripe, part.dim, part.vector_floats);
            Values<kWidth> second = load_columns<kWidth>(part.state.second, at, part.stripe, part.dim, part.vector_floats);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                first.v[i] = first.v[i] + (g.v[i] - first.v[i]) * rule.first_gain;
                second.v[i] = second.v[i] + (g.v[i] * g.v[i] - second.v[i]) * rule.second_gain;
                w.v[i] = w.v[i] + -rule.lr * (first.v[i] / (sqrtf(second.v[i]) + rule.eps));
            }
            store_columns<kWidth>(part.state.first, at, part.stripe, part.dim, first, part.vector_floats);
            store_columns<kWidth>(part.state.second, at, part.stripe, part.dim, second, part.vector_floats);
        } else {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) w.v[i] = rule.kind == SL_SGD ? fmaf(-rule.lr, g.v[i], w.v[i]) : w.v[i] + g.v[i] * scale;
        }
        if constexpr (kByChance) store_by_chance(part.weights + at, w, noise_of(rule.noise_key, part.row), at);
        else store_elements<Weight, kWidth>(part.weights + at, w);
    }
}

}  // namespace sparselift::cuda
