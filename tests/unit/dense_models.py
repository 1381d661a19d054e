"""Training steps with a dense part of some weight: batches, plans that pin what runs it, and gradients to compare with torch's."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import sparselift as sl
from sparselift.plan import default_plan

Model = TypeVar("Model", bound=nn.Module)


def batch(seed: int = 0, bags: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """dense (B, 3), offsets, and two of 20 ids a bag."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(bags, 3, generator=generator), torch.arange(0, 2 * bags, 2), torch.randint(20, (2 * bags,), generator=generator))


def workload(model: nn.Module) -> sl.Workload:
    return sl.Workload("w", model, torch.optim.SGD(model.parameters(), lr=0.05), lambda m, given: m(*given).square().mean(),
                       [batch(seed) for seed in range(3)], uses=frozenset())


def planned(model: nn.Module, pin: dict[str, Any]) -> tuple[sl.Plan, sl.Workload]:
    """The default plan with pinned knobs, and the workload that it is for."""
    work = workload(model)
    return default_plan(sl.lift(work), sl.Constraints(pin=pin)), work


def planned_copy(native: Model, pin: dict[str, Any]) -> Model:
    """A copy that runs under such a plan."""
    model = copy.deepcopy(native)
    plan, work = planned(model, pin)
    sl.apply(plan, model, work.optimizer)
    return model


def gradients(model: nn.Module, given: Any, seed: int = 0) -> list[Tensor]:
    """The output and every gradient there is."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(*given)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.to_dense() for p in model.parameters() if p.grad is not None)]


def assert_alike(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """Up to what sums in another order differ by."""
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs):
        assert (a - b).norm() <= 2e-6 * b.norm()
