"""From a model to a plan and back, over the ways in which models use embeddings: lifted trains as native."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparselift as sl
from sparselift.apply import apply, explain, unapply
from sparselift.errors import LiftRefused, PlanMismatchError
from sparselift.lift import lift
from sparselift.memory import huge_pages, set_huge_pages
from sparselift.optim import RowWiseAdagrad, holders, optimizer_info
from sparselift.plan import Plan, default_plan
from sparselift.space import Constraints
from sparselift.verify import verify
from sparselift.workload import Workload
from tests.unit.example_graphs import on_cuda


class Matrix(nn.Module):
    """EmbeddingBags over (B, L) ids, and an nn.Embedding over one column of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleDict({"a": nn.EmbeddingBag(30, 8, mode="mean", sparse=True),
                                   "b": nn.EmbeddingBag(20, 8, mode="sum", sparse=True)})
        self.embedding = nn.Embedding(12, 8, sparse=True, padding_idx=3)
        self.top = nn.Linear(24, 1)

    def forward(self, inputs: dict[str, Tensor], table: Tensor) -> Tensor:
        return self.top(torch.cat([self.bags["a"](inputs["a"]), self.bags["b"](inputs["b"]), self.embedding(table[:, 1])], 1))


class Sequence(nn.Module):
    """An nn.Embedding over (B, S) ids, pooled by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 6, sparse=True)
        self.top = nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.embedding(ids).mean(1))


class Shared(nn.Module):
    """One table under two modules, and one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.EmbeddingBag(25, 8, mode="sum", sparse=True)
        self.right = nn.EmbeddingBag(25, 8, mode="sum", sparse=True, include_last_offset=True)
        self.right.weight = self.left.weight
        self.twice = nn.EmbeddingBag(15, 8, mode="mean", sparse=True)
        self.top = nn.Linear(32, 1)

    def forward(self, ids: list[Tensor], starts: list[Tensor]) -> Tensor:
        parts = [self.left(ids[0], starts[0]), self.right(ids[1], starts[1]), self.twice(ids[2], starts[2]), self.twice(ids[3], starts[3])]
        return self.top(torch.cat(parts, dim=1))


class Computed(nn.Module):
    """Ids that the model computes: hashed."""

    def __init__(self) -> None:
        super().__init__()
        self.hashed = nn.EmbeddingBag(10, 8, mode="sum", sparse=True)
        self.plain = nn.EmbeddingBag(10, 8, mode="sum", sparse=True)
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor, starts: Tensor) -> Tensor:
        return self.top(self.hashed(ids * 7 % 10, starts) * self.plain(ids, starts))


class Weighted(nn.Module):
    """Per-sample weights that the model learns, one a row."""

    def __init__(self) -> None:
        super().__init__()
        self.importance = nn.Parameter(torch.ones(30))
        self.bag = nn.EmbeddingBag(30, 8, mode="sum", sparse=True)
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor, starts: Tensor) -> Tensor:
        return self.top(self.bag(ids, starts, per_sample_weights=self.importance[ids]))


def _ids(rows: int, count: int, generator: torch.Generator, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, rows, (count,), generator=generator).to(dtype)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]


def _case(build: Callable[[], nn.Module], draw: Callable[[torch.Generator, int], tuple[Any, ...]]) -> Case:
    return Case(build, lambda seed: draw(torch.Generator().manual_seed(seed), 5 + seed % 3))


CASES = {
    "matrix": _case(Matrix, lambda g, b: ({"a": _ids(30, b * 4, g).view(b, 4), "b": _ids(20, b * 2, g, torch.int32).view(b, 2)},
                                          torch.stack([_ids(9, b, g), _ids(12, b, g)], 1))),
    "sequence": _case(Sequence, lambda g, b: (_ids(50, b * 7, g).view(b, 7),)),
    "shared": _case(Shared, lambda g, b: (
        [_ids(25, 2 * b, g), _ids(25, 3 * b, g), _ids(15, b, g), _ids(15, 2 * b, g)],
        [torch.arange(0, 2 * b, 2), torch.arange(0, 3 * b + 1, 3), torch.arange(b), torch.arange(0, 2 * b, 2)])),
    "computed": _case(Computed, lambda g, b: (_ids(10, 3 * b, g), torch.arange(0, 3 * b, 3))),
    "weighted": _case(Weighted, lambda g, b: (_ids(30, 3 * b, g), torch.arange(0, 3 * b, 3))),
}


