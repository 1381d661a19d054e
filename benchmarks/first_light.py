"""Planned steps against native torch and other implementations, interleaved in one process, each with its own weights.

W1 to W5 and W7 run the sparse path alone: forward, `output.backward(output_grad)`, optimizer. W6a and W6b are full DLRM steps. Native is
one `nn.EmbeddingBag(sparse=True)` a table with torch's optimizers, or the shared benchmark's plain-torch row-wise Adagrad.
Before timing, the outputs and weights of two steps are compared. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator

import torch
from cases import Bench, Case, Side, check
from command import EXIT_NO_BENCH, add_options, load_bench, names, run
from floor import FloorSide
from interleave import Row, interleave, paired_row, single_row
from peer_sides import PEERS, peer_sides, release
from quiet import hollow, silence

import sparselift as sl
from sparselift.plan import Plan, default_plan

WORKLOADS = ("W1", "W2", "W3", "W4", "W5", "W6b")
LIFT_REPS = 3
SHORT_STEPS = 20                          # without kernels, for one with


def make_plan(side: Side, pages: str, args: argparse.Namespace) -> tuple[str, Plan]:
    """(name, plan) of what is to be measured."""
    constraints = sl.Constraints(pin={} if pages == "on" else {"huge_pages": "off"})
    if args.tune:
        return f"tuned, {args.tune} trials", sl.tune(side.workload(), trials=args.tune, constraints=constraints, seed=args.seed).plan
    return "default", default_plan(sl.lift(side.workload()), constraints)


def measure(bench: Bench, args: argparse.Namespace) -> Iterator[Row]:
    shapes = bench.workloads.load_workloads()
    for name in args.workloads:
        for optimizer in shapes[name].optimizers:
            if args.optimizers is None or optimizer in args.optimizers:
                yield from measure_workload(bench, name, optimizer, args)


def measure_workload(bench: Bench, name: str, optimizer: str, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of one workload and optimizer."""
    case = Case(bench, bench.workloads.load_workloads()[name], optimizer, args.seed)
    for threads in args.threads:
        torch.set_num_threads(threads)
        if name == "W6b":
            yield single_row(lift_seconds(case.side(planned=True)), workload="W6b lift, 8 batches", side="plan", config="",
                             optimizer=optimizer)
        for pages in ("on", "off") if args.huge_pages == "both" else (args.huge_pages,):
            yield from measure_plan(case, pages, args)
            gc.collect()                  # the tables of one pair of sides at a time


def measure_plan(case: Case, pages: str, args: argparse.Namespace) -> Iterator[Row]:
    """All sides from the same start: checked against each other, then timed. A row for each that the plan is compared with."""
    native, planned, peers = case.side(planned=False), case.side(planned=True), list(peer_sides(case, args.peers))
    config, plan = make_plan(planned, pages, args)
    sl.apply(plan, planned.model, planned.optimizers)
    check(native, planned, *peers)
    name, optimizer = case.shape.name, case.optimizer
    floor = [FloorSide(case)] if args.floor and not case.shape.dlrm else []
    times = interleave([side.step for side in (planned, native, *peers, *floor)], len(case.batches), args.reps, args.seed).T
    for baseline, seconds in zip(("torch", *(peer.name for peer in peers)), times[1:]):
        yield paired_row(seconds, times[0], workload=name, side="plan", baseline=baseline, config=config, optimizer=optimizer,
                         huge_pages=pages, traffic_bytes=case.traffic_bytes(), floor_s=times[-1] if floor else None)
    if name == "W2" and pages == "on" and plan.config.path == "planned":
        yield single_row(machinery_seconds(planned, args.reps), workload="W2 without kernels", side="plan", config=config,
                         optimizer=optimizer)
        yield single_row(torch_seconds(native, args.reps), workload="W2, torch alone", side="torch", config="", optimizer=optimizer)
    sl.unapply(planned.model, planned.optimizers)


def lift_seconds(side: Side) -> list[float]:
    """Seconds of lifting from ready batches."""
    seconds = []
    for _ in range(LIFT_REPS):
        start = time.perf_counter()
        sl.lift(side.workload(), batches=8)
        seconds.append(time.perf_counter() - start)
    return seconds


def machinery_seconds(side: Side, reps: int) -> list[float]:
    """Seconds of planned steps whose kernels do nothing: what Python and autograd around them cost."""
    with silence(side.model):
        return _seconds(lambda: side.step(0), reps)


def torch_seconds(side: Side, reps: int) -> list[float]:
    """Seconds of native steps of no bags that look nothing up: what modules, engine and optimizer cost with nothing to do."""
    output_grad, side.output_grad = side.output_grad, side.output_grad[:0]
    for optimizer in side.optimizers:
        optimizer.zero_grad()
    try:
        with hollow(side.model.emb_l):
            return _seconds(lambda: side.step(0), reps)
    finally:
        side.output_grad = output_grad


def _seconds(step: Callable[[], object], reps: int) -> list[float]:
    """Of `reps` times as many steps as a rep has elsewhere: they are short."""
    seconds = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(SHORT_STEPS * (reps + 1)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return seconds[SHORT_STEPS:]


def show(row: Row) -> str:
    label = f"{row.workload:22} {row.optimizer:16} {row.threads} threads"
    if row.ratio is None:
        return f"{label}                 {row.median_ms:9.3f} ms"
    floor = "" if row.over_floor is None else f"  {row.over_floor:4.2f} of the floor"
    return (f"{label}  pages {row.huge_pages:3}  {row.baseline:8} {row.baseline_median_ms:8.2f} ms  plan {row.median_ms:8.2f} ms  "
            f"{row.ratio:5.2f}x [{row.low:.2f}, {row.high:.2f}]  {row.gbps:5.1f} GB/s{floor}")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=names, default=list(WORKLOADS), help=f"default: {','.join(WORKLOADS)}")
    parser.add_argument("--optimizers", type=names, default=None, help="default: all that a workload lists")
    parser.add_argument("--huge-pages", choices=("on", "off", "both"), default="both", help="on: where the plan wants them; default: both")
    parser.add_argument("--peers", type=names, default=list(PEERS), help=f"of {','.join(PEERS)}, where installed; default: all")
    parser.add_argument("--floor", action=argparse.BooleanOptionalAction, default=True, help="compare with what memory alone needs")
    parser.add_argument("--tune", type=int, default=0, metavar="TRIALS", help="tune a plan instead of taking the default one")
    add_options(parser, "first_light.csv", "timed pairs of steps")
    return parser


def main() -> int:
    parser = options()
    args = parser.parse_args()
    if (bench := load_bench(args.bench_folder, args.workloads)) is None:
        return EXIT_NO_BENCH
    for what, wanted, known in (("workload", args.workloads, tuple(bench.workloads.load_workloads())), ("peer", args.peers, PEERS)):
        if unknown := [name for name in wanted if name not in known]:
            parser.error(f"there is no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        return run(measure(bench, args), show, args.out)
    finally:
        release()


if __name__ == "__main__":
    sys.exit(main())
