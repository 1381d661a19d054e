"""The exact part of the certificate: native, planned and the formulas, side by side on integers, must agree bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparselift.apply import Applied
from sparselift.batches import IndexAhead
from sparselift.errors import EquivalenceError
from sparselift.ir import Structure
from sparselift.kernels.base import KernelBackend
from sparselift.optim import state_parts
from sparselift.schedule import Schedule
from sparselift.stats import Sketch
from sparselift.verify.integers import Drawn, Oracle, exact_run, is_reset, reset
from sparselift.verify.twin import Rule, Twin, twin_optimizers, twin_structure

ROUNDS = (1, 2, 1)                 # backwards before each step: plain, accumulated, and one after an evaluation
ULPS = 4                           # of max(|weight|, |update|), where an optimizer's own formula rounds


@dataclass(slots=True)
class _Side:
    """One twin under test."""

    name: str
    model: Twin
    optimizers: list[torch.optim.Optimizer]
    ahead: IndexAhead = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = IndexAhead(self.model, tuple)

    @classmethod
    def build(cls, name: str, structure: Structure, weights: Mapping[str, Tensor], rules: Mapping[str, Rule]) -> _Side:
        model = Twin(structure)
        side = cls(name, model, twin_optimizers(structure, model, rules))
        side.load(weights)
        return side

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self.model.table_weights[name].copy_(weight)

    def forward(self, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
        """The model's, after the index work where the schedule wants that done ahead."""
        if self.ahead.depth:
            self.ahead.prepare(arguments)
        return self.model(*arguments)

    def state(self, table: str, rules: Mapping[str, Rule]) -> tuple[Tensor, ...]:
        """What the optimizer keeps of a table: Adagrad's sums, Adam's moments."""
        position = [t.name for t in self.model.structure.tables if t.name in rules].index(table)
        return state_parts(rules[table].formula, self.optimizers[position].state[self.model.table_weights[table]])


def check_exact(structure: Structure, schedule: Schedule, sketches: Mapping[str, Sketch], rules: Mapping[str, Rule],
                backend: str | KernelBackend, seed: int) -> dict[str, int]:
    """Run `len(ROUNDS)` steps and compare everything after each.

    `structure` is the real one; `rules` are those of `table_rules`. Returns what was compared: how many values of each kind.
    Raises EquivalenceError with the first difference.
    """
    twin = twin_structure(structure)
    weights, rounds = exact_run(twin, sketches, rules, seed, _rounds(structure))
    native, planned = (_Side.build(name, twin, weights, rules) for name in ("native", "planned"))
    Applied(twin, schedule, planned.model, backend).attach(planned.model, planned.optimizers)
    oracle = Oracle.start(twin, rules, weights)
    checks = _Checks()
    for number, batches in enumerate(rounds, 1):
        where = f"step {number}"
        for drawn in batches:
            _forward_and_backward(native, planned, oracle, drawn, checks, where)
        _compare_gradients(native, planned, oracle, checks, where)
        for side in (native, planned):
            for optimizer in side.optimizers:
                optimizer.step()
        before = {name: weight.clone() for name, weight in oracle.weights.items()}
        oracle.step()
        _compare_tables(native, planned, oracle, before, rules, checks, where)
        for side in (native, planned):
            for optimizer in side.optimizers:
                optimizer.zero_grad()
        reset(oracle, weights)
        for side in (native, planned):
            side.load({name: weights[name] for name in rules if is_reset(twin, rules, name)})
    return checks.counts


def _rounds(structure: Structure) -> tuple[int, ...]:
    """`ROUNDS`; one backward each where torch cannot add a second one's gradient natively: it has no sum of sparse float16 tensors."""
    adds = not any(table.sparse and table.dtype == "float16" for table in structure.tables)
    return ROUNDS if adds else (1,) * len(ROUNDS)


