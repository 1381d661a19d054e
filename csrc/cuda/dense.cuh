// The update of small tables without a sort: a warp owns a row, finds its lookups among all ids, and sums their gradients in order.
//
// Grid: blocks of rows in x, tables in y. The eight warps of a block have eight rows, or fewer: then several warps share one, and take its
// pieces (of a chunk of lookups) in turns. Sums lie in shared memory, and have the bits of the sorted way: lookups in order in a piece,
// pieces in order in a row. Nothing is atomic. Bytes: ids, once a warp, from cache but for the first time; K*4*D gradients; a touched row
// and its state read and written.
#pragma once

#include "bags.cuh"
#include "update.cuh"

namespace sparselift::cuda {

constexpr int kDenseWarps = 8, kDenseThreads = kDenseWarps * kWarp;
constexpr int kWindows = 4;                                    // of 32 ids that a warp looks at together
constexpr int kQueue = (kWindows + 1) * kWarp;                 // lookups that it has found and not yet added

/// Sums of pieces, one a warp, and of rows.
inline int64_t dense_shared_bytes(const DenseTable& dense) {
    return static_cast<int64_t>(kDenseWarps + (kDenseWarps >> dense.shares_log2)) * dense.stride * static_cast<int64_t>(sizeof(float));
}

/// The lookups of a row as a warp meets them.
struct RowScan {
    int32_t source;            // where it looks
    int32_t next;              // the first lookup that it has not looked at
    int32_t head;              // of its queue
    int32_t tail;
};

/// What a warp of a block has in shared memory: lookups that it has found, and their bags.
struct RowQueue {
    Shared<int32_t> lookups;
    Shared<int32_t> bags;
};

/// Where a warp looks for the lookups of its row.
struct RowSources {
    const Source* sources;
    int32_t count;
    int32_t row;
};

/// Looks on from where an empty queue leaves off. Whether there was another lookup of the row. All lanes of a warp call it.
__device__ inline bool refill(const RowSources& from, const RowQueue& queue, RowScan& scan) {
    const int32_t lane = threadIdx.x % kWarp;
    __syncwarp();
    for (; scan.source < from.count; ++scan.source, scan.next = 0) {
        const Source& source = from.sources[scan.source];
        const Lookups& lookups = source.lookups;
        if (from.row == lookups.padding || source.batch_fault->first != kNoFault) continue;
        scan.head = scan.tail = 0;
        while (scan.tail < kWarp && scan.next < lookups.count) {
            bool is_mine[kWindows], has_any = false;
#pragma unroll
            for (int w = 0; w < kWindows; ++w) {
                const int64_t k = static_cast<int64_t>(scan.next) + w * kWarp + lane;
                is_mine[w] = k < lookups.count && lookups.ids[k] == from.row;
                has_any = has_any || is_mine[w];
            }
            const bool is_found = __any_sync(kWholeWarp, has_any) != 0;
#pragma unroll
            for (int w = 0; w < kWindows && is_found; ++w) {
                const auto k = static_cast<int32_t>(static_cast<int64_t>(scan.next) + w * kWarp + lane);      // may be past all where it is not mine
                const int32_t bag = is_mine[w] ? bag_of(lookups, k) : -1;
                const unsigned found = __ballot_sync(kWholeWarp, bag >= 0);
                if (bag >= 0) {
                    const int32_t place = scan.tail + __popc(found & ((1u << lane) - 1));
                    queue.lookups.store(place, k);
                    queue.bags.store(place, bag);
                }
                scan.tail += __popc(found);
            }
            scan.next = lookups.count - scan.next > kWindows * kWarp ? scan.next + kWindows * kWarp : lookups.count;
        }
        __syncwarp();
        if (scan.tail > 0) return true;
    }
    return false;
}

/// Passes over `skipped` lookups of the row and sums the next ones, up to `chunk`: how many there were. All lanes of a warp call it; those
/// whose `column` is past the row only look.
template <int kWidth, int kVectors>
__device__ inline int32_t sum_piece(const RowSources& from, const RowQueue& queue, int32_t skipped, int32_t chunk, int32_t column,
                                    const Columns& columns, RowScan& scan, Values<kWidth> (&sums)[kVectors]) {
    constexpr int kRows = kGradRows<kWidth, kVectors>;
    const int32_t stripe = kWidth << columns.lanes_log2;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sums[v] = zeros<kWidth>();
    int32_t added = 0;
    while (added < chunk && (scan.head < scan.tail || refill(from, queue, scan))) {
        const int32_t queued = scan.tail - scan.head;
        if (skipped > 0) {
            const int32_t passed = queued < skipped ? queued : skipped;
            skipped -= passed;
            scan.head += passed;
            continue;
        }
        const int32_t count = queued < chunk - added ? queued : chunk - added;
        for (int32_t i = 0; i < count; i += kRows) {
            LookupGrad<kWidth, kVectors> rows[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int32_t at = scan.head + (i + r < count ? i + r : i);
                load_grad(from.sources[scan.source], queue.lookups.load(at), queue.bags.load(at), i + r < count, column, stripe, columns.dim,
                          rows[r]);
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (i + r < count) add_grad(sums, rows[r]);
            }
        }
        scan.head += count;
        added += count;
    }
    return added;
}

/// One lane's columns in a row of shared memory.
template <int kWidth, int kVectors, typename Visit>
__device__ inline void visit_elements(const Columns& columns, int32_t column, const Visit& visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int32_t at = column + v * (kWidth << columns.lanes_log2);
        if (at >= columns.dim) continue;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) visit(v, i, at + i);
    }
}

