// The interaction kernels for AVX2 with FMA.
#include <immintrin.h>

#include "interaction.h"

namespace sparselift {
namespace avx2 {

using Vec = __m256;
using Mask = __m256i;
constexpr int kWidth = 8;
constexpr int kRowTile = 6;

static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec splat(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline Vec load_part(const float* p, Mask mask) { return _mm256_maskload_ps(p, mask); }
static inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
static inline void store_part(float* p, Mask mask, Vec x) { _mm256_maskstore_ps(p, mask, x); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Mask mask_for(int64_t lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/// First within pairs, then within fours of rows; then each half of a register holds a column of four rows, and halves are joined.
static inline void transpose(Vec (&tile)[kWidth]) {
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

#include "interaction_body.h"

}  // namespace avx2
}  // namespace sparselift
