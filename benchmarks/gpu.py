"""The CUDA kernels on a GPU, in six minutes: built, held to their contract, then timed beside torch and what else is installed.

    python benchmarks/gpu.py                  on a machine with a GPU, nvcc, and a torch that has CUDA; or: tox -e gpu
    python benchmarks/gpu.py --dry            the same script without a GPU: over the emulator, tiny, with made-up times

Exit codes: 0 done; 1 a test or a check failed; 2 usage; 3 something is missing, and it says what; 4 time ran out before everything
was measured. The table comes last, whatever happened, and the rows are in a CSV file. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadline import Deadline, OutOfTime, run_within

ROOT = Path(__file__).resolve().parents[1]
EXIT_FAILED, EXIT_MISSING, EXIT_OUT_OF_TIME = 1, 3, 4
TOTAL_S, BUILD_SHARE, TESTS_SHARE = 330, 0.5, 0.35     # half a minute of the six is left for what cannot be cut
LEAST_CAPABILITY = (8, 0)
# The last two are what this imports: for a source tree in which nothing is built.
NEEDED = ("sparselift.kernels._cuda", "sparselift.kernels._cpu", "sparselift.runtime._hot")
TESTS = ("tests/contract", "tests/cuda/test_edge.py")
DRY_TESTS = ("tests/contract/test_kernels.py", "-k", "registered_classes or first_and_the_last")
WORKLOADS = ("W7", "W1", "exchange", "interaction", "W6a", "W6b", "W2", "W4", "W5", "W3")       # what the bars are about comes first
INSTALL_NVCC = ("install a CUDA toolkit, or make one, as docs/cuda.md says: pip install --no-deps --target toolkit "
                "-r csrc/cuda/toolkit.txt, and CUDA_HOME=toolkit/nvidia/cu13")


class Missing(Exception):
    """The machine or its software lacks something."""


@dataclass
class Report:
    """What a run found, to be shown when it ends."""

    rows: list[Any] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)

    def part(self, name: str, run: Callable[[], None]) -> bool:
        """Run one part; what goes wrong in it is noted, and the next one may run. Whether it was done."""
        from cases import CheckFailed

        say(f"{name} ...")
        try:
            run()
        except OutOfTime as reason:
            self.cuts.append(f"{name}: cut, {reason}")
        except CheckFailed as reason:
            self.failures.append(f"{name}: check failed: {reason}")
        except Exception as error:                             # what a kernel or a peer raises must not lose the rows before it
            self.failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
        else:
            return True
        say((self.cuts + self.failures)[-1])
        return False

    @property
    def exit_code(self) -> int:
        return EXIT_FAILED if self.failures else EXIT_OUT_OF_TIME if self.cuts else 0


def say(line: str) -> None:
    print(line, flush=True)


# ---------------------------------------------------------------------------------------------------------- what is here


def check_machine() -> tuple[int, int]:
    """The compute capability of torch's current device. Raises Missing, saying what to install."""
    try:
        import torch
    except ImportError as error:
        raise Missing(f"torch cannot be imported ({error}); install it with: pip install torch") from None
    if torch.version.cuda is None:
        raise Missing(f"torch {torch.__version__} is built for the processor alone; install a build with CUDA in its place: "
                      "pip uninstall torch, then pip install torch (on Linux it has CUDA)")
    if not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} finds no CUDA device; {driver_state()}")
    capability = torch.cuda.get_device_capability()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    say(f"device   {properties.name}, capability {capability[0]}.{capability[1]}, {properties.total_memory / 2**30:.0f} GiB; torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}")
    if capability < LEAST_CAPABILITY:
        raise Missing(f"the kernels need compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later; {properties.name} has "
                      f"{capability[0]}.{capability[1]}")
    return capability


def driver_state() -> str:
    """What nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi either: is the driver installed, and is the device passed into this container?"
    shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return f"nvidia-smi -L says: {' '.join((shown.stdout + shown.stderr).split()) or 'nothing'}"


# ---------------------------------------------------------------------------------------------------------- build


def package_folder() -> Path:
    """Of the sparselift that is measured: the installed one, else this checkout's."""
    spec = importlib.util.find_spec("sparselift")
    if spec is None:
        sys.path.append(str(ROOT))
        spec = importlib.util.find_spec("sparselift")
    assert spec is not None and spec.origin is not None, ROOT
    return Path(spec.origin).parent


