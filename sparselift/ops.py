"""Fused lookups for modules that stand alone: torch's autograd on one side, a kernel program on the other.

Letters in shapes: B bags of a feature, D columns of a table, K ids of a feature, R rows of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, float32
from torch.autograd import forward_ad

from sparselift.dtypes import torch_dtype
from sparselift.kernels import get_backend
from sparselift.kernels.base import BagProgram, FeatureSpec, IndexBatch, Segment, TableSpec, UpdateRule

BACKEND = "cpu"

# The update w = fma(1, g, w): onto zeros it writes the sum of a row's gradients.
_ADD = UpdateRule("sgd", lr=-1.0)


_functorch_is_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_grad_is_enabled = torch.is_grad_enabled
_has_storage = torch._C._has_storage
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def hidden_values() -> str:
    """Why tensors may have no values to read now, if so: a transform or a tracer stands in between. Empty otherwise."""
    if _functorch_is_active():
        return "a torch.func transform is active"
    if _tracing_state() is not None:
        return "torch.jit is tracing"
    return ""


def nobody_watches() -> bool:
    """Whether values can be read and written by kernels now: neither `hidden_values` nor `watched_operations` says anything."""
    return not (_functorch_is_active() or _tracing_state() is not None or _count_dispatch_modes() or forward_ad._current_level >= 0)


def watched_operations() -> str:
    """Who must see torch's own operations now, if anyone: kernels read and write memory behind torch's back. Empty otherwise."""
    if _count_dispatch_modes():
        return "a dispatch mode is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    return ""


class BagLookup:
    """Compiled lookups, one feature a table, as a differentiable function of the tables and the per-sample weights.

    Tables, per-sample weights, results and gradients have one dtype. Where it is float16 or bfloat16, sums are float32, rounded once.
    Any number of threads may call it: a program's calls take turns.
    """

    __slots__ = ("dtype", "program", "shapes", "width")

    def __init__(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], backend: str | None = None) -> None:
        """Raises ValueError for a spec that the backend does not implement, and for tables of several dtypes; KernelError for a backend
        that is not built.
        """
        if len(dtypes := dict.fromkeys(table.dtype for table in tables)) > 1:
            raise ValueError(f"tables are {' and '.join(dtypes)}, and one call gives one dtype")
        self.program: BagProgram = get_backend(backend or BACKEND).compile(tables, features)
        self.dtype = torch_dtype(next(iter(dtypes), "float32"))
        self.shapes = tuple((table.rows, table.dim) for table in tables)
        self.width = sum(table.dim for table in tables)

    def prepare(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
                sample_weights: Sequence[Tensor | None] | None = None) -> IndexBatch:
        """Validate one batch; see BagProgram.prepare."""
        return self.program.prepare(indices, offsets, sample_weights if self.dtype is float32 else self._widened(sample_weights))

    def _widened(self, sample_weights: Sequence[Tensor | None] | None) -> Sequence[Tensor | None] | None:
        return sample_weights and widened(sample_weights, [self.dtype] * len(sample_weights))

    def __call__(self, tables: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor | int], sparse: bool,
                 sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows of all features, side by side, (B, sum of D).

        Parameters
        ----------
        tables          (R, D) contiguous, a table
        indices         (K,), a feature; like `offsets`, see BagProgram.prepare
        sparse          tables get torch.sparse_coo gradients, uncoalesced, a row a lookup; else dense ones
        sample_weights  (sum of K,), all features' in one tensor: its gradient flows here
        """
        # One table's tensors are asked first: a comprehension costs as much as a lookup of a few ids.
        if _grad_is_enabled() and (tables[0].requires_grad or (sample_weights is not None and sample_weights.requires_grad)
                                   or (len(tables) > 1 and True in [table.requires_grad for table in tables])):
            return _record(self, indices, offsets, sparse, sample_weights, *tables)
        return self.run(tables, indices, offsets, sample_weights)[1]

    def run(self, tables: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
            sample_weights: Tensor | None = None) -> tuple[IndexBatch, Tensor]:
        """The lookups alone, outside autograd, and the batch for their gradients."""
        if self.dtype is not float32:
            parts = self._widened(split_sample_weights(sample_weights, indices))
            batch, out = self.program.look_up(tables, indices, offsets, parts)
            return batch, out.to(self.dtype)
        if sample_weights is None:
            return self.program.look_up(tables, indices, offsets)
        return self.program.look_up(tables, indices, offsets, split_sample_weights(sample_weights, indices))

    def table_grads(self, batch: IndexBatch, grad: Tensor, wanted: Sequence[bool], sparse: bool) -> list[Tensor | None]:
        """The gradient of every wanted table, of which there is one. `grad` is (B, width), last stride 1.

        A sparse one has a row a lookup; where rows are rounded, a row a distinct id, since a sum is rounded once.
        """
        if self.dtype is not float32:
            grad = grad.float()
            if sparse:
                return [self._rounded_grad(table, batch, grad) if want else None for table, want in enumerate(wanted)]
        if sparse and len(wanted) == 1:
            return [_sparse(*self.program.lookup_grads(0, batch, grad), self.shapes[0])]
        if sparse:
            return [_sparse(*self.program.lookup_grads(table, batch, grad), self.shapes[table]) if want else None
                    for table, want in enumerate(wanted)]
        # A table that wants no gradient still needs a tensor in its place, which no rule touches.
        sums = [grad.new_zeros(shape, dtype=self.dtype) if want else grad.new_empty(shape, dtype=self.dtype)
                for shape, want in zip(self.shapes, wanted)]
        self.program.update(sums, [None] * len(sums), [_ADD if want else None for want in wanted], (Segment(batch, grad),))
        return [each if want else None for each, want in zip(sums, wanted)]

    def _rounded_grad(self, table: int, batch: IndexBatch, grad: Tensor) -> Tensor:
        rows, sums = self.program.coalesced_grad(table, (Segment(batch, grad),))
        return _sparse(rows[None], sums.to(self.dtype), self.shapes[table])

    def sample_weight_grad(self, tables: Sequence[Tensor], batch: IndexBatch, grad: Tensor) -> Tensor:
        """(sum of K,) gradient of the per-sample weights. `grad` is (B, width), last stride 1."""
        if self.dtype is not float32:
            grad = grad.float()
        blocks = (grad,) if len(tables) == 1 else grad.split([dim for _, dim in self.shapes], 1)
        grads = [self.program.weight_grad(tables, batch, feature, block) for feature, block in enumerate(blocks)]
        found = grads[0] if len(grads) == 1 else torch.cat(grads)
        return found if self.dtype is float32 else found.to(self.dtype)


