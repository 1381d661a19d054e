"""Our modules beside torch's with the same weights, and what a forward and a backward of both must agree in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparselift.nn import Embedding, EmbeddingBag
from tests.unit.lookup_loops import filled, flat, offsets

ROWS, DIM = 7, 5
BAGS = [[1, 2, 1], [], [6], [0, 0, 3, 6], [0]]
IDS, STARTS = flat(BAGS), offsets(BAGS)


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: their sums and products are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def pair(kind: type, *args: Any, real: bool = False, **options: Any) -> tuple[Any, Any]:
    """Our module and torch's, with the same weights."""
    ours = kind(*args, **options)
    rows, dim = ours.weight.shape
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(3)) if real else integers(rows, dim)
    theirs = {EmbeddingBag: nn.EmbeddingBag, Embedding: nn.Embedding}[kind](*args, **options)
    return filled(ours, values), filled(theirs, values)


def assert_same_grad(ours: Tensor, theirs: Tensor) -> None:
    a, b = ours.grad, theirs.grad
    assert a.layout == b.layout
    if a.is_sparse:
        assert a.is_coalesced() == b.is_coalesced()
        assert torch.equal(a._indices(), b._indices())
        assert torch.equal(a._values(), b._values())
    else:
        assert torch.equal(a, b)


def run_both(ours: nn.Module, theirs: nn.Module, *args: Any) -> None:
    """One forward and backward of each; equal to the bit."""
    out, want = ours(*args), theirs(*args)
    assert torch.equal(out, want)
    arrived = integers(*out.shape, seed=1)
    out.backward(arrived)
    want.backward(arrived)
    assert_same_grad(ours.weight, theirs.weight)
