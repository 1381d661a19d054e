// The kernels for AVX-512 (F, VL, BW, DQ).
#include <immintrin.h>

#include "../api/sparselift_cpu.h"
#include "kernels.h"

namespace sparselift {
namespace avx512 {

using Vec = __m512;
using Mask = __mmask16;
constexpr int kWidth = 16;
constexpr int kMaxVectors = 16;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load_part(const float* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store_part(float* p, Mask mask, Vec x) { _mm512_mask_storeu_ps(p, mask, x); }
inline void stream(float* p, Vec x) { _mm512_stream_ps(p, x); }
inline void fence() { _mm_sfence(); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec sqrt(Vec x) { return _mm512_sqrt_ps(x); }
using Flags = __mmask16;
inline Flags greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Flags same_bits(Vec a, Vec b) { return _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b)); }
inline Vec select(Flags flags, Vec a, Vec b) { return _mm512_mask_blend_ps(flags, b, a); }
inline Vec bits(int32_t x) { return _mm512_castsi512_ps(_mm512_set1_epi32(x)); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline Mask mask_for(int64_t lanes) { return static_cast<Mask>((1u << lanes) - 1); }

#include "half_avx512.h"

typedef uint32_t Words __attribute__((vector_size(64)));
inline Words words_of(Shorts x) { return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x))); }
inline Shorts shorts_of(Words x) { return reinterpret_cast<Shorts>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x))); }
inline Words truncated(Vec x) { return reinterpret_cast<Words>(_mm512_cvttps_epi32(x)); }
inline Vec converted(Words x) { return _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(x)); }

#include "kernel_body.h"

}  // namespace avx512
}  // namespace sparselift
