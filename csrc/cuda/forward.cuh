// Table-batched bags: pooled[b, :] = sum of table[ids[k], :] over the lookups k of bag b, for every feature in one launch.
//
// Grid: blocks of bags, and behind them blocks of pieces of long bags, in x, features in y. A group of 1 to 32 lanes owns a bag, as many
// lanes as a row has loads, so that narrow rows pack up to 32 bags into a warp. A lane owns columns, and keeps their sums in registers over
// the whole bag; it adds rows in id order (the bits of torch), with kLoads loads under way. Bags longer than a chunk are pooled by pieces,
// which the kernels at the end put together.
#pragma once

#include "bags.cuh"
#include "chunks.cuh"
#include "vectors.cuh"

namespace sparselift::cuda {

/// Columns that a lane sums at a time: fewer where eight loads are under way, so that both fit the registers of 1,024 threads.
template <typename Weight, int kLoads>
constexpr int kForwardColumns = sizeof(Weight) == 4 && kLoads <= 4 ? 16 : 8;

/// The part of some rows that one lane has loaded. Bit i of `counted`: row i counts.
template <typename Weight, int kWidth, int kVectors, int kRows>
struct Gathered {
    Packed<Weight, kWidth> rows[kRows][kVectors];
    uint32_t counted;

    __device__ bool counts(int i) const { return (counted >> i & 1) != 0; }
};

/// Loads the rows of lookups [first, first + kRows) that are before `end`: first all ids, then all rows, so that their loads overlap.
/// `column` is one of the row's.
template <typename Weight, int kWidth, int kVectors, int kRows>
__device__ inline Gathered<Weight, kWidth, kVectors, kRows> gather(const Lookups& lookups, const Weight* table, const Columns& columns,
                                                                   int32_t first, int32_t end, int32_t column) {
    Gathered<Weight, kWidth, kVectors, kRows> gathered;
    gathered.counted = 0;
    const int32_t skipped = skipped_id(lookups);
    int32_t ids[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        ids[i] = first + i < end ? lookups.ids[first + i] : -1;
        if (ids[i] == skipped) ids[i] = -1;
        gathered.counted |= static_cast<uint32_t>(ids[i] >= 0) << i;
    }
    const int32_t stripe = kWidth << columns.lanes_log2;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const Weight* row = table + static_cast<int64_t>(ids[i] < 0 ? 0 : ids[i]) * columns.dim;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int32_t at = column + v * stripe;
            gathered.rows[i][v] = ids[i] >= 0 && (v == 0 || at < columns.dim) ? load_packed<Weight, kWidth>(row + at) : no_elements<Weight, kWidth>();
        }
    }
    return gathered;
}

/// sum + row. A row that does not count is zeros, which change nothing: sums start at +0 and never become -0.
template <typename Weight, int kWidth, int kVectors>
__device__ inline void add_row(Values<kWidth> (&sums)[kVectors], const Packed<Weight, kWidth> (&row)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[v].v[i] = sums[v].v[i] + row[v].value(i);
    }
}

/// sum + factor * row: with one rounding, or with two where a feature has weights and padding, as torch does.
template <typename Weight, int kWidth, int kVectors>
__device__ inline void add_weighted_row(Values<kWidth> (&sums)[kVectors], const Packed<Weight, kWidth> (&row)[kVectors], float factor,
                                        bool is_rounded) {
    const float outer = is_rounded ? 1.0f : factor;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const float value = row[v].value(i);
            sums[v].v[i] = fmaf(outer, is_rounded ? factor * value : value, sums[v].v[i]);
        }
    }
}

