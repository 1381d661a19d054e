"""Many embedding tables behind one call, with FBGEMM's layout of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from sparselift.functional.fallback import LookupOptions
from sparselift.functional.lookups import look_up_tables
from sparselift.ir import Table

from .routed import RoutedModule

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

    Tables that are not all float32, all float16 or all bfloat16, on the CPU, run in torch, one by one; `last_path` says so.

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
        weights: Any = self.weights._parameters                # parameters() would name a table that is there twice once
        return look_up_tables(None if is_compiling() else self._routes, indices, tuple(weights.values()), offsets, per_sample_weights,
                              LookupOptions(self.mode, self.sparse), self.names)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, sparse={self.sparse}"
