"""Interleaved timing of several ways to run one training step, paired ratios, and the CSV that all benchmarks write."""

from __future__ import annotations

import csv
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparselift.hardware import hardware
from sparselift.measure import median_interval
from sparselift.probe import probe

WARMUP_REPS = 4
CONFIDENCE = 0.95

Step = Callable[[int], None]              # runs one training step on the batch of this number
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the CSV. What does not apply is empty."""

    workload: str
    side: str                             # what is measured: "plan", "modules"; "torch" where nothing of ours ran
    baseline: str                         # what it is compared with: "torch", "fbgemm", "torchrec"
    config: str                           # "default", or how the plan was tuned
    optimizer: str                        # of the tables
    threads: int
    huge_pages: str                       # "on": where the plan asks for them; "off"
    baseline_median_ms: float | None
    median_ms: float
    ratio: float | None                   # median over the reps of baseline / side
    low: float | None                     # of its 95% interval
    high: float | None
    spread: float | None                  # interquartile range of the ratios
    reps: int
    bytes: int | None                     # least traffic of a step: ids, outputs, gradients, touched rows
    gbps: float | None                    # bytes / median
    peak_gbps: float | None               # of this machine, streaming, with as many threads
    floor_ms: float | None                # what memory alone needs for the step, see floor.py
    over_floor: float | None              # median over the reps of side / floor
    versions: str
    cpu: str
    device: str = ""                      # the GPU that ran it
    launches: int | None = None           # of kernels, in one step of the side
    synchronizations: int | None = None   # of the host with the device, likewise


def wall_clock(step: Step, number: int) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    step(number)
    return time.perf_counter() - start


def interleave(steps: Sequence[Any], num_batches: int, reps: int, seed: int, *, timed: Callable[[Any, int], float] = wall_clock,
               warmup_reps: int = WARMUP_REPS) -> Seconds:
    """(reps, sides) seconds of a step of each side, as `timed` takes them.

    A rep runs every side once, in random order, on the same batch; batches rotate, so that a batch's rows were last touched
    `num_batches` steps ago. The garbage collector is off while timing.
    """
    rng, times = np.random.default_rng(seed), np.empty((warmup_reps + reps, len(steps)))
    gc.collect()
    gc.disable()
    try:
        for rep in range(len(times)):
            for side in rng.permutation(len(steps)):
                times[rep, side] = timed(steps[side], rep % num_batches)
    finally:
        gc.enable()
    return times[warmup_reps:]


def paired_row(baseline_s: Seconds, side_s: Seconds, *, workload: str, side: str, config: str, optimizer: str = "", huge_pages: str = "",
               baseline: str = "torch", traffic_bytes: int | None = None, floor_s: Seconds | None = None,
               peak_gbps: float | None = None) -> Row:
    """The row of (reps,) seconds of two sides, and of the floor, taken rep by rep. `peak_gbps`: of what ran it, else the processor's."""
    baseline_median_s, median_s = float(np.median(baseline_s)), float(np.median(side_s))
    ratios = baseline_s / side_s
    low, median, high, _ = median_interval(ratios.tolist(), CONFIDENCE)
    quarter, three_quarters = np.percentile(ratios, [25, 75])
    floor = (None, None) if floor_s is None else (float(np.median(floor_s)) * 1e3, float(np.median(side_s / floor_s)))
    speed = _speed(traffic_bytes, median_s, peak_gbps)
    return Row(workload, side, baseline, config, optimizer, torch.get_num_threads(), huge_pages, baseline_median_s * 1e3, median_s * 1e3,
               median, low, high, float(three_quarters - quarter), len(ratios), traffic_bytes, *speed,
               *floor, *machine())


def single_row(seconds: Sequence[float], *, workload: str, side: str, config: str, optimizer: str, traffic_bytes: int | None = None,
               peak_gbps: float | None = None) -> Row:
    """The row of something that has no counterpart."""
    median_s = float(np.median(seconds))
    return Row(workload, side, "", config, optimizer, torch.get_num_threads(), "", None, median_s * 1e3, None, None, None, None,
               len(seconds), traffic_bytes, *_speed(traffic_bytes, median_s, peak_gbps), None, None, *machine())


def _speed(traffic_bytes: int | None, median_s: float, peak_gbps: float | None) -> tuple[float | None, float | None]:
    """What was reached, and what the machine streams, in GB/s."""
    if traffic_bytes is None:
        return None, None
    return traffic_bytes / median_s / 1e9, probe().stream_gbps if peak_gbps is None else peak_gbps


def machine() -> tuple[str, str]:
    """Versions in one text, and the processor's name."""
    found = hardware().to_dict()
    return " ".join(f"{name.removesuffix('_version')}={value}" for name, value in found.items() if name.endswith("_version")), found["cpu"]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """One line a row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.5g}" if isinstance(value, float) else value for key, value in asdict(row).items()})