/// Adds the lookups of a bag or a piece of one. Weights take registers, too: eight loads under way are four with weights.
template <typename Weight, int kWidth, int kVectors, int kLoads>
__device__ inline void add_lookups(Values<kWidth> (&sums)[kVectors], const Lookups& lookups, const Weight* table, const Columns& columns,
                                   Bounds bounds, int32_t column) {
    if (!lookups.weights) {
        constexpr int kRows = kLoads / kVectors;
        for (int32_t k = bounds.begin; k < bounds.end; k += kRows) {
            const auto gathered = gather<Weight, kWidth, kVectors, kRows>(lookups, table, columns, k, bounds.end, column);
#pragma unroll
            for (int i = 0; i < kRows; ++i) add_row(sums, gathered.rows[i]);
        }
        return;
    }
    constexpr int kRows = 4 / kVectors;
    for (int32_t k = bounds.begin; k < bounds.end; k += kRows) {
        const auto gathered = gather<Weight, kWidth, kVectors, kRows>(lookups, table, columns, k, bounds.end, column);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (gathered.counts(i)) add_weighted_row(sums, gathered.rows[i], lookups.weights[k + i], lookups.padding >= 0);
        }
    }
}

/// What the sum of a bag is divided by: read once more, where means are wanted, rather than counted along.
__device__ inline int32_t divisor_of(const Lookups& lookups, Bounds bounds) {
    return lookups.pooling == SL_MEAN ? count_of(lookups, bounds) : 1;
}

template <int kWidth, int kVectors>
__device__ inline void store_bag(const ForwardFeature& feature, int32_t bag, int32_t column, Values<kWidth> (&sums)[kVectors],
                                 int32_t divisor) {
    float* out = feature.out + bag * feature.out_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int32_t stripe = kWidth << feature.columns.lanes_log2, at = column + v * stripe;
        if (divisor > 1) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) sums[v].v[i] = sums[v].v[i] / static_cast<float>(divisor);
        }
        if (at < feature.columns.dim) store_columns<kWidth>(out, at, stripe, feature.columns.dim, sums[v], feature.columns.vector_floats);
    }
}

template <int kWidth, int kVectors>
__device__ inline void clear(Values<kWidth> (&sums)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sums[v] = zeros<kWidth>();
}

/// Bags [first, last), one after the other.
template <typename Weight, int kWidth, int kVectors, int kLoads>
__device__ inline void pool_bags(const ForwardFeature& feature, int32_t first, int32_t last, int32_t lane, int32_t chunk) {
    const auto* table = static_cast<const Weight*>(feature.table);
    const Columns& columns = feature.columns;
    for (int32_t bag = first; bag < last; ++bag) {
        const Bounds bounds = bounds_of(feature.lookups, bag);
        if (bounds.count() > chunk) continue;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * (kWidth << columns.lanes_log2)) {
            Values<kWidth> sums[kVectors];
            clear(sums);
            add_lookups<Weight, kWidth, kVectors, kLoads>(sums, feature.lookups, table, columns, bounds, column);
            store_bag(feature, bag, column, sums, divisor_of(feature.lookups, bounds));
        }
    }
}

/// The same where every bag has one id: the rows of several bags are under way together.
template <typename Weight, int kWidth, int kVectors, int kLoads>
__device__ inline void copy_rows(const ForwardFeature& feature, int32_t first, int32_t last, int32_t lane) {
    constexpr int kRows = kLoads / kVectors;
    const auto* table = static_cast<const Weight*>(feature.table);
    const Columns& columns = feature.columns;
    const Lookups& lookups = feature.lookups;
    for (int32_t bag = first; bag < last; bag += kRows) {
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * (kWidth << columns.lanes_log2)) {
            const auto gathered = gather<Weight, kWidth, kVectors, kRows>(lookups, table, columns, bag, last, column);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                if (bag + i >= last) break;
                Values<kWidth> sums[kVectors];
                clear(sums);
                if (!lookups.weights) add_row(sums, gathered.rows[i]);
                else if (gathered.counts(i)) add_weighted_row(sums, gathered.rows[i], lookups.weights[bag + i], lookups.padding >= 0);
                store_bag(feature, bag + i, column, sums, 1);
            }
        }
    }
}

/// The piece of a long bag that begins in a cell, see chunks.cuh. `bag` is -1 where none does.
struct Piece {
    int32_t bag;
    Bounds bag_bounds;
    int32_t begin;
};