def widened(sample_weights: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Per-sample weights as kernels take them, a feature each. Raises TypeError for those of another dtype than their table's."""
    for each, own in zip(sample_weights, dtypes):
        if each is not None and each.dtype is not own:
            raise TypeError(f"per-sample weights must have the weight's dtype {own}; got {each.dtype}")
    return [each if each is None else each.float() for each in sample_weights]


def split_sample_weights(sample_weights: Tensor | None, indices: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
    """Every feature's part of the per-sample weights of all."""
    if sample_weights is None:
        return None
    return (sample_weights,) if len(indices) == 1 else sample_weights.split([len(ids) for ids in indices])


class _Lookup(torch.autograd.Function):
    """The autograd edge of a BagLookup: one for all its tables."""

    @staticmethod
    def forward(ctx: Any, lookup: BagLookup, indices: Sequence[Tensor], offsets: Sequence[Tensor | int], sparse: bool,
                sample_weights: Tensor | None, *tables: Tensor) -> Tensor:
        batch, out = lookup.run(tables, indices, offsets, sample_weights)
        ctx.lookup, ctx.batch, ctx.sparse = lookup, batch, sparse
        if sample_weights is not None:
            # The sum's gradient by the tables does not depend on them: only a gradient of the weights keeps them.
            ctx.save_for_backward(sample_weights, *(tables if ctx.needs_input_grad[4] else ()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        lookup, batch = ctx.lookup, ctx.batch
        if batch is None:
            raise RuntimeError("Trying to backward through a fused lookup a second time, after its ids were freed; "
                               "pass retain_graph=True to the first backward()")
        if not _keeps_graph():
            ctx.batch = None
        if _grad_is_enabled() or not _has_storage(grad) or not nobody_watches():
            return None, None, None, None, *_grads_in_torch(ctx, batch, grad)
        if grad.stride(-1) != 1:
            # A sum's gradient is expanded. contiguous() would leave one without elements as it is.
            grad = grad.clone(memory_format=torch.contiguous_format)
        needed = ctx.needs_input_grad
        weight_grad = lookup.sample_weight_grad(ctx.saved_tensors[1:], batch, grad) if needed[4] else None
        wanted = needed[5:]
        table_grads = lookup.table_grads(batch, grad, wanted, ctx.sparse) if True in wanted else [None] * len(wanted)
        return None, None, None, None, weight_grad, *table_grads


# Function.apply itself: what Python adds to it serves torch.func transforms, under which no lookup gets here, and costs as much again.
_record = super(torch.autograd.Function, _Lookup).apply
# Autograd calls `apply` of the backward's class, in which torch looks for a `backward` or a `vjp`. There is one here.
_Lookup._backward_cls.apply = _Lookup.backward  # type: ignore[attr-defined]


def _grads_in_torch(ctx: Any, batch: IndexBatch, grad: Tensor) -> list[Tensor | None]:
    """The gradient of the per-sample weights, then the tables', in operations that torch can see, transform and differentiate again."""
    program, dtype, (by_weights, *by_table) = ctx.lookup.program, ctx.lookup.dtype, ctx.needs_input_grad[4:]
    sample_weights, *tables = ctx.saved_tensors or (None,)
    if dtype is not float32:
        grad, tables = grad.float(), [table.float() for table in tables]
        sample_weights = None if sample_weights is None else sample_weights.float()
    factors: Sequence[Tensor] = () if sample_weights is None else sample_weights.split(batch.num_lookups)
    weight_grads, table_grads, column = [], [], 0
    for feature, (spec, table) in enumerate(zip(program.features, program.tables)):
        placed = lookup_grads(batch.indices(feature), batch.offsets(feature), grad.narrow(1, column, table.dim),
                              pooling=spec.pooling, padding_idx=spec.padding_idx,
                              sample_weights=factors[feature] if spec.weighted else None, table=tables[feature] if by_weights else None,
                              maxima=batch.maxima(feature) if spec.pooling == "max" else None)
        column += table.dim
        weight_grads.append(placed.sample_weight_grad)
        table_grads.append(_place(placed.ids, placed.rows, (table.rows, table.dim), ctx.sparse, dtype) if by_table[feature] else None)
    return [torch.cat([each for each in weight_grads if each is not None]).to(dtype) if by_weights else None, *table_grads]


class LookupGrads(NamedTuple):
    """The gradients of one feature's lookups: a row (D,) for each of the L ids that count, and (K,) the per-sample weights'."""

    ids: Tensor
    rows: Tensor
    sample_weight_grad: Tensor | None


def lookup_grads(ids: Tensor, bounds: Tensor, grad: Tensor, *, pooling: str, padding_idx: int | None = None,
                 sample_weights: Tensor | None = None, table: Tensor | None = None, maxima: Tensor | None = None) -> LookupGrads:
    """The definition in torch's own operations, differentiable in every tensor of floats.

    Parameters
    ----------
    ids             (K,) int64
    bounds          (B + 1,) int64
    grad            (B, D)
    pooling         "sum", "mean", "max" or "none"
    sample_weights  (K,), for "sum"
    table           (R, D), where the gradient of the per-sample weights is wanted
    maxima          (B, D) int64 positions among the ids that the maxima came from, for "max"
    """
    bags = _bag_of_each_id(bounds)
    kept = torch.arange(len(ids), device=ids.device) if padding_idx is None else (ids != padding_idx).nonzero()[:, 0]
    kept_ids, kept_bags = ids[kept], bags[kept]
    arrived = grad[kept_bags]                                                # (L, D)
    sample_weight_grad = None
    if table is not None:
        products = (table[kept_ids] * arrived).sum(1)
        sample_weight_grad = products.new_zeros(len(ids)).index_add(0, kept, products)
    if sample_weights is not None:
        arrived = arrived * sample_weights[kept, None]
    elif maxima is not None:
        arrived = torch.where(maxima[kept_bags] == kept[:, None], arrived, 0.0)
    elif pooling == "mean":
        arrived = arrived / torch.bincount(kept_bags)[kept_bags, None]
    return LookupGrads(kept_ids, arrived, sample_weight_grad)


def _bag_of_each_id(offsets: Tensor) -> Tensor:
    return torch.repeat_interleave(offsets.diff())


def _place(ids: Tensor, rows: Tensor, shape: tuple[int, int], sparse: bool, dtype: torch.dtype) -> Tensor:
    if not sparse:
        return rows.new_zeros(shape).index_add(0, ids, rows).to(dtype)
    if dtype is not rows.dtype:
        ids, positions = torch.unique(ids, return_inverse=True)
        rows = rows.new_zeros(len(ids), shape[1]).index_add(0, positions, rows).to(dtype)
    return _sparse(ids[None], rows, shape)


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
