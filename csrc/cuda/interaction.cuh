// The dot interaction: products of pairs of the V vectors of a sample, and the gradient of the vectors.
//
// Grid: blocks of samples, each of which has 8 to 256 threads. Slices of 32 columns of the sample's vectors go through shared memory: each
// element is read once from global memory, in whole lines, and V times from there. A thread keeps a tile of 4 x 4 products, or of 4
// columns of 4 gradients, in registers, and adds with fma: columns ascending in products, vectors ascending in gradients.
#pragma once

#include "vectors.cuh"

namespace sparselift::cuda {

constexpr int kInteractionThreads = 256;       // a block, at most
constexpr int kTile = 4;
constexpr int kSlice = 32;
constexpr int kSliceFours = kSlice / 4;
constexpr int kSliceStride = kSlice + 4;       // what eight neighbouring threads read lies in different banks

/// One vector of every sample, and the pairs that it is the first of: those with vectors [first, last).
struct InteractionVector {
    const float* data;
    float* grad;               // null: not wanted
    int64_t stride;
    int64_t grad_stride;
    int32_t first;
    int32_t last;
    int32_t column;            // of the product with vector `first`
    int32_t in_fours;          // rows may be read in vectors of four
    int32_t grad_in_fours;     // likewise written
    int32_t reserved;
};

/// The products of vectors [4 * row, 4 * row + 4) with [4 * column, 4 * column + 4).
struct Tile {
    int16_t row;
    int16_t column;
};

struct InteractionArgs {
    const InteractionVector* vectors;  // (V,)
    const Tile* tiles;                 // at least one; those that have a pair, and no others
    float* out;                        // or its gradient
    int64_t out_stride;
    int64_t batch;
    int32_t num_vectors;
    int32_t num_tiles;
    int32_t tile_rows;                 // V / 4, rounded up
    int32_t dim;
    int32_t passed;                    // -1: none
    int32_t first_column;              // of the products
    int32_t num_products;
    int32_t lanes_log2;                // threads of a sample
    int32_t sample_floats;             // of shared memory
    int32_t panel_rows;                // of the gradient of the (V, V) products that are in shared memory at a time
};

/// The threads of one sample, and its shared memory.
struct SampleThreads {
    int64_t sample;
    int32_t lane;
    int32_t count;
    bool is_there;                     // the last block may have more threads than samples
    Shared<float> memory;
};

__device__ inline SampleThreads sample_threads(const InteractionArgs& args) {
    const auto samples = static_cast<int32_t>(blockDim.x >> args.lanes_log2), thread = static_cast<int32_t>(threadIdx.x);
    const int32_t in_block = thread >> args.lanes_log2, count = 1 << args.lanes_log2;
    const int64_t sample = static_cast<int64_t>(blockIdx.x) * samples + in_block;
    const auto memory = dynamic_shared<float>(0, samples * args.sample_floats);
    return {sample, thread & (count - 1), count, sample < args.batch, memory.part(in_block * args.sample_floats, args.sample_floats)};
}

/// Where a vector lies in a slice: the first ones of all tiles, then the second ones, so that threads with neighbouring tiles read
/// neighbouring places.
__device__ inline int32_t place_in_slice(const InteractionArgs& args, int32_t vector) {
    return (vector % kTile * args.tile_rows + vector / kTile) * kSliceStride;
}

/// The first `left`, at most four, of the floats at `from`; zeros for the others.
__device__ inline float4 load_up_to_four(const float* from, int32_t left, bool in_fours) {
    if (in_fours) return load_vector<float4>(from);
    return {from[0], left > 1 ? from[1] : 0.0f, left > 2 ? from[2] : 0.0f, left > 3 ? from[3] : 0.0f};
}

/// Columns [column, column + kSlice) of the vectors, with zeros past the last vector.
__device__ inline void stage_slice(const InteractionArgs& args, const SampleThreads& at, int32_t column) {
    for (int32_t i = at.lane; i < args.tile_rows * kTile * kSliceFours; i += at.count) {
        const int32_t number = i / kSliceFours, four = i % kSliceFours * 4, from = column + four;
        if (from >= args.dim) continue;
        float4 values{0.0f, 0.0f, 0.0f, 0.0f};
        if (at.is_there && number < args.num_vectors) {
            const InteractionVector& vector = args.vectors[number];
            values = load_up_to_four(vector.data + at.sample * vector.stride + from, args.dim - from, vector.in_fours);
        }
        at.memory.store_as(place_in_slice(args, number) + four, values);
    }
}

/// Vectors of four columns that a slice has.
__device__ inline int32_t fours_in_slice(const InteractionArgs& args, int32_t column) {
    const int32_t left = args.dim - column;
    return left < kSlice ? (left + 3) / 4 : kSliceFours;
}

struct Products {
    float v[kTile][kTile];
};

__device__ inline void add_products(const InteractionArgs& args, const Shared<float>& slice, Tile tile, int32_t fours, Products& products) {
#pragma unroll 1
    for (int32_t four = 0; four < fours; ++four) {
        float4 rows[kTile];
#pragma unroll
        for (int r = 0; r < kTile; ++r) rows[r] = slice.load_as<float4>((r * args.tile_rows + tile.row) * kSliceStride + 4 * four);
#pragma unroll
        for (int c = 0; c < kTile; ++c) {
            const auto other = slice.load_as<float4>((c * args.tile_rows + tile.column) * kSliceStride + 4 * four);
#pragma unroll
            for (int r = 0; r < kTile; ++r) {
                float sum = fmaf(rows[r].x, other.x, products.v[r][c]);
                sum = fmaf(rows[r].y, other.y, sum);
                sum = fmaf(rows[r].z, other.z, sum);
                products.v[r][c] = fmaf(rows[r].w, other.w, sum);
            }
        }
    }
}

/// Calls visit(column of the output, value) for each product of a tile that is wanted.
template <typename Visit>
__device__ inline void visit_products(const InteractionArgs& args, Tile tile, const Products& products, const Visit& visit) {
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
        const int32_t number = tile.row * kTile + r;
        if (number >= args.num_vectors) break;
        const InteractionVector& vector = args.vectors[number];
#pragma unroll
        for (int c = 0; c < kTile; ++c) {
            const int32_t other = tile.column * kTile + c;
            if (other >= vector.first && other < vector.last) visit(vector.column + other - vector.first, products.v[r][c]);
        }
    }
}

