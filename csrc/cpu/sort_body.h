// Updates by a sort: the lookups of a table, ordered by row, are runs, one a row. Included by kernel_body.h after update_body.h.

constexpr int kDigitBits = 11;      // three passes for any row
constexpr int kMaxPasses = 3;

/// How often each digit occurs in the rows of this part, and then where its lookups go.
struct Digits {
    uint32_t starts[kMaxPasses][1 << kDigitBits];
    int width;

    SL_INLINE uint32_t of(int32_t row, int pass) const { return (static_cast<uint32_t>(row) >> (pass * width)) & ((1u << width) - 1); }
    SL_INLINE uint32_t& start(int32_t row, int pass) { return starts[pass][of(row, pass)]; }
};

template <bool kFiltered>
SL_INLINE bool is_mine(const UpdateArgs& a, const Lookups& l, int32_t row) {
    return !kFiltered || (row != l.padding && ((row >> 4) & a.part_mask) == a.part);
}

/// Returns the number of this part's lookups.
template <int kPasses, bool kFiltered>
static int64_t count_digits(const UpdateArgs& args, Digits& digits) {
    const UpdateArgs a = args;
    for (int pass = 0; pass < kPasses; ++pass) {
        for (uint32_t digit = 0; digit < 1u << digits.width; ++digit) digits.starts[pass][digit] = 0;
    }
    int64_t count = 0;
    for (int64_t s = 0; s < a.num_sources; ++s) {
        const Lookups l = a.sources[s].lookups;
        for (int64_t k = 0; k < l.count; ++k) {
            const bool mine = is_mine<kFiltered>(a, l, l.ids[k]);
#pragma GCC unroll 3
            for (int pass = 0; pass < kPasses; ++pass) digits.start(l.ids[k], pass) += mine;
            count += mine;
        }
    }
    for (int pass = 0; pass < kPasses; ++pass) {
        uint32_t sum = 0;
        for (uint32_t digit = 0; digit < 1u << digits.width; ++digit) {
            const uint32_t number = digits.starts[pass][digit];
            digits.starts[pass][digit] = sum;
            sum += number;
        }
    }
    return count;
}

/// The first pass, straight from the ids. A lookup that is padding or another part's goes where nobody reads.
template <bool kFiltered, bool kBags>
static void scatter_ids(const UpdateArgs& args, Digits& digits, Entry* to) {
    const UpdateArgs a = args;
    Entry unread;
    uint32_t nowhere = 0;
    for (int64_t s = 0; s < a.num_sources; ++s) {
        const Source& source = a.sources[s];
        const Lookups l = source.lookups;
        for (int64_t bag = 0; bag < l.num_bags; ++bag) {
            const Bounds bounds = bounds_of(l, bag);
            for (int64_t k = bounds.begin; k < bounds.end; ++k) {
                const int32_t row = l.ids[k], position = source.first + static_cast<int32_t>(k);
                const bool mine = is_mine<kFiltered>(a, l, row);
                if constexpr (!kBags) a.bags[position] = static_cast<int32_t>(bag);
                uint32_t& start = mine ? digits.start(row, 0) : nowhere;
                *(mine ? to + start : &unread) = Entry{row, kBags ? static_cast<int32_t>(bag) : position};
                ++start;
            }
        }
    }
}

/// Sorts by row, least significant digit first, which keeps the order of a row's lookups. Returns their number.
template <int kPasses>
static int64_t sort_by_row(UpdateArgs& a, bool filtered, int width, int64_t lookups) {
    Digits digits;
    digits.width = width;
    Entry *from = a.entries, *to = a.entries + lookups + 1;
    int64_t count;
    if (filtered) {
        count = count_digits<kPasses, true>(a, digits);
        if (a.bags) scatter_ids<true, false>(a, digits, from);
        else scatter_ids<true, true>(a, digits, from);
    } else {
        count = count_digits<kPasses, false>(a, digits);
        if (a.bags) scatter_ids<false, false>(a, digits, from);
        else scatter_ids<false, true>(a, digits, from);
    }
    for (int pass = 1; pass < kPasses; ++pass) {
        for (int64_t i = 0; i < count; ++i) to[digits.start(from[i].row, pass)++] = from[i];
        Entry* const sorted = to;
        to = from;
        from = sorted;
    }
    from[count].row = -1;
    a.sorted = from;
    return count;
}

/// The bits that chains give: a row's lookups stay in their order.
static int64_t sort_lookups(UpdateArgs& a) {
    bool filtered = a.part_mask != 0;
    int64_t lookups = 0;
    for (int64_t s = 0; s < a.num_sources; ++s) {
        filtered |= a.sources[s].lookups.padding >= 0;
        lookups += a.sources[s].lookups.count;
    }
    int bits = 1;
    while (bits < 31 && ((a.num_rows - 1) >> bits) != 0) ++bits;
    const int passes = (bits + kDigitBits - 1) / kDigitBits, width = (bits + passes - 1) / passes;
    const int64_t count = passes == 1   ? sort_by_row<1>(a, filtered, width, lookups)
                          : passes == 2 ? sort_by_row<2>(a, filtered, width, lookups)
                                        : sort_by_row<3>(a, filtered, width, lookups);
    const Entry* const sorted = a.sorted;
    int32_t *const rows = a.rows, *const firsts = a.firsts;
    int64_t num_rows = 0;
    int32_t after = -1;
    for (int64_t i = count - 1; i >= 0; --i) {
        const int32_t row = sorted[i].row;
        num_rows += row != after;
        after = row;
        rows[num_rows - 1] = row;
        firsts[num_rows - 1] = static_cast<int32_t>(i);
    }
    return num_rows;
}

/// The lookups of a row as a run of sorted ones. A handle is where it begins. Unlike a chain's, their gradients are loaded without
/// waiting for one another.
struct Sorted {
    static SL_INLINE int32_t take(const UpdateArgs& a, int64_t u) { return a.firsts[u]; }

    template <typename S>
    static SL_INLINE Span<S> sum(const UpdateArgs& a, int32_t first, int64_t column, Mask mask) {
        const Entry* entry = a.sorted + first;
        const int32_t row = entry->row;
        const Source* source = a.sources;
        Span<S> sum = zero_span<S>();
        if (!a.bags && source->plain) {
            const float* grads = source->grad + column;
            const int64_t stride = source->grad_stride;
            do add_row(sum, grads + entry->lookup * stride, mask);
            while ((++entry)->row == row);
            return sum;
        }
        do {
            const int32_t lookup = entry->lookup;
            if (a.bags) {
                while (lookup >= source->last) ++source;
                add_lookup<S>(sum, a, *source, lookup, a.bags[lookup], column, mask);
            } else {
                add_lookup<S>(sum, a, *source, 0, lookup, column, mask);      // which has neither a weight nor a maximum of its own
            }
        } while ((++entry)->row == row);
        return sum;
    }

    /// The first gradients of the next group.
    template <typename S>
    static SL_INLINE void prefetch(const UpdateArgs& a, int64_t u, bool grads) {
        if (!grads) return;
        for (int64_t i = u - kGroup; i > u - 2 * kGroup && i >= 0; --i) {
            const int32_t lookup = a.sorted[a.firsts[i]].lookup;
            prefetch_row<S>(a.sources->grad + (a.bags ? a.bags[lookup] : lookup) * a.sources->grad_stride);
        }
    }
};

static void apply_runs(const UpdateArgs& a, int64_t num_rows) { apply_rows<Sorted>(a, num_rows); }
