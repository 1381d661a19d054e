"""Instruction counts of the kernels: repeatable, recorded for every kernel, and a check that sees growth."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sparselift.kernels import available_backends
from tests.unit.scripts import BENCHMARKS, importable

RECORDED = BENCHMARKS / "instructions.csv"
KERNELS = ["forward sum", "update rowwise_adagrad sort"]
DIMS = [16, 100]


@pytest.fixture(scope="module")
def instructions() -> Iterator[ModuleType]:
    """The script."""
    with importable(BENCHMARKS):
        import instructions
        yield instructions


@pytest.fixture(scope="module")
def isa() -> str:
    return "avx2" if "cpu-avx2" in available_backends() else "portable"


@pytest.fixture(scope="module")
def driver(instructions: ModuleType, isa: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("valgrind", instructions.compiler()):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    return instructions.build(tmp_path_factory.mktemp("driver"), [isa])


@pytest.fixture
def check(instructions: ModuleType, driver: Path, isa: str, monkeypatch: pytest.MonkeyPatch):
    """Runs the script with --check against the given counts, and gives its exit code. Builds nothing again."""
    monkeypatch.setattr(instructions, "build", lambda folder, isas: driver)

    def checked(recorded: Path) -> int:
        return instructions.main(["--isas", isa, "--kernels", ",".join(KERNELS), "--dims", ",".join(map(str, DIMS)),
                                  "--check", str(recorded)])
    return checked


@pytest.mark.slow
def test_recorded_counts_hold(check, capsys: pytest.CaptureFixture[str]) -> None:
    code = check(RECORDED)
    assert code == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert all(kernel in shown for kernel in KERNELS)


@pytest.mark.slow
def test_every_kernel_is_recorded(instructions: ModuleType, driver: Path) -> None:
    known = instructions.run([driver]).splitlines()
    expected = {(kernel, isa, dim) for kernel in known for isa in ("portable", "avx2") for dim in instructions.DIMS}
    assert {(each.kernel, each.isa, each.dim) for each in instructions.read(RECORDED)} == expected


@pytest.mark.slow
def test_counts_are_the_same_at_every_run(instructions: ModuleType, driver: Path, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stack begins elsewhere."""
    once = instructions.count(driver, isa, DIMS, KERNELS)
    monkeypatch.setenv("SOMETHING_ELSE", "x" * 1000)
    assert instructions.count(driver, isa, DIMS, KERNELS) == once
    assert [(each.kernel, each.dim) for each in once] == [(kernel, dim) for dim in DIMS for kernel in KERNELS]
    wide, narrow = (next(each for each in once if each.dim == dim).instructions_per_lookup for dim in (100, 16))
    assert 0 < narrow < wide


@pytest.mark.slow
def test_the_check_names_what_grew(instructions: ModuleType, driver: Path, isa: str, check, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    changes = {(KERNELS[0], 16): 1.04, (KERNELS[0], 100): 1.02, (KERNELS[1], 16): 0.9, (KERNELS[1], 100): 1.0}
    counts = [dataclasses.replace(each, instructions_per_lookup=each.instructions_per_lookup / changes[each.kernel, each.dim])
              for each in instructions.count(driver, isa, DIMS, KERNELS)]
    instructions.write(tmp_path / "before.csv", counts)
    assert check(tmp_path / "before.csv") == instructions.EXIT_GREW == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [line for line in shown.err.splitlines() if line.startswith(f"grew: {KERNELS[0]}, {isa}, dim 16: ")]
    assert shown.err.count("+4.0%") == 1
    assert f"note: {KERNELS[1]}, {isa}, dim 16: " in shown.out and "record it" in shown.out


@pytest.mark.slow
def test_counts_of_another_compiler_are_not_compared(instructions: ModuleType, driver: Path, isa: str, check, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    counts = [dataclasses.replace(each, instructions_per_lookup=each.instructions_per_lookup / 2, versions="g++ 1.0")
              for each in instructions.count(driver, isa, DIMS, KERNELS)]
    instructions.write(tmp_path / "before.csv", counts)
    assert check(tmp_path / "before.csv") == 0
    assert f"note: nothing compared: recorded with g++ 1.0; this is {instructions.versions()}" in capsys.readouterr().out


def test_a_kernel_without_a_record_is_named(instructions: ModuleType) -> None:
    new, old = (instructions.Count(name, "avx2", 16, 10.0, "g++ 1.0") for name in ("new", "old"))
    assert instructions.compare([new, old], [old]) == ([], ["new, avx2, dim 16: has no recorded count"])


def test_without_a_compiler_nothing_is_counted(instructions: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert instructions.main([]) == instructions.EXIT_CANNOT_COUNT == 3
    assert capsys.readouterr().err == "cannot count: no-such-compiler is not installed\n"
