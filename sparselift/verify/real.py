"""The part of the certificate on real values: one real step, native and planned, against the formulas in float64 with a derived bound.

The whole model runs, dense part included. What torch's own step saw is recorded (ids, outputs, the gradients that arrived at them); from
it float64 computes what every touched row must become, and rounding theory how far the table's dtype may be from that.
Letters: B bags, K ids, U touched rows, D columns. u is half a unit in the last place: 2**-24 in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.apply import Applied
from sparselift.batches import IndexAhead
from sparselift.errors import EquivalenceError
from sparselift.ir import Feature, Structure, Table
from sparselift.kernels.base import KernelBackend, UpdateRule, state_shapes
from sparselift.optim import fused_rule, state_parts, update_rule
from sparselift.preserve import preserve
from sparselift.schedule import Schedule
from sparselift.verify.dense import check_gradients
from sparselift.verify.linears import check_linears_real
from sparselift.verify.maxima import first_maxima
from sparselift.verify.products import check_products_real
from sparselift.workload import Workload

U = 2.0 ** -24
CLOSE = 1e-3                       # of the largest value, where no bound can be derived


@dataclass(slots=True)
class _Lookup:
    """One recorded call of an embedding module."""

    ids: Tensor                    # (K,)
    bag_of: Tensor                 # (K,)
    factors: Tensor                # (K,) float64
    output: Tensor                 # (B, D); (K, D) without pooling
    grad: Tensor | None = None     # what arrived at the output


@dataclass(slots=True)
class _Step:
    """What one real step did."""

    loss: Tensor
    lookups: dict[str, _Lookup]
    before: dict[str, Tensor] = field(default_factory=dict)       # by table: the touched rows (U, D)
    after: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)  # what the rule keeps of these rows, before the step
    dense: dict[str, Tensor] = field(default_factory=dict)        # other parameters after the step


def check_real(structure: Structure, schedule: Schedule, equivalence: str, work: Workload, batch: Any,
               backend: str | KernelBackend) -> dict[str, float]:
    """Compare one real step. Returns the share of its bound that the worst value used, by kind; 0.0 means equal bits.

    Lookups and updates are held to float64 in a step whose dense part is torch's, so that its recorded gradients are those of both.
    What a plan changes in the dense part is held to float64 by itself, and its gradients of a whole step to native's.
    Raises EquivalenceError with the first value outside its bound; for a bitwise plan, with the first differing bit.
    """
    native, rows, rules = _run(structure, work, batch, None)
    planned, _, _ = _run(structure, work, batch, Applied(structure, schedule.without_dense(), work.model, backend))
    worst = {"outputs": 0.0, "updates": 0.0}
    for feature in structure.features:
        if feature.name in native.lookups:
            worst["outputs"] = max(worst["outputs"], _check_output(feature, native, planned, rows))
    worst |= check_products_real(structure, schedule, backend, {name: lookup.output for name, lookup in native.lookups.items()})
    worst |= check_linears_real(structure, schedule, work, batch)
    if schedule.changes_dense:
        worst |= check_gradients(structure, schedule, work, batch, backend)
    # With equal outputs the dense part sees the same numbers, so that its own parameters move alike. The gradients that arrive at lookups
    # are torch's either way.
    one_backward, same_outputs = work.train_step is None, worst["outputs"] == 0.0
    halves = any(weight.dtype != torch.float32 for weight in native.after.values())
    for table in structure.tables:
        if equivalence == "bitwise":
            _require_equal(f"rows of {table.name} after the step", planned.after[table.name], native.after[table.name])
        elif one_backward and table.name in rules:
            fused = schedule.tables is not None and schedule.tables[table.name].update == "fused"
            worst["updates"] = max(worst["updates"], _check_update(structure, table, rules[table.name], planned, rows[table.name], fused))
        else:
            _require_close(f"rows of {table.name} after the step", planned.after[table.name], native.after[table.name],
                           native.before[table.name] if halves else None)
    for name, value in native.dense.items():
        if equivalence == "bitwise" or (one_backward and same_outputs):
            _require_equal(f"parameter {name} after the step", planned.dense[name], value)
        else:
            _require_close(f"parameter {name} after the step", planned.dense[name], value,
                           work.model.get_parameter(name) if halves else None)
    return worst


def _run(structure: Structure, work: Workload, batch: Any,
         applied: Applied | None) -> tuple[_Step, dict[str, Tensor], dict[str, UpdateRule]]:
    model, optimizers = work.model, work.optimizers
    with preserve(work, [batch]) as kept:
        rows = {table.name: kept.touched_rows.get(table.name, torch.arange(table.rows)) for table in structure.tables}
        weights = {name: model.get_parameter(name) for name in rows}
        before = {name: weight.detach()[rows[name]] for name, weight in weights.items()}
        rules, sums = _rules(structure, weights, rows, optimizers)
        if applied is not None:
            applied.attach(model, optimizers)
        try:
            with _Recorder(structure, model) as recorder:
                ahead = IndexAhead(model, work.inputs)
                if ahead.depth:
                    ahead.prepare(batch)
                loss = work.train(model, work.optimizer, batch)
            after = {name: weight.detach()[rows[name]] for name, weight in weights.items()}
            dense = {name: p.detach().clone() for name, p in model.named_parameters() if name not in rows}
        finally:
            if applied is not None:
                applied.detach(model)
    return _Step(loss, recorder.lookups, before, after, sums, dense), rows, rules


def _rules(structure: Structure, weights: Mapping[str, Tensor], rows: Mapping[str, Tensor],
           optimizers: Sequence[torch.optim.Optimizer]) -> tuple[dict[str, UpdateRule], dict[str, tuple[Tensor, ...]]]:
    rules, sums = {}, {}
    for table in structure.tables:
        if table.optimizer is None:
            continue
        optimizer, weight = optimizers[table.optimizer.index], weights[table.name]
        group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
        kind, _ = fused_rule(optimizer, group, table.sparse)          # whose formula it is, even where torch computes it
        if kind is not None:
            state = optimizer.state.get(weight, {}) if kind != "sgd" else {}
            rules[table.name] = update_rule(kind, group, state)
            shapes = state_shapes(kind, len(rows[table.name]), table.dim)
            kept = [part[rows[table.name]].double() for part in state_parts(kind, state)]
            sums[table.name] = tuple(kept or [torch.zeros(shape, dtype=torch.float64) for shape in shapes])
    return rules, sums


class _Recorder:
    """Forward hooks that note every call of a lifted module."""

    def __init__(self, structure: Structure, model: nn.Module) -> None:
        self.lookups: dict[str, _Lookup] = {}
        self._features = {(f.module, f.call): f for f in structure.features}
        self._modules = {f.module: model.get_submodule(f.module) for f in structure.features}
        self._calls: Counter[str] = Counter()
        self._hooks: list[Any] = []

    def __enter__(self) -> _Recorder:
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_hook(lambda m, a, k, out, name=name: self._note(name, a, k, out), with_kwargs=True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, module: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        feature = self._features.get((module, self._calls[module]))
        self._calls[module] += 1
        if feature is None:
            return
        given = dict(zip(("input", "offsets", "per_sample_weights"), args), **kwargs)
        ids = given["input"].detach().reshape(-1).long().clone()
        factors = given.get("per_sample_weights")
        lookup = _Lookup(ids, _bags(feature, given["input"], given.get("offsets")),
                         torch.ones(len(ids), dtype=torch.float64) if factors is None else factors.detach().reshape(-1).double(),
                         output.detach().reshape(-1, output.shape[-1]).clone())
        self.lookups[feature.name] = lookup
        if output.requires_grad:
            output.register_hook(lambda grad: setattr(lookup, "grad", grad.detach().reshape(lookup.output.shape).double()))


def _bags(feature: Feature, ids: Tensor, offsets: Tensor | None) -> Tensor:
    if feature.form == "ids":
        return torch.arange(ids.numel())
    if offsets is None:
        return torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1])
    starts = (offsets[:-1] if feature.include_last_offset else offsets).long()
    return torch.searchsorted(starts, torch.arange(len(ids)), right=True) - 1


def _counts(feature: Feature, lookup: _Lookup) -> tuple[Tensor, Tensor]:
    """(K,) whether each id counts, and (B,) how many do in a bag, at least 1."""
    keep = torch.ones_like(lookup.ids, dtype=torch.bool) if feature.padding_idx is None else lookup.ids != feature.padding_idx
    return keep, torch.bincount(lookup.bag_of[keep], minlength=len(lookup.output)).double().clamp(min=1)


def _check_output(feature: Feature, native: _Step, planned: _Step, rows: Mapping[str, Tensor]) -> float:
    """An L-term float32 sum of rounded products is within (L + 2) u of the sum of absolute terms; a half's is rounded once more."""
    if feature.name not in planned.lookups:
        raise EquivalenceError(f"lookup {feature.name} ran natively and not when planned")
    lookup, got = native.lookups[feature.name], planned.lookups[feature.name].output
    keep, count = _counts(feature, lookup)
    if feature.pooling == "none":
        keep = torch.ones_like(keep)
    place = torch.searchsorted(rows[feature.table], lookup.ids)
    terms = (native.before[feature.table].double()[place] * lookup.factors[:, None])[keep]
    if feature.pooling == "max":
        want, _ = first_maxima(native.before[feature.table].double()[place], lookup.bag_of, keep, len(lookup.output))
        return _share(f"output of {feature.name}", got, want, torch.zeros_like(want))
    share = 1 / count[:, None] if feature.pooling == "mean" else torch.ones(1, 1, dtype=torch.float64)
    zeros = torch.zeros(lookup.output.shape, dtype=torch.float64)
    want = zeros.index_add(0, lookup.bag_of[keep], terms) * share
    bound = zeros.index_add(0, lookup.bag_of[keep], terms.abs()) * share * (count[:, None] + 2) * U
    share_used = _share(f"output of {feature.name}", got, want, bound + _rounding(got.dtype, want.abs() + bound))
    return 0.0 if torch.equal(got, lookup.output) else max(share_used, 1e-9)