def workload(name: str, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Workload:
    torch.manual_seed(1)
    model = CASES[name].build()
    return Workload(name, model, optimizer(model.parameters(), lr=0.005, **options), lambda m, b: m(*b).pow(2).mean(),
                    [CASES[name].batch(seed) for seed in range(6)])


def train(work: Workload) -> list[Tensor]:
    return [work.train(work.model, work.optimizer, batch) for batch in work.iterate()]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("name", CASES)
def test_lifted_trains_as_native(name: str, optimizer: Callable[..., torch.optim.Optimizer], backend: str, tmp_path: Any) -> None:
    native, lifted = workload(name, optimizer), workload(name, optimizer)
    plan = default_plan(lift(lifted))
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    verify(plan, lifted, backend=backend)
    apply(plan, lifted.model, lifted.optimizer, backend=backend)
    for a, b in zip(train(native), train(lifted)):
        torch.testing.assert_close(a, b)
    assert "stepped aside" not in explain(lifted.model)
    unapply(lifted.model, lifted.optimizer)
    for a, b in zip(train(native), train(lifted)):
        torch.testing.assert_close(a, b)
    for (key, a), (_, b) in zip(native.model.state_dict().items(), lifted.model.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["matrix", "sequence", "shared", "computed"])
def test_bitwise_plans_keep_every_bit(name: str) -> None:
    native, lifted = workload(name), workload(name)
    plan = default_plan(lift(lifted), Constraints(equivalence="bitwise"))
    assert plan.equivalence == "bitwise"
    verify(plan, lifted)
    apply(plan, lifted.model, lifted.optimizer)
    assert [float(x) for x in train(native)] == [float(x) for x in train(lifted)]
    for a, b in zip(native.model.state_dict().values(), lifted.model.state_dict().values()):
        assert torch.equal(a, b)


def test_apply_keeps_objects_names_and_hooks() -> None:
    work = workload("shared")
    model, names = work.model, [name for name, _ in work.model.named_parameters()]
    modules, calls = [name for name, _ in model.named_modules()], []
    model.left.register_forward_hook(lambda *_: calls.append("forward hook"))
    plan = default_plan(lift(work))
    same_model, same_optimizer = apply(plan, model, work.optimizer)
    assert same_model is model and same_optimizer is work.optimizer and type(model.left) is nn.EmbeddingBag
    assert [name for name, _ in model.named_parameters()] == names and [name for name, _ in model.named_modules()] == modules
    calls.clear()
    train(work)
    assert calls == ["forward hook"] * 6


def test_apply_twice_and_unapply_without_are_refused() -> None:
    work = workload("sequence")
    plan = default_plan(lift(work))
    with pytest.raises(LiftRefused, match="no plan is applied"):
        unapply(work.model, work.optimizer)
    apply(plan, work.model, work.optimizer)
    with pytest.raises(LiftRefused, match="has a plan already"):
        apply(plan, work.model, work.optimizer)
    with pytest.raises(LiftRefused, match="runs a plan already"):
        lift(work)


def test_another_model_is_refused_field_by_field() -> None:
    plan = default_plan(lift(workload("sequence")))
    other = workload("sequence")
    other.model.embedding = nn.Embedding(51, 6, sparse=False)
    optimizer = torch.optim.Adagrad(other.model.parameters())
    with pytest.raises(PlanMismatchError) as caught:
        apply(plan, other.model, optimizer)
    fields = {field for field, _, _ in caught.value.differences}
    assert {"optimizers"} < fields and any("rows" in field for field in fields) and any("sparse" in field for field in fields)
    assert "forward" not in other.model.embedding.__dict__


def test_a_plan_for_another_device_is_refused() -> None:
    work = workload("sequence")
    with pytest.raises(PlanMismatchError, match="device: saved cuda, current cpu"):
        apply(default_plan(on_cuda(lift(work))), work.model, work.optimizer)


def test_native_plan_changes_nothing() -> None:
    work = workload("sequence")
    graph = lift(work)
    plan = replace(default_plan(graph), config=sl.Plan.default(work).config.native())
    hooks = copy.copy(work.model._forward_pre_hooks)
    apply(plan, work.model, work.optimizer)
    assert work.model._forward_pre_hooks == hooks and "native plan" in explain(work.model)
    unapply(work.model, work.optimizer)
    assert "no plan" in explain(work.model)


def test_more_than_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload("sequence")
    plan = default_plan(lift(work))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(LiftRefused, match="2 ranks"):
        apply(plan, work.model, work.optimizer)


def in_huge_pages(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[nn.Module, Workload, Plan]:
    # Above 32 MiB memory comes fresh from the kernel, and not from what a process has had in small pages.
    model = nn.Sequential(nn.Embedding(1_100_000, 8, sparse=True))
    work = Workload("one", model, optimizer(model.parameters(), lr=0.1), lambda m, b: m(b).sum(),
                    [torch.arange(i, i + 5) for i in range(3)])
    return model, work, default_plan(lift(work), Constraints(pin={"huge_pages": "madvise"}))


def test_huge_pages_are_reported() -> None:
    model, work, plan = in_huge_pages()
    address, before = model[0].weight.data_ptr(), model[0].weight.detach().clone()
    apply(plan, model, work.optimizer)
    assert "huge pages: 0.weight: " in explain(model)
    assert model[0].weight.data_ptr() == address and torch.equal(model[0].weight, before)
    unapply(model, work.optimizer)


@pytest.mark.parametrize("before", [True, False])
def test_unapply_leaves_tables_in_the_pages_that_they_had(before: bool) -> None:
    model, work, plan = in_huge_pages()
    if set_huge_pages(model[0].weight, True).huge_bytes == 0:
        pytest.skip("the kernel gives no huge pages here")
    given = set_huge_pages(model[0].weight, before)
    apply(plan, model, work.optimizer)
    assert huge_pages(model[0].weight).prevail
    unapply(model, work.optimizer)
    assert huge_pages(model[0].weight) == given


@pytest.mark.parametrize(("kind", "keys"), [(torch.optim.Adagrad, ["sum"]), (torch.optim.SparseAdam, ["exp_avg", "exp_avg_sq"]),
                                            (RowWiseAdagrad, [])])
def test_state_as_large_as_the_table_moves_with_it(kind: type[torch.optim.Optimizer], keys: list[str]) -> None:
    """SparseAdam makes it in its first step."""
    model, work, plan = in_huge_pages(kind)
    if set_huge_pages(model[0].weight, True).huge_bytes == 0:
        pytest.skip("the kernel gives no huge pages here")
    apply(plan, model, work.optimizer)
    work.train(model, work.optimizer, work.batches[0])
    state = work.optimizer.state[model[0].weight]
    assert [key for key in keys if huge_pages(state[key]).huge_bytes] == keys
    reported = [line.split(": ")[1] for line in explain(model).splitlines() if line.startswith("huge pages: ")]
    assert reported == ["0.weight", *(f"0.weight, {key}" for key in keys)]
    unapply(model, work.optimizer)
    assert not any(huge_pages(state[key]).huge_bytes for key in keys)


def test_pages_of_memory_that_came_later_are_left_alone() -> None:
    model, work, plan = in_huge_pages()
    set_huge_pages(model[0].weight, False)
    apply(plan, model, work.optimizer)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    given = set_huge_pages(model[0].weight, True)
    unapply(model, work.optimizer)
    assert huge_pages(model[0].weight) == given


def _max_norm(model: nn.Module) -> None:
    model.embedding.max_norm = 1.0


def _weight_hook(model: nn.Module) -> None:
    model.embedding.weight.register_hook(print)


def _strided(model: nn.Module) -> None:
    model.embedding.weight.data = model.embedding.weight.data.t().contiguous().t()


def _own_forward(model: nn.Module) -> None:
    model.embedding.forward = model.embedding.forward


@pytest.mark.parametrize(("change", "says"), [
    (_max_norm, "embedding: max_norm=1.0"), (_weight_hook, "embedding: its weight has gradient hooks"),
    (_strided, "embedding: its weight is not contiguous"), (_own_forward, "embedding: its forward has been replaced"),
])
def test_what_lift_would_not_take_any_more_is_refused(change: Callable[[nn.Module], None], says: str) -> None:
    work = workload("sequence")
    plan = default_plan(lift(work))
    change(work.model)
    with pytest.raises(LiftRefused, match=f"apply: {says}"):
        apply(plan, work.model, work.optimizer)
    assert not hasattr(work.model, "_sparselift")


def test_a_part_of_an_applied_model_is_refused() -> None:
    work = workload("sequence")
    plan = default_plan(lift(work))
    apply(plan, work.model, work.optimizer)
    outer = nn.Module()
    outer.embedding, outer.top = work.model.embedding, work.model.top
    with pytest.raises(LiftRefused, match="apply: the model runs a plan already"):
        apply(plan, outer, work.optimizer)


def test_finding_the_optimizers_of_many_tables_is_linear() -> None:
    looked: list[int] = []

    class Counted(nn.Parameter):
        def __eq__(self, other: object) -> bool:
            looked.append(1)
            return self is other

        __hash__ = nn.Parameter.__hash__

    weights = [Counted(torch.zeros(1, 1)) for _ in range(300)]
    later = [{"params": weights[200:250]}, {"params": weights[250:]}]
    optimizers = [torch.optim.SGD(weights[:200], lr=0.1), torch.optim.SGD(later, lr=0.2)]
    looked.clear()
    held = holders(optimizers)
    info = [optimizer_info(True, held[weight], weight.dtype) for weight in weights]
    assert [each.index for each in info] == [0] * 200 + [1] * 100 and len(looked) <= 10 * len(weights)
