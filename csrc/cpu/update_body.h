// The update kernels: the second half of kernel_body.h, which includes it.
//
// The lookups of every row of a table are linked into a chain: by a head a row and a link a lookup, or by a sort. Then each row is
// visited once: its chain's gradients are summed in registers and the optimizer's formula is applied. No atomics.

/// Calls visit(k, bag) for the lookups of a feature, last first.
template <typename Visit>
SL_INLINE void visit_backwards(const Lookups& l, const Visit& visit) {
    if (!l.offsets && l.length == 1) {
        for (int64_t k = l.count - 1; k >= 0; --k) visit(k, static_cast<int32_t>(k));
        return;
    }
    for (int64_t bag = l.num_bags - 1; bag >= 0; --bag) {
        const Bounds bounds = bounds_of(l, bag);
        for (int64_t k = bounds.end - 1; k >= bounds.begin; --k) visit(k, static_cast<int32_t>(bag));
    }
}

/// Going backwards, pushing every lookup in front of its row's chain leaves the chains in ascending order.
/// There are no branches on the data: a lookup that is padding or another part's pushes onto a chain that nobody reads.
template <bool kFiltered>
static int64_t build(const UpdateArgs& args) {
    const UpdateArgs a = args;
    constexpr int64_t kAhead = 16;
    int64_t num_rows = 0;
    int32_t unread = 0;
    for (int64_t s = a.num_sources - 1; s >= 0; --s) {
        const Source& source = a.sources[s];
        const Lookups l = source.lookups;
        Node* nodes = a.nodes + source.first;
        visit_backwards(l, [&](int64_t k, int32_t bag) {
            prefetch_line(a.heads + l.ids[k > kAhead ? k - kAhead : 0]);
            const int32_t row = l.ids[k];
            int32_t* head = a.heads + row;
            bool mine = true;
            if constexpr (kFiltered) {
                mine = row != l.padding && ((row >> 4) & a.part_mask) == a.part;
                head = mine ? head : &unread;
            }
            const int32_t next = *head;
            nodes[k] = Node{next, bag};
            *head = source.first + static_cast<int32_t>(k) + 1;
            a.rows[num_rows] = row;
            num_rows += mine & (next == 0);
        });
    }
    return num_rows;
}

static int64_t build_chains(const UpdateArgs& a) {
    bool filtered = a.part_mask != 0;
    for (int64_t s = 0; s < a.num_sources; ++s) filtered |= a.sources[s].lookups.padding >= 0;
    return filtered ? build<true>(a) : build<false>(a);
}

constexpr int kDigitBits = 11;      // three passes for any row
constexpr int kMaxPasses = 3;

/// Lookups of this part in ascending order; the bag of each goes to its node. Returns their number.
template <bool kFiltered>
static int64_t list(const UpdateArgs& args, Entry* out) {
    const UpdateArgs a = args;
    int64_t count = 0;
    for (int64_t s = 0; s < a.num_sources; ++s) {
        const Source& source = a.sources[s];
        const Lookups l = source.lookups;
        Node* nodes = a.nodes + source.first;
        for (int64_t bag = 0; bag < l.num_bags; ++bag) {
            const Bounds bounds = bounds_of(l, bag);
            for (int64_t k = bounds.begin; k < bounds.end; ++k) {
                const int32_t row = l.ids[k];
                nodes[k].bag = static_cast<int32_t>(bag);
                out[count] = Entry{row, source.first + static_cast<int32_t>(k)};
                bool mine = true;
                if constexpr (kFiltered) mine = row != l.padding && ((row >> 4) & a.part_mask) == a.part;
                count += mine;
            }
        }
    }
    return count;
}

/// Sorts by row, and keeps the order of a row's lookups: least significant digit first. Returns where the result is.
static const Entry* sort_entries(const UpdateArgs& a, int64_t count, Entry* from, Entry* to) {
    int bits = 1;
    while (bits < 31 && ((a.num_rows - 1) >> bits) != 0) ++bits;
    const int passes = (bits + kDigitBits - 1) / kDigitBits, width = (bits + passes - 1) / passes;
    const uint32_t mask = (1u << width) - 1;
    uint32_t starts[kMaxPasses][1 << kDigitBits];
    for (int pass = 0; pass < passes; ++pass) {
        for (uint32_t digit = 0; digit <= mask; ++digit) starts[pass][digit] = 0;
    }
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t row = static_cast<uint32_t>(from[i].row);
        for (int pass = 0; pass < passes; ++pass) ++starts[pass][(row >> (pass * width)) & mask];
    }
    for (int pass = 0; pass < passes; ++pass) {
        uint32_t sum = 0;
        for (uint32_t digit = 0; digit <= mask; ++digit) {
            const uint32_t number = starts[pass][digit];
            starts[pass][digit] = sum;
            sum += number;
        }
        for (int64_t i = 0; i < count; ++i) to[starts[pass][(static_cast<uint32_t>(from[i].row) >> (pass * width)) & mask]++] = from[i];
        Entry* const sorted = to;
        to = from;
        from = sorted;
    }
    return from;
}

