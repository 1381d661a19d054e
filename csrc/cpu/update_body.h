// Updates by chains. Included by kernel_body.h after rules_body.h.
//
// The lookups of every row of a table are linked into a chain, by a head a row and a link a lookup. Then each row is visited once: its
// chain's gradients are summed in registers and the optimizer's formula is applied. No atomics. sort_body.h finds them by a sort.

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

constexpr int kGroup = 16;      // rows whose gradients are summed together

SL_INLINE float factor_of(const Source& source, int64_t k, int64_t bag) {
    const Lookups& l = source.lookups;
    return l.weights ? l.weights[k - source.first] : l.inverse ? l.inverse[bag] : 1.0f;
}

/// Adds the gradient of lookup `k`, of the columns of one block.
template <typename S>
SL_INLINE void add_lookup(Span<S>& sum, const UpdateArgs& a, const Source& source, int64_t k, int64_t bag, int64_t column, Mask mask) {
    const float* grad = source.grad + bag * source.grad_stride + column;
    if (source.plain) {
        add_row(sum, grad, mask);
        return;
    }
    Span<S> row = load_span<S>(grad, mask);
    scale_span(row, factor_of(source, k, bag));
    scale_span(row, source.scale);
    if (__builtin_expect(source.lookups.maxima != nullptr, 0)) keep_maxima<S>(row, source.lookups, k - source.first, bag, a.dim, column, mask);
#pragma GCC unroll 16
    for (int i = 0; i < S::kVectors; ++i) sum.v[i] = add(sum.v[i], row.v[i]);
}

/// The lookups of a row as a chain. A handle is 1 + the position of the first one.
struct Chained {
    /// Of distinct row u; its head is as it was before.
    static SL_INLINE int32_t take(const UpdateArgs& a, int64_t u) {
        int32_t* head = a.heads + a.rows[u];
        const int32_t first = *head;
        *head = 0;
        return first;
    }

    template <typename S>
    static SL_INLINE Span<S> sum(const UpdateArgs& a, int32_t link, int64_t column, Mask mask) {
        Span<S> sum = zero_span<S>();
        const Source* source = a.sources;
        while (link) {
            const int32_t k = link - 1;
            const Node node = a.nodes[k];
            while (k >= source->last) ++source;
            add_lookup<S>(sum, a, *source, k, node.bag, column, mask);
            link = node.next;
        }
        return sum;
    }

    /// The heads that come after the rows that are brought now, and the first gradients of this group.
    template <typename S>
    static SL_INLINE void prefetch(const UpdateArgs& a, int64_t u, bool grads) {
        const int64_t last = u - a.prefetch - kGroup;
        for (int64_t i = last; i > last - kGroup && i >= 0; --i) prefetch_line(a.heads + a.rows[i]);
        if (!grads) return;
        for (int64_t i = u; i > u - kGroup && i >= 0; --i)
            prefetch_row<S>(a.sources->grad + a.nodes[a.heads[a.rows[i]] - 1].bag * a.sources->grad_stride);
    }
};

/// Brings the weights and the state of the group of rows that ends with row `ahead`.
template <typename S, typename Weight>
SL_INLINE void prefetch_rows(const UpdateArgs& a, int64_t ahead) {
    for (int64_t i = ahead; i > ahead - kGroup && i >= 0; --i) {
        const int64_t row = a.rows[i];
        prefetch_row<S>(static_cast<const Weight*>(a.table) + row * a.dim);
        if (a.kind == SL_ROWWISE_ADAGRAD) prefetch_line(a.first + row);
        else if (a.kind != SL_SGD) prefetch_row<S>(a.first + row * a.dim);
        if (a.kind == SL_ADAM) prefetch_row<S>(a.second + row * a.dim);
    }
}

/// Brings the weights and the state of a group of rows that come `prefetch` rows after row u, and what leads to gradients; the gradients
/// themselves where they are not packed.
template <typename S, typename Order>
SL_INLINE void prefetch_group(const UpdateArgs& a, int64_t u) {
    if (!a.prefetch) return;
    if (a.dtype == SL_FLOAT32) prefetch_rows<S, float>(a, u - a.prefetch);
    else prefetch_rows<S, BFloat16>(a, u - a.prefetch);      // or others of its size
    Order::template prefetch<S>(a, u, a.num_sources == 1 && a.sources->grad_stride != a.dim);
}

