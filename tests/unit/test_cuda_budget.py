"""The static budget of the CUDA kernels: what fails it, and that the numbers are the compiler's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.scripts import BENCHMARKS, ROOT, importable

SAMPLE = """
namespace sparselift::cuda {
template <int kRows>
__global__ void __launch_bounds__(128) sample_forward_kernel(float4* out, const float4* in) {
    __shared__ float4 tile[128];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[kRows - threadIdx.x];
}
template __global__ void sample_forward_kernel<127>(float4*, const float4*);
__global__ void narrow_kernel(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x]; }
"""
SPILLING = """
__global__ void __launch_bounds__(1024, 2) spilling_kernel(float* out, const float* in) {
    float values[64];
    for (int i = 0; i < 64; ++i) values[i] = in[threadIdx.x + i * 7];
    for (int turn = 0; turn < 9; ++turn) {
#pragma unroll
        for (int i = 0; i < 64; ++i) values[i] = values[i] * values[(i + 7) % 64] + in[turn];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) out[threadIdx.x * 64 + i] = values[i];
}
"""


@pytest.fixture
def budget() -> Iterator[ModuleType]:
    with importable(BENCHMARKS):
        import cuda_budget
        yield cuda_budget


@pytest.fixture
def kernel(budget: ModuleType) -> object:
    return budget.Kernel("bag_forward_kernel<float, 4>", 80, registers=60, stack_bytes=0, local_accesses=0, shared_bytes=512, loads_128=8,
                         stores_128=2, block_threads=256, occupancy_percent=50)


@pytest.fixture
def toolkit(budget: ModuleType) -> object:
    from cuda_binary import Toolkit, ToolMissing
    try:
        return Toolkit.find()
    except ToolMissing as missing:
        pytest.skip(str(missing))


def setup_flags() -> list[str]:
    """NVCC_FLAGS of setup.py, for one architecture."""
    code = ("import runpy, setuptools; setuptools.setup = lambda **_: None\n"
            "print(*runpy.run_path('setup.py')['NVCC_FLAGS'], sep='\\n')")
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    flags = [line for line in shown.splitlines() if line.startswith("-")]
    return [flag for flag in flags if not flag.startswith("-gencode") or "code=sm_80" in flag]


def compiled(toolkit: object, source: str, folder: Path, flags: list[str]) -> tuple[Path, subprocess.CompletedProcess[str]]:
    (folder / "sample.cu").write_text(source)
    command = [toolkit.home / "bin" / "nvcc", *flags, "-c", folder / "sample.cu", "-o", folder / "sample.o"]
    return folder / "sample.o", subprocess.run(command, capture_output=True, text=True)


def test_a_budget_comes_back_from_its_file(budget: ModuleType, kernel: object, tmp_path: Path) -> None:
    kernels = [kernel, replace(kernel, architecture=90, registers=64)]
    budget.write(tmp_path / "budget.csv", "13.5.37", kernels)
    assert budget.read(tmp_path / "budget.csv") == ("13.5.37", kernels)


@pytest.mark.parametrize(("column", "worse", "better"), [("registers", 61, 59), ("stack_bytes", 8, None), ("shared_bytes", 513, 0),
                                                         ("loads_128", 7, 9), ("stores_128", 1, 3), ("occupancy_percent", 49, 62)])
def test_a_kernel_that_got_worse_fails(budget: ModuleType, kernel: object, column: str, worse: int, better: int | None) -> None:
    limit = getattr(kernel, column)
    failures = budget.regressions([kernel], [replace(kernel, **{column: worse})])
    assert len(failures) == 1
    assert failures[0].startswith("bag_forward_kernel<float, 4>, sm_80: ")
    assert column in failures[0] and f"{limit}; got {worse}" in failures[0]
    assert budget.regressions([kernel], [kernel]) == []
    if better is not None:
        assert budget.regressions([kernel], [replace(kernel, **{column: better})]) == []


def test_kernels_that_came_or_went_fail(budget: ModuleType, kernel: object) -> None:
    other = replace(kernel, name="coalesce_kernel")
    assert budget.regressions([kernel], [kernel, other]) == ["coalesce_kernel, sm_80: is not in the budget"]
    assert budget.regressions([kernel, other], [kernel]) == ["coalesce_kernel, sm_80: is in the budget alone"]


def test_rules_hold_whatever_the_budget_says(budget: ModuleType, kernel: object) -> None:
    assert budget.rule_failures([kernel]) == []
    assert "3 loads and stores of local memory" in budget.rule_failures([replace(kernel, local_accesses=3)])[0]
    assert "at least 50%; got 49% with 60 registers" in budget.rule_failures([replace(kernel, occupancy_percent=49)])[0]
    for name in (kernel.name, "bag_max_kernel<float>", "long_bags_kernel<float>", "long_maxima_kernel<float>"):
        assert "has no such load" in budget.rule_failures([replace(kernel, name=name, loads_128=0)])[0]
    assert budget.rule_failures([replace(kernel, name="coalesce_kernel", occupancy_percent=12, loads_128=0)]) == []


def test_another_compiler_is_held_to_the_rules_alone(budget: ModuleType, kernel: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(budget, "BUDGET", tmp_path / "budget.csv")
    budget.write(tmp_path / "budget.csv", "13.5.37", [kernel])
    more = replace(kernel, registers=61)
    assert budget.report("13.5.37", [more]) == 1
    assert budget.report("13.0.88", [more]) == 0
    assert budget.report("13.0.88", [replace(more, local_accesses=1)]) == 1
    assert "the budget is of nvcc 13.5.37" in capsys.readouterr().out


def test_the_budget_itself_keeps_the_rules(budget: ModuleType) -> None:
    release, kernels = budget.read(budget.BUDGET)
    assert release == re.findall(r"^nvidia-cuda-nvcc==(.+)$", (ROOT / "csrc" / "cuda" / "toolkit.txt").read_text(), re.MULTILINE)[0]
    assert {kernel.architecture for kernel in kernels} == {80, 90, 100}
    assert any("forward" in kernel.name for kernel in kernels)
    assert budget.rule_failures(kernels) == []


def test_names_lose_namespaces_and_parameters(budget: ModuleType) -> None:
    from cuda_binary import short
    name = "void sparselift::cuda::(anonymous namespace)::bag_kernel<float, (int)4>(sparselift::cuda::Args)"
    assert short(name) == "bag_kernel<float, (int)4>"
    assert short("sparselift::cuda::put_kernel(sparselift::cuda::PutArgs)") == "put_kernel"


@pytest.mark.slow
def test_numbers_are_the_compilers(budget: ModuleType, toolkit: object, tmp_path: Path) -> None:
    module, done = compiled(toolkit, SAMPLE + "}\n", tmp_path, setup_flags())
    assert done.returncode == 0, done.stderr
    narrow, wide = budget.read_kernels(toolkit, module, tmp_path)
    assert (narrow.name, narrow.loads_128, narrow.stores_128, narrow.shared_bytes, narrow.block_threads) == ("narrow_kernel", 0, 0, 0, 256)
    assert (wide.name, wide.loads_128, wide.stores_128, wide.shared_bytes, wide.block_threads) == (
        "sample_forward_kernel<127>", 1, 1, 2048, 128)
    assert all(kernel.architecture == 80 and 4 <= kernel.registers <= 32 and kernel.occupancy_percent == 100 for kernel in (narrow, wide))
    assert budget.rule_failures([narrow, wide]) == []


@pytest.mark.slow
def test_a_spill_is_an_error_of_the_build_and_of_the_budget(budget: ModuleType, toolkit: object, tmp_path: Path) -> None:
    flags = setup_flags()
    _, refused = compiled(toolkit, SPILLING, tmp_path, flags)
    assert refused.returncode != 0
    assert "spill" in refused.stderr
    source = f"namespace sparselift::cuda {{ {SPILLING} }}\n"
    module, done = compiled(toolkit, source, tmp_path, [flag for flag in flags if "spill" not in flag])
    assert done.returncode == 0, done.stderr
    failures = budget.rule_failures(budget.read_kernels(toolkit, module, tmp_path))
    assert len(failures) == 1
    assert "spilling_kernel, sm_80" in failures[0]
