// Lays out a batch in device memory and launches the kernel that fills and validates it.
#include <algorithm>
#include <cstring>
#include <memory>

#include "prepare.cuh"
#include "program.h"

namespace sparselift::cuda {
namespace {

int64_t bags_of(const sl_feature& feature, const sl_index_input& input) {
    if (input.bag_length > 0) return input.num_ids / input.bag_length;
    return input.num_offsets - (feature.include_last_offset ? 1 : 0);
}

/// The head of a batch: what is put there before anything runs.
struct Head {
    BatchFault* fault;
    PrepareFeature* features;
    int64_t bytes;
};

Head lay_out_head(Layout& layout, size_t num_features) {
    Head head{};
    head.fault = layout.take<BatchFault>(1);
    head.features = layout.take<PrepareFeature>(static_cast<int64_t>(num_features));
    head.bytes = layout.used();
    return head;
}

Lookups lay_out(Layout& layout, const sl_feature& feature, int64_t dim, const sl_index_input& input) {
    Lookups lookups{};
    lookups.num_bags = static_cast<int32_t>(bags_of(feature, input));
    lookups.count = static_cast<int32_t>(input.num_ids);
    lookups.length = static_cast<int32_t>(input.bag_length);
    lookups.padding = static_cast<int32_t>(feature.padding_idx);
    lookups.pooling = feature.pooling;
    lookups.ids = layout.take<int32_t>(input.num_ids);
    if (input.bag_length <= 0) lookups.offsets = layout.take<int32_t>(int64_t{lookups.num_bags} + 1);
    if (feature.weighted) lookups.weights = layout.take<float>(input.num_ids);
    if (feature.pooling == SL_MEAN) lookups.inverse = layout.take<float>(lookups.num_bags);
    if (feature.pooling == SL_MAX) lookups.maxima = layout.take<int32_t>(lookups.num_bags * dim);
    return lookups;
}

PrepareFeature describe(const sl_index_input& input, const Lookups& lookups, const sl_cuda_table& table) {
    PrepareFeature feature{};
    feature.ids = input.ids;
    feature.offsets = input.offsets;
    feature.weights = input.weights;
    feature.id_stride = input.id_stride;
    feature.offset_stride = input.offset_stride;
    feature.weight_stride = input.weight_stride;
    feature.num_offsets = input.num_offsets;
    feature.ids_are_64 = input.ids_are_64;
    feature.offsets_are_64 = input.offsets_are_64;
    feature.rows = static_cast<int32_t>(table.rows);
    feature.dim = static_cast<int32_t>(table.dim);
    feature.lookups = lookups;
    return feature;
}

const sl_cuda_table& table_of(const sl_cuda_program& program, size_t feature) {
    return program.tables[static_cast<size_t>(program.features[feature].table)];
}

sl_status widen(const int32_t* from, int64_t step, int64_t count, int64_t* out, const sl_cuda_context& context) {
    constexpr unsigned kThreads = 256;
    if (count == 0) return SL_OK;
    return launch<&widen_kernel>(static_cast<unsigned>(divide_up(count, kThreads)), kThreads, 0, stream_of(context), from, step, count, out);
}

}  // namespace
}  // namespace sparselift::cuda

using namespace sparselift;
using namespace sparselift::cuda;

extern "C" int64_t sl_cuda_batch_bytes(const sl_cuda_program* program, const sl_index_input* inputs) {
    Layout layout(nullptr);
    lay_out_head(layout, program->features.size());
    for (size_t f = 0; f < program->features.size(); ++f) lay_out(layout, program->features[f], table_of(*program, f).dim, inputs[f]);
    return layout.used();
}

extern "C" sl_status sl_cuda_prepare(const sl_cuda_program* program, const sl_index_input* inputs, void* memory, const sl_cuda_context* context,
                                     sl_cuda_batch** batch) {
    return guarded([&]() -> sl_status {
        SL_TRY(check_alignment("the memory of a batch", memory));
        const size_t num_features = program->features.size();
        auto prepared = std::make_unique<sl_cuda_batch>();
        prepared->program = program;
        Layout layout(memory);
        const Head head = lay_out_head(layout, num_features);
        prepared->fault = head.fault;
        std::vector<PrepareFeature> features;
        int64_t threads = 0;
        for (size_t f = 0; f < num_features; ++f) {
            const sl_cuda_table& table = table_of(*program, f);
            const Lookups lookups = lay_out(layout, program->features[f], table.dim, inputs[f]);
            prepared->lookups.push_back(lookups);
            features.push_back(describe(inputs[f], lookups, table));
            threads = std::max<int64_t>({threads, lookups.count, lookups.num_bags + int64_t{lookups.offsets != nullptr}});
        }
        std::vector<char> staged(static_cast<size_t>(head.bytes));
        const BatchFault none{kNoFault, 0, 0};
        std::memcpy(staged.data(), &none, sizeof none);
        const auto features_at = reinterpret_cast<char*>(head.features) - static_cast<char*>(memory);
        if (num_features > 0) std::memcpy(staged.data() + features_at, features.data(), num_features * sizeof(PrepareFeature));
        SL_TRY(put(memory, staged.data(), head.bytes, stream_of(*context)));
        if (threads > 0) {
            const auto block = static_cast<unsigned>(program->shape.block_threads);
            const dim3 grid(static_cast<unsigned>(divide_up(threads, block)), static_cast<unsigned>(num_features));
            const PrepareArgs args{head.features, head.fault, static_cast<Status*>(context->status), context->fault};
            SL_TRY(launch<&prepare_kernel>(grid, block, 0, stream_of(*context), args));
        }
        *batch = prepared.release();
        return SL_OK;
    });
}

extern "C" void sl_cuda_batch_destroy(sl_cuda_batch* batch) { delete batch; }

extern "C" int64_t sl_cuda_batch_num_bags(const sl_cuda_batch* batch, int64_t feature) {
    return batch->lookups[static_cast<size_t>(feature)].num_bags;
}

extern "C" int64_t sl_cuda_batch_num_lookups(const sl_cuda_batch* batch, int64_t feature) {
    return batch->lookups[static_cast<size_t>(feature)].count;
}

extern "C" sl_status sl_cuda_batch_indices(const sl_cuda_batch* batch, int64_t feature, int64_t* indices, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        const Lookups& lookups = batch->lookups[static_cast<size_t>(feature)];
        return widen(lookups.ids, 0, lookups.count, indices, *context);
    });
}

extern "C" sl_status sl_cuda_batch_offsets(const sl_cuda_batch* batch, int64_t feature, int64_t* offsets, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        const Lookups& lookups = batch->lookups[static_cast<size_t>(feature)];
        return widen(lookups.offsets, lookups.length, int64_t{lookups.num_bags} + 1, offsets, *context);
    });
}

extern "C" sl_status sl_cuda_batch_maxima(const sl_cuda_batch* batch, int64_t feature, int64_t* maxima, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        const Lookups& lookups = batch->lookups[static_cast<size_t>(feature)];
        const int64_t dim = table_of(*batch->program, static_cast<size_t>(feature)).dim;
        return widen(lookups.maxima, 0, lookups.num_bags * dim, maxima, *context);
    });
}
