"""What a kernel backend provides: fused bags over many tables, and their gradient and update.

Letters in shapes: B bags of a feature, D columns of a table, K ids of a feature, U distinct rows, R rows of a table.

A backend compiles the static structure of one lookup group into a `BagProgram`; a program then runs the
steps: `prepare` (validate, narrow and own the ids), `forward`, and later `update` from any number of prepared batches.
Programs keep workspaces between calls; calls from several threads take turns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, float32

from sparselift.dtypes import torch_dtype
from sparselift.memory import IDLE_BYTES, OutputRing

POOLINGS = ("sum", "mean", "none", "max")
COALESCE_METHODS = ("chain", "none", "sort", "dense")
PARTITIONS = ("bag", "table")
STORES = ("auto", "cached", "streamed")
UPDATE_RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
WEIGHT_DTYPES = ("float32", "float16", "bfloat16")

# What a rule keeps of a table, in float32 whatever the weights are: nothing, Adagrad's sums, or Adam's first and second moments.
State = Tensor | tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class TableKnobs:
    """How one table is treated. No choice changes a result, but for coalesce="none", which keeps torch's order of rounding in SGD."""

    coalesce: str = "chain"        # "chain", "sort", "dense": sum a row's gradients, then update once; lookups of a row are found by a head
                                   # for every row of the table, by a sort, or not at all: sums lie in a matrix of the table's shape that
                                   # the program keeps. "none": SGD lookup by lookup, in id order, and on float32 alone, since there
                                   # would be a rounding a lookup
    prefetch: int = 64             # rows ahead of use to prefetch; 0 is off
    partition: str = "bag"         # forward work split among threads by "bag" or by "table"
    dedup: bool = False            # forward: gather each distinct row once, then pool from the gathered copy
    stores: str = "auto"           # forward: outputs of whole, aligned cache lines go past the caches ("streamed") or not ("cached")
    vector_bytes: int = 0          # on CUDA, these two in place of the program's shape
    bags_per_group: int = 0


@dataclass(frozen=True, slots=True)
class KernelShape:
    """How kernels are laid out on a CUDA device. 0: as the heuristic `default_shape` says, which is in csrc/cuda/program.cu with its
    reasons. Where no bag and no row has more lookups than a chunk, no choice changes a result, but for `vector_bytes` in the mean square of
    row-wise Adagrad.
    """

    vector_bytes: int = 0          # of one load of a row: 16 where rows and pointers are aligned, or 4: an element at a time
    block_threads: int = 0         # 64, 128, 256 or 512
    bags_per_group: int = 0        # bags that a group of lanes pools one after the other
    loads_in_flight: int = 0       # of one lane: 4 or 8
    chunk_lookups: int = 0         # multiple of 32: longer bags, and rows used more often, are summed in chunks of so many


AUTO_SHAPE = KernelShape()         # everything is left to the heuristic


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One embedding table (rows, dim), of one of WEIGHT_DTYPES. Everything that is computed from its weights is float32."""

    name: str
    rows: int
    dim: int
    dtype: str = "float32"
    knobs: TableKnobs = field(default_factory=TableKnobs)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One lookup into a table: how the ids of a batch become rows of the output."""

    name: str
    table: int                     # position in the program's tables
    pooling: str = "sum"           # "sum", "mean", "max"; "none": every id is a bag of its own
    column: int = 0                # first output column, when the output is one shared buffer
    padding_idx: int | None = None  # 0 <= padding_idx < rows: ids that count for nothing, in sums, means and gradients. Pooling
                                    # "none" still gives their row, as nn.Embedding does
    include_last_offset: bool = False  # offsets are (B + 1,), the last one K, instead of (B,)
    weighted: bool = False         # the lookup multiplies each row by its per-sample weight (sum only)


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The optimizer's formula for one table, with the hyperparameters of this step. g is the row's gradient.

    sgd              w -= lr * g                               (torch allows no weight decay with sparse gradients)
    adagrad          s += g**2;        w -= lr * g / (sqrt(s) + eps)     s: (R, D), torch.optim.Adagrad
    rowwise_adagrad  s += mean(g**2);  w -= lr * g / (sqrt(s) + eps)     s: (R,)
    adam             m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g**2 - v);  w -= lr * m / (sqrt(v) + eps)
                                                                         (m, v): (R, D) each, torch.optim.SparseAdam
    """

    kind: str
    lr: float                      # the effective rate of this step: Adagrad's lr_decay and Adam's bias corrections are already in it
    eps: float = 0.0
    weight_decay: float = 0.0      # L2: g += weight_decay * w on touched rows, before the formula (rowwise_adagrad only)
    maximize: bool = False
    betas: tuple[float, float] = (0.0, 0.0)  # adam only
    noise_key: int | None = None   # float16 and bfloat16 weights: None rounds to the nearest; a number of 64 bits rounds by chance, drawn
                                   # from it, the row and the column (see `noise`), so that the mean is what the formula gives


def state_shapes(kind: str, rows: int, dim: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors that a rule keeps of a table."""
    return {"sgd": (), "adagrad": ((rows, dim),), "rowwise_adagrad": ((rows,),), "adam": ((rows, dim), (rows, dim))}[kind]


