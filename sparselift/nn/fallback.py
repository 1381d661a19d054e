"""Lookups in torch's own operations, for what the kernels do not cover: right rather than fast.

The batch has been validated by then, so torch never sees the inputs on which it is silently wrong or crashes. Two of its
gradients are wrong on valid inputs, and are computed another way here: those of half-precision tables, which torch sums in
half precision, and those of `scale_grad_by_freq`, where an EmbeddingBag divides rows by other rows' counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, *HALF_DTYPES)


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """What torch's embedding functions take beside tensors. `mode` "none": every id is a bag of its own, and there are no offsets."""

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
    weight          (R, D) of one of DTYPES
    ids             (K,) int32 or int64, each in 0..R-1
    offsets         (B,), or (B + 1,) with include_last_offset, int32 or int64, valid; or the length of every bag
    sample_weights  (K,) of weight's dtype, for mode "sum"
    """
    if isinstance(offsets, int):
        offsets = torch.arange(0, len(ids), offsets, device=ids.device)
    if options.max_norm is not None:
        torch.embedding_renorm_(weight.detach(), ids, options.max_norm, options.norm_type)
    if weight.dtype in HALF_DTYPES or options.scale_grad_by_freq:
        return _lookup_distinct(weight, ids, offsets, sample_weights, options)
    return _pool(weight, ids, offsets, sample_weights, options, options.padding_idx, options.sparse)


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
    return functional.embedding_bag(ids, weight, offsets, mode=options.mode, sparse=sparse, per_sample_weights=sample_weights,
                                    include_last_offset=options.include_last_offset, padding_idx=padding_idx)
