"""Workload references, settings, and the built-in DLRM."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

from sparselift.apply import apply, explain
from sparselift.errors import DataError, WorkloadError
from sparselift.lift import lift
from sparselift.optim import RowWiseAdagrad
from sparselift.plan import Plan, default_plan
from sparselift.verify import verify
from sparselift.workload import Workload
from sparselift.workloads import BUILT_IN, dlrm, parse_settings, resolve

SMALL = {"batch_size": 8, "num_batches": 2, "max_rows": 50, "dim": 4, "bottom": (8,), "top": (8, 1)}

SOURCE = """
import torch
import sparselift.workload
from {helper} import FEATURES

def make(features=FEATURES, *, lr=0.5):
    if features < 0:
        raise ValueError("features must not be negative")
    model = torch.nn.Linear(features, 1)
    return sparselift.workload.Workload("mine", model, torch.optim.SGD(model.parameters(), lr=lr),
                                        lambda model, batch: model(batch).sum(), [torch.ones(2, features)])

def needs(size):
    return size

def anything(**options):
    return make(**options)

nothing = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a workload file that imports its neighbour, as the current one."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    (tmp_path / "my_helper.py").write_text("FEATURES = 3\n")
    (tmp_path / "my_jobs.py").write_text(SOURCE.format(helper="my_helper"))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.parametrize("reference", ["my_jobs:make", "my_jobs.py:make", "./my_jobs.py:make", "{folder}/my_jobs.py:make"])
def test_modules_and_files_are_found(folder: Path, reference: str) -> None:
    path = list(sys.path)
    work = resolve(reference.format(folder=folder), {"lr": 0.25})
    assert isinstance(work, Workload) and work.optimizers[0].param_groups[0]["lr"] == 0.25
    assert work.train(work.model, work.optimizer, work.take(1)[0]).dim() == 0
    assert sys.path == path
    assert sys.modules["my_jobs"].make.__module__ == "my_jobs"      # pickling finds it there


