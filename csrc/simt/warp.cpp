#include "warp.h"

namespace sparselift::simt {
namespace {

/// Calls visit(thread, lane) for each of `lanes`.
template <typename Visit>
void each(Thread* warp, unsigned lanes, const Visit& visit) {
    for (int lane = 0; lane < 32; ++lane)
        if (lanes >> lane & 1) visit(warp[lane], lane);
}

/// result = the value of the lane that source(lane, operand, first and last lane of its segment) names.
template <typename Source>
void resolve_shuffle(Thread* warp, unsigned lanes, const Source& source) {
    each(warp, lanes, [&](Thread& thread, int lane) {
        const int first = lane & -thread.meeting.width;
        const int from = source(lane, thread.meeting.operand, first, first + thread.meeting.width - 1);
        if (!(lanes >> from & 1))
            fault(cudaErrorLaunchFailure, thread.meeting.site, "%s: lane %d reads lane %d, which lanes 0x%08x leave out",
                  thread.meeting.name, lane, from, lanes);
        thread.meeting.result = warp[from].meeting.value;
    });
}

/// result = combine over the values of all lanes.
template <typename T, typename Combine>
void resolve_reduction(Thread* warp, unsigned lanes, const Combine& combine) {
    T total = from_bits<T>(warp[__builtin_ctz(lanes)].meeting.value);
    each(warp, lanes & (lanes - 1), [&](Thread& thread, int) { total = combine(total, from_bits<T>(thread.meeting.value)); });
    each(warp, lanes, [&](Thread& thread, int) { thread.meeting.result = to_bits(total); });
}

}  // namespace

void resolve_shfl(Thread* warp, unsigned lanes) {
    resolve_shuffle(warp, lanes, [](int, int source, int first, int last) { return first | (source & (last - first)); });
}

void resolve_shfl_up(Thread* warp, unsigned lanes) {
    resolve_shuffle(warp, lanes, [](int lane, int delta, int first, int) {
        return static_cast<unsigned>(delta) <= static_cast<unsigned>(lane - first) ? lane - delta : lane;
    });
}

void resolve_shfl_down(Thread* warp, unsigned lanes) {
    resolve_shuffle(warp, lanes, [](int lane, int delta, int, int last) {
        return static_cast<unsigned>(delta) <= static_cast<unsigned>(last - lane) ? lane + delta : lane;
    });
}

void resolve_shfl_xor(Thread* warp, unsigned lanes) {
    resolve_shuffle(warp, lanes, [](int lane, int mask, int, int last) {
        const int from = lane ^ mask;
        return from < 0 || from > last ? lane : from;
    });
}

void resolve_ballot(Thread* warp, unsigned lanes) {
    unsigned votes = 0;
    each(warp, lanes, [&](Thread& thread, int lane) { votes |= static_cast<unsigned>(thread.meeting.value != 0) << lane; });
    each(warp, lanes, [&](Thread& thread, int) { thread.meeting.result = votes; });
}

void resolve_match_any(Thread* warp, unsigned lanes) {
    each(warp, lanes, [&](Thread& thread, int) {
        unsigned equal = 0;
        each(warp, lanes, [&](Thread& other, int lane) {
            equal |= static_cast<unsigned>(other.meeting.value == thread.meeting.value) << lane;
        });
        thread.meeting.result = equal;
    });
}

void resolve_add(Thread* warp, unsigned lanes) {
    resolve_reduction<unsigned>(warp, lanes, [](unsigned a, unsigned b) { return a + b; });
}

void resolve_min(Thread* warp, unsigned lanes) {
    resolve_reduction<unsigned>(warp, lanes, [](unsigned a, unsigned b) { return a < b ? a : b; });
}

void resolve_max(Thread* warp, unsigned lanes) {
    resolve_reduction<unsigned>(warp, lanes, [](unsigned a, unsigned b) { return a > b ? a : b; });
}

void resolve_min_signed(Thread* warp, unsigned lanes) {
    resolve_reduction<int>(warp, lanes, [](int a, int b) { return a < b ? a : b; });
}

void resolve_max_signed(Thread* warp, unsigned lanes) {
    resolve_reduction<int>(warp, lanes, [](int a, int b) { return a > b ? a : b; });
}

}  // namespace sparselift::simt
