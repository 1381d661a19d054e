#include "meeting.h"

#include <cstdio>
#include <cstring>

namespace sparselift::simt {
namespace {

struct Text {
    char data[256];
};

bool waits_for(const Thread& thread, int lane) { return thread.state == State::at_collective && (thread.meeting.lanes >> lane & 1); }

/// "lane 3 waits at __syncwarp with lanes 0x0000ffff (bag.cuh:41)"
Text describe(const char* kind, int number, const Thread& thread) {
    Text text;
    const Meeting& meeting = thread.meeting;
    const auto print = [&](auto... arguments) { std::snprintf(text.data, sizeof text.data, arguments...); };
    switch (thread.state) {
        case State::exited: print("%s %d has exited", kind, number); break;
        case State::ready: print("%s %d runs", kind, number); break;
        case State::at_barrier: print("%s %d waits at %s (%s:%d)", kind, number, meeting.name, meeting.site.file, meeting.site.line); break;
        case State::at_collective:
            print("%s %d waits at %s with lanes 0x%08x (%s:%d)", kind, number, meeting.name, meeting.lanes, meeting.site.file,
                  meeting.site.line);
            break;
    }
    return text;
}

bool is_same(const char* a, const char* b) { return std::strcmp(a, b) == 0; }

bool is_same(const Site& a, const Site& b) { return a.line == b.line && is_same(a.file, b.file); }

[[noreturn]] void fault_lanes(const Meeting& meeting, const char* what, unsigned lanes) {
    fault(cudaErrorLaunchFailure, meeting.site, "%s: lanes 0x%08x include %s, 0x%08x", meeting.name, meeting.lanes, what, lanes);
}

}  // namespace

void check_same_barrier(const Thread& thread, const Thread& last) {
    if (is_same(thread.meeting.name, last.meeting.name) && is_same(thread.meeting.site, last.meeting.site)) return;
    fault(cudaErrorLaunchFailure, last.meeting.site, "divergent %s: %s", last.meeting.name, describe("thread", thread.number, thread).data);
}

void check_exit(const Thread* threads, int num_threads, const Thread& me) {
    const int lane = me.number % 32;
    const int first = me.number - lane;
    for (int i = first; i < first + 32 && i < num_threads; ++i)
        if (i != me.number && waits_for(threads[i], lane))
            fault(cudaErrorLaunchFailure, threads[i].meeting.site, "lane %d has exited, but %s", lane,
                  describe("lane", i - first, threads[i]).data);
}

void check_lanes(const Thread* warp, int num_threads, const Thread& me) {
    const Meeting& meeting = me.meeting;
    const int lane = me.number % 32;
    const int live = num_threads - (me.number - lane);
    const unsigned existing = live >= 32 ? ~0u : (1u << live) - 1;
    unsigned exited = 0;
    for (int other = 0; other < 32; ++other)
        if ((existing >> other & 1) && warp[other].state == State::exited) exited |= 1u << other;
    if (!(meeting.lanes >> lane & 1))
        fault(cudaErrorLaunchFailure, meeting.site, "%s: lanes 0x%08x leave out the calling lane, %d", meeting.name, meeting.lanes, lane);
    if (meeting.lanes & ~existing) fault_lanes(meeting, "lanes that the block does not have", meeting.lanes & ~existing);
    if (meeting.lanes & exited) fault_lanes(meeting, "lanes that have exited", meeting.lanes & exited);
    for (int other = 0; other < 32; ++other) {
        if (!(meeting.lanes & existing & (1u << other)) || !waits_for(warp[other], lane)) continue;
        const Meeting& theirs = warp[other].meeting;
        const bool agree = theirs.lanes == meeting.lanes && theirs.collective == meeting.collective &&
                           (!meeting.collective->same_site || is_same(theirs.site, meeting.site));
        if (!agree)
            fault(cudaErrorLaunchFailure, meeting.site, "divergent %s with lanes 0x%08x: %s", meeting.name, meeting.lanes,
                  describe("lane", other, warp[other]).data);
    }
}

bool all_met(const Thread* warp, const Thread& me) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!(me.meeting.lanes >> lane & 1)) continue;
        if (warp[lane].state != State::at_collective || warp[lane].meeting.lanes != me.meeting.lanes) return false;
    }
    return true;
}

void report_deadlock(const Thread* threads, int num_threads) {
    for (int i = 0; i < num_threads; ++i) {
        if (threads[i].state != State::at_collective) continue;
        const Thread* warp = threads + i / 32 * 32;
        for (int lane = 0; lane < 32; ++lane)
            if (waits_for(threads[i], lane) && !waits_for(warp[lane], i % 32))
                fault(cudaErrorLaunchFailure, threads[i].meeting.site, "divergent %s: %s, but %s", threads[i].meeting.name,
                      describe("lane", i % 32, threads[i]).data, describe("lane", lane, warp[lane]).data);
    }
    int waiting = 0;
    const Thread *at_barrier = nullptr, *elsewhere = nullptr;
    for (int i = 0; i < num_threads; ++i) {
        const bool waits = threads[i].state == State::at_barrier;
        waiting += waits;
        (waits ? at_barrier : elsewhere) = &threads[i];
    }
    fault(cudaErrorLaunchFailure, at_barrier->meeting.site, "divergent %s: %d of %d threads wait, but %s", at_barrier->meeting.name,
          waiting, num_threads, describe("thread", elsewhere->number, *elsewhere).data);
}

}  // namespace sparselift::simt
