// Elements of 16 bits, as vectors of float32 in registers. Included by kernel_body.h.
//
// An instruction set defines Shorts and Words, as many lanes of 16 and 32 bits as a Vec has floats; words_of and shorts_of, which go from
// one to the other and take no lane past 0xffff; partial accesses to Shorts, and conversions of half precision.

SL_INLINE Shorts load_shorts(const void* p) {
    Shorts x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

SL_INLINE void store_shorts(void* p, Shorts x) { __builtin_memcpy(p, &x, sizeof x); }

SL_INLINE Vec from_bfloat16(Shorts x) { return reinterpret_cast<Vec>(words_of(x) << 16); }

/// Nearest, ties to even. A NaN stays one.
SL_INLINE Shorts to_bfloat16(Vec x) {
    const Words bits = reinterpret_cast<Words>(x);
    const Words nearest = bits + 0x7fff + ((bits >> 16) & 1);
    return shorts_of((x != x ? bits | 0x400000 : nearest) >> 16);
}

SL_INLINE Vec load(const Float16* p) { return from_float16(load_shorts(p)); }
SL_INLINE Vec load(const BFloat16* p) { return from_bfloat16(load_shorts(p)); }
SL_INLINE Vec load_part(const Float16* p, Mask mask) { return from_float16(load_shorts_part(p, mask)); }
SL_INLINE Vec load_part(const BFloat16* p, Mask mask) { return from_bfloat16(load_shorts_part(p, mask)); }
SL_INLINE void store(Float16* p, Vec x) { store_shorts(p, to_float16(x)); }
SL_INLINE void store(BFloat16* p, Vec x) { store_shorts(p, to_bfloat16(x)); }
SL_INLINE void store_part(Float16* p, Mask mask, Vec x) { store_shorts_part(p, mask, to_float16(x)); }
SL_INLINE void store_part(BFloat16* p, Mask mask, Vec x) { store_shorts_part(p, mask, to_bfloat16(x)); }
