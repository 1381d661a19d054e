// What kernels read: plain structs that the host fills and a launch carries over, or that lie in device memory.
#pragma once

#include <cstdint>

#include "../api/sparselift_cuda.h"
#include "sort.h"

namespace sparselift::cuda {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kMaxThreads = 512;       // a block

/// The ids of one feature of a batch. Bag b holds lookups [offsets[b], offsets[b + 1]), or [b * length, (b + 1) * length) where
/// offsets is null. An id of -1 is no row; a boundary of -1, or one less than the one before it, makes its bag empty.
struct Lookups {
    const int32_t* ids;
    const int32_t* offsets;
    const float* weights;      // one a lookup; null: unweighted
    const float* inverse;      // one a bag: 1 / ids that count; null unless mean
    int32_t* maxima;           // (B, D) lookups that the maxima of the last forward came from, -1: none; null unless max
    int32_t num_bags;
    int32_t count;             // K
    int32_t length;
    int32_t padding;           // -1: none
    int32_t pooling;
};

/// How the columns of a row are spread over lanes: lane l of a group of `lanes` has columns [l * width, (l + 1) * width) of each
/// stripe of lanes * width, where `width` elements are one load. `vectors` of them are summed at a time.
struct Columns {
    int32_t dim;
    int16_t lanes_log2;
    int16_t vectors;           // 1, 2 or 4
    int32_t vector_loads;      // rows in loads of 16 bytes, else an element at a time
    int32_t vector_floats;     // outputs or states in vectors of four, likewise
};

/// The first fault of a batch, and how many blocks of the kernel that looks for it have ended.
struct BatchFault {
    unsigned long long first;  // see fault_key; kNoFault
    uint32_t blocks_done;
    uint32_t reserved;
};

constexpr unsigned long long kNoFault = ~0ull;

/// Set from the first faulty batch on, until the caller clears it.
struct Status {
    int32_t faulted;
};

/// The ids of one feature as the caller has them, and where they go.
struct PrepareFeature {
    const void* ids;
    const void* offsets;
    const float* weights;
    int64_t id_stride;
    int64_t offset_stride;
    int64_t weight_stride;
    int64_t num_offsets;
    int32_t ids_are_64;
    int32_t offsets_are_64;
    int32_t rows;
    int32_t dim;
    Lookups lookups;
};

struct PrepareArgs {
    const PrepareFeature* features;
    BatchFault* batch_fault;
    Status* status;
    sl_cuda_fault* fault;      // host memory
};

/// Bags of one feature over the rows of its table.
struct ForwardFeature {
    Lookups lookups;
    Columns columns;
    const void* table;
    float* out;
    int64_t out_stride;
    float* partials;           // (2 * cells, D) sums of pieces of long bags, see chunks.cuh; null where no bag can be long
    int32_t* counts;           // (2 * cells,) ids that count in them; where maxima are wanted, (2 * cells, D) lookups that they came from
    int32_t bags_per_group;
    int32_t reserved;
};

/// Features of one launch. They come as its arguments: an argument list holds 4 KiB.
constexpr int kForwardFeatures = 31;

struct ForwardArgs {
    ForwardFeature features[kForwardFeatures];
    int32_t chunk;
    uint32_t bag_blocks;       // blocks from here on have pieces of long bags
};

struct WeightGradArgs {
    Lookups lookups;
    Columns columns;
    const void* table;
    const float* grad;
    int64_t grad_stride;
    float* out;
};

/// The gradient of one feature in one segment. Lookup p of an update is lookup p - first of the source for which
/// first <= p < first + lookups.count.
struct Source {
    Lookups lookups;
    const float* grad;
    int64_t grad_stride;
    const BatchFault* batch_fault;
    float scale;
    int32_t table;
    int32_t first;
    int32_t vector_floats;     // gradient rows may be read in vectors of four
};

/// Whose gradient row a lookup adds.
struct Origin {
    int32_t source;
    int32_t bag;
};

struct TableUpdate {
    Columns columns;
    void* weights;
    sl_state state;
    sl_rule rule;
    int32_t variant;           // of the kernels that take it: the dtype, and SL_NUM_DTYPES more where the rule rounds by chance
};

/// A small table whose lookups are not sorted, see dense.cuh.
struct DenseTable {
    int32_t table;
    int32_t rows;
    int32_t first_source;
    int32_t num_sources;
    int32_t shares_log2;       // warps that share a row
    int32_t stride;            // floats of a row of sums: D, rounded up to four
};

struct DenseArgs {
    const DenseTable* dense;
    const Source* sources;
    const TableUpdate* tables;
    const Status* status;
    int32_t chunk;
};

/// Lookups sorted by (table, row), and what it takes to sum the gradients of each row.
struct RunArgs {
    const Source* sources;
    const TableUpdate* tables;
    const uint64_t* keys;      // (count,) ascending: table << row_bits | row; `unused` where a lookup adds to no row
    const uint32_t* positions; // (count,) of the lookups, ascending among equal keys
    const Origin* origins;     // (count,) by position
    int32_t* long_runs;        // one a cell: 1 + where a run longer than a chunk begins in it; 0
    float* partials;           // (2 * cells, partial_stride) sums of pieces of long runs, see chunks.cuh
    const Status* status;
    uint64_t unused;
    int64_t partial_stride;
    int32_t row_bits;
    int32_t count;
    int32_t chunk;
    int32_t reserved;
};

struct KeyArgs {
    SortStart sort;
    const Source* sources;
    uint64_t* keys;
    uint32_t* positions;
    Origin* origins;
    int32_t* long_runs;
    uint64_t unused;
    int32_t row_bits;
    int32_t count;
    int32_t chunk;
};

}  // namespace sparselift::cuda
