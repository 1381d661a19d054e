#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "meeting.h"

namespace sparselift::simt {
namespace {

constexpr dim3 kMaxGrid{2147483647, 65535, 65535};
constexpr dim3 kMaxBlock{1024, 1024, 64};

bool fits(dim3 shape, dim3 limit) {
    return shape.x >= 1 && shape.y >= 1 && shape.z >= 1 && shape.x <= limit.x && shape.y <= limit.y && shape.z <= limit.z;
}

uint3 position(std::uint64_t number, dim3 shape) {
    return {static_cast<unsigned>(number % shape.x), static_cast<unsigned>(number / shape.x % shape.y),
            static_cast<unsigned>(number / shape.x / shape.y)};
}

/// What runs the blocks of one OS thread's launches.
class Machine {
  public:
    cudaError_t run(dim3 grid, dim3 block, std::size_t shared_bytes, void (*body)(const void*), const void* closure);
    const char* text() const { return text_; }
    [[noreturn]] void fail(cudaError_t code, Site site, const char* format, va_list arguments);

    Vote meet_block(const char* name, bool predicate, Site site);
    std::uint64_t meet_warp(const Meeting& meeting);
    void schedule_point();
    SharedMemory& shared() { return shared_; }
    Traffic& traffic() { return traffic_; }

  private:
    static void thread_main();
    void run_block(std::size_t shared_bytes);
    [[noreturn]] void exit_thread();
    Thread& next_thread();
    void go_on(Thread& me);
    void complete_barrier(const Thread& last);

