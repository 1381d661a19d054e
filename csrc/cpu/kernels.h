// What one build of the kernels (an instruction set) offers to the program that schedules them.
//
// This header is included by sources compiled with different instruction sets: it holds plain structs alone, no
// inline functions, since the linker keeps only one copy of those.
#pragma once

#include <stdint.h>

#include "../api/sparselift_cpu.h"

namespace sparselift {

/// The ids of one feature in a batch. Bag b holds lookups [offsets[b], offsets[b + 1]), or [b * length, (b + 1) * length)
/// where offsets is null.
struct Lookups {
    const int32_t* ids;
    const int32_t* offsets;
    const float* weights;     // one a lookup; null: unweighted
    const float* inverse;     // one a bag: 1 / ids that count; null unless mean
    float* maxima;            // (B, dim) bits of the int32 position that each maximum came from, -1: none; null unless max
    int64_t num_bags;
    int64_t count;            // K
    int64_t length;
    int32_t padding;          // -1: none
    int32_t pooling;
};

/// Bags [first_bag, last_bag) of one feature.
struct ForwardArgs {
    const void* table;
    int64_t dim;
    Lookups lookups;
    float* out;
    int64_t out_stride;
    int64_t first_bag;
    int64_t last_bag;
    int32_t prefetch;
    int32_t stream;           // whole cache lines of `out`, past the caches
};

/// A lookup on its way through a sort by row: its position, or its bag where that is all that is asked of it.
struct Entry {
    int32_t row;
    int32_t lookup;
};

/// One lookup in the chain of its row. `next` is 1 + the position of the row's next lookup, 0 at the end.
struct Node {
    int32_t next;
    int32_t bag;
};

/// The gradient of one feature in one segment. Lookup k of a table's chains is lookup k - first of the source for which
/// first <= k < last.
struct Source {
    Lookups lookups;
    const float* grad;
    int64_t grad_stride;
    float scale;
    int32_t plain;            // no weights, inverse or maxima and a scale of 1: gradient rows are used as they are
    int32_t pack;             // copied side by side before the chains are walked
    int32_t first;
    int32_t last;
};

/// One step of a rule on one table, or on the rows of it with (row >> 4) & part_mask == part: blocks of 16 rows, so that no
/// two parts share a cache line of `heads`.
struct UpdateArgs {
    void* table;
    float* first;             // of the rule's state
    float* second;
    int64_t dim;
    const Source* sources;
    int64_t num_sources;
    int32_t kind;
    int32_t maximize;
    float lr;
    float eps;
    float weight_decay;
    float first_gain;
    float second_gain;
    int32_t dtype;            // of the weights
    int32_t stochastic;
    uint64_t noise_key;
    int32_t prefetch;
    int32_t part;
    int32_t part_mask;
    int32_t* heads;           // (R,) 1 + position of the row's first lookup; all 0 between calls; for chains
    Node* nodes;              // one a lookup; likewise
    const Entry* sorted;      // lookups by row, and one entry more, of no row; for runs
    int32_t* firsts;          // where the run of each distinct row begins
    int32_t* bags;            // of each lookup; null where `sorted` holds bags: one source without weights and maxima
    int32_t* rows;            // distinct rows
    int64_t num_rows;         // R
    Entry* entries;           // two arrays to sort in, each of one entry a lookup and one more
    float* scratch;           // (dim,)
    float* sums;              // (R, dim) all 0 between calls; for dense accumulation
    uint64_t* marks;          // (R / 64,) all 0 likewise
};

/// What reads weights alone: one of these for each dtype of them.
struct WeightKernels {
    void (*forward)(const ForwardArgs& args);
    void (*weight_grad)(const ForwardArgs& args, const float* grad, int64_t grad_stride, float* out);
};

struct Kernels {
    WeightKernels weights[SL_NUM_DTYPES];
    /// Copies ids to int32. Returns the position of the first one outside [0, rows), or -1.
    int64_t (*narrow_ids)(const void* ids, int64_t count, int64_t stride, int32_t are_64, int64_t rows, int32_t* out);
    /// Links the lookups of every row in ascending order and lists the rows, those used last first. Returns their number.
    int64_t (*build_chains)(const UpdateArgs& args);
    /// Sorts the lookups by row, sets args.sorted, and lists the rows, the last one first. Returns their number.
    int64_t (*sort_lookups)(UpdateArgs& args);
    /// Gradient rows of a source side by side, in `out` (B, D): scaled, where no per-sample weight comes first.
    void (*pack_grads)(const Source& source, int64_t dim, float* out);
    void (*apply_chains)(const UpdateArgs& args, int64_t num_rows);
    void (*apply_runs)(const UpdateArgs& args, int64_t num_rows);
    /// SGD, a lookup at a time; float32 weights.
    void (*apply_lookups)(const UpdateArgs& args);
    /// Adds gradients up in `sums`, then visits the rows in ascending order: the bits of chains and runs.
    void (*apply_dense)(const UpdateArgs& args);
    /// out[i] = summed gradient of rows[i]. Cleans `heads` behind it.
    void (*sum_chains)(const UpdateArgs& args, int64_t num_rows, float* out);
    /// Ids and gradients, one a lookup that is no padding, of bags [first_bag, last_bag).
    void (*expand)(const Source& source, int64_t dim, int64_t first_bag, int64_t last_bag, int64_t* ids, float* out);
    /// slots[k] = position of ids[k] among the distinct rows, which go to args.rows from `known` on. Returns their number.
    int64_t (*find_slots)(const UpdateArgs& args, const Lookups& lookups, int64_t known, int32_t* slots);
};

namespace portable {
const Kernels* kernels();
}
#ifdef __x86_64__
namespace avx2 {
const Kernels* kernels();
}
namespace avx512 {
const Kernels* kernels();
}
#endif

}  // namespace sparselift
