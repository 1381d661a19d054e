// Parallel regions on the OpenMP runtime that torch has loaded.
#pragma once

#include <atomic>
#include <cstdint>

namespace sparselift {

/// Runs work(context, worker) on up to `threads` threads, worker = 0, 1, ...; runs it once, inline, where there is no OpenMP
/// runtime, in a forked child (libgomp's threads are gone there and it would wait for them), or for one thread.
/// Returns how many workers ran. The work must be cut finer than the workers: fewer of them may come than were asked for.
int run_workers(int threads, void (*work)(void* context, int worker), void* context);

/// Runs task(i) for i in [0, count), each once, on up to `threads` threads that take the next one as they get free.
template <typename Task>
void run_tasks(int threads, int64_t count, const Task& task) {
    if (threads > count) threads = static_cast<int>(count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) task(i, 0);
        return;
    }
    struct Region {
        const Task& task;
        int64_t count;
        std::atomic<int64_t> next{0};
    } region{task, count};
    run_workers(
        threads,
        [](void* context, int worker) {
            auto& shared = *static_cast<Region*>(context);
            for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.count;) shared.task(i, worker);
        },
        &region);
}

/// The file of the OpenMP runtime, or "".
const char* openmp_runtime();

}  // namespace sparselift
