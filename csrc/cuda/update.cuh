// The coalesced update: sums of the gradients of each touched row, and the optimizer's formula on the row.
//
// Lookups come sorted by (table, row). Grid: a warp 32 sorted positions. A run of equal keys is one row; groups of 1 to 32 lanes, as
// many as a row has loads, each take a run that begins among the 32 and sum its gradients in registers, in the order of the lookups.
// Each row has one writer, so nothing is atomic and the bits are the same in every run. A run of more than a chunk leaves sums of
// its pieces, which long_runs_kernel adds up.
#pragma once

#include "rules.cuh"
#include "runs.cuh"

namespace sparselift::cuda {

constexpr int kUpdateThreads = 256;    // a block, at most
constexpr int kUpdateColumns = 8;
constexpr int kUpdateLoads = 4;        // gradient vectors under way a lane

/// Zero but for the columns whose maximum came from lookup k. `maxima`: the row of its bag.
template <int kWidth>
__device__ inline void keep_maxima(Values<kWidth>& grad, const int32_t* maxima, int32_t k, int32_t at, int32_t stripe, int32_t dim) {
    int32_t from[kWidth];
    load_positions<kWidth>(maxima, at, stripe, dim, dim % 4 == 0, from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) grad.v[i] = from[i] == k ? grad.v[i] : 0.0f;
}

/// What one lookup adds to its row, of the columns of one lane: grads * factor * scale.
template <int kWidth, int kVectors>
struct LookupGrad {
    Values<kWidth> grads[kVectors];
    float factor;
    float scale;
};

/// The gradient of lookup k of a source, which is in `bag`. Zeros where it is not `is_there`.
template <int kWidth, int kVectors>
__device__ inline void load_grad(const Source& source, int32_t k, int32_t bag, bool is_there, int32_t column, int32_t stripe, int32_t dim,
                                 LookupGrad<kWidth, kVectors>& grad) {
    const Lookups& lookups = source.lookups;
    grad.factor = lookups.weights ? lookups.weights[k] : lookups.inverse ? lookups.inverse[bag] : 1.0f;
    grad.scale = source.scale;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int32_t at = column + v * stripe;
        grad.grads[v] = zeros<kWidth>();
        if (!is_there || at >= dim) continue;
        grad.grads[v] = load_columns<kWidth>(source.grad + bag * source.grad_stride, at, stripe, dim, source.vector_floats);
        if (lookups.maxima) keep_maxima(grad.grads[v], lookups.maxima + int64_t{bag} * dim, k, at, stripe, dim);
    }
}

template <int kWidth, int kVectors>
__device__ inline void add_grad(Values<kWidth> (&sums)[kVectors], const LookupGrad<kWidth, kVectors>& grad) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[v].v[j] = sums[v].v[j] + grad.grads[v].v[j] * grad.factor * grad.scale;
    }
}

/// Lookups whose gradients are under way together in a lane: gradients are float32, whatever the weights are.
template <int kWidth, int kVectors>
constexpr int kGradRows = kVectors * (kWidth > 4 ? kWidth / 4 : 1) < kUpdateLoads ? kUpdateLoads / (kVectors * (kWidth > 4 ? kWidth / 4 : 1)) : 1;

/// The sum of `count` lookups from `begin` on, of the columns of one lane.
template <int kWidth, int kVectors>
__device__ inline void sum_lookups(const RunArgs& args, int32_t begin, int32_t count, int32_t column, int32_t stripe, int32_t dim,
                                   Values<kWidth> (&sums)[kVectors]) {
    constexpr int kRows = kGradRows<kWidth, kVectors>;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sums[v] = zeros<kWidth>();
    for (int32_t k = 0; k < count; k += kRows) {
        LookupGrad<kWidth, kVectors> rows[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const bool is_there = k + i < count;
            const uint32_t position = args.positions[is_there ? begin + k + i : begin];
            const Origin origin = args.origins[position];
            const Source& source = args.sources[origin.source];
            load_grad(source, static_cast<int32_t>(position) - source.first, origin.bag, is_there, column, stripe, dim, rows[i]);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (k + i < count) add_grad(sums, rows[i]);
        }
    }
}

/// A row whose gradients are summed. `is_active` is false for lanes that have none; they take part in shuffles.
struct Row {
    int64_t row;
    int32_t position;          // of its run
    int32_t lane;              // in its group
    bool is_active;
};

