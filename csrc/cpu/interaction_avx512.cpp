// The interaction kernels for AVX-512 (F, VL, BW, DQ).
#include <immintrin.h>

#include "interaction.h"

namespace sparselift {
namespace avx512 {

using Vec = __m512;
using Mask = __mmask16;
constexpr int kWidth = 16;
constexpr int kRowTile = 8;

static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec splat(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline Vec load_part(const float* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
static inline void store_part(float* p, Mask mask, Vec x) { _mm512_mask_storeu_ps(p, mask, x); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Mask mask_for(int64_t lanes) { return static_cast<Mask>((1u << lanes) - 1); }

/// First within pairs, then within fours of rows; then each quarter of a register holds a column of four rows, and quarters are joined.
static inline void transpose(Vec (&tile)[kWidth]) {
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

#include "interaction_body.h"

}  // namespace avx512
}  // namespace sparselift
