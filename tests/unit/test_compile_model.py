"""A planned model in torch.compile as one graph: native's numbers, and the plan's eager way for what the graph is not for."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sparselift as sl
from sparselift.apply import ATTRIBUTE
from sparselift.errors import LiftRefused
from sparselift.grad import PendingGrad
from sparselift.plan import default_plan
from sparselift.runtime.compiled import CompiledModel
from tests.unit.dense_models import assert_alike, batch, gradients, workload
from tests.unit.test_compile_dense import Broken, Model

PIN = sl.Constraints(pin={"compile": "inductor_graph"})


def planned(model: Model) -> tuple[sl.Plan, sl.Workload]:
    work = workload(model)
    return default_plan(sl.lift(work), PIN), work


def dense_of(model: Model) -> CompiledModel:
    dense = model.__dict__[ATTRIBUTE].runtime.dense
    assert isinstance(dense, CompiledModel)
    return dense


def test_what_does_not_compile_runs_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the compiler was called")

    native, model = Model(), Model()
    plan, work = planned(model)
    sl.apply(plan, model, work.optimizer)
    monkeypatch.setattr(torch, "compile", no_compiler)
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    said = sl.explain(model)
    assert "stepped aside: the model: it ran uncompiled: torch.compile: RuntimeError: the compiler was called: 1 times" in said
    assert re.search("prelude: 1 lookups over 1 tables in one call.*: 1 times", said)
    with pytest.raises(LiftRefused, match=r"compile='inductor_graph': the model: torch.compile: .*the compiler was called"):
        sl.verify(*planned(Model()))


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["inductor", "inductor_graph"])
def test_a_graph_of_the_users_has_the_lookups_too(choice: str) -> None:
    native, model = Model(), Model()
    work = workload(model)
    sl.apply(default_plan(sl.lift(work), sl.Constraints(pin={"compile": choice})), model, work.optimizer)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for run in (native, compiled):
        torch.manual_seed(0)
        run(*batch()).square().sum().backward()
    assert_alike([each.grad.to_dense() for each in model.parameters()], [each.grad.to_dense() for each in native.parameters()])
    assert type(model.emb.weight.grad) is PendingGrad and "nothing fell back" in sl.explain(model)


# One model is compiled for these.


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[Model, Model, Any, Any]]:
    """A native model and a planned one that is compiled, and their optimizers."""
    torch.set_num_threads(1)
    native, model = Model(), Model()
    plan, work = planned(model)
    sl.apply(plan, model, work.optimizer)
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    assert type(model.emb.weight.grad) is PendingGrad
    yield native, model, torch.optim.SGD(native.parameters(), lr=0.05), work.optimizer


@pytest.mark.slow
def test_training_is_the_same_at_any_batch_size(trained: Any) -> None:
    native, model, *optimizers = trained
    compile_s, calls = dense_of(model).compile_s, dense_of(model).calls
    for seed in range(4):
        assert_alike(gradients(model, batch(seed, seed + 3), seed), gradients(native, batch(seed, seed + 3), seed))
        for optimizer in optimizers:
            optimizer.step()
    assert dense_of(model).compile_s == compile_s > 0 and dense_of(model).calls == calls + 4
    said = sl.explain(model)
    assert re.search(r"in compiled graphs: 1 lookups .*: 5 times", said) and "nothing fell back" in said
    assert re.search(r"the model, lookups and dense part in one graph: compiled in \d[\d.]* s: 5 calls", said)


@pytest.mark.slow
def test_evaluation_and_a_batch_of_one_run_in_the_plan(trained: Any) -> None:
    native, model, *_ = trained
    calls = dense_of(model).calls
    for each in (native, model):
        each.eval()
    torch.testing.assert_close(model(*batch()), native(*batch()))
    for each in (native, model):
        each.train()
    assert_alike(gradients(model, batch(1, 1)), gradients(native, batch(1, 1)))
    assert dense_of(model).calls == calls
    assert "stepped aside: the model: it ran uncompiled: an input has fewer than 2 rows" in sl.explain(model)


@pytest.mark.slow
def test_hooks_of_a_table_are_heard(trained: Any) -> None:
    native, model, *_ = trained
    calls, heard = dense_of(model).calls, []
    handles = [each.emb.weight.register_hook(lambda grad: heard.append(grad.to_dense())) for each in (native, model)]
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(*heard)
    assert dense_of(model).calls == calls
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    assert dense_of(model).calls == calls + 1


@pytest.mark.slow
def test_bad_ids_are_the_callers_and_end_nothing(trained: Any) -> None:
    native, model, *_ = trained
    dense, offsets, indices = batch()
    indices[3] = 20
    with pytest.raises(IndexError, match=r"emb.*20"):
        model(dense, offsets, indices)
    calls = dense_of(model).calls
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    assert dense_of(model).calls == calls + 1 and not dense_of(model).refusals


@pytest.mark.slow
def test_copies_train_alone_and_unapply_gives_the_native_model_back(trained: Any) -> None:
    native, model, _, optimizer = trained
    twin = pickle.loads(pickle.dumps(model))
    calls = dense_of(model).calls
    assert_alike(gradients(twin, batch()), gradients(native, batch()))
    assert dense_of(model).calls == calls and dense_of(twin).calls >= 1
    other, others = copy.deepcopy((model, optimizer))
    sl.unapply(other, others)
    assert not [name for name, module in other.named_modules() if "forward" in module.__dict__]
    assert_alike(gradients(other, batch()), gradients(native, batch()))


@pytest.mark.slow
def test_a_right_one_is_certified_and_a_graph_break_refused() -> None:
    assert 0 < sl.verify(*planned(Model())).real["gradients of a step"] < 0.1
    plan, work = planned(Model(Broken()))
    with pytest.raises(LiftRefused, match=r"compile='inductor_graph': the model: torch.compile: \w+: .*data-dependent"):
        sl.verify(plan, work)


class Twice(torch.nn.Module):
    """Two lookups with ids that it computes, the second from what the first gave: the compiler puts both where the same memory was."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torch.nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.bag(ids % 50).detach()
        return self.head(first - 2 * self.bag((ids * 7 + 3 + first.sum(1, keepdim=True).abs().long()) % 50))


@pytest.mark.slow
def test_ids_that_lie_where_others_lay_are_read_anew() -> None:
    native, model = Twice(), Twice()
    batches = [torch.randint(40, (16, 4), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    work = sl.Workload("twice", model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, ids: m(ids).square().mean(), batches,
                       uses=frozenset())
    sl.apply(default_plan(sl.lift(work), PIN), model, work.optimizer)
    for ids in batches:
        native.zero_grad()
        model.zero_grad()
        want, got = native(ids), model(ids.clone())
        want.square().mean().backward()
        got.square().mean().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(model.bag.weight.grad.to_dense(), native.bag.weight.grad.to_dense())
    assert "nothing fell back" in sl.explain(model)
