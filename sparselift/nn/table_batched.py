"""Many embedding tables behind one call, with FBGEMM's layout of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from sparselift.ir import Table

from .fallback import LookupOptions
from .routes import Route, RoutedModule, unreadable

MODES = ("sum", "mean")


class TableBatchedEmbeddingBags(RoutedModule):
    """T embedding tables with one feature each, looked up in one fused kernel call.

    Column block t of the output is what nn.EmbeddingBag gives for table t, to the bit where nothing is weighted.

    Parameters
    ----------
    tables  (rows, dim) pairs, or ir.Table
    mode    "sum" or "mean"
    sparse  gradients are torch.sparse_coo, uncoalesced, a row a lookup; else dense
    device  of the tables
    dtype   of the tables; by default that of an ir.Table, else torch's default

    Tables that are not float32 on the CPU run in torch, one by one; `last_path` says so.

    Parameters are `weights.0`, `weights.1` ..., (rows, dim) each, drawn from N(0, 1) as torch.nn.EmbeddingBag's are.

    Raises
    ------
    ValueError   for no tables, or another mode
    """

    def __init__(self, tables: Sequence[tuple[int, int] | Table], mode: str = "sum", *, sparse: bool = True,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
        if not tables:
            raise ValueError("tables must hold at least one (rows, dim); got none")
        self.mode, self.sparse = mode, sparse
        self.names = tuple(table.name if isinstance(table, Table) else f"weights.{t}" for t, table in enumerate(tables))
        shapes = [(table.rows, table.dim) if isinstance(table, Table) else table for table in tables]
        dtypes = [dtype or (getattr(torch, table.dtype) if isinstance(table, Table) else None) for table in tables]
        self.weights = nn.ParameterList(torch.empty(rows, dim, device=device, dtype=each) for (rows, dim), each in zip(shapes, dtypes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every table from N(0, 1)."""
        for weight in self.weights:
            nn.init.normal_(weight)

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows of all tables, (B, sum of dims).

        Parameters
        ----------
        indices             (K,) int32 or int64: table 0's ids, then table 1's ...
        offsets             (T * B + 1,) int32 or int64: bag b of table t is indices[offsets[t * B + b]:offsets[t * B + b + 1]]
        per_sample_weights  (K,), for mode "sum"

        Raises
        ------
        IndexError   an id out of range: names table, position among the table's ids, id and table size
        ValueError   offsets of another count, or that do not start at 0, decrease, or do not end at K
        TypeError    ids or offsets that are not int32 or int64
        """
        if is_compiling():
            return _bags_outside_the_graph(self, indices, offsets, per_sample_weights)
        return self._look_up(indices, offsets, per_sample_weights)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, sparse={self.sparse}"

    def _look_up(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        weights = tuple(self.weights.parameters())
        reason = unreadable(indices, offsets, per_sample_weights, *weights)
        if reason:
            raise RuntimeError(f"TableBatchedEmbeddingBags splits a batch by the values of its offsets, which cannot be read: {reason}")
        parts, starts = _split(indices, offsets, self.names)
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ValueError(f"per_sample_weights need mode='sum'; got mode={self.mode!r}")
            if per_sample_weights.shape != indices.shape:
                raise ValueError(f"per_sample_weights must have the shape of indices {tuple(indices.shape)}; "
                                 f"got {tuple(per_sample_weights.shape)}")
        return self._run(self._route(weights, per_sample_weights is not None), weights, parts, starts, per_sample_weights)

    def _route(self, weights: Sequence[Tensor], weighted: bool) -> Route:
        key = (self.mode, self.sparse, weighted, *((w.shape, w.dtype, w.device, w.is_contiguous()) for w in weights))
        return self._routes.get(key) or self._plan(key, weights, self.names, LookupOptions(self.mode, self.sparse), weighted)


def _split(indices: Tensor, offsets: Tensor, names: Sequence[str]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The ids of every table, and the (B,) starts of its bags among them."""
    if indices.dim() != 1 or offsets.dim() != 1:
        raise ValueError(f"indices and offsets must have one dimension; got shapes {tuple(indices.shape)} and {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must be int32 or int64; got {offsets.dtype}")
    batch_size, rest = divmod(len(offsets) - 1, len(names))
    if rest or not len(offsets):
        raise ValueError(f"offsets must be T * B + 1 with T = {len(names)} tables; got {len(offsets)}")
    firsts = offsets[:-1].reshape(len(names), batch_size)
    bounds = [*firsts[:, 0].tolist(), int(offsets[-1])] if batch_size else [int(offsets[0])] * (len(names) + 1)
    if bounds[0] != 0 or bounds[-1] != len(indices):
        raise ValueError(f"offsets must go from 0 to the number of indices ({len(indices)}); got {bounds[0]} to {bounds[-1]}")
    lengths = [end - begin for begin, end in zip(bounds, bounds[1:])]
    for name, length, begin in zip(names, lengths, bounds):
        if length < 0:
            raise ValueError(f"feature {name!r}: offsets must not decrease; its ids begin at {begin} and end at {begin + length}")
    return indices.split(lengths), (firsts - firsts[:, :1]).unbind()


@torch._disable_dynamo
def _bags_outside_the_graph(module: TableBatchedEmbeddingBags, indices: Tensor, offsets: Tensor,
                            per_sample_weights: Tensor | None) -> Tensor:
    return module._look_up(indices, offsets, per_sample_weights)
