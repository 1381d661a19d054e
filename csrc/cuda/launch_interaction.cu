// Describes an interaction to the device and launches its kernels.
#include <algorithm>

#include "../api/sparselift_cuda_interaction.h"
#include "interaction.cuh"
#include "program.h"

namespace sparselift::cuda {
namespace {

/// Threads of a sample: as many as the pairs of its vectors have tiles, so that one pass makes all products; up to a block.
constexpr int32_t kFewestLanesLog2 = 3;

/// Threads of a block of several samples: small ones, whose shared memory leaves room for many.
constexpr unsigned kSharedBlock = 128;

/// Rows of the gradient of the (V, V) products at a time: V * kMostPanelRows floats fit beside a slice for any V.
constexpr int32_t kMostPanelRows = 32;

/// Of a vector, and of the output. Kernels count columns in int32, and look up to a slice past the last.
constexpr int64_t kMostColumns = INT32_MAX - kSlice;

sl_status check(const sl_interaction& shape) {
    if (shape.batch < 0 || shape.dim < 1 || shape.dim > kMostColumns || shape.num_vectors < 1 || shape.num_vectors > SL_CUDA_MOST_VECTORS)
        return fail(SL_BAD_ARGUMENT, "an interaction on CUDA has 1 to %d vectors of 1 to %lld columns; got %lld of %lld", SL_CUDA_MOST_VECTORS,
                    static_cast<long long>(kMostColumns), static_cast<long long>(shape.num_vectors), static_cast<long long>(shape.dim));
    if (shape.passed < -1 || shape.passed >= shape.num_vectors)
        return fail(SL_BAD_ARGUMENT, "the passed vector must be one of %lld; got %lld", static_cast<long long>(shape.num_vectors),
                    static_cast<long long>(shape.passed));
    for (int64_t i = 0; i < shape.num_runs; ++i) {
        const sl_pair_run& run = shape.runs[i];
        const bool follows = i == 0 || (run.row > shape.runs[i - 1].row && run.column == shape.runs[i - 1].column + shape.runs[i - 1].count);
        if (run.row < 0 || run.row >= shape.num_vectors || run.first < 0 || run.count < 0 || run.first > shape.num_vectors - run.count || !follows)
            return fail(SL_BAD_ARGUMENT, "run %lld names pairs outside of %lld vectors, or does not follow the one before it",
                        static_cast<long long>(i), static_cast<long long>(shape.num_vectors));
        if (run.column < 0 || run.column > kMostColumns - run.count)
            return fail(SL_BAD_ARGUMENT, "an interaction on CUDA has up to %lld columns; run %lld has %lld from %lld on",
                        static_cast<long long>(kMostColumns), static_cast<long long>(i), static_cast<long long>(run.count),
                        static_cast<long long>(run.column));
    }
    return SL_OK;
}

std::vector<InteractionVector> describe(const sl_interaction& shape, const sl_matrix* vectors, const sl_matrix* grads) {
    std::vector<InteractionVector> described(static_cast<size_t>(shape.num_vectors));
    for (size_t v = 0; v < described.size(); ++v) {
        InteractionVector& vector = described[v];
        vector.data = vectors ? vectors[v].data : nullptr;
        vector.stride = vectors ? vectors[v].row_stride : 0;
        vector.in_fours = are_in_fours(vector.data, vector.stride, shape.dim);
        if (!grads) continue;
        vector.grad = grads[v].data;
        vector.grad_stride = grads[v].row_stride;
        vector.grad_in_fours = are_in_fours(vector.grad, vector.grad_stride, shape.dim);
    }
    for (int64_t i = 0; i < shape.num_runs; ++i) {
        const sl_pair_run& run = shape.runs[i];
        InteractionVector& vector = described[static_cast<size_t>(run.row)];
        vector.first = static_cast<int32_t>(run.first);
        vector.last = static_cast<int32_t>(run.first + run.count);
        vector.column = static_cast<int32_t>(run.column);
    }
    return described;
}

/// The tiles that have a pair. One at least, so that the passed vector is passed on.
std::vector<Tile> tiles_of(const std::vector<InteractionVector>& vectors) {
    const auto rows = static_cast<int32_t>(divide_up(static_cast<int64_t>(vectors.size()), kTile));
    std::vector<Tile> tiles;
    for (int32_t row = 0; row < rows; ++row) {
        for (int32_t column = 0; column < rows; ++column) {
            const auto begin = vectors.begin() + row * kTile, end = std::min(begin + kTile, vectors.end());
            const auto has_pair = [&](const InteractionVector& vector) {
                return std::max(vector.first, column * kTile) < std::min(vector.last, (column + 1) * kTile);
            };
            if (std::any_of(begin, end, has_pair)) tiles.push_back({static_cast<int16_t>(row), static_cast<int16_t>(column)});
        }
    }
    if (tiles.empty()) tiles.push_back({0, 0});
    return tiles;
}

/// What kernels read, in the workspace.
struct Description {
    Parcel parcel;
    int32_t num_tiles;
    const InteractionVector* vectors;
    const Tile* tiles;

