"""Batches of small integers on which every sum of a step is exact in the table's dtype, in any order; and the formulas in float64.

Letters: B bags, K ids, D columns, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparselift.dtypes import torch_dtype
from sparselift.ir import Feature, Structure
from sparselift.kernels.base import state_shapes
from sparselift.stats import Sketch
from sparselift.verify.maxima import first_maxima
from sparselift.verify.twin import LR, Rule, TwinBatch

MAX_BAGS, MAX_LENGTH, MAX_MEAN_LENGTH = 96, 48, 8
MAX_FACTOR = 2
MIN_DENSITY = 1 / 64


@dataclass(frozen=True, slots=True)
class _Scale:
    """What a dtype has room for: every integer up to `exact`. The largest weight and gradient that are drawn."""

    exact: float
    weight: int
    grad: int


SCALES = {"float32": _Scale(2.0 ** 24, 3, 2), "float16": _Scale(2.0 ** 11, 3, 2), "bfloat16": _Scale(2.0 ** 8, 1, 1)}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch, the gradients that are to arrive at each feature, and the bags spelled out."""

    batch: TwinBatch
    grads: dict[str, Tensor]       # by feature: (B, D) integers; (K, D) without pooling
    bag_of: tuple[Tensor, ...]     # a feature: (K,) the bag of each id


def draw_weights(structure: Structure, generator: torch.Generator, density: float = 1.0) -> dict[str, Tensor]:
    """(R, D) small integers, a table. `density`: share that is drawn; the rest is 0."""
    return {t.name: _integers((t.rows, t.dim), SCALES[t.dtype].weight, generator, t.dtype, density) for t in structure.tables}


def draw(structure: Structure, sketches: Mapping[str, Sketch], bags: int, generator: torch.Generator, density: float = 1.0) -> Drawn:
    """One batch that follows the sketches: bag lengths, empty bags, duplicates, padding; the last row of each table is always named."""
    indices, offsets, weights, bag_of, grads = [], [], [], [], {}
    for feature in structure.features:
        table = structure.table(feature.table)
        lengths, padded = _lengths(feature, sketches.get(feature.name, Sketch.empty()), bags, generator)
        owner = torch.arange(bags).repeat_interleave(lengths)
        ids = _ids(feature, table.rows, owner, padded, sketches.get(feature.name, Sketch.empty()), generator)
        ids = ids.to(torch.int32 if feature.index_dtype == "int32" else torch.int64)
        ends = lengths.cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends]) if feature.include_last_offset else ends - lengths
        factors = _factors(len(ids), generator).to(torch_dtype(table.dtype)) if feature.weighted else None
        if feature.form == "matrix":
            ids, factors = ids.view(bags, -1), None if factors is None else factors.view(bags, -1)
        indices.append(ids)
        offsets.append(starts.to(ids.dtype) if feature.form == "offsets" else None)
        weights.append(factors)
        bag_of.append(owner)
        grads[feature.name] = _integers((bags, table.dim), SCALES[table.dtype].grad, generator, table.dtype, density)
    foreign = tuple(tuple(_integers((bags, part), SCALES[concat.dtype].weight, generator, concat.dtype)
                          for part in concat.parts if isinstance(part, int)) for concat in structure.concats)
    return Drawn(TwinBatch(tuple(indices), tuple(offsets), tuple(weights), foreign), grads, tuple(bag_of))


def _integers(shape: tuple[int, ...], largest: int, generator: torch.Generator, dtype: str, density: float = 1.0) -> Tensor:
    found = torch.randint(-largest, largest + 1, shape, generator=generator)
    if density < 1.0:
        found *= torch.rand(shape, generator=generator) < density
    return found.to(torch_dtype(dtype))