/// The columns of the passed vector that the slice has.
__device__ inline void pass_on(const InteractionArgs& args, const SampleThreads& at, int32_t column) {
    if (args.passed < 0 || !at.is_there) return;
    float* out = args.out + at.sample * args.out_stride + column;
    for (int32_t i = at.lane; i < kSlice && column + i < args.dim; i += at.count) out[i] = at.memory.load(place_in_slice(args, args.passed) + i);
}

/// Bytes: V D 4 read, 4 (D + P) written. Where the products of a sample are ready at once, they are put in order in shared memory, so that
/// neighbouring threads write neighbouring columns.
__global__ void __launch_bounds__(kInteractionThreads, 4) interaction_forward_kernel(InteractionArgs args) {
    const SampleThreads at = sample_threads(args);
    const bool is_ordered = args.num_tiles <= at.count;
    float* out = args.out + at.sample * args.out_stride;
    for (int32_t first = 0; first < args.num_tiles; first += at.count) {
        const bool has_tile = first + at.lane < args.num_tiles;
        const Tile tile = has_tile ? args.tiles[first + at.lane] : Tile{0, 0};
        Products products{};
        for (int32_t column = 0; column < args.dim; column += kSlice) {
            __syncthreads();
            stage_slice(args, at, column);
            __syncthreads();
            if (first == 0) pass_on(args, at, column);
            if (has_tile) add_products(args, at.memory, tile, fours_in_slice(args, column), products);
        }
        if (!is_ordered) {
            if (has_tile && at.is_there) visit_products(args, tile, products, [&](int32_t column, float value) { out[column] = value; });
            continue;
        }
        __syncthreads();
        if (has_tile)
            visit_products(args, tile, products, [&](int32_t column, float value) { at.memory.store(column - args.first_column, value); });
        __syncthreads();
        for (int32_t i = at.lane; at.is_there && i < args.num_products; i += at.count) out[args.first_column + i] = at.memory.load(i);
    }
}