def build(capability: tuple[int, int], deadline: Deadline) -> None:
    """The CUDA module for this device alone, into the package's folder, and what else a bare source tree lacks. Raises Missing."""
    from cuda_binary import build_modules

    if importlib.util.find_spec("Cython") is None or importlib.util.find_spec("setuptools") is None:
        raise Missing("the build needs cython and setuptools: pip install cython setuptools")
    nvcc = find_nvcc()
    folder = package_folder()
    names = [name for name in NEEDED if name == NEEDED[0] or not list(folder.parent.glob(f"{name.replace('.', '/')}.*.so"))]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            built = build_modules(Path(scratch), *names, timeout_s=deadline.left_s,
                                  SPARSELIFT_CUDA_ARCHITECTURES=str(architecture(nvcc, capability)))
        except subprocess.CalledProcessError as error:
            raise Missing(f"the build failed with {error.returncode}; what the compiler said is above") from None
        for path in built:
            shutil.copy2(path, folder.parent / path.relative_to(scratch))
    importlib.invalidate_caches()


def check_package(dry: bool) -> None:
    """Raises Missing where the package cannot be imported, or its CUDA kernels cannot run."""
    package_folder()
    try:
        importlib.import_module("sparselift.measure")
        cuda = importlib.import_module("sparselift.kernels.cuda")
    except ImportError as error:
        raise Missing(f"sparselift cannot be imported: {error}") from None
    if dry:
        return
    try:
        cuda.extension()
    except cuda.KernelError as error:
        raise Missing(str(error)) from None


def find_nvcc() -> Path:
    """As setup.py does. Raises Missing."""
    import runpy

    try:
        found = runpy.run_path(str(ROOT / "setup.py"))["find_nvcc"]()
    except SystemExit as reason:                               # a variable of the build that says what cannot be done
        raise Missing(str(reason)) from None
    if found is None:
        raise Missing(f"there is no nvcc in CUDA_HOME, on PATH or among the wheels of this Python; {INSTALL_NVCC}")
    return Path(found)


def architecture(nvcc: Path, capability: tuple[int, int]) -> int:
    """The device's own, or the latest before it that this nvcc knows, whose PTX the driver then compiles."""
    own = 10 * capability[0] + capability[1]
    shown = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    known = [int(number) for number in re.findall(r"^sm_(\d+)$", shown, re.MULTILINE)]
    return max((number for number in known if number <= own), default=own)


# ---------------------------------------------------------------------------------------------------------- tests


def run_tests(backend: str, chosen: Sequence[str], deadline: Deadline) -> None:
    """The contract of kernel backends on one of them, which must be there. Raises AssertionError for failures, or where nothing ran."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        environment = {**os.environ, "SPARSELIFT_CONTRACT_BACKEND": backend, "PYTHONPATH": str(package_folder().parent)}
        # -P: the folder that this runs in may hold a checkout in which nothing is built.
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", results, *chosen]
        status = run_within(deadline.left_s, command, cwd=ROOT, env=environment)
        counted = count_tests(results)
    say(f"tests    {counted['passed']} passed, {counted['failed']} failed, {counted['skipped']} skipped on {backend}")
    assert status == 0 and counted["failed"] == 0, f"{counted['failed']} tests failed on {backend} (pytest ended with {status})"
    assert counted["passed"] > 0, f"no test ran on {backend}"


def count_tests(results: Path) -> dict[str, int]:
    """Of pytest's JUnit file; nothing where it wrote none."""
    suites = ElementTree.parse(results).getroot().iter("testsuite") if results.exists() else []
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


# ---------------------------------------------------------------------------------------------------------- timing