template <typename Weight, typename Rule>
__global__ void __launch_bounds__(kDenseThreads, Rule::kBlocks) dense_rows_kernel(DenseArgs args, int32_t variant) {
    SL_SHARED(int32_t, lookups, kDenseWarps * kQueue);
    SL_SHARED(int32_t, bags, kDenseWarps * kQueue);
    SL_SHARED(int32_t, added, kDenseWarps);
    if (args.status->faulted) return;
    const DenseTable& dense = args.dense[blockIdx.y];
    const TableUpdate& table = args.tables[dense.table];
    const Columns columns = table.columns;
    const int32_t shares = 1 << dense.shares_log2, rows = kDenseWarps >> dense.shares_log2;
    if (table.variant != variant || static_cast<int64_t>(blockIdx.x) * rows >= dense.rows) return;
    const int32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, share = warp & (shares - 1), lanes = 1 << columns.lanes_log2;
    const int32_t row = static_cast<int32_t>(blockIdx.x) * rows + (warp >> dense.shares_log2);
    const auto pieces = dynamic_shared<float>(0, kDenseWarps * dense.stride);
    const auto totals = dynamic_shared<float>(static_cast<size_t>(kDenseWarps * dense.stride) * sizeof(float), rows * dense.stride)
                            .part((warp >> dense.shares_log2) * dense.stride, dense.stride);
    const RowQueue queue{lookups.part(warp * kQueue, kQueue), bags.part(warp * kQueue, kQueue)};
    const RowSources from{args.sources + dense.first_source, row < dense.rows ? dense.num_sources : 0, row};
    visit_columns<Weight, kUpdateColumns>(columns, [&](auto width, auto vectors) {
        constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
        const int32_t stripe = kWidth << columns.lanes_log2;
        bool is_touched = false;
        for (int32_t first = 0; first < columns.dim; first += kVectors * stripe) {
            const int32_t column = lane < lanes ? first + lane * kWidth : columns.dim;
            if (share == 0) visit_elements<kWidth, kVectors>(columns, column, [&](int, int, int32_t at) { totals.store(at, 0.0f); });
            RowScan scan{0, 0, 0, 0};
            for (int32_t others = share;; others = shares - 1) {       // pieces of other warps that come before the next one of this
                Values<kWidth> sums[kVectors];
                const int32_t count = sum_piece(from, queue, others * args.chunk, args.chunk, column, columns, scan, sums);
                is_touched = is_touched || count > 0;
                if (lane == 0) added.store(warp, count);
                visit_elements<kWidth, kVectors>(columns, column,
                                                 [&](int v, int i, int32_t at) { pieces.store(warp * dense.stride + at, sums[v].v[i]); });
                if (__syncthreads_or(count) == 0) break;
                for (int32_t other = warp; share == 0 && other < warp + shares && added.load(other) > 0; ++other)
                    visit_elements<kWidth, kVectors>(columns, column, [&](int, int, int32_t at) {
                        totals.store(at, totals.load(at) + pieces.load(other * dense.stride + at));
                    });
                __syncthreads();
            }
        }
        if (share != 0) return;
        const Row mine{row, 0, lane & (lanes - 1), is_touched && lane < lanes};
        const auto sum = [&](int32_t column, auto& sums) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) sums[v] = zeros<kWidth>();
            visit_elements<kWidth, kVectors>(columns, column, [&](int v, int i, int32_t at) { sums[v].v[i] = totals.load(at); });
        };
        Rule{}.template operator()<Weight, kWidth, kVectors>(table, mine, sum);
    });
}

}  // namespace sparselift::cuda