/// The gradient of the product (row, other), 0 where it is none of the output's.
__device__ inline float product_grad(const InteractionArgs& args, const float* grad, int32_t row, int32_t other) {
    if (row >= args.num_vectors) return 0.0f;
    const InteractionVector& vector = args.vectors[row];
    return other >= vector.first && other < vector.last ? grad[vector.column + other - vector.first] : 0.0f;
}

/// Columns [panel, panel + panel_rows) of the symmetric gradient of the (V, V) products.
__device__ inline void stage_square(const InteractionArgs& args, const SampleThreads& at, int32_t panel, const Shared<float>& square) {
    const float* grad = args.out + at.sample * args.out_stride;
    for (int32_t i = at.lane; i < args.num_vectors * args.panel_rows; i += at.count) {
        const int32_t row = i / args.panel_rows, column = panel + i % args.panel_rows;
        square.store(i, at.is_there ? product_grad(args, grad, row, column) + product_grad(args, grad, column, row) : 0.0f);
    }
}

/// Four columns of the gradients of four vectors: sums over all vectors, in order.
__device__ inline void sum_gradients(const InteractionArgs& args, const Shared<float>& slice, const Shared<float>& square, int32_t row,
                                     int32_t four, Values<4> (&sums)[kTile]) {
#pragma unroll
    for (auto& sum : sums) sum = zeros<4>();
    for (int32_t vector = 0; vector < args.num_vectors; ++vector) {
        const auto grads = square.load_as<float4>(vector * args.panel_rows + row);
        const auto values = slice.load_as<float4>(place_in_slice(args, vector) + 4 * four);
        const float of_rows[kTile] = {grads.x, grads.y, grads.z, grads.w}, of_columns[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int r = 0; r < kTile; ++r) {
#pragma unroll
            for (int c = 0; c < 4; ++c) sums[r].v[c] = fmaf(of_rows[r], of_columns[c], sums[r].v[c]);
        }
    }
}

__device__ inline void store_gradients(const InteractionArgs& args, const SampleThreads& at, int32_t first, int32_t from,
                                       Values<4> (&sums)[kTile]) {
    const float* grad = args.out + at.sample * args.out_stride;
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
        const int32_t number = first + r;
        if (number >= args.num_vectors) break;
        const InteractionVector& vector = args.vectors[number];
        if (!vector.grad) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (number == args.passed && from + c < args.dim) sums[r].v[c] = sums[r].v[c] + grad[from + c];
        }
        float* to = vector.grad + at.sample * vector.grad_stride + from;
        if (vector.grad_in_fours) {
            store_floats<4>(to, sums[r], true);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (from + c < args.dim) to[c] = sums[r].v[c];
            }
        }
    }
}

/// Bytes: V D 4 and 4 (D + P) read, V D 4 written; beyond 32 vectors V D 4 more, mostly from cache, for every 32.
__global__ void __launch_bounds__(kInteractionThreads, 4) interaction_backward_kernel(InteractionArgs args) {
    const SampleThreads at = sample_threads(args);
    const int32_t rows = args.tile_rows * kTile, slice_floats = rows * kSliceStride;
    const Shared<float> square = at.memory.part(slice_floats, args.sample_floats - slice_floats);
    for (int32_t panel = 0; panel < rows; panel += args.panel_rows) {
        const int32_t tiles = (rows - panel < args.panel_rows ? rows - panel : args.panel_rows) / kTile;
        __syncthreads();
        stage_square(args, at, panel, square);
        for (int32_t column = 0; column < args.dim; column += kSlice) {
            __syncthreads();
            stage_slice(args, at, column);
            __syncthreads();
            for (int32_t i = at.lane; i < tiles * kSliceFours; i += at.count) {
                const int32_t row = i / kSliceFours * kTile, four = i % kSliceFours;
                if (column + 4 * four >= args.dim) continue;
                Values<4> sums[kTile];
                sum_gradients(args, at.memory, square, row, four, sums);
                if (at.is_there) store_gradients(args, at, panel + row, column + 4 * four, sums);
            }
        }
    }
}

}  // namespace sparselift::cuda