static int64_t sort_chains(const UpdateArgs& args) {
    const UpdateArgs a = args;
    bool filtered = a.part_mask != 0;
    int64_t lookups = 0;
    for (int64_t s = 0; s < a.num_sources; ++s) {
        filtered |= a.sources[s].lookups.padding >= 0;
        lookups += a.sources[s].lookups.count;
    }
    const int64_t count = filtered ? list<true>(a, a.entries) : list<false>(a, a.entries);
    const Entry* sorted = sort_entries(a, count, a.entries, a.entries + lookups + 1);
    int64_t num_rows = 0;
    int32_t after = -1, next = 0;
    for (int64_t i = count - 1; i >= 0; --i) {
        const Entry entry = sorted[i];
        num_rows += entry.row != after;
        a.nodes[entry.position].next = entry.row == after ? next : 0;
        a.rows[num_rows - 1] = after = entry.row;
        a.firsts[num_rows - 1] = next = entry.position + 1;
    }
    return num_rows;
}

/// Where the chain of distinct row u begins.
SL_INLINE int32_t first_of(const UpdateArgs& a, int64_t u) { return a.heads ? a.heads[a.rows[u]] : a.firsts[u]; }

/// The same, and the head is as it was before.
SL_INLINE int32_t take_first(const UpdateArgs& a, int64_t u) {
    if (!a.heads) return a.firsts[u];
    int32_t* head = a.heads + a.rows[u];
    const int32_t first = *head;
    *head = 0;
    return first;
}

SL_INLINE float factor_of(const Source& source, int64_t k, int64_t bag) {
    const Lookups& l = source.lookups;
    return l.weights ? l.weights[k - source.first] : l.inverse ? l.inverse[bag] : 1.0f;
}

/// Sum over the chain that starts at `link`, of the columns of one block.
template <typename S>
SL_INLINE Span<S> sum_chain(const UpdateArgs& a, int32_t link, int64_t column, Mask mask) {
    Span<S> sum = zero_span<S>();
    const Source* source = a.sources;
    while (link) {
        const int32_t k = link - 1;
        const Node node = a.nodes[k];
        while (k >= source->last) ++source;
        const float* grad = source->grad + node.bag * source->grad_stride + column;
        if (source->plain) {
            add_row(sum, grad, mask);
        } else {
            Span<S> row = load_span<S>(grad, mask);
            scale_span(row, factor_of(*source, k, node.bag));
            scale_span(row, source->scale);
#pragma GCC unroll 16
            for (int i = 0; i < S::kVectors; ++i) sum.v[i] = add(sum.v[i], row.v[i]);
        }
        link = node.next;
    }
    return sum;
}

constexpr int kGroup = 16;      // rows whose gradients are summed together

/// Brings the weights and the state of a group of rows that come `prefetch` rows after row u, the heads of the group after that, and
/// the first gradients of the group that starts with u where they are not packed.
template <typename S>
SL_INLINE void prefetch_group(const UpdateArgs& a, int64_t u) {
    if (!a.prefetch) return;
    const int64_t ahead = u - a.prefetch;
    for (int64_t i = ahead; i > ahead - kGroup && i >= 0; --i) {
        const int64_t row = a.rows[i];
        prefetch_row<S>(a.table + row * a.dim);
        if (a.kind == SL_ROWWISE_ADAGRAD) prefetch_line(a.first + row);
        else if (a.kind != SL_SGD) prefetch_row<S>(a.first + row * a.dim);
        if (a.kind == SL_ADAM) prefetch_row<S>(a.second + row * a.dim);
    }
    if (a.heads) {
        for (int64_t i = ahead - kGroup; i > ahead - 2 * kGroup && i >= 0; --i) prefetch_line(a.heads + a.rows[i]);
    }
    if (a.num_sources > 1 || a.sources->grad_stride == a.dim) return;
    for (int64_t i = u; i > u - kGroup && i >= 0; --i) {
        const int32_t k = first_of(a, i) - 1;
        prefetch_row<S>(a.sources->grad + a.nodes[k].bag * a.sources->grad_stride);
    }
}

