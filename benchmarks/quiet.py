"""Kernels that do nothing, in place of an applied plan's own, so that what is left is the machinery around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
