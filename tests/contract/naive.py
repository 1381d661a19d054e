"""Fused bags by triple loop in float64, and random cases of small integers, on which float32 sums are exact in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparselift.kernels.base import BagProgram, FeatureSpec, KernelBackend, State, TableSpec, UpdateRule, state_shapes


@dataclass
class Case:
    """One batch of a few features, before any backend has seen it."""

    tables: list[TableSpec]
    features: list[FeatureSpec]
    weights: list[Tensor]                          # (R, D) a table
    indices: list[Tensor]
    offsets: list[Tensor | int]
    sample_weights: list[Tensor | None] = field(default_factory=list)
    looked_up: list[Tensor] = field(default_factory=list)      # what `weights` were when maxima were looked up

    def compile(self, backend: KernelBackend) -> BagProgram:
        return backend.compile(self.tables, self.features)

    def prepare(self, program: BagProgram):
        """A batch. Where maxima are looked up, its forward has run: gradients go where they came from, whatever becomes of the weights."""
        batch = program.prepare(self.indices, self.offsets, self.sample_weights or None)
        if any(f.pooling == "max" for f in self.features):
            program.forward(self.weights, batch, self.outputs(batch))
            self.looked_up = [weight.clone() for weight in self.weights]
        return batch

    def outputs(self, batch, fill: float = torch.nan) -> list[Tensor]:
        return [torch.full((bags, self.tables[f.table].dim), fill) for f, bags in zip(self.features, batch.num_bags)]

    def bounds(self, feature: int) -> list[int]:
        count, offsets = len(self.indices[feature]), self.offsets[feature]
        if isinstance(offsets, int):
            return list(range(0, count + 1, offsets))
        bounds = offsets.tolist()
        return bounds if self.features[feature].include_last_offset else [*bounds, count]

    def bags(self, feature: int) -> Iterator[tuple[int, list[tuple[int, int, float]]]]:
        """(bag, [(position, id, per-sample weight)]), padding left out unless the feature has no pooling."""
        spec, bounds = self.features[feature], self.bounds(feature)
        given = self.sample_weights[feature] if self.sample_weights else None
        for bag, (begin, end) in enumerate(pairwise(bounds)):
            ids = [(k, int(self.indices[feature][k])) for k in range(begin, end)]
            yield bag, [(k, row, 1.0 if given is None else float(given[k])) for k, row in ids
                        if spec.pooling == "none" or row != spec.padding_idx]


def pooled(case: Case, feature: int) -> np.ndarray:
    """(B, D) float64."""
    spec = case.features[feature]
    table = case.weights[spec.table].double().numpy()
    rows = []
    for _, members in case.bags(feature):
        if spec.pooling == "max" and members:
            rows.append(table[[row for _, row, _ in members]].max(0))
            continue
        total = np.zeros(table.shape[1])
        for _, row, weight in members:
            total += weight * table[row]
        rows.append(total / max(len(members), 1) if spec.pooling == "mean" else total)
    return np.array(rows).reshape(-1, table.shape[1])


def lookup_grads(case: Case, table: int, grads: Sequence[Tensor | None]) -> tuple[list[int], np.ndarray]:
    """Ids and (K, D) float64 gradients of a table's lookups."""
    ids, values = [], []
    for position, (spec, grad) in enumerate(zip(case.features, grads)):
        if spec.table != table or grad is None:
            continue
        for bag, members in case.bags(position):
            first = None
            if spec.pooling == "max" and members:      # of equal ones the first, column by column
                first = case.looked_up[table].double().numpy()[[row for _, row, _ in members]].argmax(0)
            for place, (_, row, weight) in enumerate(members):
                if row == spec.padding_idx:
                    continue
                ids.append(row)
                value = weight * grad[bag].double().numpy() / (len(members) if spec.pooling == "mean" else 1)
                values.append(value if first is None else np.where(first == place, value, 0))
    return ids, np.array(values).reshape(-1, case.tables[table].dim)


def row_sums(parts: Sequence[tuple[list[int], np.ndarray]]) -> dict[int, np.ndarray]:
    sums: dict[int, np.ndarray] = {}
    for ids, values in parts:
        for row, value in zip(ids, values):
            sums[row] = sums.get(row, 0) + value
    return dict(sorted(sums.items()))