template <typename S>
SL_INLINE void step_sgd(const UpdateArgs& a, float* weight, const Span<S>& grad, Mask mask) {
    Span<S> w = load_span<S>(weight, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) w.v[i] = fma(splat(-a.lr), grad.v[i], w.v[i]);
    store_span(weight, w, mask);
}

/// The roundings of torch.optim.Adagrad: s + (g * g), then fma(-lr, g / (sqrt(s) + eps), w).
template <typename S>
SL_INLINE void step_adagrad(const UpdateArgs& a, float* weight, float* state, const Span<S>& grad, Mask mask) {
    Span<S> w = load_span<S>(weight, mask), s = load_span<S>(state, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) {
        s.v[i] = add(s.v[i], mul(grad.v[i], grad.v[i]));
        w.v[i] = fma(splat(-a.lr), div(grad.v[i], add(sqrt(s.v[i]), splat(a.eps))), w.v[i]);
    }
    store_span(state, s, mask);
    store_span(weight, w, mask);
}

/// The roundings of torch.optim.SparseAdam: m + (g - m) * (1 - beta1), v + (g * g - v) * (1 - beta2), w + -lr * (m / (sqrt(v) + eps)).
/// Vector by vector: rows of three tables do not fit the registers.
template <typename S>
SL_INLINE void step_adam(const UpdateArgs& a, float* weight, int64_t offset, const Span<S>& grad, Mask mask) {
    float* first = a.first + offset;
    float* second = a.second + offset;
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) {
        Vec m = load_vector<S>(first, i, mask), v = load_vector<S>(second, i, mask);
        const Vec g = grad.v[i], w = load_vector<S>(weight, i, mask);
        m = add(m, mul(sub(g, m), splat(a.first_gain)));
        v = add(v, mul(sub(mul(g, g), v), splat(a.second_gain)));
        store_vector<S>(first, i, mask, m);
        store_vector<S>(second, i, mask, v);
        store_vector<S>(weight, i, mask, add(w, mul(splat(-a.lr), div(m, add(sqrt(v), splat(a.eps))))));
    }
}

/// The gradient as the rule wants it: sign and weight decay applied. Adds its squares to `squares`.
template <typename S>
SL_INLINE void adjust(const UpdateArgs& a, const float* weight, Span<S>& grad, Vec& squares, Mask mask) {
    if (a.maximize) scale_span(grad, -1.0f);
    if (a.kind != SL_ROWWISE_ADAGRAD) return;
    if (a.weight_decay != 0.0f) add_scaled_row<S, false>(grad, splat(a.weight_decay), weight, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) squares = add(squares, mul(grad.v[i], grad.v[i]));
}

/// Adds the mean square to the row's state. Returns what the gradient is multiplied by.
SL_INLINE float rowwise_scale(const UpdateArgs& a, int64_t row, Vec squares) {
    const float state = a.first[row] + sum(squares) / static_cast<float>(a.dim);
    a.first[row] = state;
    return -a.lr / (__builtin_sqrtf(state) + a.eps);
}

template <typename S>
SL_INLINE void step_rowwise(float* weight, Vec scale, const Span<S>& grad, Mask mask) {
    Span<S> w = load_span<S>(weight, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) w.v[i] = add(w.v[i], mul(grad.v[i], scale));
    store_span(weight, w, mask);
}

