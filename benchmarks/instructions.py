"""Instructions that each CPU kernel takes a lookup or row, counted by callgrind: no clock, so the same figure on a machine however busy.

A driver (instructions.cpp, instructions_free.cpp) is compiled with the kernels' own sources and the flags of setup.py, and run under
valgrind, which has no AVX-512: the portable and the AVX2 build are counted. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DRIVER = ("benchmarks/instructions.cpp", "benchmarks/instructions_free.cpp")
EXTENSIONS = tuple(f"sparselift.kernels.{name}" for name in ("_cpu", "_interaction", "_exchange"))
COUNTED = "counted"                       # the driver's function around a call that counts
DIMS = (16, 64, 100, 128)                 # 100: a partial vector at the end
NOT_IN_VALGRIND = ("avx512",)
ALLOWED = 0.03                            # growth that --check takes for no change: a count moves with the compiler's register choices
EXIT_GREW, EXIT_CANNOT_COUNT = 1, 3


class CannotCount(Exception):
    """A tool or an instruction set is missing, or the driver failed."""


@dataclass(frozen=True, slots=True)
class Count:
    """One line of the CSV."""

    kernel: str                           # and what it was called with
    isa: str
    dim: int
    instructions_per_lookup: float
    versions: str                         # of what decides it: compiler and C library

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.isa}, dim {self.dim}"


def versions() -> str:
    """The compiler as it names itself, and the C library, which has the portable build's fmaf."""
    return f"{run([compiler(), '--version']).splitlines()[0]}, {' '.join(platform.libc_ver())}"


def compiler() -> str:
    return os.environ.get("CXX", "g++")


@cache
def setup() -> dict[str, Any]:
    """What setup.py defines: sources and flags."""
    return runpy.run_path(str(ROOT / "setup.py"))


def kernel_sources() -> list[str]:
    """Of all extensions, each once."""
    return list(dict.fromkeys(source for extension in EXTENSIONS for source in setup()["KERNEL_SOURCES"][extension]))


def isa_of(source: str) -> str:
    """The instruction set that a source is a build for; "" where it is for all."""
    return Path(source).stem.rpartition("_")[2] if source in setup()["ISA_FLAGS"] else ""


def run(command: Sequence[str | Path]) -> str:
    """What a command prints. Raises CannotCount if it is missing or fails."""
    if shutil.which(command[0]) is None:
        raise CannotCount(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotCount(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def build(folder: Path, isas: Sequence[str]) -> Path:
    """Compiles the driver with the kernels of some instruction sets. Flags are the kernels' own, without those that Python's adds."""
    sources = [*DRIVER, *(source for source in kernel_sources() if isa_of(source) in ("", *isas))]
    flags = [*setup()["FLAGS"], "-fPIC", "-Icsrc"]

    def compiled(source: str) -> Path:
        made = folder / f"{source.replace('/', '.')}.o"
        run([compiler(), *flags, *setup()["ISA_FLAGS"].get(source, []), "-c", source, "-o", made])
        return made

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, sources))
    driver = folder / "instructions"
    run([compiler(), *objects, "-o", driver, "-ldl", "-lpthread"])
    return driver


def count(driver: Path, isa: str, dims: Sequence[int], kernels: Sequence[str]) -> list[Count]:
    """Every kernel at every dim, in one run: callgrind writes a part each time that it leaves COUNTED, and one at the end."""
    profile = driver.with_name(f"callgrind.{isa}")
    shown = run(["valgrind", "--quiet", "--tool=callgrind", "--collect-atstart=no", f"--toggle-collect={COUNTED}",
                 f"--dump-after={COUNTED}", "--combine-dumps=yes", f"--callgrind-out-file={profile}",
                 driver, isa, ",".join(map(str, dims)), *kernels])
    lines = [line.split("\t") for line in shown.splitlines()]
    totals = re.findall(r"^totals: (\d+)$", profile.read_text(), re.MULTILINE)
    if len(totals) != len(lines) + 1 or int(totals[-1]) != 0:
        raise CannotCount(f"callgrind wrote {len(totals)} parts of {len(lines)} runs, and counted {totals[-1:]} after them")
    made_by = versions()
    return [Count(kernel, isa, int(dim), round(int(total) / int(lookups), 2), made_by)
            for (kernel, dim, lookups), total in zip(lines, totals)]