class DeviceFault(Exception):
    """Of an IndexError or ValueError for a batch that a device found wrong: the one at hand, or one before it."""


class IndexBatch(ABC):
    """The validated ids and per-sample weights of one batch of a program, owned by us: later writes to the caller's
    tensors do not show. A batch stays valid as long as it is referenced.
    """

    num_bags: tuple[int, ...]      # per feature
    num_lookups: tuple[int, ...]   # per feature, K

    @abstractmethod
    def indices(self, feature: int) -> Tensor:
        """(K,) int64 ids of a feature, a copy."""

    @abstractmethod
    def offsets(self, feature: int) -> Tensor:
        """(B + 1,) int64 bag boundaries of a feature, starting at 0, a copy."""

    @abstractmethod
    def maxima(self, feature: int) -> Tensor:
        """(B, D) int64 positions among the ids of a feature with pooling "max": which row each maximum came from in the last forward of
        this batch; -1 in bags where no id counts, and everywhere before the first. Raises ValueError for a feature with another pooling.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that the batch holds."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The gradient of one backward of a program: the batch it belongs to and what arrived at its outputs.

    grad    one (B, width) tensor whose columns are laid out by FeatureSpec.column, or a sequence with one tensor
            (B, D) a feature (None: no gradient arrived). float32, last stride 1, any row stride.
    scales  a factor for each table's gradient in this segment, rounded into every gradient element before it is used; None: 1
    """

    batch: IndexBatch
    grad: Tensor | Sequence[Tensor | None]
    scales: Sequence[float] | None = None
    versions: tuple[int, ...] = ()  # of the gradient tensors when they arrived; set by `arrived`

    @classmethod
    def arrived(cls, batch: IndexBatch, grad: Tensor | Sequence[Tensor | None]) -> Segment:
        """A segment that will notice if someone writes to its gradient before it is used."""
        grads = (grad,) if isinstance(grad, Tensor) else tuple(g for g in grad if g is not None)
        return cls(batch, grad, None, tuple(g._version for g in grads))

    def check_unchanged(self) -> None:
        """Raises RuntimeError if a gradient was modified in place after it arrived: torch would have copied it then, we read it now."""
        grads = (self.grad,) if isinstance(self.grad, Tensor) else tuple(g for g in self.grad if g is not None)
        if self.versions and self.versions != tuple(g._version for g in grads):
            raise RuntimeError("the gradient that arrived at a lifted lookup was modified in place before optimizer.step(); "
                               "pass a copy to backward(), or step first")


