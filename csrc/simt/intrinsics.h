// Arithmetic that CUDA has names for.
#pragma once

#include <cmath>
#include <cstdint>

#include "half_types.h"

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t{a} * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }

inline unsigned __float_as_uint(float value) { return sparselift::simt::bits_of(value); }
inline float __uint_as_float(unsigned bits) { return sparselift::simt::float_of(bits); }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }

#define SPARSELIFT_SIMT_MIN_MAX(type)                              \
    constexpr type min(type a, type b) { return b < a ? b : a; }   \
    constexpr type max(type a, type b) { return a < b ? b : a; }
SPARSELIFT_SIMT_MIN_MAX(int)
SPARSELIFT_SIMT_MIN_MAX(unsigned)
SPARSELIFT_SIMT_MIN_MAX(long)
SPARSELIFT_SIMT_MIN_MAX(unsigned long)
SPARSELIFT_SIMT_MIN_MAX(long long)
SPARSELIFT_SIMT_MIN_MAX(unsigned long long)
SPARSELIFT_SIMT_MIN_MAX(float)
SPARSELIFT_SIMT_MIN_MAX(double)
#undef SPARSELIFT_SIMT_MIN_MAX

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
