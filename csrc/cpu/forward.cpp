// Schedules the forward kernels: bags or tables, with or without deduplication.
#include <algorithm>

#include "program.h"
#include "threads.h"

namespace sparselift {
namespace {

constexpr int64_t kParallelCost = 1 << 16;       // floats gathered; below, a region costs more than it saves
constexpr int kTasksPerThread = 8;
constexpr int64_t kStreamBytes = 1 << 20;        // outputs of that size have left L2 before anyone reads them; SL_STORES_AUTO

int64_t cost_of(const Lookups& lookups, int64_t dim) { return lookups.count * (dim + 16) + lookups.num_bags * (dim + 16); }

/// Cuts the batch into tasks, the costly first.
void plan(sl_program& program, const sl_batch& batch, int threads) {
    auto& tasks = program.forward_tasks;
    tasks.clear();
    int64_t total = 0;
    for (size_t t = 0; t < program.tables.size(); ++t)
        for (int32_t f : program.table_features[t]) total += cost_of(batch.lookups[f], program.tables[t].dim);
    const int64_t grain = std::max<int64_t>(total / (int64_t{threads} * kTasksPerThread), 1);
    for (size_t t = 0; t < program.tables.size(); ++t) {
        const sl_table& table = program.tables[t];
        int64_t table_cost = 0;
        for (int32_t f : program.table_features[t]) {
            const Lookups& lookups = batch.lookups[f];
            const int64_t cost = cost_of(lookups, table.dim), bags = lookups.num_bags;
            table_cost += cost;
            if (table.dedup || bags == 0) continue;
            int64_t pieces = 1;
            if (threads > 1 && table.partition == SL_PARTITION_BAG) pieces = std::clamp<int64_t>(cost / grain, 1, bags);
            for (int64_t i = 0; i < pieces; ++i)
                tasks.push_back({static_cast<int32_t>(t), f, bags * i / pieces, bags * (i + 1) / pieces, cost / pieces});
        }
        if (table.dedup && table_cost > 0) tasks.push_back({static_cast<int32_t>(t), -1, 0, 0, table_cost});
    }
    if (threads > 1)
        std::stable_sort(tasks.begin(), tasks.end(), [](const ForwardTask& a, const ForwardTask& b) { return a.cost > b.cost; });
}

ForwardArgs arguments(const sl_table& table, const void* weights, const Lookups& lookups, const sl_matrix& output, bool large) {
    const bool stream = table.stores == SL_STORES_STREAMED || (table.stores == SL_STORES_AUTO && large);
    const bool whole_lines = (reinterpret_cast<uintptr_t>(output.data) | static_cast<uintptr_t>(output.row_stride * 4) |
                              static_cast<uintptr_t>(table.dim * 4)) % 64 == 0;
    return {weights, table.dim, lookups, output.data, output.row_stride, 0, lookups.num_bags, table.prefetch, stream && whole_lines};
}

int64_t output_bytes(const sl_program& program, const sl_batch& batch) {
    int64_t bytes = 0;
    for (size_t f = 0; f < program.features.size(); ++f)
        bytes += batch.lookups[f].num_bags * program.tables[static_cast<size_t>(program.features[f].table)].dim * 4;
    return bytes;
}

/// The most that one table's deduplication takes. Rows have room for one that is written past the end before it is counted.
struct DedupSize {
    size_t lookups = 0, rows = 0, features = 0, floats = 0;
};

DedupSize dedup_size(const sl_program& program, const sl_batch& batch) {
    DedupSize size;
    for (size_t t = 0; t < program.tables.size(); ++t) {
        const sl_table& table = program.tables[t];
        if (!table.dedup) continue;
        const int64_t lookups = lookups_of(program, batch, t);
        const auto rows = static_cast<size_t>(std::min(lookups, table.rows));
        size.floats = std::max(size.floats, rows * static_cast<size_t>(table.dim));
        if (batch.distinct) continue;
        size.lookups = std::max(size.lookups, static_cast<size_t>(lookups));
        size.rows = std::max(size.rows, rows + 1);
        size.features = std::max(size.features, program.table_features[t].size());
    }
    return size;
}

/// The distinct rows of a table in a batch: as somebody has found them before, else found now.
Distinct distinct_of(sl_program& program, const sl_batch& batch, size_t t, Workspace& workspace) {
    if (batch.distinct && batch.distinct[t].rows) return batch.distinct[t];
    Distinct distinct{workspace.slots.of<int32_t>(0), workspace.rows.of<int32_t>(0), workspace.paddings.of<int32_t>(0), 0};
    find_distinct(program, batch, t, program.heads[t].of<int32_t>(program.tables[t].rows), distinct);
    return distinct;
}

/// Gathers the distinct rows of a table as float32, then pools from the compact copy.
void forward_deduplicated(sl_program& program, int32_t t, const void* weights, const sl_batch& batch, const sl_matrix* outputs,
                          bool large, Workspace& workspace) {
    const sl_table& table = program.tables[static_cast<size_t>(t)];
    const auto& features = program.table_features[static_cast<size_t>(t)];
    const Distinct found = distinct_of(program, batch, static_cast<size_t>(t), workspace);
    float* gathered = workspace.gathered.of<float>(0);
    Lookups distinct{};
    distinct.ids = found.rows;
    distinct.num_bags = distinct.count = found.num_rows;
    distinct.length = 1;
    distinct.padding = -1;
    distinct.pooling = SL_NONE;
    ForwardArgs gather = arguments(table, weights, distinct, {gathered, table.dim}, false);
    gather.stream = 0;                     // read again at once
    program.kernels->weights[table.dtype].forward(gather);
    const int32_t* slots = found.slots;
    for (size_t i = 0; i < features.size(); ++i) {
        Lookups lookups = batch.lookups[features[i]];
        lookups.ids = slots;
        slots += lookups.count;
        if (lookups.padding >= 0) lookups.padding = found.paddings[i];
        program.kernels->weights[SL_FLOAT32].forward(arguments(table, gathered, lookups, outputs[features[i]], large));
    }
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" sl_status sl_forward(sl_program* program, const void* const* tables, const sl_batch* batch, const sl_matrix* outputs,
                                int32_t threads) {
    return guarded([&]() -> sl_status {
        plan(*program, *batch, threads);
        int64_t cost = 0;
        bool dedup = false;
        for (const ForwardTask& task : program->forward_tasks) {
            cost += task.cost;
            dedup |= task.feature < 0;
        }
        if (cost < kParallelCost) threads = 1;
        program->reserve_workers(threads);
        if (dedup) {
            const DedupSize size = dedup_size(*program, *batch);
            for (Workspace& workspace : program->workspaces) {
                workspace.slots.of<int32_t>(size.lookups);
                workspace.rows.of<int32_t>(size.rows);
                workspace.paddings.of<int32_t>(size.features);
                workspace.gathered.of<float>(size.floats);
            }
            for (const ForwardTask& task : program->forward_tasks)
                if (const auto t = static_cast<size_t>(task.table); task.feature < 0 && !batch->distinct)
                    program->heads[t].of<int32_t>(program->tables[t].rows);
        }
        const bool large = output_bytes(*program, *batch) >= kStreamBytes;
        run_tasks(threads, static_cast<int64_t>(program->forward_tasks.size()), [&](int64_t i, int worker) {
            const ForwardTask& task = program->forward_tasks[static_cast<size_t>(i)];
            const sl_table& table = program->tables[static_cast<size_t>(task.table)];
            if (task.feature < 0) {
                forward_deduplicated(*program, task.table, tables[task.table], *batch, outputs, large, program->workspace(worker));
                return;
            }
            ForwardArgs args = arguments(table, tables[task.table], batch->lookups[task.feature], outputs[task.feature], large);
            args.first_bag = task.first_bag;
            args.last_bag = task.last_bag;
            program->kernels->weights[table.dtype].forward(args);
        });
        return SL_OK;
    });
}

extern "C" sl_status sl_weight_grad(sl_program* program, const void* table, const sl_batch* batch, int64_t feature, sl_matrix grad,
                                    float* out, int32_t threads) {
    return guarded([&]() -> sl_status {
        const sl_table& spec = program->tables[static_cast<size_t>(program->features[static_cast<size_t>(feature)].table)];
        const Lookups& lookups = batch->lookups[feature];
        const ForwardArgs whole = arguments(spec, table, lookups, {nullptr, 0}, false);
        const bool parallel = threads > 1 && cost_of(lookups, spec.dim) >= kParallelCost;
        const int64_t pieces = parallel ? std::min<int64_t>(int64_t{threads} * kTasksPerThread, lookups.num_bags) : 1;
        run_tasks(threads, pieces, [&](int64_t i, int) {
            ForwardArgs args = whole;
            args.first_bag = lookups.num_bags * i / pieces;
            args.last_bag = lookups.num_bags * (i + 1) / pieces;
            program->kernels->weights[spec.dtype].weight_grad(args, grad.data, grad.row_stride, out);
        });
        return SL_OK;
    });
}
