// Vectors for any processor, in the compiler's own. vec_avx2.h says what the functions are; lane by lane, their bits are the same, but those
// of multiply_add.
#pragma once

#include "elements.h"

namespace sparselift {
namespace portable {

typedef float Vec __attribute__((vector_size(16)));
typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Flags __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint16_t Shorts __attribute__((vector_size(8)));
typedef uint8_t Bytes __attribute__((vector_size(4)));
using Mask = int;      // leading lanes
constexpr int kWidth = 4;

SL_INLINE Mask mask_for(int64_t lanes) { return static_cast<Mask>(lanes); }
SL_INLINE Vec zero() { return Vec{0, 0, 0, 0}; }
SL_INLINE Vec splat(float x) { return Vec{x, x, x, x}; }
SL_INLINE Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
SL_INLINE Vec load_part(const float* p, Mask lanes) {
    Vec x = zero();
    for (int i = 0; i < lanes; ++i) x[i] = p[i];
    return x;
}
SL_INLINE void store(float* p, Vec x) { *reinterpret_cast<Unaligned*>(p) = x; }
SL_INLINE void store_part(float* p, Mask lanes, Vec x) {
    for (int i = 0; i < lanes; ++i) p[i] = x[i];
}
SL_INLINE void stream(float* p, Vec x) { store(p, x); }
SL_INLINE void fence() {}

SL_INLINE Vec add(Vec a, Vec b) { return a + b; }
SL_INLINE Vec sub(Vec a, Vec b) { return a - b; }
SL_INLINE Vec mul(Vec a, Vec b) { return a * b; }
SL_INLINE Vec div(Vec a, Vec b) { return a / b; }
/// A call of fmaf where the processor has no such instruction: slow, but the same bits everywhere.
SL_INLINE Vec fma(Vec a, Vec b, Vec c) {
    Vec x;
    for (int i = 0; i < kWidth; ++i) x[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return x;
}
/// A tenth of that.
SL_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
SL_INLINE Vec sqrt(Vec a) {
    Vec x;
    for (int i = 0; i < kWidth; ++i) x[i] = __builtin_sqrtf(a[i]);
    return x;
}
SL_INLINE Vec min(Vec a, Vec b) { return b < a ? b : a; }
SL_INLINE Vec max(Vec a, Vec b) { return b > a ? b : a; }

SL_INLINE float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
SL_INLINE float least(Vec x) {
    const Vec two = min(x, Vec{x[2], x[3], x[2], x[3]});
    return two[1] < two[0] ? two[1] : two[0];
}
SL_INLINE float greatest(Vec x) {
    const Vec two = max(x, Vec{x[2], x[3], x[2], x[3]});
    return two[1] > two[0] ? two[1] : two[0];
}

SL_INLINE Flags greater(Vec a, Vec b) { return a > b; }
SL_INLINE Flags same_bits(Vec a, Vec b) { return reinterpret_cast<Flags>(a) == reinterpret_cast<Flags>(b); }
SL_INLINE Vec select(Flags flags, Vec a, Vec b) { return flags ? a : b; }

SL_INLINE Vec bits(int32_t x) { return reinterpret_cast<Vec>(Flags{x, x, x, x}); }
SL_INLINE Words truncated(Vec x) { return reinterpret_cast<Words>(__builtin_convertvector(x, Flags)); }
SL_INLINE Vec converted(Words x) { return __builtin_convertvector(reinterpret_cast<Flags>(x), Vec); }

SL_INLINE void transpose(Vec (&tile)[kWidth]) {
    const Vec a = tile[0], b = tile[1], c = tile[2], d = tile[3];
    for (int i = 0; i < kWidth; ++i) tile[i] = Vec{a[i], b[i], c[i], d[i]};
}

/// The sum with 1.5 * 2^23 has the number in its last bits.
SL_INLINE void store_bytes(uint8_t* p, Vec x) {
    const Bytes found = __builtin_convertvector(reinterpret_cast<Words>(x + 0x1.8p23f), Bytes);
    __builtin_memcpy(p, &found, sizeof found);
}
SL_INLINE Vec load_bytes(const uint8_t* p) {
    Bytes x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, Vec);
}

// ---------------------------------------------------------------------------------------------------- elements of 16 bits

SL_INLINE Shorts load_shorts(const void* p) {
    Shorts x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
SL_INLINE void store_shorts(void* p, Shorts x) { __builtin_memcpy(p, &x, sizeof x); }
SL_INLINE Shorts load_shorts_part(const void* p, Mask lanes) {
    Shorts x = {0, 0, 0, 0};
    for (int i = 0; i < lanes; ++i) x[i] = static_cast<const uint16_t*>(p)[i];
    return x;
}
SL_INLINE void store_shorts_part(void* p, Mask lanes, Shorts x) {
    for (int i = 0; i < lanes; ++i) static_cast<uint16_t*>(p)[i] = x[i];
}

/// The exponent of a float is 112 more. A number below 2^-14 has no leading 1: as a float with one it is 2^-14 too large.
SL_INLINE Vec from_float16(Shorts x) {
    const Words wide = __builtin_convertvector(x, Words), size = (wide & 0x7fff) << 13;
    const Words small = reinterpret_cast<Words>(reinterpret_cast<Vec>(size + (113u << 23)) - 0x1p-14f);
    const Words finite = size < 0x400u << 13 ? small : size + (112u << 23);
    const Words infinite = size > 0x7c00u << 13 ? size | 0x7fc00000u : size | 0x7f800000u;      // a NaN becomes a quiet one
    return reinterpret_cast<Vec>((size >= 0x7c00u << 13 ? infinite : finite) | (wide & 0x8000) << 16);
}

/// The spacing of floats from 0.5 on is that of numbers below 2^-14, so a sum with 0.5 rounds to one of these.
SL_INLINE Shorts to_float16(Vec x) {
    const Words bits = reinterpret_cast<Words>(x), size = bits & 0x7fffffff;
    const Words small = reinterpret_cast<Words>(reinterpret_cast<Vec>(size) + 0.5f) - 0x3f000000;
    const Words normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    const Words finite = size < 113u << 23 ? small : normal;
    const Words infinite = size > 0x7f800000u ? 0x7e00u | ((size >> 13) & 0x3ffu) : 0x7c00u + (size & 0);
    return __builtin_convertvector((size >= 0x477ff000u ? infinite : finite) | ((bits >> 16) & 0x8000), Shorts);      // from 65520 on
}

SL_INLINE Vec from_bfloat16(Shorts x) { return reinterpret_cast<Vec>(__builtin_convertvector(x, Words) << 16); }

SL_INLINE Shorts to_bfloat16(Vec x) {
    const Words bits = reinterpret_cast<Words>(x), nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000u ? nearest | 0xffffu : nearest, Shorts);
}

}  // namespace portable
}  // namespace sparselift