def show(counts: Sequence[Count]) -> None:
    """A line for each kernel and instruction set, a column for each dim."""
    dims = sorted({each.dim for each in counts})
    found = {(each.kernel, each.isa, each.dim): each.instructions_per_lookup for each in counts}
    print(f"{'instructions a lookup':30} {'isa':9}" + "".join(f"{f'dim {dim}':>10}" for dim in dims))
    for kernel, isa in dict.fromkeys((each.kernel, each.isa) for each in counts):
        print(f"{kernel:30} {isa:9}" + "".join(f"{found[kernel, isa, dim]:10.1f}" for dim in dims))


def write(path: Path, counts: Sequence[Count]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Count)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, counts))


def read(path: Path) -> list[Count]:
    with path.open(newline="") as file:
        return [Count(line["kernel"], line["isa"], int(line["dim"]), float(line["instructions_per_lookup"]), line["versions"])
                for line in csv.DictReader(file)]


def compare(counts: Sequence[Count], recorded: Sequence[Count]) -> tuple[list[str], list[str]]:
    """(what grew, what else is worth a line). Counts of other versions are not compared."""
    before, grew, notes = {each.name: each for each in recorded}, [], []
    if others := {each.versions for each in recorded} - {each.versions for each in counts}:
        return [], [f"nothing compared: recorded with {'; '.join(sorted(others))}; this is {counts[0].versions}"]
    for each in counts:
        old = before.get(each.name)
        if old is None:
            notes.append(f"{each.name}: has no recorded count")
            continue
        change = each.instructions_per_lookup / old.instructions_per_lookup - 1
        line = f"{each.name}: {old.instructions_per_lookup} -> {each.instructions_per_lookup} instructions a lookup, {change:+.1%}"
        if change > ALLOWED:
            grew.append(line)
        elif change < -ALLOWED:
            notes.append(f"{line}: record it, or the gain may be lost unseen")
    return grew, notes


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=_names, default=None, help="those whose name contains one of these; default: all")
    parser.add_argument("--isas", type=_names, default=None, help="default: portable, and avx2 on x86")
    parser.add_argument("--dims", type=lambda text: [int(dim) for dim in _names(text)], default=list(DIMS),
                        help=f"default: {','.join(map(str, DIMS))}")
    parser.add_argument("--check", type=Path, metavar="CSV", help=f"fail if a count is more than {ALLOWED:.0%} above the one in it")
    parser.add_argument("--out", type=Path, metavar="CSV", help="write the counts to it")
    return parser


def _names(text: str) -> list[str]:
    return text.split(",")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    args = parser.parse_args(arguments)
    recorded = None if args.check is None else read(args.check)
    isas = args.isas or [isa for isa in setup()["ISAS"] if isa not in NOT_IN_VALGRIND]
    try:
        with tempfile.TemporaryDirectory() as folder:
            driver = build(Path(folder), isas)
            known = run([driver]).splitlines()
            kernels = [name for name in known if args.kernels is None or any(part in name for part in args.kernels)]
            if not kernels:
                parser.error(f"there is no kernel whose name contains {' or '.join(args.kernels)}; there are {', '.join(known)}")
            counts = [each for isa in isas for each in count(driver, isa, args.dims, kernels)]
    except CannotCount as reason:
        print(f"cannot count: {reason}", file=sys.stderr)
        return EXIT_CANNOT_COUNT
    show(counts)
    if args.out is not None:
        write(args.out, counts)
    if recorded is None:
        return 0
    grew, notes = compare(counts, recorded)
    for line in notes:
        print(f"note: {line}")
    for line in grew:
        print(f"grew: {line}", file=sys.stderr)
    return EXIT_GREW if grew else 0


if __name__ == "__main__":
    sys.exit(main())
