// One pass over the caller's ids: validate, narrow to int32, copy into one block.
#include <cstring>
#include <new>

#include "program.h"
#include "threads.h"

namespace sparselift {
namespace {

constexpr int64_t kParallelLookups = 65536;      // below, a region costs more than it saves

int64_t bags_of(const sl_feature& feature, const sl_index_input& input) {
    if (input.bag_length > 0) return input.num_ids / input.bag_length;
    return input.num_offsets - (feature.include_last_offset ? 1 : 0);
}

/// Points `lookups` at the parts of the block. The same calls on a null base give the size.
void lay_out(Layout& layout, const sl_program& program, const sl_index_input* inputs, Lookups* lookups) {
    for (size_t f = 0; f < program.features.size(); ++f) {
        const sl_feature& feature = program.features[f];
        const sl_index_input& input = inputs[f];
        Lookups parts{};
        parts.num_bags = bags_of(feature, input);
        parts.count = input.num_ids;
        parts.length = input.bag_length;
        parts.padding = static_cast<int32_t>(feature.padding_idx);
        parts.pooling = feature.pooling;
        parts.ids = layout.take<int32_t>(input.num_ids);
        if (input.bag_length <= 0) parts.offsets = layout.take<int32_t>(parts.num_bags + 1);
        if (feature.weighted) parts.weights = layout.take<float>(input.num_ids);
        if (feature.pooling == SL_MEAN) parts.inverse = layout.take<float>(parts.num_bags);
        const int64_t dim = program.tables[static_cast<size_t>(feature.table)].dim;
        if (feature.pooling == SL_MAX) parts.maxima = layout.take<float>(parts.num_bags * dim);
        if (lookups) lookups[f] = parts;
    }
}

/// Copies bag boundaries and appends the last one. Sets `length` where all bags have the same.
template <typename Offset>
sl_status narrow_offsets(const Offset* offsets, const sl_index_input& input, Lookups& lookups, sl_fault& fault) {
    auto* out = const_cast<int32_t*>(lookups.offsets);
    const int64_t count = lookups.count, bags = lookups.num_bags, given = input.num_offsets;
    const int64_t length = bags > 0 ? count / bags : 0;
    bool wrong = false, uniform = length * bags == count;
    int64_t previous = 0;
    for (int64_t i = 0; i < given; ++i) {
        const int64_t offset = offsets[i * input.offset_stride];
        wrong |= (offset < previous) | (offset > count);
        uniform &= offset == i * length;
        out[i] = static_cast<int32_t>(offset);
        previous = offset;
    }
    if (given == bags) out[bags] = static_cast<int32_t>(count);
    const int64_t first = given > 0 ? offsets[0] : 0;
    const int64_t last = given == bags ? count : static_cast<int64_t>(offsets[bags * input.offset_stride]);
    if (!wrong && first == 0 && last == count) {
        lookups.length = length;
        if (uniform) lookups.offsets = nullptr;
        return SL_OK;
    }
    previous = 0;
    for (int64_t i = 0;; ++i) {
        const int64_t offset = i < given ? static_cast<int64_t>(offsets[i * input.offset_stride]) : count;
        if (offset < previous || offset > count || (i == 0 && offset != 0) || i == bags) {
            fault.position = i;
            fault.value = offset;
            fault.previous = previous;
            return SL_BAD_OFFSET;
        }
        previous = offset;
    }
}

void invert_counts(Lookups& lookups) {
    auto* inverse = const_cast<float*>(lookups.inverse);
    for (int64_t bag = 0; bag < lookups.num_bags; ++bag) {
        const int64_t begin = lookups.offsets ? lookups.offsets[bag] : bag * lookups.length;
        const int64_t end = lookups.offsets ? lookups.offsets[bag + 1] : begin + lookups.length;
        int64_t counted = end - begin;
        if (lookups.padding >= 0)
            for (int64_t k = begin; k < end; ++k) counted -= lookups.ids[k] == lookups.padding;
        inverse[bag] = 1.0f / static_cast<float>(counted > 1 ? counted : 1);
    }
}

sl_status prepare_feature(const sl_program& program, const sl_index_input& input, const sl_table& table, Lookups& lookups,
                          sl_fault& fault) {
    if (lookups.offsets) {
        const sl_status status = input.offsets_are_64 ? narrow_offsets(static_cast<const int64_t*>(input.offsets), input, lookups, fault)
                                                      : narrow_offsets(static_cast<const int32_t*>(input.offsets), input, lookups, fault);
        if (status != SL_OK) return status;
    }
    fault.position = program.kernels->narrow_ids(input.ids, input.num_ids, input.id_stride, input.ids_are_64, table.rows,
                                                 const_cast<int32_t*>(lookups.ids));
    if (fault.position >= 0) {
        const int64_t at = fault.position * input.id_stride;
        fault.value = input.ids_are_64 ? static_cast<const int64_t*>(input.ids)[at] : static_cast<const int32_t*>(input.ids)[at];
        return SL_BAD_ID;
    }
    if (lookups.weights) {
        auto* weights = const_cast<float*>(lookups.weights);
        if (input.weight_stride == 1 && lookups.count > 0)
            std::memcpy(weights, input.weights, static_cast<size_t>(lookups.count) * sizeof(float));
        else
            for (int64_t k = 0; k < lookups.count; ++k) weights[k] = input.weights[k * input.weight_stride];
    }
    if (lookups.inverse) invert_counts(lookups);
    if (lookups.maxima) std::memset(lookups.maxima, 0xff, static_cast<size_t>(lookups.num_bags * table.dim) * sizeof(float));
    return SL_OK;
}

/// One line of text about the first fault; its numbers are in `fault`.
sl_status report(const sl_fault& fault, sl_status status) {
    const auto feature = static_cast<long long>(fault.feature), position = static_cast<long long>(fault.position);
    const auto value = static_cast<long long>(fault.value);
    return fail(status, status == SL_BAD_ID ? "feature %lld: id at position %lld is no row: %lld" : "feature %lld: offset at position %lld is wrong: %lld",
                feature, position, value);
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" sl_status sl_prepare(sl_program* program, const sl_index_input* inputs, int32_t threads, sl_batch** batch, sl_fault* fault) {
    return guarded([&]() -> sl_status {
        const size_t num_features = program->features.size();
        Layout size(nullptr);
        size.take<sl_batch>(1);
        size.take<Lookups>(static_cast<int64_t>(num_features));
        lay_out(size, *program, inputs, nullptr);
        Block* block = pool_take(program->pool, size.used());
        if (!block) throw std::bad_alloc();

        Layout layout(static_cast<char*>(block->data));
        auto* prepared = new (layout.take<sl_batch>(1)) sl_batch{};
        prepared->lookups = layout.take<Lookups>(static_cast<int64_t>(num_features));
        prepared->block = block;
        prepared->program = program;
        prepared->bytes = static_cast<int64_t>(size.used());
        prepared->num_features = static_cast<int64_t>(num_features);
        lay_out(layout, *program, inputs, prepared->lookups);

        int64_t lookups = 0;
        for (size_t f = 0; f < num_features; ++f) lookups += inputs[f].num_ids;
        run_tasks(lookups < kParallelLookups ? 1 : threads, static_cast<int64_t>(num_features), [&](int64_t f, int) {
            const auto at = static_cast<size_t>(f);
            const sl_table& table = program->tables[static_cast<size_t>(program->features[at].table)];
            program->faults[at].feature = f;
            program->statuses[at] = prepare_feature(*program, inputs[f], table, prepared->lookups[f], program->faults[at]);
        });
        for (size_t f = 0; f < num_features; ++f) {
            if (program->statuses[f] == SL_OK) continue;
            pool_give(block);
            *fault = program->faults[f];
            return report(*fault, program->statuses[f]);
        }
        *batch = prepared;
        return SL_OK;
    });
}

extern "C" void sl_batch_destroy(sl_batch* batch) {
    if (!batch) return;
    if (batch->arranged) pool_give(batch->arranged);
    pool_give(batch->block);
}

extern "C" int64_t sl_batch_bytes(const sl_batch* batch) { return batch->bytes; }

extern "C" int64_t sl_batch_num_bags(const sl_batch* batch, int64_t feature) { return batch->lookups[feature].num_bags; }

extern "C" int64_t sl_batch_num_lookups(const sl_batch* batch, int64_t feature) { return batch->lookups[feature].count; }

extern "C" void sl_batch_indices(const sl_batch* batch, int64_t feature, int64_t* indices) {
    const Lookups& lookups = batch->lookups[feature];
    for (int64_t k = 0; k < lookups.count; ++k) indices[k] = lookups.ids[k];
}

extern "C" void sl_batch_offsets(const sl_batch* batch, int64_t feature, int64_t* offsets) {
    const Lookups& lookups = batch->lookups[feature];
    for (int64_t bag = 0; bag <= lookups.num_bags; ++bag) offsets[bag] = lookups.offsets ? lookups.offsets[bag] : bag * lookups.length;
}

extern "C" void sl_batch_maxima(const sl_batch* batch, int64_t feature, int64_t* positions) {
    const Lookups& lookups = batch->lookups[feature];
    const sl_program& program = *batch->program;
    const int64_t dim = program.tables[static_cast<size_t>(program.features[static_cast<size_t>(feature)].table)].dim;
    for (int64_t i = 0; i < lookups.num_bags * dim; ++i) {
        int32_t position;
        std::memcpy(&position, lookups.maxima + i, sizeof position);
        positions[i] = position;
    }
}
