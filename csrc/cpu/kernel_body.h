// The kernels, written once over the vector primitives of an instruction set.
//
// Included by avx512.cpp, avx2.cpp and portable.cpp inside the namespace of their vectors (vec_<isa>.h), after they define
//   kMaxVectors                  accumulators that fit the registers: 8 or 16
// Every function has internal linkage or lives in that namespace, and nothing of std is used: the linker may not mix builds.
//
// Mapping. A row of D floats is covered by blocks of whole vectors, the last one partial where D is no multiple of kWidth. Up to
// kMaxVectors * kWidth columns are one block, whose sums stay in registers over a whole bag or chain (Span). Wider rows take a pass
// over the ids for each block: every pass touches cache lines of its own.

#include "elements_body.h"

/// N whole vectors, and with kTail a partial one after them.
template <int N, bool kTail>
struct Size {
    static constexpr int kFull = N;
    static constexpr int kVectors = N + (kTail ? 1 : 0);
    static constexpr bool kHasTail = kTail;
};

/// Calls visit(Size, first column, mask) for the blocks that cover `dim` columns.
template <typename Visit>
SL_INLINE void visit_blocks(int64_t dim, const Visit& visit) {
    int64_t column = 0;
    while (column < dim) {
        const int64_t full = (dim - column) / kWidth;
        const Mask mask = mask_for((dim - column) % kWidth);
        const bool tail = (dim - column) % kWidth != 0;
        const auto cover = [&](auto size) {
            visit(size, column, mask);
            column += size.kVectors * kWidth;
        };
        if constexpr (kMaxVectors >= 16) {
            if (full >= 16) { cover(Size<16, false>{}); continue; }
        }
        if (full >= 8) cover(Size<8, false>{});
        else if (full >= 6) cover(Size<6, false>{});
        else if (full == 5 || (full == 4 && !tail)) cover(Size<4, false>{});
        else if (full == 4) cover(Size<4, true>{});
        else if (full == 3) tail ? cover(Size<3, true>{}) : cover(Size<3, false>{});
        else if (full == 2) tail ? cover(Size<2, true>{}) : cover(Size<2, false>{});
        else if (full == 1) tail ? cover(Size<1, true>{}) : cover(Size<1, false>{});
        else cover(Size<0, true>{});
    }
}

SL_INLINE bool is_one_block(int64_t dim) {
    int64_t blocks = 0;
    visit_blocks(dim, [&](auto, int64_t, Mask) { ++blocks; });
    return blocks == 1;
}

template <typename S>
struct Span {
    Vec v[S::kVectors];
};

template <typename S>
SL_INLINE Span<S> zero_span() {
    Span<S> span;
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) span.v[i] = zero();
    return span;
}

template <typename S, typename Element>
SL_INLINE Vec load_vector(const Element* row, int i, Mask mask) {
    return S::kHasTail && i == S::kFull ? load_part(row + i * kWidth, mask) : load(row + i * kWidth);
}

template <typename S, typename Element>
SL_INLINE void store_vector(Element* row, int i, Mask mask, Vec value) {
    if (S::kHasTail && i == S::kFull) store_part(row + i * kWidth, mask, value);
    else store(row + i * kWidth, value);
}

template <typename S, typename Element>
SL_INLINE Span<S> load_span(const Element* row, Mask mask) {
    Span<S> span;
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) span.v[i] = load_vector<S>(row, i, mask);
    return span;
}

template <typename S, typename Element>
SL_INLINE void store_span(Element* row, const Span<S>& span, Mask mask) {
#pragma GCC unroll 16
    for (int i = 0; i < S::kFull; ++i) store(row + i * kWidth, span.v[i]);
    if (S::kHasTail) store_part(row + S::kFull * kWidth, mask, span.v[S::kVectors - 1]);
}

// A row that is in registers, to what works on rows in memory.

template <typename S>
SL_INLINE Vec load_vector(const Span<S>& row, int i, Mask) { return row.v[i]; }

template <typename S>
SL_INLINE void store_vector(Span<S>& row, int i, Mask, Vec value) { row.v[i] = value; }

