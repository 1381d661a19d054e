"""`backward(inputs=...)` and `torch.autograd.grad` where the inputs are tables of lifted lookups.

Weights are no inputs of a fused lookup: an autograd edge a table costs microseconds in every step, so there is one edge a group, to an
anchor. Asked for a table's gradient, torch's engine would find no way to it and do nothing. So a layer over the engine's one entry asks
for the anchors instead, and tells the lookups on the way whose gradients are wanted. A backward without `inputs` passes through.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Variable

from sparselift.errors import LiftRefused
from sparselift.grad import accumulated
from sparselift.runtime import concat, interaction


class Group(Protocol):
    """What is needed of a LookupGroup."""

    anchor: Tensor

    def has_shape(self, shape: torch.Size) -> bool:
        """Whether it has a table of this shape."""


class Wanted:
    """Whose gradients a backward with `inputs` is to compute, and, if it is not to write to `.grad`, what they are."""

    __slots__ = ("collected", "keeps", "weights")

    def __init__(self, inputs: Sequence[Any], keeps: bool) -> None:
        self.weights = {id(leaf) for leaf in inputs if isinstance(leaf, Tensor)}
        self.keeps = keeps                                 # in .grad
        self.collected: dict[int, Tensor] = {}

    def collect(self, weight: Tensor, grad: Tensor) -> None:
        before = self.collected.get(id(weight))
        self.collected[id(weight)] = grad if before is None else accumulated(before, grad)


_groups: WeakSet[Any] = WeakSet()
_here = threading.local()


class Run(NamedTuple):
    """What a backward was asked for."""

    wanted: Wanted | None          # None: no table is among its inputs
    has_inputs: bool               # whether it is one to some leaves alone
    creates_graph: bool            # whether its gradients are to be differentiated


_USUAL = Run(None, False, False)


def _run() -> Run:
    """Of the backward that runs in this thread."""
    return getattr(_here, "run", _USUAL)


def wanted() -> Wanted | None:
    """Of the backward that runs in this thread; None if it has no table among its inputs."""
    return _run().wanted


def has_inputs() -> bool:
    """Whether the backward that runs in this thread is one to some leaves alone."""
    return _run().has_inputs


def creates_graph() -> bool:
    """Whether the gradients of the backward that runs in this thread are to be differentiated."""
    return _run().creates_graph


def watch(group: Group) -> None:
    """Let backwards with inputs reach a group's tables, for as long as it lives."""
    _groups.add(group)
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine(Variable._execution_engine)


class _Engine(torch._C._ImperativeEngine):
    """torch's engine behind the layer."""

    def __new__(cls, inner: Any) -> _Engine:
        return super().__new__(cls)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def run_backward(self, outputs: Any, grads: Any, keep_graph: bool, create_graph: bool,
                     inputs: Sequence[Any] = (), allow_unreachable: bool = False, accumulate_grad: bool = False) -> Any:
        before = _run()
        if before is _USUAL and not inputs and not create_graph:
            return self._inner.run_backward(outputs, grads, keep_graph, create_graph, inputs, allow_unreachable=allow_unreachable,
                                            accumulate_grad=accumulate_grad)
        concat.use_as_inputs(inputs)
        interaction.use_as_inputs(inputs)
        groups = _with_tables_of(inputs) if inputs else []
        if groups and any(isinstance(grad, Tensor) and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
            raise LiftRefused("is_grads_batched=True for lifted tables: their backward runs in kernels; call sparselift.unapply first")
        here = Wanted(inputs, accumulate_grad) if groups else None
        _here.run = Run(here, bool(inputs), create_graph)
        try:
            found = self._inner.run_backward(outputs, grads, keep_graph, create_graph, (*inputs, *(group.anchor for group in groups)),
                                             allow_unreachable=allow_unreachable or bool(groups), accumulate_grad=accumulate_grad)
        finally:
            _here.run = before
        if here is None or accumulate_grad:
            return found
        return _with_collected(here, inputs, found, allow_unreachable)


def _with_tables_of(inputs: Sequence[Any]) -> list[Any]:
    """The groups that may have looked up one of these."""
    shapes = {leaf.shape for leaf in inputs if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.dim() == 2}
    return [group for group in list(_groups) if any(map(group.has_shape, shapes))]


def _with_collected(here: Wanted, inputs: Sequence[Any], found: Sequence[Tensor | None], allow_unused: bool) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`: those that torch's graph gave, plus those of lifted lookups."""
    result: list[Tensor | None] = []
    for leaf, grad in zip(inputs, found):
        own = here.collected.get(id(leaf))
        if grad is None:
            grad = own
        elif own is not None:
            grad = own + grad if own.is_sparse and not grad.is_sparse else grad + own
        if grad is None and not allow_unused:
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph. "
                               "Set allow_unused=True if this is the desired behavior.")
        result.append(grad)
    return tuple(result)
