// Schedules the interaction kernels: samples are cut among threads.
#include "interaction.h"

#include <algorithm>

#include "../api/status.h"
#include "threads.h"

namespace sparselift {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kTaskCost = 1 << 16;       // products of floats; a task of fewer costs more than it saves
constexpr int64_t kTasksPerThread = 8;
constexpr int64_t kVectorFloats = 16;        // of the widest instruction set

const InteractionKernels* kernels_of(int32_t isa) {
    switch (isa) {
        case SL_ISA_PORTABLE: return portable::interaction_kernels();
#ifdef __x86_64__
        case SL_ISA_AVX2: return avx2::interaction_kernels();
        case SL_ISA_AVX512: return avx512::interaction_kernels();
#endif
        default: return nullptr;
    }
}

/// Where the parts of the caller's working memory lie: what all threads read, then a block a thread.
struct Workspace {
    int64_t width, ranges_bytes, worker_bytes;

    explicit Workspace(const sl_interaction& shape) {
        width = (shape.num_vectors + kVectorFloats - 1) / kVectorFloats * kVectorFloats;
        ranges_bytes = lines(shape.num_vectors * static_cast<int64_t>(sizeof(ProductRange)));
        worker_bytes = 4 * width * (width + kInteractionColumns) + 2 * lines(8 * shape.num_vectors);
    }
    int64_t bytes(int32_t threads) const { return kLine + ranges_bytes + std::max(threads, 1) * worker_bytes; }
    static int64_t lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
};

sl_status check(const sl_interaction& shape, int32_t isa) {
    if (!sl_isa_runnable(isa)) return fail(SL_UNSUPPORTED, "instruction set %d is missing here", isa);
    if (shape.batch < 0 || shape.num_vectors < 1 || shape.dim < 1)
        return fail(SL_BAD_ARGUMENT, "an interaction needs vectors with columns; got %lld of %lld", static_cast<long long>(shape.num_vectors),
                    static_cast<long long>(shape.dim));
    if (shape.passed < -1 || shape.passed >= shape.num_vectors)
        return fail(SL_BAD_ARGUMENT, "the passed vector must be one of %lld; got %lld", static_cast<long long>(shape.num_vectors),
                    static_cast<long long>(shape.passed));
    for (int64_t i = 0; i < shape.num_runs; ++i) {
        const sl_pair_run& run = shape.runs[i];
        if (run.row < 0 || run.row >= shape.num_vectors || run.first < 0 || run.count < 0 || run.first + run.count > shape.num_vectors ||
            run.column < 0)
            return fail(SL_BAD_ARGUMENT, "run %lld names pairs outside of %lld vectors", static_cast<long long>(i),
                        static_cast<long long>(shape.num_vectors));
    }
    return SL_OK;
}

void find_ranges(const sl_interaction& shape, ProductRange* ranges) {
    for (int64_t v = 0; v < shape.num_vectors; ++v) ranges[v] = {0, 0};
    for (int64_t i = 0; i < shape.num_runs; ++i) {
        const sl_pair_run& run = shape.runs[i];
        if (run.count == 0) continue;
        ProductRange& range = ranges[run.row];
        const bool empty = range.first == range.last;
        range.first = empty ? run.first : std::min(range.first, run.first);
        range.last = std::max(range.last, run.first + run.count);
    }
}

void run(const sl_interaction& shape, void (*kernel)(const InteractionArgs&), const InteractionArgs& shared, void* workspace,
         int32_t threads) {
    const Workspace layout(shape);
    char* base = static_cast<char*>(workspace);
    base += (kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(base) % kLine)) % kLine;
    auto* ranges = reinterpret_cast<ProductRange*>(base);
    find_ranges(shape, ranges);
    const int64_t cost = shape.num_vectors * shape.num_vectors * shape.dim;
    const int64_t most = std::max<int64_t>(shape.batch * cost / kTaskCost, 1);
    const int64_t tasks = threads > 1 ? std::min({most, threads * kTasksPerThread, shape.batch}) : 1;
    run_tasks(threads, tasks, [&](int64_t task, int worker) {
        InteractionArgs args = shared;
        char* own = base + layout.ranges_bytes + worker * layout.worker_bytes;
        args.shape = &shape;
        args.ranges = ranges;
        args.width = layout.width;
        args.square = reinterpret_cast<float*>(own);
        args.transposed = args.square + layout.width * layout.width;
        args.rows = reinterpret_cast<const float**>(args.transposed + kInteractionColumns * layout.width);
        args.grad_rows = reinterpret_cast<float**>(reinterpret_cast<char*>(args.rows) + Workspace::lines(8 * shape.num_vectors));
        args.first_sample = shape.batch * task / tasks;
        args.last_sample = shape.batch * (task + 1) / tasks;
        kernel(args);
    });
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" int64_t sl_interaction_workspace_bytes(const sl_interaction* shape, int32_t threads) {
    return Workspace(*shape).bytes(threads);
}

extern "C" sl_status sl_interaction_forward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix out, void* workspace,
                                            int32_t isa, int32_t threads) {
    if (sl_status status = check(*shape, isa)) return status;
    InteractionArgs args{};
    args.vectors = vectors;
    args.output = out;
    run(*shape, kernels_of(isa)->forward, args, workspace, threads);
    return SL_OK;
}

extern "C" sl_status sl_interaction_backward(const sl_interaction* shape, const sl_matrix* vectors, sl_matrix grad,
                                             const sl_matrix* vector_grads, void* workspace, int32_t isa, int32_t threads) {
    if (sl_status status = check(*shape, isa)) return status;
    InteractionArgs args{};
    args.vectors = vectors;
    args.vector_grads = vector_grads;
    args.output = grad;
    run(*shape, kernels_of(isa)->backward, args, workspace, threads);
    return SL_OK;
}
