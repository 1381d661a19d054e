"""Concatenations, interactions and calls with float16 and bfloat16 lookups, beside float32 ones and in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparselift.apply import ATTRIBUTE, apply, explain
from sparselift.lift import lift
from sparselift.plan import default_plan
from sparselift.rewrites import CATALOG
from sparselift.rewrites.base import Site
from sparselift.verify import verify
from sparselift.workload import Workload
from tests.unit.runtime_models import DIM, HALVES, HalfBags, batch, close


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


class Promoted(HalfBags):
    """Half lookups beside a float32 vector, to which torch converts them, and the dot products of all pairs, as DLRM has them."""

    def __init__(self, dtype: torch.dtype, dot: bool, vectors: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.vectors = vectors
        self.pairs = tuple(torch.tril_indices(4, 4, -1)) if dot else None
        self.top = nn.Linear(DIM + 6 if dot else 4 * DIM, 1)
        nn.init.constant_(self.top.weight, 0.5)

    def forward(self, dense: Tensor, offsets: Any, indices: Any, weights: Any = None) -> Tensor:
        x = self.bottom(dense).to(self.vectors)
        whole = torch.cat([x, *(bag(ids, starts) for bag, ids, starts in zip(self.emb, indices, offsets))], dim=1)
        if self.pairs is not None:
            vectors = whole.view(len(x), -1, DIM)
            whole = torch.cat([x, torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]], dim=1)
        return self.top(whole.float())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dot", [False, True], ids=["concat", "dot"])
def test_half_lookups_in_a_float32_concat(dtype: torch.dtype, dot: bool) -> None:
    native, planned = (Promoted(dtype, dot) for _ in range(2))
    optimizers = [sgd(model) for model in (native, planned)]
    work = Workload("promoted", planned, optimizers[1], lambda m, b: m(*b).sum(), [batch(seed) for seed in range(3)])
    graph = lift(work)
    (concat,) = graph.structure.concats
    node = next(node for node in graph.nodes if node.op == "concat").resources
    assert concat.dtype == "float32" and (node.read_bytes, node.write_bytes) == (6 * DIM * (4 + 3 * 2), 6 * DIM * 4 * 4)
    plan = default_plan(graph)
    assert plan.config.policy["concat"] and plan.config.policy["interaction"] is dot
    kinds = verify(plan, work).exact
    assert kinds["output"] and ("interaction" in kinds) is dot
    apply(plan, planned, optimizers[1])
    for seed in range(3):
        for model, optimizer in zip((native, planned), optimizers):
            loss = model(*batch(seed)).sum()
            loss.backward()
            assert all(bag.weight.grad is not None and bag.weight.grad.dtype == dtype for bag in model.emb)
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(planned.parameters(), native.parameters()):
            close(mine.detach(), theirs.detach(), dtype)
    assert "nothing fell back" in explain(planned) and "written straight into concat: 3 times" in explain(planned)
    pooled = planned.emb[0](batch(0)[2][0], batch(0)[1][0])
    assert pooled.dtype == dtype


def test_an_interaction_of_half_vectors_is_torchs() -> None:
    model = Promoted(torch.bfloat16, True, torch.bfloat16)
    work = Workload("vectors", model, sgd(model), lambda m, b: m(*b).sum(), [batch(seed) for seed in range(3)])
    graph = lift(work)
    assert [each.dtype for each in graph.structure.concats] == ["bfloat16"] and len(graph.structure.interactions) == 1
    fuse = next(rewrite for rewrite in CATALOG if rewrite.name == "fuse_interaction")
    said = fuse.legal(graph.structure, Site("policy", ()), {"interaction": True})
    assert said == "the kernel multiplies float32 vectors, and those of interaction are bfloat16"
    plan = default_plan(graph)
    assert plan.config.policy["concat"] and not plan.config.policy["interaction"]
    verify(plan, work)


def test_a_half_lookup_that_is_used_beside_its_float32_concat() -> None:
    """What a hook does with it is not in the recorded step."""
    native, planned = (Promoted(torch.float16, False) for _ in range(2))
    optimizers = [sgd(model) for model in (native, planned)]
    work = Workload("promoted", planned, optimizers[1], lambda m, b: m(*b).sum(), [batch(seed) for seed in range(3)])
    apply(default_plan(lift(work)), planned, optimizers[1])
    for late in (False, True):
        seen = []
        for model in (native, planned):
            pooled: list[Tensor] = []
            keep = model.emb[0].register_forward_hook(lambda m, a, out, pooled=pooled, late=late: pooled.append(out if late else out * 2))
            loss = model(*batch(0)).sum()
            keep.remove()
            (loss + (pooled[0] * 2 if late else pooled[0]).float().sum()).backward()
            seen.append((pooled[0].detach(), model.emb[0].weight.grad.to_dense()))
            model.zero_grad()
        for mine, theirs in zip(seen[1], seen[0]):
            close(mine + 0, theirs)


class Mixed(nn.Module):
    """Tables of three dtypes, pooled in three ways, with trainable per-sample weights, and none of them in a concat."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.EmbeddingBag(20, DIM, mode="sum", sparse=True)
        self.narrow = nn.EmbeddingBag(30, DIM, mode="sum", sparse=True, dtype=torch.float16)
        self.brain = nn.Embedding(40, DIM, sparse=True, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, ids: Tensor, starts: Tensor, factors: Tensor, rows: Tensor) -> Tensor:
        narrow = self.narrow(ids, starts, per_sample_weights=factors)
        return self.wide(ids, starts).sum() + narrow.float().pow(2).sum() + self.brain(rows).float().pow(2).sum()


