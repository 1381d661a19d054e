"""Clipping of sparse gradients with duplicates, by torch's own functions, against the same on dense ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from sparselift.nn import EmbeddingBag

STEPS = ([[1, 1, 3]], [[1, 4, 4]])


def trained(sparse: bool, steps: Any = STEPS) -> nn.ModuleList:
    """Two tables and a dense layer with gradients of two backwards."""
    torch.manual_seed(0)
    model = nn.ModuleList([EmbeddingBag(5, 2, mode="sum", sparse=sparse), EmbeddingBag(6, 3, mode="sum", sparse=sparse), nn.Linear(5, 1)])
    for ids in steps:
        batch = torch.tensor(ids, dtype=torch.int64)
        out = torch.cat([model[0](batch), model[1](batch)], 1)
        model[2](out).sum().backward()
    return model


def grads(model: nn.Module) -> list[Tensor]:
    return [w.grad.to_dense() if w.grad.is_sparse else w.grad for w in model.parameters() if w.grad is not None]


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("ord", [1, 2, 3.5, math.inf, 0, -math.inf])
def test_norm_clipping_is_that_of_the_dense_gradient(ord: float, foreach: bool | None) -> None:
    dense, sparse = trained(False), trained(True)
    want, got = (clip_grad_norm_(model.parameters(), 0.5, ord, foreach=foreach) for model in (dense, sparse))
    torch.testing.assert_close(got, want)
    assert sparse[0].weight.grad.is_sparse
    for a, b in zip(grads(sparse), grads(dense), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_value_clipping_is_that_of_the_dense_gradient(foreach: bool | None) -> None:
    dense, sparse = trained(False), trained(True)
    limit = grads(dense)[0].abs().max().item() * 0.7          # a sum of duplicates is above it, a single lookup is not
    for model in (dense, sparse):
        clip_grad_value_(model.parameters(), limit, foreach=foreach)
    for a, b in zip(grads(sparse), grads(dense), strict=True):
        torch.testing.assert_close(a, b)
    assert sparse[0].weight.grad.is_sparse and grads(sparse)[0].abs().max() <= limit


def test_duplicates_are_summed_before_the_norm() -> None:
    bag = EmbeddingBag(5, 2, mode="sum", sparse=True)
    for ids in ([[1, 1, 3]], [[1, 4]]):
        bag(torch.tensor(ids)).sum().backward()
    assert clip_grad_norm_(bag.parameters(), 1e9).item() == pytest.approx(math.sqrt(18 + 2 + 2))


def test_a_gradient_without_rows_has_no_norm() -> None:
    model = trained(True, steps=[[[]]])
    for ord in (1, 2, math.inf):
        assert get_total_norm([model[0].weight.grad.detach()], ord) == 0


def test_clamping_that_would_move_zeros_is_refused() -> None:
    grad = trained(True)[0].weight.grad
    for limits in ({"min": 0.1}, {"max": -0.1}):
        with pytest.raises(NotImplementedError, match="must leave zeros as they are; got"):
            grad.clamp_(**limits)
