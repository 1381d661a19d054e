// Schedules the update kernels: a task is one part of the rows of one table, owned by one thread.
#include <algorithm>
#include <stdexcept>

#include "program.h"
#include "threads.h"

namespace sparselift {
namespace {

constexpr int64_t kParallelCost = 1 << 16;
constexpr int32_t kMaxParts = 64;
constexpr double kBalanced = 1.1;                // busiest thread over the mean, from which splitting stops
constexpr int64_t kMaxPackedFloats = 1 << 18;    // 1 MiB
constexpr int64_t kExpandedFloats = 1 << 14;     // a thread writes at a time
constexpr int64_t kLinkCost = 16;                // of scanning a lookup that may be another part's, in floats moved

/// Whether to copy the gradient rows of a source side by side first. In one matrix for all features they lie a page or more apart:
/// bags of several ids read each of them several times, which pays for the copy while all copies of a table fit the cache.
bool is_worth_packing(const Source& source, int64_t dim, int64_t packed) {
    const Lookups& lookups = source.lookups;
    if (lookups.maxima || source.grad_stride == dim) return false;
    return lookups.count >= 2 * lookups.num_bags && packed + lookups.num_bags * dim <= kMaxPackedFloats;
}

/// Appends the sources of a table: its features' gradients, segment by segment. Throws std::invalid_argument.
SourceRange gather_sources(sl_program& program, int64_t table, const sl_segment* segments, int64_t num_segments) {
    SourceRange range{static_cast<int64_t>(program.sources.size()), 0, 0, 0, nullptr};
    const int64_t dim = program.tables[static_cast<size_t>(table)].dim;
    for (int64_t s = 0; s < num_segments; ++s) {
        const sl_segment& segment = segments[s];
        for (int32_t f : program.table_features[static_cast<size_t>(table)]) {
            const sl_matrix& grad = segment.grads[f];
            const Lookups& lookups = segment.batch->lookups[f];
            if (!grad.data || lookups.count == 0) continue;
            if (range.lookups + lookups.count > kMaxLookups) throw std::invalid_argument("more than 2**31 - 2 lookups of one table in one update");
            Source source = source_of(lookups, range.lookups);
            source.grad = grad.data;
            source.grad_stride = grad.row_stride;
            source.scale = segment.scales ? segment.scales[table] : 1.0f;
            source.plain = !lookups.weights && !lookups.inverse && !lookups.maxima && source.scale == 1.0f;
            range.lookups += lookups.count;
            source.pack = is_worth_packing(source, dim, range.packed);
            if (source.pack) range.packed += lookups.num_bags * dim;
            program.sources.push_back(source);
        }
    }
    range.end = static_cast<int64_t>(program.sources.size());
    const Runs* runs = num_segments == 1 && segments->batch->runs ? segments->batch->runs + table : nullptr;
    if (runs && runs->sorted && runs->lookups == range.lookups) range.runs = runs;
    return range;
}

int64_t cost_of(const sl_table& table, int64_t lookups, int32_t parts) { return lookups * kLinkCost + lookups * (table.dim + kLinkCost) / parts; }

/// Load of the busiest thread when the tasks go, costly first, to whoever is free.
int64_t makespan(std::vector<UpdateTask>& tasks, int threads) {
    std::stable_sort(tasks.begin(), tasks.end(), [](const UpdateTask& a, const UpdateTask& b) { return a.cost > b.cost; });
    std::vector<int64_t> load(static_cast<size_t>(threads), 0);
    for (const UpdateTask& task : tasks) *std::min_element(load.begin(), load.end()) += task.cost;
    return *std::max_element(load.begin(), load.end());
}

/// Replaces the tasks of one table by twice as many.
void split(std::vector<UpdateTask>& tasks, const sl_table& table, int64_t lookups, int32_t position) {
    const UpdateTask old = tasks[static_cast<size_t>(position)];
    tasks.erase(std::remove_if(tasks.begin(), tasks.end(), [&](const UpdateTask& task) { return task.table == old.table; }), tasks.end());
    for (int32_t part = 0; part < 2 * old.parts; ++part)
        tasks.push_back({old.table, part, 2 * old.parts, cost_of(table, lookups, 2 * old.parts)});
}

/// One task a table, and more for the costliest while that balances the threads.
void plan(sl_program& program, const sl_rule* rules, int threads) {
    auto& tasks = program.update_tasks;
    tasks.clear();
    int64_t total = 0;
    for (size_t t = 0; t < program.tables.size(); ++t) {
        const int64_t lookups = program.source_ranges[t].lookups;
        if (rules[t].kind == SL_RULE_ABSENT || lookups == 0) continue;
        tasks.push_back({static_cast<int32_t>(t), 0, 1, cost_of(program.tables[t], lookups, 1)});
        total += tasks.back().cost;
    }
    if (threads <= 1 || total < kParallelCost) return;
    while (static_cast<double>(makespan(tasks, threads)) * threads > kBalanced * static_cast<double>(total)) {
        const UpdateTask& costliest = tasks.front();
        const auto t = static_cast<size_t>(costliest.table);
        if (costliest.parts >= kMaxParts || costliest.parts >= 2 * threads) return;
        split(tasks, program.tables[t], program.source_ranges[t].lookups, 0);
    }
}

UpdateArgs arguments(const sl_program& program, int64_t table, const SourceRange& range) {
    const sl_table& spec = program.tables[static_cast<size_t>(table)];
    UpdateArgs args{};
    args.dim = spec.dim;
    args.sources = program.sources.data() + range.begin;
    args.num_sources = range.end - range.begin;
    args.prefetch = spec.prefetch;
    return args;
}

/// Sizes for one table; a row or an entry is written past the last one before it is counted.
void reserve(Workspace& workspace, const sl_program& program, int64_t t, const SourceRange& range, int32_t coalesce) {
    const sl_table& table = program.tables[static_cast<size_t>(t)];
    workspace.scratch.of<float>(static_cast<size_t>(table.dim));
    if (coalesce == SL_COALESCE_DENSE) {
        workspace.marks.resize(std::max(workspace.marks.size(), static_cast<size_t>((table.rows + 63) / 64)));
        return;
    }
    workspace.packed.of<float>(static_cast<size_t>(range.packed));
    workspace.sources.reserve(static_cast<size_t>(range.end - range.begin));
    const size_t lookups = static_cast<size_t>(range.lookups);
    const size_t rows = static_cast<size_t>(range.runs ? range.runs->num_rows : std::min(range.lookups, table.rows)) + 1;
    workspace.rows.of<int32_t>(rows);
    if (coalesce == SL_COALESCE_CHAIN && !range.runs) {
        workspace.nodes.of<Node>(lookups);
        return;
    }
    workspace.firsts.of<int32_t>(rows);
    if (range.runs) return;                              // of which a part's rows are copied
    workspace.entries.of<Entry>(2 * (lookups + 1));
    workspace.bags.of<int32_t>(lookups);
}

/// Packs the sources that say so and lets `args` read the copies.
void pack(UpdateArgs& args, const Kernels& kernels, Workspace& workspace) {
    workspace.sources.assign(args.sources, args.sources + args.num_sources);
    float* packed = workspace.packed.of<float>(0);
    for (Source& source : workspace.sources) {
        if (!source.pack) continue;
        kernels.pack_grads(source, args.dim, packed);
        source.grad = packed;
        source.grad_stride = args.dim;
        source.plain = !source.lookups.weights;
        packed += source.lookups.num_bags * args.dim;
    }
    args.sources = workspace.sources.data();
}

void use_for_chains(UpdateArgs& args, sl_program& program, int64_t table, Workspace& workspace) {
    args.num_rows = program.tables[static_cast<size_t>(table)].rows;
    args.heads = program.heads[static_cast<size_t>(table)].of<int32_t>(args.num_rows);
    args.nodes = workspace.nodes.of<Node>(0);
    args.rows = workspace.rows.of<int32_t>(0);
    args.scratch = workspace.scratch.of<float>(0);
}

void use_for_runs(UpdateArgs& args, const sl_program& program, int64_t table, Workspace& workspace) {
    args.num_rows = program.tables[static_cast<size_t>(table)].rows;
    args.firsts = workspace.firsts.of<int32_t>(0);
    args.entries = workspace.entries.of<Entry>(0);
    args.bags = are_bags_enough(args.sources, args.num_sources) ? nullptr : workspace.bags.of<int32_t>(0);
    args.rows = workspace.rows.of<int32_t>(0);
    args.scratch = workspace.scratch.of<float>(0);
}

/// Lets `args` read lookups that were sorted before. Returns the rows of its part.
int64_t use_sorted(UpdateArgs& args, const Runs& runs, Workspace& workspace) {
    args.sorted = runs.sorted;
    args.bags = runs.bags;
    args.rows = runs.rows;
    args.firsts = runs.firsts;
    args.scratch = workspace.scratch.of<float>(0);
    if (args.part_mask == 0) return runs.num_rows;
    args.rows = workspace.rows.of<int32_t>(0);
    args.firsts = workspace.firsts.of<int32_t>(0);
    int64_t count = 0;
    for (int64_t u = 0; u < runs.num_rows; ++u) {
        args.rows[count] = runs.rows[u];
        args.firsts[count] = runs.firsts[u];
        count += ((runs.rows[u] >> 4) & args.part_mask) == args.part;
    }
    return count;
}

void run(sl_program& program, const UpdateTask& task, const sl_rule& rule, void* table, const sl_state& state, Workspace& workspace) {
    const auto t = static_cast<size_t>(task.table);
    UpdateArgs args = arguments(program, task.table, program.source_ranges[t]);
    args.table = table;
    args.first = state.first;
    args.second = state.second;
    args.kind = rule.kind;
    args.maximize = rule.maximize;
    args.lr = rule.lr;
    args.eps = rule.eps;
    args.weight_decay = rule.weight_decay;
    args.first_gain = rule.first_gain;
    args.second_gain = rule.second_gain;
    args.dtype = program.tables[t].dtype;
    args.stochastic = rule.stochastic;
    args.noise_key = rule.noise_key;
    args.part = task.part;
    args.part_mask = task.parts - 1;
    if (program.tables[t].coalesce == SL_COALESCE_NONE) {
        program.kernels->apply_lookups(args);
        return;
    }
    if (program.tables[t].coalesce == SL_COALESCE_DENSE) {
        args.num_rows = program.tables[t].rows;
        args.scratch = workspace.scratch.of<float>(0);
        args.sums = program.sums[t].of<float>(program.tables[t].rows * args.dim);
        args.marks = workspace.marks.data();
        program.kernels->apply_dense(args);
        return;
    }
    const Kernels& kernels = *program.kernels;
    const Runs* runs = program.source_ranges[t].runs;
    if (program.tables[t].coalesce == SL_COALESCE_CHAIN && !runs) {
        use_for_chains(args, program, task.table, workspace);
        const int64_t rows = kernels.build_chains(args);
        pack(args, kernels, workspace);
        kernels.apply_chains(args, rows);
        return;
    }
    if (!runs) use_for_runs(args, program, task.table, workspace);
    const int64_t rows = runs ? use_sorted(args, *runs, workspace) : kernels.sort_lookups(args);
    pack(args, kernels, workspace);
    kernels.apply_runs(args, rows);
}

/// Room for the chains of one table for the gradient functions, which sort nothing, on the calling thread.
UpdateArgs chain(sl_program& program, int64_t table, const sl_segment* segments, int64_t num_segments) {
    program.sources.clear();
    SourceRange range = gather_sources(program, table, segments, num_segments);
    range.runs = nullptr;
    program.reserve_workers(1);
    reserve(program.workspace(0), program, table, range, SL_COALESCE_CHAIN);
    UpdateArgs args = arguments(program, table, range);
    use_for_chains(args, program, table, program.workspace(0));
    return args;
}

/// Some bags of a source, and the row of the result that they begin at.
struct Expansion {
    const Source* source;
    int64_t first_bag, last_bag;
    int64_t row;
};

int64_t counted(const Lookups& lookups, int64_t begin, int64_t end) {
    if (lookups.padding < 0) return end - begin;
    return end - begin - std::count(lookups.ids + begin, lookups.ids + end, lookups.padding);
}

int64_t begin_of(const Lookups& lookups, int64_t bag) { return lookups.offsets ? lookups.offsets[bag] : bag * lookups.length; }

/// Cuts a source into runs of bags with about so many lookups. `written`: rows of the result before it, and then with it.
void cut(const Source& source, int64_t lookups_a_part, std::vector<Expansion>& parts, int64_t& written) {
    const Lookups& lookups = source.lookups;
    for (int64_t bag = 0; bag < lookups.num_bags;) {
        const int64_t first = bag, begin = begin_of(lookups, bag);
        if (lookups.count - begin <= lookups_a_part)
            bag = lookups.num_bags;
        else
            while (bag < lookups.num_bags && begin_of(lookups, bag) - begin < lookups_a_part) ++bag;
        parts.push_back({&source, first, bag, written});
        written += counted(lookups, begin, begin_of(lookups, bag));
    }
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" sl_status sl_update(sl_program* program, void* const* tables, const sl_state* states, const sl_rule* rules,
                               const sl_segment* segments, int64_t num_segments, int32_t threads) {
    return guarded([&]() -> sl_status {
        program->sources.clear();
        program->source_ranges.clear();
        for (size_t t = 0; t < program->tables.size(); ++t) {
            const bool absent = rules[t].kind == SL_RULE_ABSENT;
            program->source_ranges.push_back(absent ? SourceRange{} : gather_sources(*program, static_cast<int64_t>(t), segments, num_segments));
        }
        plan(*program, rules, threads);
        int64_t cost = 0;
        for (const UpdateTask& task : program->update_tasks) cost += task.cost;
        if (cost < kParallelCost) threads = 1;
        program->reserve_workers(threads);
        for (const UpdateTask& task : program->update_tasks) {
            const auto t = static_cast<size_t>(task.table);
            const sl_table& table = program->tables[t];
            if (table.coalesce == SL_COALESCE_NONE) continue;
            if (table.coalesce == SL_COALESCE_CHAIN) program->heads[t].of<int32_t>(table.rows);
            if (table.coalesce == SL_COALESCE_DENSE) program->sums[t].of<float>(table.rows * table.dim);
            for (Workspace& workspace : program->workspaces)
                reserve(workspace, *program, task.table, program->source_ranges[t], table.coalesce);
        }
        run_tasks(threads, static_cast<int64_t>(program->update_tasks.size()), [&](int64_t i, int worker) {
            const UpdateTask& task = program->update_tasks[static_cast<size_t>(i)];
            run(*program, task, rules[task.table], tables[task.table], states[task.table], program->workspace(worker));
        });
        return SL_OK;
    });
}

extern "C" sl_status sl_count_lookups(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments, int64_t* count) {
    return guarded([&]() -> sl_status {
        program->sources.clear();
        const SourceRange range = gather_sources(*program, table, segments, num_segments);
        *count = 0;
        for (int64_t s = range.begin; s < range.end; ++s) {
            const Lookups& lookups = program->sources[static_cast<size_t>(s)].lookups;
            *count += counted(lookups, 0, lookups.count);
        }
        return SL_OK;
    });
}

extern "C" sl_status sl_count_rows(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments, int64_t* count) {
    return guarded([&]() -> sl_status {
        const UpdateArgs args = chain(*program, table, segments, num_segments);
        *count = program->kernels->build_chains(args);
        for (int64_t i = 0; i < *count; ++i) args.heads[args.rows[i]] = 0;
        return SL_OK;
    });
}

extern "C" sl_status sl_expanded_grad(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments, int64_t* ids,
                                      float* grads, int32_t threads) {
    return guarded([&]() -> sl_status {
        program->sources.clear();
        const SourceRange range = gather_sources(*program, table, segments, num_segments);
        const int64_t dim = program->tables[static_cast<size_t>(table)].dim;
        if (range.lookups * dim < kParallelCost) threads = 1;
        std::vector<Expansion> parts;
        int64_t written = 0;
        for (int64_t s = range.begin; s < range.end; ++s)
            cut(program->sources[static_cast<size_t>(s)], threads > 1 ? kExpandedFloats / dim + 1 : kMaxLookups, parts, written);
        run_tasks(threads, static_cast<int64_t>(parts.size()), [&](int64_t i, int) {
            const Expansion& part = parts[static_cast<size_t>(i)];
            program->kernels->expand(*part.source, dim, part.first_bag, part.last_bag, ids + part.row, grads + part.row * dim);
        });
        return SL_OK;
    });
}

extern "C" sl_status sl_coalesced_grad(sl_program* program, int64_t table, const sl_segment* segments, int64_t num_segments, int64_t* rows,
                                       float* grads) {
    return guarded([&]() -> sl_status {
        const UpdateArgs args = chain(*program, table, segments, num_segments);
        const int64_t count = program->kernels->build_chains(args);
        std::sort(args.rows, args.rows + count);
        std::copy(args.rows, args.rows + count, rows);
        program->kernels->sum_chains(args, count, grads);
        return SL_OK;
    });
}
