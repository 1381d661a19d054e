"""Pooled lookups and their gradients by plain float64 loops, independent of any embedding implementation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparselift import ops
from sparselift.kernels import available_backends


def use_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the modules' lookups with this backend."""
    if name not in available_backends():
        pytest.skip(f"backend {name}: not built, or its instruction set is missing here")
    monkeypatch.setattr(ops, "BACKEND", name)


@dataclass
class Pooled:
    out: np.ndarray                 # (B, D)
    weight_grad: np.ndarray         # (R, D)
    sample_weight_grad: np.ndarray  # (K,)


def pool(weight: Any, bags: Sequence[Sequence[int]], mode: str, sample_weights: Sequence[Sequence[float]] | None = None,
         padding_idx: int | None = None, grad: Any = None, by_freq: bool = False) -> Pooled:
    """`bags` holds the ids of every bag, `grad` (B, D) what arrives at the output: ones, unless given."""
    table = np.asarray(weight, np.float64)
    out, by_weight, by_sample = np.zeros((len(bags), table.shape[1])), np.zeros_like(table), []
    arrived = np.ones_like(out) if grad is None else np.asarray(grad, np.float64)
    count = Counter(row for ids in bags for row in ids)
    for bag, ids in enumerate(bags):
        factors = [1.0] * len(ids) if sample_weights is None else sample_weights[bag]
        kept = [k for k, row in enumerate(ids) if row != padding_idx]
        products = [0.0] * len(ids)
        if mode == "max" and kept:
            for column in range(table.shape[1]):
                winner = max(kept, key=lambda k: (table[ids[k], column], -k))
                out[bag, column] = table[ids[winner], column]
                by_weight[ids[winner], column] += arrived[bag, column]
        elif mode != "max":
            divisor = len(kept) if mode == "mean" else 1
            for k in kept:
                out[bag] += factors[k] * table[ids[k]] / divisor
                by_weight[ids[k]] += factors[k] * arrived[bag] / divisor / (count[ids[k]] if by_freq else 1)
                products[k] = float(table[ids[k]] @ arrived[bag])
        by_sample += products
    return Pooled(out, by_weight, np.array(by_sample))


def flat(bags: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int64) -> Tensor:
    """The entries of all bags, one after the other."""
    return torch.tensor([entry for bag in bags for entry in bag], dtype=dtype)


def offsets(bags: Sequence[Sequence[Any]], last: bool = False, dtype: torch.dtype = torch.int64) -> Tensor:
    """Where every bag starts, and, with `last`, where the last one ends."""
    bounds = [sum(map(len, bags[:bag])) for bag in range(len(bags) + 1)]
    return torch.tensor(bounds if last else bounds[:-1], dtype=dtype)


def filled(module: nn.Module, weight: Any) -> Any:
    """The module with these weights."""
    with torch.no_grad():
        module.weight.copy_(torch.as_tensor(np.asarray(weight)))
    return module


def dense_grad(parameter: Tensor) -> np.ndarray:
    grad = parameter.grad
    assert grad is not None
    return (grad.to_dense() if grad.is_sparse else grad).double().numpy()
