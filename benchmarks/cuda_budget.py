"""Registers, spills, occupancy and wide loads of every CUDA kernel, held to the budget in csrc/cuda/budget.csv.

    python benchmarks/cuda_budget.py                      print what the compiler makes of the kernels
    python benchmarks/cuda_budget.py --check              and fail where a kernel is worse than its budget
    python benchmarks/cuda_budget.py --write              and make that the budget

No GPU is needed. The tools are NVIDIA's wheels (docs/cuda.md) or a toolkit that CUDA_HOME names; without them the exit code is 3.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path

from cuda_binary import ROOT, Kernel, Toolkit, ToolMissing, read_kernels

BUDGET = ROOT / "csrc" / "cuda" / "budget.csv"
MIN_FORWARD_OCCUPANCY_PERCENT = 50
FORWARD_WORDS = ("forward", "bag", "maxima")       # one of them is in the name of every kernel of a forward
COLUMNS = ["nvcc", *(field.name for field in fields(Kernel))]


def write(path: Path, release: str, kernels: Iterable[Kernel]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({"nvcc": release, **asdict(kernel)} for kernel in kernels)


def read(path: Path) -> tuple[str, list[Kernel]]:
    """The compiler's release and the kernels of a budget."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    releases = {row.pop("nvcc") for row in rows}
    if len(releases) != 1:
        raise ValueError(f"{path}: one nvcc release a budget; got {sorted(releases)}")
    return releases.pop(), [Kernel(row.pop("name"), **{name: int(value) for name, value in row.items()}) for row in rows]


def rule_failures(kernels: Iterable[Kernel]) -> list[str]:
    """What no budget allows: spills anywhere, forward kernels with few warps or without wide loads."""
    failures = []
    for kernel in kernels:
        where = f"{kernel.name}, sm_{kernel.architecture}"
        if kernel.local_accesses:
            failures.append(f"{where}: {kernel.local_accesses} loads and stores of local memory, where spilled registers go")
        if not any(word in kernel.name for word in FORWARD_WORDS):
            continue
        if kernel.occupancy_percent < MIN_FORWARD_OCCUPANCY_PERCENT:
            failures.append(f"{where}: occupancy of a forward kernel must be at least {MIN_FORWARD_OCCUPANCY_PERCENT}%; "
                            f"got {kernel.occupancy_percent}% with {kernel.registers} registers")
        if kernel.loads_128 == 0:
            failures.append(f"{where}: a forward kernel must load 128 bits at a time; it has no such load")
    return failures


def regressions(budget: Iterable[Kernel], kernels: Iterable[Kernel]) -> list[str]:
    """Where kernels are worse than their budget, are not in it, or are only in it."""
    allowed = {(kernel.name, kernel.architecture): kernel for kernel in budget}
    present = {(kernel.name, kernel.architecture): kernel for kernel in kernels}
    failures = [f"{name}, sm_{architecture}: is in the budget alone" for name, architecture in sorted(allowed.keys() - present.keys())]
    for key, kernel in sorted(present.items()):
        where = f"{kernel.name}, sm_{kernel.architecture}"
        if key not in allowed:
            failures.append(f"{where}: is not in the budget")
            continue
        for column, more_is_worse in (("registers", True), ("stack_bytes", True), ("shared_bytes", True), ("loads_128", False),
                                      ("stores_128", False), ("occupancy_percent", False)):
            limit, got = getattr(allowed[key], column), getattr(kernel, column)
            if got > limit if more_is_worse else got < limit:
                failures.append(f"{where}: {column} must be at {'most' if more_is_worse else 'least'} {limit}; got {got}")
    return failures


def show(release: str, kernels: list[Kernel]) -> str:
    """A table: a line a kernel and architecture."""
    head = ["kernel", "sm", "regs", "stack", "local", "shared", "ld128", "st128", "block", "occ%"]
    rows = [[kernel.name, *(str(value) for value in list(asdict(kernel).values())[1:])] for kernel in kernels]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
             for row in [head, *rows]]
    return "\n".join([*lines, f"nvcc {release}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", type=Path, help="a built module or object file; default: builds the sources")
    parser.add_argument("--out", type=Path, help="a CSV file to write")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 where a kernel is worse than {BUDGET.relative_to(ROOT)}")
    parser.add_argument("--write", action="store_true", help="make the result the budget")
    arguments = parser.parse_args()
    try:
        toolkit = Toolkit.find()
    except ToolMissing as missing:
        print(missing, file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as scratch:
        module = arguments.module or toolkit.build(Path(scratch))
        kernels = read_kernels(toolkit, module, Path(scratch))
    release = toolkit.release()
    print(show(release, kernels))
    for path in ([arguments.out] if arguments.out else []) + ([BUDGET] if arguments.write else []):
        write(path, release, kernels)
    return report(release, kernels) if arguments.check else 0


def report(release: str, kernels: list[Kernel]) -> int:
    """Prints what fails; 1 if anything does. Another compiler allocates registers otherwise: it is held to the rules alone."""
    budget_release, budget = read(BUDGET)
    failures = rule_failures(kernels)
    if release == budget_release:
        failures += regressions(budget, kernels)
    else:
        print(f"the budget is of nvcc {budget_release}: only its rules are checked")
    print("\n".join(failures) or "within the budget")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
