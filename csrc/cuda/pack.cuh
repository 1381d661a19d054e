// Rows of many matrices into one buffer and back, changing precision on the way.
//
// Grid: groups of 8 lanes, a row each, in x; parts in y. A lane takes four columns at a time, of every 32. Bytes: a row read and
// written once; int8 reads it twice, the second time from cache.
#pragma once

#include "../api/int8_rows.h"
#include "../api/packed_header.h"
#include "../api/sparselift_cuda_exchange.h"
#include "vectors.cuh"

namespace sparselift::cuda {

constexpr int32_t kRowLanes = 8, kRowColumns = 4;

struct PackPart {
    float* rows;
    int64_t row_stride;
    int64_t num_rows;
    float* scales;             // where the part begins; (num_rows, 2) scale and bias, where it is int8
    char* elements;
    int64_t bytes;             // of the part
    int64_t entry[4];          // what the header says of it, in words
    int32_t dim;
    int32_t wire;
    int32_t rows_in_fours;     // outside; inside
    int32_t elements_in_fours;
};

/// Columns [column, column + kRowColumns) that are inside of a row of `width`; 0 beyond.
__device__ inline Values<kRowColumns> load_columns(const float* row, int32_t column, int32_t width, bool in_fours) {
    if (column + kRowColumns <= width) return load_floats<kRowColumns>(row + column, in_fours);
    Values<kRowColumns> values = zeros<kRowColumns>();
    for (int i = 0; i < kRowColumns && column + i < width; ++i) values.v[i] = row[column + i];
    return values;
}

__device__ inline void store_columns(float* row, int32_t column, int32_t width, bool in_fours, const Values<kRowColumns>& values) {
    if (column + kRowColumns <= width) return store_floats<kRowColumns>(row + column, values, in_fours);
    for (int i = 0; i < kRowColumns && column + i < width; ++i) row[column + i] = values.v[i];
}

// ---------------------------------------------------------------------------------------------------- elements

/// The bits of torch's conversions on x86, NaNs included: CUDA has one NaN where those keep signs and payloads.
__device__ inline __half to_wire(float x, __half) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return __ushort_as_half(static_cast<unsigned short>((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu)));
    return from_float<__half>(x);
}
__device__ inline __nv_bfloat16 to_wire(float x, __nv_bfloat16) {
    return x != x ? __ushort_as_bfloat16(0xffff) : from_float<__nv_bfloat16>(x);
}
__device__ inline float to_wire(float x, float) { return x; }

/// An int8 row: x = bias + scale * q, q = round((x - bias) * steps). NaN all over where the row is not finite.
struct RowScale {
    float scale, bias, steps;
    bool is_flat;

    __device__ uint8_t quantize(float x) const { return static_cast<uint8_t>(is_flat ? 0 : __float2int_rn((x - bias) * steps)); }
};

