"""Modules without lookups in torch.compile: torch's values and gradients, and torch itself wherever the graph is not what is asked for."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparselift as sl
from sparselift.apply import ATTRIBUTE
from sparselift.errors import LiftRefused
from sparselift.ir import DenseModule
from sparselift.measure import Comparison
from sparselift.plan import Interval, compare, default_plan
from sparselift.progress import Progress
from sparselift.rewrites.compile_dense import CompileDense
from sparselift.runtime import compiled
from sparselift.runtime.compiled import CompiledModules, compile_seconds
from sparselift.space import SearchSpace, setup_s
from sparselift.tuning import tune
from tests.unit.dense_models import assert_alike, batch, gradients, planned, planned_copy, workload


class Model(nn.Module):
    """A lookup, an MLP with dropout, and a layer by itself."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        self.mlp = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), middle or nn.Dropout(0.5), nn.Linear(33, 6), nn.Sigmoid())
        self.head = nn.Linear(6, 1)

    def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
        return self.head(self.mlp(torch.cat([dense, self.emb(indices, offsets)], dim=1)))


PIN = {"compile": "inductor"}


def modules_of(model: nn.Module) -> CompiledModules:
    dense = model.__dict__[ATTRIBUTE].runtime.dense
    assert isinstance(dense, CompiledModules)
    return dense


def pair(middle: nn.Module | None = None) -> tuple[Model, Model]:
    """A native and a planned model, nothing of which is compiled yet."""
    native = Model(middle)
    return native, planned_copy(native, PIN)


