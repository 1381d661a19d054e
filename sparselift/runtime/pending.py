"""Where the gradients of lifted tables wait for `optimizer.step()`: each table's `.grad`, kept across steps."""

from __future__ import annotations

from collections.abc import Iterable
from sys import getrefcount

from torch import Tensor

from sparselift.grad import Arrival, GradState, PendingGrad
from sparselift.ir import Table


class TableGrad:
    """The persistent gradient of one table.

    The same `PendingGrad` is attached again after every `zero_grad(set_to_none=True)`, since making one costs as much as
    the rest of the backward. One that somebody else holds (logged, say) is left to them, and a new one made.
    """

    __slots__ = ("handle", "state")

    def __init__(self, table: Table) -> None:
        self.state = GradState(table.name, (table.rows, table.dim), table.sparse)
        self.handle = PendingGrad(self.state)

    def is_held(self) -> bool:
        """Whether anybody but us refers to the gradient while it is attached nowhere."""
        # Ours are the slot and getrefcount's argument; of the state, also the handle's.
        return getrefcount(self.handle) > 2 or getrefcount(self.state) > 3

    def renew(self) -> None:
        """Leave the gradient to whoever holds it."""
        old = self.state
        self.state = GradState(old.table, old.shape, old.sparse)
        self.handle = PendingGrad(self.state)

    def settle(self, weight: Tensor) -> None:
        """Replace our pending gradient by the tensor that torch would have there."""
        if weight.grad is self.handle:
            weight.grad = self.state.keep()


def accumulate(reached: Iterable[tuple[Tensor, TableGrad]], arrival: Arrival) -> None:
    """Add one backward's gradient to `.grad` of every reached table, as AccumulateGrad does."""
    alone = (arrival,)
    for weight, table in reached:
        grad = weight.grad
        if grad is None:
            if getrefcount(table.handle) > 2 or getrefcount(table.state) > 3:
                table.renew()
            state = table.state
            state.arrived, state.scales, state.value = alone, None, None
            weight.grad = table.handle
        elif grad is table.handle:
            table.state.add(arrival)
        else:
            extra = GradState(table.state.table, table.state.shape, table.state.sparse)
            extra.add(arrival)
            weight.grad = grad + extra.tensor()


def release(weights: Iterable[Tensor], tables: Iterable[TableGrad]) -> None:
    """Let go of the buffers of gradients that are attached nowhere."""
    for weight, table in zip(weights, tables):
        if table.state.arrived and weight.grad is None and not table.is_held():
            table.state.clear()