class BagProgram(ABC):
    """The compiled lookups of one group of features over tables."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]

    @abstractmethod
    def prepare(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
                weights: Sequence[Tensor | None] | None = None) -> IndexBatch:
        """Validate one batch, in the order of `features`, before any table is touched.

        Parameters
        ----------
        indices   a feature: (K,) int32 or int64, any stride
        offsets   a feature: int32 or int64, (B,), or (B + 1,) with include_last_offset, any stride; or an int: the
                  length of every bag (1 for pooling "none")
        weights   a feature: (K,) float32, or None; required where the feature is weighted

        Raises
        ------
        IndexError   an id < 0 or >= rows: names feature, position, id and table size
        ValueError   offsets that do not start at 0, decrease, or pass the number of ids; wrong counts and shapes
        TypeError    a dtype other than int32/int64 ids and offsets and float32 weights; a device other than CPU
        """

    def prepare_ahead(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
                      weights: Sequence[Tensor | None] | None = None) -> IndexBatch:
        """`prepare` on the calling thread alone, and whatever an update can do before there are gradients: for a thread beside the one that
        trains, which may run kernels of this program meanwhile. Everything that is computed from the batch has the same bits.
        """
        return self.prepare(indices, offsets, weights)

    @abstractmethod
    def forward(self, tables: Sequence[Tensor], batch: IndexBatch, out: Tensor | Sequence[Tensor]) -> None:
        """Pooled rows of every feature into `out`: one (B, width) float32 buffer, or one (B, D) tensor a feature.

        Empty bags give zeros. Weights become float32 as they are read, which is exact. Sums run in id order, in float32, so that an
        unweighted sum of float32 weights has torch's bits; on CUDA bags of more than 256 ids are summed in chunks of so many, and then
        in their order. Of equal maxima the first counts, and of NaNs one that comes first in its bag. The batch notes where they came
        from (`maxima`): that is where gradients go.
        `tables` are contiguous (R, D) weights in the order of `tables`.
        """

    def look_up(self, tables: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
                weights: Sequence[Tensor | None] | None = None) -> tuple[IndexBatch, Tensor]:
        """`prepare` and `forward` in one call, for programs whose features have the same B: the batch, and a new (B, width) buffer."""
        batch = self.prepare(indices, offsets, weights)
        width = sum(self.tables[feature.table].dim for feature in self.features)
        out = tables[0].new_empty((batch.num_bags[0], width), dtype=float32)
        self.forward(tables, batch, out)
        return batch, out

    def fits(self, tables: Sequence[Tensor]) -> bool:
        """Whether `forward` takes the tables."""
        return all(table.dtype == torch_dtype(spec.dtype) and tuple(table.shape) == (spec.rows, spec.dim) and table.is_contiguous()
                   for spec, table in zip(self.tables, tables))

    @abstractmethod
    def weight_grad(self, tables: Sequence[Tensor], batch: IndexBatch, feature: int, grad: Tensor) -> Tensor:
        """(K,) gradient of a feature's per-sample weights: <grad[bag], table[id]>; 0 for padding."""

    @abstractmethod
    def update(self, tables: Sequence[Tensor | None], states: Sequence[State],
               rules: Sequence[UpdateRule | None], segments: Sequence[Segment]) -> None:
        """Apply the optimizer's formula to every touched row, in place. A table whose rule is None is left alone, and may be None.

        Gradients of a row are summed over all segments in their order, inside a segment by feature and by id position
        (float32); on CUDA in chunks of 256, and then in their order. With coalesce="none" (sgd only) every lookup is
        applied by itself: w = fma(-lr, g, w). The formula is computed in float32, and what it gives for a float16 or
        bfloat16 weight is rounded once: to the nearest and ties to even; or, with a noise_key, up or down by chance, and a number that
        the dtype has stays as it is.
        """

    @abstractmethod
    def coalesced_grad(self, table: int, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """(U,) int64 distinct rows, ascending, and (U, D) float32 sums of their gradients."""

    @abstractmethod
    def expanded_grad(self, table: int, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """(K,) int64 ids and (K, D) float32 gradients, a row a lookup, in segment, feature and id order; padding left out."""

    def lookup_grads(self, table: int, batch: IndexBatch, grad: Tensor) -> tuple[Tensor, Tensor]:
        """`expanded_grad` of one (B, width) gradient, the ids as a (1, K) matrix: the indices and values of torch.sparse_coo_tensor."""
        ids, rows = self.expanded_grad(table, (Segment(batch, grad),))
        return ids[None], rows


class OutputMemory(Protocol):
    """Buffers for what kernels write, of the memory that they write to."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype = float32) -> Tensor:
        """A contiguous tensor of float32, or of a dtype of 16 bits, whose contents are undefined."""


class KernelBackend(ABC):
    """A family of kernels for one kind of device."""

    name: str
    coalesce_methods: tuple[str, ...] = COALESCE_METHODS   # that `compile` takes

    @abstractmethod
    def compile(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], shape: KernelShape | None = None) -> BagProgram:
        """`shape` lays kernels out on CUDA; on a CPU there is nothing that it could say. Raises ValueError for a spec, or a shape, that
        the backend does not implement, naming it.
        """

    def outputs(self, max_idle_bytes: int = IDLE_BYTES) -> OutputMemory:
        """Where a caller takes outputs of programs from. Keeps at most `max_idle_bytes` in buffers that nobody uses."""
        return OutputRing(max_idle_bytes)

    def takes_dense(self, table: TableSpec) -> bool:
        """Whether `compile` takes coalesce="dense" for a table of this size, where it takes it at all."""
        return True

    @abstractmethod
    def variant(self) -> str:
        """What runs here, as part of a certificate's key: "avx512", "reference" ..."""
