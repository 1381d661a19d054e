// Vectors of AVX-512 (F, VL, BW, DQ). vec_avx2.h says what the functions are; lane by lane, their bits are the same.
#pragma once

#include <immintrin.h>

#include "elements.h"

namespace sparselift {
namespace avx512 {

using Vec = __m512;
using Flags = __mmask16;
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
using Mask = __mmask16;
constexpr int kWidth = 16;

SL_INLINE Mask mask_for(int64_t lanes) { return static_cast<Mask>((1u << lanes) - 1); }
SL_INLINE Vec zero() { return _mm512_setzero_ps(); }
SL_INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
SL_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
SL_INLINE Vec load_part(const float* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
SL_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
SL_INLINE void store_part(float* p, Mask mask, Vec x) { _mm512_mask_storeu_ps(p, mask, x); }
SL_INLINE void stream(float* p, Vec x) { _mm512_stream_ps(p, x); }
SL_INLINE void fence() { _mm_sfence(); }

SL_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
SL_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
SL_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
SL_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
SL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
SL_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }
SL_INLINE Vec sqrt(Vec x) { return _mm512_sqrt_ps(x); }
SL_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
SL_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

SL_INLINE float sum(Vec x) { return _mm512_reduce_add_ps(x); }
SL_INLINE float least(Vec x) { return _mm512_reduce_min_ps(x); }
SL_INLINE float greatest(Vec x) { return _mm512_reduce_max_ps(x); }

SL_INLINE Flags greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
SL_INLINE Flags same_bits(Vec a, Vec b) { return _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b)); }
SL_INLINE Vec select(Flags flags, Vec a, Vec b) { return _mm512_mask_blend_ps(flags, b, a); }

SL_INLINE Vec bits(int32_t x) { return _mm512_castsi512_ps(_mm512_set1_epi32(x)); }
SL_INLINE Words truncated(Vec x) { return reinterpret_cast<Words>(_mm512_cvttps_epi32(x)); }
SL_INLINE Vec converted(Words x) { return _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(x)); }

/// First within pairs, then within fours of rows; then each quarter of a register holds a column of four rows, and quarters are joined.
SL_INLINE void transpose(Vec (&tile)[kWidth]) {
    Vec pairs[kWidth], fours[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(tile[i], tile[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(tile[i], tile[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512d a = _mm512_castps_pd(pairs[i + half]), b = _mm512_castps_pd(pairs[i + half + 2]);
            fours[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            fours[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const Vec even_low = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0x88), odd_low = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0xdd);
        const Vec even_high = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0x88);
        const Vec odd_high = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0xdd);
        tile[i] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
        tile[4 + i] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        tile[8 + i] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        tile[12 + i] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
}

SL_INLINE void store_bytes(uint8_t* p, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
SL_INLINE Vec load_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// ---------------------------------------------------------------------------------------------------- elements of 16 bits

SL_INLINE Shorts load_shorts(const void* p) { return reinterpret_cast<Shorts>(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
SL_INLINE void store_shorts(void* p, Shorts x) { _mm256_storeu_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(x)); }
SL_INLINE Shorts load_shorts_part(const void* p, Mask mask) { return reinterpret_cast<Shorts>(_mm256_maskz_loadu_epi16(mask, p)); }
SL_INLINE void store_shorts_part(void* p, Mask mask, Shorts x) { _mm256_mask_storeu_epi16(p, mask, reinterpret_cast<__m256i>(x)); }

SL_INLINE Vec from_float16(Shorts x) { return _mm512_cvtph_ps(reinterpret_cast<__m256i>(x)); }
SL_INLINE Shorts to_float16(Vec x) { return reinterpret_cast<Shorts>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

SL_INLINE Vec from_bfloat16(Shorts x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)), 16));
}

SL_INLINE Shorts to_bfloat16(Vec x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i found = _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0xffff));
    return reinterpret_cast<Shorts>(_mm512_cvtepi32_epi16(found));
}

}  // namespace avx512
}  // namespace sparselift