    Stacks stacks_;
    Scheduler scheduler_;
    SharedMemory shared_;
    Traffic traffic_;
    std::unique_ptr<Thread[]> threads_;
    Fiber host_;
    void (*body_)(const void*) = nullptr;
    const void* closure_ = nullptr;
    int num_threads_ = 0, num_exited_ = 0, num_at_barrier_ = 0;
    Vote vote_{};
    cudaError_t error_ = cudaSuccess;
    bool running_ = false;
    char text_[768] = "";
};

thread_local Machine machine;

cudaError_t Machine::run(dim3 grid, dim3 block, std::size_t shared_bytes, void (*body)(const void*), const void* closure) {
    if (running_) return cudaErrorNotSupported;              // a kernel that launches another
    text_[0] = '\0';
    const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
    if (!fits(grid, kMaxGrid) || !fits(block, kMaxBlock) || threads > kMaxThreads) return cudaErrorInvalidConfiguration;
    if (shared_bytes > std::max(SharedMemory::asked_bytes, SharedMemory::kStaticBytes)) return cudaErrorInvalidValue;
    if (!threads_) threads_.reset(new (std::nothrow) Thread[kMaxThreads]);
    num_threads_ = static_cast<int>(threads);
    if (!threads_ || !stacks_.reserve(num_threads_)) return cudaErrorMemoryAllocation;

    const Schedule schedule = current_schedule();
    if (schedule.order == Order::unknown) {
        std::snprintf(text_, sizeof text_, "SPARSELIFT_SIMT_SCHEDULE must be forward, reverse or random:SEED; got '%s'",
                      std::getenv("SPARSELIFT_SIMT_SCHEDULE"));
        return cudaErrorInvalidValue;
    }
    body_ = body;
    closure_ = closure;
    error_ = cudaSuccess;
    host_.stack_bottom = nullptr;
    running_ = true;
    ++counts.launches;
    scheduler_.start(schedule);
    current_grid = {grid, block, {}};
    const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
    for (std::uint64_t i = 0; i < blocks && error_ == cudaSuccess; ++i) {
        current_grid.block_index = position(scheduler_.block_at(i, blocks), grid);
        run_block(shared_bytes);
    }
    if (error_ != cudaSuccess) stacks_.abandon();
    running_ = false;
    return error_;
}

void Machine::run_block(std::size_t shared_bytes) {
    ++counts.blocks;
    shared_.start_block(shared_bytes);
    if (counts_traffic) traffic_.start_block();
    scheduler_.clear();
    num_exited_ = num_at_barrier_ = 0;
    for (int i = 0; i < num_threads_; ++i) {
        Thread& thread = threads_[i];
        thread.index = position(static_cast<std::uint64_t>(i), current_grid.block);
        thread.number = i;
        thread.state = State::ready;
        stacks_.prepare(thread.fiber, i, thread_main);
        scheduler_.insert(i);
    }
    current_thread = &threads_[scheduler_.pick()];
    switch_fiber(host_, current_thread->fiber);              // back when the last thread has exited, or at a fault
    current_thread = nullptr;
    if (counts_traffic) traffic_.finish_block(counts.loads, counts.stores);
}

void Machine::thread_main() {
    enter_fiber(machine.host_);
    machine.body_(machine.closure_);
    machine.exit_thread();
}

void Machine::exit_thread() {
    Thread& me = *current_thread;
    me.state = State::exited;
    scheduler_.erase(me.number);
    check_exit(threads_.get(), num_threads_, me);
    if (++num_exited_ == num_threads_) leave_fiber(me.fiber, host_);
    Thread& next = next_thread();
    current_thread = &next;
    ++counts.switches;
    leave_fiber(me.fiber, next.fiber);
}

Thread& Machine::next_thread() {
    const int next = scheduler_.pick();
    if (next < 0) report_deadlock(threads_.get(), num_threads_);
    return threads_[next];
}

void Machine::go_on(Thread& me) {
    Thread& next = next_thread();
    if (&next == &me) return;
    current_thread = &next;
    ++counts.switches;
    switch_fiber(me.fiber, next.fiber);
}

void Machine::fail(cudaError_t code, Site site, const char* format, va_list arguments) {
    Thread& me = *current_thread;
    const uint3 block = current_grid.block_index;
    const int used = std::vsnprintf(text_, sizeof text_, format, arguments);
    if (used >= 0 && used < static_cast<int>(sizeof text_))
        std::snprintf(text_ + used, sizeof text_ - static_cast<std::size_t>(used), "; %s:%d, block (%u,%u,%u), thread (%u,%u,%u)",
                      site.file, site.line, block.x, block.y, block.z, me.index.x, me.index.y, me.index.z);
    error_ = code;
    leave_fiber(me.fiber, host_);
}

void Machine::complete_barrier(const Thread& last) {
    vote_ = {0, num_threads_};
    for (int i = 0; i < num_threads_; ++i) {
        check_same_barrier(threads_[i], last);
        vote_.count += threads_[i].meeting.value != 0;
    }
    for (int i = 0; i < num_threads_; ++i) {
        threads_[i].state = State::ready;
        scheduler_.insert(i);
    }
    num_at_barrier_ = 0;
    shared_.block_barrier();
}

Vote Machine::meet_block(const char* name, bool predicate, Site site) {
    Thread& me = *current_thread;
    me.meeting = {};
    me.meeting.name = name;
    me.meeting.site = site;
    me.meeting.value = predicate;
    me.state = State::at_barrier;
    scheduler_.erase(me.number);
    if (++num_at_barrier_ == num_threads_) complete_barrier(me);
    go_on(me);
    return vote_;
}

std::uint64_t Machine::meet_warp(const Meeting& meeting) {
    Thread& me = *current_thread;
    Thread* warp = &threads_[me.number / 32 * 32];
    me.meeting = meeting;
    check_lanes(warp, num_threads_, me);
    me.state = State::at_collective;
    scheduler_.erase(me.number);
    if (all_met(warp, me)) {
        const unsigned lanes = me.meeting.lanes;
        const Collective& collective = *me.meeting.collective;
        if (collective.resolve) collective.resolve(warp, lanes);
        if (collective.orders_memory) shared_.warp_barrier(me.number / 32, lanes);
        for (int lane = 0; lane < 32; ++lane)
            if (lanes >> lane & 1) {
                warp[lane].state = State::ready;
                scheduler_.insert(warp[lane].number);
            }
    }
    go_on(me);
    return me.meeting.result;
}

void Machine::schedule_point() {
    if (scheduler_.is_random()) go_on(*current_thread);
}

}  // namespace

cudaError_t run_grid(dim3 grid, dim3 block, std::size_t shared_bytes, void (*body)(const void*), const void* closure) {
    const cudaError_t error = machine.run(grid, block, shared_bytes, body, closure);
    SharedMemory::asked_bytes = 0;
    return error;
}

const char* fault_text() { return machine.text(); }

void fault(cudaError_t code, Site site, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    machine.fail(code, site, format, arguments);
}

Vote meet_block(const char* name, bool predicate, Site site) { return machine.meet_block(name, predicate, site); }
std::uint64_t meet_warp(const Meeting& meeting) { return machine.meet_warp(meeting); }
void schedule_point() { machine.schedule_point(); }

void note_traffic(bool is_store, const void* address, std::size_t bytes, Site site) {
    machine.traffic().note(current_thread->number, is_store, address, bytes, site);
}

std::size_t static_shared(const void* key, std::size_t bytes, std::size_t alignment, const char* name, Site site) {
    const std::ptrdiff_t offset = machine.shared().static_array(key, bytes, alignment);
    if (offset < 0)
        fault(cudaErrorInvalidValue, site, "array '%s' of %zu bytes: static shared memory has at most %zu, and %zu with the launch's %zu", name,
              bytes, SharedMemory::kStaticBytes, machine.shared().limit(), machine.shared().dynamic_bytes());
    return static_cast<std::size_t>(offset);
}

void check_dynamic_shared(std::size_t offset, std::size_t bytes, std::size_t alignment, Site site) {
    const std::size_t have = machine.shared().dynamic_bytes();
    if (offset > have || bytes > have - offset)
        fault(cudaErrorIllegalAddress, site, "bytes %zu to %zu of dynamic shared memory, of which the launch has %zu", offset,
              offset + bytes, have);
    if (offset % alignment)
        fault(cudaErrorMisalignedAddress, site, "offset %zu in dynamic shared memory is no multiple of %zu", offset, alignment);
}

unsigned char* shared_access(Access access, std::size_t offset, std::size_t bytes, Site site) {
    constexpr const char* kNames[] = {"reads", "writes", "updates"};
    Race race{};
    SharedMemory& shared = machine.shared();
    const bool written = access == Access::write || shared.is_written(offset, bytes);
    const int me = current_thread->number;
    if (shared.access(me, access, offset, bytes, site, race))
        fault(cudaErrorLaunchFailure, site,
              "race on shared memory: thread %d %s byte %zu, which thread %d %s at %s:%d, with no barrier between", me,
              kNames[static_cast<int>(access)], offset, race.thread, kNames[static_cast<int>(race.access)], race.site.file,
              race.site.line);
    if (!written) fault(cudaErrorLaunchFailure, site, "read of shared memory that was never written, byte %zu", offset);
    return shared.data() + offset;
}

void note_launch(std::string_view kernel) {
    if (auto* const call = std::exchange(at_next_launch, nullptr)) call();
    std::string name(kernel);
    for (const std::string_view dropped : {"sparselift::cuda::", "{anonymous}::"}) {
        for (std::size_t at; (at = name.find(dropped)) != std::string::npos;) name.erase(at, dropped.size());
    }
    if (name.rfind('&', 0) == 0) name.erase(0, 1);
    ++launches_by_name[name];
}

}  // namespace sparselift::simt
