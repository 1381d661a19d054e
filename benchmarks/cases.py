"""What is measured: a training step over the shared benchmark's tables and batches, native and planned, each with its own weights.

Letters in shapes: T tables, B bags of a table, D dim, K ids.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparselift import Workload
from sparselift.models import DLRM
from sparselift.optim import RowWiseAdagrad

LR, EPS = 0.01, 1e-8
NUM_BATCHES, CHECK_STEPS = 8, 2
STATE_FLOATS = {"sgd": lambda dim: 0, "rowwise_adagrad": lambda dim: 1, "adagrad": lambda dim: dim, "sparse_adam": lambda dim: 2 * dim}

# As the shared benchmark holds its peers to each other.
OUTPUT_TOLERANCE = 1e-4        # of the largest pooled value
ROW_TOLERANCE = 1e-4           # of the row's largest update
LOSS_TOLERANCE = 1e-5          # of the loss
STEP_TOLERANCE = 2e-3          # of the norm of all updates of a full step
CHECK_LOSS_SCALE = 1024        # lifts the updates of a full step above float32 rounding


class CheckFailed(Exception):
    """The planned step computes something else than the native one."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The shared benchmark's modules, imported from their folder."""

    workloads: Any
    implementations: Any

    @classmethod
    def load(cls, folder: Path) -> Bench:
        """Raises FileNotFoundError if it is not there."""
        if not (folder / "workloads.py").exists():
            raise FileNotFoundError(f"there is no benchmark folder {folder}")
        sys.path.append(str(folder.resolve()))
        return cls(importlib.import_module("workloads"), importlib.import_module("implementations"))


