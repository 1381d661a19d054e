// Stochastic rounding: up or down by chance, so that the mean is the number itself. Included by kernel_body.h after elements_body.h.
//
// Chance is a function of a key, a row and a column (see sparselift/kernels/noise.py), so the bits depend on nothing else.

/// What the columns of one row draw from: output row + 1 of SplitMix64 from the key on, in two halves.
struct RowNoise {
    uint32_t low, high;
};

SL_INLINE RowNoise noise_of(uint64_t key, int64_t row) {
    uint64_t z = key + (static_cast<uint64_t>(row) + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

/// 32 random bits for each of the columns from `column` on.
SL_INLINE Words chance(RowNoise noise, int64_t column) {
    Words x;
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) x[i] = static_cast<uint32_t>(i) * 0x9e3779b9u;
    x += noise.low + static_cast<uint32_t>(column) * 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) + noise.high;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

/// All bits where a number is no infinity and no NaN.
SL_INLINE Words finite(Words size) { return reinterpret_cast<Words>(size < 0x7f800000); }

/// One of the two bfloat16 around each number, or the number itself where it is one. What is not finite keeps all its bits: those of a NaN
/// may be among the last.
SL_INLINE Vec round_by_chance(Vec x, Words random, BFloat16) {
    const Words bits = reinterpret_cast<Words>(x), is_finite = finite(bits & 0x7fffffff);
    return reinterpret_cast<Vec>((bits + (random >> 16 & is_finite)) & (0xffff0000 | ~is_finite));
}

/// Likewise for half precision, whose numbers are 13 bits shorter from 2^-14 on and multiples of 2^-24 below, found as such from multiples
/// of 2^-45.
SL_INLINE Vec round_by_chance(Vec x, Words random, Float16) {
    const Words bits = reinterpret_cast<Words>(x), size = bits & 0x7fffffff, is_finite = finite(size);
    const Words normal = (size + (random >> 19 & is_finite)) & (~0x1fffu | ~is_finite);
    const Words is_small = reinterpret_cast<Words>(size < 113u << 23);
    const Words parts = truncated(mul(reinterpret_cast<Vec>(size & is_small), splat(0x1p45f))) + (random >> 11);
    const Vec small = mul(converted(parts >> 21), splat(0x1p-24f));
    const Words rounded = (reinterpret_cast<Words>(small) & is_small) | (normal & ~is_small);
    return reinterpret_cast<Vec>(rounded | (bits ^ size));
}

/// The columns from `column` on of one row, each by its own chance.
template <typename S, typename Weight>
static __attribute__((noinline)) void round_by_chance(Span<S>& values, RowNoise noise, int64_t column, Weight weight) {
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) values.v[i] = round_by_chance(values.v[i], chance(noise, column + i * kWidth), weight);
}
