// Schedules the epilogue kernels: rows are cut among threads.
#include "epilogue.h"

#include <algorithm>

#include "../api/status.h"
#include "threads.h"

namespace sparselift {
namespace {

constexpr int64_t kTaskFloats = 1 << 16;      // a task of fewer costs more than it saves
constexpr int64_t kTasksPerThread = 4;

const EpilogueKernels* kernels_of(int32_t isa) {
    switch (isa) {
        case SL_ISA_PORTABLE: return portable::epilogue_kernels();
#ifdef __x86_64__
        case SL_ISA_AVX2: return avx2::epilogue_kernels();
        case SL_ISA_AVX512: return avx512::epilogue_kernels();
#endif
        default: return nullptr;
    }
}

sl_status check(int64_t rows, int64_t columns, int32_t isa) {
    if (!sl_isa_runnable(isa)) return fail(SL_UNSUPPORTED, "instruction set %d is missing here", isa);
    if (rows < 0 || columns < 0)
        return fail(SL_BAD_ARGUMENT, "an epilogue needs a matrix; got %lld x %lld", static_cast<long long>(rows), static_cast<long long>(columns));
    return SL_OK;
}

/// Into how many parts of at least one of `units` to cut this many floats.
int64_t count_tasks(int64_t floats, int64_t units, int32_t threads) {
    if (threads <= 1) return 1;
    return std::max<int64_t>(std::min({floats / kTaskFloats, threads * kTasksPerThread, units}), 1);
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" sl_status sl_epilogue_forward(sl_matrix out, int64_t rows, int64_t columns, const float* bias, int32_t relu, int32_t isa,
                                         int32_t threads) {
    if (sl_status status = check(rows, columns, isa)) return status;
    const int64_t tasks = count_tasks(rows * columns, rows, threads);
    run_tasks(threads, tasks, [&](int64_t task, int) {
        EpilogueArgs args{};
        args.out = out;
        args.bias = bias;
        args.relu = relu;
        args.rows = rows;
        args.columns = columns;
        args.first_row = rows * task / tasks;
        args.last_row = rows * (task + 1) / tasks;
        kernels_of(isa)->forward(args);
    });
    return SL_OK;
}

extern "C" sl_status sl_epilogue_backward(sl_matrix grad, sl_matrix out, sl_matrix masked, float* sums, int64_t rows, int64_t columns,
                                          int32_t isa, int32_t threads) {
    if (sl_status status = check(rows, columns, isa)) return status;
    const int64_t chunks = (rows + SL_EPILOGUE_ROWS - 1) / SL_EPILOGUE_ROWS;
    const int64_t tasks = count_tasks(rows * columns, chunks, threads);
    run_tasks(threads, tasks, [&](int64_t task, int) {
        EpilogueArgs args{};
        args.grad = grad;
        args.out = out;
        args.masked = masked;
        args.sums = sums;
        args.rows = rows;
        args.columns = columns;
        args.first_chunk = chunks * task / tasks;
        args.last_chunk = chunks * (task + 1) / tasks;
        kernels_of(isa)->backward(args);
    });
    if (sums && chunks == 0) std::fill(sums, sums + columns, 0.0f);
    for (int64_t chunk = 1; sums && chunk < chunks; ++chunk) {
        for (int64_t column = 0; column < columns; ++column) sums[column] += sums[chunk * columns + column];
    }
    return SL_OK;
}
