// Loads and stores of a few elements at a time, as float32 in registers.
#pragma once

#include <cstring>

#include "args.h"
#include "platform.h"
#include "vector_access.cuh"

namespace sparselift::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Element>
__device__ Element from_float(float value);
template <>
__device__ inline float from_float<float>(float value) { return value; }
template <>
__device__ inline __half from_float<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

/// The elements of a 16-byte load.
template <typename Element>
constexpr int kFullWidth = 16 / sizeof(Element);

/// Element i of those that `words` hold.
template <typename Element>
__device__ inline float unpack(const uint32_t* words, int i);
template <>
__device__ inline float unpack<float>(const uint32_t* words, int i) { return __uint_as_float(words[i]); }
template <>
__device__ inline float unpack<__half>(const uint32_t* words, int i) {
    return to_float(__ushort_as_half(static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16))));
}
template <>
__device__ inline float unpack<__nv_bfloat16>(const uint32_t* words, int i) {
    return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
}

/// What one load brings: kFullWidth elements, or one.
template <typename Element, int kWidth>
struct Packed {
    static_assert(kWidth == 1);
    Element v[1];

    __device__ float value(int) const { return to_float(v[0]); }
};

/// As it was loaded, until an element is wanted: sixteen-bit elements apart would take twice the registers while loads are under way.
template <typename Element>
struct Packed<Element, kFullWidth<Element>> {
    uint32_t words[4];

    __device__ float value(int i) const { return unpack<Element>(words, i); }
};

template <int kWidth>
struct Values {
    float v[kWidth];
};

template <int kWidth>
__device__ inline Values<kWidth> zeros() {
    Values<kWidth> values;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values.v[i] = 0.0f;
    return values;
}

/// Of memory that no kernel under way writes.
template <typename Element, int kWidth>
__device__ inline Packed<Element, kWidth> load_packed(const Element* from) {
    Packed<Element, kWidth> packed;
    if constexpr (kWidth == 1) {
        packed.v[0] = *from;
    } else {
        const uint4 bits = load_vector<uint4>(from);
        memcpy(&packed, &bits, sizeof packed);
    }
    return packed;
}

template <typename Element, int kWidth>
__device__ inline Packed<Element, kWidth> no_elements() {
    Packed<Element, kWidth> packed;
    memset(&packed, 0, sizeof packed);
    return packed;
}

/// Of memory that this kernel writes, other lanes than this one elsewhere.
template <typename Element, int kWidth>
__device__ inline Values<kWidth> load_elements(const Element* from) {
    Packed<Element, kWidth> packed;
    if constexpr (kWidth == 1) {
        packed.v[0] = *from;
    } else {
        const uint4 bits = load_vector_coherent<uint4>(from);
        memcpy(&packed, &bits, sizeof packed);
    }
    Values<kWidth> values;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values.v[i] = packed.value(i);
    return values;
}

template <typename Element, int kWidth>
__device__ inline void store_elements(Element* to, const Values<kWidth>& values) {
    Element elements[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) elements[i] = from_float<Element>(values.v[i]);
    if constexpr (kWidth == 1) {
        *to = elements[0];
    } else {
        uint4 bits;
        memcpy(&bits, elements, sizeof bits);
        store_vector(to, bits);
    }
}

