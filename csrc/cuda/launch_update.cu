// Schedules an update: keys of all lookups, one sort for all tables, then the rows; and the gradients that are handed out instead.
#include <algorithm>
#include <cstring>

#include "keys.cuh"
#include "program.h"
#include "rank.h"
#include "update.cuh"

namespace sparselift::cuda {
namespace {

constexpr unsigned kKeyThreads = 256;
constexpr unsigned kRunThreads = 128;      // four warps: their runs differ in length, and a block holds its registers until all have ended

/// The lookups that add to some tables, and what becomes of their rows.
struct UpdatePlan {
    std::vector<Source> sources;
    std::vector<TableUpdate> tables;
    int64_t count = 0;         // lookups
    int64_t widest = 0;        // columns
    int row_bits = 0;
    uint64_t unused = 0;       // the key after all others
};

/// Where an update works.
struct Workspace {
    Source* sources;
    TableUpdate* tables;
    uint64_t* keys;
    uint64_t* sorted_keys;
    uint32_t* positions;
    uint32_t* sorted_positions;
    Origin* origins;
    int32_t* long_runs;
    float* partials;
    void* sort;
    int64_t sort_bytes;
    int64_t cells;
    int64_t partial_stride;
    RankSpace ranks;
};

/// Adds the sources of every table for which number_of(table) is not negative: its number among the tables of the plan.
template <typename Number>
sl_status gather_sources(const sl_cuda_program& program, const sl_cuda_segment* segments, int64_t num_segments, const Number& number_of,
                         UpdatePlan& plan) {
    int64_t most_rows = 1;
    for (int64_t s = 0; s < num_segments; ++s) {
        for (size_t f = 0; f < program.features.size(); ++f) {
            const auto t = static_cast<size_t>(program.features[f].table);
            const sl_matrix& grad = segments[s].grads[f];
            const Lookups& lookups = segments[s].batch->lookups[f];
            if (number_of(t) < 0 || !grad.data || lookups.count == 0) continue;
            if (plan.count + lookups.count > INT32_MAX) return fail(SL_BAD_ARGUMENT, "more than 2**31 - 1 lookups in one update");
            Source source{};
            source.lookups = lookups;
            source.grad = grad.data;
            source.grad_stride = grad.row_stride;
            source.batch_fault = segments[s].batch->fault;
            source.scale = segments[s].scales ? segments[s].scales[t] : 1.0f;
            source.table = number_of(t);
            source.first = static_cast<int32_t>(plan.count);
            source.vector_floats = are_in_fours(grad.data, grad.row_stride, program.tables[t].dim);
            plan.sources.push_back(source);
            plan.count += lookups.count;
            plan.widest = std::max(plan.widest, program.tables[t].dim);
            most_rows = std::max(most_rows, program.tables[t].rows);
        }
    }
    if (static_cast<int64_t>(plan.sources.size()) > kMaxGridY)
        return fail(SL_BAD_ARGUMENT, "more than %lld features times segments in one update", static_cast<long long>(kMaxGridY));
    plan.row_bits = bits_of(static_cast<uint64_t>(most_rows - 1));
    plan.unused = static_cast<uint64_t>(plan.tables.size()) << plan.row_bits;
    return SL_OK;
}

Workspace lay_out(Layout& layout, const UpdatePlan& plan, int32_t chunk, bool with_ranks) {
    Workspace space{};
    space.tables = layout.take<TableUpdate>(static_cast<int64_t>(plan.tables.size()));
    space.sources = layout.take<Source>(static_cast<int64_t>(plan.sources.size()));
    space.keys = layout.take<uint64_t>(plan.count);
    space.sorted_keys = layout.take<uint64_t>(plan.count);
    space.positions = layout.take<uint32_t>(plan.count);
    space.sorted_positions = layout.take<uint32_t>(plan.count);
    space.origins = layout.take<Origin>(plan.count);
    space.cells = num_cells(plan.count, chunk);
    space.partial_stride = divide_up(plan.widest, 4) * 4;
    space.long_runs = layout.take<int32_t>(space.cells);
    if (plan.count > chunk) space.partials = layout.take<float>(2 * space.cells * space.partial_stride);
    if (plan.count > 0) space.sort_bytes = static_cast<int64_t>(sort_workspace_bytes<uint64_t>(plan.count));
    space.sort = layout.take<char>(space.sort_bytes);
    if (with_ranks) space.ranks = lay_out_ranks(layout, plan.count);
    return space;
}

/// Puts the tables and the sources, which lie one after the other.
sl_status put_plan(const UpdatePlan& plan, const Workspace& space, cudaStream_t stream) {
    const auto sources_at = reinterpret_cast<const char*>(space.sources) - reinterpret_cast<const char*>(space.tables);
    std::vector<char> staged(static_cast<size_t>(sources_at) + plan.sources.size() * sizeof(Source));
    std::memcpy(staged.data(), plan.tables.data(), plan.tables.size() * sizeof(TableUpdate));
    std::memcpy(staged.data() + sources_at, plan.sources.data(), plan.sources.size() * sizeof(Source));
    return put(space.tables, staged.data(), static_cast<int64_t>(staged.size()), stream);
}

/// Makes the keys of all lookups.
sl_status make_keys(const UpdatePlan& plan, const Workspace& space, int32_t chunk, cudaStream_t stream) {
    SL_TRY(put_plan(plan, space, stream));
    int64_t longest = 0;
    for (const Source& source : plan.sources) longest = std::max<int64_t>(longest, source.lookups.count);
    KeyArgs args{};
    args.sources = space.sources;
    args.keys = space.keys;
    args.positions = space.positions;
    args.origins = space.origins;
    args.long_runs = space.long_runs;
    args.unused = plan.unused;
    args.row_bits = plan.row_bits;
    args.chunk = chunk;
    const dim3 grid(static_cast<unsigned>(divide_up(longest, kKeyThreads)), static_cast<unsigned>(plan.sources.size()));
    return launch<&lookup_keys_kernel>(grid, kKeyThreads, 0, stream, args);
}

sl_status sort_keys(const UpdatePlan& plan, const Workspace& space, cudaStream_t stream) {
    const SortPairs<uint64_t> pairs{space.keys, space.sorted_keys, space.positions, space.sorted_positions, plan.count, bits_of(plan.unused)};
    return sort(pairs, space.sort, space.sort_bytes, stream);
}

RunArgs run_args(const UpdatePlan& plan, const Workspace& space, int32_t chunk, bool are_sorted, const Status* status) {
    RunArgs args{};
    args.sources = space.sources;
    args.tables = space.tables;
    args.keys = are_sorted ? space.sorted_keys : space.keys;
    args.positions = are_sorted ? space.sorted_positions : space.positions;
    args.origins = space.origins;
    args.long_runs = space.long_runs;
    args.partials = space.partials;
    args.status = status;
    args.unused = plan.unused;
    args.partial_stride = space.partial_stride;
    args.row_bits = plan.row_bits;
    args.count = static_cast<int32_t>(plan.count);
    args.chunk = chunk;
    return args;
}

/// The rows of tables of one variant, those with long runs last.
template <typename Weight, typename Finish>
sl_status launch_runs(const RunArgs& args, int64_t cells, int32_t variant, const Finish& finish, cudaStream_t stream) {
    constexpr int64_t kWarps = kRunThreads / kWarp;
    const auto blocks = static_cast<unsigned>(divide_up(divide_up(args.count, kWarp), kWarps));
    SL_TRY((launch<&coalesced_kernel<Weight, Finish>>(blocks, kRunThreads, 0, stream, args, variant, finish)));
    if (args.count <= args.chunk) return SL_OK;
    return launch<&long_runs_kernel<Weight, Finish>>(static_cast<unsigned>(divide_up(cells, kWarps)), kRunThreads, 0, stream, args, variant, finish);
}

sl_status plan_update(const sl_cuda_program& program, const sl_cuda_weights* tables, const sl_rule* rules, const sl_cuda_segment* segments,
                      int64_t num_segments, UpdatePlan& plan) {
    for (size_t t = 0; t < program.tables.size(); ++t) {
        const sl_cuda_table& table = program.tables[t];
        TableUpdate update{};
        update.rule = rules[t];
        update.variant = table.dtype + (rules[t].stochastic ? SL_NUM_DTYPES : 0);
        update.weights = const_cast<void*>(tables[t].data);
        update.state = tables[t].state;
        const bool in_vectors = program.shape.vector_bytes == 16 && are_in_vectors(tables[t].data, table.dim, table.dtype);
        const sl_state& state = tables[t].state;
        const bool in_fours = are_in_fours(state.first, table.dim, table.dim) && are_in_fours(state.second, table.dim, table.dim);
        update.columns = columns_of(table.dim, table.dtype, in_vectors, in_fours, kUpdateColumns);
        plan.tables.push_back(update);
    }
    const auto number_of = [&](size_t t) { return rules[t].kind == SL_RULE_ABSENT ? -1 : static_cast<int32_t>(t); };
    return gather_sources(program, segments, num_segments, number_of, plan);
}

/// The gradient of one table, into rows of float32.
sl_status plan_gradient(const sl_cuda_program& program, int64_t table, const float* grads, const sl_cuda_segment* segments,
                        int64_t num_segments, UpdatePlan& plan) {
    const sl_cuda_table& spec = program.tables[static_cast<size_t>(table)];
    TableUpdate update{};
    update.variant = SL_FLOAT32;
    const bool in_fours = are_in_fours(grads, spec.dim, spec.dim);
    update.columns = columns_of(spec.dim, SL_FLOAT32, in_fours, in_fours, kUpdateColumns);
    plan.tables.push_back(update);
    return gather_sources(program, segments, num_segments, [&](size_t t) { return static_cast<int64_t>(t) == table ? 0 : -1; }, plan);
}

/// The gradient of one table through `write`, which gets the plan, its workspace and the stream.
template <typename Write>
sl_status give_gradient(const sl_cuda_program& program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments,
                        const float* grads, int64_t* count, const sl_cuda_context& context, const Write& write) {
    UpdatePlan plan;
    SL_TRY(plan_gradient(program, table, grads, segments, num_segments, plan));
    const cudaStream_t stream = stream_of(context);
    if (plan.count == 0) {
        const int64_t none = 0;
        return put(count, &none, sizeof none, stream);
    }
    Layout layout(context.workspace);
    const Workspace space = lay_out(layout, plan, program.shape.chunk_lookups, true);
    SL_TRY(check_workspace(context, layout.used()));
    SL_TRY(make_keys(plan, space, program.shape.chunk_lookups, stream));
    return write(plan, space, stream);
}

}  // namespace
}  // namespace sparselift::cuda

