"""When the CUDA kernels are built, and that a build without them leaves none behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("variables", [{"SPARSELIFT_CUDA": "0"}, {"SPARSELIFT_CUDA": "", "CUDA_HOME": "/nowhere"}], ids=str)
def test_a_build_without_cuda_removes_the_module_of_an_earlier_one(variables: dict[str, str], tmp_path: Path) -> None:
    done = run("-c", BUILD_NOTHING, str(tmp_path), **variables)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
