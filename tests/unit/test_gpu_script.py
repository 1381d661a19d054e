"""benchmarks/gpu.py: the whole script over the emulator, and what it says and does where something is missing, wrong, or takes too long."""

from __future__ import annotations

import configparser
import csv
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.scripts import BENCHMARKS, ROOT, importable


@pytest.fixture
def gpu() -> Iterator[ModuleType]:
    """The script, importable."""
    with importable(BENCHMARKS):
        import gpu
        yield gpu


def stand_in(kind: type[torch.optim.Optimizer]) -> type:
    """A peer in the shape of FBGEMM's: torch's modules under the peer's interface."""
    class StandIn:
        def __init__(self, shape: Any, weights: Any, optimizer: str) -> None:
            self.tables = [torch.nn.Parameter(table) for table in weights.tables]
            self.optimizer = kind(self.tables, lr=0.01)

        def forward(self, batch: Any) -> torch.Tensor:
            return torch.cat([torch.nn.functional.embedding_bag(ids, table, starts, mode="sum", sparse=True)
                              for ids, table, starts in zip(batch.table_indices, self.tables, batch.table_offsets)], dim=1)

        def backward(self, output: torch.Tensor, grad: torch.Tensor) -> None:
            output.backward(grad)

        def step(self) -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    return StandIn


