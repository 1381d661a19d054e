"""The fused update: what happens around `optimizer.step()` to lifted tables.

Before the step, tables whose gradient is still pending lookups are updated by one kernel call a program, and their gradients are
hidden from torch's loop; other lifted tables lend torch's loop a real gradient. After it, every `.grad` is what it was.

Hooks of the user's must see what they see natively: before the step its gradients and the old weights, after it the same gradients
and the new weights. So ours is the last pre-hook and the first post-hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sparselift.dtypes import dtype_name
from sparselift.grad import GradState, PendingGrad
from sparselift.kernels.base import Segment, State, UpdateRule
from sparselift.memory import HugePageSet
from sparselift.optim import (
    FUSED_OPTIMIZERS,
    STATE_KEYS,
    fused_rule,
    large_state,
    rounding_key,
    rule_state,
    start_state,
    state_obstacle,
    update_rule,
)
from sparselift.runtime._hot import Arranged, arrange, consists_of_lookups, count, hide, is_table, pending, show
from sparselift.runtime.executor import Runtime
from sparselift.workload import check_ranks

_NO_STATE: dict[str, Any] = {}

# One table that the kernels are to update: weight, gradient, rule, the rule's state.
_Update = tuple[Tensor, GradState, UpdateRule, State]


class FusedStep:
    """The step hooks of one optimizer."""

    def __init__(self, runtime: Runtime, huge_pages: HugePageSet) -> None:
        self.runtime, self.huge_pages = runtime, huge_pages
        self.fused = frozenset(name for name in runtime.tables if runtime.knobs[name].update == "fused")
        # Lookup by lookup has torch's bits, but not with gradients of several backwards, of which torch sums some rows first.
        exact = "accumulate" not in (runtime.structure.uses or ())
        self.one_backward = frozenset(name for name in self.fused if exact and runtime.knobs[name].coalesce == "none")
        self.hidden: list[tuple[Tensor, PendingGrad]] = []
        self.lent: list[_Loan] = []
        self.untouched = ""                      # why torch's loop was left to the pending gradients themselves

    def register(self, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Install the hooks."""
        self.before_handle = optimizer.register_step_pre_hook(self.before)
        self.after_handle = optimizer.register_step_post_hook(self.after)
        hooks = self.after_handle.hooks_dict_ref()
        assert hooks is not None
        hooks.move_to_end(self.after_handle.id, last=False)
        return [self.before_handle, self.after_handle]

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step pre-hook. A closure runs first, since it computes the gradients that are to be applied."""
        check_ranks("step")
        self.hidden.clear()                      # of a step that raised: its lifted tables have had their update
        self.lent.clear()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self.untouched = ""
        if not self._is_last():
            self.untouched = "a step pre-hook was registered after apply; from the next step on it runs before the fused update"
        elif closure is not None and type(optimizer) not in FUSED_OPTIMIZERS:
            self.untouched = "it calls the closure itself"
        if self.untouched:
            return None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (args[0],), {**kwargs, "closure": _Constant(loss)}
        try:
            if not self._usual(optimizer):
                self._table_by_table(optimizer)
        except BaseException:
            self._put_back()
            raise
        return (args, kwargs) if closure is not None else None

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook."""
        self._put_back()
        if self.untouched:
            for group in optimizer.param_groups:
                for _, _, state in pending(group["params"]):
                    self.runtime.updates[state.table, f"torch's optimizer: {self.untouched}"] += 1
            hooks = self.before_handle.hooks_dict_ref()
            if hooks is not None and self.before_handle.id in hooks:
                hooks.move_to_end(self.before_handle.id)

    def _put_back(self) -> None:
        show(self.hidden)
        self.hidden.clear()
        for loan in self.lent:
            loan.take_back()
        self.lent.clear()

    def _is_last(self) -> bool:
        """Whether only hooks of other applied models, which leave our tables alone, run after ours."""
        hooks = self.before_handle.hooks_dict_ref()
        for hook in reversed((hooks or {}).values()):
            if hook == self.before:
                return True
            if not isinstance(getattr(hook, "__self__", None), FusedStep):
                return False
        return True

    def _usual(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run the step of an optimizer with one param group whose tables got their gradients from the same lookups; False for another."""
        group = optimizer.param_groups[0]
        kind, _ = fused_rule(optimizer, group, True)
        if kind is None or len(optimizer.param_groups) > 1 or group.get("lr_decay") or _is_scaled(optimizer):
            return False
        found = arrange(group["params"], optimizer.state, STATE_KEYS[kind], 1 if kind == "rowwise_adagrad" else 2, self.fused)
        if found is None or found.arrived[0].owners is not self.runtime.owners or (self.one_backward and len(found.arrived) > 1):
            return False
        if not found.sparse and fused_rule(optimizer, group, False)[0] is None:
            return False
        self.hidden = found.pairs
        hide(self.hidden)
        rules = _rules(kind, group, found)
        for arrival in found.arrived:
            arrival.segment.check_unchanged()
        found.arrived[0].program.update(found.weights, found.states, rules, [arrival.segment for arrival in found.arrived])
        count(found.counters)
        for own in found.numbered:
            own["step"] += 1
        torch.autograd.graph.increment_version([*(weight for weight, _ in found.pairs), *found.counters])
        return True

    def _table_by_table(self, optimizer: torch.optim.Optimizer) -> None:
        updates: list[_Update] = []
        stepped: list[dict[str, Any]] = []       # states of the optimizer
        before = 0                               # parameters of the groups so far
        for group in optimizer.param_groups:
            self._split(optimizer, group, before, updates, stepped)
            before += len(group["params"])
        if updates:
            for arrival in {arrival for _, state, _, _ in updates for arrival in state.arrived}:
                arrival.segment.check_unchanged()
            for batch in _by_arrivals(updates):
                _run_updates(batch)
            counters = _count_states(stepped)
            torch.autograd.graph.increment_version([*(weight for weight, _, _, _ in updates), *counters])

    def _split(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], before: int, updates: list[_Update],
               stepped: list[dict[str, Any]]) -> None:
        """Hide the pending gradients of a param group's tables; give torch's loop real ones where it must update them itself.

        `before`: parameters in the groups before.
        """
        found = [(weight, grad, state) for weight, grad, state in pending(group["params"])
                 if not state.arrived or state.arrived[0].owners is self.runtime.owners]
        if not found:
            return
        rules = {kind: fused_rule(optimizer, group, *kind) for kind in {(state.sparse, state.dtype) for _, _, state in found}}
        if _is_scaled(optimizer):
            rules = dict.fromkeys(rules, (None, "its own fused step takes the scale and the finite check of a GradScaler"))
        positions = _positions(group, before)
        shared: UpdateRule | None = None
        for weight, grad, state in found:
            rule, reason = rules[state.sparse, state.dtype]
            own = _NO_STATE
            if rule is not None:
                reason = self._obstacle(state, weight)
            if rule not in (None, "sgd") and not reason:
                if start_state(rule, optimizer, weight) and self.runtime.knobs[state.table].huge_pages:
                    self.huge_pages.add(dict(large_state(state.table, optimizer, weight)))
                own = optimizer.state.get(weight, _NO_STATE)
                reason = state_obstacle(rule, own, weight)
            if reason:
                knobs = self.runtime.knobs.get(state.table)
                self.lent.append(_Loan(weight, grad, knobs is not None and knobs.update == "coalesced"))
                self.runtime.updates[state.table, f"torch's optimizer: {reason}"] += 1
                continue
            assert rule is not None
            self.hidden.append((weight, grad))
            weight.grad = None
            if shared is None or "lr_decay" in group or rule == "adam" or shared.kind != rule or positions:
                shared = update_rule(rule, group, own, rounding_key(group, weight, positions[weight], own) if positions else None)
            updates.append((weight, state, shared, rule_state(rule, own)))
            if own:
                stepped.append(own)

    def _obstacle(self, state: GradState, weight: Tensor) -> str:
        """Why the kernels may not take a table's gradient; empty if they may."""
        if state.table not in self.runtime.tables:
            return "a table of another model"
        if state.table not in self.fused:
            return f"the plan chose update={self.runtime.knobs[state.table].update!r}"
        if state.value is not None:
            return "the gradient was read or written as a tensor"
        if len(state.arrived) > 1 and state.table in self.one_backward:
            return "gradients of several backwards, whose sum has torch's bits only in torch; uses={'accumulate'} would lift that"
        if not is_table(weight, state):
            return f"the table is no contiguous {dtype_name(state.dtype)} tensor of the recorded shape any more"
        return "" if consists_of_lookups(state) else "lookups of the table ran in several groups"


class _Loan:
    """A pending gradient that torch's loop sees as an ordinary tensor."""

    __slots__ = ("weight", "grad", "tensor", "version")

    def __init__(self, weight: Tensor, grad: PendingGrad, coalesced: bool) -> None:
        self.weight, self.grad = weight, grad
        tensor = grad.state.coalesced_tensor() if coalesced else grad.state.tensor()
        self.tensor = weight.grad = tensor.to(weight.dtype)          # which is another one where the table was given other data
        self.version = self.tensor._version

    def take_back(self) -> None:
        """Put the pending gradient back, with what the optimizer wrote to it. One that it replaced or dropped stays so."""
        if self.weight.grad is self.tensor:
            if self.tensor._version != self.version:
                self.grad.state.replace(self.tensor)
            if self.tensor.dtype == self.grad.dtype:
                self.weight.grad = self.grad


def _is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler leaves it to the optimizer to unscale gradients and to skip a step that has infinities."""
    return getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None


def _rules(kind: str, group: dict[str, Any], found: Arranged) -> list[UpdateRule | None]:
    """The rule of every table of an arranged step: one for all, but for those that depend on how many steps a table has had: Adam's, and
    those that round by chance."""
    positions = _positions(group, 0)
    if positions:
        keys = [None if weight is None else rounding_key(group, weight, positions[weight], {"step": step})
                for weight, step in zip(found.weights, found.steps)]
        return [None if weight is None else update_rule(kind, group, _NO_STATE, key) for weight, key in zip(found.weights, keys)]
    if kind != "adam":
        rule = update_rule(kind, group, _NO_STATE)
        return [None if weight is None else rule for weight in found.weights]
    by_step = {step: update_rule(kind, group, {"step": step}) for step in dict.fromkeys(found.steps) if step is not None}
    return [None if step is None else by_step[step] for step in found.steps]


def _positions(group: dict[str, Any], before: int) -> dict[Tensor, int]:
    """Where the parameters of a group that rounds by chance stand in their optimizer; empty for another group."""
    return {} if group.get("rounding_seed") is None else {weight: n for n, weight in enumerate(group["params"], before)}


def _by_arrivals(updates: Sequence[_Update]) -> list[list[_Update]]:
    """Tables whose gradients consist of the same backwards of one program, and so go into one kernel call."""
    batches: dict[tuple[int, ...], dict[str, _Update]] = {}
    again = []
    for update in updates:
        if update[1].arrived:                                 # a zeroed gradient moves nothing
            batch = batches.setdefault(tuple(map(id, update[1].arrived)), {})
            # A call has one place a table, but somebody may have given two parameters one table's gradient.
            if batch.setdefault(update[1].table, update) is not update:
                again.append([update])
    return [*(list(batch.values()) for batch in batches.values()), *again]


def _run_updates(updates: Sequence[_Update]) -> None:
    arrived = updates[0][1].arrived
    place = arrived[0].place
    weights: list[Tensor | None] = [None] * len(place)
    states: list[State] = [None] * len(place)
    rules: list[UpdateRule | None] = [None] * len(place)
    for weight, grad, rule, own in updates:
        position = place[grad.table]
        weights[position], states[position], rules[position] = weight, own, rule
    arrived[0].program.update(weights, states, rules, [_segment(updates, i) for i in range(len(arrived))])


def _count_states(states: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Add the step to the counters in an optimizer's states: tensors, which are returned, or SparseAdam's numbers."""
    counters = [own["step"] for own in states if isinstance(own["step"], Tensor)]
    count(counters)
    for own in states:
        if not isinstance(own["step"], Tensor):
            own["step"] += 1
    return counters


def _segment(updates: Sequence[_Update], position: int) -> Segment:
    arrival = updates[0][1].arrived[position]
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
