"""The timed part of gpu.py: rows of every workload and of single operations, each checked first and cut where its time is over."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from cases import check
from deadline import Deadline, OutOfTime
from gpu_cases import NUM_BATCHES, SHAPES, DeviceCase, DeviceShape, Phase, Timed, phases, timed_sides
from gpu_dlrm import DlrmCase, DlrmKernels, DlrmTorch, interactions
from gpu_exchange import Operation, operations
from gpu_machine import Counts, Machine
from interleave import Row, Seconds, interleave, paired_row, single_row

MIN_REPS = 7                       # fewer make no 95% interval that leaves out an outlier on either side
TRIED_REPS = 3                     # which also warm up
FEWER_BYTES = (1, 2, 4)            # of free memory to use a part of, where an allocation failed
UNCOUNTED = Counts(None, None)
# By name, what is timed by itself: the shapes whose ids, pooled rows or vectors it takes, and what makes it.
OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[list[DeviceShape], Machine, int], Iterator[tuple[DeviceShape, Operation]]]]] = {
    "exchange": (("W7", "W1"), lambda shapes, machine, seed: operations(*shapes, machine.exchange, seed)),
    "interaction": (("W6a", "W6b"), lambda shapes, machine, seed: interactions(shapes, machine.backend, seed)),
}


def copy_row(machine: Machine) -> Row:
    """Copies inside the device's memory: the bandwidth that shares are of."""
    nbytes, seconds = machine.copy_seconds()
    return on(machine, single_row(seconds, workload="copy", side="torch", config="", optimizer="", traffic_bytes=nbytes,
                                  peak_gbps=nbytes / float(np.median(seconds)) / 1e9))


def on(machine: Machine, row: Row, counts: Counts = UNCOUNTED) -> Row:
    return replace(row, device=machine.name, launches=counts.launches, synchronizations=counts.synchronizations)


def measure_workload(machine: Machine, name: str, optimizer: str, peak_gbps: float, args: argparse.Namespace,
                     deadline: Deadline) -> Iterator[Row]:
    """Rows of a workload with one optimizer. Raises CheckFailed, OutOfTime, or torch's OutOfMemoryError where a quarter does not fit."""
    for fewer in FEWER_BYTES:
        shape = machine.fitting(SHAPES[name], fewer)
        try:
            yield from measure_case(machine, shape, optimizer, peak_gbps, args, deadline)
        except torch.OutOfMemoryError:
            if fewer == FEWER_BYTES[-1]:
                raise
            print(f"note: {name} with {described(shape)} is more than there is memory for; again with less", flush=True)
            machine.release()
        else:
            return


def measure_case(machine: Machine, shape: DeviceShape, optimizer: str, peak_gbps: float, args: argparse.Namespace,
                 deadline: Deadline) -> Iterator[Row]:
    case = (DlrmCase if shape.dlrm else DeviceCase)(shape, optimizer, args.seed, machine.device)
    ours, native, *peers = sides_of(case, machine, args)
    check(native.trainer, ours.trainer, *(peer.trainer for peer in peers))
    counts = machine.counts(lambda: ours.trainer.step(0))
    sides, config = [phases(side) for side in (ours, native, *peers)], described(shape)
    for phase, nbytes in (("forward", case.forward_bytes()), ("backward and update", case.update_bytes()), ("step", case.traffic_bytes())):
        times = interleaved(machine, [side[phase] for side in sides], args, deadline).T
        for baseline, seconds in zip(("torch", *(peer.name for peer in peers)), times[1:]):
            row = paired_row(seconds, times[0], workload=f"{shape.name} {phase}", side="kernels", baseline=baseline, config=config,
                             optimizer=optimizer, traffic_bytes=nbytes, peak_gbps=peak_gbps)
            yield on(machine, row, counts if phase == "step" else UNCOUNTED)
    alone, narrowed_bytes = Phase(lambda number: number, ours.look_up), case.batches[0].indices.nbytes // 2
    seconds = interleaved(machine, [alone], args, deadline)[:, 0]
    yield on(machine, single_row(seconds.tolist(), workload=f"{shape.name} lookups alone", side="kernels", config=config,
                                 optimizer=optimizer, traffic_bytes=case.lookup_bytes() - narrowed_bytes, peak_gbps=peak_gbps))


def sides_of(case: DeviceCase, machine: Machine, args: argparse.Namespace) -> Iterator[Timed]:
    """Ours, torch's, and, for lookups, the peers that are installed."""
    if isinstance(case, DlrmCase):
        return iter((DlrmKernels(case, machine.backend), DlrmTorch(case.side())))
    return timed_sides(case, machine.backend, args.peers)


def measure_operations(machine: Machine, name: str, peak_gbps: float, args: argparse.Namespace, deadline: Deadline) -> Iterator[Row]:
    """Rows of one of OPERATIONS. Raises CheckFailed or OutOfTime."""
    names, make = OPERATIONS[name]
    shapes = [machine.fitting(SHAPES[shape], 1) for shape in names]
    for shape, operation in make(shapes, machine, args.seed):
        counts = machine.counts(partial(operation.ours.run, 0))
        both = [operation.ours, *([operation.torch] if operation.torch else [])]
        times = interleaved(machine, both, args, deadline).T
        common = {"workload": operation.name, "side": "kernels", "optimizer": "", "traffic_bytes": operation.traffic_bytes,
                  "peak_gbps": peak_gbps, "config": described(shape)}
        yield on(machine, paired_row(times[1], times[0], **common) if operation.torch else single_row(times[0].tolist(), **common), counts)


def interleaved(machine: Machine, steps: Sequence[Phase], args: argparse.Namespace, deadline: Deadline) -> Seconds:
    """(reps, sides) seconds: as many reps as were asked for, or as the time that is left allows."""
    start = time.monotonic()
    for number in range(TRIED_REPS):
        for step in steps:
            machine.seconds(step, number)
    a_rep_s = (time.monotonic() - start) / TRIED_REPS
    reps = min(args.reps, int(deadline.left_s / a_rep_s))
    if reps < MIN_REPS:
        raise OutOfTime(f"a rep takes {a_rep_s:.2f} s, and {max(deadline.left_s, 0):.1f} s are left of {deadline.seconds:.0f}")
    return interleave(steps, NUM_BATCHES, reps, args.seed, timed=machine.seconds, warmup_reps=0)


def described(shape: DeviceShape) -> str:
    return f"{shape.num_tables} tables, {shape.table_bytes / 1e9:.2f} GB, D={shape.dim}, B={shape.batch_size}, K={shape.num_ids}"
