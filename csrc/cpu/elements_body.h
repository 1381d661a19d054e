// Elements of 16 bits, read and written as vectors of float32. Included by kernel_body.h and exchange_body.h.

SL_INLINE Vec load(const Float16* p) { return from_float16(load_shorts(p)); }
SL_INLINE Vec load(const BFloat16* p) { return from_bfloat16(load_shorts(p)); }
SL_INLINE Vec load_part(const Float16* p, Mask mask) { return from_float16(load_shorts_part(p, mask)); }
SL_INLINE Vec load_part(const BFloat16* p, Mask mask) { return from_bfloat16(load_shorts_part(p, mask)); }
SL_INLINE void store(Float16* p, Vec x) { store_shorts(p, to_float16(x)); }
SL_INLINE void store(BFloat16* p, Vec x) { store_shorts(p, to_bfloat16(x)); }
SL_INLINE void store_part(Float16* p, Mask mask, Vec x) { store_shorts_part(p, mask, to_float16(x)); }
SL_INLINE void store_part(BFloat16* p, Mask mask, Vec x) { store_shorts_part(p, mask, to_bfloat16(x)); }