/// Applies the rule, and rounds to the nearest or by chance. `sum` fills the gradient of a lane's columns.
template <bool kByChance>
struct Step {
    template <typename Weight, int kWidth, int kVectors, typename Sum>
    __device__ void operator()(const TableUpdate& table, const Row& row, const Sum& sum) const {
        const sl_rule& rule = table.rule;
        const Columns columns = table.columns;
        const int32_t lanes = 1 << columns.lanes_log2, stripe = kWidth * lanes, pass = kVectors * stripe;
        const bool is_rowwise = rule.kind == SL_ROWWISE_ADAGRAD, is_one_pass = columns.dim <= pass;
        const int64_t begin = row.row * columns.dim;
        RowPart<Weight, kWidth, kVectors> part{static_cast<Weight*>(table.weights) + begin,
                                               {table.state.first + begin, table.state.second + begin},
                                               0, stripe, columns.dim, columns.vector_floats != 0, static_cast<int32_t>(row.row)};
        Values<kWidth> weights[kVectors], grads[kVectors];
        float squares = 0.0f, scale = 0.0f;
        for (int32_t is_step = is_rowwise ? 0 : 1; is_step < 2; ++is_step) {      // row-wise Adagrad sees the whole row before it steps
            if (is_step && is_rowwise) scale = rowwise_scale(table, row, squares);
            for (part.column = row.lane * kWidth; row.is_active && part.column < columns.dim; part.column += pass) {
                if (!is_step || !is_rowwise || !is_one_pass) {
                    load_weights(part, weights);
                    sum(part.column, grads);
                    adjust(rule, weights, grads);
                }
                if (is_step) step_columns<kByChance>(rule, part, scale, weights, grads);
                else squares += sum_of_squares(grads);
            }
        }
    }

    /// Adds the mean square to the row's state. What the gradient is multiplied by.
    __device__ static float rowwise_scale(const TableUpdate& table, const Row& row, float squares) {
        const int32_t lanes = 1 << table.columns.lanes_log2;
        squares = group_sum(squares, lanes);
        float scale = 0.0f;
        if (row.is_active && row.lane == 0) {
            const float state = table.state.first[row.row] + squares / static_cast<float>(table.columns.dim);
            table.state.first[row.row] = state;
            scale = -table.rule.lr / (sqrtf(state) + table.rule.eps);
        }
        return __shfl_sync(kWholeWarp, scale, 0, lanes);
    }
};

struct ApplyRule : Step<false> {
    static constexpr int kBlocks = 2;      // a multiprocessor, of kUpdateThreads
};

/// Takes more registers than two blocks have.
struct ApplyRuleByChance : Step<true> {
    static constexpr int kBlocks = 1;
};

/// Writes the row's number and its gradient where the run's rank says.
struct WriteGradient {
    static constexpr int kBlocks = 2;

    int64_t* rows;
    float* grads;
    const int32_t* ranks;      // one a sorted position

    template <typename Weight, int kWidth, int kVectors, typename Sum>
    __device__ void operator()(const TableUpdate& table, const Row& row, const Sum& sum) const {
        if (!row.is_active) return;
        const Columns columns = table.columns;
        const int32_t stripe = kWidth << columns.lanes_log2;
        const int64_t rank = ranks[row.position];
        if (row.lane == 0) rows[rank] = row.row;
        for (int32_t column = row.lane * kWidth; column < columns.dim; column += kVectors * stripe) {
            Values<kWidth> sums[kVectors];
            sum(column, sums);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int32_t at = column + v * stripe;
                if (at < columns.dim)
                    store_columns<kWidth>(grads + rank * columns.dim, at, stripe, columns.dim, sums[v], columns.vector_floats);
            }
        }
    }
};

/// Leaves the sum of a piece of a long run for long_runs_kernel.
template <int kWidth, int kVectors>
__device__ inline void store_piece(const RunArgs& args, const Columns& columns, int32_t begin, int32_t count, bool is_first, int32_t lane) {
    float* partial = args.partials + slot_of(begin, is_first, args.chunk) * args.partial_stride;
    const int32_t stripe = kWidth << columns.lanes_log2;
    if (is_first && lane == 0) args.long_runs[begin / args.chunk] = begin + 1;
    for (int32_t column = lane * kWidth; column < columns.dim; column += kVectors * stripe) {
        Values<kWidth> sums[kVectors];
        sum_lookups<kWidth, kVectors>(args, begin, count, column, stripe, columns.dim, sums);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int32_t at = column + v * stripe;
            if (at < columns.dim) store_columns<kWidth>(partial, at, stripe, columns.dim, sums[v], columns.vector_loads);
        }
    }
}

/// The lane of the n-th set bit, or -1.
__device__ inline int32_t nth_lane(unsigned lanes, int32_t n) {
    for (int32_t i = 0; i < n; ++i) lanes &= lanes - 1;
    return __ffs(static_cast<int>(lanes)) - 1;
}

