// Which threads may meet at a barrier or a warp collective, and what to say when they cannot.
#pragma once

#include "machine.h"

namespace sparselift::simt {

/// Ends the launch unless `thread` waits at the barrier, and the line, at which `last` completed it.
void check_same_barrier(const Thread& thread, const Thread& last);

/// Ends the launch when `me` has exited while a lane of its warp waits for it.
void check_exit(const Thread* threads, int num_threads, const Thread& me);

/// Ends the launch unless the lanes that `me` asks for exist, run, include `me`, and agree with it on lanes, collective and line.
void check_lanes(const Thread* warp, int num_threads, const Thread& me);

/// Whether every lane that `me` asks for waits at the same collective.
bool all_met(const Thread* warp, const Thread& me);

/// Ends the launch: every thread of the block waits or has exited, and not all have exited.
[[noreturn]] void report_deadlock(const Thread* threads, int num_threads);

}  // namespace sparselift::simt