    Description(Layout& layout, const sl_interaction& shape, const sl_matrix* matrices, const sl_matrix* grads) : parcel(layout) {
        const auto described = describe(shape, matrices, grads);
        const auto wanted = tiles_of(described);
        num_tiles = static_cast<int32_t>(wanted.size());
        vectors = parcel.add(described);
        tiles = parcel.add(wanted);
    }
};

InteractionArgs arguments(const sl_interaction& shape, const Description& description, sl_matrix out) {
    InteractionArgs args{};
    args.vectors = description.vectors;
    args.tiles = description.tiles;
    args.out = out.data;
    args.out_stride = out.row_stride;
    args.batch = shape.batch;
    args.num_vectors = static_cast<int32_t>(shape.num_vectors);
    args.num_tiles = description.num_tiles;
    args.tile_rows = static_cast<int32_t>(divide_up(shape.num_vectors, kTile));
    args.dim = static_cast<int32_t>(shape.dim);
    args.passed = static_cast<int32_t>(shape.passed);
    if (shape.num_runs > 0) {
        const sl_pair_run& last = shape.runs[shape.num_runs - 1];
        args.first_column = static_cast<int32_t>(shape.runs[0].column);
        args.num_products = static_cast<int32_t>(last.column + last.count) - args.first_column;
    }
    args.lanes_log2 = kFewestLanesLog2;
    const int32_t wanted = std::min(args.tile_rows * (args.tile_rows + 1) / 2, kInteractionThreads);
    while ((1 << args.lanes_log2) < wanted) ++args.lanes_log2;
    return args;
}

/// Floats of a slice of a sample's vectors.
int32_t slice_floats(const InteractionArgs& args) { return args.tile_rows * kTile * kSliceStride; }

template <auto kKernel>
sl_status launch_samples(const InteractionArgs& args, cudaStream_t stream) {
    const unsigned block = std::max(kSharedBlock, 1u << args.lanes_log2);
    const int64_t samples = block >> args.lanes_log2;
    const size_t shared_bytes = static_cast<size_t>(samples * args.sample_floats) * sizeof(float);
    return launch<kKernel>(static_cast<unsigned>(divide_up(args.batch, samples)), block, shared_bytes, stream, args);
}

/// Checks, describes, and calls run(arguments), whose launches it leads to.
template <typename Run>
sl_status interact(const sl_interaction& shape, const sl_matrix* vectors, const sl_matrix* grads, sl_matrix out, const sl_cuda_context& context,
                   const Run& run) {
    SL_TRY(check(shape));
    if (shape.batch == 0) return SL_OK;
    Layout layout(context.workspace);
    const Description description(layout, shape, vectors, grads);
    SL_TRY(check_workspace(context, layout.used()));
    const cudaStream_t stream = stream_of(context);
    SL_TRY(description.parcel.send(stream));
    return run(arguments(shape, description, out), stream);
}

}  // namespace
}  // namespace sparselift::cuda

using namespace sparselift;
using namespace sparselift::cuda;

extern "C" int64_t sl_cuda_interaction_workspace_bytes(const sl_interaction* shape) {
    return guarded_size([&](int64_t& bytes) -> sl_status {
        SL_TRY(check(*shape));
        Layout layout(nullptr);
        const Description description(layout, *shape, nullptr, nullptr);
        bytes = layout.used();
        return SL_OK;
    });
}

extern "C" sl_status sl_cuda_interaction_forward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix out,
                                                 const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        return interact(*shape, vectors, nullptr, out, *context, [](InteractionArgs args, cudaStream_t stream) {
            const bool is_one_pass = args.num_tiles <= 1 << args.lanes_log2;
            args.sample_floats = std::max(slice_floats(args), is_one_pass ? static_cast<int32_t>(divide_up(args.num_products, 4) * 4) : 0);
            return launch_samples<&interaction_forward_kernel>(args, stream);
        });
    });
}

extern "C" sl_status sl_cuda_interaction_backward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix grad,
                                                  const sl_matrix* vector_grads, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        return interact(*shape, vectors, vector_grads, grad, *context, [](InteractionArgs args, cudaStream_t stream) {
            args.panel_rows = std::min(args.tile_rows * kTile, kMostPanelRows);
            args.sample_floats = slice_floats(args) + args.num_vectors * args.panel_rows;
            return launch_samples<&interaction_backward_kernel>(args, stream);
        });
    });
}