def updated(weight: Tensor, state: State, rule: UpdateRule, sums: dict[int, np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Weight and the tensors of the state after one step of the rule, float64."""
    w = weight.double().numpy().copy()
    states = [part.double().numpy().copy() for part in parts_of(state)]
    for row, g in sums.items():
        g = (-g if rule.maximize else g) + rule.weight_decay * w[row]
        if rule.kind == "sgd":
            w[row] -= rule.lr * g
        elif rule.kind == "adam":
            for moment, target, beta in zip(states, (g, g * g), rule.betas):
                moment[row] = beta * moment[row] + (1 - beta) * target
            w[row] -= rule.lr * states[0][row] / (np.sqrt(states[1][row]) + rule.eps)
        else:
            states[0][row] += np.mean(g * g) if rule.kind == "rowwise_adagrad" else g * g
            w[row] -= rule.lr * g / (np.sqrt(states[0][row]) + rule.eps)
    return w, states


def parts_of(state: State) -> tuple[Tensor, ...]:
    """The tensors of a rule's state."""
    return state if isinstance(state, tuple) else () if state is None else (state,)


def fresh_state(table: TableSpec, rule: UpdateRule) -> State:
    """Small integers, as a rule's earlier steps may have left them."""
    rng = np.random.default_rng(9)
    parts = [integers(rng, shape) for shape in state_shapes(rule.kind, table.rows, table.dim)]
    if parts:
        parts[-1].abs_()                       # what a root is taken of
    return tuple(parts) if len(parts) == 2 else parts[0] if parts else None


def integers(rng: np.random.Generator, shape: tuple[int, ...], bound: int = 4) -> Tensor:
    return torch.from_numpy(rng.integers(-bound, bound + 1, shape).astype(np.float32))


def random_case(seed: int, dims: Sequence[int] = (4, 8), *, batch: int = 7, length: int = 5, rows: int = 11,
                pooling: Sequence[str] = ("sum",), index_dtypes: Sequence[torch.dtype] = (torch.int64,), shared: bool = False,
                padding: bool = False, weighted: bool = False, include_last: bool = False) -> Case:
    """One feature a table (two with `shared`), ragged bags with empty ones among them, mean bags of 1, 2 or 4 ids that count."""
    rng = np.random.default_rng(seed)
    tables = [TableSpec(f"t{t}", rows, dim) for t, dim in enumerate(dims)]
    case = Case(tables, [], [integers(rng, (rows, dim)) for dim in dims], [], [], [])
    column = 0
    for position, table in enumerate(t for t in range(len(dims)) for _ in range(1 + shared)):
        kind = pooling[position % len(pooling)]
        spec = FeatureSpec(f"f{position}", table, kind, column, padding_idx=rows // 2 if padding else None,
                           include_last_offset=include_last and kind != "none", weighted=weighted and kind == "sum")
        column += dims[table]
        dtypes = [index_dtypes[(position + shift) % len(index_dtypes)] for shift in (0, 1)]
        _add_feature(case, rng, spec, batch, length, *dtypes)
    return case


def _add_feature(case: Case, rng: np.random.Generator, spec: FeatureSpec, batch: int, length: int,
                 index_dtype: torch.dtype, offset_dtype: torch.dtype) -> None:
    rows = case.tables[spec.table].rows
    ids: list[int] = []
    starts: list[int] = []
    for _ in range(batch):
        starts.append(len(ids))
        counts = {"none": [1], "mean": [0, 1, 2, 4], "sum": range(length + 1), "max": range(length + 1)}[spec.pooling]
        counted = int(rng.choice(counts))
        bag_ids = rng.integers(0, rows, counted)
        if spec.padding_idx is not None and spec.pooling != "none":
            bag_ids[bag_ids == spec.padding_idx] = (spec.padding_idx + 1) % rows
            bag_ids = rng.permutation(np.append(bag_ids, [spec.padding_idx] * int(rng.integers(0, 3))))
        ids.extend(bag_ids.astype(int).tolist())
    case.features.append(spec)
    case.indices.append(torch.tensor(ids, dtype=index_dtype))
    bounds = [*starts, len(ids)] if spec.include_last_offset else starts
    case.offsets.append(1 if spec.pooling == "none" else torch.tensor(bounds, dtype=offset_dtype))
    case.sample_weights.append(integers(rng, (len(ids),), 2) if spec.weighted else None)


def random_grads(case: Case, batch, seed: int, bound: int = 4) -> list[Tensor]:
    """(B, D) multiples of 4 a feature, so that dividing them by the length of a mean bag is exact."""
    rng = np.random.default_rng(seed)
    return [4 * integers(rng, (bags, case.tables[f.table].dim), bound) for f, bags in zip(case.features, batch.num_bags)]