__device__ inline Piece piece_of(const Lookups& lookups, int64_t cell, bool is_first, int32_t chunk) {
    const int64_t cell_begin = cell * chunk;
    if (cell_begin >= lookups.count || lookups.num_bags == 0) return {-1, {0, 0}, 0};
    const int64_t cell_last = cell_begin + chunk - 1 < lookups.count ? cell_begin + chunk - 1 : lookups.count - 1;
    const int32_t bag = bag_of(lookups, static_cast<int32_t>(is_first ? cell_last : cell_begin));
    if (bag < 0) return {-1, {0, 0}, 0};
    const Bounds bounds = bounds_of(lookups, bag);
    if (bounds.count() <= chunk || (bounds.begin >= cell_begin) != is_first) return {-1, {0, 0}, 0};
    if (is_first) return {bag, bounds, bounds.begin};
    const int64_t pieces_before = (cell_begin - bounds.begin + chunk - 1) / chunk;
    const int64_t begin = bounds.begin + pieces_before * chunk;
    if (begin >= bounds.end) return {-1, {0, 0}, 0};
    return {bag, bounds, static_cast<int32_t>(begin)};
}

__device__ inline int32_t piece_end(const Piece& piece, int32_t chunk) {
    return piece.bag_bounds.end - piece.begin > chunk ? piece.begin + chunk : piece.bag_bounds.end;
}

/// What a piece of a long bag comes to, for the kernel that adds the pieces up.
template <int kWidth, int kVectors>
__device__ inline void store_partial(const ForwardFeature& feature, int64_t slot, int32_t column, const Values<kWidth> (&values)[kVectors]) {
    const Columns& columns = feature.columns;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int32_t stripe = kWidth << columns.lanes_log2, at = column + v * stripe;
        if (at < columns.dim)
            store_columns<kWidth>(feature.partials + slot * columns.dim, at, stripe, columns.dim, values[v], columns.vector_loads);
    }
}

/// The group of lanes of a thread, among those of blocks from `first_block` on.
__device__ inline int64_t group_number(const Columns& columns, uint32_t first_block) {
    return (static_cast<int64_t>(blockIdx.x - first_block) * blockDim.x + threadIdx.x) >> columns.lanes_log2;
}

constexpr int kMaxima = 8;      // columns a lane: each has a position beside its value

/// The maxima of one lane's columns, and where they came from: -1 where nothing did.
template <int kWidth, int kVectors>
struct Maxima {
    Values<kWidth> best[kVectors];
    int32_t from[kVectors][kWidth];

    __device__ Maxima() {
        clear(best);
#pragma unroll
        for (auto& part : from) {
#pragma unroll
            for (int32_t& position : part) position = -1;
        }
    }

    /// The larger of each element; the first of equal ones, and a NaN only where nothing came before it, here or (`is_later`) elsewhere.
    __device__ void take(int v, int i, float value, int32_t position, bool is_later) {
        const bool is_first = from[v][i] < 0 && (!is_later || value == value);
        const bool is_better = is_first || value > best[v].v[i];
        best[v].v[i] = is_better ? value : best[v].v[i];
        from[v][i] = is_better ? position : from[v][i];
    }

    template <typename Weight>
    __device__ void take_lookups(const ForwardFeature& feature, Bounds bounds, int32_t column, bool is_later) {
        constexpr int kRows = 4 / kVectors;
        for (int32_t k = bounds.begin; k < bounds.end; k += kRows) {
            const auto gathered = gather<Weight, kWidth, kVectors, kRows>(feature.lookups, static_cast<const Weight*>(feature.table),
                                                                          feature.columns, k, bounds.end, column);
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
                if (!gathered.counts(row)) continue;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                    for (int i = 0; i < kWidth; ++i) take(v, i, gathered.rows[row][v].value(i), k + row, is_later);
                }
            }
        }
    }

    /// Where they came from, as (., D) positions of which `to` is a row.
    __device__ void store_positions(const Columns& columns, int32_t column, int32_t* to) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int32_t stripe = kWidth << columns.lanes_log2, at = column + v * stripe;
            if (at < columns.dim) cuda::store_positions<kWidth>(to, at, stripe, columns.dim, columns.vector_loads, from[v]);
        }
    }
};

