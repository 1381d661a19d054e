"""What the rewrites of the dense part gain, each by itself: full DLRM steps of the shared benchmark, and the interaction alone.

All sides are interleaved in one process: torch's own step on a model of its own; and, on a second model whose plans are switched in
microseconds, the plan without any rewrite of the dense part, then with one after the other. `sparse` beside `torch` is therefore the sparse
path's gain, and each other side beside `sparse` the dense part's. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import Bench, Case, CheckFailed, Side, check
from command import EXIT_NO_BENCH, add_options, load_bench, names, run
from interleave import Row, interleave, paired_row
from torch import Tensor

import sparselift as sl
from sparselift.apply import Applied
from sparselift.functional import dot_interaction
from sparselift.kernels.interaction import InteractionSpec, interact
from sparselift.plan import default_plan
from sparselift.schedule import build_schedule

WORKLOADS = ("W6a", "W6b")

# What each side pins; the rest of its plan is the default's.
SIDES: dict[str, dict[str, Any]] = {
    "sparse": {"interaction": False, "linear": "native"},
    "interaction": {"interaction": True, "linear": "native"},
    "interaction, fused": {"interaction": True, "linear": "fused"},
    "interaction, onednn_forward": {"interaction": True, "linear": "onednn_forward"},
    "interaction, onednn": {"interaction": True, "linear": "onednn"},
}
COMPILED = {f"interaction, {choice}": {"interaction": True, "linear": "native", "compile": choice}
            for choice in ("inductor", "inductor_graph")}
CHECKED = "interaction, onednn"            # the one with every rewrite


class Variants:
    """One model in training under several plans, by what each pins."""

    def __init__(self, side: Side, sides: dict[str, dict[str, Any]] = SIDES) -> None:
        self.side, self.graph, self.current = side, sl.lift(side.workload()), ""
        self.applied: dict[str, Applied] = {}
        for name, pins in sides.items():
            plan = default_plan(self.graph, sl.Constraints(pin=pins))
            self.applied[name] = Applied(plan.structure, build_schedule(plan.structure, plan.config), side.model)

    def switch(self, name: str) -> None:
        """Run the plan of this name from now on; none for ""."""
        if self.current:
            self.applied[self.current].detach(self.side.model)
        self.current = name
        if name:
            self.applied[name].attach(self.side.model, self.side.optimizers)

    def step(self, name: str) -> Callable[[int], Any]:
        """A step under the plan of this name, the switch included."""
        def run(number: int) -> Tensor:
            self.switch(name)
            return self.side.step(number)

        return run


def measure_steps(bench: Bench, name: str, optimizer: str, threads: int, args: argparse.Namespace) -> Iterator[Row]:
    """Rows beside torch's step, and beside the plan that leaves the dense part alone."""
    torch.set_num_threads(threads)
    case = Case(bench, bench.workloads.load_workloads()[name], optimizer, args.seed)
    pins = SIDES | (COMPILED if args.compile else {})
    native, variants = case.side(planned=False), Variants(case.side(planned=True), pins)
    for name_of_checked in (CHECKED, *(COMPILED if args.compile else ())):        # and compiled, before anything is timed
        variants.switch(name_of_checked)
        check(native, variants.side)
    times = interleave([native.step, *map(variants.step, pins)], len(case.batches), args.reps, args.seed).T
    variants.switch("")
    sides = dict(zip(pins, times[1:], strict=True))
    for side, seconds in sides.items():
        for baseline, baseline_s in (("torch", times[0]), ("sparse", sides["sparse"])):
            if baseline != side:
                yield paired_row(baseline_s, seconds, workload=name, side=side, baseline=baseline, config="default", optimizer=optimizer)


def measure_interaction(bench: Bench, name: str, threads: int, args: argparse.Namespace) -> Row:
    """The workload's interaction alone, forward and backward: torch's operations and the kernel."""
    torch.set_num_threads(threads)
    shape = bench.workloads.load_workloads()[name]
    spec = InteractionSpec(shape.num_tables + 1, shape.dim, "upper")
    generator = torch.Generator().manual_seed(args.seed)
    dense, lookups = (torch.randn(shape.batch_size, width, generator=generator).requires_grad_()
                      for width in (spec.dim, shape.num_tables * spec.dim))
    grad = torch.randn(shape.batch_size, spec.width, generator=generator)
    sides: list[Callable[[], Tensor]] = [
        lambda: interact(torch.cat([dense, lookups], dim=1).view(-1, spec.num_vectors, spec.dim), spec),
        lambda: dot_interaction(dense, lookups, spec.order)]
    both = [torch.autograd.grad(side(), (dense, lookups), grad) for side in sides]
    for want, got in zip(*both, strict=True):
        if not (want - got).norm() <= 1e-5 * want.norm():
            raise CheckFailed(f"{name}: the gradient of the interaction is off by {(want - got).norm() / want.norm():.1e}")

    def step(side: Callable[[], Tensor]) -> Callable[[int], Any]:
        return lambda _: torch.autograd.grad(side(), (dense, lookups), grad)

    # Read and written once each way: vectors, the output, their gradients.
    traffic = 4 * shape.batch_size * (3 * spec.num_vectors * spec.dim + 2 * spec.width)
    times = interleave([step(side) for side in sides], 1, args.reps, args.seed)
    return paired_row(*times.T, workload=f"{name} interaction alone", side="modules", config="", traffic_bytes=traffic)


def measure(bench: Bench, args: argparse.Namespace) -> Iterator[Row]:
    for name in args.workloads:
        for threads in args.threads:
            yield measure_interaction(bench, name, threads, args)
            for optimizer in args.optimizers:
                yield from measure_steps(bench, name, optimizer, threads, args)
                gc.collect()               # the tables of one pair of models at a time


def show(row: Row) -> str:
    return (f"{row.workload:22} {row.threads} threads  {row.side:28} {row.median_ms:8.2f} ms  {row.baseline:7} "
            f"{row.baseline_median_ms:8.2f} ms  {row.ratio:5.2f}x [{row.low:.2f}, {row.high:.2f}]")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=names, default=list(WORKLOADS), help=f"full steps; default: {','.join(WORKLOADS)}")
    parser.add_argument("--optimizers", type=names, default=["sgd"], help="of the tables; default: sgd")
    parser.add_argument("--compile", action="store_true", help="also the plan whose MLPs are compiled, which takes half a minute first")
    add_options(parser, "dense_part.csv", "timed steps of every side")
    args = parser.parse_args(arguments)
    if (bench := load_bench(args.bench_folder, args.workloads)) is None:
        return EXIT_NO_BENCH
    shapes = bench.workloads.load_workloads()
    if unknown := [name for name in args.workloads if name not in shapes or not shapes[name].dlrm]:
        parser.error(f"there is no full step {', '.join(unknown)}; there are {', '.join(name for name in shapes if shapes[name].dlrm)}")
    return run(measure(bench, args), show, args.out)


if __name__ == "__main__":
    sys.exit(main())