/// One step on every row. Bytes: per row its weights and state read and written; per lookup a gradient row, mostly from cache.
/// Gradients of a group of rows are summed before any of their weights is touched: a load waits for every earlier store that agrees
/// with its address in the last 12 bits, and those stores wait for weights from memory.
template <typename S>
static void apply_one_block(const UpdateArgs& args, int64_t num_rows, Mask mask) {
    const UpdateArgs a = args;      // a copy of its own: no store can change it, so it stays in registers
    alignas(64) float sums[kGroup][S::kVectors * kWidth];
    for (int64_t first = num_rows - 1; first >= 0; first -= kGroup) {
        const int count = first + 1 < kGroup ? static_cast<int>(first + 1) : kGroup;
        prefetch_group<S>(a, first);
        for (int i = 0; i < count; ++i) {
            const Span<S> grad = sum_chain<S>(a, take_first(a, first - i), 0, mask);
#pragma GCC unroll 16
            for (int j = 0; j < S::kVectors; ++j) store(&sums[i][j * kWidth], grad.v[j]);
        }
        for (int i = 0; i < count; ++i) {
            const int64_t row = a.rows[first - i];
            float* weight = a.table + row * a.dim;
            Span<S> grad;
#pragma GCC unroll 16
            for (int j = 0; j < S::kVectors; ++j) grad.v[j] = load(&sums[i][j * kWidth]);
            Vec squares = zero();
            adjust(a, weight, grad, squares, mask);
            if (a.kind == SL_SGD) step_sgd(a, weight, grad, mask);
            else if (a.kind == SL_ADAGRAD) step_adagrad(a, weight, a.first + row * a.dim, grad, mask);
            else if (a.kind == SL_ADAM) step_adam(a, weight, row * a.dim, grad, mask);
            else step_rowwise(weight, splat(rowwise_scale(a, row, squares)), grad, mask);
        }
    }
}

/// The same for rows of several blocks: the row-wise rule needs a sum over all of them, so gradients go through `scratch`.
static void apply_blocks(const UpdateArgs& a, int64_t num_rows) {
    for (int64_t u = num_rows - 1; u >= 0; --u) {
        if (u % kGroup == 0) prefetch_group<Size<kMaxVectors, false>>(a, u);
        const int64_t row = a.rows[u];
        const int32_t head = take_first(a, u);
        float* weight = a.table + row * a.dim;
        Vec squares = zero();
        visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
            using S = decltype(size);
            Span<S> grad = sum_chain<S>(a, head, column, mask);
            adjust(a, weight + column, grad, squares, mask);
            if (a.kind == SL_SGD) step_sgd(a, weight + column, grad, mask);
            else if (a.kind == SL_ADAGRAD) step_adagrad(a, weight + column, a.first + row * a.dim + column, grad, mask);
            else if (a.kind == SL_ADAM) step_adam(a, weight + column, row * a.dim + column, grad, mask);
            else store_span(a.scratch + column, grad, mask);
        });
        if (a.kind != SL_ROWWISE_ADAGRAD) continue;
        const Vec scale = splat(rowwise_scale(a, row, squares));
        visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
            using S = decltype(size);
            step_rowwise(weight + column, scale, load_span<S>(a.scratch + column, mask), mask);
        });
    }
}

static void apply_chains(const UpdateArgs& a, int64_t num_rows) {
    if (!is_one_block(a.dim)) {
        apply_blocks(a, num_rows);
        return;
    }
    visit_blocks(a.dim, [&](auto size, int64_t, Mask mask) { apply_one_block<decltype(size)>(a, num_rows, mask); });
}

static void sum_chains(const UpdateArgs& a, int64_t num_rows, float* out) {
    for (int64_t u = 0; u < num_rows; ++u) {
        const int32_t row = a.rows[u], head = a.heads[row];
        a.heads[row] = 0;
        visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
            store_span(out + u * a.dim + column, sum_chain<decltype(size)>(a, head, column, mask), mask);
        });
    }
}

// ---------------------------------------------------------------------------------------------------- lookup by lookup

/// SGD in id order, one rounding a lookup: w = fma(-lr, g, w), the bits of torch.optim.SGD on an uncoalesced gradient.
template <typename S>
static void apply_lookups_block(const UpdateArgs& args, const Source& from, int64_t column, Mask mask) {
    const UpdateArgs a = args;
    const Source source = from;
    const Lookups l = source.lookups;
    float* table = a.table + column;
    const Vec rate = splat(a.maximize ? a.lr : -a.lr);
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
            float* weight = table + a.dim * id;
            Span<S> w = load_span<S>(weight, mask);
#pragma GCC unroll 16
            for (int i = 0; i < S::kVectors; ++i) w.v[i] = fma(rate, grad.v[i], w.v[i]);
            store_span(weight, w, mask);
        }
    }
}

static void apply_lookups(const UpdateArgs& a) {
    visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
        for (int64_t s = 0; s < a.num_sources; ++s) apply_lookups_block<decltype(size)>(a, a.sources[s], column, mask);
    });
}

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

static void expand(const Source& given, int64_t dim, int64_t first_bag, int64_t last_bag, int64_t* ids, float* out) {
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
                store_span(out + column, grad, mask);
            });
            out += dim;
        }
    }
}
