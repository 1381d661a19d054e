// float16 and bfloat16 as vectors of float32 and back, in the compiler's own vectors. See half_avx2.h, whose functions and bits these are.

typedef uint16_t Shorts __attribute__((vector_size(8)));
typedef uint32_t Words __attribute__((vector_size(16)));

static inline Shorts load_shorts(const void* p) {
    Shorts x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
static inline void store_shorts(void* p, Shorts x) { __builtin_memcpy(p, &x, sizeof x); }
static inline Shorts load_shorts_part(const void* p, Mask lanes) {
    Shorts x = {0, 0, 0, 0};
    for (int i = 0; i < lanes; ++i) x[i] = static_cast<const uint16_t*>(p)[i];
    return x;
}
static inline void store_shorts_part(void* p, Mask lanes, Shorts x) {
    for (int i = 0; i < lanes; ++i) static_cast<uint16_t*>(p)[i] = x[i];
}

/// The exponent of a float is 112 more. A number below 2^-14 has no leading 1: as a float with one it is 2^-14 too large.
static inline Vec from_float16(Shorts x) {
    const Words wide = __builtin_convertvector(x, Words), size = (wide & 0x7fff) << 13;
    const Words small = reinterpret_cast<Words>(reinterpret_cast<Vec>(size + (113u << 23)) - 0x1p-14f);
    const Words finite = size < 0x400u << 13 ? small : size + (112u << 23);
    const Words infinite = size > 0x7c00u << 13 ? size | 0x7fc00000u : size | 0x7f800000u;      // a NaN becomes a quiet one
    return reinterpret_cast<Vec>((size >= 0x7c00u << 13 ? infinite : finite) | (wide & 0x8000) << 16);
}

/// The spacing of floats from 0.5 on is that of numbers below 2^-14, so a sum with 0.5 rounds to one of these.
static inline Shorts to_float16(Vec x) {
    const Words bits = reinterpret_cast<Words>(x), size = bits & 0x7fffffff;
    const Words small = reinterpret_cast<Words>(reinterpret_cast<Vec>(size) + 0.5f) - 0x3f000000;
    const Words normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    const Words finite = size < 113u << 23 ? small : normal;
    const Words infinite = size > 0x7f800000u ? 0x7e00u | ((size >> 13) & 0x3ffu) : 0x7c00u + (size & 0);
    return __builtin_convertvector((size >= 0x477ff000u ? infinite : finite) | ((bits >> 16) & 0x8000), Shorts);      // from 65520 on
}

static inline Vec from_bfloat16(Shorts x) { return reinterpret_cast<Vec>(__builtin_convertvector(x, Words) << 16); }

static inline Shorts to_bfloat16(Vec x) {
    const Words bits = reinterpret_cast<Words>(x), nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000u ? nearest | 0xffffu : nearest, Shorts);
}
