// Stochastic rounding: up or down by chance, so that the mean is the number itself. Chance is a function of a key, a row and a column, and has
// the bits of the CPU kernels (csrc/cpu/noise_body.h); sparselift/kernels/noise.py says what it is.
#pragma once

#include "vectors.cuh"

namespace sparselift::cuda {

/// What the columns of one row draw from: output row + 1 of SplitMix64 from the key on, in two halves.
struct RowNoise {
    uint32_t low, high;
};

__device__ inline RowNoise noise_of(uint64_t key, int64_t row) {
    uint64_t z = key + (static_cast<uint64_t>(row) + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

/// 32 random bits for a column.
__device__ inline uint32_t chance(RowNoise noise, int32_t column) {
    uint32_t x = noise.low + static_cast<uint32_t>(column) * 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) + noise.high;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

/// The bits of one of the two numbers of a dtype around `value`, or of the value itself where it is one. A NaN stays one.
template <typename Weight>
__device__ uint32_t rounded_by_chance(float value, uint32_t random);

template <>
__device__ inline uint32_t rounded_by_chance<__nv_bfloat16>(float value, uint32_t random) {
    const uint32_t bits = __float_as_uint(value), size = bits & 0x7fffffffu, is_finite = size < 0x7f800000u;
    return (bits + (random >> 16) * is_finite) >> 16 | (size > 0x7f800000u ? 0x40u : 0u);
}

/// Half precision is 13 bits shorter from 2^-14 on; below, its numbers are multiples of 2^-24, found as such from multiples of 2^-45.
template <>
__device__ inline uint32_t rounded_by_chance<__half>(float value, uint32_t random) {
    const uint32_t bits = __float_as_uint(value), size = bits & 0x7fffffffu, sign = (bits ^ size) >> 16;
    const bool is_small = size < 113u << 23;
    const uint32_t fixed = is_small ? static_cast<uint32_t>(value * (sign ? -0x1p45f : 0x1p45f)) : size;
    const int dropped = is_small ? 21 : 13;
    const uint32_t kept = ((fixed + (random >> (32 - dropped))) >> dropped) - (is_small ? 0u : 112u << 10);
    const uint32_t rounded = kept < 0x7c00u ? kept : 0x7c00u;
    return sign | (size > 0x7f800000u ? 0x7e00u : rounded);
}

/// kWidth elements by chance, each column from its own.
template <typename Weight, int kWidth>
__device__ inline void store_by_chance(Weight* to, const Values<kWidth>& values, RowNoise noise, int32_t column) {
    if constexpr (kWidth == 1) {
        const auto bits = static_cast<unsigned short>(rounded_by_chance<Weight>(values.v[0], chance(noise, column)));
        memcpy(to, &bits, sizeof bits);
    } else {
        uint32_t words[kWidth / 2];
#pragma unroll
        for (int i = 0; i < kWidth; i += 2) {
            const uint32_t low = rounded_by_chance<Weight>(values.v[i], chance(noise, column + i));
            words[i / 2] = low | rounded_by_chance<Weight>(values.v[i + 1], chance(noise, column + i + 1)) << 16;
        }
        uint4 bits;
        memcpy(&bits, words, sizeof bits);
        store_vector(to, bits);
    }
}

}  // namespace sparselift::cuda