/// kWidth float32 that may lie four to an aligned 16 bytes (`in_fours`), or anywhere.
template <int kWidth>
__device__ inline Values<kWidth> load_floats(const float* from, bool in_fours) {
    Values<kWidth> values;
    if constexpr (kWidth % 4 == 0) {
        if (in_fours) {
#pragma unroll
            for (int i = 0; i < kWidth; i += 4) {
                const auto four = load_elements<float, 4>(from + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) values.v[i + j] = four.v[j];
            }
            return values;
        }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values.v[i] = from[i];
    return values;
}

template <int kWidth>
__device__ inline void store_floats(float* to, const Values<kWidth>& values, bool in_fours) {
    if constexpr (kWidth % 4 == 0) {
        if (in_fours) {
#pragma unroll
            for (int i = 0; i < kWidth; i += 4)
                store_elements<float, 4>(to + i, Values<4>{{values.v[i], values.v[i + 1], values.v[i + 2], values.v[i + 3]}});
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = values.v[i];
}

/// `condition ? a : b`, element by element: whole structs would be chosen between in memory.
__device__ inline Values<4> select(bool condition, const Values<4>& a, const Values<4>& b) {
    Values<4> chosen;
#pragma unroll
    for (int i = 0; i < 4; ++i) chosen.v[i] = condition ? a.v[i] : b.v[i];
    return chosen;
}

/// Trades four floats with the neighbouring lane of a pair. Both lanes call it.
__device__ inline Values<4> trade(const Values<4>& given) {
    const unsigned pair = 3u << (threadIdx.x % kWarp / 2 * 2);
    Values<4> got;
#pragma unroll
    for (int i = 0; i < 4; ++i) got.v[i] = __shfl_xor_sync(pair, given.v[i], 1);
    return got;
}

/// Whether columns [at, at + 8) of a row in stripes of `stripe` columns belong to a pair of lanes that has sixteen. Each lane of a pair then
/// moves a half of its own eight floats and a half of its neighbour's, so that a warp's access covers whole sectors of 32 bytes.
__device__ inline bool is_paired(int32_t at, int32_t stripe, int32_t dim) { return stripe >= 16 && at / 16 * 16 + 16 <= dim; }

/// Columns [at, at + kWidth) of a row of `dim` float32 whose lanes have `stripe` columns side by side.
template <int kWidth>
__device__ inline Values<kWidth> load_columns(const float* row, int32_t at, int32_t stripe, int32_t dim, bool in_fours) {
    if constexpr (kWidth == 8) {
        if (in_fours && is_paired(at, stripe, dim)) {
            const bool is_second = (at & kWidth) != 0;
            const float* from = row + at / 16 * 16 + (is_second ? 4 : 0);
            const auto low = load_elements<float, 4>(from), high = load_elements<float, 4>(from + kWidth);
            const auto kept = select(is_second, high, low), got = trade(select(is_second, low, high));
            Values<kWidth> values;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values.v[i] = is_second ? got.v[i] : kept.v[i];
                values.v[4 + i] = is_second ? kept.v[i] : got.v[i];
            }
            return values;
        }
    }
    return load_floats<kWidth>(row + at, in_fours);
}

template <int kWidth>
__device__ inline void store_columns(float* row, int32_t at, int32_t stripe, int32_t dim, const Values<kWidth>& values, bool in_fours) {
    if constexpr (kWidth == 8) {
        if (in_fours && is_paired(at, stripe, dim)) {
            const bool is_second = (at & kWidth) != 0;
            const Values<4> low{{values.v[0], values.v[1], values.v[2], values.v[3]}};
            const Values<4> high{{values.v[4], values.v[5], values.v[6], values.v[7]}};
            const auto kept = select(is_second, high, low), got = trade(select(is_second, low, high));
            float* to = row + at / 16 * 16 + (is_second ? 4 : 0);
            store_elements<float, 4>(to, select(is_second, got, kept));
            store_elements<float, 4>(to + kWidth, select(is_second, kept, got));
            return;
        }
    }
    store_floats<kWidth>(row + at, values, in_fours);
}

/// Positions (int32) as the float32 of their bits, so that they take the same roads.
template <int kWidth>
__device__ inline void load_positions(const int32_t* row, int32_t at, int32_t stripe, int32_t dim, bool in_fours, int32_t (&positions)[kWidth]) {
    const auto bits = load_columns<kWidth>(reinterpret_cast<const float*>(row), at, stripe, dim, in_fours);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) positions[i] = __float_as_int(bits.v[i]);
}

template <int kWidth>
__device__ inline void store_positions(int32_t* row, int32_t at, int32_t stripe, int32_t dim, bool in_fours, const int32_t (&positions)[kWidth]) {
    Values<kWidth> bits;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) bits.v[i] = __int_as_float(positions[i]);
    store_columns<kWidth>(reinterpret_cast<float*>(row), at, stripe, dim, bits, in_fours);
}

template <int kValue>
struct Constant {
    static constexpr int value = kValue;
};

/// Calls visit with the width of a load and the number of them a lane, as constants. A lane sums at most kMaxColumns at a time: more do
/// not fit the registers beside the loads under way.
template <typename Element, int kMaxColumns, typename Visit>
__device__ inline void visit_columns(const Columns& columns, const Visit& visit) {
    constexpr int kFull = kFullWidth<Element>, kMost = kMaxColumns / kFull;
    if (columns.vector_loads) {
        if constexpr (kMost >= 4) {
            if (columns.vectors > 2) return visit(Constant<kFull>{}, Constant<4>{});
        }
        if constexpr (kMost >= 2) {
            if (columns.vectors > 1) return visit(Constant<kFull>{}, Constant<2>{});
        }
        return visit(Constant<kFull>{}, Constant<1>{});
    }
    if (columns.vectors > 2) return visit(Constant<1>{}, Constant<4>{});
    if (columns.vectors > 1) return visit(Constant<1>{}, Constant<2>{});
    visit(Constant<1>{}, Constant<1>{});
}

}  // namespace sparselift::cuda
