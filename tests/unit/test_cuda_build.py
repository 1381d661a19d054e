"""When the CUDA kernels are built, and that a build without them leaves none behind."""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparselift.errors import KernelError

ROOT = Path(__file__).parents[2]

# Runs setup.py's build_ext with no extension to compile, into a folder in which an earlier build left its modules.
BUILD_NOTHING = """
import sys
from pathlib import Path
from distutils.core import run_setup
command = run_setup("setup.py", stop_after="init").get_command_obj("build_ext")
command.build_lib = sys.argv[1]
command.ensure_finalized()
stale = Path(command.get_ext_fullpath("sparselift.kernels._cuda"))
stale.parent.mkdir(parents=True)
stale.touch()
command.extensions = []
command.run()
print(stale.exists())
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)


def test_cuda_is_demanded_forbidden_or_neither() -> None:
    done = run("setup.py", "--version", SPARSELIFT_CUDA="yes")
    assert done.returncode != 0
    assert "SPARSELIFT_CUDA must be 0, 1 or unset; got 'yes'" in done.stderr


def test_a_demand_without_nvcc_says_where_it_was_looked_for(tmp_path: Path) -> None:
    done = run("setup.py", "--version", SPARSELIFT_CUDA="1", CUDA_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "there is no nvcc in CUDA_HOME" in done.stderr


def test_the_module_imports_without_a_driver_and_names_what_is_missing() -> None:
    module = pytest.importorskip("sparselift.kernels._cuda", reason="this build has no CUDA kernels")
    try:
        module.check_device()
    except KernelError as error:
        assert re.match(r"cudaError\w+: ", str(error))


@pytest.fixture
def read_setup(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What setup.py defines, given variables and a driver that knows of `devices`, or that does not start."""
    def read(devices: int = 0, started: int = 0, **variables: str) -> dict[str, Any]:
        def count_devices(count: Any) -> int:
            count._obj.value = devices
            return 0

        monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuInit=lambda flags: started, cuDeviceGetCount=count_devices))
        for name, value in {"SPARSELIFT_CUDA": "", "SPARSELIFT_CUDA_ARCHITECTURES": "", **variables}.items():
            monkeypatch.setenv(name, value)
        return runpy.run_path(str(ROOT / "setup.py"))

    return read


def test_cuda_is_built_where_it_can_run_or_is_asked_for(read_setup: Callable[..., dict[str, Any]], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert read_setup(devices=1)["NVCC"] == read_setup(devices=0, SPARSELIFT_CUDA="1")["NVCC"] == nvcc
    assert read_setup(devices=1, started=100)["NVCC"] is read_setup(devices=1, SPARSELIFT_CUDA="0")["NVCC"] is None
    capsys.readouterr()
    assert read_setup(devices=0)["NVCC"] is None
    assert f"no CUDA device here: the CUDA kernels are not built, though there is {nvcc}" in capsys.readouterr().out


def test_one_architecture_or_several(read_setup: Callable[..., dict[str, Any]]) -> None:
    def targets(architectures: str) -> list[str]:
        return [flag.removeprefix("-gencode=arch=") for flag in read_setup(SPARSELIFT_CUDA_ARCHITECTURES=architectures)["NVCC_FLAGS"]
                if flag.startswith("-gencode")]

    assert targets("120,90") == ["compute_90,code=sm_90", "compute_120,code=sm_120", "compute_120,code=compute_120"]
    assert [target.partition("code=")[2] for target in targets("")] == ["sm_80", "sm_90", "sm_100", "compute_100"]


def test_what_was_compiled_with_other_settings_is_older(read_setup: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    def noted(architectures: str) -> Path:
        setup = read_setup(SPARSELIFT_CUDA_ARCHITECTURES=architectures)
        return Path(setup["BuildKernels"].note(SimpleNamespace(build_temp=tmp_path / "temp"), "nvcc", setup["NVCC_FLAGS"]))

    os.utime(noted("90"), (0, 0))
    assert noted("90").stat().st_mtime == 0 and noted("90,90").stat().st_mtime == 0
    assert noted("80").stat().st_mtime > 0


@pytest.mark.parametrize("wrong", ["70", "sm_90", "90,", "native"])
def test_an_architecture_that_is_none(read_setup: Callable[..., dict[str, Any]], wrong: str) -> None:
    with pytest.raises(SystemExit, match=f"must be numbers from 80 on with commas between them, such as 80,90; got '{wrong}'"):
        read_setup(SPARSELIFT_CUDA_ARCHITECTURES=wrong)


@pytest.mark.parametrize("variables", [{"SPARSELIFT_CUDA": "0"}, {"SPARSELIFT_CUDA": "", "CUDA_HOME": "/nowhere"}], ids=str)
def test_a_build_without_cuda_removes_the_module_of_an_earlier_one(variables: dict[str, str], tmp_path: Path) -> None:
    done = run("-c", BUILD_NOTHING, str(tmp_path), **variables)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
