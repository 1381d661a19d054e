// Updates lookup by lookup, in id order, and the gradients of lookups written out. Included by kernel_body.h after update_body.h.

/// SGD, one rounding a lookup: w = fma(-lr, g, w), the bits of torch.optim.SGD on an uncoalesced gradient.
template <typename S, bool kMax>
static void apply_lookups_block(const UpdateArgs& args, const Source& from, int64_t column, Mask mask) {
    const UpdateArgs a = args;
    const Source source = from;
    float* table = static_cast<float*>(a.table) + column;
    const Vec rate = splat(a.maximize ? a.lr : -a.lr);
    const Lookups l = source.lookups;
    const int64_t last = l.count - 1, ahead = a.prefetch;
    for (int64_t bag = 0; bag < l.num_bags; ++bag) {
        const Bounds bounds = bounds_of(l, bag);
        const float* arrived = source.grad + bag * source.grad_stride + column;
        if (ahead && bag + ahead < l.num_bags) prefetch_row<S>(arrived + ahead * source.grad_stride);
        Span<S> grad = load_span<S>(arrived, mask);
        if (!source.plain && !l.weights) {
            scale_span(grad, factor_of(source, 0, bag));
            scale_span(grad, source.scale);
        }
        for (int64_t k = bounds.begin; k < bounds.end; ++k) {
            if (ahead) prefetch_row<S>(table + a.dim * l.ids[k + ahead < last ? k + ahead : last]);
            const int32_t id = l.ids[k];
            if (id == l.padding || ((id >> 4) & a.part_mask) != a.part) continue;
            if (l.weights) {
                grad = load_span<S>(arrived, mask);
                scale_span(grad, l.weights[k]);
                scale_span(grad, source.scale);
            }
            Span<S> own = grad;
            if constexpr (kMax) keep_maxima<S>(own, l, k, bag, a.dim, column, mask);
            float* weight = table + a.dim * id;
            Span<S> w = load_span<S>(weight, mask);
#pragma GCC unroll 16
            for (int i = 0; i < S::kVectors; ++i) w.v[i] = fma(rate, own.v[i], w.v[i]);
            store_span(weight, w, mask);
        }
    }
}

static void apply_lookups(const UpdateArgs& a) {
    visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
        using S = decltype(size);
        for (int64_t s = 0; s < a.num_sources; ++s) {
            if (a.sources[s].lookups.maxima) apply_lookups_block<S, true>(a, a.sources[s], column, mask);
            else apply_lookups_block<S, false>(a, a.sources[s], column, mask);
        }
    });
}

// ---------------------------------------------------------------------------------------------------- dense accumulation

/// Adds the gradient of every lookup to the sum of its row, and marks the rows.
template <typename S, bool kMax>
static void accumulate_block(const UpdateArgs& args, const Source& from, int64_t column, Mask mask) {
    const UpdateArgs a = args;
    const Source source = from;
    const Lookups l = source.lookups;
    float* sums = a.sums + column;
    for (int64_t bag = 0; bag < l.num_bags; ++bag) {
        const Bounds bounds = bounds_of(l, bag);
        const float* arrived = source.grad + bag * source.grad_stride + column;
        if (a.prefetch && bag + a.prefetch < l.num_bags) prefetch_row<S>(arrived + a.prefetch * source.grad_stride);
        Span<S> grad = load_span<S>(arrived, mask);
        if (!source.plain && !l.weights) {
            scale_span(grad, factor_of(source, 0, bag));
            scale_span(grad, source.scale);
        }
        for (int64_t k = bounds.begin; k < bounds.end; ++k) {
            const int32_t row = l.ids[k];
            if (row == l.padding || ((row >> 4) & a.part_mask) != a.part) continue;
            if (l.weights) {
                grad = load_span<S>(arrived, mask);
                scale_span(grad, l.weights[k]);
                scale_span(grad, source.scale);
            }
            Span<S> total = grad;
            if constexpr (kMax) keep_maxima<S>(total, l, k, bag, a.dim, column, mask);
            add_row(total, sums + a.dim * row, mask);
            store_span(sums + a.dim * row, total, mask);
            a.marks[row >> 6] |= uint64_t{1} << (row & 63);
        }
    }
}

