// One block at a time on fibers: threads, barriers, warp collectives, faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "fiber.h"
#include "runtime_api.h"
#include "schedule.h"
#include "shared_memory.h"
#include "traffic.h"
#include "vector_types.h"

namespace sparselift::simt {

enum class State : std::uint8_t { ready, at_barrier, at_collective, exited };

struct Thread;

/// A warp collective. `resolve` sets `result` of every lane in `lanes` from what they brought; `warp` points to lane 0.
struct Collective {
    const char* name;
    void (*resolve)(Thread* warp, unsigned lanes);
    bool same_site;          // the participants must stand at one line
    bool orders_memory;
};

/// What one thread brings to where it waits, and takes away.
struct Meeting {
    const char* name = "";
    const Collective* collective = nullptr;
    Site site;
    unsigned lanes = 0;
    std::uint64_t value = 0;
    int operand = 0;
    int width = 32;
    std::uint64_t result = 0;
};

struct Thread {
    Fiber fiber;
    uint3 index{};
    int number = 0;          // in the block
    State state = State::ready;
    Meeting meeting;
};

/// The launch at hand, as the kernel sees it.
struct Grid {
    dim3 grid, block;
    uint3 block_index{};
};

inline thread_local Thread* current_thread = nullptr;
inline thread_local Grid current_grid;

/// Runs `body(closure)` as every thread of a grid. A fault ends the launch; fault_text() then says what and where.
cudaError_t run_grid(dim3 grid, dim3 block, std::size_t shared_bytes, void (*body)(const void*), const void* closure);

/// Of the last launch of this OS thread; empty when it went well.
const char* fault_text();

/// Ends the launch. The text gets the block, the thread and the line.
[[noreturn]] void fault(cudaError_t code, Site site, const char* format, ...) __attribute__((format(printf, 3, 4)));

/// Waits for all threads of the block. `count` of them brought a true predicate.
struct Vote {
    int count, threads;
};
Vote meet_block(const char* name, bool predicate, Site site);

/// Waits for the lanes that meeting.lanes names and gives the collective's result for this one.
std::uint64_t meet_warp(const Meeting& meeting);

/// Where a random schedule may let another thread go first.
void schedule_point();

/// What launches and host calls of this OS thread did since `counts` was last set to zero.
struct Counts {
    std::int64_t launches = 0, blocks = 0, switches = 0, copies = 0, synchronizations = 0;
    Efficiency loads, stores;          // while counts_traffic: it takes time
};
inline thread_local Counts counts;
inline thread_local bool counts_traffic = false;

/// How often this OS thread has launched each kernel, by its name without namespaces.
inline thread_local std::map<std::string, std::int64_t> launches_by_name;

/// Called at the next launch of this OS thread, and never again. Tests let it throw, as allocations on the host's side of a launch may.
inline thread_local void (*at_next_launch)() = nullptr;

/// Notes a launch, by the name that the compiler has for the kernel.
void note_launch(std::string_view kernel);

/// Notes an access of global memory.
void note_traffic(bool is_store, const void* address, std::size_t bytes, Site site);

/// `bytes` of static shared memory, one array a `key` and block: its offset.
std::size_t static_shared(const void* key, std::size_t bytes, std::size_t alignment, const char* name, Site site);

/// Checks that a launch has `bytes` of dynamic shared memory from `offset` on.
void check_dynamic_shared(std::size_t offset, std::size_t bytes, std::size_t alignment, Site site);

/// Checks one access for races, and a read for bytes never written, and gives its address.
unsigned char* shared_access(Access access, std::size_t offset, std::size_t bytes, Site site);

}  // namespace sparselift::simt