class Bags(nn.Module):
    """One bag of sums a table, side by side: the sparse path alone."""

    def __init__(self, rows: Sequence[int], dim: int, generator: torch.Generator) -> None:
        """Weights are on the generator's device."""
        super().__init__()
        self.emb_l = nn.ModuleList(
            nn.EmbeddingBag(count, dim, mode="sum", sparse=True,
                            _weight=torch.empty(count, dim, device=generator.device).uniform_(-0.01, 0.01, generator=generator))
            for count in rows)

    def forward(self, offsets: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
        """(B, T * D) pooled rows."""
        return torch.cat([bag(ids, starts) for bag, ids, starts in zip(self.emb_l, indices, offsets)], dim=1)


class Case:
    """A workload of the shared benchmark with one optimizer, ready to build either side of."""

    def __init__(self, bench: Bench, shape: Any, optimizer: str, seed: int) -> None:
        self.bench, self.shape, self.optimizer, self.seed = bench, shape, optimizer, seed
        self.batches = [bench.workloads.make_batch(shape, seed * NUM_BATCHES + number) for number in range(NUM_BATCHES)]
        self.output_grad = None if shape.dlrm else bench.workloads.make_output_grad(shape, seed)

    def side(self, planned: bool) -> Side:
        """A model with its optimizers. All sides of a case start from the same weights."""
        generator = torch.Generator().manual_seed(self.seed)
        model: nn.Module
        if self.shape.dlrm:
            model = DLRM(self.shape.rows, self.shape.dim, (512, 256), (512, 256, 1), generator=generator)
        else:
            model = Bags(self.shape.rows, self.shape.dim, generator)
        tables = [bag.weight for bag in model.emb_l]
        optimizers = [self._table_optimizer(tables, planned)]
        if self.shape.dlrm:
            optimizers.append(torch.optim.SGD([*model.bot_l.parameters(), *model.top_l.parameters()], lr=LR))
        return Side(self, model, optimizers)

    def _table_optimizer(self, tables: list[Tensor], planned: bool) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(tables, lr=LR)
        if self.optimizer == "adagrad":
            return torch.optim.Adagrad(tables, lr=LR, eps=EPS)
        if self.optimizer == "sparse_adam":
            return torch.optim.SparseAdam(tables, lr=LR, eps=EPS)
        if self.optimizer == "rowwise_adagrad":
            return (RowWiseAdagrad if planned else self.bench.implementations.RowWiseAdagrad)(tables, lr=LR, eps=EPS)
        raise ValueError(f"optimizer must be one of {sorted(STATE_FLOATS)}; got {self.optimizer!r}")

    def touched(self, table: int, steps: int) -> Tensor:
        """(U,) distinct rows of a table that the first `steps` batches name."""
        return torch.cat([batch.table_indices[table] for batch in self.batches[:steps]]).unique()

    def traffic_bytes(self) -> int:
        """Least memory traffic of a step's sparse path, mean of the batches."""
        return self.forward_bytes() + self.update_bytes()

    def forward_bytes(self) -> int:
        """Of its forward: ids are read, every distinct row is read, pooled outputs are written."""
        return self._mean_bytes(4 * self.shape.dim)

    def update_bytes(self) -> int:
        """Of backward and update: ids and output gradients are read, every distinct row is read and written with its optimizer state."""
        return self._mean_bytes(2 * 4 * (self.shape.dim + STATE_FLOATS[self.optimizer](self.shape.dim)))

    def _mean_bytes(self, a_row: int) -> int:
        """Ids, something at every output, and so many bytes a distinct row."""
        outputs = 4 * self.shape.batch_size * self.shape.num_tables * self.shape.dim
        return sum(batch.indices.nbytes + outputs + len(batch.row_ids.unique()) * a_row for batch in self.batches) // len(self.batches)


class Side:
    """One model in training. `step` is what is timed."""

    def __init__(self, case: Case, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.case, self.model, self.optimizers = case, model, optimizers
        self.output_grad = case.output_grad

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """What the model's forward gets of a batch."""
        tables = batch.table_offsets, batch.table_indices
        return (batch.dense, *tables) if self.case.output_grad is None else tables

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """0-d; of the sparse path alone, the one whose gradient at the output is the given one."""
        if self.case.output_grad is None:
            return nn.functional.binary_cross_entropy_with_logits(model(*self.inputs(batch)), batch.labels)
        return (model(*self.inputs(batch)) * self.case.output_grad).sum()

    def step(self, number: int, scale: float = 1.0) -> Tensor:
        """One step on batch `number`. Returns the pooled output, or the loss of a full step."""
        batch = self.case.batches[number]
        if self.output_grad is None:
            output = self.loss(self.model, batch)
            output.backward(torch.tensor(scale, device=output.device))
        else:
            output = self.model(batch.table_offsets, batch.table_indices)
            output.backward(self.output_grad)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return output

    def workload(self) -> Workload:
        """For lifting and tuning."""
        return Workload(f"{self.case.shape.name}-{self.case.optimizer}", self.model, self.optimizers, self.loss, self.case.batches,
                        uses=frozenset(), inputs=self.inputs)


class Trainer(Protocol):
    """What the check needs of a side: ours, or a peer's."""

    model: Any                     # with a table in `emb_l[t].weight`

    def step(self, number: int, scale: float = 1.0) -> Tensor: ...


def check(native: Side, *others: Trainer) -> None:
    """Two steps of each. Raises CheckFailed unless outputs and weights agree, and rows that no id names are bit for bit the same."""
    start = [bag.weight.detach()[native.case.touched(t, CHECK_STEPS)] for t, bag in enumerate(native.model.emb_l)]
    wanted = _outputs(native)
    for other in others:
        _compare(native, wanted, start, other)


def _outputs(side: Trainer) -> list[Tensor]:
    return [side.step(number, CHECK_LOSS_SCALE).detach().clone() for number in range(CHECK_STEPS)]


def _compare(native: Side, wanted: list[Tensor], start: list[Tensor], planned: Trainer) -> None:
    case = native.case
    for number, (want, got) in enumerate(zip(wanted, _outputs(planned), strict=True)):
        allowed = OUTPUT_TOLERANCE if want.dim() else LOSS_TOLERANCE
        _limit(f"{case.shape.name}/{case.optimizer}: output of step {number + 1}", (got - want).abs().max() / want.abs().max(), allowed)
    differences, updates = [], []
    for table, (mine, theirs) in enumerate(zip(planned.model.emb_l, native.model.emb_l, strict=True)):
        name, rows = f"{case.shape.name}/{case.optimizer}: table {table}", case.touched(table, CHECK_STEPS)
        other = (mine.weight.detach() != theirs.weight.detach()).any(1)
        other[rows] = False
        if other.any():
            raise CheckFailed(f"{name}: row {int(other.nonzero()[0])} changed, and no id names it")
        difference, update = (mine.weight - theirs.weight).detach()[rows], theirs.weight.detach()[rows] - start[table]
        if not case.shape.dlrm:
            _limit(name, (difference.abs().amax(1) / update.abs().amax(1)).max(), ROW_TOLERANCE)
        differences.append(difference.norm())
        updates.append(update.norm())
    _limit(f"{case.shape.name}/{case.optimizer}: all tables", torch.stack(differences).norm() / torch.stack(updates).norm(), STEP_TOLERANCE)


def _limit(what: str, error: Tensor, allowed: float) -> None:
    if not error.item() <= allowed:                            # also for NaN
        raise CheckFailed(f"{what} is off by {error.item():.1e}; allowed {allowed:.0e}")


