#include "update_plan.h"

#include <algorithm>

#include "dense.cuh"

namespace sparselift::cuda {
namespace {

/// Up to so many pairs of a row and a lookup are compared rather than sorted, where that saves the sort altogether: 4 million take some 3
/// microseconds (32 a warp instruction, a dozen instructions each), and a sort has four launches and more.
constexpr int64_t kMostCompared = 1 << 22;

/// Shared memory of a block of dense rows: two blocks fit a multiprocessor of an A100.
constexpr int64_t kDenseBytes = 64 << 10;

/// Calls visit(source, table) for each feature and segment with a gradient and lookups, in order.
template <typename Visit>
void visit_sources(const sl_cuda_program& program, const sl_cuda_segment* segments, int64_t num_segments, const Visit& visit) {
    for (int64_t s = 0; s < num_segments; ++s) {
        for (size_t f = 0; f < program.features.size(); ++f) {
            const auto t = static_cast<size_t>(program.features[f].table);
            const sl_matrix& grad = segments[s].grads[f];
            const Lookups& lookups = segments[s].batch->lookups[f];
            if (!grad.data || lookups.count == 0) continue;
            Source source{};
            source.lookups = lookups;
            source.grad = grad.data;
            source.grad_stride = grad.row_stride;
            source.batch_fault = segments[s].batch->fault;
            source.scale = segments[s].scales ? segments[s].scales[t] : 1.0f;
            source.vector_floats = are_in_fours(grad.data, grad.row_stride, program.tables[t].dim);
            visit(source, t);
        }
    }
}

/// Adds a source whose lookups are sorted, of table `number` of the plan.
sl_status add_sorted(Source source, const sl_cuda_table& table, int32_t number, UpdatePlan& plan) {
    if (plan.count + source.lookups.count > INT32_MAX) return fail(SL_BAD_ARGUMENT, "more than 2**31 - 1 lookups in one update");
    source.table = number;
    source.first = static_cast<int32_t>(plan.count);
    plan.sources.push_back(source);
    plan.count += source.lookups.count;
    plan.widest = std::max(plan.widest, table.dim);
    plan.row_bits = std::max(plan.row_bits, bits_of(static_cast<uint64_t>(table.rows - 1)));
    return SL_OK;
}

sl_status finish(UpdatePlan& plan) {
    if (static_cast<int64_t>(plan.sources.size()) > kMaxGridY || static_cast<int64_t>(plan.dense.size()) > kMaxGridY)
        return fail(SL_BAD_ARGUMENT, "more than %lld features times segments in one update", static_cast<long long>(kMaxGridY));
    plan.unused = static_cast<uint64_t>(plan.tables.size()) << plan.row_bits;
    return SL_OK;
}

/// Adds a table whose rows look for their lookups. As many warps share a row as it has pieces where ids are spread evenly.
void add_dense(const sl_cuda_table& table, int32_t number, int32_t chunk, const std::vector<Source>& sources, UpdatePlan& plan) {
    int64_t lookups = 0;
    for (const Source& source : sources) lookups += source.lookups.count;
    DenseTable dense{};
    dense.table = number;
    dense.rows = static_cast<int32_t>(table.rows);
    dense.first_source = static_cast<int32_t>(plan.dense_sources.size());
    dense.num_sources = static_cast<int32_t>(sources.size());
    dense.stride = static_cast<int32_t>(divide_up(table.dim, 4) * 4);
    const auto has_room = [&] { return dense_shared_bytes(dense) <= kDenseBytes; };
    while ((1 << dense.shares_log2) < kDenseWarps && (lookups >> dense.shares_log2 > table.rows * chunk || !has_room())) ++dense.shares_log2;
    plan.dense.push_back(dense);
    plan.dense_sources.insert(plan.dense_sources.end(), sources.begin(), sources.end());
}

bool may_be_dense(const sl_cuda_table& table) {
    return table.coalesce != SL_COALESCE_SORT && table.rows <= SL_CUDA_MOST_DENSE_ROWS && table.dim <= SL_CUDA_MOST_DENSE_COLUMNS;
}

TableUpdate describe(const sl_cuda_table& table, const sl_cuda_weights& weights, const sl_rule& rule) {
    TableUpdate update{};
    update.rule = rule;
    update.variant = table.dtype + (rule.stochastic ? SL_NUM_DTYPES : 0);
    update.weights = const_cast<void*>(weights.data);
    update.state = weights.state;
    const bool in_vectors = table.vector_bytes == 16 && are_in_vectors(weights.data, table.dim, table.dtype);
    const bool in_fours = are_in_fours(weights.state.first, table.dim, table.dim) && are_in_fours(weights.state.second, table.dim, table.dim);
    update.columns = columns_of(table.dim, table.dtype, in_vectors, in_fours, kUpdateColumns);
    return update;
}

}  // namespace

sl_status plan_update(const sl_cuda_program& program, const sl_cuda_weights* tables, const sl_rule* rules, const sl_cuda_segment* segments,
                      int64_t num_segments, UpdatePlan& plan) {
    const size_t num_tables = program.tables.size();
    for (size_t t = 0; t < num_tables; ++t) plan.tables.push_back(describe(program.tables[t], tables[t], rules[t]));
    std::vector<std::vector<Source>> of_tables(num_tables);
    int64_t compared = 0;
    bool may_all = true;
    visit_sources(program, segments, num_segments, [&](const Source& source, size_t t) {
        if (rules[t].kind == SL_RULE_ABSENT) return;
        of_tables[t].push_back(source);
        compared += program.tables[t].rows * source.lookups.count;
        may_all = may_all && may_be_dense(program.tables[t]);
    });
    const bool needs_no_sort = may_all && compared <= kMostCompared;
    const auto is_dense = [&](size_t t) { return program.tables[t].coalesce == SL_COALESCE_DENSE || needs_no_sort; };
    for (size_t t = 0; t < num_tables; ++t) {
        if (!of_tables[t].empty() && is_dense(t))
            add_dense(program.tables[t], static_cast<int32_t>(t), program.shape.chunk_lookups, of_tables[t], plan);
    }
    for (size_t t = 0; t < num_tables; ++t) {
        if (is_dense(t)) continue;
        for (const Source& source : of_tables[t]) SL_TRY(add_sorted(source, program.tables[t], static_cast<int32_t>(t), plan));
    }
    return finish(plan);
}

sl_status plan_gradient(const sl_cuda_program& program, int64_t table, const float* grads, const sl_cuda_segment* segments,
                        int64_t num_segments, UpdatePlan& plan) {
    const sl_cuda_table& spec = program.tables[static_cast<size_t>(table)];
    TableUpdate update{};
    update.variant = SL_FLOAT32;
    const bool in_fours = are_in_fours(grads, spec.dim, spec.dim);
    update.columns = columns_of(spec.dim, SL_FLOAT32, in_fours, in_fours, kUpdateColumns);
    plan.tables.push_back(update);
    sl_status status = SL_OK;
    visit_sources(program, segments, num_segments, [&](const Source& source, size_t t) {
        if (static_cast<int64_t>(t) == table && status == SL_OK) status = add_sorted(source, spec, 0, plan);
    });
    return status == SL_OK ? finish(plan) : status;
}

sl_status launch_dense(const UpdatePlan& plan, const DenseArgs& args, cudaStream_t stream) {
    int64_t blocks = 0, shared_bytes = 0;
    for (const DenseTable& dense : plan.dense) {
        blocks = std::max(blocks, divide_up(dense.rows, kDenseWarps >> dense.shares_log2));
        shared_bytes = std::max(shared_bytes, dense_shared_bytes(dense));
    }
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(plan.dense.size()));
    return visit_variants(plan, plan.dense, [&](auto element, auto rule, int32_t variant) {
        return launch<&dense_rows_kernel<decltype(element), decltype(rule)>>(grid, kDenseThreads, static_cast<size_t>(shared_bytes), stream, args,
                                                                             variant);
    });
}

}  // namespace sparselift::cuda
