"""The fused update: what happens around `optimizer.step()` to lifted tables.

Before the step, tables whose gradient is still pending lookups are updated by one kernel call a program, and their gradients are
hidden from torch's loop; other lifted tables give torch's loop a real gradient. After it, every `.grad` is what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparselift.grad import Arrival, GradState, PendingGrad
from sparselift.kernels.base import Segment, UpdateRule
from sparselift.optim import fused_rule, update_rule
from sparselift.runtime._hot import arrange, consists_of_lookups, hide, pending, show
from sparselift.runtime.executor import Runtime

_ONE = torch.ones(())
_NO_STATE: dict[str, Any] = {}
_SUM_DIMS = {"sgd": 0, "adagrad": 2, "rowwise_adagrad": 1}     # dimensions of the state that a rule keeps


# One table that the kernels are to update: weight, gradient, rule, Adagrad's sums.
_Update = tuple[Tensor, GradState, UpdateRule, Tensor | None]


class FusedStep:
    """The step hooks of one optimizer."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.fused = frozenset(name for name in runtime.tables if runtime.knobs[name].update == "fused")
        self.hidden: list[tuple[Tensor, PendingGrad]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step pre-hook. A closure runs first, since it computes the gradients that are to be applied."""
        self.hidden.clear()                      # of a step that raised: its lifted tables have had their update
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (args[0],), {**kwargs, "closure": _Constant(loss)}
        if not self._usual(optimizer):
            self._table_by_table(optimizer)
        return (args, kwargs) if closure is not None else None

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook."""
        show(self.hidden)
        self.hidden.clear()

    def _usual(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run the step of an optimizer with one param group whose tables got their gradients from the same lookups; False for another."""
        group = optimizer.param_groups[0]
        kind, _ = fused_rule(optimizer, group, True)
        if kind is None or len(optimizer.param_groups) > 1 or group.get("lr_decay"):
            return False
        found = arrange(group["params"], optimizer.state, _SUM_DIMS[kind], self.fused)
        if found is None or (not found.sparse and fused_rule(optimizer, group, False)[0] is None):
            return False
        self.hidden = found.pairs
        hide(self.hidden)
        rule = update_rule(kind, group, _NO_STATE)
        rules = [None if weight is None else rule for weight in found.weights]
        for arrival in found.arrived:
            arrival.segment.check_unchanged()
        _run(self.runtime, found.weights, found.sums, rules, found.arrived, [arrival.segment for arrival in found.arrived])
        _count(found.counters)
        torch.autograd.graph.increment_version([weight for weight, _ in found.pairs])
        return True

    def _table_by_table(self, optimizer: torch.optim.Optimizer) -> None:
        updates: list[_Update] = []
        counters: list[Tensor] = []
        for group in optimizer.param_groups:
            self._split(optimizer, group, updates, counters)
        if updates:
            for batch in _by_arrivals(updates):
                _run_updates(self.runtime, batch)
            _count(counters)
            torch.autograd.graph.increment_version([weight for weight, _, _, _ in updates])

    def _split(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], updates: list[_Update], counters: list[Tensor]) -> None:
        """Hide the pending gradients of a param group's tables; give torch's loop real ones where it must update them itself."""
        found = pending(group["params"])
        if not found:
            return
        rules = {sparse: fused_rule(optimizer, group, sparse) for sparse in {state.sparse for _, _, state in found}}
        shared: UpdateRule | None = None
        for weight, grad, state in found:
            rule, reason = rules[state.sparse]
            own = optimizer.state.get(weight, _NO_STATE) if rule not in (None, "sgd") else _NO_STATE
            if rule is not None and (state.table not in self.fused or own is not _NO_STATE or not consists_of_lookups(state)):
                reason = self._obstacle(state) or (_state_obstacle(rule, own, weight) if rule != "sgd" else "")
            self.hidden.append((weight, grad))
            if reason:
                weight.grad = state.coalesced_tensor() if self.runtime.knobs[state.table].update == "coalesced" else state.tensor()
                self.runtime.updates[state.table, f"torch's optimizer: {reason}"] += 1
                continue
            assert rule is not None
            weight.grad = None
            if shared is None or "lr_decay" in group or shared.kind != rule:
                shared = update_rule(rule, group, own)
            updates.append((weight, state, shared, own.get("sum")))
            if own:
                counters.append(own["step"])

    def _obstacle(self, state: GradState) -> str:
        """Why the kernels may not take a table's gradient; empty if they may."""
        if state.table not in self.runtime.tables:
            return "a table of another model"
        if state.table not in self.fused:
            return f"the plan chose update={self.runtime.knobs[state.table].update!r}"
        if state.value is not None:
            return "the gradient was read or written as a tensor"
        return "" if consists_of_lookups(state) else "lookups of the table ran in several groups"


def _state_obstacle(rule: str, state: dict[str, Any], weight: Tensor) -> str:
    total = state.get("sum")
    shape = weight.shape if rule == "adagrad" else weight.shape[:1]
    if not isinstance(total, Tensor) or total.dtype != torch.float32 or total.shape != shape or not total.is_contiguous():
        return f"the optimizer's state has no contiguous float32 'sum' of shape {tuple(shape)}"
    return ""


def _by_arrivals(updates: Sequence[_Update]) -> list[list[_Update]]:
    """Tables whose gradients consist of the same backwards of one program, and so go into one kernel call."""
    batches: dict[tuple[int, ...], list[_Update]] = {}
    for update in updates:
        if update[1].arrived:                                 # a zeroed gradient moves nothing
            batches.setdefault(tuple(map(id, update[1].arrived)), []).append(update)
    return list(batches.values())


def _run_updates(runtime: Runtime, updates: Sequence[_Update]) -> None:
    arrived = updates[0][1].arrived
    place = arrived[0].place
    weights: list[Tensor | None] = [None] * len(place)
    states: list[Tensor | None] = [None] * len(place)
    rules: list[UpdateRule | None] = [None] * len(place)
    for weight, grad, rule, sums in updates:
        position = place[grad.table]
        weights[position], states[position], rules[position] = weight, sums, rule
    _run(runtime, weights, states, rules, arrived, [_segment(updates, i) for i in range(len(arrived))])


def _run(runtime: Runtime, weights: list[Any], states: list[Tensor | None], rules: list[UpdateRule | None],
         arrived: Sequence[Arrival], segments: list[Segment]) -> None:
    """Update the tables of one program: those that have a rule."""
    if len(weights) > sum(rule is not None for rule in rules):
        for name, position in arrived[0].place.items():
            if rules[position] is None:
                weights[position] = runtime.owners[name]._parameters["weight"]
    arrived[0].program.update(weights, states, rules, segments)


def _count(steps: list[Tensor]) -> None:
    if steps:
        with torch.no_grad():
            torch._foreach_add_(steps, _ONE, alpha=1)     # of a number torch would make a tensor, once a step count


def _segment(updates: Sequence[_Update], position: int) -> Segment:
    arrival = updates[0][1].arrived[position]
    arrival.segment.check_unchanged()
    if all(grad.scales is None for _, grad, _, _ in updates):
        return arrival.segment
    scales = [1.0] * len(arrival.place)
    for _, grad, _, _ in updates:
        if grad.scales is not None:
            scales[arrival.place[grad.table]] = grad.scales[position]
    return Segment(arrival.segment.batch, arrival.segment.grad, scales)


class _Constant:
    """A closure that has run already."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self) -> Any:
        return self.loss