def _rounding(dtype: torch.dtype, size: Tensor) -> Tensor | float:
    """What rounding a float32 number of this size to a half may change; 0.0 for float32. Twice u where it is rounded by chance."""
    limits = torch.finfo(dtype)
    return 0.0 if dtype == torch.float32 else limits.eps / 2 * (size + limits.smallest_normal)


def _check_update(structure: Structure, table: Table, rule: UpdateRule, step: _Step, rows: Tensor, fused: bool) -> float:
    """Hold the rows of a planned step to the formulas, from the gradients that arrived in it. Fused, a half is rounded once, at the end;
    torch rounds every gradient, and every sum.
    """
    name, dtype = table.name, step.before[table.name].dtype
    u, floor = (U, 0.0) if fused else (torch.finfo(dtype).eps / 2, float(_rounding(dtype, torch.zeros(()))))
    before = step.before[name].double()
    grad, absolute = torch.zeros_like(before), torch.zeros_like(before)
    terms = torch.zeros(len(before), 1, dtype=torch.float64)
    for feature in structure.features_of(name):
        lookup = step.lookups.get(feature.name)
        if lookup is None or lookup.grad is None:
            continue
        keep, count = _counts(feature, lookup)
        place = torch.searchsorted(rows, lookup.ids[keep])
        each = lookup.grad[lookup.bag_of[keep]] * lookup.factors[keep, None]
        each = each / count[lookup.bag_of[keep], None] if feature.pooling == "mean" else each
        if feature.pooling == "max":
            from_it = first_maxima(before[torch.searchsorted(rows, lookup.ids)], lookup.bag_of, keep, len(lookup.output))[1]
            each = torch.where(from_it[keep], each, 0.0)
        grad.index_add_(0, place, each)
        absolute.index_add_(0, place, each.abs())
        terms.index_add_(0, place, torch.ones(len(place), 1, dtype=torch.float64))
    touched = terms > 0
    grad = -grad if rule.maximize else grad
    grad = torch.where(touched, grad + rule.weight_decay * before, 0.0)
    error = (terms + 4) * u * (absolute + rule.weight_decay * before.abs())   # of a row's summed gradient
    if rule.kind == "sgd":
        update, slack = rule.lr * grad, rule.lr * error + terms * u * (before.abs() + rule.lr * absolute)
    elif rule.kind == "adam":
        update, slack = _adam(rule, grad, error, step.sums[name], u, floor)
    else:
        update, slack = _adagrad(rule, grad, error, step.sums[name][0], u, floor)
    want = torch.where(touched, before - update, before)
    bound = slack + 8 * u * update.abs() + 2 * u * torch.maximum(before.abs(), want.abs())
    bound = bound + 2 * _rounding(dtype, want.abs() + bound) + terms * floor
    return _share(f"rows of {name} after the step", step.after[name], want, torch.where(touched, bound, 0.0))


