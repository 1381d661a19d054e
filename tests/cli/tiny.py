"""Workloads that a command runs in milliseconds, and some that are wrong on purpose."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from sparselift import Workload

ROWS = (50, 400, 3000)


class Model(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for rows in ROWS)
        self.top = nn.Linear(dim * len(ROWS), 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([bag(ids[:, column:column + 1]) for column, bag in enumerate(self.bags)], dim=1))


def work(dim: int = 8, batch_size: int = 64, sleep_s: float = 0.0) -> Workload:
    """Three tables, concatenated. `sleep_s` slows every step down."""
    torch.manual_seed(0)
    model = Model(dim)
    batches = [torch.stack([torch.randint(rows, (batch_size,)) for rows in ROWS], dim=1) for _ in range(4)]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(sleep_s)
        return model(batch).square().mean()

    return Workload("tiny", model, torch.optim.SGD(model.parameters(), lr=0.1), step, batches, uses=frozenset())


def no_embeddings() -> Workload:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload("dense", model, optimizer, lambda model, batch: model(batch).mean(), [torch.ones(2, 4)])


def id_beyond_table() -> Workload:
    made = work()
    made.batches[1][0, 0] = ROWS[0]  # type: ignore[index]
    return made


def broken_step() -> Workload:
    made = work()
    return Workload("broken", made.model, made.optimizer, lambda model, batch: 1 / 0, made.batches)  # type: ignore[arg-type, return-value]


def not_a_workload() -> Any:
    return {"model": None}


def broken_function() -> Workload:
    raise ValueError("no data here:\n  neither there\n\n  nor elsewhere")


def broken_arguments() -> Workload:
    made = work()
    return Workload("broken", made.model, made.optimizer, None, made.batches)  # type: ignore[arg-type]
