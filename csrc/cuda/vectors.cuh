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
