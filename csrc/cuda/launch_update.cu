// Schedules an update: keys of all lookups, one sort for all tables that need one, then the rows; and the gradients that are handed out
// instead.
#include <algorithm>

#include "keys.cuh"
#include "rank.h"
#include "update.cuh"
#include "update_plan.h"

namespace sparselift::cuda {
namespace {

constexpr unsigned kKeyThreads = 256;
constexpr unsigned kRunThreads = 128;      // four warps: their runs differ in length, and a block holds its registers until all have ended

/// Where an update works.
struct Workspace {
    Parcel parcel;             // the plan's own parts
    const TableUpdate* tables = nullptr;
    const Source* sources = nullptr;
    const Source* dense_sources = nullptr;
    const DenseTable* dense = nullptr;
    uint64_t* keys = nullptr;
    uint64_t* sorted_keys = nullptr;
    uint32_t* positions = nullptr;
    uint32_t* sorted_positions = nullptr;
    Origin* origins = nullptr;
    int32_t* long_runs = nullptr;
    float* partials = nullptr;
    void* sort = nullptr;
    int64_t sort_bytes = 0;
    int64_t cells = 0;
    int64_t partial_stride = 0;
    RankSpace ranks = {};
};

Workspace lay_out(Layout& layout, const UpdatePlan& plan, int32_t chunk, bool with_ranks) {
    Workspace space{Parcel(layout)};
    space.tables = space.parcel.add(plan.tables);
    space.sources = space.parcel.add(plan.sources);
    space.dense_sources = space.parcel.add(plan.dense_sources);
    space.dense = space.parcel.add(plan.dense);
    space.keys = layout.take<uint64_t>(plan.count);
    space.sorted_keys = layout.take<uint64_t>(plan.count);
    space.positions = layout.take<uint32_t>(plan.count);
    space.sorted_positions = layout.take<uint32_t>(plan.count);
    space.origins = layout.take<Origin>(plan.count);
    space.cells = num_cells(plan.count, chunk);
    space.partial_stride = divide_up(plan.widest, 4) * 4;
    space.long_runs = layout.take<int32_t>(space.cells);
    if (plan.count > chunk) space.partials = layout.take<float>(2 * space.cells * space.partial_stride);
    if (plan.count > 0) space.sort_bytes = sort_workspace_bytes(plan.count);
    space.sort = layout.take<char>(space.sort_bytes);
    if (with_ranks) space.ranks = lay_out_ranks(layout, plan.count);
    return space;
}

/// Makes the keys of all lookups, and begins their sort (`is_sorted`: there will be one).
sl_status make_keys(const UpdatePlan& plan, const Workspace& space, int32_t chunk, bool is_sorted, cudaStream_t stream) {
    KeyArgs args{};
    if (is_sorted) args.sort = start_sort(space.sort, plan.count, plan.key_bits());
    SL_TRY(space.parcel.send(stream, {args.sort.counts, words_to_clear(args.sort)}));
    if (plan.count == 0) return SL_OK;
    int64_t longest = 0;
    for (const Source& source : plan.sources) longest = std::max<int64_t>(longest, source.lookups.count);
    args.sources = space.sources;
    args.keys = space.keys;
    args.positions = space.positions;
    args.origins = space.origins;
    args.long_runs = space.long_runs;
    args.unused = plan.unused;
    args.row_bits = plan.row_bits;
    args.chunk = chunk;
    const dim3 grid(static_cast<unsigned>(divide_up(longest, kKeyThreads * kKeysPerThread)), static_cast<unsigned>(plan.sources.size()));
    return launch<&lookup_keys_kernel>(grid, kKeyThreads, 0, stream, args);
}

sl_status sort_keys(const UpdatePlan& plan, const Workspace& space, cudaStream_t stream) {
    const SortPairs pairs{space.keys, space.sorted_keys, space.positions, space.sorted_positions, plan.count, plan.key_bits()};
    return sort_counted(pairs, space.sort, space.sort_bytes, stream);
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

/// The rows of tables whose lookups are sorted.
sl_status launch_sorted(const UpdatePlan& plan, const Workspace& space, int32_t chunk, const Status* status, cudaStream_t stream) {
    SL_TRY(sort_keys(plan, space, stream));
    const RunArgs args = run_args(plan, space, chunk, true, status);
    return visit_variants(plan, plan.sources, [&](auto element, auto rule, int32_t variant) {
        return launch_runs<decltype(element)>(args, space.cells, variant, rule, stream);
    });
}

/// The gradient of one table through `write`, which gets the plan, its workspace and the stream.
template <typename Write>
sl_status give_gradient(const sl_cuda_program& program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments,
                        const float* grads, int64_t* count, bool is_sorted, const sl_cuda_context& context, const Write& write) {
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
    SL_TRY(make_keys(plan, space, program.shape.chunk_lookups, is_sorted, stream));
    return write(plan, space, stream);
}

}  // namespace
}  // namespace sparselift::cuda

using namespace sparselift;
using namespace sparselift::cuda;

extern "C" int64_t sl_cuda_update_workspace_bytes(const sl_cuda_program* program, const sl_rule* rules, const sl_cuda_segment* segments,
                                                  int64_t num_segments) {
    return guarded_size([&](int64_t& bytes) -> sl_status {
        UpdatePlan plan;
        const std::vector<sl_cuda_weights> tables(program->tables.size());
        SL_TRY(plan_update(*program, tables.data(), rules, segments, num_segments, plan));
        Layout layout(nullptr);
        lay_out(layout, plan, program->shape.chunk_lookups, false);
        bytes = layout.used();
        return SL_OK;
    });
}

extern "C" sl_status sl_cuda_update(const sl_cuda_program* program, const sl_cuda_weights* tables, const sl_rule* rules,
                                    const sl_cuda_segment* segments, int64_t num_segments, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        UpdatePlan plan;
        SL_TRY(plan_update(*program, tables, rules, segments, num_segments, plan));
        if (plan.count == 0 && plan.dense.empty()) return SL_OK;
        const int32_t chunk = program->shape.chunk_lookups;
        const cudaStream_t stream = stream_of(*context);
        const auto* status = static_cast<const Status*>(context->status);
        Layout layout(context->workspace);
        const Workspace space = lay_out(layout, plan, chunk, false);
        SL_TRY(check_workspace(*context, layout.used()));
        SL_TRY(make_keys(plan, space, chunk, plan.count > 0, stream));
        if (plan.count > 0) SL_TRY(launch_sorted(plan, space, chunk, status, stream));
        if (plan.dense.empty()) return SL_OK;
        return launch_dense(plan, {space.dense, space.dense_sources, space.tables, status, chunk}, stream);
    });
}

extern "C" int64_t sl_cuda_count_lookups(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments, int64_t num_segments) {
    return guarded_size([&](int64_t& count) -> sl_status {
        UpdatePlan plan;
        SL_TRY(plan_gradient(*program, table, nullptr, segments, num_segments, plan));
        count = plan.count;
        return SL_OK;
    });
}

extern "C" int64_t sl_cuda_gradient_workspace_bytes(const sl_cuda_program* program, int64_t table, const sl_cuda_segment* segments,
                                                    int64_t num_segments) {
    return guarded_size([&](int64_t& bytes) -> sl_status {
        UpdatePlan plan;
        SL_TRY(plan_gradient(*program, table, nullptr, segments, num_segments, plan));
        Layout layout(nullptr);
        lay_out(layout, plan, program->shape.chunk_lookups, true);
        bytes = layout.used();
        return SL_OK;
    });
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
        return give_gradient(*program, table, segments, num_segments, grads, count, false, *context, write);
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
        return give_gradient(*program, table, segments, num_segments, grads, count, true, *context, write);
    });
}