/// Calls visit(row) for the marked rows, ascending, and unmarks them.
template <typename Visit>
SL_INLINE void visit_marked(const UpdateArgs& a, const Visit& visit) {
    const int64_t words = (a.num_rows + 63) >> 6;
    for (int64_t word = 0; word < words; ++word) {
        uint64_t marks = a.marks[word];
        a.marks[word] = 0;
        for (; marks; marks &= marks - 1) visit((word << 6) + __builtin_ctzll(marks));
    }
}

/// The sum of a row, zeroed behind it.
template <typename S>
SL_INLINE Span<S> take_sum(const UpdateArgs& a, int64_t row, int64_t column, Mask mask) {
    float* sum = a.sums + row * a.dim + column;
    const Span<S> taken = load_span<S>(sum, mask);
    store_span(sum, zero_span<S>(), mask);
    return taken;
}

/// One step on every marked row.
template <typename Weight>
static void apply_marked(const UpdateArgs& args) {
    const UpdateArgs a = args;
    if (!is_one_block(a.dim)) {
        visit_marked(a, [&](int64_t row) {
            apply_wide_row<Weight>(a, row, [&](auto size, int64_t column, Mask mask) { return take_sum<decltype(size)>(a, row, column, mask); });
        });
        return;
    }
    visit_blocks(a.dim, [&](auto size, int64_t, Mask mask) {
        using S = decltype(size);
        visit_marked(a, [&](int64_t row) {
            apply_row<S>(a, static_cast<Weight*>(a.table) + row * a.dim, row, take_sum<S>(a, row, 0, mask), mask);
        });
    });
}

/// Bytes: per lookup a gradient row read once a bag and the sum of its row read and written; per row its sum, weights and state.
static void apply_dense(const UpdateArgs& args) {
    const UpdateArgs a = args;
    visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
        using S = decltype(size);
        for (int64_t s = 0; s < a.num_sources; ++s) {
            if (a.sources[s].lookups.maxima) accumulate_block<S, true>(a, a.sources[s], column, mask);
            else accumulate_block<S, false>(a, a.sources[s], column, mask);
        }
    });
    visit_weights(a.dtype, [&](auto weight) { apply_marked<decltype(weight)>(a); });
}

// ---------------------------------------------------------------------------------------------------- gradients

/// out[b, :] = the gradient row that every lookup of bag b adds, but for its own weight: (B, D) side by side.
static void pack_grads(const Source& source, int64_t dim, float* out) {
    const Lookups& l = source.lookups;
    visit_blocks(dim, [&](auto size, int64_t column, Mask mask) {
        using S = decltype(size);
        for (int64_t bag = 0; bag < l.num_bags; ++bag) {
            const float* arrived = source.grad + bag * source.grad_stride + column;
            if (bag + kGroup < l.num_bags) prefetch_row<S>(arrived + kGroup * source.grad_stride);
            Span<S> grad = load_span<S>(arrived, mask);
            if (!source.plain && !l.weights) {
                scale_span(grad, factor_of(source, 0, bag));
                scale_span(grad, source.scale);
            }
            store_span(out + bag * dim + column, grad, mask);
        }
    });
}

template <bool kMax>
static void expand_bags(const Source& given, int64_t dim, int64_t first_bag, int64_t last_bag, int64_t* ids, float* out) {
    const Source source = given;
    const Lookups l = source.lookups;
    for (int64_t bag = first_bag; bag < last_bag; ++bag) {
        const Bounds bounds = bounds_of(l, bag);
        for (int64_t k = bounds.begin; k < bounds.end; ++k) {
            if (l.ids[k] == l.padding) continue;
            *ids++ = l.ids[k];
            visit_blocks(dim, [&](auto size, int64_t column, Mask mask) {
                using S = decltype(size);
                Span<S> grad = load_span<S>(source.grad + bag * source.grad_stride + column, mask);
                scale_span(grad, factor_of(source, source.first + k, bag));
                scale_span(grad, source.scale);
                if constexpr (kMax) keep_maxima<S>(grad, l, k, bag, dim, column, mask);
                store_span(out + column, grad, mask);
            });
            out += dim;
        }
    }
}

static void expand(const Source& source, int64_t dim, int64_t first_bag, int64_t last_bag, int64_t* ids, float* out) {
    if (source.lookups.maxima) expand_bags<true>(source, dim, first_bag, last_bag, ids, out);
    else expand_bags<false>(source, dim, first_bag, last_bag, ids, out);
}