/// All lanes of a warp call it.
__device__ inline RowScale row_scale(const float* row, int32_t lane, int32_t dim) {
    float low = dim > 0 ? row[0] : 0.0f, high = low, wrong = 0.0f;
    for (int32_t column = lane; column < dim; column += kRowLanes) {
        const float x = row[column];
        low = fminf(low, x);
        high = fmaxf(high, x);
        wrong += x - x;        // 0 where x is finite, else NaN
    }
    for (int32_t distance = kRowLanes / 2; distance > 0; distance /= 2) {
        low = fminf(low, __shfl_xor_sync(kWholeWarp, low, distance));
        high = fmaxf(high, __shfl_xor_sync(kWholeWarp, high, distance));
        wrong += __shfl_xor_sync(kWholeWarp, wrong, distance);
    }
    const float range = high - low;
    if (!(range - range + wrong == 0.0f)) return {__uint_as_float(0x7fc00000u), __uint_as_float(0x7fc00000u), 0.0f, true};
    const bool is_flat = range < kLeastRange;
    return {is_flat ? 0.0f : range / kSteps, low + 0.0f, is_flat ? 0.0f : kSteps / range, is_flat};
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

/// Writes encode(x) of a row's elements, four at a time where they are aligned.
template <typename Element, typename Encode>
__device__ inline void pack_row(const float* row, Element* to, int32_t lane, const PackPart& part, const Encode& encode) {
    using Bits = typename Word<kRowColumns * sizeof(Element)>::type;
    const int32_t dim = part.dim;
    for (int32_t column = lane * kRowColumns; column < dim; column += kRowLanes * kRowColumns) {
        const auto values = load_columns(row, column, dim, part.rows_in_fours);
        Element elements[kRowColumns];
#pragma unroll
        for (int i = 0; i < kRowColumns; ++i) elements[i] = encode(values.v[i]);
        if (part.elements_in_fours) {
            Bits bits;
            memcpy(&bits, elements, sizeof bits);
            store_vector(to + column, bits);
        } else {
            for (int i = 0; i < kRowColumns && column + i < dim; ++i) to[column + i] = elements[i];
        }
    }
}

/// The reverse.
template <typename Element, typename Decode>
__device__ inline void unpack_row(const Element* from, float* row, int32_t lane, const PackPart& part, const Decode& decode) {
    using Bits = typename Word<kRowColumns * sizeof(Element)>::type;
    const int32_t dim = part.dim;
    for (int32_t column = lane * kRowColumns; column < dim; column += kRowLanes * kRowColumns) {
        Element elements[kRowColumns];
        if (part.elements_in_fours) {
            const Bits bits = load_vector<Bits>(from + column);
            memcpy(elements, &bits, sizeof bits);
        } else {
            for (int i = 0; i < kRowColumns; ++i) elements[i] = from[min(column + i, dim - 1)];
        }
        Values<kRowColumns> values;
#pragma unroll
        for (int i = 0; i < kRowColumns; ++i) values.v[i] = decode(elements[i]);
        store_columns(row, column, dim, part.rows_in_fours, values);
    }
}

// ---------------------------------------------------------------------------------------------------- rows

/// The row of a thread's group; one that is there in any case, for those that have none.
struct PackRow {
    float* row;
    int64_t number;
    int32_t lane;
    bool is_there;

    template <typename Element>
    __device__ Element* elements(const PackPart& part) const { return reinterpret_cast<Element*>(part.elements) + number * part.dim; }
};

__device__ inline PackRow row_of_thread(const PackPart& part) {
    const int64_t number = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kRowLanes;
    const bool is_there = number < part.num_rows;
    const int64_t row = is_there ? number : 0;
    return {part.rows + row * part.row_stride, row, static_cast<int32_t>(threadIdx.x % kRowLanes), is_there};
}

template <typename Element>
__device__ inline void pack_float_row(const PackPart& part, const PackRow& at) {
    pack_row(at.row, at.elements<Element>(part), at.lane, part, [](float x) { return to_wire(x, Element{}); });
}

template <typename Element>
__device__ inline void unpack_float_row(const PackPart& part, const PackRow& at) {
    unpack_row(at.elements<const Element>(part), at.row, at.lane, part, [](Element element) { return to_float(element); });
}

/// All lanes of a warp call it.
__device__ inline void pack_byte_row(const PackPart& part, const PackRow& at) {
    const RowScale scale = row_scale(at.row, at.lane, part.dim);
    if (!at.is_there) return;
    if (at.lane == 0) {
        part.scales[2 * at.number] = scale.scale;
        part.scales[2 * at.number + 1] = scale.bias;
    }
    pack_row(at.row, at.elements<uint8_t>(part), at.lane, part, [&](float x) { return scale.quantize(x); });
}

/// What lies between this part and the next one, and between scales and elements. By one thread.
__device__ inline void fill_gaps(const PackPart& part) {
    char* const begin = reinterpret_cast<char*>(part.scales);
    for (int64_t i = part.bytes; i % kPackedAlignment != 0; ++i) begin[i] = 0;
    if (part.wire != SL_WIRE_INT8) return;
    for (int64_t i = part.num_rows * kRowScaleBytes; i % kPackedAlignment != 0; ++i) begin[i] = 0;
}

__global__ void __launch_bounds__(kMaxThreads) pack_kernel(const PackPart* parts) {
    const PackPart part = parts[blockIdx.y];
    if (part.num_rows == 0) return;
    const PackRow at = row_of_thread(part);
    if (part.wire == SL_WIRE_INT8) {
        pack_byte_row(part, at);
    } else if (at.is_there) {
        if (part.wire == SL_WIRE_FLOAT16) pack_float_row<__half>(part, at);
        else if (part.wire == SL_WIRE_BFLOAT16) pack_float_row<__nv_bfloat16>(part, at);
        else pack_float_row<float>(part, at);
    }
    if (at.is_there && at.number == 0 && at.lane == 0) fill_gaps(part);
}

struct UnpackArgs {
    const PackPart* parts;
    int64_t num_parts;
    const int64_t* header;     // of the buffer, in words
    int64_t prologue[4];       // what it must begin with
    int32_t* faulted;          // device
    sl_cuda_fault* fault;      // host memory
};

/// Tells the host what the header says, unless it was told before.
__device__ inline void report(const UnpackArgs& args, int64_t part, int32_t word, int64_t found, int64_t expected) {
    if (atomicCAS(args.faulted, 0, 1) != 0) return;
    args.fault->feature = part;
    args.fault->position = word;
    args.fault->value = found;
    args.fault->previous = expected;
    __threadfence_system();
    *static_cast<volatile int32_t*>(&args.fault->status) = SL_BAD_BUFFER;
}

/// Whether `count` words are as expected; tells the host of the first that is not. The same for all threads of a block.
__device__ inline bool check_words(const UnpackArgs& args, int64_t part, const int64_t* expected, int32_t first, int32_t count) {
    const int64_t* found = args.header + 4 * (1 + part);
    for (int32_t word = first; word < first + count; ++word) {
        if (found[word] == expected[word]) continue;
        if (blockIdx.x == 0 && threadIdx.x == 0) report(args, part, word, found[word], expected[word]);
        return false;
    }
    return true;
}

/// Whether the header is the expected one, as far as the block's part goes. The totals last: they change with every entry.
__device__ inline bool check_header(const UnpackArgs& args) {
    if (!check_words(args, -1, args.prologue, 0, 2)) return false;
    if (args.num_parts > 0 && !check_words(args, blockIdx.y, args.parts[blockIdx.y].entry, 0, 4)) return false;
    return check_words(args, -1, args.prologue, 2, 2);
}

__global__ void __launch_bounds__(kMaxThreads) unpack_kernel(const __grid_constant__ UnpackArgs args) {
    if (!check_header(args) || args.num_parts == 0) return;
    const PackPart& part = args.parts[blockIdx.y];
    const PackRow at = row_of_thread(part);
    if (!at.is_there) return;
    if (part.wire == SL_WIRE_FLOAT16) unpack_float_row<__half>(part, at);
    else if (part.wire == SL_WIRE_BFLOAT16) unpack_float_row<__nv_bfloat16>(part, at);
    else if (part.wire == SL_WIRE_FLOAT32) unpack_float_row<float>(part, at);
    else {
        const float scale = part.scales[2 * at.number], bias = part.scales[2 * at.number + 1];
        unpack_row(at.elements<const uint8_t>(part), at.row, at.lane, part,
                   [&](uint8_t q) { return bias + scale * static_cast<float>(q); });
    }
}

}  // namespace sparselift::cuda
