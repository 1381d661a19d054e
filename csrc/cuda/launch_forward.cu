// Launches the forward kernels and the gradient of per-sample weights.
#include <algorithm>

#include "forward.cuh"
#include "program.h"
#include "weight_grad.cuh"

namespace sparselift::cuda {
namespace {

/// Bags with one id each are pooled several at a time, so that their loads overlap; other bags overlap the loads of their own rows.
constexpr int kOneIdBagsPerGroup = 4;

int32_t bags_per_group(const sl_cuda_table& table, const Lookups& lookups) {
    if (table.bags_per_group > 0) return table.bags_per_group;
    return !lookups.offsets && lookups.length == 1 ? kOneIdBagsPerGroup : 1;
}

/// Cells for the pieces of long bags, none where no bag can be long.
int64_t cells_of(const Lookups& lookups, int32_t chunk) {
    const int64_t longest = lookups.offsets ? lookups.count : lookups.length;
    return longest > chunk ? num_cells(lookups.count, chunk) : 0;
}

/// Features that one launch takes: of one dtype, and with maxima or without.
constexpr int kKinds = 2 * SL_NUM_DTYPES;

int kind_of(int32_t dtype, int32_t pooling) { return 2 * dtype + (pooling == SL_MAX ? 1 : 0); }

/// The launches of one forward: features that have bags, those of one kind side by side.
struct ForwardPlan {
    std::vector<ForwardFeature> features;
    std::vector<size_t> numbers;          // which feature of the program each is
    int64_t first_of_kind[kKinds + 1] = {};
};

/// Lays out the workspace. Pointers into it are null where the layout only counts.
ForwardPlan plan_forward(const sl_cuda_program& program, const sl_cuda_batch& batch, Layout& layout) {
    ForwardPlan plan;
    for (int kind = 0; kind < kKinds; ++kind) {
        plan.first_of_kind[kind] = static_cast<int64_t>(plan.features.size());
        for (size_t f = 0; f < program.features.size(); ++f) {
            const sl_cuda_table& table = program.tables[static_cast<size_t>(program.features[f].table)];
            const Lookups& lookups = batch.lookups[f];
            if (kind_of(table.dtype, lookups.pooling) != kind || lookups.num_bags <= 0) continue;
            ForwardFeature feature{};
            feature.lookups = lookups;
            feature.bags_per_group = lookups.pooling == SL_MAX ? 1 : bags_per_group(table, lookups);
            const int64_t cells = cells_of(lookups, program.shape.chunk_lookups);
            if (cells > 0) {
                feature.partials = layout.take<float>(2 * cells * table.dim);
                feature.counts = layout.take<int32_t>(2 * cells * (lookups.pooling == SL_MAX ? table.dim : 1));
            }
            plan.features.push_back(feature);
            plan.numbers.push_back(f);
        }
    }
    plan.first_of_kind[kKinds] = static_cast<int64_t>(plan.features.size());
    return plan;
}

/// Columns that a lane takes at a time.
int most_columns(const sl_cuda_shape& shape, int32_t dtype, int32_t pooling) {
    if (pooling == SL_MAX) return kMaxima;
    return dtype == SL_FLOAT32 && shape.loads_in_flight == 4 ? kForwardColumns<float, 4> : kForwardColumns<__half, 8>;
}

int64_t groups_per_block(const sl_cuda_shape& shape, const Columns& columns) { return shape.block_threads >> columns.lanes_log2; }

/// Blocks that the widest feature needs: of bags, of pieces of long bags, of long bags.
struct ForwardBlocks {
    int64_t bags = 0, pieces = 0, long_bags = 0;
};

/// Bags and pieces of long ones, then the long ones.
template <auto kBags, auto kLongBags>
sl_status launch_bags(const ForwardArgs& args, const ForwardBlocks& blocks, unsigned features, unsigned block, cudaStream_t stream) {
    SL_TRY(launch<kBags>(dim3(static_cast<unsigned>(blocks.bags + blocks.pieces), features), block, 0, stream, args));
    if (blocks.pieces == 0) return SL_OK;
    return launch<kLongBags>(dim3(static_cast<unsigned>(blocks.long_bags), features), block, 0, stream, args);
}

/// Features [first, last) of a plan, which are of one kind.
sl_status launch_features(const sl_cuda_program& program, const ForwardPlan& plan, int kind, int64_t first, int64_t last, cudaStream_t stream) {
    ForwardArgs args{};
    args.chunk = program.shape.chunk_lookups;
    ForwardBlocks blocks;
    for (int64_t i = first; i < last; ++i) {
        const ForwardFeature& feature = args.features[i - first] = plan.features[static_cast<size_t>(i)];
        const int64_t groups = groups_per_block(program.shape, feature.columns);
        const int64_t cells = cells_of(feature.lookups, program.shape.chunk_lookups);
        blocks.bags = std::max(blocks.bags, divide_up(divide_up(feature.lookups.num_bags, feature.bags_per_group), groups));
        blocks.pieces = std::max(blocks.pieces, divide_up(2 * cells, groups));
        blocks.long_bags = std::max(blocks.long_bags, divide_up(cells, groups));
    }
    args.bag_blocks = static_cast<uint32_t>(blocks.bags);
    const auto count = static_cast<unsigned>(last - first), block = static_cast<unsigned>(program.shape.block_threads);
    return visit_dtype(kind / 2, [&](auto element) {
        using Weight = decltype(element);
        if (kind % 2 == 1) return launch_bags<&bag_max_kernel<Weight>, &long_maxima_kernel<Weight>>(args, blocks, count, block, stream);
        if (program.shape.loads_in_flight == 8)
            return launch_bags<&bag_forward_kernel<Weight, 8>, &long_bags_kernel<Weight>>(args, blocks, count, block, stream);
        return launch_bags<&bag_forward_kernel<Weight, 4>, &long_bags_kernel<Weight>>(args, blocks, count, block, stream);
    });
}

/// The features of one kind, as many a launch as its arguments hold.
sl_status launch_kind(const sl_cuda_program& program, const ForwardPlan& plan, int kind, cudaStream_t stream) {
    const int64_t end = plan.first_of_kind[kind + 1];
    for (int64_t first = plan.first_of_kind[kind]; first < end; first += kForwardFeatures)
        SL_TRY(launch_features(program, plan, kind, first, std::min(first + kForwardFeatures, end), stream));
    return SL_OK;
}

}  // namespace
}  // namespace sparselift::cuda