/// The pieces that begin at `lanes` of the 32 positions from `first` on, all of one table: a group of lanes takes one at a time.
template <typename Weight, typename Finish>
__device__ inline void sum_pieces(const RunArgs& args, const TableUpdate& table, int32_t first, const RunPosition& at, unsigned lanes,
                                  int32_t lane, const Finish& finish) {
    const Columns columns = table.columns;
    const int32_t groups = kWarp >> columns.lanes_log2, group = lane >> columns.lanes_log2;
    const uint64_t row_mask = (uint64_t{1} << args.row_bits) - 1;
    visit_columns<Weight, kUpdateColumns>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        for (unsigned left = lanes; left != 0;) {
            const int32_t mine = nth_lane(left, group), from = mine < 0 ? 0 : mine, begin = first + from;
            const uint64_t key = __shfl_sync(kWholeWarp, at.key, from);
            const int32_t run_begin = __shfl_sync(kWholeWarp, at.run_begin, from);
            const int32_t count = __shfl_sync(kWholeWarp, at.piece_count, from);
            const bool is_long = __shfl_sync(kWholeWarp, static_cast<int>(at.is_long), from) != 0;
            const int32_t lane_in_group = lane & ((1 << columns.lanes_log2) - 1);
            if (mine >= 0 && is_long)
                store_piece<kWidth, kVectors>(args, columns, begin, count, begin == run_begin, lane_in_group);
            const Row row{static_cast<int64_t>(key & row_mask), begin, lane_in_group, mine >= 0 && !is_long};
            const auto sum = [&](int32_t column, auto& sums) {
                sum_lookups<kWidth, kVectors>(args, begin, count, column, kWidth << columns.lanes_log2, columns.dim, sums);
            };
            finish.template operator()<Weight, kWidth, kVectors>(table, row, sum);
            for (int32_t i = 0; i < groups; ++i) left &= left - 1;
        }
    });
}

/// Bytes: K gradient rows, mostly from cache; a touched row and its state read and written; 20 K of keys, positions and origins.
template <typename Weight, typename Finish>
__global__ void __launch_bounds__(kUpdateThreads, Finish::kBlocks) coalesced_kernel(RunArgs args, int32_t variant, Finish finish) {
    if (args.status && args.status->faulted) return;
    const int32_t lane = threadIdx.x % kWarp;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp * kWarp;
    if (first >= args.count) return;
    const RunPosition at = read_run(args, static_cast<int32_t>(first), lane);
    const auto my_table = static_cast<int32_t>(at.key >> args.row_bits);
    unsigned pending = __ballot_sync(kWholeWarp, at.begins_piece);
    while (pending != 0) {
        const int32_t number = __shfl_sync(kWholeWarp, my_table, __ffs(static_cast<int>(pending)) - 1);
        const unsigned members = pending & __ballot_sync(kWholeWarp, my_table == number);
        pending &= ~members;
        const TableUpdate& table = args.tables[number];
        if (table.variant == variant) sum_pieces<Weight>(args, table, static_cast<int32_t>(first), at, members, lane, finish);
    }
}

/// The runs of more than a chunk: adds up their pieces, in order. Grid: a warp a cell of `chunk` positions.
template <typename Weight, typename Finish>
__global__ void __launch_bounds__(kUpdateThreads, Finish::kBlocks) long_runs_kernel(RunArgs args, int32_t variant, Finish finish) {
    if (args.status && args.status->faulted) return;
    const int32_t lane = threadIdx.x % kWarp;
    const int64_t cell = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
    if (cell * args.chunk >= args.count) return;
    const int32_t begin = args.long_runs[cell] - 1;
    if (begin < 0) return;
    const uint64_t key = args.keys[begin];
    const TableUpdate& table = args.tables[key >> args.row_bits];
    if (table.variant != variant) return;
    const Columns columns = table.columns;
    const uint64_t row_mask = (uint64_t{1} << args.row_bits) - 1;
    const int32_t lanes = 1 << columns.lanes_log2;
    const Row row{static_cast<int64_t>(key & row_mask), begin, lane & (lanes - 1), lane < lanes};
    visit_columns<Weight, kUpdateColumns>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        const auto sum = [&](int32_t column, auto& sums) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) sums[v] = zeros<kWidth>();
            for (int64_t at = begin; at < args.count && args.keys[at] == key; at += args.chunk) {
                const float* partial = args.partials + slot_of(static_cast<int32_t>(at), at == begin, args.chunk) * args.partial_stride;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    const int32_t stripe = kWidth << columns.lanes_log2, from = column + v * stripe;
                    if (from >= columns.dim) continue;
                    const auto part = load_columns<kWidth>(partial, from, stripe, columns.dim, columns.vector_loads);
#pragma unroll
                    for (int i = 0; i < kWidth; ++i) sums[v].v[i] = sums[v].v[i] + part.v[i];
                }
            }
        };
        finish.template operator()<Weight, kWidth, kVectors>(table, row, sum);
    });
}

/// The gradient of every lookup by itself. Grid: a group of lanes a lookup; keys and positions are not sorted.
template <typename Finish>
__global__ void __launch_bounds__(kUpdateThreads) expanded_kernel(RunArgs args, Finish finish) {
    const TableUpdate& table = args.tables[0];
    const Columns columns = table.columns;
    const int64_t position = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> columns.lanes_log2;
    if (position >= args.count || args.keys[position] == args.unused) return;
    const auto begin = static_cast<int32_t>(position);
    const auto lane = static_cast<int32_t>(threadIdx.x & ((1u << columns.lanes_log2) - 1));
    visit_columns<float, kUpdateColumns>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        const auto sum = [&](int32_t column, auto& sums) {
            sum_lookups<kWidth, kVectors>(args, begin, 1, column, kWidth << columns.lanes_log2, columns.dim, sums);
        };
        const Row row{static_cast<int64_t>(args.keys[position]), begin, lane, true};
        finish.template operator()<float, kWidth, kVectors>(table, row, sum);
    });
}

}  // namespace sparselift::cuda
