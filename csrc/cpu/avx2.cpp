// The kernels for AVX2 with FMA and F16C.
#include <immintrin.h>

#include "../api/sparselift_cpu.h"
#include "kernels.h"

namespace sparselift {
namespace avx2 {

using Vec = __m256;
using Mask = __m256i;
constexpr int kWidth = 8;
constexpr int kMaxVectors = 8;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load_part(const float* p, Mask mask) { return _mm256_maskload_ps(p, mask); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store_part(float* p, Mask mask, Vec x) { _mm256_maskstore_ps(p, mask, x); }
inline void stream(float* p, Vec x) { _mm256_stream_ps(p, x); }
inline void fence() { _mm_sfence(); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec sqrt(Vec x) { return _mm256_sqrt_ps(x); }
using Flags = __m256;
inline Flags greater(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Flags same_bits(Vec a, Vec b) {
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline Vec select(Flags flags, Vec a, Vec b) { return _mm256_blendv_ps(b, a, flags); }
inline Vec bits(int32_t x) { return _mm256_castsi256_ps(_mm256_set1_epi32(x)); }
inline float sum(Vec x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Mask mask_for(int64_t lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

#include "half_avx2.h"

typedef uint32_t Words __attribute__((vector_size(32)));
inline Words words_of(Shorts x) { return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x))); }
inline Shorts shorts_of(Words x) {
    const __m256i wide = reinterpret_cast<__m256i>(x);
    return reinterpret_cast<Shorts>(_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
inline Words truncated(Vec x) { return reinterpret_cast<Words>(_mm256_cvttps_epi32(x)); }
inline Vec converted(Words x) { return _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(x)); }

#include "kernel_body.h"

}  // namespace avx2
}  // namespace sparselift