using namespace sparselift;
using namespace sparselift::cuda;

extern "C" int64_t sl_cuda_update_workspace_bytes(const sl_cuda_program* program, const sl_rule* rules, const sl_cuda_segment* segments,
                                                  int64_t num_segments) {
    UpdatePlan plan;
    const std::vector<sl_cuda_weights> tables(program->tables.size());
    if (plan_update(*program, tables.data(), rules, segments, num_segments, plan) != SL_OK) return 0;      // the update says why
    Layout layout(nullptr);
    lay_out(layout, plan, program->shape.chunk_lookups, false);
    return layout.used();
}

extern "C" sl_status sl_cuda_update(const sl_cuda_program* program, const sl_cuda_weights* tables, const sl_rule* rules,
                                    const sl_cuda_segment* segments, int64_t num_segments, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        UpdatePlan plan;
        SL_TRY(plan_update(*program, tables, rules, segments, num_segments, plan));
        if (plan.count == 0) return SL_OK;
        const int32_t chunk = program->shape.chunk_lookups;
        const cudaStream_t stream = stream_of(*context);
        Layout layout(context->workspace);
        const Workspace space = lay_out(layout, plan, chunk, false);
        SL_TRY(check_workspace(*context, layout.used()));
        SL_TRY(make_keys(plan, space, chunk, stream));
        SL_TRY(sort_keys(plan, space, stream));
        const RunArgs args = run_args(plan, space, chunk, true, static_cast<const Status*>(context->status));
        for (int32_t variant = 0; variant < 2 * SL_NUM_DTYPES; ++variant) {
            const auto has_variant = [&](const Source& source) { return plan.tables[static_cast<size_t>(source.table)].variant == variant; };
            if (std::none_of(plan.sources.begin(), plan.sources.end(), has_variant)) continue;
            SL_TRY(visit_dtype(variant % SL_NUM_DTYPES, [&](auto element) {
                using Weight = decltype(element);
                if constexpr (sizeof(Weight) == 2) {
                    if (variant >= SL_NUM_DTYPES) return launch_runs<Weight>(args, space.cells, variant, ApplyRuleByChance{}, stream);
                }
                return launch_runs<Weight>(args, space.cells, variant, ApplyRule{}, stream);
            }));
        }
        return SL_OK;
    });
}