template <typename S>
SL_INLINE Span<S> load_span(const Span<S>& row, Mask) { return row; }

template <typename S>
SL_INLINE void store_span(Span<S>& row, const Span<S>& span, Mask) { row = span; }

/// Past the caches, and without reading the lines first.
template <typename S>
SL_INLINE void stream_span(float* row, const Span<S>& span) {
#pragma GCC unroll 16
    for (int i = 0; i < S::kFull; ++i) stream(row + i * kWidth, span.v[i]);
}

template <typename S, typename Element>
SL_INLINE void add_row(Span<S>& span, const Element* row, Mask mask) {
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) span.v[i] = add(span.v[i], load_vector<S>(row, i, mask));
}

/// span = fma(factor, row, span), or with two roundings.
template <typename S, bool kFused, typename Row>
SL_INLINE void add_scaled_row(Span<S>& span, Vec factor, const Row& row, Mask mask) {
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) {
        const Vec value = load_vector<S>(row, i, mask);
        span.v[i] = kFused ? fma(factor, value, span.v[i]) : add(span.v[i], mul(factor, value));
    }
}

template <typename S>
SL_INLINE void scale_span(Span<S>& span, float factor) {
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) span.v[i] = mul(span.v[i], splat(factor));
}

/// Into L2: more of these may be under way at a time than of those into L1.
SL_INLINE void prefetch_line(const void* address) { __builtin_prefetch(address, 0, 2); }

/// The lines of a block of a row. Beyond 16 lines the hardware's own prefetcher has long taken over.
template <typename S, typename Element>
SL_INLINE void prefetch_row(const Element* row) {
    constexpr int kBytes = S::kVectors * kWidth * static_cast<int>(sizeof(Element));
    constexpr int kLines = kBytes <= 1024 ? (kBytes + 63) / 64 : 16;
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) prefetch_line(row + i * (64 / static_cast<int>(sizeof(Element))));
}

/// Calls visit with an element of the dtype.
template <typename Visit>
SL_INLINE void visit_weights(int32_t dtype, const Visit& visit) {
    if (dtype == SL_FLOAT32) visit(float{});
    else if (dtype == SL_FLOAT16) visit(Float16{});
    else visit(BFloat16{});
}

struct Bounds {
    int64_t begin, end;
};

SL_INLINE Bounds bounds_of(const Lookups& lookups, int64_t bag) {
    if (!lookups.offsets) return {bag * lookups.length, (bag + 1) * lookups.length};
    return {lookups.offsets[bag], lookups.offsets[bag + 1]};
}

// ---------------------------------------------------------------------------------------------------- ids

template <typename Id>
SL_INLINE int64_t narrow(const Id* ids, int64_t count, int64_t stride, int64_t rows, int32_t* out) {
    // No early exit: a loop without one is vectorised, and a fault is looked for only when there is one.
    uint64_t wrong = 0;
    if (stride == 1) {
        for (int64_t k = 0; k < count; ++k) {
            wrong |= static_cast<uint64_t>(static_cast<int64_t>(ids[k])) >= static_cast<uint64_t>(rows);
            out[k] = static_cast<int32_t>(ids[k]);
        }
    } else {
        for (int64_t k = 0; k < count; ++k) {
            const Id id = ids[k * stride];
            wrong |= static_cast<uint64_t>(static_cast<int64_t>(id)) >= static_cast<uint64_t>(rows);
            out[k] = static_cast<int32_t>(id);
        }
    }
    if (!wrong) return -1;
    int64_t position = 0;
    while (ids[position * stride] >= 0 && ids[position * stride] < rows) ++position;
    return position;
}

static int64_t narrow_ids(const void* ids, int64_t count, int64_t stride, int32_t are_64, int64_t rows, int32_t* out) {
    if (are_64) return narrow(static_cast<const int64_t*>(ids), count, stride, rows, out);
    return narrow(static_cast<const int32_t*>(ids), count, stride, rows, out);
}

// ---------------------------------------------------------------------------------------------------- forward

