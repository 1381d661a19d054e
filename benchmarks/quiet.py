"""Training steps without their kernels: under a plan, what is left is its machinery; natively, what torch itself takes for any step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.apply import ATTRIBUTE
from sparselift.kernels.base import BagProgram, IndexBatch, Segment


class Silent(BagProgram):
    """A program that prepares its first batch, hands that one out ever after, and computes nothing."""

    def __init__(self, program: BagProgram) -> None:
        self.program, self.tables, self.features = program, program.tables, program.features
        self.batch: IndexBatch | None = None

    def prepare(self, *args: Any, **kwargs: Any) -> IndexBatch:
        if self.batch is None:
            self.batch = self.program.prepare(*args, **kwargs)
        return self.batch

    def forward(self, tables: Sequence[Tensor], batch: IndexBatch, out: Tensor | Sequence[Tensor]) -> None:
        pass

    def update(self, *args: Any, **kwargs: Any) -> None:
        pass

    def weight_grad(self, tables: Sequence[Tensor], batch: IndexBatch, feature: int, grad: Tensor) -> Tensor:
        return self.program.weight_grad(tables, batch, feature, grad)

    def coalesced_grad(self, table: int, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        return self.program.coalesced_grad(table, segments)

    def expanded_grad(self, table: int, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        return self.program.expanded_grad(table, segments)


@contextmanager
def silence(model: nn.Module) -> Iterator[None]:
    """Run the preludes of an applied model without their kernels."""
    groups = [prelude.group for prelude in model.__dict__[ATTRIBUTE].runtime.preludes]
    programs = [group.program for group in groups]
    try:
        for group, program in zip(groups, programs, strict=True):
            group._program = Silent(program)
        yield
    finally:
        for group, program in zip(groups, programs, strict=True):
            group._program = program


@contextmanager
def hollow(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run native lookups without their lookup: each module gives a ready output of no bags, with an edge for autograd to follow."""
    try:
        for number, module in enumerate(modules):
            module.forward = _Ready(torch.empty(0, module.embedding_dim, requires_grad=number == 0)).forward
        yield
    finally:
        for module in modules:
            del module.forward


class _Ready:
    def __init__(self, output: Tensor) -> None:
        self.output = output

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return self.output
