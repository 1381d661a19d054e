// What an update does with ids alone, done before there are gradients: the lookups of every table, sorted by row.
#include <algorithm>

#include "program.h"

namespace sparselift {
namespace {

/// Runs have the bits of chains, and serve them as well.
bool has_runs(const sl_table& table) { return table.coalesce == SL_COALESCE_CHAIN || table.coalesce == SL_COALESCE_SORT; }

/// A row is written past the last one before it is counted.
int64_t most_rows(const sl_program& program, int64_t lookups, size_t t) { return std::min(lookups, program.tables[t].rows) + 1; }

/// Gathers the sources of a table, without gradients. Returns their lookups.
int64_t gather(const sl_program& program, const sl_batch& batch, size_t t, std::vector<Source>& sources) {
    sources.clear();
    int64_t lookups = 0;
    for (int32_t f : program.table_features[t]) {
        if (batch.lookups[f].count > 0) sources.push_back(source_of(batch.lookups[f], lookups));
        lookups += batch.lookups[f].count;
    }
    return lookups;
}

/// Points `runs` at their parts of a block. The same calls on a null base give the size.
void lay_out(Layout& layout, const sl_program& program, const sl_batch& batch, std::vector<Source>& sources, Runs* runs) {
    for (size_t t = 0; t < program.tables.size(); ++t) {
        const int64_t lookups = has_runs(program.tables[t]) ? gather(program, batch, t, sources) : 0;
        Runs parts{};
        if (lookups > 0 && lookups <= kMaxLookups) {
            parts.sorted = layout.take<Entry>(lookups + 1);
            if (!are_bags_enough(sources.data(), static_cast<int64_t>(sources.size()))) parts.bags = layout.take<int32_t>(lookups);
            parts.rows = layout.take<int32_t>(most_rows(program, lookups, t));
            parts.firsts = layout.take<int32_t>(most_rows(program, lookups, t));
            parts.lookups = lookups;
        }
        if (runs) runs[t] = parts;
    }
}

void sort(sl_program& program, const sl_batch& batch, size_t t, Runs& runs) {
    Workspace& workspace = program.ahead;
    gather(program, batch, t, workspace.sources);
    UpdateArgs args{};
    args.sources = workspace.sources.data();
    args.num_sources = static_cast<int64_t>(workspace.sources.size());
    args.num_rows = program.tables[t].rows;
    args.bags = runs.bags;
    args.rows = runs.rows;
    args.firsts = runs.firsts;
    args.entries = workspace.entries.of<Entry>(2 * (static_cast<size_t>(runs.lookups) + 1));
    runs.num_rows = program.kernels->sort_lookups(args);
    std::copy(args.sorted, args.sorted + runs.lookups + 1, runs.sorted);
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" sl_status sl_arrange(sl_program* program, sl_batch* batch) {
    return guarded([&]() -> sl_status {
        if (batch->run_block) return SL_OK;
        const size_t num_tables = program->tables.size();
        Layout size(nullptr);
        size.take<Runs>(static_cast<int64_t>(num_tables));
        lay_out(size, *program, *batch, program->ahead.sources, nullptr);
        batch->run_block = pool_take(program->pool, size.used());
        if (!batch->run_block) throw std::bad_alloc();
        batch->bytes += static_cast<int64_t>(size.used());
        Layout layout(static_cast<char*>(batch->run_block->data));
        auto* runs = layout.take<Runs>(static_cast<int64_t>(num_tables));
        lay_out(layout, *program, *batch, program->ahead.sources, runs);
        for (size_t t = 0; t < num_tables; ++t)
            if (runs[t].sorted) sort(*program, *batch, t, runs[t]);
        batch->runs = runs;
        return SL_OK;
    });
}