template <typename S>
using GroupSums = float[kGroup][S::kVectors * kWidth];

/// One step on each of `count` rows, from distinct row `first` downwards.
template <typename S, typename Weight>
SL_INLINE void apply_group(const UpdateArgs& a, int64_t first, int count, const GroupSums<S>& sums, Mask mask) {
    for (int i = 0; i < count; ++i) {
        Span<S> grad;
#pragma GCC unroll 16
        for (int j = 0; j < S::kVectors; ++j) grad.v[j] = load(&sums[i][j * kWidth]);
        const int64_t row = a.rows[first - i];
        apply_row<S>(a, static_cast<Weight*>(a.table) + row * a.dim, row, grad, mask);
    }
}

/// A call, so that the loop over groups stays that of float32.
template <typename S, typename Weight>
static __attribute__((noinline)) void apply_half_group(const UpdateArgs& args, int64_t first, int count, const GroupSums<S>& sums, Mask mask) {
    const UpdateArgs a = args;
    apply_group<S, Weight>(a, first, count, sums, mask);
}

/// One step on every row. Bytes: per row its weights and state read and written; per lookup a gradient row, mostly from cache.
/// Gradients of a group of rows are summed before any of their weights is touched: a load waits for every earlier store that agrees
/// with its address in the last 12 bits, and those stores wait for weights from memory.
template <typename S, typename Order>
static void apply_one_block(const UpdateArgs& args, int64_t num_rows, Mask mask) {
    const UpdateArgs a = args;      // a copy of its own: no store can change it, so it stays in registers
    alignas(64) GroupSums<S> sums;
    for (int64_t first = num_rows - 1; first >= 0; first -= kGroup) {
        const int count = first + 1 < kGroup ? static_cast<int>(first + 1) : kGroup;
        prefetch_group<S, Order>(a, first);
        for (int i = 0; i < count; ++i) {
            const Span<S> grad = Order::template sum<S>(a, Order::take(a, first - i), 0, mask);
#pragma GCC unroll 16
            for (int j = 0; j < S::kVectors; ++j) store(&sums[i][j * kWidth], grad.v[j]);
        }
        if (a.dtype == SL_FLOAT32) apply_group<S, float>(a, first, count, sums, mask);
        else if (a.dtype == SL_FLOAT16) apply_half_group<S, Float16>(a, first, count, sums, mask);
        else apply_half_group<S, BFloat16>(a, first, count, sums, mask);
    }
}

template <typename Order, typename Weight>
static void apply_blocks(const UpdateArgs& a, int64_t num_rows) {
    for (int64_t u = num_rows - 1; u >= 0; --u) {
        if (u % kGroup == 0) prefetch_group<Size<kMaxVectors, false>, Order>(a, u);
        const int32_t handle = Order::take(a, u);
        const auto sum_of = [&](auto size, int64_t column, Mask mask) { return Order::template sum<decltype(size)>(a, handle, column, mask); };
        apply_wide_row<Weight>(a, a.rows[u], sum_of);
    }
}

template <typename Order>
static void apply_rows(const UpdateArgs& a, int64_t num_rows) {
    if (!is_one_block(a.dim)) {
        visit_weights(a.dtype, [&](auto weight) { apply_blocks<Order, decltype(weight)>(a, num_rows); });
        return;
    }
    visit_blocks(a.dim, [&](auto size, int64_t, Mask mask) { apply_one_block<decltype(size), Order>(a, num_rows, mask); });
}

static void apply_chains(const UpdateArgs& a, int64_t num_rows) { apply_rows<Chained>(a, num_rows); }

static void sum_chains(const UpdateArgs& a, int64_t num_rows, float* out) {
    for (int64_t u = 0; u < num_rows; ++u) {
        const int32_t row = a.rows[u], head = a.heads[row];
        a.heads[row] = 0;
        visit_blocks(a.dim, [&](auto size, int64_t column, Mask mask) {
            store_span(out + u * a.dim + column, Chained::sum<decltype(size)>(a, head, column, mask), mask);
        });
    }
}