/// The same for maxima.
template <typename Weight>
__device__ inline void find_maxima_of_piece(const ForwardFeature& feature, int64_t slot, int32_t lane, int32_t chunk) {
    const Columns& columns = feature.columns;
    const Piece piece = piece_of(feature.lookups, slot / 2, slot % 2 != 0, chunk);
    if (piece.bag < 0) return;
    visit_columns<Weight, kMaxima>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * (kWidth << columns.lanes_log2)) {
            Maxima<kWidth, kVectors> maxima;
            maxima.template take_lookups<Weight>(feature, {piece.begin, piece_end(piece, chunk)}, column, piece.begin != piece.bag_bounds.begin);
            maxima.store_positions(columns, column, feature.counts + slot * columns.dim);
            store_partial(feature, slot, column, maxima.best);
        }
    });
}

/// Maxima of bags, and where they came from. Grid: as bag_forward_kernel. Bytes: 4 D a bag more.
template <typename Weight>
__global__ void __launch_bounds__(kMaxThreads, 2) bag_max_kernel(const __grid_constant__ ForwardArgs args) {
    const ForwardFeature& feature = args.features[blockIdx.y];
    const Columns& columns = feature.columns;
    const int32_t lane = threadIdx.x & ((1 << columns.lanes_log2) - 1);
    if (blockIdx.x >= args.bag_blocks) return find_maxima_of_piece<Weight>(feature, group_number(columns, args.bag_blocks), lane, args.chunk);
    const int64_t bag = group_number(columns, 0);
    if (bag >= feature.lookups.num_bags) return;
    const Bounds bounds = bounds_of(feature.lookups, static_cast<int32_t>(bag));
    if (bounds.count() > args.chunk) return;
    visit_columns<Weight, kMaxima>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * (kWidth << columns.lanes_log2)) {
            Maxima<kWidth, kVectors> maxima;
            maxima.template take_lookups<Weight>(feature, bounds, column, false);
            store_bag(feature, static_cast<int32_t>(bag), column, maxima.best, 1);
            maxima.store_positions(columns, column, feature.lookups.maxima + bag * columns.dim);
        }
    });
}

/// The sum of the piece that begins in a slot, see chunks.cuh; two slots a cell. Nothing where none does.
template <typename Weight, int kLoads>
__device__ inline void pool_piece(const ForwardFeature& feature, int64_t slot, int32_t lane, int32_t chunk) {
    const Columns& columns = feature.columns;
    const Piece piece = piece_of(feature.lookups, slot / 2, slot % 2 != 0, chunk);
    if (piece.bag < 0) return;
    const Bounds bounds{piece.begin, piece_end(piece, chunk)};
    visit_columns<Weight, kForwardColumns<Weight, kLoads>>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        const int32_t stripe = kWidth << columns.lanes_log2;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * stripe) {
            Values<kWidth> sums[kVectors];
            clear(sums);
            add_lookups<Weight, kWidth, kVectors, kLoads>(sums, feature.lookups, static_cast<const Weight*>(feature.table), columns, bounds, column);
            if (column == 0) feature.counts[slot] = divisor_of(feature.lookups, bounds);
            store_partial(feature, slot, column, sums);
        }
    });
}

/// Bytes: K rows read (those that caches hold, less), 4 K of ids, 4 D a bag written.
template <typename Weight, int kLoads>
__global__ void __launch_bounds__(kMaxThreads, 2) bag_forward_kernel(const __grid_constant__ ForwardArgs args) {
    const ForwardFeature& feature = args.features[blockIdx.y];
    const int32_t lane = threadIdx.x & ((1 << feature.columns.lanes_log2) - 1);
    if (blockIdx.x >= args.bag_blocks) return pool_piece<Weight, kLoads>(feature, group_number(feature.columns, args.bag_blocks), lane, args.chunk);
    const int64_t first = group_number(feature.columns, 0) * feature.bags_per_group;
    if (first >= feature.lookups.num_bags) return;
    const int64_t end = first + feature.bags_per_group;
    const auto last = static_cast<int32_t>(end < feature.lookups.num_bags ? end : feature.lookups.num_bags);
    const bool has_one_each = !feature.lookups.offsets && feature.lookups.length == 1;
    visit_columns<Weight, kForwardColumns<Weight, kLoads>>(feature.columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        if (has_one_each) copy_rows<Weight, kWidth, kVectors, 4>(feature, static_cast<int32_t>(first), last, lane);
        else pool_bags<Weight, kWidth, kVectors, kLoads>(feature, static_cast<int32_t>(first), last, lane, args.chunk);
    });
}

