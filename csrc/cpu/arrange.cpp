// What a step does with ids alone, done before it: the lookups of every table sorted by row, for the update, and the distinct rows that a
// forward with deduplication gathers.
#include <algorithm>
#include <climits>

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

/// Points `runs` and `distinct` at their parts of a block. The same calls on a null base give the size.
void lay_out(Layout& layout, const sl_program& program, const sl_batch& batch, std::vector<Source>& sources, Runs* runs, Distinct* distinct) {
    for (size_t t = 0; t < program.tables.size(); ++t) {
        const int64_t lookups = gather(program, batch, t, sources);
        Runs parts{};
        if (has_runs(program.tables[t]) && lookups > 0 && lookups <= kMaxLookups) {
            parts.sorted = layout.take<Entry>(lookups + 1);
            if (!are_bags_enough(sources.data(), static_cast<int64_t>(sources.size()))) parts.bags = layout.take<int32_t>(lookups);
            parts.rows = layout.take<int32_t>(most_rows(program, lookups, t));
            parts.firsts = layout.take<int32_t>(most_rows(program, lookups, t));
            parts.lookups = lookups;
        }
        if (runs) runs[t] = parts;
        Distinct places{};
        if (program.tables[t].dedup) {
            places.slots = layout.take<int32_t>(lookups);
            places.rows = layout.take<int32_t>(most_rows(program, lookups, t));
            places.paddings = layout.take<int32_t>(static_cast<int64_t>(program.table_features[t].size()));
        }
        if (distinct) distinct[t] = places;
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

int64_t lookups_of(const sl_program& program, const sl_batch& batch, size_t table) {
    int64_t lookups = 0;
    for (int32_t f : program.table_features[table]) lookups += batch.lookups[f].count;
    return lookups;
}

void find_distinct(const sl_program& program, const sl_batch& batch, size_t table, int32_t* heads, Distinct& distinct) {
    const auto& features = program.table_features[table];
    UpdateArgs args{};
    args.heads = heads;
    args.rows = distinct.rows;
    int64_t first = 0;
    distinct.num_rows = 0;
    for (int32_t f : features) {
        distinct.num_rows = program.kernels->find_slots(args, batch.lookups[f], distinct.num_rows, distinct.slots + first);
        first += batch.lookups[f].count;
    }
    for (size_t i = 0; i < features.size(); ++i) {
        const int32_t padding = batch.lookups[features[i]].padding, head = padding < 0 ? 0 : heads[padding];
        distinct.paddings[i] = head ? head - 1 : INT32_MAX;
    }
    for (int64_t i = 0; i < distinct.num_rows; ++i) heads[distinct.rows[i]] = 0;
}

}  // namespace sparselift

using namespace sparselift;

extern "C" sl_status sl_arrange(sl_program* program, sl_batch* batch) {
    return guarded([&]() -> sl_status {
        if (batch->arranged) return SL_OK;
        const auto num_tables = static_cast<int64_t>(program->tables.size());
        Layout size(nullptr);
        size.take<Runs>(num_tables);
        size.take<Distinct>(num_tables);
        lay_out(size, *program, *batch, program->ahead.sources, nullptr, nullptr);
        batch->arranged = pool_take(program->pool, size.used());
        if (!batch->arranged) throw std::bad_alloc();
        batch->bytes += static_cast<int64_t>(size.used());
        Layout layout(static_cast<char*>(batch->arranged->data));
        auto* runs = layout.take<Runs>(num_tables);
        auto* distinct = layout.take<Distinct>(num_tables);
        lay_out(layout, *program, *batch, program->ahead.sources, runs, distinct);
        for (size_t t = 0; t < program->tables.size(); ++t) {
            if (runs[t].sorted) sort(*program, *batch, t, runs[t]);
            if (distinct[t].rows) find_distinct(*program, *batch, t, program->heads_ahead[t].of<int32_t>(program->tables[t].rows), distinct[t]);
        }
        batch->runs = runs;
        batch->distinct = distinct;
        return SL_OK;
    });
}