def _adagrad(rule: UpdateRule, grad: Tensor, error: Tensor, sums: Tensor, u: float, floor: float) -> tuple[Tensor, Tensor]:
    """The update, and how far an error of the gradient moves it: once directly, once through the root of the sum of squares. `floor`: what
    rounding a number near 0 may change; of a half, that is much of a small sum.
    """
    if rule.kind == "adagrad":
        total, spread = sums + grad.square(), error
    else:
        total = (sums + grad.square().mean(1))[:, None]
        spread = error.amax(1, keepdim=True) * grad.shape[1] ** 0.5
    tiny = torch.finfo(torch.float32).tiny
    least = (total - 2 * u * total - 2 * floor).clamp(min=0).sqrt()
    scale, steepest = (rule.lr / (root + rule.eps).clamp(min=tiny) for root in (total.sqrt(), least))
    return torch.where(grad == 0, 0.0, scale * grad), 2 * scale * (error + spread) + (steepest - scale) * grad.abs()


def _adam(rule: UpdateRule, grad: Tensor, error: Tensor, moments: tuple[Tensor, ...], u: float, floor: float) -> tuple[Tensor, Tensor]:
    """The update, and how far errors of the gradient and roundings of both moments move it; `floor` as for Adagrad."""
    (first, second), (gain1, gain2) = moments, (1 - beta for beta in rule.betas)
    mean, square = first + gain1 * (grad - first), second + gain2 * (grad.square() - second)
    mean_error = gain1 * error + 3 * u * (first.abs() + grad.abs()) + 2 * floor
    square_error = gain2 * (2 * grad.abs() * error + error.square()) + 3 * u * (second + grad.square()) + 2 * floor
    least = (square - square_error).clamp(min=0).sqrt()         # a root is steepest below
    tiny = torch.finfo(torch.float32).tiny
    root, low = (square.sqrt() + rule.eps).clamp(min=tiny), (least + rule.eps).clamp(min=tiny)
    return rule.lr * mean / root, rule.lr * (mean_error + mean.abs() * (square.sqrt() - least) / root) / low


