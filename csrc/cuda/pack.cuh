// Rows of many matrices into one buffer and back, changing precision on the way.
//
// Grid: groups of 8 lanes, a row each, in x; parts in y. A lane takes four columns at a time, of every 32. Bytes: a row read and
// written once.
#pragma once

#include "../api/sparselift_cuda_exchange.h"
#include "vectors.cuh"

namespace sparselift::cuda {

constexpr int32_t kPackLanes = 8, kPackColumns = 4;
constexpr int32_t kInt8Header = 8;      // scale and bias before the elements of a row

struct PackPart {
    float* rows;
    int64_t row_stride;
    int64_t num_rows;
    int64_t packed_row_bytes;
    char* packed;
    int32_t dim;
    int32_t dtype;
    int32_t in_fours;
    int32_t reserved;
};

/// Scale and bias of an int8 row: x = bias + scale * q. A row of equal elements has scale 0.
struct RowScale {
    float scale;
    float bias;
};

/// Columns [column, column + kPackColumns) that are inside of the row; 0 beyond.
__device__ inline Values<kPackColumns> load_columns(const float* row, int32_t column, const PackPart& part) {
    if (column + kPackColumns <= part.dim) return load_floats<kPackColumns>(row + column, part.in_fours);
    Values<kPackColumns> values = zeros<kPackColumns>();
    for (int i = 0; i < kPackColumns && column + i < part.dim; ++i) values.v[i] = row[column + i];
    return values;
}

/// All lanes of a warp call it.
__device__ inline RowScale row_scale(const float* row, int32_t lane, const PackPart& part) {
    float low = row[0], high = row[0];
    for (int32_t column = lane; column < part.dim; column += kPackLanes) {
        low = fminf(low, row[column]);
        high = fmaxf(high, row[column]);
    }
    for (int32_t distance = kPackLanes / 2; distance > 0; distance /= 2) {
        low = fminf(low, __shfl_xor_sync(kWholeWarp, low, distance));
        high = fmaxf(high, __shfl_xor_sync(kWholeWarp, high, distance));
    }
    return {(high - low) / 255.0f, low};
}

/// Four elements as one word.
template <int kBytes>
struct Word;
template <>
struct Word<16> { using type = uint4; };
template <>
struct Word<8> { using type = uint2; };
template <>
struct Word<4> { using type = unsigned; };

/// Writes encode(x) of a row's elements, four at a time but for the last ones.
template <typename Element, typename Encode>
__device__ inline void pack_row(const float* row, Element* to, int32_t lane, const PackPart& part, const Encode& encode) {
    using Bits = typename Word<kPackColumns * sizeof(Element)>::type;
    for (int32_t column = lane * kPackColumns; column < part.dim; column += kPackLanes * kPackColumns) {
        const auto values = load_columns(row, column, part);
        Element elements[kPackColumns];
#pragma unroll
        for (int i = 0; i < kPackColumns; ++i) elements[i] = encode(values.v[i]);
        if (column + kPackColumns <= part.dim) {
            Bits bits;
            memcpy(&bits, elements, sizeof bits);
            store_vector(to + column, bits);
        } else {
            for (int i = 0; i < kPackColumns && column + i < part.dim; ++i) to[column + i] = elements[i];
        }
    }
}

/// The reverse.
template <typename Element, typename Decode>
__device__ inline void unpack_row(const Element* from, float* row, int32_t lane, const PackPart& part, const Decode& decode) {
    using Bits = typename Word<kPackColumns * sizeof(Element)>::type;
    for (int32_t column = lane * kPackColumns; column < part.dim; column += kPackLanes * kPackColumns) {
        if (column + kPackColumns <= part.dim) {
            const Bits bits = load_vector<Bits>(from + column);
            Element elements[kPackColumns];
            memcpy(elements, &bits, sizeof bits);
            Values<kPackColumns> values;
#pragma unroll
            for (int i = 0; i < kPackColumns; ++i) values.v[i] = decode(elements[i]);
            store_floats<kPackColumns>(row + column, values, part.in_fours);
        } else {
            for (int i = 0; i < kPackColumns && column + i < part.dim; ++i) row[column + i] = decode(from[column + i]);
        }
    }
}

/// The row of a thread's group.
struct PackRow {
    float* row;
    char* packed;
    int32_t lane;
    bool is_there;
};

__device__ inline PackRow row_of_thread(const PackPart& part) {
    const int64_t number = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kPackLanes;
    const bool is_there = number < part.num_rows;
    const int64_t row = is_there ? number : 0;
    return {part.rows + row * part.row_stride, part.packed + row * part.packed_row_bytes, static_cast<int32_t>(threadIdx.x % kPackLanes), is_there};
}

__global__ void __launch_bounds__(kMaxThreads) pack_kernel(const PackPart* parts) {
    const PackPart part = parts[blockIdx.y];
    const PackRow at = row_of_thread(part);
    if (part.dtype == SL_INT8_ROWWISE && part.num_rows > 0) {
        const RowScale scale = row_scale(at.row, at.lane, part);
        if (!at.is_there) return;
        if (at.lane == 0) {
            reinterpret_cast<float*>(at.packed)[0] = scale.scale;
            reinterpret_cast<float*>(at.packed)[1] = scale.bias;
        }
        pack_row(at.row, reinterpret_cast<uint8_t*>(at.packed + kInt8Header), at.lane, part, [&](float x) {
            return static_cast<uint8_t>(scale.scale > 0.0f ? __float2int_rn((x - scale.bias) / scale.scale) : 0);
        });
        return;
    }
    if (!at.is_there) return;
    if (part.dtype == SL_FLOAT16) pack_row(at.row, reinterpret_cast<__half*>(at.packed), at.lane, part, [](float x) { return from_float<__half>(x); });
    else if (part.dtype == SL_BFLOAT16)
        pack_row(at.row, reinterpret_cast<__nv_bfloat16*>(at.packed), at.lane, part, [](float x) { return from_float<__nv_bfloat16>(x); });
    else pack_row(at.row, reinterpret_cast<float*>(at.packed), at.lane, part, [](float x) { return from_float<float>(x); });
}

__global__ void __launch_bounds__(kMaxThreads) unpack_kernel(const PackPart* parts) {
    const PackPart& part = parts[blockIdx.y];
    const PackRow at = row_of_thread(part);
    if (!at.is_there) return;
    const auto decode = [](auto element) { return to_float(element); };
    if (part.dtype == SL_FLOAT16) unpack_row(reinterpret_cast<const __half*>(at.packed), at.row, at.lane, part, decode);
    else if (part.dtype == SL_BFLOAT16) unpack_row(reinterpret_cast<const __nv_bfloat16*>(at.packed), at.row, at.lane, part, decode);
    else if (part.dtype == SL_FLOAT32) unpack_row(reinterpret_cast<const float*>(at.packed), at.row, at.lane, part, decode);
    else {
        const float scale = reinterpret_cast<const float*>(at.packed)[0], bias = reinterpret_cast<const float*>(at.packed)[1];
        unpack_row(reinterpret_cast<const uint8_t*>(at.packed + kInt8Header), at.row, at.lane, part,
                   [&](uint8_t q) { return bias + scale * static_cast<float>(q); });
    }
}

}  // namespace sparselift::cuda
