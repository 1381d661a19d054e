"""Plans for float16 and bfloat16 tables: lifted, trained beside torch, and refused by name where there is nothing native to equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparselift.apply import apply, explain, unapply
from sparselift.batches import prefetch_batches
from sparselift.errors import LiftRefused, PlanMismatchError
from sparselift.ir import Graph, Structure
from sparselift.lift import lift
from sparselift.optim import RowWiseAdagrad
from sparselift.plan import Plan, default_plan
from sparselift.rewrites import CATALOG
from sparselift.rewrites.base import Site, SizeClass
from sparselift.space import Constraints
from sparselift.space.classes import size_classes
from sparselift.verify import verify
from sparselift.workload import Workload
from tests.unit.runtime_models import DIM, HALVES, ROWS, Bags, HalfBags, batch, close

Make = Callable[[Bags], list[torch.optim.Optimizer]]


def split(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda m: [torch.optim.SGD([*m.bottom.parameters(), *m.top.parameters()], lr=0.05), kind(m.emb.parameters(), **options)]


SGD: Make = lambda m: [torch.optim.SGD(m.parameters(), lr=0.05)]                       # noqa: E731
ROUNDED = split(RowWiseAdagrad, lr=0.1, rounding_seed=7)
FUSED, TORCH = "nothing fell back", "and kernels sum in float32: 3 times"
# make, whether gradients are sparse, what explain says
OPTIMIZERS: dict[str, tuple[Make, bool, str]] = {
    "sgd": (SGD, True, FUSED), "sgd dense": (SGD, False, FUSED),
    "rowwise rounded": (ROUNDED, True, FUSED), "rowwise rounded dense": (ROUNDED, False, FUSED),
    "rowwise": (split(RowWiseAdagrad, lr=0.1, eps=1e-3), True, TORCH),
    "adagrad": (split(torch.optim.Adagrad, lr=0.1, eps=1e-3), True, TORCH),
    "adagrad dense": (split(torch.optim.Adagrad, lr=0.1, eps=1e-3), False, TORCH),
    "sparse adam": (split(torch.optim.SparseAdam, lr=0.05, eps=1e-3), True, TORCH),
}


class Run:
    """A model in training, with the default plan or natively."""

    def __init__(self, make: Make, dtype: torch.dtype, planned: bool, **kind: Any) -> None:
        self.model = HalfBags(dtype, **kind)
        self.optimizers = make(self.model)
        self.work = Workload("half", self.model, self.optimizers, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])
        self.plan: Plan | None = default_plan(lift(self.work)) if planned else None
        if self.plan is not None:
            apply(self.plan, self.model, self.optimizers)

    def backward(self, seed: int) -> Tensor:
        loss = self.model(*batch(seed)).pow(2).mean()
        loss.backward()
        return loss

    def step(self, seed: int) -> None:
        self.backward(seed)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_planned_step_is_natives_to_rounding(optimizer: str, dtype: torch.dtype) -> None:
    make, sparse, said = OPTIMIZERS[optimizer]
    native, planned = (Run(make, dtype, each, sparse=sparse) for each in (False, True))
    for seed in range(3):
        for run in (native, planned):
            run.step(seed)
        for mine, theirs in zip(planned.model.emb, native.model.emb):
            close(mine.weight.detach(), theirs.weight.detach())
    for mine, theirs in zip(planned.optimizers, native.optimizers):
        a, b = mine.state_dict(), theirs.state_dict()
        assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
        for key, state in b["state"].items():
            assert list(a["state"][key]) == list(state)
            assert all(a["state"][key][name].dtype == value.dtype for name, value in state.items() if isinstance(value, Tensor))
    assert said in explain(planned.model)
    unapply(planned.model, planned.optimizers)
    planned.step(3)


def in_groups(model: Bags) -> list[torch.optim.Optimizer]:
    """`ROUNDED` with a group a table."""
    tables = [{"params": [bag.weight], "lr": lr} for bag, lr in zip(model.emb, (0.1, 0.2, 0.3))]
    return [torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.05), RowWiseAdagrad(tables, rounding_seed=7)]


@pytest.mark.parametrize("make", [ROUNDED, in_groups], ids=["a group", "groups"])
def test_rounding_by_chance_draws_what_the_optimizer_draws(make: Make) -> None:
    """By parameter, step, row and column: with other keys about half of the touched weights would differ."""
    native, planned = (Run(make, torch.bfloat16, each) for each in (False, True))
    moved = torch.zeros(())
    differ = 0
    for seed in range(6):
        before = [bag.weight.detach().clone() for bag in native.model.emb]
        for run in (native, planned):
            run.model(*batch(seed)).sum().backward()              # whose gradients do not depend on how lookups were rounded
            run.optimizers[1].step()
            run.optimizers[1].zero_grad()
        for mine, theirs, old in zip(planned.model.emb, native.model.emb, before):
            differ += int((mine.weight != theirs.weight).sum())
            moved += (theirs.weight != old).sum()
            mine.weight.data.copy_(theirs.weight)                  # so that each step is compared alone
    assert moved > 300 and differ < 0.05 * moved


def test_a_resumed_run_rounds_as_one_that_went_on() -> None:
    straight, resumed = (Run(ROUNDED, torch.bfloat16, True) for _ in range(2))
    for seed in range(2):
        straight.step(seed)
        resumed.step(seed)
    saved = copy.deepcopy([resumed.model.state_dict(), *(optimizer.state_dict() for optimizer in resumed.optimizers)])
    fresh = Run(ROUNDED, torch.bfloat16, True)
    for part, state in zip((fresh.model, *fresh.optimizers), saved):
        part.load_state_dict(state)
    for seed in range(2, 4):
        straight.step(seed)
        fresh.step(seed)
    for mine, theirs in zip(fresh.model.parameters(), straight.model.parameters()):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------------------------------------------------------- gradients and lookups

@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_the_gradient_is_what_torch_has_there(dtype: torch.dtype, sparse: bool) -> None:
    native, planned = (Run(SGD, dtype, each, sparse=sparse) for each in (False, True))
    planned.model.load_state_dict(native.model.state_dict())
    with torch.no_grad():
        for run in (native, planned):
            run.model.top.weight.fill_(0.5)          # the same bits arrive, whatever the lookups were rounded to
    for run in (native, planned):
        (run.model(*batch(0)).sum()).backward()
    for mine, theirs in zip(planned.model.emb, native.model.emb):
        got, want = mine.weight.grad, theirs.weight.grad
        assert got is not None and want is not None
        assert (got.dtype, got.layout, got.shape) == (want.dtype, want.layout, want.shape)
        if sparse:
            assert torch.equal(got._indices(), want._indices()) and torch.equal(got._values(), want._values())
        else:
            close(got + 0, want)
    if not sparse:
        norms = [torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1) for run in (native, planned)]
        close(norms[1], norms[0], dtype)
        for mine, theirs in zip(planned.model.emb, native.model.emb):
            close(mine.weight.grad + 0, theirs.weight.grad)


def test_gradients_of_several_backwards() -> None:
    """torch adds no sparse float16 tensors, so that there is nothing native to equal; pending gradients add up in float32."""
    native, planned = (Run(SGD, torch.float16, each) for each in (False, True))
    native.backward(0)
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        native.backward(1)
    wide = Run(SGD, torch.float32, False)
    wide.model.load_state_dict(planned.model.state_dict())
    for run in (planned, wide):
        run.backward(0)
        run.backward(1)
    grad = planned.model.emb[0].weight.grad
    assert grad is not None and grad.dtype == torch.float16
    assert torch.allclose(grad.to_dense().float(), wide.model.emb[0].weight.grad.to_dense(), rtol=1e-2, atol=1e-3)
    for run in (planned, wide):
        run.optimizers[0].step()
    for mine, theirs in zip(planned.model.emb, wide.model.emb):
        assert torch.allclose(mine.weight.float(), theirs.weight, rtol=2e-3, atol=2e-3)
    assert "nothing fell back" in explain(planned.model)


def test_evaluations_and_batches_that_are_prepared_ahead() -> None:
    native, planned = (Run(SGD, torch.bfloat16, each) for each in (False, True))
    with torch.inference_mode():
        close(planned.model(*batch(0)), native.model(*batch(0)), torch.bfloat16)
    ahead = prefetch_batches([batch(seed) for seed in range(3)], planned.model, lambda each: each)
    for mine, theirs in zip(ahead, [batch(seed) for seed in range(3)]):
        for run, given in ((planned, mine), (native, theirs)):
            run.model(*given).pow(2).mean().backward()
            run.optimizers[0].step()
            run.optimizers[0].zero_grad()
    for mine, theirs in zip(planned.model.parameters(), native.model.parameters()):
        close(mine.detach(), theirs.detach(), torch.bfloat16)


def test_a_table_that_moves_to_another_dtype_runs_in_torch() -> None:
    run = Run(SGD, torch.bfloat16, True)
    run.step(0)
    run.model.float()
    run.step(1)
    assert run.model.emb[0].weight.dtype == torch.float32 and "torch's forward ran" in explain(run.model)


# --------------------------------------------------------------------------------------------------------------- graphs, plans, space

def half_graph(dtype: torch.dtype = torch.bfloat16, make: Make = SGD) -> tuple[HalfBags, list[torch.optim.Optimizer], Graph]:
    model = HalfBags(dtype)
    optimizers = make(model)
    work = Workload("half", model, optimizers, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])
    return model, optimizers, lift(work)


def test_nodes_count_bytes_of_the_dtype() -> None:
    _, _, half = half_graph()
    bags = Bags()
    wide = lift(Workload("wide", bags, SGD(bags), lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)]))
    here, there = ({node.name: node.resources for node in graph.nodes} for graph in (half, wide))
    sketch = half.sketches["emb.1"]
    ids = sketch.lookups_per_batch
    assert here["lookup:emb.1"].write_bytes == 6 * DIM * 2 and here["concat"].write_bytes * 2 == there["concat"].write_bytes
    assert here["expand:emb.1.weight"].write_bytes == round(ids * (2 * DIM + 8))
    assert here["update:emb.1.weight"].read_bytes == round(ids * 2 * 2 * DIM)
    assert half.structure.table("emb.1.weight").nbytes == ROWS[1] * DIM * 2
    assert [table.optimizer.fused_rule for table in half.structure.tables if table.optimizer] == ["sgd"] * 3
    assert all("bfloat16" in each.name for each in size_classes(half))
    assert Structure.from_dict(half.structure.to_dict()) == half.structure


def test_optimizer_state_is_counted_as_it_is_kept() -> None:
    for make, itemsize in ((ROUNDED, 4), (OPTIMIZERS["rowwise"][0], 2)):
        _, _, graph = half_graph(make=make)
        unique = graph.sketches["emb.1"].unique_per_batch
        update = next(node for node in graph.nodes if node.name == "update:emb.1.weight")
        assert update.resources.write_bytes == round(unique * (2 * DIM + itemsize))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_plan_goes_through_a_file_and_names_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizers, graph = half_graph(dtype)
    plan = default_plan(graph)
    assert plan.equivalence == "reassociated"
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    apply(loaded, model, optimizers)
    wide = Bags()
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(PlanMismatchError, match=rf"tables\.emb\.0\.weight\.dtype: saved '?{name}'?, current '?float32"):
        apply(loaded, wide, SGD(wide))


def test_what_is_not_done_is_refused_by_name() -> None:
    model = HalfBags(torch.float64)
    with pytest.raises(LiftRefused, match=r"its weight is float64 \(float32, float16 and bfloat16 are lifted\)"):
        lift(Workload("wide", model, SGD(model), lambda m, b: m(*b).pow(2).mean(), [batch(0)]))
    _, _, graph = half_graph()
    names = tuple(table.name for table in graph.structure.tables)
    site = Site("all", (SizeClass("all", names),))
    fuse = next(rewrite for rewrite in CATALOG if rewrite.name == "fuse_update")
    in_turn, summed = ({"update": "fused", "coalesce": coalesce} for coalesce in ("none", "sort"))
    assert "bfloat16 weights would be rounded once a lookup" in str(fuse.legal(graph.structure, site, in_turn))
    assert fuse.legal(graph.structure, site, summed) is None
    for make, optimizer in ((OPTIMIZERS["adagrad"][0], "Adagrad"), (OPTIMIZERS["rowwise"][0], "RowWiseAdagrad without rounding_seed")):
        _, _, graph = half_graph(make=make)
        reason = str(fuse.legal(graph.structure, site, summed))
        assert optimizer in reason and "of a bfloat16 table in bfloat16, and kernels sum in float32" in reason


def test_a_bitwise_plan_of_pooled_halves_is_native() -> None:
    _, _, graph = half_graph()
    plan = default_plan(graph, Constraints(equivalence="bitwise"))
    assert plan.config.path == "native"


class Rows(nn.Module):
    """One half table whose rows nothing pools."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(30, DIM, sparse=True, dtype=torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.emb(ids).float().pow(2).sum()


