// The loops of packed buffers and regrouped columns. Included by exchange_avx512.cpp, exchange_avx2.cpp and exchange_portable.cpp inside the
// namespace of their vectors (vec_<isa>.h).

#include "elements_body.h"

// ---------------------------------------------------------------------------------------------------- elements of a wire

/// Rows that lie side by side on both sides are one long row, with one partial vector at its end.
template <typename Element>
SL_INLINE PackedRows joined(const PackedRows& args) {
    PackedRows a = args;
    const int64_t rows = a.last_row - a.first_row;
    if (a.row_stride != a.dim || rows == 0) return a;
    a.rows += a.first_row * a.dim;
    a.elements += a.first_row * a.dim * static_cast<int64_t>(sizeof(Element));
    a.dim *= rows;
    a.first_row = 0;
    a.last_row = 1;
    return a;
}

template <typename Element>
static void pack_floats(const PackedRows& args) {
    const PackedRows a = joined<Element>(args);
    const int64_t whole = a.dim / kWidth * kWidth;
    const Mask rest = mask_for(a.dim - whole);
    auto* to = reinterpret_cast<Element*>(a.elements) + a.first_row * a.dim;
    for (int64_t row = a.first_row; row < a.last_row; ++row, to += a.dim) {
        const float* from = a.rows + row * a.row_stride;
        for (int64_t c = 0; c < whole; c += kWidth) store(to + c, load(from + c));
        if (whole < a.dim) store_part(to + whole, rest, load_part(from + whole, rest));
    }
}

template <typename Element>
static void unpack_floats(const PackedRows& args) {
    const PackedRows a = joined<Element>(args);
    const int64_t whole = a.dim / kWidth * kWidth;
    const Mask rest = mask_for(a.dim - whole);
    const auto* from = reinterpret_cast<const Element*>(a.elements) + a.first_row * a.dim;
    for (int64_t row = a.first_row; row < a.last_row; ++row, from += a.dim) {
        float* to = a.rows + row * a.row_stride;
        for (int64_t c = 0; c < whole; c += kWidth) store(to + c, load(from + c));
        if (whole < a.dim) store_part(to + whole, rest, load_part(from + whole, rest));
    }
}

// ---------------------------------------------------------------------------------------------------- int8 with a scale a row

// A row with a NaN, an infinity or a range beyond float32 is NaN all over, so that whoever looks for them finds it.
constexpr float kNotANumber = __builtin_nanf("");

struct RowRange {
    float low, range;          // range NaN: not finite
};

SL_INLINE RowRange range_of(const float* row, int64_t dim) {
    const int64_t whole = dim / kWidth * kWidth;
    float low = dim > 0 ? row[0] : 0.0f, high = low, wrong = 0.0f;
    if (whole > 0) {
        Vec lows = load(row), highs = lows, differences = sub(lows, lows);
        for (int64_t c = kWidth; c < whole; c += kWidth) {
            const Vec x = load(row + c);
            lows = min(lows, x);
            highs = max(highs, x);
            differences = add(differences, sub(x, x));      // 0 where x is finite, else NaN
        }
        low = least(lows);
        high = greatest(highs);
        wrong = sum(differences);
    }
    for (int64_t c = whole; c < dim; ++c) {
        low = row[c] < low ? row[c] : low;
        high = row[c] > high ? row[c] : high;
        wrong += row[c] - row[c];
    }
    const float range = high - low;
    return {low + 0.0f, range - range + wrong == 0.0f ? range : kNotANumber};      // + 0: of two zeros the positive one
}

static void pack_bytes(const PackedRows& args) {
    const PackedRows a = args;
    const int64_t whole = a.dim / kWidth * kWidth;
    for (int64_t row = a.first_row; row < a.last_row; ++row) {
        const float* from = a.rows + row * a.row_stride;
        auto* to = reinterpret_cast<uint8_t*>(a.elements) + row * a.dim;
        const RowRange found = range_of(from, a.dim);
        const bool finite = found.range == found.range, flat = !(found.range >= kLeastRange);
        a.scales[2 * row] = !finite ? kNotANumber : flat ? 0.0f : found.range / kSteps;
        a.scales[2 * row + 1] = finite ? found.low : kNotANumber;
        if (flat) {
            for (int64_t c = 0; c < a.dim; ++c) to[c] = 0;
            continue;
        }
        const Vec low = splat(found.low), steps = splat(kSteps / found.range);
        for (int64_t c = 0; c < whole; c += kWidth) store_bytes(to + c, mul(sub(load(from + c), low), steps));
        if (whole < a.dim) {
            uint8_t last[kWidth];
            store_bytes(last, mul(sub(load_part(from + whole, mask_for(a.dim - whole)), low), steps));
            for (int64_t c = whole; c < a.dim; ++c) to[c] = last[c - whole];
        }
    }
}

