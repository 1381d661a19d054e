// A program: the static structure of one group of lookups, its kernels and its workspaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../api/guarded.h"
#include "../api/sparselift_cpu.h"
#include "kernels.h"
#include "pool.h"

namespace sparselift {

/// Memory that grows and is kept. Contents are lost when it grows.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; other.bytes_ = 0; }
    ~Buffer();

    /// At least `count` elements, 64-byte aligned. Throws std::bad_alloc.
    template <typename T>
    T* of(size_t count) { return static_cast<T*>(reserve(count * sizeof(T))); }
    size_t bytes() const { return bytes_; }

  private:
    void* reserve(size_t bytes);
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

/// `count` zeros, always as many, that take no memory before they are touched. They are kept, and whoever writes there cleans up.
class Zeros {
  public:
    Zeros() = default;
    Zeros(const Zeros&) = delete;
    Zeros(Zeros&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; other.bytes_ = 0; }
    ~Zeros();
    /// Throws std::bad_alloc.
    template <typename T>
    T* of(int64_t count) { return static_cast<T*>(data_ ? data_ : map(static_cast<size_t>(count) * sizeof(T))); }
    size_t bytes() const { return bytes_; }

  private:
    void* map(size_t bytes);
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

/// Hands out the parts of a block one after the other, each on cache lines of its own.
class Layout {
  public:
    explicit Layout(char* base) : base_(base) {}
    template <typename T>
    T* take(int64_t count) {
        char* at = base_ + used_;
        used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(at);
    }
    size_t used() const { return used_; }

  private:
    char* base_;
    size_t used_ = 0;
};

constexpr int64_t kMaxLookups = INT32_MAX - 1;   // of a table in an update: a chain's links are 1 + a position

/// The lookups of one table in a batch, as `sort_lookups` leaves them. Null where there are none.
struct Runs {
    Entry* sorted;
    int32_t* bags;
    int32_t* rows;
    int32_t* firsts;
    int64_t num_rows;
    int64_t lookups;
};

/// The distinct rows of one table in a batch, for a forward that gathers each once. Null where nobody has found them.
struct Distinct {
    int32_t* slots;                                  // a lookup: the place of its row among `rows`
    int32_t* rows;
    int32_t* paddings;                               // a feature of the table: likewise of its padding; INT32_MAX where the batch has none
    int64_t num_rows;
};

/// The lookups of a feature, the first of which has this position among those of its table. Its gradient is not set.
inline Source source_of(const Lookups& lookups, int64_t first) {
    Source source{};
    source.lookups = lookups;
    source.first = static_cast<int32_t>(first);
    source.last = static_cast<int32_t>(first + lookups.count);
    return source;
}

/// Whether a bag is all that an update asks of the lookups of these sources.
inline bool are_bags_enough(const Source* sources, int64_t num_sources) {
    return num_sources == 1 && !sources->lookups.weights && !sources->lookups.maxima;
}

/// What one worker needs for one table at a time.
struct Workspace {
    Buffer nodes, rows, scratch, slots, paddings, gathered, packed, firsts, entries, bags;
    std::vector<uint64_t> marks;      // all 0
    std::vector<Source> sources;      // of the table at hand, those packed pointing to `packed`
};

/// Bags of one feature, or with feature = -1 all features of a table whose rows are deduplicated.
struct ForwardTask {
    int32_t table, feature;
    int64_t first_bag, last_bag, cost;
};

/// One part of the rows of one table.
struct UpdateTask {
    int32_t table, part, parts;
    int64_t cost;
};

/// Where a table's sources begin and end in sl_program::sources, how many lookups they hold, and floats to pack. `runs`: of exactly
/// these lookups, if somebody has sorted them.
struct SourceRange {
    int64_t begin, end, lookups, packed;
    const Runs* runs;
};

}  // namespace sparselift

struct sl_program {
    std::vector<sl_table> tables;
    std::vector<sl_feature> features;
    std::vector<std::vector<int32_t>> table_features;
    const sparselift::Kernels* kernels = nullptr;
    sparselift::Pool* pool = nullptr;

    std::vector<sparselift::Zeros> heads;             // a table
    std::vector<sparselift::Zeros> heads_ahead;       // a table; of who prepares batches, beside a step that uses the others
    std::vector<sparselift::Zeros> sums;              // a table
    std::vector<sparselift::Workspace> workspaces;    // a worker
    sparselift::Workspace ahead;                      // of who prepares batches, beside them
    std::vector<sl_status> statuses;                  // a feature
    std::vector<sl_fault> faults;
    std::vector<sparselift::ForwardTask> forward_tasks;
    std::vector<sparselift::UpdateTask> update_tasks;
    std::vector<sparselift::Source> sources;
    std::vector<sparselift::SourceRange> source_ranges;

    ~sl_program();
    sparselift::Workspace& workspace(int worker) { return workspaces[static_cast<size_t>(worker)]; }
    void reserve_workers(int threads);
};

/// The ids of one batch, in one block of the program's pool.
struct sl_batch {
    sparselift::Block* block;
    const sl_program* program;
    int64_t bytes;
    int64_t num_features;
    sparselift::Lookups* lookups;
    sparselift::Block* arranged;                      // holds what follows; null before sl_arrange
    sparselift::Runs* runs;                           // a table
    sparselift::Distinct* distinct;                   // a table
};

namespace sparselift {

int64_t lookups_of(const sl_program& program, const sl_batch& batch, size_t table);

/// Finds the distinct rows of a table, in the order in which they come. `heads` are all 0 before and after.
void find_distinct(const sl_program& program, const sl_batch& batch, size_t table, int32_t* heads, Distinct& distinct);

}  // namespace sparselift
