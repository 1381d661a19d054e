// What an update does, before it has a workspace: which lookups add to which tables, and by which way.
#pragma once

#include <algorithm>

#include "program.h"
#include "sort.h"
#include "update.cuh"

namespace sparselift::cuda {

/// The lookups that add to some tables, and what becomes of their rows.
struct UpdatePlan {
    std::vector<TableUpdate> tables;
    std::vector<Source> sources;       // of tables whose lookups are sorted
    std::vector<Source> dense_sources; // of the others, table by table
    std::vector<DenseTable> dense;
    int64_t count = 0;                 // lookups to be sorted
    int64_t widest = 0;                // columns of their tables
    int row_bits = 0;
    uint64_t unused = 0;               // the key after all others

    int key_bits() const { return bits_of(unused); }
};

/// An update by the rules. A table whose rule is absent is left alone.
sl_status plan_update(const sl_cuda_program& program, const sl_cuda_weights* tables, const sl_rule* rules, const sl_cuda_segment* segments,
                      int64_t num_segments, UpdatePlan& plan);

/// The gradient of one table, into rows of float32.
sl_status plan_gradient(const sl_cuda_program& program, int64_t table, const float* grads, const sl_cuda_segment* segments,
                        int64_t num_segments, UpdatePlan& plan);

/// visit(a value of the element type, the rule's functor, variant) for every variant among the tables of `parts`, which are sources or dense
/// tables. There is none that rounds float32 by chance.
template <typename Parts, typename Visit>
sl_status visit_variants(const UpdatePlan& plan, const Parts& parts, const Visit& visit) {
    for (int32_t variant = 0; variant < 2 * SL_NUM_DTYPES; ++variant) {
        const auto has_variant = [&](const auto& part) { return plan.tables[static_cast<size_t>(part.table)].variant == variant; };
        if (std::none_of(parts.begin(), parts.end(), has_variant)) continue;
        SL_TRY(visit_dtype(variant % SL_NUM_DTYPES, [&](auto element) -> sl_status {
            if constexpr (sizeof(element) == 2) {
                if (variant >= SL_NUM_DTYPES) return visit(element, ApplyRuleByChance{}, variant);
            }
            return visit(element, ApplyRule{}, variant);
        }));
    }
    return SL_OK;
}

/// The dense tables of a plan whose parts lie in device memory.
sl_status launch_dense(const UpdatePlan& plan, const DenseArgs& args, cudaStream_t stream);

}  // namespace sparselift::cuda
