// Table-batched bags: pooled[b, :] = sum of table[ids[k], :] over the lookups k of bag b, for every feature in one launch.
//
// Grid: blocks of bags in x, features in y. A group of 1 to 32 lanes owns a bag, as many lanes as a row has loads, so that narrow rows
// pack up to 32 bags into a warp. A lane owns columns, and keeps their sums in registers over the whole bag; it adds rows in id order
// (the bits of torch), with kLoads loads under way. Bags longer than a chunk are left to the two kernels at the end.
#pragma once

#include "bags.cuh"
#include "chunks.cuh"
#include "vectors.cuh"

namespace sparselift::cuda {

/// Columns that a lane sums at a time.
template <typename Weight>
constexpr int kForwardColumns = sizeof(Weight) == 4 ? 16 : 8;

/// The part of some rows that one lane has loaded: `factor` is 0 for what does not count.
template <typename Weight, int kWidth, int kVectors, int kRows>
struct Gathered {
    Packed<Weight, kWidth> rows[kRows][kVectors];
    float factors[kRows];
    int32_t counted;
};

/// Loads the rows of lookups [first, first + kRows) that are before `end`: first all ids, then all rows, so that their loads overlap.
template <typename Weight, int kWidth, int kVectors, int kRows>
__device__ inline Gathered<Weight, kWidth, kVectors, kRows> gather(const Lookups& lookups, const Weight* table, const Columns& columns,
                                                                   int32_t first, int32_t end, int32_t column) {
    Gathered<Weight, kWidth, kVectors, kRows> gathered;
    gathered.counted = 0;
    int32_t ids[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        ids[i] = first + i < end ? lookups.ids[first + i] : -1;
        const bool is_counted = counts(lookups, ids[i]);
        gathered.factors[i] = !is_counted ? 0.0f : lookups.weights ? lookups.weights[first + i] : 1.0f;
        gathered.counted += is_counted;
        if (!is_counted) ids[i] = -1;
    }
    const int32_t stripe = kWidth << columns.lanes_log2;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const Weight* row = table + static_cast<int64_t>(ids[i] < 0 ? 0 : ids[i]) * columns.dim;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int32_t at = column + v * stripe;
            gathered.rows[i][v] = ids[i] >= 0 && at < columns.dim ? load_packed<Weight, kWidth>(row + at) : no_elements<Weight, kWidth>();
        }
    }
    return gathered;
}

/// sum + factor * row: with one rounding, or with two where a feature has weights and padding, as torch does. A row that does not count
/// adds 0 * 0, which changes nothing: sums start at +0 and never become -0.
template <typename Weight, int kWidth, int kVectors>
__device__ inline void add_row(Values<kWidth> (&sums)[kVectors], const Packed<Weight, kWidth> (&row)[kVectors], float factor,
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

template <typename Weight, int kWidth, int kVectors, int kLoads>
__device__ inline int32_t add_lookups(Values<kWidth> (&sums)[kVectors], const Lookups& lookups, const Weight* table,
                                      const Columns& columns, Bounds bounds, int32_t column) {
    constexpr int kRows = kLoads / kVectors;
    const bool is_rounded = lookups.weights && lookups.padding >= 0;
    int32_t counted = 0;
    for (int32_t k = bounds.begin; k < bounds.end; k += kRows) {
        const auto gathered = gather<Weight, kWidth, kVectors, kRows>(lookups, table, columns, k, bounds.end, column);
        counted += gathered.counted;
#pragma unroll
        for (int i = 0; i < kRows; ++i) add_row(sums, gathered.rows[i], gathered.factors[i], is_rounded);
    }
    return counted;
}

template <int kWidth, int kVectors>
__device__ inline void store_bag(const ForwardFeature& feature, int32_t bag, int32_t column, Values<kWidth> (&sums)[kVectors],
                                 int32_t counted) {
    const bool is_divided = feature.lookups.pooling == SL_MEAN && counted > 1;
    float* out = feature.out + bag * feature.out_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int32_t at = column + v * (kWidth << feature.columns.lanes_log2);
        if (is_divided) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) sums[v].v[i] = sums[v].v[i] / static_cast<float>(counted);
        }
        if (at < feature.columns.dim) store_floats<kWidth>(out + at, sums[v], feature.columns.vector_floats);
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
            const int32_t counted = add_lookups<Weight, kWidth, kVectors, kLoads>(sums, feature.lookups, table, columns, bounds, column);
            store_bag(feature, bag, column, sums, counted);
        }
    }
}