/// How a bag makes its sum of rows.
enum class Bag {
    kPlain,      // add them
    kPadded,     // add those that are not padding
    kFused,      // fma(weight, row, sum)
    kRounded,    // sum + weight * row with two roundings, padding left out: so does torch once there is a padding_idx
    kCopy        // one row a bag
};

/// Sums of bags [first_bag, last_bag) over the columns of one block. Bytes: a row's block read a lookup, one written a bag.
template <typename S, typename Weight, Bag kKind>
static void forward_block(const ForwardArgs& args, int64_t column, Mask mask) {
    const ForwardArgs a = args;      // a copy of its own: no store can change it, so it stays in registers
    const Lookups l = a.lookups;
    const Weight* table = static_cast<const Weight*>(a.table) + column;
    const int64_t last = l.count - 1, ahead = a.prefetch;
    for (int64_t bag = a.first_bag; bag < a.last_bag; ++bag) {
        const Bounds bounds = bounds_of(l, bag);
        Span<S> sum = zero_span<S>();
        int64_t counted = kKind == Bag::kPadded ? 0 : bounds.end - bounds.begin;
        for (int64_t k = bounds.begin; k < bounds.end; ++k) {
            if (ahead) prefetch_row<S>(table + a.dim * l.ids[k + ahead < last ? k + ahead : last]);
            const int32_t id = l.ids[k];
            const Weight* row = table + a.dim * id;
            if constexpr (kKind == Bag::kCopy) {
                sum = load_span<S>(row, mask);
            } else if constexpr (kKind == Bag::kPlain) {
                add_row(sum, row, mask);
            } else if constexpr (kKind == Bag::kFused) {
                add_scaled_row<S, true>(sum, splat(l.weights[k]), row, mask);
            } else if (id != l.padding) {
                if constexpr (kKind == Bag::kPadded) {
                    add_row(sum, row, mask);
                    ++counted;
                } else {
                    add_scaled_row<S, false>(sum, splat(l.weights[k]), row, mask);
                }
            }
        }
        if (l.pooling == SL_MEAN && counted > 1) {
            const Vec count = splat(static_cast<float>(counted));
#pragma GCC unroll 16
            for (int i = 0; i < S::kVectors; ++i) sum.v[i] = div(sum.v[i], count);
        }
        float* out = a.out + bag * a.out_stride + column;
        if (a.stream) stream_span(out, sum);
        else store_span(out, sum, mask);
    }
}

/// Maxima of the same, and where each came from. The first of equals wins, and a NaN that comes first stays, as in torch.
template <typename S, typename Weight>
static void forward_max_block(const ForwardArgs& args, int64_t column, Mask mask) {
    const ForwardArgs a = args;
    const Lookups l = a.lookups;
    const Weight* table = static_cast<const Weight*>(a.table) + column;
    const int64_t last = l.count - 1, ahead = a.prefetch;
    for (int64_t bag = a.first_bag; bag < a.last_bag; ++bag) {
        const Bounds bounds = bounds_of(l, bag);
        Span<S> best = zero_span<S>(), from;
#pragma GCC unroll 16
        for (int i = 0; i < S::kVectors; ++i) from.v[i] = bits(-1);
        bool empty = true;
        for (int64_t k = bounds.begin; k < bounds.end; ++k) {
            if (ahead) prefetch_row<S>(table + a.dim * l.ids[k + ahead < last ? k + ahead : last]);
            const int32_t id = l.ids[k];
            if (id == l.padding) continue;
            const Vec position = bits(static_cast<int32_t>(k));
            const Span<S> row = load_span<S>(table + a.dim * id, mask);
#pragma GCC unroll 16
            for (int i = 0; i < S::kVectors; ++i) {
                const Flags better = empty ? same_bits(position, position) : greater(row.v[i], best.v[i]);
                best.v[i] = select(better, row.v[i], best.v[i]);
                from.v[i] = select(better, position, from.v[i]);
            }
            empty = false;
        }
        float* out = a.out + bag * a.out_stride + column;
        if (a.stream) stream_span(out, best);
        else store_span(out, best, mask);
        store_span(l.maxima + bag * a.dim + column, from, mask);
    }
}

