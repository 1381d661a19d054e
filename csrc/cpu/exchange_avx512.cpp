// The exchange kernels for AVX-512 (F, VL, BW, DQ).
#include <immintrin.h>

#include "exchange.h"

namespace sparselift {
namespace avx512 {

using Vec = __m512;
using Mask = __mmask16;
constexpr int kWidth = 16;

static inline Vec splat(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline Vec load_part(const float* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
static inline void store_part(float* p, Mask mask, Vec x) { _mm512_mask_storeu_ps(p, mask, x); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
static inline float least(Vec x) { return _mm512_reduce_min_ps(x); }
static inline float greatest(Vec x) { return _mm512_reduce_max_ps(x); }
static inline Mask mask_for(int64_t lanes) { return static_cast<Mask>((1u << lanes) - 1); }

#include "half_avx512.h"

/// Of numbers in [0, 255], nearest, ties to even.
static inline void store_bytes(uint8_t* p, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
static inline Vec load_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#include "exchange_body.h"

}  // namespace avx512
}  // namespace sparselift
