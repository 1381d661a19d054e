"""Labelled rows in memory, and the batches that a DLRM takes.

Letters in shapes: N rows, B rows of a batch, F dense features, T tables, K ids of a table in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """One batch in the layout of facebookresearch/dlrm: `dense_x, lS_o, lS_i, T`."""

    dense: Tensor             # (B, F) float32
    offsets: Tensor           # (T, B) int64: where each bag starts in its table's indices
    indices: list[Tensor]     # T tensors (K_t,) int64
    labels: Tensor            # (B, 1) float32, 0 or 1


@dataclass(frozen=True, slots=True)
class Tabular:
    """Labelled rows with dense features and one id a table.

    Attributes
    ----------
    dense   (N, F) float32
    ids     (T, N) int64, every table's ids side by side, so that a batch of one table is a contiguous slice
    labels  (N,) float32, 0 or 1
    rows    size of each of the T tables; every id is below it
    names   of the T tables
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor
    rows: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def shuffled(self, seed: int) -> Tabular:
        """A copy with the rows in a random order, the same for a seed."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return Tabular(self.dense[order], self.ids[:, order], self.labels[order], self.rows, self.names)

    def slice(self, start: int, stop: int) -> Tabular:
        """Rows [start, stop), as views."""
        return Tabular(self.dense[start:stop], self.ids[:, start:stop], self.labels[start:stop], self.rows, self.names)

    def split(self, train: float) -> tuple[Tabular, Tabular]:
        """The first `train` share of the rows, and the rest: rows in order of time are not shuffled into each other.

        Raises ValueError unless 0 < train < 1.
        """
        cut = _cut(len(self), train)
        return self.slice(0, cut), self.slice(cut, len(self))

    def batches(self, batch_size: int, drop_last: bool = False) -> list[Batch]:
        """Consecutive batches of `batch_size` rows. The last one is smaller, or left out with `drop_last`.

        Raises ValueError for batch_size < 1.
        """
        return [self._batch(*span) for span in _spans(len(self), batch_size, drop_last)]

    def _batch(self, start: int, stop: int) -> Batch:
        return Batch(self.dense[start:stop], one_hot_offsets(len(self.rows), stop - start),
                     [ids[start:stop] for ids in self.ids], self.labels[start:stop, None])


@dataclass(frozen=True, slots=True)
class Ragged:
    """Labelled rows with dense features and, for each table, a bag of any number of ids.

    Attributes
    ----------
    dense   (N, F) float32
    ids     T tensors (K_t,) int64
    starts  T tensors (N + 1,) int64: row n's ids of a table are ids[starts[n]:starts[n + 1]]
    labels  (N,) float32, 0 or 1
    rows    size of each of the T tables
    names   of the T tables
    """

    dense: Tensor
    ids: tuple[Tensor, ...]
    starts: tuple[Tensor, ...]
    labels: Tensor
    rows: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def slice(self, start: int, stop: int) -> Ragged:
        """Rows [start, stop), as views."""
        return Ragged(self.dense[start:stop], self.ids, tuple(starts[start:stop + 1] for starts in self.starts), self.labels[start:stop],
                      self.rows, self.names)

    def split(self, train: float) -> tuple[Ragged, Ragged]:
        """As `Tabular.split`."""
        cut = _cut(len(self), train)
        return self.slice(0, cut), self.slice(cut, len(self))

    def batches(self, batch_size: int, drop_last: bool = False) -> list[Batch]:
        """As `Tabular.batches`."""
        return [self._batch(*span) for span in _spans(len(self), batch_size, drop_last)]

    def _batch(self, start: int, stop: int) -> Batch:
        offsets = torch.stack([starts[start:stop] - starts[start] for starts in self.starts])
        indices = [ids[int(starts[start]):int(starts[stop])] for ids, starts in zip(self.ids, self.starts, strict=True)]
        return Batch(self.dense[start:stop], offsets, indices, self.labels[start:stop, None])


def one_hot_offsets(tables: int, batch_size: int) -> Tensor:
    """(T, B) bag starts where every bag holds one id."""
    return torch.arange(batch_size).repeat(tables, 1)


def _cut(rows: int, train: float) -> int:
    if not 0 < train < 1:
        raise ValueError(f"train must be between 0 and 1; got {train}")
    return round(rows * train)


def _spans(rows: int, batch_size: int, drop_last: bool) -> list[tuple[int, int]]:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    stop = rows - rows % batch_size if drop_last else rows
    return [(start, min(start + batch_size, stop)) for start in range(0, stop, batch_size)]