@pytest.mark.slow
def test_the_script_runs_dry(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """All of it but the calls of a device: tests, checks, timing of every phase beside torch and a peer, the table, the file."""
    import device_peers
    monkeypatch.setattr(device_peers, "FbgemmPeer", stand_in(torch.optim.SGD))
    out = tmp_path / "gpu.csv"
    assert gpu.main(["--dry", "--workloads", "W2,exchange,interaction,W6b", "--optimizers", "sgd", "--peers", "fbgemm", "--reps", "7",
                     "--seconds", "1500", "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    steps = [(phase, baseline) for phase in ("forward", "backward and update", "step") for baseline in ("torch", "fbgemm")]
    assert [(row["workload"], row["baseline"]) for row in rows[:8]] == [
        ("copy", ""), *((f"W2 {phase}", baseline) for phase, baseline in steps), ("W2 lookups alone", "")]
    assert [row["workload"] for row in rows[8:]] == [
        "dedup, uniform ids", "dedup, skewed ids", "bucketize",
        *(f"{name}, {kind}" for kind in ("float32", "float16", "bfloat16", "int8") for name in ("pack", "unpack")),
        "regroup", "regroup, backward",
        *(f"{name} interaction{phase}" for name in ("W6a", "W6b") for phase in ("", ", backward")),
        *(f"W6b {phase}" for phase in ("forward", "backward and update", "step", "lookups alone"))]
    counted = [row for row in rows if row["launches"]]
    assert len(counted) == 2 + 13 + 4 + 1 and all(int(row["launches"]) > 0 and row["synchronizations"] == "0" for row in counted)
    assert {row["device"] for row in rows} == {"dry run: an emulator and made-up times"}
    shown = capfd.readouterr().out.splitlines()
    assert shown[-1] == "DRY RUN: no time or bandwidth above is a measurement"
    assert [line.split("  ")[0] for line in shown[-1 - len(rows):-1]] == [row["workload"] for row in rows]
    assert any(line.endswith("0 failed, 0 skipped on simt-forward") and " 0 passed" not in line for line in shown)


def test_a_check_that_fails_and_time_that_runs_out_cost_no_row(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_machine
    import gpu_timing
    from cases import CheckFailed
    from deadline import OutOfTime
    from interleave import single_row
    row = replace(single_row([1.0], workload="w", side="kernels", config="", optimizer="sgd", traffic_bytes=10, peak_gbps=2.0), device="d")
    ends: dict[str, Exception | None] = {"W7": CheckFailed("row 3"), "W1": OutOfTime("a rep takes 9 s"), "W2": None,
                                         "W4": RuntimeError("CUDA\nerror")}

    def measure(machine: Any, name: str, *_: object) -> Iterator[object]:
        yield replace(row, workload=name)
        if ends[name]:
            raise ends[name]

    monkeypatch.setattr(gpu_machine, "DryRun", lambda: SimpleNamespace(release=lambda: None))
    monkeypatch.setattr(gpu_timing, "copy_row", lambda machine: row)
    monkeypatch.setattr(gpu_timing, "measure_workload", measure)

    def run(*workloads: str) -> int:
        return gpu.main(["--dry", "--no-tests", "--workloads", ",".join(workloads), "--optimizers", "sgd",
                         "--out", str(tmp_path / "rows.csv")])

    assert run("W7", "W1", "W2", "W4") == gpu.EXIT_FAILED
    shown = capsys.readouterr().out
    assert [line["workload"] for line in csv.DictReader((tmp_path / "rows.csv").open())] == ["w", "W7", "W1", "W2", "W4"]
    for text in ("W7 sgd: check failed: row 3", "W1 sgd: cut, a rep takes 9 s", "W4 sgd: RuntimeError: CUDA error"):
        assert shown.rindex(text) > shown.index("W4 sgd ...")           # said again at the end
    assert run("W1") == gpu.EXIT_OUT_OF_TIME and run("W2") == 0
    monkeypatch.setattr(gpu_timing, "copy_row", lambda machine: 1 / 0)
    assert run("W2") == gpu.EXIT_FAILED and "ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(("xml", "status", "wrong"), [
    ('<testsuites><testsuite tests="5" failures="0" errors="0" skipped="1"/></testsuites>', 0, None),
    ('<testsuites><testsuite tests="5" failures="1" errors="1" skipped="0"/></testsuites>', 1, "2 tests failed on cuda"),
    ('<testsuites><testsuite tests="3" failures="0" errors="0" skipped="3"/></testsuites>', 0, "no test ran on cuda"),
    ("", 5, "0 tests failed on cuda .pytest ended with 5"),
])
def test_tests_that_do_not_run_are_a_failure(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, xml: str, status: int,
                                             wrong: str | None) -> None:
    def pytest_writes(seconds: float, command: list[Any], *, env: dict[str, str], **_: object) -> int:
        assert env["SPARSELIFT_CONTRACT_BACKEND"] == "cuda"
        if xml:
            command[command.index("--junitxml") + 1].write_text(xml)
        return status

    monkeypatch.setattr(gpu, "run_within", pytest_writes)
    from deadline import Deadline
    if wrong is None:
        gpu.run_tests("cuda", gpu.TESTS, Deadline(1))
    else:
        with pytest.raises(AssertionError, match=wrong):
            gpu.run_tests("cuda", gpu.TESTS, Deadline(1))
    assert all((ROOT / path).exists() for path in gpu.TESTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is missing here")
def test_what_is_missing_is_said(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu.main([]) == gpu.EXIT_MISSING
    assert "is built for the processor alone; install a build with CUDA" in capsys.readouterr().out
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu.main([]) == gpu.EXIT_MISSING
    assert "finds no CUDA device; " in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(gpu.Missing, match=r"torch cannot be imported .*pip install torch"):
        gpu.check_machine()


def test_a_device_that_is_too_old(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {"is_available": True, "current_device": 0, "get_device_capability": (7, 5),
                        "get_device_properties": SimpleNamespace(name="Tesla T4", total_memory=16 << 30)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    with pytest.raises(gpu.Missing, match=r"need compute capability 8\.0 or later; Tesla T4 has 7\.5"):
        gpu.check_machine()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert gpu.check_machine() == (9, 0)


def test_the_module_is_built_for_the_device_and_put_where_it_is_imported(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                                                        tmp_path: Path) -> None:
    import cuda_binary
    from deadline import Deadline, OutOfTime
    package, asked = tmp_path / "site" / "sparselift", []
    for folder in ("kernels", "runtime"):
        (package / folder).mkdir(parents=True)

    def build_modules(folder: Path, *names: str, timeout_s: float, **variables: str) -> list[Path]:
        asked.append((names, variables))
        made = [folder / f"{name.replace('.', '/')}.so" for name in names]
        for path in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("built")
        return made

    monkeypatch.setattr(gpu, "package_folder", lambda: package)
    monkeypatch.setattr(gpu, "find_nvcc", lambda: listing(tmp_path, 80, 90))
    monkeypatch.setattr(cuda_binary, "build_modules", build_modules)
    gpu.build((9, 0), Deadline(1))
    assert asked == [(gpu.NEEDED, {"SPARSELIFT_CUDA_ARCHITECTURES": "90"})] and (package / "kernels" / "_cuda.so").read_text() == "built"
    for path in ("runtime/_hot", "kernels/_cpu"):
        (package / f"{path}.cpython.so").touch()
    gpu.build((9, 0), Deadline(1))
    assert asked[1][0] == gpu.NEEDED[:1]

    def takes_long(*_: object, **__: object) -> None:
        raise OutOfTime("nvcc took more than 1 s")

    monkeypatch.setattr(gpu, "check_machine", lambda: (9, 0))
    monkeypatch.setattr(cuda_binary, "build_modules", takes_long)
    assert gpu.main([]) == gpu.EXIT_OUT_OF_TIME


def test_a_package_that_cannot_run_is_missing(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparselift.kernels import cuda
    gpu.check_package(dry=True)
    monkeypatch.setattr(cuda.extension, "__defaults__", ("sparselift.kernels._nowhere",))
    with pytest.raises(gpu.Missing, match="the CUDA kernels are not built"):
        gpu.check_package(dry=False)
    monkeypatch.setitem(sys.modules, "sparselift.measure", None)
    with pytest.raises(gpu.Missing, match="sparselift cannot be imported"):
        gpu.check_package(dry=True)


def listing(folder: Path, *architectures: int) -> Path:
    """An nvcc that knows some architectures."""
    nvcc = folder / "nvcc"
    nvcc.write_text("#!/bin/sh\n" + "".join(f"echo sm_{number}\n" for number in architectures))
    nvcc.chmod(0o755)
    return nvcc


def test_an_older_nvcc_compiles_for_the_latest_that_it_knows(gpu: ModuleType, tmp_path: Path) -> None:
    assert gpu.architecture(listing(tmp_path, 80, 90, 100), (9, 0)) == 90
    assert gpu.architecture(listing(tmp_path, 80, 90, 100), (12, 0)) == 100
    assert gpu.architecture(listing(tmp_path), (9, 0)) == 90


def test_no_nvcc_says_what_to_install(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(gpu.Missing, match=r"there is no nvcc in CUDA_HOME.* -r csrc/cuda/toolkit\.txt"):
        gpu.find_nvcc()
    monkeypatch.setenv("SPARSELIFT_CUDA", "1")
    with pytest.raises(gpu.Missing, match="SPARSELIFT_CUDA=1, but there is no nvcc"):
        gpu.find_nvcc()


def test_a_command_ends_with_its_time_and_so_does_what_it_started(gpu: ModuleType) -> None:
    """All of them hold a pipe, which ends with the last of them."""
    from deadline import OutOfTime, run_within
    assert run_within(9, ["sh", "-c", "exit 3"]) == 3
    read, write = os.pipe()
    with pytest.raises(OutOfTime, match=r"sh took more than 0 s"):
        run_within(0.2, ["sh", "-c", "sleep 60 & sleep 60"], pass_fds=[write])
    os.close(write)
    assert select.select([read], [], [], 10)[0] and os.read(read, 1) == b""
    os.close(read)


def test_shapes_are_cut_to_the_memory(gpu: ModuleType) -> None:
    from gpu_cases import GRAD_COPIES, GRADS_SHARE, SHAPES, SIDES_IN_MEMORY, TABLES_SHARE
    for shape in SHAPES.values():
        assert len(shape.rows) == len(shape.pooling) and shape.table_bytes > 1e9
        assert shape.fitting(10**13) == shape
        for free in (140 << 30, 22 << 30, 4 << 30):
            cut = shape.fitting(free)
            assert cut.table_bytes * SIDES_IN_MEMORY <= TABLES_SHARE * free
            assert 4 * cut.dim * cut.num_ids * GRAD_COPIES <= GRADS_SHARE * free
            assert (cut.num_tables, cut.dim, cut.pooling) == (shape.num_tables, shape.dim, shape.pooling)


def test_memory_that_runs_out_is_tried_again_with_less(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_timing
    from gpu_cases import SHAPES
    tried: list[int] = []

    def measure(machine: object, shape: int, *_: object) -> Iterator[str]:
        tried.append(shape)
        if shape < 4:
            raise torch.OutOfMemoryError
        yield "row"

    machine = SimpleNamespace(fitting=lambda shape, fewer: fewer, release=lambda: None)
    monkeypatch.setattr(gpu_timing, "measure_case", measure)
    monkeypatch.setattr(gpu_timing, "described", str)
    assert list(gpu_timing.measure_workload(machine, "W1", "sgd", 1.0, None, None)) == ["row"] and tried == [1, 2, 4]
    assert "W1" in SHAPES


def test_as_many_reps_as_time_allows_and_too_few_are_none(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_timing
    from deadline import Deadline, OutOfTime
    now, args = [0.0], SimpleNamespace(reps=50, seed=0)

    def seconds(phase: object, number: int) -> float:
        now[0] += 2.0
        return 1.0

    def reps(time_s: float) -> int:
        return len(gpu_timing.interleaved(SimpleNamespace(seconds=seconds), ["a"], args, Deadline(time_s)))

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert (reps(6 + 2 * 7), reps(6 + 2 * 30), reps(1000)) == (7, 30, 50)
    with pytest.raises(OutOfTime, match=r"a rep takes 2\.00 s, and 13\.0 s are left of 19"):
        reps(6 + 2 * 7 - 1)


def test_launches_and_waits_of_a_profile(gpu: ModuleType) -> None:
    from gpu_machine import SeenCounts
    events = [("bag_forward_kernel", True), ("Memcpy DtoD (Device -> Device)", True), ("Memset (Device)", True), ("put_kernel", True),
              ("cudaLaunchKernel", False), ("cudaStreamSynchronize", False), ("cudaMemcpy", False), ("cudaMemcpyAsync", False),
              ("aten::copy_", False), ("cuCtxSynchronize", False)]
    assert SeenCounts.of(events) == SeenCounts(2, 3)


def test_a_device_is_asked_for_times_bandwidth_memory_and_counts(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's calls stand in: what is asked of them, and in which order."""
    import gpu_machine
    from gpu_cases import SHAPES, Phase
    asked: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            asked.append("record")

        def synchronize(self) -> None:
            asked.append("wait")

        def elapsed_time(self, end: object) -> float:
            return 2.0

    class Profile:
        def __init__(self, activities: object) -> None:
            assert list(activities) == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self) -> Any:
            asked.clear()
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[Any]:
            kinds = torch.autograd.DeviceType
            return [SimpleNamespace(name="cudaDeviceSynchronize", device_type=kinds.CPU),
                    *(SimpleNamespace(name="kernel", device_type=kinds.CUDA) for call in asked if call == "launch")]

    stands_in = {"get_device_properties": SimpleNamespace(name="H", L2_cache_size=64), "mem_get_info": (1 << 30, 2 << 30),
                 "synchronize": None, "empty_cache": None}
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(gpu_machine, "get_backend", lambda name: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(gpu_machine, "get_exchange", lambda name: None)
    monkeypatch.setattr(gpu_machine, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_machine, "LEAST_FLUSH_BYTES", 1 << 10)
    machine = gpu_machine.Gpu()
    assert machine.seconds(Phase(lambda n: asked.append(f"before {n}") or 7, lambda given: asked.append(f"run {given}")), 3) == 2e-3
    assert asked == ["before 3", "record", "run 7", "record", "wait"]
    nbytes, seconds = machine.copy_seconds()
    assert nbytes == 2 << 20 and len(seconds) == gpu_machine.COPY_REPS - 2
    assert machine.fitting(SHAPES["W7"], 2) == SHAPES["W7"].fitting(1 << 29)
    assert machine.counts(lambda: asked.extend(["launch"] * 5)) == gpu_machine.Counts(5, 0)
    assert machine.counts(lambda: None) == gpu_machine.Counts(None, None), "a profiler that sees nothing is no proof of no launches"

    def refuses(activities: object) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch.profiler, "profile", refuses)
    assert machine.counts(lambda: None) == gpu_machine.Counts(None, None)
    machine.release()


def test_what_the_checks_of_an_exchange_see(gpu: ModuleType) -> None:
    from cases import CheckFailed
    from gpu_exchange import check_packed

    from sparselift.kernels.exchange import WIRE_DTYPES
    sent = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for precision in WIRE_DTYPES:
        received = (sent if precision == "int8" else sent.to(getattr(torch, precision)).float()).clone()
        check_packed(precision, sent, received, 8)
        received[2, 3] += 0.1
        with pytest.raises(CheckFailed, match=f"unpacked as {precision} differ"):
            check_packed(precision, sent, received, 8)


def test_what_the_checks_of_operations_see(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the reference's kernels, right and with a slip."""
    import gpu_dlrm
    from cases import CheckFailed
    from gpu_cases import SHAPES
    from gpu_exchange import bucketize, regrouping

    from sparselift.kernels import get_exchange
    from sparselift.kernels.interaction import ReferenceInteraction
    kernels = get_exchange("reference")
    assert bucketize(SHAPES["W7"].tiny(), kernels, 0).name == "bucketize"
    assert [operation.name for operation in regrouping(SHAPES["W1"].tiny(), kernels, 0)] == ["regroup", "regroup, backward"]
    monkeypatch.setattr(gpu_dlrm, "CudaInteraction", lambda spec, backend: ReferenceInteraction(spec))
    host, shapes = SimpleNamespace(device=torch.device("cpu")), [SHAPES[name].tiny() for name in ("W6a", "W6b")]
    assert len(list(gpu_dlrm.interactions(shapes, host, 0))) == 4

    class Slips(type(kernels)):
        def _bucketize(self, ids: Any, offsets: Any, owners: Any, found: Any) -> None:
            super()._bucketize(ids, offsets, owners, found)
            found.lengths[0, 0] += 1

        def _regroup(self, spec: Any, backward: bool, *given: Any) -> None:
            super()._regroup(spec, backward, *given)
            given[-1][0][0, 0] += backward

    class Slip(ReferenceInteraction):
        def backward(self, vectors: Any, grad: Any, vector_grads: Any) -> None:
            super().backward(vectors, grad, vector_grads)
            vector_grads[0][0, 0] += 1

    with pytest.raises(CheckFailed, match="lengths are not those of a stable sort by owner"):
        bucketize(SHAPES["W7"].tiny(), Slips(), 0)
    with pytest.raises(CheckFailed, match="3 features of 8 columns, regrouped or brought back"):
        list(regrouping(SHAPES["W1"].tiny(), Slips(), 0))
    monkeypatch.setattr(gpu_dlrm, "CudaInteraction", lambda spec, backend: Slip(spec))
    with pytest.raises(CheckFailed, match="gradients of the interaction are off by"):
        list(gpu_dlrm.interactions(shapes, host, 0))


def test_tox_runs_the_script_where_there_is_a_gpu_and_nowhere_else(gpu: ModuleType) -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    assert tox["testenv:gpu"]["commands"] == "python benchmarks/gpu.py {posargs}"
    assert "gpu" not in tox["tox"]["env_list"].split(", ")
    assert "CUDA_HOME = {env:CUDA_HOME:{env_dir}/toolkit/" in tox["testenv:gpu"]["set_env"]
    for name in ("gpu", "cuda"):
        assert tox[f"testenv:{name}"]["commands_pre"].endswith("--target {env_dir}/toolkit -r csrc/cuda/toolkit.txt")
    assert gpu.options().parse_args([]).seconds + 30 <= 6 * 60


def test_unknown_workloads_are_a_usage_error(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--workloads", "W8"])
    assert "there is no workload W8; there are W7, W1, exchange" in capsys.readouterr().err
