"""Inputs on which fused optimizers have been wrong somewhere: a planned step gives the values that follow from the formula."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparselift.apply import apply, explain
from sparselift.lift import lift
from sparselift.optim import RowWiseAdagrad
from sparselift.plan import default_plan
from sparselift.workload import Workload

SHARED_CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
IDS, OFFSETS = torch.tensor([1, 1, 2]), torch.tensor([0, 1])     # bags [1] and [1, 2]
GRAD = [[1.0, 2, 3, 4], [1, 1, 1, 1]]                             # of the two bags
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


class One(nn.Module):
    """A table of ones under one bag, or under several modules with a bag each."""

    def __init__(self, sharers: int = 1, sparse: bool = True) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(4, 4, mode="sum", sparse=sparse) for _ in range(sharers))
        for bag in self.bags:
            bag.weight = self.bags[0].weight
        nn.init.ones_(self.bags[0].weight)

    def forward(self, ids: list[Tensor], offsets: list[Tensor], weights: list[Tensor] | None = None) -> Tensor:
        outputs = [bag(i, o, w) for bag, i, o, w in zip(self.bags, ids, offsets, weights or [None] * len(ids))]
        return torch.cat(outputs, dim=0)


def planned(model: One, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], backend: str) -> One:
    """Under the default plan, whose updates are fused."""
    work = Workload("case", model, optimizer, lambda m, b: m(*b).sum(), [arguments] * 3)
    apply(default_plan(lift(work)), model, optimizer, backend=backend)
    return model


def rowwise(kind: str, lr: float, eps: float, weight_decay: float, backend: str = "cpu", sparse: bool = True) -> tuple[Tensor, Tensor]:
    """One planned step of row-wise Adagrad on the case's input: weight, and a sum a row. Kinds: "plain", "l2", "shared"."""
    model = One(2 if kind == "shared" else 1, sparse)
    weight = model.bags[0].weight
    optimizer = RowWiseAdagrad([weight], lr=lr, eps=eps, weight_decay=weight_decay)
    start = torch.tensor([0])
    arguments = ([IDS[:1], IDS[1:]], [start, start]) if kind == "shared" else ([IDS], [OFFSETS])
    planned(model, optimizer, arguments, backend)
    model(*arguments).backward(torch.tensor(GRAD))
    optimizer.step()
    assert "nothing fell back" in explain(model)
    return weight.detach(), optimizer.state[weight]["sum"]


def weighted_sgd(ids: Tensor, offsets: Tensor, sample_weights: Tensor, lr: float, backend: str = "cpu") -> tuple[Tensor, Tensor]:
    """Output of a weighted bag, and the table after a planned step of SGD. `sample_weights` get their gradient."""
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    planned(model, optimizer, ([ids], [offsets], [sample_weights.detach()]), backend)
    out = model([ids], [offsets], [sample_weights])
    out.sum().backward()
    optimizer.step()
    assert "nothing fell back" in explain(model)
    return out, model.bags[0].weight


@BACKENDS
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_duplicates_are_summed_before_the_mean_square(kind: str, sparse: bool, backend: str) -> None:
    """Row 1 gets [1, 2, 3, 4] and [1, 1, 1, 1]: g = [2, 3, 4, 5], sum = 54 / 4. In one bag's feature or in two that share the table."""
    weight, sums = rowwise(kind, 0.5, 1e-8, 0.0, backend, sparse)
    assert sums.tolist() == [0, 13.5, 1, 0]
    expected = np.ones((4, 4))
    expected[1] -= 0.5 * np.array([2, 3, 4, 5]) / math.sqrt(13.5)
    expected[2] -= 0.5
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)


@BACKENDS
def test_weight_decay_joins_the_gradient_of_touched_rows(backend: str) -> None:
    weight, sums = rowwise("l2", 0.5, 1e-8, 0.1, backend)
    gradient = np.array([2, 3, 4, 5]) + 0.1
    np.testing.assert_allclose(sums.numpy(), [0, np.square(gradient).mean(), 1.21, 0], rtol=1e-6)
    expected = np.ones((4, 4))
    expected[1] -= 0.5 * gradient / math.sqrt(np.square(gradient).mean())
    expected[2] -= 0.5
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)


@BACKENDS
def test_sample_weights_get_their_gradient_from_the_old_rows(backend: str) -> None:
    sample_weights = torch.ones(3, requires_grad=True)
    out, weight = weighted_sgd(torch.tensor([1, 1, 2]), torch.tensor([0, 2]), sample_weights, 1.0, backend)
    assert out.tolist() == [[2.0] * 4, [1.0] * 4]
    assert sample_weights.grad is not None and sample_weights.grad.tolist() == [4, 4, 4]
    assert weight[:, 0].tolist() == [1, -1, 0, 1] and (weight == weight[:, :1]).all()


def shared_case(name: str) -> ModuleType:
    path = SHARED_CASES / f"{name}.py"
    if not path.exists():
        pytest.skip(f"{path.name} is not there: the cases lie beside the repository, in ../shared/cases")
    spec = importlib.util.spec_from_file_location(f"case_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shared_case_of_rowwise_adagrad() -> None:
    assert shared_case("29_rowwise_adagrad").check(rowwise) == []


def test_shared_case_of_weighted_gradients() -> None:
    def without_last(ids: Tensor, offsets: Tensor, sample_weights: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        return weighted_sgd(ids, offsets[:-1], sample_weights, lr)

    assert shared_case("30_weighted_fused_grad").check(without_last) == []