def test_rows_without_pooling_keep_torchs_bits() -> None:
    batches = [(torch.randint(0, 30, (5, 3), generator=torch.Generator().manual_seed(seed)),) for seed in range(3)]
    native, planned = Rows(), Rows()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (native, planned)]
    work = Workload("rows", planned, optimizers[1], lambda m, b: m(*b), batches)
    plan = default_plan(lift(work), Constraints(equivalence="bitwise"))
    assert plan.equivalence == "bitwise" and plan.config.path == "planned"
    assert verify(plan, work).real["outputs"] == 0.0
    apply(plan, planned, optimizers[1])
    for given in batches:
        for model, optimizer in zip((native, planned), optimizers):
            model(*given).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(native.emb.weight, planned.emb.weight)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise rounded", "adagrad"])
def test_plans_of_half_tables_are_certified(optimizer: str, dtype: torch.dtype) -> None:
    make, sparse, _ = OPTIMIZERS[optimizer]
    model = HalfBags(dtype, sparse=sparse, mode="mean" if optimizer == "sgd" else "sum")
    optimizers = make(model)
    work = Workload("half", model, optimizers, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])
    before = copy.deepcopy(model.state_dict())
    certificate = verify(default_plan(lift(work)), work)
    assert certificate.exact["output"] and certificate.exact["weights"] and certificate.real["outputs"] <= 1
    assert certificate.real["updates"] <= 1 and ("optimizer sums" in certificate.exact) == (optimizer == "rowwise rounded")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