/// What of a bag's gradient belongs to lookup k: the columns of which it was the maximum.
template <typename S>
SL_INLINE void keep_maxima(Span<S>& grad, const Lookups& l, int64_t k, int64_t bag, int64_t dim, int64_t column, Mask mask) {
    const float* maxima = l.maxima + bag * dim + column;
    const Vec position = bits(static_cast<int32_t>(k));
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) grad.v[i] = select(same_bits(load_vector<S>(maxima, i, mask), position), grad.v[i], zero());
}

template <typename Weight>
static void forward(const ForwardArgs& a) {
    const Lookups& l = a.lookups;
    visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
        using S = decltype(size);
        if (l.pooling == SL_MAX) forward_max_block<S, Weight>(a, column, mask);
        else if (l.pooling == SL_NONE) forward_block<S, Weight, Bag::kCopy>(a, column, mask);
        else if (l.weights && l.padding < 0) forward_block<S, Weight, Bag::kFused>(a, column, mask);
        else if (l.weights) forward_block<S, Weight, Bag::kRounded>(a, column, mask);
        else if (l.padding < 0) forward_block<S, Weight, Bag::kPlain>(a, column, mask);
        else forward_block<S, Weight, Bag::kPadded>(a, column, mask);
    });
    if (a.stream) fence();
}

template <typename Weight>
SL_INLINE float dot(const float* a, const Weight* b, int64_t dim) {
    Vec total = zero();
    int64_t column = 0;
    for (; column + kWidth <= dim; column += kWidth) total = fma(load(a + column), load(b + column), total);
    if (column < dim) {
        const Mask mask = mask_for(dim - column);
        total = fma(load_part(a + column, mask), load_part(b + column, mask), total);
    }
    return sum(total);
}

template <typename Weight>
static void weight_grad(const ForwardArgs& a, const float* grad, int64_t grad_stride, float* out) {
    const Lookups& l = a.lookups;
    const Weight* table = static_cast<const Weight*>(a.table);
    const int64_t last = l.count - 1, ahead = a.prefetch;
    for (int64_t bag = a.first_bag; bag < a.last_bag; ++bag) {
        const Bounds bounds = bounds_of(l, bag);
        for (int64_t k = bounds.begin; k < bounds.end; ++k) {
            if (ahead) prefetch_line(table + a.dim * l.ids[k + ahead < last ? k + ahead : last]);
            const int32_t id = l.ids[k];
            out[k] = id == l.padding ? 0.0f : dot(grad + bag * grad_stride, table + a.dim * id, a.dim);
        }
    }
}

static int64_t find_slots(const UpdateArgs& args, const Lookups& lookups, int64_t known, int32_t* slots) {
    const UpdateArgs a = args;
    const Lookups l = lookups;
    constexpr int64_t kAhead = 16;
    int64_t num_rows = known;
    for (int64_t k = 0; k < l.count; ++k) {
        prefetch_line(a.heads + l.ids[k + kAhead < l.count ? k + kAhead : l.count - 1]);
        const int32_t row = l.ids[k], head = a.heads[row];
        a.rows[num_rows] = row;
        num_rows += head == 0;
        const int32_t slot = head ? head : static_cast<int32_t>(num_rows);
        a.heads[row] = slot;
        slots[k] = slot - 1;
    }
    return num_rows;
}

#include "noise_body.h"
#include "rules_body.h"
#include "update_body.h"
#include "sort_body.h"
#include "lookups_body.h"

template <typename Weight>
constexpr WeightKernels kernels_of() {
    return {forward<Weight>, weight_grad<Weight>};
}

const Kernels* kernels() {
    static const Kernels table = {{kernels_of<float>(), kernels_of<Float16>(), kernels_of<BFloat16>()},      // by SL_FLOAT32 ...
                                  narrow_ids, build_chains, sort_lookups, pack_grads, apply_chains, apply_runs, apply_lookups, apply_dense,
                                  sum_chains, expand, find_slots};
    return &table;
}