/// The same where every bag has one id: the rows of several bags are under way together.
template <typename Weight, int kWidth, int kVectors, int kLoads>
__device__ inline void copy_rows(const ForwardFeature& feature, int32_t first, int32_t last, int32_t lane) {
    constexpr int kRows = kLoads / kVectors;
    const auto* table = static_cast<const Weight*>(feature.table);
    const Columns& columns = feature.columns;
    const bool is_rounded = feature.lookups.weights && feature.lookups.padding >= 0;
    for (int32_t bag = first; bag < last; bag += kRows) {
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * (kWidth << columns.lanes_log2)) {
            const auto gathered = gather<Weight, kWidth, kVectors, kRows>(feature.lookups, table, columns, bag, last, column);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                if (bag + i >= last) break;
                Values<kWidth> sums[kVectors];
                clear(sums);
                add_row(sums, gathered.rows[i], gathered.factors[i], is_rounded);
                store_bag(feature, bag + i, column, sums, 1);
            }
        }
    }
}

/// The larger of each element, and the lookup that it came from; the first of equal ones, and a NaN only where nothing came before it.
template <typename Weight, int kWidth, int kVectors>
__device__ inline void take_larger(Values<kWidth> (&best)[kVectors], int32_t (&from)[kVectors][kWidth],
                                   const Packed<Weight, kWidth> (&row)[kVectors], int32_t k) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const float value = row[v].value(i);
            const bool is_better = from[v][i] < 0 || value > best[v].v[i];
            best[v].v[i] = is_better ? value : best[v].v[i];
            from[v][i] = is_better ? k : from[v][i];
        }
    }
}

constexpr int kMaxima = 8;      // columns a lane: each has a position beside its value

/// Maxima of bags, and where they came from. Grid: as bag_forward_kernel, a bag a group, however long. Bytes: 4 D a bag more.
template <typename Weight>
__global__ void __launch_bounds__(kMaxThreads) bag_max_kernel(ForwardArgs args) {
    const ForwardFeature& feature = args.features[blockIdx.y];
    const Columns& columns = feature.columns;
    const int32_t lane = threadIdx.x & ((1 << columns.lanes_log2) - 1);
    const int64_t bag = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> columns.lanes_log2;
    if (bag >= feature.lookups.num_bags) return;
    const Bounds bounds = bounds_of(feature.lookups, static_cast<int32_t>(bag));
    visit_columns<Weight, kMaxima>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value, kRows = 4 / kVectors;
        const int32_t stripe = kWidth << columns.lanes_log2;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * stripe) {
            Values<kWidth> best[kVectors];
            int32_t from[kVectors][kWidth];
            clear(best);
            for (auto& part : from) {
                for (int32_t& position : part) position = -1;
            }
            for (int32_t k = bounds.begin; k < bounds.end; k += kRows) {
                const auto gathered = gather<Weight, kWidth, kVectors, kRows>(feature.lookups, static_cast<const Weight*>(feature.table), columns,
                                                                              k, bounds.end, column);
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    if (gathered.factors[i] != 0.0f) take_larger(best, from, gathered.rows[i], k + i);
                }
            }
            store_bag(feature, static_cast<int32_t>(bag), column, best, 1);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int32_t at = column + v * stripe;
                if (at >= columns.dim) continue;
#pragma unroll
                for (int i = 0; i < kWidth; ++i) feature.lookups.maxima[bag * columns.dim + at + i] = from[v][i];
            }
        }
    });
}

