// Updates by chains. Included by kernel_body.h after rules_body.h.
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
            if (__builtin_expect(source->lookups.maxima != nullptr, 0))
                keep_maxima<S>(row, source->lookups, k - source->first, node.bag, a.dim, column, mask);
#pragma GCC unroll 16
            for (int i = 0; i < S::kVectors; ++i) sum.v[i] = add(sum.v[i], row.v[i]);
        }
        link = node.next;
    }
    return sum;
}

constexpr int kGroup = 16;      // rows whose gradients are summed together

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

/// Brings the weights and the state of a group of rows that come `prefetch` rows after row u, the heads of the group after that, and
/// the first gradients of the group that starts with u where they are not packed.
template <typename S>
SL_INLINE void prefetch_group(const UpdateArgs& a, int64_t u) {
    if (!a.prefetch) return;
    const int64_t ahead = u - a.prefetch;
    if (a.dtype == SL_FLOAT32) prefetch_rows<S, float>(a, ahead);
    else prefetch_rows<S, BFloat16>(a, ahead);      // or others of its size
    if (a.heads) {
        for (int64_t i = ahead - kGroup; i > ahead - 2 * kGroup && i >= 0; --i) prefetch_line(a.heads + a.rows[i]);
    }
    if (a.num_sources > 1 || a.sources->grad_stride == a.dim) return;
    for (int64_t i = u; i > u - kGroup && i >= 0; --i) {
        const int32_t k = first_of(a, i) - 1;
        prefetch_row<S>(a.sources->grad + a.nodes[k].bag * a.sources->grad_stride);
    }
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
        if (a.dtype != SL_FLOAT32) {
            apply_summed_rows(a, first, count, sums[0], S::kVectors * kWidth);
            continue;
        }
        for (int i = 0; i < count; ++i) {
            Span<S> grad;
#pragma GCC unroll 16
            for (int j = 0; j < S::kVectors; ++j) grad.v[j] = load(&sums[i][j * kWidth]);
            apply_row(a, a.rows[first - i], grad, mask);
        }
    }
}

static void apply_blocks(const UpdateArgs& a, int64_t num_rows) {
    for (int64_t u = num_rows - 1; u >= 0; --u) {
        if (u % kGroup == 0) prefetch_group<Size<kMaxVectors, false>>(a, u);
        const int32_t head = take_first(a, u);
        const auto sum_of = [&](auto size, int64_t column, Mask mask) { return sum_chain<decltype(size)>(a, head, column, mask); };
        apply_wide_row(a, a.rows[u], sum_of);
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