extern "C" int64_t sl_cuda_count_lookups(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments) {
    UpdatePlan plan;
    if (plan_gradient(*program, table, nullptr, segments, num_segments, plan) != SL_OK) return 0;
    return plan.count;
}

extern "C" int64_t sl_cuda_gradient_workspace_bytes(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments,
                                                    int64_t num_segments) {
    UpdatePlan plan;
    if (plan_gradient(*program, table, nullptr, segments, num_segments, plan) != SL_OK) return 0;
    Layout layout(nullptr);
    lay_out(layout, plan, program->shape.chunk_lookups, true);
    return layout.used();
}

extern "C" sl_status sl_cuda_expanded_grad(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments,
                                           int64_t* ids, float* grads, int64_t* count, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        const auto write = [&](const UpdatePlan& plan, const Workspace& space, cudaStream_t stream) -> sl_status {
            SL_TRY(rank(UsedLookups{space.keys, plan.unused}, plan.count, space.ranks, count, stream));
            const RunArgs args = run_args(plan, space, program->shape.chunk_lookups, false, nullptr);
            const int64_t groups = kRunThreads >> plan.tables[0].columns.lanes_log2;
            return launch<&expanded_kernel<WriteGradient>>(static_cast<unsigned>(divide_up(plan.count, groups)), kRunThreads, 0, stream, args,
                                                           WriteGradient{ids, grads, space.ranks.ranks});
        };
        return give_gradient(*program, table, segments, num_segments, grads, count, *context, write);
    });
}

extern "C" sl_status sl_cuda_coalesced_grad(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments,
                                            int64_t num_segments, int64_t* rows, float* grads, int64_t* count, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        const auto write = [&](const UpdatePlan& plan, const Workspace& space, cudaStream_t stream) -> sl_status {
            SL_TRY(sort_keys(plan, space, stream));
            SL_TRY(rank(RunHeads{space.sorted_keys, plan.unused}, plan.count, space.ranks, count, stream));
            const RunArgs args = run_args(plan, space, program->shape.chunk_lookups, true, nullptr);
            return launch_runs<float>(args, space.cells, SL_FLOAT32, WriteGradient{rows, grads, space.ranks.ranks}, stream);
        };
        return give_gradient(*program, table, segments, num_segments, grads, count, *context, write);
    });
}
