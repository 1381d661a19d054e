"""The fused update: what happens around `optimizer.step()` to lifted tables.

Before the step, tables whose gradient is still pending lookups are updated by one kernel call a program, and their gradients are
hidden from torch's loop; other lifted tables give torch's loop a real gradient. After it, every `.grad` is what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparselift.grad import GradState, Pending, PendingGrad
from sparselift.ir import Table
from sparselift.kernels.base import Segment, UpdateRule
from sparselift.optim import fused_rule, update_rule
from sparselift.runtime.executor import Runtime


class _Update(NamedTuple):
    """One table that the kernels are to update."""

    pending: list[Pending]         # all of one program
    weight: Tensor
    state: dict[str, Any]          # of the optimizer; empty for SGD
    rule: UpdateRule


class FusedStep:
    """The step hooks of one optimizer."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.hidden: list[tuple[Tensor, PendingGrad]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step pre-hook. A closure runs first, since it computes the gradients that are to be applied."""
        self.restore()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (args[0],), {**kwargs, "closure": _Constant(loss)}
        with torch.no_grad():
            updates = self._split(optimizer)
            for batch in _by_program(updates):
                _run(self.runtime, batch)
            steps = [update.state["step"] for update in updates if update.state]
            if steps:
                torch._foreach_add_(steps, 1)
            if updates:
                torch.autograd.graph.increment_version([update.weight for update in updates])
        return (args, kwargs) if closure is not None else None

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook."""
        self.restore()

    def restore(self) -> None:
        """Give hidden gradients back. Also called before a step, for one that never got to its post-hook."""
        for weight, grad in self.hidden:
            weight.grad = grad
        self.hidden.clear()

    def _split(self, optimizer: torch.optim.Optimizer) -> list[_Update]:
        """Hide the pending gradients of this optimizer's tables; give torch's loop real ones where it must update them itself."""
        runtime, updates = self.runtime, []
        tables = {id(owner._parameters["weight"]): runtime.tables[name] for name, owner in runtime.owners.items()}
        for group in optimizer.param_groups:
            rules: dict[bool, tuple[str | None, str]] = {}
            for weight in group["params"]:
                table = tables.get(id(weight))
                if table is None or type(grad := weight.grad) is not PendingGrad:
                    continue
                if table.sparse not in rules:
                    rules[table.sparse] = fused_rule(optimizer, group, table.sparse)
                rule, reason = rules[table.sparse]
                state = optimizer.state.get(weight, {}) if rule != "sgd" else {}
                if rule is not None:
                    reason = self._obstacle(table, grad._state) or _state_obstacle(rule, state, weight)
                self.hidden.append((weight, grad))
                if rule is None or reason:
                    weight.grad = grad._state.tensor()
                    runtime.updates[table.name, f"torch's optimizer: {reason}"] += 1
                else:
                    weight.grad = None
                    updates.append(_Update(grad._state.pending, weight, state, update_rule(rule, group, state)))
        return updates

    def _obstacle(self, table: Table, state: GradState) -> str:
        """Why the kernels may not take a table's gradient; empty if they may."""
        if self.runtime.knobs[table.name].update == "native":
            return "the plan chose it"
        if state.value is not None:
            return "the gradient was read or written as a tensor"
        if len(state.pending) > 1 and any(p.program is not state.pending[0].program for p in state.pending):
            return "lookups of the table ran in several groups"
        return ""


def _state_obstacle(rule: str, state: dict[str, Any], weight: Tensor) -> str:
    if rule == "sgd":
        return ""
    total = state.get("sum")
    shape = weight.shape if rule == "adagrad" else weight.shape[:1]
    if not isinstance(total, Tensor) or total.dtype != torch.float32 or total.shape != shape or not total.is_contiguous():
        return f"the optimizer's state has no contiguous float32 'sum' of shape {tuple(shape)}"
    return ""


def _by_program(updates: Sequence[_Update]) -> list[list[_Update]]:
    """Tables whose gradients consist of the same backwards of one program, and so go into one kernel call."""
    batches: dict[tuple[int, ...], list[_Update]] = {}
    for update in updates:
        if update.pending:                                    # a zeroed gradient moves nothing
            batches.setdefault(tuple([id(p.segment) for p in update.pending]), []).append(update)
    return list(batches.values())


def _run(runtime: Runtime, updates: Sequence[_Update]) -> None:
    """Update the tables of one program. Those that are not in `updates` are passed without a rule."""
    program = updates[0].pending[0].program
    weights: list[Tensor] = [runtime.owners[spec.name]._parameters["weight"] for spec in program.tables]  # type: ignore[misc]
    states: list[Tensor | None] = [None] * len(weights)
    rules: list[UpdateRule | None] = [None] * len(weights)
    for update in updates:
        place = update.pending[0].table
        rules[place] = update.rule
        states[place] = update.state.get("sum")
    program.update(weights, states, rules, [_segment(updates, i) for i in range(len(updates[0].pending))])


def _segment(updates: Sequence[_Update], position: int) -> Segment:
    segment = updates[0].pending[position].segment
    segment.check_unchanged()
    if all(update.pending[position].scale == 1.0 for update in updates):
        return segment
    scales = [1.0] * len(updates[0].pending[position].program.tables)
    for update in updates:
        scales[update.pending[position].table] = update.pending[position].scale
    return Segment(segment.batch, segment.grad, scales)


class _Constant:
    """A closure that has run already."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self) -> Any:
        return self.loss
