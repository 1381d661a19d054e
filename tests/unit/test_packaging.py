"""What is shipped: versions and pins agree, the README's commands are the ones that CI runs, and the built files hold what they should."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sparselift

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
NOT_SHIPPED = shutil.ignore_patterns(".git", ".venv", ".tox", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.o", "_*.c",
                                     ".*_cache", ".hypothesis", "*.study", "*.csv")
SHIPPED_CSV = {"budget.csv", "instructions.csv"}   # limits; all others are what benchmarks write


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)}


def requirements() -> list[Requirement]:
    """Everything that an installation with the extras that run without a GPU asks for, and the build."""
    extras = PROJECT["optional-dependencies"]
    used = [line for name in ("tune", "report", "examples", "test") for line in extras[name]]
    named = [*PROJECT["dependencies"], *BUILD["requires"], *used]
    return [requirement for requirement in map(Requirement, named) if canonicalize_name(requirement.name) != "sparselift"]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_inside_its_range(requirement: Requirement) -> None:
    version = pins().get(canonicalize_name(requirement.name))
    assert version is not None, f"constraints.txt does not pin {requirement.name}"
    assert requirement.specifier.contains(version)


def test_no_pin_keeps_a_torch_with_cuda_from_being_installed() -> None:
    """Torch's wheels of the package index pin CUDA's libraries by themselves, which a CPU build never shows."""
    assert not [name for name in pins() if name.startswith(("nvidia-", "cuda-"))]


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("sparselift") == sparselift.__version__


def test_the_command_is_installed() -> None:
    entry = next(e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "sparselift")
    assert entry.value == "sparselift.cli:main"


def test_ci_runs_the_readmes_test_command() -> None:
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert "tox" in command
    assert f"```\n{command}\n```" in (ROOT / "README.md").read_text()


def test_readme_commands_are_one_line_and_pinned() -> None:
    commands = re.findall(r"^```\n(python3 -m venv .+)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    assert all("-c constraints.txt" in command for command in commands)


@dataclass(frozen=True, slots=True)
class Built:
    """The sdist, and the wheel that was built from it, as `python -m build` makes them; and the sources, without what was built there."""

    source: Path
    sdist: Path
    wheel: Path

    def sources(self, folder: str) -> set[str]:
        return {str(path.relative_to(self.source)) for path in (self.source / folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    base = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, base / "source", ignore=lambda folder, names: NOT_SHIPPED(folder, names) - SHIPPED_CSV)
    shutil.copytree(base / "source", base / "built")
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "SPARSELIFT_CUDA": "0",
                   "CFLAGS": "-O0", "CXXFLAGS": "-O0"}        # files are looked at here, not speed
    subprocess.run([sys.executable, "-m", "build", "--outdir", base / "dist", base / "built"], check=True, env=environment,
                   cwd=base, stdout=subprocess.DEVNULL)
    return Built(base / "source", next((base / "dist").glob("*.tar.gz")), next((base / "dist").glob("*.whl")))


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    python = {name for name in built.sources("sparselift") if name.endswith((".py", ".pyi"))}
    tuning = {name.replace("tuning/", "sparselift/tuning/", 1) for name in built.sources("tuning") if name.endswith(".py")}
    compiled = {name for name in names if name.endswith(".so")}
    assert names == python | tuning | compiled | {"sparselift/py.typed"}
    modules = {name[:-4] for name in built.sources("sparselift") if name.endswith(".pyx")} - {"sparselift/kernels/_cuda"}
    assert {name.split(".")[0] for name in compiled} == modules


@pytest.mark.slow
def test_wheel_metadata(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        info = {name.split("/", 1)[1]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "License-Expression: Apache-2.0" in info["METADATA"]
    assert "Requires-Dist: torch>=2.11\n" in info["METADATA"]
    assert "licenses/LICENSE" in info
    assert "sparselift = sparselift.cli:main" in info["entry_points.txt"]
    assert "torch==" not in info["METADATA"]


@pytest.mark.slow
def test_sdist_holds_what_builds_and_tests_it(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    shipped = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "constraints.txt", "pyproject.toml", "setup.py",
               "tox.ini", ".ci/run"}
    for folder in ("sparselift", "tuning", "csrc", "tests", "docs", "examples", "benchmarks"):
        shipped |= built.sources(folder)
    made = {name for name in names if name.startswith("sparselift.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == shipped


@pytest.mark.slow
def test_installed_wheel_works_outside_the_checkout(built: Built, tmp_path: Path) -> None:
    """Installed into a folder of its own, without dependencies (those of this environment serve), and used from elsewhere."""
    target = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target,
                    built.wheel], check=True)
    code = """
import torch, sparselift as sl
from sparselift.kernels import get_backend
assert sl.__file__.startswith({target!r}), sl.__file__
bag = sl.nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
assert torch.equal(bag(torch.tensor([[1, 2]])), (bag.weight[1] + bag.weight[2])[None])
print(get_backend("cpu").variant(), sl.tune.__module__)
"""
    environment = {**os.environ, "PYTHONPATH": str(target)}
    shown = subprocess.run([sys.executable, "-c", code.format(target=str(target))], check=True, env=environment, cwd=tmp_path,
                           capture_output=True, text=True).stdout
    assert shown.split()[1].startswith("sparselift.tuning")
    version = subprocess.run([target / "bin" / "sparselift", "--version"], check=True, env=environment, cwd=tmp_path,
                             capture_output=True, text=True).stdout
    assert version == f"sparselift {sparselift.__version__}\n"
