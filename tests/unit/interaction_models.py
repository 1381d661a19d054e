"""DLRM's model with an interaction that a test chooses, natively and under a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sparselift as sl
from sparselift.apply import ATTRIBUTE
from sparselift.plan import default_plan
from sparselift.runtime.interaction import Crossing

ROWS, DIM, NUM = (7, 11, 5), 8, 4
Interact = Callable[[Any, Tensor, Sequence[Tensor]], Tensor]


def batch(seed: int = 0, bags: int = 6) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    indices = [torch.randint(rows, (2 * bags,), generator=generator) for rows in ROWS]
    return torch.randn(bags, 3, generator=generator), [torch.arange(0, 2 * bags, 2)] * len(ROWS), indices


class Model(nn.Module):
    """A DLRM whose forward interacts as it is told to."""

    def __init__(self, interact: Interact, width: int = DIM + NUM * (NUM - 1) // 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.interact = interact
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for rows in ROWS)
        self.bot_l = nn.Sequential(nn.Linear(3, DIM), nn.ReLU())
        self.top_l = nn.Linear(width, 1)
        self.seen: list[Any] = []
        self.pairs = tuple(torch.tril_indices(NUM, NUM, -1))

    def forward(self, dense: Tensor, offsets: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
        x = self.bot_l(dense)
        return self.top_l(self.interact(self, x, [bag(ids, starts) for bag, ids, starts in zip(self.emb_l, indices, offsets)]))


def buffered(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).reshape(len(x), NUM, DIM)
    products = vectors @ vectors.mT
    return torch.cat((x, products[:, model.pairs[0], model.pairs[1]]), -1)


def dense_last(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.concat([*ly, x], 1).unflatten(1, (NUM, DIM))
    upper = torch.triu_indices(NUM, NUM, 1)
    return torch.cat([x, vectors.matmul(vectors.permute(0, 2, 1))[:, upper[0], upper[1]]], dim=1)


def loss_of(model: nn.Module, given: Any) -> Tensor:
    return model(*given).square().mean()


def workload(model: nn.Module, **options: Any) -> sl.Workload:
    batches = [batch(seed) for seed in range(3)]
    return sl.Workload("w", model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of, batches, uses=frozenset(), **options)

ALONE = sl.Constraints(pin={"linear": "native"})       # on every processor


def plan_of(work: sl.Workload) -> sl.Plan:
    return default_plan(sl.lift(work), ALONE)


def pair(interact: Interact, width: int = DIM + NUM * (NUM - 1) // 2) -> tuple[Model, Model, Crossing]:
    """A native and a planned model. The plan is made from a forward that interacts in the recorded way."""
    native = Model(buffered, width)
    planned = copy.deepcopy(native)
    work = workload(planned)
    sl.apply(plan_of(work), planned, work.optimizer)
    native.interact = planned.interact = interact
    return native, planned, crossing_of(planned)


def crossing_of(model: nn.Module) -> Crossing:
    (prelude,) = model.__dict__[ATTRIBUTE].runtime.preludes
    assert prelude.group.crossing is not None
    return prelude.group.crossing


def gradients(model: nn.Module, given: Any) -> list[Tensor]:
    model.zero_grad()
    out = model(*given)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.to_dense() for p in model.parameters() if p.grad is not None)]


def assert_alike(native: nn.Module, planned: nn.Module, given: Any) -> None:
    mine, theirs = gradients(planned, given), gradients(native, given)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs):
        assert (a - b).norm() <= 1e-5 * b.norm()


def other_pairs(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    return torch.cat([x, torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0].flip(0), model.pairs[1]]], 1)


def read_twice(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1) + products.sum()


def scaled(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]
    return torch.cat([x, products * 0.5], 1)


def of_another(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    return torch.cat([x, torch.bmm(vectors * 2, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]], 1)


def behind_another(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    return torch.cat([x * 1, torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]], 1)
