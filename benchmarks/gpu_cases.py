"""Sparse steps over tables of gigabytes on a device: shapes, batches, and the sides that are timed, each with its own weights.

The shapes are those of the CPU benchmark in kind (few ids or many, narrow rows or wide, uniform ids or skewed), grown until a step
moves gigabytes and tables are many times the device's cache; and cut again to what its memory holds.

Letters in shapes: T tables, B bags of a table, D dim, K ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import device_peers
import numpy as np
import torch
from cases import EPS, LR, Bags, Bench, Case, Side
from peer_sides import PeerSide, peer_sides
from torch import Tensor

from sparselift.datasets.synthetic import CRITEO_KAGGLE, MLPERF_DCNV2, scatter, zipf_ranks
from sparselift.kernels.base import FeatureSpec, IndexBatch, Segment, State, TableSpec, UpdateRule
from sparselift.kernels.cuda import CudaBackend

NUM_BATCHES = 4
SIDES_IN_MEMORY = 5                # ours, torch, two peers, and one that is being made
TABLES_SHARE, GRADS_SHARE = 0.6, 0.2   # of the free memory, for tables of all sides, and for gradients
GRAD_COPIES = 6                    # of K rows that torch's sparse gradients take on their way
CRITEO_ROWS = tuple(min(rows, 10_000_000) for rows in CRITEO_KAGGLE.rows)
MLPERF_ROWS = tuple(min(rows, 10_000_000) for rows in MLPERF_DCNV2.rows)


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """Tables and ids of a step; the fields that `cases` reads are the shared benchmark's."""

    name: str
    about: str
    rows: tuple[int, ...]          # (T,)
    pooling: tuple[int, ...]       # (T,) ids of a bag
    dim: int
    batch_size: int
    exponent: float | None         # of Zipf's law; None: uniform ids
    optimizers: tuple[str, ...]
    dlrm: bool = False

    @property
    def num_tables(self) -> int:
        return len(self.rows)

    @property
    def table_bytes(self) -> int:
        return 4 * self.dim * sum(self.rows)

    @property
    def num_ids(self) -> int:
        """K of a batch."""
        return self.batch_size * sum(self.pooling)

    def fitting(self, free_bytes: int) -> DeviceShape:
        """Large tables halved until all sides have room, then the batch until gradients have."""
        shape = self
        while shape.table_bytes * SIDES_IN_MEMORY > TABLES_SHARE * free_bytes and max(shape.rows) > 1:
            cap = max(shape.rows) // 2
            shape = replace(shape, rows=tuple(min(rows, cap) for rows in shape.rows))
        while 4 * shape.dim * shape.num_ids * GRAD_COPIES > GRADS_SHARE * free_bytes and shape.batch_size > 1:
            shape = replace(shape, batch_size=shape.batch_size // 2)
        return shape

    def tiny(self) -> DeviceShape:
        """Of the same kind, for an emulator."""
        rows, lengths = (tuple(min(count, most) for count in counts[:3]) for counts, most in ((self.rows, 40), (self.pooling, 3)))
        return replace(self, rows=rows, pooling=lengths, dim=8, batch_size=6)


BOTH = ("sgd", "rowwise_adagrad")
SHAPES = {shape.name: shape for shape in (
    DeviceShape("W7", "memory-bound: many uniform ids over large tables", (5_000_000,) * 8, (100,) * 8, 64, 8192, None, BOTH),
    DeviceShape("W1", "Criteo Kaggle, one-hot, uniform ids, wide rows", CRITEO_ROWS, (1,) * 26, 128, 65536, None, BOTH),
    DeviceShape("W2", "MLPerf DLRM-DCNv2, multi-hot, skewed ids", MLPERF_ROWS, MLPERF_DCNV2.pooling, 64, 8192, 1.05, BOTH),
    DeviceShape("W4", "few large tables, wide rows, long skewed bags", (10_000_000,) * 4, (50,) * 4, 128, 4096, 1.05, BOTH),
    DeviceShape("W5", "heavy duplication", (1_000_000,) * 8, (20,) * 8, 32, 16384, 1.2, BOTH),
    DeviceShape("W3", "many small tables, narrow rows", (100_000,) * 200, (5,) * 200, 16, 4096, None, BOTH),
    DeviceShape("W6a", "as W1, in a full DLRM step", CRITEO_ROWS, (1,) * 26, 128, 65536, None, BOTH, dlrm=True),
    DeviceShape("W6b", "as W2, in a full DLRM step", MLPERF_ROWS, MLPERF_DCNV2.pooling, 64, 8192, 1.05, BOTH, dlrm=True),
)}


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Ids table by table and, for the peers, side by side with T * B + 1 offsets."""

    table_indices: list[Tensor]    # (B * L,) int64 a table
    table_offsets: list[Tensor]    # (B,)
    indices: Tensor                # (K,)
    offsets: Tensor                # (T * B + 1,)
    row_ids: Tensor                # (K,) counted through all tables


class DeviceCase(Case):
    """A shape with one optimizer, on a device."""

    def __init__(self, shape: DeviceShape, optimizer: str, seed: int, device: torch.device) -> None:
        self.bench, self.shape, self.optimizer, self.seed = Bench(device_peers, device_peers), shape, optimizer, seed
        self.device, rng = device, np.random.default_rng(seed)
        generator = torch.Generator(device).manual_seed(seed)
        self.batches = [self._batch(rng, generator) for _ in range(NUM_BATCHES)]
        self.output_grad = None if shape.dlrm else self._output_grad(generator)

    def _output_grad(self, generator: torch.Generator) -> Tensor:
        """Odd multiples of 1/128: sums of them are exact in any order."""
        size = self.shape.batch_size, self.shape.num_tables * self.shape.dim
        return (2 * torch.randint(-8, 8, size, generator=generator, device=self.device) + 1) / 128

    def _batch(self, rng: np.random.Generator, generator: torch.Generator) -> DeviceBatch:
        size, ids = self.shape.batch_size, []
        for rows, length in zip(self.shape.rows, self.shape.pooling):
            if self.shape.exponent is None:
                ids.append(torch.randint(rows, (size * length,), generator=generator, device=self.device))
            else:
                ranks = zipf_ranks(rng, self.shape.exponent, rows, size * length)
                ids.append(torch.from_numpy(scatter(ranks, rows)).to(self.device))
        lengths = torch.tensor(self.shape.pooling, device=self.device).repeat_interleave(size)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        starts = [torch.arange(0, size * length, length, device=self.device) for length in self.shape.pooling]
        first_rows = np.cumsum([0, *self.shape.rows[:-1]]).tolist()
        return DeviceBatch(ids, starts, torch.cat(ids), offsets, torch.cat([table + first for table, first in zip(ids, first_rows)]))

    def lookup_bytes(self) -> int:
        """Of the lookups alone."""
        return super().forward_bytes()

    def side(self, planned: bool = False) -> Side:
        """Torch's modules and optimizers. All sides of a case start from the same weights."""
        model = Bags(self.shape.rows, self.shape.dim, torch.Generator(self.device).manual_seed(self.seed))
        tables = [bag.weight for bag in model.emb_l]
        return Side(self, model, [self._table_optimizer(tables, planned=True)])    # row-wise Adagrad in plain torch: the package's own


class Timed(Protocol):
    """A side in the phases that are timed."""

    name: str
    trainer: Any                   # a cases.Trainer

    def forward(self, number: int) -> object:
        """Pooled outputs of a batch, for no backward."""

    def begin(self, number: int) -> Any:
        """The forward of a training step."""

    def finish(self, given: Any) -> object:
        """Backward and update, given what `begin` gave."""


class TorchTimed:
    name = "torch"

    def __init__(self, trainer: Side) -> None:
        self.trainer = trainer

    def forward(self, number: int) -> object:
        with torch.no_grad():
            return self.begin(number)

    def begin(self, number: int) -> Tensor:
        batch = self.trainer.case.batches[number]
        return self.trainer.model(batch.table_offsets, batch.table_indices)

    def finish(self, given: Tensor) -> None:
        given.backward(self.trainer.output_grad)
        self.apply()

    def apply(self) -> None:
        """What is left after backward."""
        for optimizer in self.trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class PeerTimed:
    def __init__(self, trainer: PeerSide) -> None:
        self.trainer, self.name = trainer, trainer.name

    def forward(self, number: int) -> object:
        with torch.no_grad():
            return self.begin(number)

    def begin(self, number: int) -> Tensor:
        return self.trainer.peer.forward(self.trainer.case.batches[number])

    def finish(self, given: Tensor) -> None:
        self.trainer.peer.backward(given, self.trainer.output_grad)
        self.trainer.peer.step()


class Kernels:
    """The CUDA kernels in training: one program of all tables."""

    name = "kernels"

    def __init__(self, case: DeviceCase, backend: CudaBackend) -> None:
        self.case, self.trainer, self.side = case, self, case.side()
        self.model, shape = self.side.model, case.shape
        self.weights = [bag.weight.detach() for bag in self.model.emb_l]
        self.program = backend.compile([TableSpec(f"t{t}", rows, shape.dim) for t, rows in enumerate(shape.rows)],
                                       [FeatureSpec(f"f{t}", t, column=t * shape.dim) for t in range(shape.num_tables)])
        self.states: list[State] = [None if case.optimizer == "sgd" else weight.new_zeros(len(weight)) for weight in self.weights]
        self.rules = [UpdateRule(case.optimizer, LR, EPS)] * shape.num_tables
        self.out = torch.empty(shape.batch_size, shape.num_tables * shape.dim, device=case.device)
        self.prepared = [self._prepare(number) for number in range(len(case.batches))]

    def _prepare(self, number: int) -> IndexBatch:
        batch = self.case.batches[number]
        return self.program.prepare(batch.table_indices, batch.table_offsets)

    def forward(self, number: int) -> object:
        return self.begin(number)

    def look_up(self, number: int) -> None:
        """The lookups alone, of ids that are prepared."""
        self.program.forward(self.weights, self.prepared[number], self.out)

    def begin(self, number: int) -> Any:
        batch = self._prepare(number)
        self.program.forward(self.weights, batch, self.out)
        return batch

    def finish(self, given: Any) -> None:
        self.program.update(self.weights, self.states, self.rules, [Segment(given, self.case.output_grad)])

    def step(self, number: int, scale: float = 1.0) -> Tensor:
        """As Side.step."""
        self.finish(self.begin(number))
        return self.out


def timed_sides(case: DeviceCase, backend: CudaBackend, peers: Sequence[str]) -> Iterator[Timed]:
    """Ours, torch's, and the peers that are installed."""
    yield Kernels(case, backend)
    yield TorchTimed(case.side())
    yield from map(PeerTimed, peer_sides(case, peers))


@dataclass(frozen=True, slots=True)
class Phase:
    """What is timed: `run`, of what `before` gave for a batch of this number."""

    before: Callable[[int], Any]
    run: Callable[[Any], object]


def phases(side: Timed) -> dict[str, Phase]:
    """By what the rows call them."""
    return {"forward": Phase(lambda number: number, side.forward), "backward and update": Phase(side.begin, side.finish),
            "step": Phase(lambda number: number, lambda number: side.finish(side.begin(number)))}