def no_compiler(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the compiler was called")


# Without compiling


def test_modules_are_found_and_others_left_for_a_reason() -> None:
    model = Model()
    model.towers = nn.ModuleList([nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Sequential(nn.ReLU())])
    structure = sl.lift(workload(model)).structure
    assert structure.dense_modules == (DenseModule("mlp", 7 * 33 + 33 + 33 * 6 + 6), DenseModule("towers.0", 9))


def hooked(mlp: nn.Sequential) -> nn.Module:
    mlp[0].register_forward_hook(lambda module, args, output: None)
    return mlp


def replaced(mlp: nn.Sequential) -> nn.Module:
    mlp[0].forward = mlp[0].forward
    return mlp


@pytest.mark.parametrize(("change", "reason"), [
    (hooked, "hooks"), (replaced, "replaced on the instance"),
    pytest.param(torch.compile, "compiled or scripted already", marks=pytest.mark.slow),      # which loads the compiler
    (lambda mlp: torch.jit.script(mlp), "compiled or scripted already")])
def test_what_a_graph_cannot_stand_for_is_refused(change: Callable[[nn.Module], nn.Module], reason: str) -> None:
    model = Model()
    model.mlp = change(model.mlp)
    work = sl.Workload("w", model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, given: m.emb(*given[:0:-1]).sum(), [batch()])
    graph = sl.lift(work)
    assert not graph.structure.dense_modules
    assert re.search(f"^mlp: is not compiled: .*{reason}", graph.explain(), re.MULTILINE)
    assert "no module of several layers" in (CompileDense().legal(graph.structure, None, {"compile": "inductor"}) or "")


def test_it_is_legal_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    structure = sl.lift(workload(Model())).structure
    assert CompileDense().legal(structure, None, {"compile": "inductor"}) is None
    monkeypatch.setenv("CXX", str(tmp_path / "gone"))
    assert "there is no '" in (CompileDense().legal(structure, None, {"compile": "inductor"}) or "")
    assert CompileDense().legal(structure, None, {"compile": "eager"}) is None


def test_it_is_off_by_default_and_one_of_the_choices() -> None:
    graph = sl.lift(workload(Model()))
    space = SearchSpace(graph)
    assert default_plan(graph).config.policy["compile"] == "eager"
    config = dict(space.toggles())["compile=inductor"]
    assert setup_s(graph.structure, config) > 5 and setup_s(graph.structure, space.default) == setup_s(graph.structure, space.native) == 0
    assert space.default.policy["linear"] == "native"
    assert setup_s(graph.structure, config, first=False) == 0.0
    whole = SearchSpace(graph, sl.Constraints(pin={"compile": "inductor_graph"})).default
    assert setup_s(graph.structure, whole) > setup_s(graph.structure, whole, first=False) > 5
    library = dict(SearchSpace(graph, sl.Constraints(pin={"linear": "onednn"})).toggles())
    assert not {"compile=inductor", "compile=inductor_graph"} & set(library)            # whose layers it would take away
    assert default_plan(graph, sl.Constraints(pin=PIN)).equivalence == "reassociated"


def test_evaluation_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", no_compiler)
    native, model = pair()
    for each in (native, model):
        each.eval()
    assert torch.equal(model(*batch()), native(*batch()))
    for each in (native, model):
        each.train()
    with torch.no_grad():
        torch.manual_seed(0)
        mine = model(*batch())
        torch.manual_seed(0)
        assert torch.equal(mine, native(*batch()))
    assert not modules_of(model).refusals and modules_of(model).calls == 0


def test_a_compiler_that_fails_leaves_the_module_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    native, model = pair()
    monkeypatch.setattr(torch, "compile", no_compiler)
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    assert "stepped aside: mlp: it ran uncompiled: torch.compile: RuntimeError: the compiler was called: 1 times" in sl.explain(model)


def test_an_error_of_a_graph_is_the_callers_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bad id is. The module does not run a second time, and a call that compiles nothing leaves the compiler's settings alone."""
    errors = [IndexError("feature a: id 20 at position 3")]

    def failing_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if errors:
                raise errors.pop()
            return function(*args)
        return run

    native, model = pair()
    monkeypatch.setattr(torch, "compile", failing_once)
    monkeypatch.setattr(compiled, "graph_config", None)
    heard: list[int] = []
    monkeypatch.setattr(nn.Sequential, "forward", lambda module, input: heard.append(1))
    with pytest.raises(IndexError, match="id 20"):
        model(*batch())
    monkeypatch.undo()
    assert not heard and not modules_of(model).refusals
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    assert modules_of(model).calls == 1


def test_a_model_whose_module_has_another_forward_runs_the_plan() -> None:
    plan, _ = planned(Model(), PIN)
    model = Model()
    model.mlp.forward = model.mlp.forward
    assert "re-check" in [each.grade for each in compare(plan, sl.lift(workload(copy.deepcopy(model))).structure)]
    sl.apply(plan, model, torch.optim.SGD(model.parameters(), lr=0.05))
    assert_alike(gradients(model, batch()), gradients(Model(), batch()))
    assert "stepped aside: mlp: it is not in the model any more, or its forward has been replaced" in sl.explain(model)


def wrong(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *args: function(*args) * 1.01


def test_wrong_graphs_fail_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, work = planned(Model(), PIN)
    monkeypatch.setattr(torch, "compile", wrong)
    with pytest.raises(sl.errors.EquivalenceError, match="planned differs from native"):
        sl.verify(plan, work)


class Broken(nn.Module):
    """Reads a value back in the middle: no one graph."""

    def forward(self, input: Tensor) -> Tensor:
        return input * 2 if input.sum().item() > 0 else input


# One module is compiled for most of these.


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[Model, Model, torch.optim.Optimizer]]:
    """A native model and a planned one that is compiled."""
    torch.set_num_threads(1)
    native, model = pair()
    before_s = compile_seconds()
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    assert compile_seconds() > before_s
    yield native, model, torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.slow
def test_training_is_the_same_at_any_batch_size(trained: Any) -> None:
    native, model, _ = trained
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (native, model)]
    before_s, calls = compile_seconds(), modules_of(model).calls
    for seed in range(4):
        assert_alike(gradients(model, batch(seed, seed + 2), seed), gradients(native, batch(seed, seed + 2), seed))
        for optimizer in optimizers:
            optimizer.step()
    assert compile_seconds() == before_s, "one graph serves every batch size"
    assert modules_of(model).calls == calls + 4 and "nothing fell back" in sl.explain(model)
    assert re.search(r"dense part, .*: 1 modules \(mlp\) compiled in \d[\d.]* s: \d+ calls", sl.explain(model))


@pytest.mark.slow
def test_dropout_has_torchs_bits_and_leaves_torchs_random_state(trained: Any) -> None:
    native, model, _ = trained
    given = torch.randn(50, 7, requires_grad=True)
    results = []
    for each in (native, model):
        torch.manual_seed(5)
        out = each.mlp(given)
        results.append((out.detach(), torch.get_rng_state()))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.slow
