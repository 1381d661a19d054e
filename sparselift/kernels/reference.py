"""The reference backend: fused bags in plain torch, as close to the definitions as speed for tests allows.

It is the oracle of every other backend. Sums run in order, one float32 rounding a step, so its bits are those that the
CPU kernels promise. Letters in shapes are those of `base`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import checks
from .base import BagProgram, FeatureSpec, IndexBatch, KernelBackend, KernelShape, Segment, State, TableSpec, UpdateRule
from .noise import chance, round_by_chance


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c with a single float32 rounding.

    The product of two float32 is exact in float64. The sum is rounded to odd there, which makes the second rounding,
    to float32, the only one that counts (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    toward = torch.nextafter(total, torch.copysign(torch.full_like(error, torch.inf), error))
    even = total.view(torch.int64) & 1 == 0
    return torch.where((error != 0) & error.isfinite() & even, toward, total).float()


@dataclass(frozen=True, slots=True)
class _Lookups:
    """The ids of one feature of one batch."""

    ids: Tensor                    # (K,) int64
    offsets: Tensor                # (B + 1,) int64
    weights: Tensor | None         # (K,) float32

    @property
    def bags(self) -> Tensor:
        """(K,) the bag of every lookup."""
        return torch.repeat_interleave(torch.arange(len(self.offsets) - 1), self.offsets.diff())


class ReferenceBatch(IndexBatch):
    """Copies of the ids, feature by feature."""

    def __init__(self, program: ReferenceProgram, lookups: Sequence[_Lookups]) -> None:
        self.program = program
        self.lookups = tuple(lookups)
        self.num_bags = tuple(len(look.offsets) - 1 for look in lookups)
        self.num_lookups = tuple(len(look.ids) for look in lookups)
        self._maxima: dict[int, Tensor] = {}

    def indices(self, feature: int) -> Tensor:
        return self.lookups[feature].ids.clone()

    def offsets(self, feature: int) -> Tensor:
        return self.lookups[feature].offsets.clone()

    def maxima(self, feature: int) -> Tensor:
        spec = self.program.features[feature]
        checks.check_max(spec)
        nowhere = torch.full((self.num_bags[feature], self.program.tables[spec.table].dim), -1)
        return self._maxima.get(feature, nowhere).clone()

    def note_maxima(self, feature: int, positions: Tensor) -> None:
        self._maxima[feature] = positions

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for look in self.lookups for part in (look.ids, look.offsets, look.weights) if part is not None)


class ReferenceProgram(BagProgram):
    """Fused bags over tables in plain torch. Any number of threads may use one program: it keeps nothing between calls."""

    def __init__(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> None:
        self.tables, self.features = tuple(tables), tuple(features)

    def prepare(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
                weights: Sequence[Tensor | None] | None = None) -> ReferenceBatch:
        weights = [None] * len(self.features) if weights is None else weights
        for what, given in (("indices", indices), ("offsets", offsets), ("weights", weights)):
            checks.check_count(what, "feature", len(given), len(self.features))
        return ReferenceBatch(self, [self._prepare_feature(spec, ids, starts, factors)
                                     for spec, ids, starts, factors in zip(self.features, indices, offsets, weights)])

    def _prepare_feature(self, spec: FeatureSpec, indices: Tensor, offsets: Tensor | int, weights: Tensor | None) -> _Lookups:
        checks.check_vector(spec.name, "indices", indices, checks.INDEX_DTYPES)
        checks.check_lookup_count(f"feature {spec.name!r}", len(indices))
        checks.check_weights(spec, weights, len(indices))
        bounds = _bag_bounds(spec, len(indices), offsets)
        table = self.tables[spec.table]
        wrong = ((indices < 0) | (indices >= table.rows)).nonzero()
        if len(wrong):
            raise checks.id_error(spec, table, int(wrong[0]), int(indices[wrong[0]]))
        return _Lookups(indices.detach().to(torch.int64, copy=True), bounds, None if weights is None else weights.detach().clone())

    def forward(self, tables: Sequence[Tensor], batch: IndexBatch, out: Tensor | Sequence[Tensor]) -> None:
        checks.check_tables(self, tables)
        lookups = self._lookups(batch)
        with torch.no_grad():
            for feature, (spec, look, output) in enumerate(zip(self.features, lookups, checks.feature_outputs(self, batch, out))):
                if spec.pooling == "max":
                    pooled, positions = _pool_max(spec, tables[spec.table], look)
                    batch.note_maxima(feature, positions)  # type: ignore[attr-defined]
                else:
                    pooled = _pool(spec, tables[spec.table], look)
                output.copy_(pooled)

    def weight_grad(self, tables: Sequence[Tensor], batch: IndexBatch, feature: int, grad: Tensor) -> Tensor:
        checks.check_tables(self, tables)
        spec, look = self.features[feature], self._lookups(batch)[feature]
        checks.check_rows(f"gradient of feature {spec.name!r}", grad, (batch.num_bags[feature], self.tables[spec.table].dim))
        with torch.no_grad():
            products = (grad[look.bags].double() * tables[spec.table][look.ids].double()).sum(1).float()
            return products if spec.padding_idx is None else products.masked_fill_(look.ids == spec.padding_idx, 0)

    def update(self, tables: Sequence[Tensor | None], states: Sequence[State],
               rules: Sequence[UpdateRule | None], segments: Sequence[Segment]) -> None:
        checks.check_rules(self, states, rules)
        checks.check_tables(self, tables, rules)
        with torch.no_grad():
            for position, rule in enumerate(rules):
                table = tables[position]
                if rule is None or table is None:
                    continue
                ids, grads = self.expanded_grad(position, segments)
                if self.tables[position].knobs.coalesce == "none":
                    _apply_one_by_one(table, rule, ids, grads)
                else:
                    _apply(table, states[position], rule, *_coalesce(ids, grads))

    def coalesced_grad(self, table: int, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        return _coalesce(*self.expanded_grad(table, segments))

    def expanded_grad(self, table: int, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        ids, grads = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, self.tables[table].dim, dtype=torch.float32)]
        for segment in segments:
            lookups = self._lookups(segment.batch)
            for feature, (spec, look, grad) in enumerate(zip(self.features, lookups, checks.feature_grads(self, segment))):
                if spec.table != table or grad is None:
                    continue
                part_ids, part = _lookup_grads(spec, look, grad, segment.batch.maxima(feature) if spec.pooling == "max" else None)
                if segment.scales is not None:
                    part = part * torch.tensor(segment.scales[table], dtype=torch.float32)
                ids.append(part_ids)
                grads.append(part)
        return torch.cat(ids), torch.cat(grads)

    def _lookups(self, batch: IndexBatch) -> tuple[_Lookups, ...]:
        if not isinstance(batch, ReferenceBatch) or batch.program is not self:
            raise ValueError("the batch was not prepared by this program")
        return batch.lookups


class ReferenceBackend(KernelBackend):
    """Plain torch. Slow and right."""

    name = "reference"

    def compile(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], shape: KernelShape | None = None) -> ReferenceProgram:
        checks.check_specs(tables, features)
        return ReferenceProgram(tables, features)

    def variant(self) -> str:
        return "reference"


def _bag_bounds(spec: FeatureSpec, count: int, offsets: Tensor | int) -> Tensor:
    """(B + 1,) int64 bag boundaries, 0 first and `count` last."""
    if isinstance(offsets, int):
        checks.check_bag_length(spec, offsets, count)
        return torch.arange(0, count + 1, offsets)
    checks.check_vector(spec.name, "offsets", offsets, checks.INDEX_DTYPES)
    checks.check_offset_count(spec, len(offsets), count)
    bounds = offsets.detach().to(torch.int64, copy=True)
    if not spec.include_last_offset:
        bounds = torch.cat([bounds, torch.tensor([count])])
    checks.check_bounds(spec, bounds, count)
    return bounds


def _counts(spec: FeatureSpec, look: _Lookups) -> Tensor:
    """(B,) float32 ids that count in each bag, at least 1."""
    kept = torch.ones(len(look.ids), dtype=torch.float32) if spec.padding_idx is None else (look.ids != spec.padding_idx).float()
    return torch.zeros(len(look.offsets) - 1, dtype=torch.float32).index_add_(0, look.bags, kept).clamp_(min=1)


def _steps(spec: FeatureSpec, look: _Lookups) -> Iterator[tuple[Tensor, Tensor]]:
    """Step j: the bags that have a j-th id which counts, and its position among the ids."""
    starts, lengths = look.offsets[:-1], look.offsets.diff()
    for step in range(int(lengths.max()) if len(lengths) else 0):
        bags = (lengths > step).nonzero()[:, 0]
        lookups = starts[bags] + step
        if spec.padding_idx is not None:
            kept = look.ids[lookups] != spec.padding_idx
            bags, lookups = bags[kept], lookups[kept]
        yield bags, lookups


def _pool(spec: FeatureSpec, table: Tensor, look: _Lookups) -> Tensor:
    """(B, D) pooled rows. Step j adds the j-th id of every bag that is long enough."""
    if spec.pooling == "none":
        return table[look.ids].float()
    pooled = torch.zeros(len(look.offsets) - 1, table.shape[1], dtype=torch.float32)
    for bags, lookups in _steps(spec, look):
        rows = table[look.ids[lookups]].float()
        if look.weights is None:
            pooled[bags] += rows
        elif spec.padding_idx is None:
            pooled[bags] = fma(look.weights[lookups, None], rows, pooled[bags])
        else:
            pooled[bags] += look.weights[lookups, None] * rows
    return pooled / _counts(spec, look)[:, None] if spec.pooling == "mean" else pooled


def _pool_max(spec: FeatureSpec, table: Tensor, look: _Lookups) -> tuple[Tensor, Tensor]:
    """(B, D) maxima and the positions among the ids that they came from, -1 where no id counts."""
    pooled = torch.zeros(len(look.offsets) - 1, table.shape[1], dtype=torch.float32)
    positions = torch.full(pooled.shape, -1)
    for bags, lookups in _steps(spec, look):
        rows = table[look.ids[lookups]].float()
        better = (positions[bags] < 0) | (rows > pooled[bags])
        pooled[bags] = torch.where(better, rows, pooled[bags])
        positions[bags] = torch.where(better, lookups[:, None], positions[bags])
    return pooled, positions


def _lookup_grads(spec: FeatureSpec, look: _Lookups, grad: Tensor, maxima: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and (K, D) gradients of the lookups of one feature, padding left out."""
    ids, bags, weights, positions = look.ids, look.bags, look.weights, torch.arange(len(look.ids))
    if spec.padding_idx is not None:
        kept = ids != spec.padding_idx
        ids, bags, weights, positions = ids[kept], bags[kept], None if weights is None else weights[kept], positions[kept]
    part = grad.detach()[bags]
    if maxima is not None:
        part = torch.where(maxima[bags] == positions[:, None], part, 0.0)
    if spec.pooling == "mean":
        part = part * (1 / _counts(spec, look))[bags, None]
    return ids.clone(), part if weights is None else part * weights[:, None]