/// Bytes: K rows read (those that caches hold, less), 4 K of ids, 4 D a bag written.
template <typename Weight, int kLoads>
__global__ void __launch_bounds__(kMaxThreads, kLoads > 4 ? 1 : 2) bag_forward_kernel(ForwardArgs args) {
    const ForwardFeature& feature = args.features[blockIdx.y];
    const int32_t lane = threadIdx.x & ((1 << feature.columns.lanes_log2) - 1);
    const int64_t group = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> feature.columns.lanes_log2;
    const int64_t first = group * feature.bags_per_group;
    if (first >= feature.lookups.num_bags) return;
    const int64_t end = first + feature.bags_per_group;
    const auto last = static_cast<int32_t>(end < feature.lookups.num_bags ? end : feature.lookups.num_bags);
    const bool has_one_each = !feature.lookups.offsets && feature.lookups.length == 1;
    visit_columns<Weight, kForwardColumns<Weight>>(feature.columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        if (has_one_each) copy_rows<Weight, kWidth, kVectors, kLoads>(feature, static_cast<int32_t>(first), last, lane);
        else pool_bags<Weight, kWidth, kVectors, kLoads>(feature, static_cast<int32_t>(first), last, lane, args.chunk);
    });
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

/// Sums of the pieces of long bags. Grid: two groups of lanes a cell in x, features in y.
template <typename Weight, int kLoads>
__global__ void __launch_bounds__(kMaxThreads, kLoads > 4 ? 1 : 2) long_bag_pieces_kernel(ForwardArgs args) {
    const ForwardFeature& feature = args.features[blockIdx.y];
    const Columns& columns = feature.columns;
    const int32_t lane = threadIdx.x & ((1 << columns.lanes_log2) - 1);
    const int64_t slot = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> columns.lanes_log2;
    const Piece piece = piece_of(feature.lookups, slot / 2, slot % 2 != 0, args.chunk);
    if (piece.bag < 0) return;
    const int32_t piece_end = piece.begin + args.chunk < piece.bag_bounds.end ? piece.begin + args.chunk : piece.bag_bounds.end;
    visit_columns<Weight, kForwardColumns<Weight>>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        const int32_t stripe = kWidth << columns.lanes_log2;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * stripe) {
            Values<kWidth> sums[kVectors];
            clear(sums);
            const int32_t counted = add_lookups<Weight, kWidth, kVectors, kLoads>(
                sums, feature.lookups, static_cast<const Weight*>(feature.table), columns, {piece.begin, piece_end}, column);
            if (column == 0) feature.counts[slot] = counted;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int32_t at = column + v * stripe;
                if (at < columns.dim) store_floats<kWidth>(feature.partials + slot * columns.dim + at, sums[v], columns.vector_loads);
            }
        }
    });
}

/// Adds up the pieces of each long bag, in order. Grid: a group of lanes a cell in x, features in y.
template <typename Weight>
__global__ void __launch_bounds__(kMaxThreads, 2) long_bags_kernel(ForwardArgs args) {
    const ForwardFeature& feature = args.features[blockIdx.y];
    const Columns& columns = feature.columns;
    const int32_t lane = threadIdx.x & ((1 << columns.lanes_log2) - 1);
    const int64_t cell = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> columns.lanes_log2;
    const Piece piece = piece_of(feature.lookups, cell, true, args.chunk);
    if (piece.bag < 0) return;
    visit_columns<Weight, kForwardColumns<Weight>>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        const int32_t stripe = kWidth << columns.lanes_log2;
        for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * stripe) {
            Values<kWidth> sums[kVectors];
            clear(sums);
            int32_t counted = 0;
            for (int64_t begin = piece.begin; begin < piece.bag_bounds.end; begin += args.chunk) {
                const int64_t slot = slot_of(static_cast<int32_t>(begin), begin == piece.begin, args.chunk);
                counted += feature.counts[slot];
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    const int32_t at = column + v * stripe;
                    if (at >= columns.dim) continue;
                    const auto part = load_floats<kWidth>(feature.partials + slot * columns.dim + at, columns.vector_loads);
#pragma unroll
                    for (int i = 0; i < kWidth; ++i) sums[v].v[i] += part.v[i];
                }
            }
            store_bag(feature, piece.bag, column, sums, counted);
        }
    });
}

}  // namespace sparselift::cuda
