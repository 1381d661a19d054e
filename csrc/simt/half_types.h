// CUDA's 16-bit floats: storage and conversions to and from float, rounding to nearest even. No arithmetic: kernels accumulate in float.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector_types.h"

namespace sparselift::simt {

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// `value` with its low `dropped` bits rounded away to nearest, ties to even.
inline std::uint32_t round_shift(std::uint32_t value, unsigned dropped) {
    const std::uint32_t half = std::uint32_t{1} << (dropped - 1);
    const std::uint32_t kept = value >> dropped;
    const std::uint32_t rest = value & ((half << 1) - 1);
    return kept + (rest > half || (rest == half && (kept & 1)));
}

inline std::uint16_t half_bits(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000;
    const std::uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;                                   // CUDA's one NaN
    if (magnitude >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);  // 65520 and above round to infinity
    if (magnitude >= 0x38800000) return static_cast<std::uint16_t>(sign | round_shift(magnitude - (112u << 23), 13));
    if (magnitude < 0x33000000) return static_cast<std::uint16_t>(sign);         // below 2^-25 rounds to zero
    const unsigned exponent = magnitude >> 23;                                   // subnormal: units of 2^-24
    return static_cast<std::uint16_t>(sign | round_shift((magnitude & 0x7fffff) | 0x800000, 126 - exponent));
}

inline float half_value(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t exponent = (half >> 10) & 31;
    const std::uint32_t mantissa = half & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000 | (mantissa << 13));
    if (exponent) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

inline std::uint16_t bfloat16_bits(float value) {
    const std::uint32_t bits = bits_of(value);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : static_cast<std::uint16_t>(round_shift(bits, 16));
}

inline float bfloat16_value(std::uint16_t bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

}  // namespace sparselift::simt

struct alignas(2) __half {
    std::uint16_t bits;
};
struct alignas(2) __nv_bfloat16 {
    std::uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __half __float2half_rn(float value) { return {sparselift::simt::half_bits(value)}; }
inline __half __float2half(float value) { return __float2half_rn(value); }
inline float __half2float(__half value) { return sparselift::simt::half_value(value.bits); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 value) { return {__half2float(value.x), __half2float(value.y)}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {sparselift::simt::bfloat16_bits(value)}; }
inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return sparselift::simt::bfloat16_value(value.bits); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 value) { return {__bfloat162float(value.x), __bfloat162float(value.y)}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
