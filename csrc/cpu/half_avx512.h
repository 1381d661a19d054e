// float16 and bfloat16 as vectors of float32 and back, with AVX-512 (F, VL, BW). See half_avx2.h, whose functions and bits these are.

typedef uint16_t Shorts __attribute__((vector_size(32)));

static inline Shorts load_shorts(const void* p) { return reinterpret_cast<Shorts>(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
static inline void store_shorts(void* p, Shorts x) { _mm256_storeu_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(x)); }
static inline Shorts load_shorts_part(const void* p, Mask mask) { return reinterpret_cast<Shorts>(_mm256_maskz_loadu_epi16(mask, p)); }
static inline void store_shorts_part(void* p, Mask mask, Shorts x) { _mm256_mask_storeu_epi16(p, mask, reinterpret_cast<__m256i>(x)); }

static inline Vec from_float16(Shorts x) { return _mm512_cvtph_ps(reinterpret_cast<__m256i>(x)); }
static inline Shorts to_float16(Vec x) { return reinterpret_cast<Shorts>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

static inline Vec from_bfloat16(Shorts x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)), 16));
}

static inline Shorts to_bfloat16(Vec x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i found = _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0xffff));
    return reinterpret_cast<Shorts>(_mm512_cvtepi32_epi16(found));
}