class _Checks:
    """Comparisons made, by kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def equal(self, kind: str, where: str, name: str, got: Tensor, want: Tensor, than: str) -> None:
        """Raises EquivalenceError unless two tensors are equal, value for value (0.0 equals -0.0)."""
        self.counts[kind] = self.counts.get(kind, 0) + want.numel()
        if got.shape != want.shape:
            raise EquivalenceError(f"{where}: {kind} {name}: planned has shape {tuple(got.shape)}, {than} {tuple(want.shape)}")
        if than == "native" and got.dtype != want.dtype:
            raise EquivalenceError(f"{where}: {kind} {name}: planned is {got.dtype}, native {want.dtype}")
        if not torch.equal(got.double(), want.double()):
            _differ(kind, where, name, got, want, than)

    def close(self, kind: str, where: str, name: str, got: Tensor, want: Tensor, size: Tensor) -> None:
        """Raises EquivalenceError unless they agree to ULPS of `size` in float32, element by element, and for halves to their spacing
        beyond that: where float32 differs, they may be rounded to either neighbour. What is written is below twice the size.
        """
        self.counts[kind] = self.counts.get(kind, 0) + want.numel()
        allowed = ULPS * torch.finfo(torch.float32).eps * size
        if got.dtype != torch.float32:
            allowed = allowed + 2 * torch.finfo(got.dtype).eps * size
        if bool(((got.double() - want.double()).abs() > allowed).any()) or bool(got.isnan().any()):
            _differ(kind, where, name, got, want, "native")


def _differ(kind: str, where: str, name: str, got: Tensor, want: Tensor, than: str) -> None:
    difference = (got.double() - want.double()).abs().nan_to_num(nan=float("inf"))
    place = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)) if difference.dim() else ()
    count = int((difference > 0).sum())
    raise EquivalenceError(f"{where}: {kind} {name} differs in {count} of {want.numel()} values: at {list(place)} planned has "
                           f"{got[place].item():.9g}, {than} {want[place].item():.9g}")


def _forward_and_backward(native: _Side, planned: _Side, oracle: Oracle, drawn: Drawn, checks: _Checks, where: str) -> None:
    """One forward in evaluation mode, one that is differentiated, and the injected gradients' way back."""
    structure = native.model.structure
    with torch.no_grad():
        evaluated = planned.model(*_arguments(drawn, False)[0])
    outputs, factors = {}, {}
    for side in (native, planned):
        arguments, factors[side.name] = _arguments(drawn, True)
        outputs[side.name] = side.forward(arguments)
    expected = _joined(structure, oracle.lookup(drawn), drawn)
    arriving = _joined(structure, drawn.grads, drawn, zero_foreign=True)
    for name, want in outputs["native"].items():
        got = outputs["planned"][name]
        checks.equal("output", where, name, got, want, "native")
        checks.equal("output", where, name, got, expected[name], "the formula")
        checks.equal("output in evaluation", where, name, evaluated[name], want, "native")
    for side in (native, planned):
        live = [name for name, output in outputs[side.name].items() if output.requires_grad]
        torch.autograd.backward([outputs[side.name][name] for name in live],
                                [arriving[name].to(outputs[side.name][name].dtype) for name in live])
    products = oracle.backward(drawn)
    for place, feature in enumerate(structure.features):
        if feature.weighted:
            got = factors["planned"][place].grad
            checks.equal("per-sample weight gradient", where, feature.name, got, factors["native"][place].grad, "native")
            checks.equal("per-sample weight gradient", where, feature.name, got.reshape(-1), products[feature.name], "the formula")


def _arguments(drawn: Drawn, differentiable: bool) -> tuple[tuple[Any, ...], list[Any]]:
    batch = drawn.batch
    factors = [None if w is None else w.clone().requires_grad_(differentiable) for w in batch.weights]
    return (list(batch.indices), list(batch.offsets), factors, batch.foreign), factors


def _joined(structure: Structure, values: Mapping[str, Tensor], drawn: Drawn, zero_foreign: bool = False) -> dict[str, Tensor]:
    """By output of the twin: features' values, those in a concat joined as it joins them."""
    found = dict(values)
    for concat, others in zip(structure.concats, drawn.batch.foreign):
        rest = iter(others)
        parts = [found.pop(p) if isinstance(p, str) else next(rest) for p in concat.parts]
        if zero_foreign:
            parts = [part if isinstance(p, str) else torch.zeros_like(part) for p, part in zip(concat.parts, parts)]
        found[concat.name] = torch.cat(parts, dim=1)
    return found


def _compare_gradients(native: _Side, planned: _Side, oracle: Oracle, checks: _Checks, where: str) -> None:
    """What a training loop would see in `.grad`, before the step."""
    for name, weight in native.model.table_weights.items():
        theirs, ours = weight.grad, planned.model.table_weights[name].grad
        if theirs is None or ours is None:
            if (theirs is None) != (ours is None):
                raise EquivalenceError(f"{where}: gradient of {name}: planned has {'none' if ours is None else 'one'}, native "
                                       f"{'none' if theirs is None else 'one'}")
            continue
        if theirs.layout != ours.layout:
            raise EquivalenceError(f"{where}: gradient of {name}: planned has layout {ours.layout}, native {theirs.layout}")
        dense = ours.to_dense() if ours.layout == torch.sparse_coo else ours.clone()
        checks.equal("gradient", where, name, dense, theirs.to_dense() if theirs.layout == torch.sparse_coo else theirs, "native")
        checks.equal("gradient", where, name, dense, oracle.grads[name], "the formula")


def _compare_tables(native: _Side, planned: _Side, oracle: Oracle, before: Mapping[str, Tensor], rules: Mapping[str, Rule],
                    checks: _Checks, where: str) -> None:
    for name, theirs in native.model.table_weights.items():
        ours = planned.model.table_weights[name].detach()
        rule = rules.get(name)
        if rule is None or rule.formula == "sgd":
            checks.equal("weights", where, name, ours, theirs.detach(), "native")
            checks.equal("weights", where, name, ours, oracle.weights[name], "the formula")
            continue
        for mine, others, formula in zip(planned.state(name, rules), native.state(name, rules), oracle.sums[name], strict=True):
            checks.equal("optimizer sums", where, name, mine, others, "native")
            checks.equal("optimizer sums", where, name, mine, formula.float(), "the formula")
        update = (theirs.detach().double() - before[name]).abs()
        checks.close("weights", where, name, ours, theirs.detach(), torch.maximum(before[name].abs(), update))
