"""Clipping of sparse gradients, for which torch has no operations: `clip_grad_norm_` and `clip_grad_value_` raise there.

Importing this registers them for sparse CPU tensors, each where torch has none of its own. A gradient is the sum of its duplicates, so
those are summed first: the result is what clipping the dense gradient gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def vector_norm(grad: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """As torch.linalg.vector_norm of the dense gradient."""
    if dim is not None or keepdim or ord <= 0:                  # zeros count
        return torch.linalg.vector_norm(grad.to_dense(), ord, dim, keepdim, dtype=dtype)
    values = grad.coalesce().values()
    if not values.numel():
        return torch.zeros((), dtype=dtype or values.dtype)     # torch has no largest of nothing
    return torch.linalg.vector_norm(values, ord, dtype=dtype)


def clamp_(grad: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """As torch.clamp_ of the dense gradient.

    Raises NotImplementedError, as torch does for any sparse one, where that would move elements that are not stored.
    """
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    if not low <= 0 <= high:
        raise NotImplementedError(f"clamp of a sparse gradient must leave zeros as they are; got min={min} and max={max}")
    summed = grad.coalesce()
    return grad.copy_(torch.sparse_coo_tensor(summed.indices(), summed.values().clamp(low, high), grad.shape, is_coalesced=True,
                                              check_invariants=False))


def _clamp_min_(grad: Tensor, min: float) -> Tensor:
    return clamp_(grad, min=min)


def _clamp_max_(grad: Tensor, max: float) -> Tensor:
    return clamp_(grad, max=max)


def _each(operation: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """A foreach operation: one call a tensor, whatever its layout."""
    def run(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        return [operation(tensor, *args, **kwargs) for tensor in tensors]
    return run


def _each_in_place(operation: Callable[..., Tensor]) -> Callable[..., None]:
    def run(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        for tensor in tensors:
            operation(tensor, *args, **kwargs)
    return run


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "linalg_vector_norm": vector_norm,
    "clamp_": clamp_,
    "clamp_min_": _clamp_min_,
    "clamp_max_": _clamp_max_,
    "_foreach_norm.Scalar": _each(torch.linalg.vector_norm),
    "_foreach_mul_.Tensor": _each_in_place(Tensor.mul_),
    "_foreach_mul_.Scalar": _each_in_place(Tensor.mul_),
    "_foreach_clamp_min_.Scalar": _each_in_place(Tensor.clamp_min_),
    "_foreach_clamp_max_.Scalar": _each_in_place(Tensor.clamp_max_),
}


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name, operation in _OPERATIONS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "SparseCPU"):
            library.impl(name, operation, "SparseCPU")
    return library


_LIBRARY = _register()             # a library that goes takes its operations along