/// Adds up the pieces of each long bag, in order. Grid: a group of lanes a cell in x, features in y.
template <typename Weight>
__global__ void __launch_bounds__(kMaxThreads, 2) long_bags_kernel(const __grid_constant__ ForwardArgs args) {
    const ForwardFeature& feature = args.features[blockIdx.y];
    const Columns& columns = feature.columns;
    const int32_t lane = threadIdx.x & ((1 << columns.lanes_log2) - 1);
    const int64_t cell = group_number(columns, 0);
    const Piece piece = piece_of(feature.lookups, cell, true, args.chunk);
    if (piece.bag < 0) return;
    visit_columns<Weight, kForwardColumns<Weight, 4>>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        const int32_t stripe = kWidth << columns.lanes_log2;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * stripe) {
            Values<kWidth> sums[kVectors];
            clear(sums);
            int32_t divisor = 0;
            for (int64_t begin = piece.begin; begin < piece.bag_bounds.end; begin += args.chunk) {
                const int64_t slot = slot_of(static_cast<int32_t>(begin), begin == piece.begin, args.chunk);
                divisor += feature.counts[slot];
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    const int32_t at = column + v * stripe;
                    if (at >= columns.dim) continue;
                    const auto part = load_columns<kWidth>(feature.partials + slot * columns.dim, at, stripe, columns.dim, columns.vector_loads);
#pragma unroll
                    for (int i = 0; i < kWidth; ++i) sums[v].v[i] += part.v[i];
                }
            }
            store_bag(feature, piece.bag, column, sums, feature.lookups.pooling == SL_MEAN ? divisor : 1);
        }
    });
}

/// The maxima of each long bag, from those of its pieces, in order. Grid: as long_bags_kernel.
template <typename Weight>
__global__ void __launch_bounds__(kMaxThreads, 2) long_maxima_kernel(const __grid_constant__ ForwardArgs args) {
    const ForwardFeature& feature = args.features[blockIdx.y];
    const Columns& columns = feature.columns;
    const int32_t lane = threadIdx.x & ((1 << columns.lanes_log2) - 1);
    const int64_t cell = group_number(columns, 0);
    const Piece piece = piece_of(feature.lookups, cell, true, args.chunk);
    if (piece.bag < 0) return;
    visit_columns<Weight, kMaxima>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        const int32_t stripe = kWidth << columns.lanes_log2;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * stripe) {
            Maxima<kWidth, kVectors> maxima;
            for (int64_t begin = piece.begin; begin < piece.bag_bounds.end; begin += args.chunk) {
                const int64_t slot = slot_of(static_cast<int32_t>(begin), begin == piece.begin, args.chunk);
                if (begin != piece.begin && maxima.from[0][0] < 0) {       // padding so far: a NaN that comes now is a maximum
                    const Piece now{piece.bag, piece.bag_bounds, static_cast<int32_t>(begin)};
                    maxima.template take_lookups<Weight>(feature, {now.begin, piece_end(now, args.chunk)}, column, false);
                    continue;
                }
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    const int32_t at = column + v * stripe;
                    if (at >= columns.dim) continue;
                    const auto part = load_columns<kWidth>(feature.partials + slot * columns.dim, at, stripe, columns.dim, columns.vector_loads);
                    int32_t positions[kWidth];
                    load_positions<kWidth>(feature.counts + slot * columns.dim, at, stripe, columns.dim, columns.vector_loads, positions);
#pragma unroll
                    for (int i = 0; i < kWidth; ++i) {
                        if (positions[i] >= 0) maxima.take(v, i, part.v[i], positions[i], begin != piece.begin);
                    }
                }
            }
            store_bag(feature, piece.bag, column, maxima.best, 1);
            maxima.store_positions(columns, column, feature.lookups.maxima + static_cast<int64_t>(piece.bag) * columns.dim);
        }
    });
}

}  // namespace sparselift::cuda