def time_everything(report: Report, args: argparse.Namespace, deadline: Deadline) -> None:
    """Every workload with a share of what is left; what was not measured leaves its time to the others."""
    import gpu_timing
    from gpu_cases import SHAPES
    from gpu_machine import DryRun, Gpu

    machine = DryRun() if args.dry else Gpu()
    copy = gpu_timing.copy_row(machine)
    keep(report, args, [copy])
    parts = [(name, optimizer) for name in args.workloads for optimizer in (SHAPES[name].optimizers if name in SHAPES else ("",))
             if not optimizer or optimizer in args.optimizers]
    for done, (name, optimizer) in enumerate(parts):
        own = deadline.part(1 / (len(parts) - done))
        rows = (gpu_timing.measure_workload(machine, name, optimizer, copy.gbps, args, own) if name in SHAPES
                else gpu_timing.measure_operations(machine, name, copy.gbps, args, own))
        report.part(f"{name} {optimizer}".rstrip(), lambda rows=rows: keep(report, args, rows))
        del rows                                               # and with it the tables of its sides
        machine.release()


def keep(report: Report, args: argparse.Namespace, rows: Iterable[Any]) -> None:
    """Each row as soon as it is there: in the file, and said."""
    from interleave import write_rows

    for row in rows:
        report.rows.append(row)
        write_rows(args.out, report.rows)
        say(line(row))


def line(row: Any) -> str:
    """A row of the table."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f} [{row.low:.2f}, {row.high:.2f}]"
    beside = "" if row.baseline_median_ms is None else f"{row.baseline_median_ms:.3f}"
    counts = ["" if count is None else count for count in (row.launches, row.synchronizations)]
    return columns(row.workload, row.optimizer, f"{row.median_ms:.3f}", f"{row.gbps:.1f}", f"{row.gbps / row.peak_gbps:.0%}", row.baseline,
                   beside, ratio, *counts)


def columns(workload: str, optimizer: str, ours_ms: str, gbps: str, share: str, baseline: str, beside_ms: str, ratio: str,
            launches: object, waits: object) -> str:
    return (f"{workload:26} {optimizer:15} {ours_ms:>9} {gbps:>8} {share:>7}  {baseline:8} {beside_ms:>9} {ratio:>20} {launches:>8} "
            f"{waits:>5}").rstrip()


HEAD = columns("", "optimizer", "ours, ms", "GB/s", "of copy", "beside", "its ms", "times as fast", "launches", "waits")


def show(report: Report, args: argparse.Namespace) -> None:
    """What went wrong, then the table."""
    for text in (*report.cuts, *report.failures):
        say(text)
    if report.rows:
        say(f"\n{report.rows[0].device}; rows in {args.out}")
        say("\n".join([HEAD, *map(line, report.rows)]))
    if args.dry:
        say("DRY RUN: no time or bandwidth above is a measurement")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="over the emulator, with tiny shapes and made-up times")
    parser.add_argument("--build", action=argparse.BooleanOptionalAction, default=True, help="--no-build takes the module that is there")
    parser.add_argument("--tests", action=argparse.BooleanOptionalAction, default=True, help="run the contract tests on the device first")
    parser.add_argument("--workloads", type=_names, default=list(WORKLOADS), help=f"default: {','.join(WORKLOADS)}")
    parser.add_argument("--optimizers", type=_names, default=["sgd", "rowwise_adagrad"], help="default: sgd,rowwise_adagrad")
    parser.add_argument("--peers", type=_names, default=["fbgemm", "torchrec"], help="where installed; default: fbgemm,torchrec")
    parser.add_argument("--reps", type=int, default=25, help="timed steps of every side, if time allows; default: 25")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help=f"for everything, the build included; default: {TOTAL_S}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gpu.csv"))
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"there is no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    deadline, report = Deadline(args.seconds), Report()
    try:
        if not args.dry:
            capability = check_machine()
            if args.build:
                say("build ...")
                build(capability, deadline.part(BUILD_SHARE))
        check_package(args.dry)
    except (Missing, OutOfTime) as reason:
        say(f"cannot run: {reason}")
        return EXIT_MISSING if isinstance(reason, Missing) else EXIT_OUT_OF_TIME
    say(f"built    {deadline.seconds - deadline.left_s:.0f} s after the start")
    try:
        if args.tests:
            backend, chosen = ("simt-forward", DRY_TESTS) if args.dry else ("cuda", TESTS)
            report.part("tests", lambda: run_tests(backend, chosen, deadline.part(TESTS_SHARE)))
        report.part("timing", lambda: time_everything(report, args, deadline))
    finally:                                                   # Ctrl-C keeps what was measured, too
        show(report, args)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
