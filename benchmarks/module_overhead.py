"""Our embedding modules in place of torch's, interleaved in one process: what a call costs, and a training step on large tables.

`tiny` cases look up 4 bags of 2 ids in rows of 8: what is timed is Python and autograd, a block of calls at a time. The shared
benchmark's workloads run forward, `output.backward(output_grad)` and torch.optim.SGD, one module a table; their two sides are
checked against each other before timing. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import Bench, Case, Side, check
from command import EXIT_NO_BENCH, add_options, load_bench, names, run
from interleave import Row, interleave, paired_row
from torch import Tensor, nn

import sparselift as sl

TINY, WORKLOADS = "tiny", ("W1", "W2", "W3", "W4", "W5")
CALLS = 200                               # a block
ROWS, DIM, BAGS, LENGTH = 1000, 8, 4, 2

Call = Callable[[], Any]


def tiny_cases() -> Iterator[tuple[str, str, Callable[[Any, Any], Call]]]:
    """(name, config, what makes the call of a pair of namespaces: modules and functions)."""
    matrix = torch.randint(0, ROWS, (BAGS, LENGTH))
    ids, starts = matrix.reshape(-1), torch.arange(0, BAGS * LENGTH, LENGTH)
    factors = torch.rand(BAGS * LENGTH)
    bags = {"offsets": (ids, starts), "matrix": (matrix,), "weighted": (ids, starts, factors)}
    for form, batch in bags.items():
        for sparse in (True, False):
            for kind in ("inference", "forward", "backward"):
                options = {"mode": "sum", "sparse": sparse}
                yield f"tiny EmbeddingBag {kind}", f"{form}, sparse={sparse}", _module_call("EmbeddingBag", kind, batch, options)
    for sparse in (True, False):
        for kind in ("inference", "forward", "backward"):
            yield f"tiny Embedding {kind}", f"sparse={sparse}", _module_call("Embedding", kind, (matrix,), {"sparse": sparse})
    weight = torch.randn(ROWS, DIM)
    yield "tiny functional.embedding_bag inference", "offsets", lambda _, functions: lambda: functions.embedding_bag(ids, weight, starts)
    yield "tiny functional.embedding inference", "", lambda _, functions: lambda: functions.embedding(matrix, weight)


def _module_call(name: str, kind: str, batch: tuple[Tensor, ...], options: dict[str, Any]) -> Callable[[Any, Any], Call]:
    def make(modules: Any, _: Any) -> Call:
        module = getattr(modules, name)(ROWS, DIM, **options)
        if kind == "inference":
            module.requires_grad_(False)
        if kind != "backward":
            return lambda: module(*batch)
        arrived = torch.ones_like(module(*batch))

        def backward() -> None:
            module(*batch).backward(arrived)
            module.weight.grad = None

        return backward

    return make


def measure_tiny(reps: int, seed: int) -> Iterator[Row]:
    """One thread: tiny inputs have no work to share."""
    torch.set_num_threads(1)
    for name, config, make in tiny_cases():
        sides = [_block(make(modules, functions)) for modules, functions in ((nn, nn.functional), (sl.nn, sl.functional))]
        times = interleave(sides, 1, reps, seed) / CALLS
        yield paired_row(*times.T, workload=name, side="modules", config=config)


def _block(call: Call) -> Callable[[int], None]:
    def block(_: int) -> None:
        for _ in range(CALLS):
            call()

    return block


def measure_large(bench: Bench, name: str, threads: int, reps: int, seed: int) -> Row:
    """A training step with one module a table, torch's and ours."""
    torch.set_num_threads(threads)
    case = Case(bench, bench.workloads.load_workloads()[name], "sgd", seed)
    native, ours = case.side(planned=False), with_our_modules(case.side(planned=False))
    check(native, ours)
    times = interleave([native.step, ours.step], len(case.batches), reps, seed)
    return paired_row(*times.T, workload=name, side="modules", config="", optimizer="sgd", traffic_bytes=case.traffic_bytes())


def with_our_modules(side: Side) -> Side:
    """The side, its weights and its optimizers, with our module in place of every torch's."""
    for position, bag in enumerate(side.model.emb_l):
        module = sl.nn.EmbeddingBag(*bag.weight.shape, mode=bag.mode, sparse=bag.sparse, _weight=bag.weight.detach())
        module.weight = bag.weight
        side.model.emb_l[position] = module
    return side


def measure(bench: Bench | None, args: argparse.Namespace) -> Iterator[Row]:
    """`bench`: None where none of its workloads is asked for."""
    if TINY in args.workloads:
        yield from measure_tiny(args.reps, args.seed)
    if bench is None:
        return
    for name in _shared(args):
        for threads in args.threads:
            yield measure_large(bench, name, threads, args.reps, args.seed)
            gc.collect()


def _shared(args: argparse.Namespace) -> list[str]:
    return [name for name in args.workloads if name != TINY]


def show(row: Row) -> str:
    return (f"{row.workload:42} {row.config:24} {row.threads} threads  torch {row.baseline_median_ms:9.4f} ms  "
            f"ratio {row.ratio:5.2f} [{row.low:.2f}, {row.high:.2f}]")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=names, default=[TINY, *WORKLOADS],
                        help=f"{TINY}, and of the shared benchmark, whose alone --threads is; default: {','.join((TINY, *WORKLOADS))}")
    add_options(parser, "module_overhead.csv", "pairs of blocks, or of steps")
    args = parser.parse_args(arguments)
    bench = load_bench(args.bench_folder, _shared(args)) if _shared(args) else None
    if _shared(args) and bench is None:
        return EXIT_NO_BENCH
    return run(measure(bench, args), show, args.out)


if __name__ == "__main__":
    sys.exit(main())
