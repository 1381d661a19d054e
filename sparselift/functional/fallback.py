"""Lookups in torch's own operations, for what the kernels do not cover: right rather than fast.

The batch has been validated by then, so torch never sees the inputs on which it is silently wrong or crashes. Two of its
gradients are wrong on valid inputs, and are computed another way here: those of half-precision tables, which torch sums in
half precision, and those of `scale_grad_by_freq`, where an EmbeddingBag divides rows by other rows' counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparselift.ops import lookup_grads

HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, *HALF_DTYPES)


class LookupOptions(NamedTuple):
    """What torch's embedding functions take beside tensors. `mode` "none": every id is a bag of its own, and there are no offsets.

    A tuple, because every call looks its route up by one.
    """

    mode: str
    sparse: bool
    padding_idx: int | None = None
    include_last_offset: bool = False
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False


def lookup(weight: Tensor, ids: Tensor, offsets: Tensor | int, sample_weights: Tensor | None, options: LookupOptions) -> Tensor:
    """Pooled rows (B, D), differentiable.

    Parameters
    ----------
    weight          (R, D)
    ids             (K,) int32 or int64, each in 0..R-1
    offsets         (B,), or (B + 1,) with include_last_offset, int32 or int64, valid; or the length of every bag
    sample_weights  (K,) of weight's dtype, for mode "sum"

    Raises
    ------
    TypeError   before max_norm rescales anything, for per-sample weights of another dtype or device than the weight's
    """
    if isinstance(offsets, int):
        offsets = torch.arange(0, len(ids), offsets, device=ids.device)
    check_sample_weights(weight, sample_weights)
    if options.max_norm is not None:
        renorm(weight, ids, options)
    if weight.dtype in HALF_DTYPES or options.scale_grad_by_freq:
        return _lookup_distinct(weight, ids, offsets, sample_weights, options)
    return _pool(weight, ids, offsets, sample_weights, options, options.padding_idx, options.sparse)


def renorm(weight: Tensor, ids: Tensor, options: LookupOptions) -> None:
    """Scale the rows of `ids` whose norm is over max_norm down to it, in place."""
    assert options.max_norm is not None
    with torch.no_grad():
        torch.embedding_renorm_(weight.detach(), ids.contiguous(), options.max_norm, options.norm_type)


def gradients(shape: Sequence[int], table: Tensor | None, ids: Tensor, offsets: Tensor | int, sample_weights: Tensor | None,
              grad: Tensor, options: LookupOptions) -> tuple[Tensor, Tensor | None]:
    """What autograd gives for `lookup`, without autograd: the gradient of a table of this shape, and of the per-sample weights.

    The table itself is read for mode "max", and for the gradient of the per-sample weights, which it asks for otherwise.
    """
    ids, bounds = ids.long(), _bounds(len(ids), offsets, options.include_last_offset)
    exact = grad.float() if grad.dtype in HALF_DTYPES else grad
    if options.mode == "max":
        assert table is not None
        return _winners_grad(table, ids, bounds, exact, options).to(grad.dtype), None
    if sample_weights is not None:
        sample_weights = sample_weights.to(exact.dtype)
    found = lookup_grads(ids, bounds, exact, pooling=options.mode, padding_idx=options.padding_idx, sample_weights=sample_weights,
                         table=None if table is None else table.to(exact.dtype))
    rows = found.rows
    if options.scale_grad_by_freq:
        rows = rows / torch.bincount(found.ids)[found.ids, None]
    by_sample = found.sample_weight_grad if found.sample_weight_grad is None else found.sample_weight_grad.to(grad.dtype)
    if not options.sparse:
        return exact.new_zeros(tuple(shape)).index_add_(0, found.ids, rows).to(grad.dtype), by_sample
    return torch.sparse_coo_tensor(found.ids[None], rows.to(grad.dtype), tuple(shape), check_invariants=False), by_sample


def check_sample_weights(weight: Tensor, sample_weights: Tensor | None) -> None:
    """Raises TypeError unless the per-sample weights are of the weight's kind, which torch asks for after max_norm has been applied."""
    if sample_weights is None:
        return
    if sample_weights.dtype != weight.dtype:
        raise TypeError(f"per-sample weights must have the weight's dtype {weight.dtype}; got {sample_weights.dtype}")
    if sample_weights.device != weight.device:
        raise TypeError(f"per-sample weights must be on the weight's device {weight.device}; got {sample_weights.device}")


def _bounds(count: int, offsets: Tensor | int, include_last_offset: bool) -> Tensor:
    """(B + 1,) int64 bag boundaries."""
    if isinstance(offsets, int):
        return torch.arange(0, count + 1, offsets, device="cpu")
    return offsets.long() if include_last_offset else torch.cat([offsets.long(), offsets.new_tensor([count], dtype=torch.int64)])


def _winners_grad(table: Tensor, ids: Tensor, bounds: Tensor, grad: Tensor, options: LookupOptions) -> Tensor:
    """(R, D) gradient of a maximum: all of it to the first id that has it, column by column."""
    sums = grad.new_zeros(table.shape)
    if not grad.numel():
        return sums
    *_, winners = torch.embedding_bag(table, ids, bounds, False, 2, False, None, True, options.padding_idx)
    counted = ids.new_ones(len(ids)) if options.padding_idx is None else (ids != options.padding_idx).long()
    before = torch.cat([counted.new_zeros(1), counted.cumsum(0)])            # ids that count before every position
    filled = before[bounds].diff() > 0
    return sums.scatter_add_(0, winners[filled].long(), grad[filled])


def _lookup_distinct(weight: Tensor, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, options: LookupOptions) -> Tensor:
    """Through a small float32 table of the distinct rows (U, D), whose gradient is exact before it is scaled and rounded once."""
    rows, positions, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    small = functional.embedding(rows, weight, sparse=options.sparse)
    if options.scale_grad_by_freq and small.requires_grad:
        small.register_hook(lambda grad: grad / counts[:, None])
    if weight.dtype in HALF_DTYPES:
        small = small.float()
        sample_weights = None if sample_weights is None else sample_weights.float()
    padding = None
    if options.padding_idx is not None:
        found = (rows == options.padding_idx).nonzero()
        padding = int(found[0]) if len(found) else None
    return _pool(small, positions, offsets, sample_weights, options, padding, False).to(weight.dtype)


def _pool(weight: Tensor, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, options: LookupOptions,
          padding_idx: int | None, sparse: bool) -> Tensor:
    if options.mode == "none":
        return functional.embedding(ids, weight, padding_idx, sparse=sparse)
    if not weight.shape[1] and options.mode != "max":
        # Torch fails to find its way through rows without columns.
        rows = functional.embedding(ids, weight, padding_idx, sparse=sparse)
        bags = offsets.shape[0] - options.include_last_offset
        rows = rows if sample_weights is None else rows * sample_weights[:, None]
        return rows.new_zeros(bags, 0).index_add(0, torch.zeros_like(ids), rows) if bags else rows[:0]
    return functional.embedding_bag(ids, weight, offsets, mode=options.mode, sparse=sparse, per_sample_weights=sample_weights,
                                    include_last_offset=options.include_last_offset, padding_idx=padding_idx)