static void unpack_bytes(const PackedRows& args) {
    const PackedRows a = args;
    const int64_t whole = a.dim / kWidth * kWidth;
    for (int64_t row = a.first_row; row < a.last_row; ++row) {
        const auto* from = reinterpret_cast<const uint8_t*>(a.elements) + row * a.dim;
        float* to = a.rows + row * a.row_stride;
        const Vec scale = splat(a.scales[2 * row]), bias = splat(a.scales[2 * row + 1]);
        for (int64_t c = 0; c < whole; c += kWidth) store(to + c, add(bias, mul(scale, load_bytes(from + c))));
        if (whole < a.dim) {
            uint8_t last[kWidth] = {};
            for (int64_t c = whole; c < a.dim; ++c) last[c - whole] = from[c];
            store_part(to + whole, mask_for(a.dim - whole), add(bias, mul(scale, load_bytes(last))));
        }
    }
}

static void pack(const PackedRows& args) {
    switch (args.wire) {
        case SL_WIRE_FLOAT16: return pack_floats<Float16>(args);
        case SL_WIRE_BFLOAT16: return pack_floats<BFloat16>(args);
        case SL_WIRE_INT8: return pack_bytes(args);
        default: return pack_floats<float>(args);
    }
}

static void unpack(const PackedRows& args) {
    switch (args.wire) {
        case SL_WIRE_FLOAT16: return unpack_floats<Float16>(args);
        case SL_WIRE_BFLOAT16: return unpack_floats<BFloat16>(args);
        case SL_WIRE_INT8: return unpack_bytes(args);
        default: return unpack_floats<float>(args);
    }
}

// ---------------------------------------------------------------------------------------------------- regrouped columns

constexpr int64_t kRegroupRows = 16;      // samples at a time: a range's rows of one matrix, then the next range's

/// Columns of samples [first, last), from where they begin on both sides.
struct Columns {
    const float* from;
    float* to;
    int64_t from_stride, to_stride, width, rows;
};

/// Calls write(to, vector) and write_part(to, mask, vector) for all columns.
template <typename Write, typename WritePart>
SL_INLINE void visit_columns(const Columns& columns, const Write& write, const WritePart& write_part) {
    const int64_t whole = columns.width / kWidth * kWidth;
    const Mask rest = mask_for(columns.width - whole);
    const float* from = columns.from;
    float* to = columns.to;
    for (int64_t row = 0; row < columns.rows; ++row, from += columns.from_stride, to += columns.to_stride) {
        for (int64_t c = 0; c < whole; c += kWidth) write(to + c, load(from + c));
        if (whole < columns.width) write_part(to + whole, rest, load_part(from + whole, rest));
    }
}

static void copy_columns(const Columns& columns) {
    visit_columns(columns, [](float* to, Vec x) { store(to, x); }, [](float* to, Mask rest, Vec x) { store_part(to, rest, x); });
}

static void add_columns(const Columns& columns) {
    visit_columns(columns, [](float* to, Vec x) { store(to, add(load(to), x)); },
                  [](float* to, Mask rest, Vec x) { store_part(to, rest, add(load_part(to, rest), x)); });
}

static void zero_columns(const Columns& columns) {
    for (int64_t row = 0; row < columns.rows; ++row) {
        for (int64_t c = 0; c < columns.width; ++c) columns.to[row * columns.to_stride + c] = 0.0f;
    }
}

/// Samples [first, last) of one range: its first term is copied, the others are added while they are still in the first-level cache.
static void regroup_range(const RegroupRows& a, const sl_range& range, int64_t first, int64_t last) {
    const sl_matrix& to = a.to[range.matrix];
    Columns columns{nullptr, to.data + first * to.row_stride + range.column, 0, to.row_stride, range.width, last - first};
    for (int64_t t = range.first_term; t < range.first_term + range.num_terms; ++t) {
        const sl_matrix& from = a.from[a.terms[t].matrix];
        if (!from.data) continue;
        const bool is_first = !columns.from;
        columns.from = from.data + first * from.row_stride + a.terms[t].column;
        columns.from_stride = from.row_stride;
        if (is_first) copy_columns(columns);
        else add_columns(columns);
    }
    if (!columns.from) zero_columns(columns);
}

static void regroup(const RegroupRows& args) {
    const RegroupRows a = args;
    for (int64_t first = a.first_row; first < a.last_row; first += kRegroupRows) {
        const int64_t last = first + kRegroupRows < a.last_row ? first + kRegroupRows : a.last_row;
        for (int64_t r = 0; r < a.num_ranges; ++r)
            if (a.to[a.ranges[r].matrix].data) regroup_range(a, a.ranges[r], first, last);
    }
}

const ExchangeKernels* exchange_kernels() {
    static const ExchangeKernels kernels{pack, unpack, regroup};
    return &kernels;
}