def mixed_batch(seed: int, grad: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    factors = torch.randn(12, generator=source).half().requires_grad_(grad)
    return torch.randint(0, 20, (12,), generator=source), torch.arange(0, 12, 3), factors, torch.randint(0, 40, (4, 2), generator=source)


def test_tables_of_several_dtypes_in_one_call() -> None:
    native, planned = Mixed(), Mixed()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (native, planned)]
    work = Workload("mixed", planned, optimizers[1], lambda m, b: m(*b), [mixed_batch(seed) for seed in range(3)])
    graph = lift(work)
    assert {table.name: table.dtype for table in graph.structure.tables} == {
        "wide.weight": "float32", "narrow.weight": "float16", "brain.weight": "bfloat16"}
    plan = default_plan(graph)
    verify(plan, work)
    apply(plan, planned, optimizers[1])
    for seed in range(3):
        inputs = [mixed_batch(seed, grad=True) for _ in optimizers]
        for model, optimizer, given in zip((native, planned), optimizers, inputs):
            model(*given).backward()
            optimizer.step()
            optimizer.zero_grad()
        close(inputs[1][2].grad, inputs[0][2].grad)                 # type: ignore[arg-type]
        for mine, theirs in zip(planned.parameters(), native.parameters()):
            close(mine.detach(), theirs.detach())
    (prelude,) = planned.__dict__[ATTRIBUTE].runtime.preludes
    assert len(prelude.group.tables) == 3 and prelude.group.calls == 3 and "nothing fell back" in explain(planned)
    with pytest.raises(TypeError, match=r"per-sample weights must have the weight's dtype torch\.float16; got torch\.float32"):
        planned(*mixed_batch(0)[:2], mixed_batch(0)[2].float(), mixed_batch(0)[3])


def test_compiled_graphs_have_torchs_lookups_of_half_tables() -> None:
    native, planned = (Promoted(torch.bfloat16, False) for _ in range(2))
    optimizers = [sgd(model) for model in (native, planned)]
    work = Workload("promoted", planned, optimizers[1], lambda m, b: m(*b).sum(), [batch(seed) for seed in range(3)])
    apply(default_plan(lift(work)), planned, optimizers[1])
    for model, optimizer in zip((native, torch.compile(planned, backend="eager", fullgraph=True)), optimizers):
        model(*batch(0)).sum().backward()
        optimizer.step()
    for mine, theirs in zip(planned.parameters(), native.parameters()):
        assert torch.equal(mine, theirs)
    assert "a compiled graph has torch's own lookup: a node has float32 tables" in explain(planned)


def test_a_graph_of_the_whole_forward_is_not_for_half_tables() -> None:
    model = Promoted(torch.bfloat16, False)
    model.bottom = nn.Sequential(nn.Linear(3, DIM), nn.ReLU(), nn.Linear(DIM, DIM))      # type: ignore[assignment]
    graph = lift(Workload("promoted", model, sgd(model), lambda m, b: m(*b).sum(), [batch(seed) for seed in range(3)]))
    compiled = next(rewrite for rewrite in CATALOG if rewrite.name == "compile_dense")
    said = compiled.legal(graph.structure, Site("policy", ()), {"compile": "inductor_graph"})
    assert said == "table emb.0.weight: bfloat16 tables are looked up outside of graphs"
