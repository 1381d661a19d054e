"""What tests of the `.grad` of a lifted table have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.grad import PendingGrad
from tests.unit.runtime_models import DIM, ROWS
from tests.unit.test_runtime import Pair, backward

TABLE = 1                                 # of the model, whose gradient is looked at
SHAPE = (ROWS[TABLE], DIM)


def weights(pair: Pair) -> tuple[nn.Parameter, nn.Parameter]:
    """The table of both models, natively and lifted."""
    return pair.native.emb[TABLE].weight, pair.lifted.emb[TABLE].weight


def fresh(pair: Pair, seed: int = 0) -> tuple[Tensor, Tensor]:
    """New gradients of the table, natively and lifted."""
    for model in (pair.native, pair.lifted):
        model.zero_grad()
        backward(model, seed)
    native, lifted = (weight.grad for weight in weights(pair))
    assert type(lifted) is PendingGrad and type(native) is Tensor
    return native, lifted


def assert_same_grad(native: Tensor, lifted: Tensor, exact: bool = True) -> None:
    assert native.layout == lifted.layout and native.dtype == lifted.dtype and native.shape == lifted.shape
    torch.testing.assert_close(lifted.to_dense(), native.to_dense(), equal_nan=True, **({"rtol": 0, "atol": 0} if exact else {}))


def written(write: Callable[[Tensor], Any]) -> Callable[[nn.Module, Any], None]:
    def use(model: nn.Module, optimizer: Any) -> None:
        write(model.emb[TABLE].weight.grad)
        optimizer.step()
        backward(model, 4)                       # adds to what was written
        optimizer.step()
    return use
