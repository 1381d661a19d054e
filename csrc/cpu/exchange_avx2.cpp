// The exchange kernels for AVX2 with F16C.
#include <immintrin.h>

#include "exchange.h"

namespace sparselift {
namespace avx2 {

using Vec = __m256;
using Mask = __m256i;
constexpr int kWidth = 8;

static inline Vec splat(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline Vec load_part(const float* p, Mask mask) { return _mm256_maskload_ps(p, mask); }
static inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
static inline void store_part(float* p, Mask mask, Vec x) { _mm256_maskstore_ps(p, mask, x); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

/// The lanes joined by an operation of halves.
template <typename Join>
static inline float joined_lanes(Vec x, const Join& join) {
    const __m128 four = join(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = join(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(join(two, _mm_movehdup_ps(two)));
}
static inline float sum(Vec x) { return joined_lanes(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); }); }
static inline float least(Vec x) { return joined_lanes(x, [](__m128 a, __m128 b) { return _mm_min_ps(a, b); }); }
static inline float greatest(Vec x) { return joined_lanes(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); }); }
static inline Mask mask_for(int64_t lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

#include "half_avx2.h"

/// Of numbers in [0, 255], nearest, ties to even.
static inline void store_bytes(uint8_t* p, Vec x) {
    const __m256i words = _mm256_cvtps_epi32(x);
    const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(shorts, shorts));
}
static inline Vec load_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

#include "exchange_body.h"

}  // namespace avx2
}  // namespace sparselift
