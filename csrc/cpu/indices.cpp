// Distinct ids and ids by owner. Chunks of ids are counted and then placed, by threads of which each has its own counters, so that the places
// are those of one thread. Nothing here has vectors to gain from: one build serves every instruction set.
//
// The forward's own deduplication (find_slots in update_body.h) is another one on purpose: it may number rows as they come, so one pass over
// an int32 a row of the table does, which a program keeps clean. Here ids may be of any size, come out ascending, and are nobody's table's.
#include <algorithm>

#include "../api/exchange_checks.h"
#include "threads.h"

namespace sparselift {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kChunkIds = 1 << 13;       // fewer ids are not worth a task
constexpr int64_t kChunksPerThread = 4;
constexpr int kMostDigitBits = 11, kLeastDigitBits = 4;

int64_t lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

char* first_line(void* workspace) {
    char* base = static_cast<char*>(workspace);
    return base + (kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(base) % kLine)) % kLine;
}

/// `count` things in chunks of about the same number.
struct Cuts {
    int64_t count, chunks;
    int32_t threads;

    Cuts(int64_t ids, int32_t given) : count(ids), threads(given) {
        chunks = given > 1 ? std::clamp<int64_t>(ids / kChunkIds, 1, given * kChunksPerThread) : 1;
    }
    int64_t begin(int64_t chunk) const { return count * chunk / chunks; }

    /// visit(chunk, first, last) for every chunk.
    template <typename Visit>
    void run(const Visit& visit) const {
        run_tasks(threads, chunks, [&](int64_t chunk, int) { visit(chunk, begin(chunk), begin(chunk + 1)); });
    }
};

template <typename Visit>
sl_status visit_ids(const sl_ids& ids, const Visit& visit) {
    return ids.are_64 ? visit(static_cast<const int64_t*>(ids.data)) : visit(static_cast<const int32_t*>(ids.data));
}

int bits_of(uint64_t value) { return value == 0 ? 0 : 64 - __builtin_clzll(value); }

// ---------------------------------------------------------------------------------------------------- distinct ids

/// An id and its position. Where ids fit 32 bits, in one word.
struct NarrowEntry {
    uint64_t word;
    static NarrowEntry of(uint64_t id, int64_t position) { return {id << 32 | static_cast<uint64_t>(position)}; }
    uint64_t id() const { return word >> 32; }
    int64_t position() const { return static_cast<int64_t>(word & 0xffffffffu); }
};

struct WideEntry {
    uint64_t key, place;
    static WideEntry of(uint64_t id, int64_t position) { return {id, static_cast<uint64_t>(position)}; }
    uint64_t id() const { return key; }
    int64_t position() const { return static_cast<int64_t>(place); }
};

bool is_narrow(const sl_ids& ids) { return ids.rows < INT64_C(1) << 32; }

/// How ids are cut into digits: fewer bits a digit where there are few ids to count.
struct Digits {
    int passes, bits;

    Digits(const sl_ids& ids) {
        const int all = std::max(bits_of(static_cast<uint64_t>(ids.rows)), 1);      // `rows` itself stands for what is no row
        const int most = std::clamp(bits_of(static_cast<uint64_t>(ids.count)), kLeastDigitBits, kMostDigitBits);
        passes = (all + most - 1) / most;
        bits = (all + passes - 1) / passes;
    }
    int64_t values() const { return int64_t{1} << bits; }
};

struct DedupSpace {
    int64_t entry_bytes, count_bytes;

    DedupSpace(const sl_ids& ids, const Cuts& cuts) {
        entry_bytes = lines(ids.count * static_cast<int64_t>(is_narrow(ids) ? sizeof(NarrowEntry) : sizeof(WideEntry)));
        count_bytes = lines(cuts.chunks * Digits(ids).values() * 4);
    }
    int64_t bytes() const { return kLine + 2 * entry_bytes + count_bytes; }
};

/// Counts by chunk become, in place, where each chunk's things of each value go: by value, then by chunk.
template <typename Count>
void place_chunks(Count* counts, int64_t chunks, int64_t values) {
    Count sum = 0;
    for (int64_t value = 0; value < values; ++value) {
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            Count& at = counts[chunk * values + value];
            const Count number = at;
            at = sum;
            sum += number;
        }
    }
}

/// Sorts by id, and keeps the order of equal ones: least significant digit first. Returns where the result is.
template <typename Entry>
const Entry* sort_entries(Entry* from, Entry* to, const Digits& digits, const Cuts& cuts, uint32_t* counts) {
    const int64_t values = digits.values();
    const auto mask = static_cast<uint64_t>(values - 1);
    for (int pass = 0; pass < digits.passes; ++pass) {
        const int shift = pass * digits.bits;
        cuts.run([=](int64_t chunk, int64_t first, int64_t last) {
            uint32_t* const mine = counts + chunk * values;
            std::fill_n(mine, values, 0u);
            for (int64_t i = first; i < last; ++i) ++mine[(from[i].id() >> shift) & mask];
        });
        place_chunks(counts, cuts.chunks, values);
        cuts.run([=](int64_t chunk, int64_t first, int64_t last) {
            uint32_t* const mine = counts + chunk * values;
            for (int64_t i = first; i < last; ++i) to[mine[(from[i].id() >> shift) & mask]++] = from[i];
        });
        std::swap(from, to);
    }
    return from;
}

