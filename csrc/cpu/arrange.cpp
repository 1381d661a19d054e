// What an update does with ids alone, done before there are gradients: the chains of every table's rows, by a sort.
#include <algorithm>

#include "program.h"

namespace sparselift {
namespace {

/// Chains that a kernel finds with a head a row come from a sort as well, with the same bits.
bool has_chains(const sl_table& table) { return table.coalesce == SL_COALESCE_CHAIN || table.coalesce == SL_COALESCE_SORT; }

int64_t lookups_of(const sl_program& program, const sl_batch& batch, size_t t) {
    int64_t lookups = 0;
    for (int32_t f : program.table_features[t]) lookups += batch.lookups[f].count;
    return lookups;
}

/// A row is written past the last one before it is counted.
int64_t most_rows(const sl_program& program, int64_t lookups, size_t t) { return std::min(lookups, program.tables[t].rows) + 1; }

/// Points `chains` at their parts of a block. The same calls on a null base give the size.
void lay_out(Layout& layout, const sl_program& program, const sl_batch& batch, Chains* chains) {
    for (size_t t = 0; t < program.tables.size(); ++t) {
        const int64_t lookups = has_chains(program.tables[t]) ? lookups_of(program, batch, t) : 0;
        Chains parts{};
        if (lookups > 0 && lookups <= kMaxLookups) {
            parts.nodes = layout.take<Node>(lookups);
            parts.rows = layout.take<int32_t>(most_rows(program, lookups, t));
            parts.firsts = layout.take<int32_t>(most_rows(program, lookups, t));
            parts.lookups = lookups;
        }
        if (chains) chains[t] = parts;
    }
}

void build(sl_program& program, const sl_batch& batch, size_t t, Chains& chains) {
    Workspace& workspace = program.ahead;
    workspace.sources.clear();
    int64_t lookups = 0;
    for (int32_t f : program.table_features[t]) {
        workspace.sources.push_back(source_of(batch.lookups[f], lookups));
        lookups += batch.lookups[f].count;
    }
    UpdateArgs args{};
    args.sources = workspace.sources.data();
    args.num_sources = static_cast<int64_t>(workspace.sources.size());
    args.num_rows = program.tables[t].rows;
    args.nodes = chains.nodes;
    args.rows = chains.rows;
    args.firsts = chains.firsts;
    args.entries = workspace.entries.of<Entry>(2 * (static_cast<size_t>(chains.lookups) + 1));
    chains.num_rows = program.kernels->sort_chains(args);
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" sl_status sl_arrange(sl_program* program, sl_batch* batch) {
    return guarded([&]() -> sl_status {
        if (batch->chain_block) return SL_OK;
        const size_t num_tables = program->tables.size();
        Layout size(nullptr);
        size.take<Chains>(static_cast<int64_t>(num_tables));
        lay_out(size, *program, *batch, nullptr);
        batch->chain_block = pool_take(program->pool, size.used());
        if (!batch->chain_block) throw std::bad_alloc();
        batch->bytes += static_cast<int64_t>(size.used());
        Layout layout(static_cast<char*>(batch->chain_block->data));
        auto* chains = layout.take<Chains>(static_cast<int64_t>(num_tables));
        lay_out(layout, *program, *batch, chains);
        for (size_t t = 0; t < num_tables; ++t)
            if (chains[t].nodes) build(*program, *batch, t, chains[t]);
        batch->chains = chains;
        return SL_OK;
    });
}
