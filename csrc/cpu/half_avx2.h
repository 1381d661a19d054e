// float16 and bfloat16 as vectors of float32 and back, with AVX2 and F16C. Included inside the namespace of a build, after its Vec and Mask.
//
// The bits are those of torch's conversions of contiguous tensors: rounding to nearest, ties to even, and infinity beyond the largest
// number. A NaN stays one: in float16 with its sign and the upper bits of its payload, in bfloat16 as 0xffff.

/// As many 16-bit lanes as a Vec has floats.
typedef uint16_t Shorts __attribute__((vector_size(16)));

/// Which of eight 16-bit lanes a partial access touches: pairs of them are four bytes, which masked instructions take; one may be left over.
struct ShortMask {
    __m128i pairs, single;
    int count;
};

static inline ShortMask shorts_of(Mask mask) {
    const __m128i lanes = _mm_packs_epi32(_mm256_castsi256_si128(mask), _mm256_extracti128_si256(mask, 1));
    const __m128i pairs = _mm_cmpeq_epi32(lanes, _mm_set1_epi32(-1));
    return {pairs, _mm_andnot_si128(pairs, lanes), __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(mask))))};
}

static inline Shorts load_shorts(const void* p) { return reinterpret_cast<Shorts>(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
static inline void store_shorts(void* p, Shorts x) { _mm_storeu_si128(static_cast<__m128i*>(p), reinterpret_cast<__m128i>(x)); }

static inline Shorts load_shorts_part(const void* p, Mask mask) {
    const ShortMask part = shorts_of(mask);
    __m128i x = _mm_maskload_epi32(static_cast<const int*>(p), part.pairs);
    if (part.count % 2) x = _mm_or_si128(x, _mm_and_si128(part.single, _mm_set1_epi16(static_cast<const int16_t*>(p)[part.count - 1])));
    return reinterpret_cast<Shorts>(x);
}

static inline void store_shorts_part(void* p, Mask mask, Shorts x) {
    const ShortMask part = shorts_of(mask);
    _mm_maskstore_epi32(static_cast<int*>(p), part.pairs, reinterpret_cast<__m128i>(x));
    if (part.count % 2) static_cast<uint16_t*>(p)[part.count - 1] = x[part.count - 1];
}

static inline Vec from_float16(Shorts x) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(x)); }
static inline Shorts to_float16(Vec x) { return reinterpret_cast<Shorts>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

static inline Vec from_bfloat16(Shorts x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x)), 16));
}

static inline Shorts to_bfloat16(Vec x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)), 16);
    const __m256i found = _mm256_or_si256(nearest, nan);
    return reinterpret_cast<Shorts>(_mm_packus_epi32(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1)));
}