/// Numbers the runs of equal ids. `counts`: one a chunk.
template <typename Entry>
void number_runs(const Entry* sorted, uint64_t unused, const Cuts& cuts, uint32_t* counts, int64_t* distinct, int32_t* slots, int64_t* total) {
    const auto begins_run = [=](int64_t i) { return sorted[i].id() != unused && (i == 0 || sorted[i - 1].id() != sorted[i].id()); };
    cuts.run([=](int64_t chunk, int64_t first, int64_t last) {
        uint32_t found = 0;
        for (int64_t i = first; i < last; ++i) found += begins_run(i);
        counts[chunk] = found;
    });
    uint32_t sum = 0;
    for (int64_t chunk = 0; chunk < cuts.chunks; ++chunk) {
        const uint32_t found = counts[chunk];
        counts[chunk] = sum;
        sum += found;
    }
    *total = sum;
    cuts.run([=](int64_t chunk, int64_t first, int64_t last) {
        int64_t slot = static_cast<int64_t>(counts[chunk]) - 1;
        for (int64_t i = first; i < last; ++i) {
            if (begins_run(i)) distinct[++slot] = static_cast<int64_t>(sorted[i].id());
            slots[sorted[i].position()] = sorted[i].id() == unused ? -1 : static_cast<int32_t>(slot);
        }
    });
}

template <typename Entry, typename Id>
void dedup(const Id* given, const sl_ids& ids, const Cuts& cuts, void* workspace, int64_t* distinct, int32_t* slots, int64_t* total) {
    const DedupSpace space(ids, cuts);
    char* const base = first_line(workspace);
    auto* const entries = reinterpret_cast<Entry*>(base);
    auto* const other = reinterpret_cast<Entry*>(base + space.entry_bytes);
    auto* const counts = reinterpret_cast<uint32_t*>(base + 2 * space.entry_bytes);
    const auto unused = static_cast<uint64_t>(ids.rows);
    cuts.run([=](int64_t, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const auto id = static_cast<uint64_t>(static_cast<int64_t>(given[i]));      // negative ones are beyond all rows
            entries[i] = Entry::of(id < unused ? id : unused, i);
        }
    });
    const Entry* sorted = sort_entries(entries, other, Digits(ids), cuts, counts);
    number_runs(sorted, unused, cuts, counts, distinct, slots, total);
}

// ---------------------------------------------------------------------------------------------------- ids by owner

/// Division of numbers below 2^63 by a fixed one, as a product: Granlund and Montgomery, "Division by invariant integers using
/// multiplication". With 2^l >= divisor, the reciprocal of 63 + l bits, rounded up, has no error that shows.
class Divisor {
  public:
    explicit Divisor(int64_t divisor) : reciprocal_(0), shift_(0) {
        if (divisor == 1) return;                             // its reciprocal does not fit
        shift_ = bits_of(static_cast<uint64_t>(divisor - 1)) - 1;
        reciprocal_ = static_cast<uint64_t>((static_cast<unsigned __int128>(1) << (64 + shift_)) / static_cast<uint64_t>(divisor) + 1);
    }
    int64_t divide(int64_t number) const {
        if (reciprocal_ == 0) return number;
        const auto product = static_cast<unsigned __int128>(reciprocal_) * static_cast<uint64_t>(number);
        return static_cast<int64_t>(static_cast<uint64_t>(product >> 64) >> shift_);
    }

  private:
    uint64_t reciprocal_;
    int shift_;
};

struct Owners {
    Divisor divisor;
    int64_t by, count;
    bool modulo;

    explicit Owners(const sl_owners& given)
        : divisor(given.modulo ? given.count : given.rows_per_owner), by(given.modulo ? given.count : given.rows_per_owner), count(given.count),
          modulo(given.modulo != 0) {}
    int64_t owner_of(int64_t id) const {
        const int64_t quotient = divisor.divide(id);
        return modulo ? id - quotient * by : quotient;
    }
    int64_t row_of(int64_t id, int64_t owner) const { return modulo ? divisor.divide(id) : id - owner * by; }
};

/// In the words of kernels/checks.py.
sl_status wrong_boundary(int64_t position, int64_t value, int64_t previous, int64_t count) {
    const auto at = static_cast<long long>(position), got = static_cast<long long>(value), ids = static_cast<long long>(count);
    if (position == 0 && value != 0) return fail(SL_BAD_OFFSET, "offsets must start at 0; got %lld", got);
    if (value < previous)
        return fail(SL_BAD_OFFSET, "offsets must not decrease; got %lld after %lld at position %lld", got, static_cast<long long>(previous), at);
    if (value > count) return fail(SL_BAD_OFFSET, "offset %lld at position %lld passes the %lld ids", got, at, ids);
    return fail(SL_BAD_OFFSET, "the last offset must equal the number of ids (%lld); got %lld", ids, got);
}