def _share(what: str, got: Tensor, want: Tensor, bound: Tensor) -> float:
    """The largest share of its bound that a value uses. Raises EquivalenceError above 1."""
    difference = (got.double() - want).abs()
    # A bound below the smallest normal number cannot be held to: float32 underflows there.
    share = difference / (bound + torch.finfo(torch.float32).tiny)
    if not share.numel():
        return 0.0
    worst = float(share.nan_to_num(nan=float("inf")).max())
    if worst > 1:
        place = tuple(int(i) for i in torch.unravel_index(share.nan_to_num(nan=float("inf")).argmax(), share.shape))
        raise EquivalenceError(f"{what}: at {list(place)} planned has {got[place].item():.9g}, float64 {want[place].item():.9g}: "
                               f"{worst:.3g} times the rounding bound")
    return worst


def _require_equal(what: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        difference = (got.double() - want.double()).abs()
        count = int((difference > 0).sum())
        raise EquivalenceError(f"{what}: {count} of {want.numel()} values differ from native's bits, by up to {difference.max():.3g}")


def _require_close(what: str, got: Tensor, want: Tensor, before: Tensor | None) -> None:
    """Where no bound can be derived (the dense part saw other roundings, or the loop clips): equal to `CLOSE` of the largest value.

    Behind lookups of halves a gradient may have another sign, of which some optimizers make a whole step. Given the values `before` it,
    there may be two of native's steps between them, and a spacing of their dtype.
    """
    limit = CLOSE * float(want.abs().max()) if want.numel() else 0.0
    if before is not None and want.numel():
        limit += float(2 * (want - before.detach()).abs().max() + torch.finfo(want.dtype).eps * want.abs().max())
    difference = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    if not difference <= limit:
        raise EquivalenceError(f"{what}: differs from native by {difference:.3g}; at most {limit:.3g} is rounding")
