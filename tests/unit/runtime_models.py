"""Small models, their structures written out by hand, and native and planned copies to train side by side."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.apply import Applied
from sparselift.dtypes import dtype_name
from sparselift.ir import Concat, Feature, InputPath, Structure, Table
from sparselift.optim import holders, optimizer_info
from sparselift.schedule import GroupSchedule, Schedule, TableSchedule

ROWS = (11, 40, 7)
DIM = 8
HALVES = (torch.float16, torch.bfloat16)


class Bags(nn.Module):
    """Three bags called in a loop and concatenated with a dense part, as DLRM does."""

    def __init__(self, sparse: bool = True, mode: str = "sum", padding_idx: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Linear(3, DIM)
        self.emb = nn.ModuleList(nn.EmbeddingBag(r, DIM, mode=mode, sparse=sparse, padding_idx=padding_idx) for r in ROWS)
        self.top = nn.Linear(DIM * (1 + len(ROWS)), 1)

    def forward(self, dense: Tensor, offsets: Sequence[Tensor], indices: Sequence[Tensor],
                weights: Sequence[Tensor | None] = (None, None, None)) -> Tensor:
        pooled = [e(i, o, w) for e, i, o, w in zip(self.emb, indices, offsets, weights)]
        return self.top(torch.cat([self.bottom(dense), *pooled], dim=1))


class HalfBags(Bags):
    """The same with tables in another dtype, and a dense part in float32."""

    def __init__(self, dtype: torch.dtype, **kind: Any) -> None:
        super().__init__(**kind)
        self.emb.to(dtype)

    def forward(self, dense: Tensor, offsets: Sequence[Tensor], indices: Sequence[Tensor],
                weights: Sequence[Tensor | None] = (None, None, None)) -> Tensor:
        pooled = [e(i, o, w) for e, i, o, w in zip(self.emb, indices, offsets, weights)]
        return self.top(torch.cat([self.bottom(dense).to(pooled[0].dtype), *pooled], dim=1).float())


def batch(seed: int, bags: int = 6) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """dense (B, 3), offsets and indices, with empty bags and repeated ids."""
    generator = torch.Generator().manual_seed(seed)
    offsets, indices = [], []
    for rows in ROWS:
        lengths = torch.randint(0, 4, (bags,), generator=generator)
        offsets.append(lengths.cumsum(0) - lengths)
        indices.append(torch.randint(0, rows, (int(lengths.sum()),), generator=generator))
    return torch.randn(bags, 3, generator=generator), offsets, indices


def bags_structure(model: Bags, optimizers: Sequence[torch.optim.Optimizer], weighted: bool = False) -> Structure:
    """What lifting `Bags` finds."""
    tables, features, held = [], [], holders(optimizers)
    for t, module in enumerate(model.emb):
        info = optimizer_info(module.sparse, held.get(module.weight, ()), module.weight.dtype)
        tables.append(Table(f"emb.{t}.weight", *module.weight.shape, dtype_name(module.weight.dtype), module.sparse, info))
        indices, offsets, weights = (InputPath(("args", argument, t)) for argument in (2, 1, 3))
        features.append(Feature(f"emb.{t}", f"emb.{t}", 0, f"emb.{t}.weight", module.mode, module.padding_idx, False, "offsets", weighted,
                                "int64", indices, offsets, weights if weighted else None))
    concat = Concat("cat", (DIM, *(f.name for f in features)), tables[0].dtype)
    return Structure(tuple(tables), tuple(features), (concat,), tuple(type(o).__name__ for o in optimizers), None)


def schedule(structure: Structure, *, concat: bool = True, prelude: bool = True, update: str = "fused",
             coalesce: str = "chain", dedup: bool = False, ahead: int = 0) -> Schedule:
    """One group of everything, or each lookup by itself; `ahead`: batches whose index work is done before their step."""
    names = tuple(f.name for f in structure.features)
    groups = (GroupSchedule(names, True, structure.concats[0].name if concat else None),) if prelude \
        else tuple(GroupSchedule((name,), False) for name in names)
    knobs = TableSchedule(update, coalesce, 8, "bag", dedup, False, "cached")
    return Schedule("planned", groups, {t.name: knobs for t in structure.tables}, prefetch_batches=ahead)


def pair(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An independent copy of a model and its optimizer, state included."""
    twins = copy.deepcopy((model, optimizer))
    return twins[0], twins[1]


def attach(structure: Structure, plan: Schedule, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], backend: str) -> Applied:
    """Apply a schedule without a plan file around it."""
    applied = Applied(structure, plan, model, backend)
    applied.attach(model, optimizers)
    return applied


def assert_same(native: nn.Module, lifted: nn.Module, exact: bool = True) -> None:
    """Equal parameters, bit for bit or to rounding."""
    for (name, a), (_, b) in zip(native.named_parameters(), lifted.named_parameters(), strict=True):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"{name}: {(a - b).abs().max()}"


def close(mine: Tensor, theirs: Tensor, half: torch.dtype | None = None) -> None:
    """Equal to a few roundings of their dtype, or of that of the tables that they come from."""
    assert mine.dtype == theirs.dtype and mine.layout == theirs.layout
    got, want, eps = mine.to_dense().float(), theirs.to_dense().float(), torch.finfo(half or theirs.dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps * float(want.abs().max()))