template <typename Boundary>
sl_status check_boundaries(const Boundary* bounds, int64_t num_bags, int64_t count) {
    if (bounds[0] != 0) return wrong_boundary(0, bounds[0], 0, count);
    for (int64_t b = 1; b <= num_bags; ++b) {
        if (bounds[b] < bounds[b - 1] || bounds[b] > count) return wrong_boundary(b, bounds[b], bounds[b - 1], count);
    }
    return bounds[num_bags] == count ? SL_OK : wrong_boundary(num_bags, bounds[num_bags], num_bags > 0 ? bounds[num_bags - 1] : 0, count);
}

/// Owner `count` is nobody: ids that are no row. Chunks are whole bags, so that a length has one writer.
template <typename Id, typename Boundary>
void bucketize(const Id* ids, int64_t rows, const Boundary* bounds, int64_t num_bags, const Owners& given, const sl_buckets& out,
               const Cuts& cuts, int64_t* counts) {
    const Owners owners = given;
    const int64_t values = owners.count + 1;
    const auto first_bag = [&](int64_t chunk) {
        return chunk == cuts.chunks ? num_bags : std::lower_bound(bounds, bounds + num_bags, static_cast<Boundary>(cuts.begin(chunk))) - bounds;
    };
    run_tasks(cuts.threads, cuts.chunks, [&](int64_t chunk, int) {
        int64_t* const mine = counts + chunk * values;
        std::fill_n(mine, values, int64_t{0});
        const int64_t last = first_bag(chunk + 1);
        for (int64_t bag = first_bag(chunk); bag < last; ++bag) {
            for (int64_t owner = 0; owner < owners.count; ++owner) out.lengths[owner * num_bags + bag] = 0;
            for (int64_t k = bounds[bag]; k < bounds[bag + 1]; ++k) {
                const auto id = static_cast<int64_t>(ids[k]);
                const bool is_row = id >= 0 && id < rows;
                const int64_t owner = is_row ? owners.owner_of(id) : owners.count;
                if (is_row) ++out.lengths[owner * num_bags + bag];
                ++mine[owner];
                out.places[k] = static_cast<int32_t>(owner);      // until its place is known
            }
        }
    });
    place_chunks(counts, cuts.chunks, values);
    run_tasks(cuts.threads, cuts.chunks, [&](int64_t chunk, int) {
        int64_t* const mine = counts + chunk * values;
        const int64_t last = bounds[first_bag(chunk + 1)];
        for (int64_t k = bounds[first_bag(chunk)]; k < last; ++k) {
            const int64_t owner = out.places[k], place = mine[owner]++;
            out.rows[place] = owner < owners.count ? owners.row_of(static_cast<int64_t>(ids[k]), owner) : -1;
            out.sources[place] = static_cast<int32_t>(k);
            out.places[k] = static_cast<int32_t>(place);
        }
    });
}

constexpr int64_t kMostOwners = INT32_MAX - 1;      // and nobody, who is another one

int64_t bucket_counts(const Cuts& cuts, const sl_owners& owners) { return lines(8 * cuts.chunks * (owners.count + 1)); }

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" int64_t sl_dedup_workspace_bytes(const sl_ids* ids, int32_t threads) { return DedupSpace(*ids, Cuts(ids->count, threads)).bytes(); }

extern "C" sl_status sl_dedup(const sl_ids* ids, int64_t* distinct, int32_t* slots, int64_t* count, void* workspace, int32_t threads) {
    if (sl_status status = check_ids(*ids)) return status;
    const Cuts cuts(ids->count, threads);
    return visit_ids(*ids, [&](const auto* given) {
        if (is_narrow(*ids)) dedup<NarrowEntry>(given, *ids, cuts, workspace, distinct, slots, count);
        else dedup<WideEntry>(given, *ids, cuts, workspace, distinct, slots, count);
        return SL_OK;
    });
}

extern "C" int64_t sl_bucketize_workspace_bytes(const sl_ids* ids, const sl_owners* owners, int32_t threads) {
    return kLine + bucket_counts(Cuts(ids->count, threads), *owners);
}

extern "C" sl_status sl_bucketize(const sl_ids* ids, const sl_boundaries* bags, const sl_owners* owners, const sl_buckets* buckets,
                                  void* workspace, int32_t threads) {
    if (sl_status status = check_ids(*ids)) return status;
    if (sl_status status = check_owners(*owners, ids->rows, kMostOwners)) return status;
    const Cuts cuts(ids->count, threads);
    const auto run = [&](const auto* bounds) -> sl_status {
        if (sl_status status = check_boundaries(bounds, bags->num_bags, ids->count)) return status;
        return visit_ids(*ids, [&](const auto* given) {
            bucketize(given, ids->rows, bounds, bags->num_bags, Owners(*owners), *buckets, cuts, reinterpret_cast<int64_t*>(first_line(workspace)));
            return SL_OK;
        });
    };
    return bags->are_64 ? run(static_cast<const int64_t*>(bags->data)) : run(static_cast<const int32_t*>(bags->data));
}