using namespace sparselift;
using namespace sparselift::cuda;

extern "C" int64_t sl_cuda_forward_workspace_bytes(const sl_cuda_program* program, const sl_cuda_batch* batch) {
    return guarded_size([&](int64_t& bytes) {
        Layout layout(nullptr);
        plan_forward(*program, *batch, layout);
        bytes = layout.used();
        return SL_OK;
    });
}

extern "C" sl_status sl_cuda_forward(const sl_cuda_program* program, const sl_cuda_weights* tables, const sl_cuda_batch* batch,
                                     const sl_matrix* outputs, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        Layout layout(context->workspace);
        ForwardPlan plan = plan_forward(*program, *batch, layout);
        SL_TRY(check_workspace(*context, layout.used()));
        for (size_t i = 0; i < plan.features.size(); ++i) {
            ForwardFeature& feature = plan.features[i];
            const auto t = static_cast<size_t>(program->features[plan.numbers[i]].table);
            const sl_cuda_table& table = program->tables[t];
            const sl_matrix& out = outputs[plan.numbers[i]];
            feature.table = tables[t].data;
            feature.out = out.data;
            feature.out_stride = out.row_stride;
            const bool in_vectors = table.vector_bytes == 16 && are_in_vectors(tables[t].data, table.dim, table.dtype);
            feature.columns = columns_of(table.dim, table.dtype, in_vectors, are_in_fours(out.data, out.row_stride, table.dim),
                                         most_columns(program->shape, table.dtype, feature.lookups.pooling));
        }
        for (int kind = 0; kind < kKinds; ++kind) SL_TRY(launch_kind(*program, plan, kind, stream_of(*context)));
        return SL_OK;
    });
}

extern "C" sl_status sl_cuda_weight_grad(const sl_cuda_program* program, const void* table, const sl_cuda_batch* batch, int64_t feature,
                                         sl_matrix grad, float* out, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        const sl_cuda_table& spec = program->tables[static_cast<size_t>(program->features[static_cast<size_t>(feature)].table)];
        WeightGradArgs args{};
        args.lookups = batch->lookups[static_cast<size_t>(feature)];
        if (args.lookups.count == 0) return SL_OK;
        const bool in_vectors = spec.vector_bytes == 16 && are_in_vectors(table, spec.dim, spec.dtype);
        args.columns = columns_of(spec.dim, spec.dtype, in_vectors, are_in_fours(grad.data, grad.row_stride, spec.dim), kDotColumns);
        args.table = table;
        args.grad = grad.data;
        args.grad_stride = grad.row_stride;
        args.out = out;
        const auto block = static_cast<unsigned>(program->shape.block_threads);
        const int64_t blocks = divide_up(args.lookups.count, groups_per_block(program->shape, args.columns));
        return visit_dtype(spec.dtype, [&](auto element) {
            return launch<&weight_grad_kernel<decltype(element)>>(static_cast<unsigned>(blocks), block, 0, stream_of(*context), args);
        });
    });
}
