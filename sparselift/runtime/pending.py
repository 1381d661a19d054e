"""Where the gradients of lifted tables wait for `optimizer.step()`: each table's `.grad`, kept across steps."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from sparselift.grad import GradState, Pending, PendingGrad


class TableGrad:
    """The persistent gradient of one table.

    The same `PendingGrad` is attached again after every `zero_grad(set_to_none=True)`, since making one costs as much as
    the rest of the backward. One that somebody else holds (logged, say) is left to them, and a new one made.
    """

    __slots__ = ("handle", "shape", "sparse")

    def __init__(self, shape: tuple[int, int], sparse: bool) -> None:
        self.shape, self.sparse = shape, sparse
        self.handle = PendingGrad(GradState(shape, sparse))

    def accumulate(self, weight: Tensor, pending: Pending) -> None:
        """Add one backward's gradient to `weight.grad`, as AccumulateGrad does."""
        grad = weight.grad
        if grad is self.handle:
            self.handle._state.add(pending)
        elif grad is None:
            self._renew()
            self.handle._state.pending.append(pending)
            weight.grad = self.handle
        else:
            extra = GradState(self.shape, self.sparse)
            extra.add(pending)
            weight.grad = grad + extra.tensor()

    def release(self) -> None:
        """Let go of the buffers of a gradient that is attached nowhere."""
        state = self.handle._state
        if (state.pending or state.value is not None) and not self._is_held():
            state.clear()

    def _renew(self) -> None:
        if self._is_held():
            self.handle = PendingGrad(GradState(self.shape, self.sparse))
        else:
            self.handle._state.clear()

    def _is_held(self) -> bool:
        # Our own references: the slot of this object and getrefcount's argument; of the state: the handle's and the argument.
        return sys.getrefcount(self.handle) > 2 or sys.getrefcount(self.handle._state) > 2


def settle(weight: nn.Parameter, table_grad: TableGrad) -> None:
    """Replace our pending gradient by the tensor that torch would have there."""
    if weight.grad is table_grad.handle:
        weight.grad = table_grad.handle._state.keep()


def is_pending(grad: Any) -> bool:
    """Whether a gradient still consists of lookups alone, so that the fused update can take it."""
    return type(grad) is PendingGrad and grad._state.value is None