def test_one_row_none_and_what_a_graph_is_not_for_are_torchs(trained: Any) -> None:
    native, model, _ = trained
    before_s = compile_seconds()
    for use in (lambda m: m.mlp(torch.ones(1, 7)), lambda m: m.mlp(torch.ones(0, 7)),
                lambda m: torch.func.vmap(m.mlp, randomness="different")(torch.ones(2, 3, 7)),
                lambda m: checkpoint(m.mlp, torch.ones(4, 7, requires_grad=True), use_reentrant=False)):
        results = []
        for each in (native, model):
            torch.manual_seed(0)
            results.append(use(each))
        torch.testing.assert_close(*results)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.mlp(torch.ones(4, 7)).dtype == torch.bfloat16
    assert compile_seconds() == before_s
    for why in ("fewer than 2 rows", "being watched", "hooks for saved tensors", "autocast"):
        assert re.search(f"stepped aside: mlp: it ran uncompiled: .*{why}", sl.explain(model))


@pytest.mark.slow
def test_hooks_that_come_later_are_heard(trained: Any) -> None:
    _, model, _ = trained
    heard: list[int] = []
    handle = model.mlp[1].register_forward_hook(lambda module, args, output: heard.append(len(output)))
    try:
        model(*batch(bags=4))
    finally:
        handle.remove()
    calls = modules_of(model).calls
    model(*batch(bags=4))
    assert heard == [4] and modules_of(model).calls == calls + 1


@pytest.mark.slow
def test_errors_of_the_module_are_torchs_and_end_nothing(trained: Any) -> None:
    native, model, _ = trained
    messages = []
    for each in (native, model):
        with pytest.raises(RuntimeError) as raised:
            each.mlp(torch.ones(3, 8))
        messages.append(str(raised.value))
        assert raised.value.__context__ is None
    assert messages[0] == messages[1]
    calls = modules_of(model).calls
    model(*batch())
    assert modules_of(model).calls == calls + 1 and not modules_of(model).refusals


@pytest.mark.slow
def test_one_openmp_runtime_is_loaded(trained: Any) -> None:
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if re.search(r"lib(gomp|omp|iomp5)\b", line)}
    assert len(files) == 1, files


@pytest.mark.slow
def test_copies_and_pickles_train_alone_and_unapply_gives_the_native_model_back(trained: Any) -> None:
    _, model, optimizer = trained
    names = list(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(other.state_dict()) == names
        with torch.no_grad():
            other.mlp[3].weight.mul_(2)
            native = Model()
            native.load_state_dict(other.state_dict())
        calls = modules_of(model).calls
        assert_alike(gradients(other, batch()), gradients(native, batch()))
        assert modules_of(other).calls >= 1 and modules_of(model).calls == calls
    other, twin = copy.deepcopy((model, optimizer))
    sl.unapply(other, twin)
    assert not [name for name, module in other.named_modules() if "forward" in module.__dict__]
    native = Model()
    native.load_state_dict(other.state_dict())
    assert all(map(torch.equal, gradients(other, batch()), gradients(native, batch())))


@pytest.mark.slow
def test_a_right_one_is_certified_and_a_graph_break_refused() -> None:
    certificate = sl.verify(*planned(Model(), PIN))
    assert 0 < certificate.real["gradients of a step"] < 0.1
    plan, work = planned(Model(Broken()), PIN)
    with pytest.raises(LiftRefused, match=r"compile='inductor': mlp: torch.compile: \w+: .*data-dependent"):
        sl.verify(plan, work)


@pytest.mark.slow
def test_a_search_compiles_once_and_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all configs share; graphs with lookups are left out."""
    lines: list[str] = []
    legal = CompileDense.legal
    monkeypatch.setattr(CompileDense, "legal", lambda rewrite, structure, site, knobs: "left out"
                        if knobs["compile"] == "inductor_graph" else legal(rewrite, structure, site, knobs))

    class Lines(Progress):
        def advance(self, text: str, best: str = "", counts: bool = True) -> None:
            lines.append(text)

    def alike(incumbent: Any, candidate: Any, **options: Any) -> Comparison:
        one = Interval(1.0, 1.0, 1.0)
        return Comparison(one, one, one, 0.95, 6, 1, False, 0.0, 0.0, 0.0)

    result = tune(workload(Model()), trials=12, constraints=sl.Constraints(allow=("compile_dense", "group_tables", "prefetch")),
                  progress=Lines(), measure=alike)
    compiled_ones = [record for record in result.records if record.params.get("compile") == "inductor"]
    assert len(compiled_ones) > 1 and all(record.state == "complete" for record in compiled_ones)
    assert sum("compiled in" in line for line in lines) == 1
    assert result.plan.evidence.overhead["compile_s"] > 0