@pytest.mark.parametrize(("reference", "settings", "message"), [
    ("dlmr", {}, r"a workload is one of \['dlrm'\], package.module:function or path/to/file.py:function; got 'dlmr'"),
    ("my_jobs:", {}, "a workload is one of .* got 'my_jobs:'"),
    (":make", {}, "got ':make'"),
    ("my_absent:make", {}, "there is no module 'my_absent'"),
    ("my_absent.part:make", {}, "there is no module 'my_absent'"),
    ("my_jobs.part:make", {}, "there is no module 'my_jobs.part'|importing my_jobs.part failed"),
    ("absent/file.py:make", {}, "there is no file 'absent/file.py'"),
    ("my_jobs.py:absent", {}, "my_jobs.py has no 'absent'"),
    ("my_jobs:nothing", {}, "nothing must be a function that returns a Workload; got int"),
    ("my_jobs:make", {"speed": 1}, "has no setting 'speed'; it accepts features, lr"),
    ("my_jobs:needs", {}, "needs the setting 'size'; it accepts size"),
    ("my_jobs:needs", {"size": 3}, "must return a sparselift.Workload; got int"),
    ("my_jobs:make", {"features": -1}, "failed: ValueError: features must not be negative"),
    ("my_jobs:anything", {"speed": 1}, "failed: TypeError: .*speed"),
    ("dlrm", {"batchsize": 1}, "has no setting 'batchsize'; it accepts data, shape, batch_size"),
    ("dlrm", {"optimizer": "adam"}, "failed: ValueError: optimizer must be one of .* got 'adam'"),
])
def test_references_that_lead_nowhere(folder: Path, reference: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as error:
        resolve(reference, settings)
    if "dlmr" not in reference and reference not in ("my_jobs:", ":make"):
        assert repr(reference) in str(error.value)


def test_faults_of_the_users_code_are_told_from_missing_modules(folder: Path) -> None:
    (folder / "my_broken.py").write_text("import my_missing_dependency\n")
    (folder / "my_typo.py").write_text("def make(:\n")
    for reference, message in (("my_broken:make", "importing my_broken failed: No module named 'my_missing_dependency'"),
                               ("my_broken.py:make", "failed: ModuleNotFoundError: No module named 'my_missing_dependency'"),
                               ("my_typo:make", "importing my_typo failed: SyntaxError"), ("my_typo.py:make", "failed: SyntaxError")):
        with pytest.raises(WorkloadError, match=message):
            resolve(reference)
        assert "my_broken" not in sys.modules and "my_typo" not in sys.modules


def test_settings_are_literals_else_text() -> None:
    settings = parse_settings(["a=1", "b=0.5", "c=None", "d=(1, 2)", "e=sgd", "f=data/x.tsv", "g=", "h='7'", "i=a=b", "j=True"])
    assert settings == {"a": 1, "b": 0.5, "c": None, "d": (1, 2), "e": "sgd", "f": "data/x.tsv", "g": "", "h": "7", "i": "a=b", "j": True}
    for bad, message in ((["lr"], "must read key=value; got 'lr'"), (["=1"], "must read key=value"), (["2x=1"], "must read key=value"),
                         (["a=1", "a=2"], "'a' is given twice")):
        with pytest.raises(WorkloadError, match=message):
            parse_settings(bad)


@pytest.mark.parametrize(("optimizer", "kinds"), [
    ("sgd", [torch.optim.SGD]), ("adagrad", [torch.optim.Adagrad]), ("rowwise_adagrad", [torch.optim.SGD, RowWiseAdagrad]),
    ("sparse_adam", [torch.optim.SGD, torch.optim.SparseAdam]),
])
def test_the_built_in_workload_trains(optimizer: str, kinds: list[type]) -> None:
    work = BUILT_IN["dlrm"](**SMALL, optimizer=optimizer, lr=0.02)
    assert [type(each) for each in work.optimizers] == kinds
    held = [id(p) for each in work.optimizers for group in each.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in work.model.parameters())
    tables = work.optimizers[-1].param_groups[0]
    assert tables["lr"] == 0.02
    before = [bag.weight.detach().clone() for bag in work.model.emb_l]
    for batch in work.take(5):
        assert work.train(work.model, work.optimizer, batch).item() > 0
    assert not any(torch.equal(bag.weight, old) for bag, old in zip(work.model.emb_l, before))


def test_the_built_in_workload_takes_half_tables() -> None:
    work = dlrm(**SMALL, optimizer="rowwise_adagrad", dtype="bfloat16")
    assert {bag.weight.dtype for bag in work.model.emb_l} == {torch.bfloat16} and work.model.top_l[0].weight.dtype == torch.float32
    assert work.optimizers[1].param_groups[0]["rounding_seed"] == 0
    graph = lift(work)
    assert all(table.dtype == "bfloat16" and table.optimizer and table.optimizer.fused_rule for table in graph.structure.tables)
    apply(default_plan(graph), work.model, work.optimizer)
    for batch in work.take(2):
        assert work.train(work.model, work.optimizer, batch).item() > 0
    assert "nothing fell back" in explain(work.model)


def test_the_default_is_criteos_shape() -> None:
    work = dlrm(num_batches=1, max_rows=100, batch_size=16)
    assert len(work.model.emb_l) == 26 and max(bag.num_embeddings for bag in work.model.emb_l) == 100
    assert [layer.out_features for layer in work.model.bot_l if hasattr(layer, "out_features")] == [512, 256, 64, 16]
    assert work.optimizer.param_groups[0]["lr"] == 0.1
    again = dlrm(num_batches=1, max_rows=100, batch_size=16)
    assert all(torch.equal(a, b) for a, b in zip(work.model.parameters(), again.model.parameters()))


def test_a_log_gives_full_batches_and_its_own_tables(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    path.write_text("".join(f"{i % 2}\t" + "\t".join([str(i)] * 13 + [f"{i % 6:x}"] * 26) + "\n" for i in range(20)))
    work = dlrm(str(path), **SMALL | {"num_batches": 9})
    assert [len(batch.labels) for batch in work.batches] == [8, 8]
    assert [bag.num_embeddings for bag in work.model.emb_l] == [7] * 26
    assert work.train(work.model, work.optimizer, work.take(1)[0]).item() > 0
    assert [len(batch.labels) for batch in dlrm(path, **SMALL | {"num_batches": 1}).batches] == [8]
    assert [len(batch.labels) for batch in dlrm(path, **SMALL | {"batch_size": 64}).batches] == [20]
    path.write_text("no click log\n")
    with pytest.raises(DataError, match="line 1"):
        resolve("dlrm", {"data": str(path)})


@pytest.mark.parametrize(("settings", "message"), [
    ({"shape": "avazu"}, "shape must be one of .* got 'avazu'"),
    ({"optimizer": "sparse_adam", "sparse": False}, "'sparse_adam' needs sparse=True"),
    ({"dtype": "float64"}, r"dtype must be one of \['float32', 'float16', 'bfloat16'\]; got 'float64'"),
    ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
    ({"data": "absent.tsv", "num_batches": 0}, "num_batches must be at least 1; got 0"),
])
def test_wrong_arguments_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dlrm(**SMALL | settings)


def small_work(**changes):
    model = torch.nn.Linear(3, 1)
    arguments = {"name": "mine", "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
                 "step": lambda model, batch: model(batch).sum(), "batches": [torch.ones(2, 3)] * 100}
    return Workload(**arguments | changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"step": None}, "step must be a function .*it is what is lifted; got None"),
    ({"train_step": 3}, "train_step must be a function .*got 3"),
    ({"batches": (torch.ones(2, 3) for _ in range(3))}, "a list, or a callable that returns an iterator.*got generator"),
    ({"batches": iter([1])}, "a list, or a callable that returns an iterator"),
    ({"batches": 3}, "a list, or a callable that returns an iterator.*got int"),
])
def test_a_workload_checks_its_arguments(changes, message) -> None:
    with pytest.raises(WorkloadError, match=message):
        small_work(**changes)


def test_the_repr_of_a_workload_is_short() -> None:
    assert repr(small_work()) == "<Workload 'mine': Linear, SGD, 100 batches>"
    assert repr(small_work(batches=lambda: iter([1]))) == "<Workload 'mine': Linear, SGD, batches from a callable>"


def test_the_loop_of_the_page_lifts_trains_and_holds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    scope: dict = {}
    exec(page.split("# clicks.py\n", 1)[1].split("```", 1)[0], scope)
    work = scope["work"](batch_size=32)
    assert lift(work).structure.uses == ("accumulate", "clip")
    plan = Plan.default(work)
    assert plan.config.path == "planned"
    assert verify(plan, work).equivalence == plan.equivalence
    batch = work.take(1)[0]
    twin = copy.deepcopy(work.model)
    apart = [torch.optim.SGD(twin.head.parameters(), lr=0.1), torch.optim.Adagrad(twin.bags.parameters(), lr=0.05)]
    work.train(twin, apart, batch)
    apply(plan, work.model, work.optimizer)
    work.train(work.model, work.optimizer, batch)
    for planned, native in zip(work.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(planned, native)