def _factors(count: int, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return (signs * torch.randint(1, MAX_FACTOR + 1, (count,), generator=generator)).float()


def _lengths(feature: Feature, sketch: Sketch, bags: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(B,) ids a bag, and how many of them are padding. Counted ids of a mean are powers of two."""
    if feature.form == "ids":
        return torch.ones(bags, dtype=torch.int64), torch.zeros(bags, dtype=torch.int64)
    if feature.form == "matrix":
        length = min(max(sketch.max_length, 1), MAX_LENGTH)
        if feature.pooling == "mean":
            length = min(1 << (length.bit_length() - 1), MAX_MEAN_LENGTH)
        return torch.full((bags,), length), torch.zeros(bags, dtype=torch.int64)
    shares = torch.rand(bags, generator=generator)
    lengths = torch.tensor([min(sketch.length_quantile(float(s)), MAX_LENGTH) if sketch.bags else 1 for s in shares])
    if feature.pooling == "mean":
        lengths = torch.tensor([min(1 << (n.bit_length() - 1), MAX_MEAN_LENGTH) if n else 0 for n in lengths.tolist()])
    if bags > 2:
        lengths[1], lengths[bags - 1] = 0, max(1, int(lengths[bags - 1]))  # an empty bag inside; the last bag names the last row
    padded = torch.zeros(bags, dtype=torch.int64)
    if feature.padding_idx is not None:
        padded = torch.randint(0, 3, (bags,), generator=generator)
    return lengths + padded, padded


def _ids(feature: Feature, rows: int, owner: Tensor, padded: Tensor, sketch: Sketch, generator: torch.Generator) -> Tensor:
    """(K,) rows: a few hot ones, the rest from so many distinct ones as the sketch has; padding first in its bag."""
    count = len(owner)
    choices = torch.randperm(rows, generator=generator)
    choices = choices[choices != feature.padding_idx] if feature.padding_idx is not None else choices
    if not len(choices):
        return torch.zeros(count, dtype=torch.int64)
    distinct = min(len(choices), max(2, round(count * (1 - sketch.duplicate_ratio))))
    hot = torch.rand(count, generator=generator) < 0.2
    place = torch.where(hot, torch.randint(0, min(4, distinct), (count,), generator=generator),
                        torch.randint(0, distinct, (count,), generator=generator))
    ids = choices[place]
    if count and feature.padding_idx != rows - 1:
        ids[count - 1] = rows - 1
    if feature.padding_idx is not None:
        position = torch.arange(count) - torch.searchsorted(owner, owner)  # within the bag
        ids[position < padded[owner]] = feature.padding_idx
        if feature.form == "ids" or (feature.form == "matrix" and feature.pooling != "mean"):
            ids[torch.rand(count, generator=generator) < 0.1] = feature.padding_idx
    return ids


@dataclass(slots=True)
class Oracle:
    """The step by its formulas, in float64. `largest`: of all sums of absolute terms in units of their smallest part, the largest share
    of what the dtype holds exactly; below 1 every sum is exact in any order.
    """

    structure: Structure
    rules: Mapping[str, Rule]
    weights: dict[str, Tensor]     # (R, D) float64
    sums: dict[str, tuple[Tensor, ...]]  # what the rule keeps, Adagrad's sums or Adam's moments, float64
    grads: dict[str, Tensor]       # accumulated, (R, D) float64
    absolute: dict[str, Tensor]    # the same with absolute terms
    named: dict[str, Tensor]       # (R,) rows that ids name, whatever their gradient
    largest: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)   # of the tables that Adam updates

    @classmethod
    def start(cls, structure: Structure, rules: Mapping[str, Rule], weights: Mapping[str, Tensor]) -> Oracle:
        doubles = {name: weight.double() for name, weight in weights.items()}
        sums = {name: tuple(torch.full(shape, rule.options.get("initial_accumulator_value", 0.0), dtype=torch.float64)
                            for shape in state_shapes(rule.formula, *doubles[name].shape)) for name, rule in rules.items()}
        zeros = {name: torch.zeros_like(weight) for name, weight in doubles.items()}
        named = {name: torch.zeros(len(weight), dtype=torch.bool) for name, weight in doubles.items()}
        return cls(structure, rules, doubles, sums, zeros, {name: zero.clone() for name, zero in zeros.items()}, named)

    def lookup(self, drawn: Drawn) -> dict[str, Tensor]:
        """(B, D) pooled rows a feature; (K, D) without pooling."""
        found = {}
        for place, feature in enumerate(self.structure.features):
            ids, keep, factor, count = _spelled(feature, drawn, place)
            weight = self.weights[feature.table]
            rows = weight[ids] * factor[:, None]
            bag = drawn.bag_of[place]
            if feature.pooling == "none":
                found[feature.name] = weight[ids]
                continue
            if feature.pooling == "max":
                found[feature.name] = first_maxima(rows, bag, keep, len(count))[0]
                continue
            total = weight.new_zeros(len(count), weight.shape[1])
            found[feature.name] = total.index_add(0, bag[keep], rows[keep]) / (count[:, None] if feature.pooling == "mean" else 1)
            self._note(total.index_add(0, bag[keep], rows[keep].abs()), self._unit(feature.table), feature.table)
        return found

    def backward(self, drawn: Drawn) -> dict[str, Tensor]:
        """Accumulate into `grads`. Returns the gradients (K,) of the per-sample weights."""
        found = {}
        for place, feature in enumerate(self.structure.features):
            ids, keep, factor, count = _spelled(feature, drawn, place)
            bag = drawn.bag_of[place]
            arrived = drawn.grads[feature.name].double()[bag]
            grad = arrived * factor[:, None] / (count[bag, None] if feature.pooling == "mean" else 1)
            if feature.pooling == "max":
                grad = torch.where(first_maxima(self.weights[feature.table][ids], bag, keep, len(count))[1], grad, 0.0)
            self.grads[feature.table].index_add_(0, ids[keep], grad[keep])
            self.absolute[feature.table].index_add_(0, ids[keep], grad[keep].abs())
            self.named[feature.table][ids[keep]] = True
            self._note(self.absolute[feature.table], 1 / self._share(feature.table), feature.table)
            if feature.weighted:
                products = arrived * self.weights[feature.table][ids]
                found[feature.name] = torch.where(keep, products.sum(1), 0.0)
                self._note(products.abs().sum(1), self._unit(feature.table), feature.table)
        return found

    def step(self) -> None:
        """Apply the accumulated gradients of the tables that have a rule; forget all."""
        for name, rule in self.rules.items():
            grad, touched = self.grads[name] * rule.sign, self.named[name]
            if rule.formula == "sgd":
                self._note(self.weights[name].abs() + LR * self.absolute[name],
                           LR / self._share(name) if is_reset(self.structure, self.rules, name) else self._unit(name), name)
                self.weights[name] -= LR * grad
                continue
            if rule.formula == "adam":
                self._decay(name, rule, grad, touched)
                continue
            decay = rule.options["weight_decay"]
            grad = torch.where(touched[:, None], grad + decay * self.weights[name], 0.0)
            sums, = self.sums[name]
            sums += grad.square() if rule.formula == "adagrad" else grad.square().mean(1)
            unit = (decay or 1.0) / MAX_MEAN_LENGTH
            self._note(sums * (1 if rule.formula == "adagrad" else grad.shape[1]), unit * unit)
        for kept in (self.grads, self.absolute, self.named):
            for each in kept.values():
                each.zero_()

    def _decay(self, name: str, rule: Rule, grad: Tensor, touched: Tensor) -> None:
        """Adam's moments of the touched rows. A step adds the bits of what is left to 1 of its beta to their unit."""
        self.steps[name] = self.steps.get(name, 0) + 1
        for power, (moment, beta) in enumerate(zip(self.sums[name], rule.options["betas"]), 1):
            target = grad ** power
            self._note(moment.abs() + target.abs(), ((1 - beta) ** self.steps[name]) / MAX_MEAN_LENGTH ** power)
            moment += torch.where(touched[:, None], (1 - beta) * (target - moment), 0.0)

    def _unit(self, table: str) -> float:
        """What every weight is a multiple of at a lookup: integers, after SGD the rate times a mean's smallest share."""
        kept = table not in self.rules or is_reset(self.structure, self.rules, table)
        return 1.0 if kept else LR / self._share(table) / self._share(table)

    def _share(self, table: str) -> int:
        """How many a gradient is divided by at most."""
        return MAX_MEAN_LENGTH if any(f.pooling == "mean" for f in self.structure.features_of(table)) else 1

    def _note(self, absolute: Tensor, unit: float, table: str = "") -> None:
        """`table`: whose dtype the sums have; without one they are float32."""
        if absolute.numel():
            exact = SCALES[self.structure.table(table).dtype if table else "float32"].exact
            self.largest = max(self.largest, float(absolute.max()) / unit / exact)


def _spelled(feature: Feature, drawn: Drawn, place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(K,) ids, whether each counts, its factor; and (B,) how many count in a bag, at least 1."""
    ids = drawn.batch.indices[place].reshape(-1).long()
    factors = drawn.batch.weights[place]
    # nn.Embedding hands out the padding row like any other, but gives it no gradient.
    keep = torch.ones_like(ids, dtype=torch.bool) if feature.padding_idx is None else ids != feature.padding_idx
    factor = torch.ones(len(ids), dtype=torch.float64) if factors is None else factors.detach().reshape(-1).double()
    bags = len(drawn.grads[feature.name])
    count = torch.zeros(bags, dtype=torch.float64).index_add(0, drawn.bag_of[place][keep], torch.ones(int(keep.sum()), dtype=torch.float64))
    return ids, keep, factor, count.clamp(min=1)


def exact_run(structure: Structure, sketches: Mapping[str, Sketch], rules: Mapping[str, Rule], seed: int,
              rounds: Sequence[int]) -> tuple[dict[str, Tensor], list[list[Drawn]]]:
    """Initial weights, and for each round (a step) its batches, so many that every sum in all of it is exact.

    `rounds` holds the number of backwards before each step. Bags become fewer until the sums fit, then ever more values 0.
    """
    bags, density = MAX_BAGS, 1.0
    while True:
        generator = torch.Generator().manual_seed(seed)
        weights = draw_weights(structure, generator, density)
        # A batch of another size each time: nothing may depend on the batch size.
        drawn = [[draw(structure, sketches, max(3, bags - 7 * i), generator, density) for _ in range(n)] for i, n in enumerate(rounds)]
        oracle = Oracle.start(structure, rules, weights)
        for batches in drawn:
            for batch in batches:
                oracle.lookup(batch)
                oracle.backward(batch)
            oracle.step()
            reset(oracle, weights)
        if oracle.largest < 1:
            return weights, drawn
        if density < MIN_DENSITY:
            raise AssertionError(f"3 bags still sum to {oracle.largest:.3g} times what is exact")
        if bags > 3:
            bags //= 2
        else:
            density /= 2


def is_reset(structure: Structure, rules: Mapping[str, Rule], table: str) -> bool:
    """Whether a table gets its integers back after a step, so that the next lookup is exact again: its rule rounds (a square root, a
    division), or its dtype has no room for the bits of several steps.
    """
    return rules[table].formula != "sgd" or structure.table(table).dtype != "float32"


def reset(oracle: Oracle, weights: Mapping[str, Tensor]) -> None:
    """Give the tables that are to have them their integers back."""
    for name in oracle.rules:
        if is_reset(oracle.structure, oracle.rules, name):
            oracle.weights[name] = weights[name].double()