def _rounds(ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(lookups, their rows' positions among the distinct rows): first the first use of every row, then the second use ..."""
    order = torch.argsort(ids, stable=True)
    _, counts = torch.unique_consecutive(ids[order], return_counts=True)
    starts = counts.cumsum(0) - counts
    for step in range(int(counts.max()) if len(counts) else 0):
        rows = (counts > step).nonzero()[:, 0]
        yield order[starts[rows] + step], rows


def _coalesce(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.unique(ids)
    sums = torch.zeros(len(rows), grads.shape[1], dtype=torch.float32)
    for lookups, positions in _rounds(ids):
        sums[positions] += grads[lookups]
    return rows, sums


def _apply_one_by_one(table: Tensor, rule: UpdateRule, ids: Tensor, grads: Tensor) -> None:
    rate = torch.tensor(rule.lr if rule.maximize else -rule.lr, dtype=torch.float32)
    for lookups, _ in _rounds(ids):
        rows = ids[lookups]
        table[rows] = fma(rate, grads[lookups], table[rows])


def _sqrt(values: Tensor) -> Tensor:
    """The nearest float32. torch's comes from a vector library that may be one off."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def _apply(table: Tensor, state: State, rule: UpdateRule, rows: Tensor, grads: Tensor) -> None:
    """One step of the rule on `rows`, rounded once to the weights' dtype."""
    values = _stepped(table[rows].float(), state, rule, rows, grads)
    if rule.noise_key is not None:
        values = round_by_chance(values, chance(rule.noise_key, rows, values.shape[1]), table.dtype)
    table[rows] = values.to(table.dtype)


def _stepped(weights: Tensor, state: State, rule: UpdateRule, rows: Tensor, grads: Tensor) -> Tensor:
    """The weights of `rows` after one step of the rule, with the roundings of torch's own optimizers. Updates the state."""
    grads = -grads if rule.maximize else grads
    if rule.weight_decay:
        grads = grads + torch.tensor(rule.weight_decay, dtype=torch.float32) * weights
    rate = torch.tensor(-rule.lr, dtype=torch.float32)
    if rule.kind == "sgd":
        return fma(rate, grads, weights)
    eps = torch.tensor(rule.eps, dtype=torch.float32)
    if rule.kind == "adam":
        assert isinstance(state, tuple)
        for moment, target, beta in zip(state, (grads, grads * grads), rule.betas):
            moment[rows] += (target - moment[rows]) * torch.tensor(1 - beta, dtype=torch.float32)
        first, second = (moment[rows] for moment in state)
        return weights + rate * (first / (_sqrt(second) + eps))
    assert isinstance(state, Tensor)
    if rule.kind == "adagrad":
        state[rows] += grads * grads
        return fma(rate, grads / (_sqrt(state[rows]) + eps), weights)
    state[rows] += grads.square().sum(1) / grads.shape[1]
    return weights + grads * (rate / (_sqrt(state[rows]) + eps))[:, None]
