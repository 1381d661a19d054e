// Vectors of AVX2 with FMA and F16C. The other instruction sets have the same functions, and the kernels are written over them.
#pragma once

#include <immintrin.h>

#include "elements.h"

namespace sparselift {
namespace avx2 {

using Vec = __m256;          // kWidth floats
using Flags = __m256;        // a truth a lane
typedef uint32_t Words __attribute__((vector_size(32)));       // as many lanes of 32 bits
typedef uint16_t Shorts __attribute__((vector_size(16)));      // as many lanes of 16 bits
using Mask = __m256i;        // the lanes that a partial access touches: leading ones
constexpr int kWidth = 8;

SL_INLINE Mask mask_for(int64_t lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
SL_INLINE Vec zero() { return _mm256_setzero_ps(); }
SL_INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
SL_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
SL_INLINE Vec load_part(const float* p, Mask mask) { return _mm256_maskload_ps(p, mask); }      // zeros elsewhere
SL_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
SL_INLINE void store_part(float* p, Mask mask, Vec x) { _mm256_maskstore_ps(p, mask, x); }
SL_INLINE void stream(float* p, Vec x) { _mm256_stream_ps(p, x); }                              // past the caches, until a fence
SL_INLINE void fence() { _mm_sfence(); }

SL_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
SL_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
SL_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
SL_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
SL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
SL_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }      // with one rounding or two, whichever is fast
SL_INLINE Vec sqrt(Vec x) { return _mm256_sqrt_ps(x); }
SL_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
SL_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

/// The lanes joined by an operation of halves.
template <typename Join>
SL_INLINE float joined_lanes(Vec x, const Join& join) {
    const __m128 four = join(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = join(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(join(two, _mm_movehdup_ps(two)));
}
SL_INLINE float sum(Vec x) { return joined_lanes(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); }); }
SL_INLINE float least(Vec x) { return joined_lanes(x, [](__m128 a, __m128 b) { return _mm_min_ps(a, b); }); }
SL_INLINE float greatest(Vec x) { return joined_lanes(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); }); }

SL_INLINE Flags greater(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
SL_INLINE Flags same_bits(Vec a, Vec b) {
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
SL_INLINE Vec select(Flags flags, Vec a, Vec b) { return _mm256_blendv_ps(b, a, flags); }

/// The int32 x in every lane.
SL_INLINE Vec bits(int32_t x) { return _mm256_castsi256_ps(_mm256_set1_epi32(x)); }
/// Of floats below 2^31 and not negative; and back.
SL_INLINE Words truncated(Vec x) { return reinterpret_cast<Words>(_mm256_cvttps_epi32(x)); }
SL_INLINE Vec converted(Words x) { return _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(x)); }

/// First within pairs, then within fours of rows; then each half of a register holds a column of four rows, and halves are joined.
SL_INLINE void transpose(Vec (&tile)[kWidth]) {
    Vec pairs[kWidth], fours[kWidth];
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(tile[i], tile[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(tile[i], tile[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < kWidth; i += 4) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m256d a = _mm256_castps_pd(pairs[i + half]), b = _mm256_castps_pd(pairs[i + half + 2]);
            fours[i + 2 * half] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            fours[i + 2 * half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        tile[i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
        tile[4 + i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
    }
}

/// Of numbers in [0, 255], nearest, ties to even.
SL_INLINE void store_bytes(uint8_t* p, Vec x) {
    const __m256i words = _mm256_cvtps_epi32(x);
    const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(shorts, shorts));
}
SL_INLINE Vec load_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// ---------------------------------------------------------------------------------------------------- elements of 16 bits

// The bits are those of torch's conversions of contiguous tensors: rounding to nearest, ties to even, and infinity beyond the largest
// number. A NaN stays one: in float16 with its sign and the upper bits of its payload, in bfloat16 as 0xffff.

/// Which of eight 16-bit lanes a partial access touches: pairs of them are four bytes, which masked instructions take; one may be left over.
struct ShortMask {
    __m128i pairs, single;
    int count;
};

SL_INLINE ShortMask short_mask(Mask mask) {
    const __m128i lanes = _mm_packs_epi32(_mm256_castsi256_si128(mask), _mm256_extracti128_si256(mask, 1));
    const __m128i pairs = _mm_cmpeq_epi32(lanes, _mm_set1_epi32(-1));
    return {pairs, _mm_andnot_si128(pairs, lanes), __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(mask))))};
}

SL_INLINE Shorts load_shorts(const void* p) { return reinterpret_cast<Shorts>(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
SL_INLINE void store_shorts(void* p, Shorts x) { _mm_storeu_si128(static_cast<__m128i*>(p), reinterpret_cast<__m128i>(x)); }

SL_INLINE Shorts load_shorts_part(const void* p, Mask mask) {
    const ShortMask part = short_mask(mask);
    __m128i x = _mm_maskload_epi32(static_cast<const int*>(p), part.pairs);
    if (part.count % 2) x = _mm_or_si128(x, _mm_and_si128(part.single, _mm_set1_epi16(static_cast<const int16_t*>(p)[part.count - 1])));
    return reinterpret_cast<Shorts>(x);
}

SL_INLINE void store_shorts_part(void* p, Mask mask, Shorts x) {
    const ShortMask part = short_mask(mask);
    _mm_maskstore_epi32(static_cast<int*>(p), part.pairs, reinterpret_cast<__m128i>(x));
    if (part.count % 2) static_cast<uint16_t*>(p)[part.count - 1] = x[part.count - 1];
}

SL_INLINE Vec from_float16(Shorts x) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(x)); }
SL_INLINE Shorts to_float16(Vec x) { return reinterpret_cast<Shorts>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

SL_INLINE Vec from_bfloat16(Shorts x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x)), 16));
}

SL_INLINE Shorts to_bfloat16(Vec x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)), 16);
    const __m256i found = _mm256_or_si256(nearest, nan);
    return reinterpret_cast<Shorts>(_mm_packus_epi32(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1)));
}

}  // namespace avx2
}  // namespace sparselift
