"""What the scripts that time the shared benchmark's workloads have in common: their options, and rows shown and written one by one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cases import Bench, CheckFailed
from interleave import Row, write_rows

BENCH = Path(__file__).resolve().parents[2] / "shared" / "bench"
EXIT_CHECK_FAILED, EXIT_NO_BENCH = 1, 3


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def counts(text: str) -> list[int]:
    return [int(count) for count in names(text)]


def add_options(parser: argparse.ArgumentParser, out: str, reps: str) -> None:
    """The options of all of them; `out` is where rows go by default, and `reps` says what is repeated."""
    parser.add_argument("--threads", type=counts, default=[1, 2], help="default: 1,2")
    parser.add_argument("--reps", type=int, default=31, help=f"{reps}; default: 31")
    parser.add_argument("--bench-folder", type=Path, default=BENCH, help="where workloads.py and workloads.json are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(out), help=f"default: {out}")


def load_bench(folder: Path, wanted: Sequence[str]) -> Bench | None:
    """The shared benchmark. None, and a line that says which workloads are skipped, where it is not there."""
    try:
        return Bench.load(folder)
    except FileNotFoundError as reason:
        print(f"skipped {', '.join(wanted)}: {reason}", file=sys.stderr)
        return None


def run(rows: Iterable[Row], show: Callable[[Row], str], out: Path) -> int:
    """The exit code. What was measured is on the screen and in the file at once, so that nothing is lost when it ends early."""
    measured: list[Row] = []
    try:
        for row in rows:
            measured.append(row)
            print(show(row), flush=True)
            write_rows(out, measured)
    except CheckFailed as reason:
        print(f"check failed: {reason}", file=sys.stderr)
        return EXIT_CHECK_FAILED
    return 0
