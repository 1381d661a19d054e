#include "threads.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <cstring>
#include <string>
#include <vector>

#include "../api/sparselift_cpu.h"

namespace sparselift {
namespace {

// libgomp's entry point for `#pragma omp parallel`; libomp and libiomp5 export it as well.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

std::atomic<bool> in_forked_child{false};

struct Runtime {
    Parallel parallel = nullptr;
    std::string file;
};

bool has_prefix(const char* path, const char* prefix) {
    const char* slash = std::strrchr(path, '/');
    return std::strncmp(slash ? slash + 1 : path, prefix, std::strlen(prefix)) == 0;
}

/// GOMP_parallel as seen from an already loaded library: its own or one of its dependencies'.
Parallel parallel_of(const char* path) {
    void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return nullptr;
    auto found = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
    dlclose(library);
    return found;
}

/// Files of the loaded libraries whose name starts with `prefix`. Copied out: dlopen inside dl_iterate_phdr can deadlock.
std::vector<std::string> loaded(const char* prefix) {
    struct Search {
        const char* prefix;
        std::vector<std::string> files;
    } search{prefix, {}};
    dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* context) {
            auto& wanted = *static_cast<Search*>(context);
            if (has_prefix(library->dlpi_name, wanted.prefix)) wanted.files.push_back(library->dlpi_name);
            return 0;
        },
        &search);
    return search.files;
}

/// Other packages bring OpenMP runtimes of their own: the right one is what torch's CPU library is linked to.
Runtime find_runtime() {
    for (const char* prefix : {"libtorch_cpu", "libgomp", "libomp", "libiomp"}) {
        for (const std::string& file : loaded(prefix)) {
            Parallel found = parallel_of(file.c_str());
            Dl_info info;
            if (found && dladdr(reinterpret_cast<void*>(found), &info)) return {found, info.dli_fname};
        }
    }
    return {};
}

const Runtime& runtime() {
    static const Runtime found = [] {
        pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true, std::memory_order_relaxed); });
        return find_runtime();
    }();
    return found;
}

struct Region {
    void (*work)(void*, int);
    void* context;
    std::atomic<int> workers{0};
};

void enter(void* argument) {
    auto& region = *static_cast<Region*>(argument);
    region.work(region.context, region.workers.fetch_add(1, std::memory_order_relaxed));
}

}  // namespace

int run_workers(int threads, void (*work)(void*, int), void* context) {
    const Runtime& openmp = runtime();
    Region region{work, context};
    if (threads <= 1 || !openmp.parallel || in_forked_child.load(std::memory_order_relaxed))
        enter(&region);
    else
        openmp.parallel(enter, &region, static_cast<unsigned>(threads), 0);
    return region.workers.load(std::memory_order_relaxed);
}

const char* openmp_runtime() { return runtime().file.c_str(); }

}  // namespace sparselift

extern "C" const char* sl_openmp_runtime(void) { return sparselift::openmp_runtime(); }

extern "C" int32_t sl_probe_threads(int32_t threads) {
    return sparselift::run_workers(threads, [](void*, int) {}, nullptr);
}
