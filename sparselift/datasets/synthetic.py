"""Seeded click batches of published shapes: Criteo's one-hot tables and MLPerf's multi-hot ones, with their skew.

Batch i of a seed is the same whatever else is drawn. Labels come from a hidden model of the dense features and the ids, so that
training on them learns something.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparselift.datasets.tabular import Batch

# The hidden model: a logit of about unit variance, and a bias at which a fifth of the rows are clicks (more or less, by seed).
BIAS, DENSE_SHARE, ID_SHARE = -1.6, 0.9, 0.9
DENSE_MEAN, DENSE_SPREAD = 1.5, 1.5       # of log(1 + count), before negatives are cut
GOLDEN = 0.618034


@dataclass(frozen=True, slots=True)
class Shape:
    """Tables of a click log.

    Attributes
    ----------
    rows       (T,) distinct ids of each table
    pooling    (T,) ids of a bag; every bag of a table has the same number
    exponents  (T,) Zipf exponent of each table's ids
    """

    name: str
    rows: tuple[int, ...]
    pooling: tuple[int, ...]
    exponents: tuple[float, ...]
    num_dense: int = 13

    def capped(self, max_rows: int | None) -> tuple[int, ...]:
        """(T,) table sizes when no table may be larger than `max_rows`."""
        return self.rows if max_rows is None else tuple(min(rows, max_rows) for rows in self.rows)


# Cardinalities: facebookresearch/dlrm, tools/visualize.py. Exponents: those at which a bounded Zipf law over so many ids has as many
# distinct ids in 2,048 draws as the published logs have (for tables of up to 50 rows: the same share of the most frequent id).
CRITEO_KAGGLE = Shape(
    "criteo_kaggle",
    rows=(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4,
          7046547, 18, 15, 286181, 105, 142572),
    pooling=(1,) * 26,
    exponents=(1.87, 1.29, 1.03, 1.07, 2.37, 1.51, 0.89, 2.17, 3.31, 1.06, 0.94, 1.03, 0.94, 1.28, 1.04, 1.05, 1.28, 1.16, 1.49, 0.89,
               1.04, 2.89, 1.42, 1.15, 2.32, 1.22),
)

# num_embeddings_per_feature and multi_hot_sizes of MLPerf Training's DLRM-DCNv2. Its ids are synthetic; the exponent is assumed.
MLPERF_DCNV2 = Shape(
    "mlperf_dcnv2",
    rows=(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14, 40000000,
          40000000, 40000000, 590152, 12973, 108, 36),
    pooling=(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
    exponents=(1.05,) * 26,
)

SHAPES = {shape.name: shape for shape in (CRITEO_KAGGLE, MLPERF_DCNV2)}

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def click_batches(shape: Shape, batch_size: int, num_batches: int, *, seed: int = 0, max_rows: int | None = None) -> list[Batch]:
    """`num_batches` batches of `batch_size` rows.

    Ranks are drawn by `zipf_ranks` from all of a table's published ids; a rank beyond `max_rows` wraps around, as a modulo in
    preprocessing does. Ranks are then scattered over the table, since frequent ids are no neighbours there.

    Raises ValueError for sizes below 1.
    """
    for name, value in (("batch_size", batch_size), ("num_batches", num_batches), ("max_rows", 1 if max_rows is None else max_rows)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    offsets = torch.stack([torch.arange(0, batch_size * length, length) for length in shape.pooling])
    hidden = _Hidden.draw(shape, seed)
    return [_batch(shape, hidden, offsets, batch_size, max_rows, np.random.default_rng([seed, number])) for number in range(num_batches)]


def zipf_ranks(rng: np.random.Generator, exponent: float, rows: int, count: int) -> Ints:
    """(count,) ranks in [0, rows) with P(k) proportional to (k + 1) ** -exponent, exponent >= 0.

    Rejection-inversion (W. Hörmann and G. Derflinger, 1996), exact for any bounded support and without a table of it: with
    H(x) the integral of t ** -exponent, u uniform in (H(1.5) - 1, H(rows + 0.5)] and k the integer nearest to the x at which
    H(x) = u, k is taken if u >= H(k + 0.5) - k ** -exponent. That interval of u is k ** -exponent long, and since the density is convex
    it lies within the u that lead to k. At least two draws in three are taken.
    """
    low, high = _integral(np.array([1.5, rows + 0.5]), exponent)
    low -= 1
    taken: list[Ints] = []
    missing = count
    while missing > 0:
        u = high - rng.random(missing) * (high - low)
        k = np.rint(_inverse_integral(u, exponent)).clip(1, rows)
        k = k[u >= _integral(k + 0.5, exponent) - k ** -exponent]
        taken.append(k.astype(np.int64) - 1)
        missing -= len(k)
    return np.concatenate(taken) if taken else np.empty(0, np.int64)


def _integral(x: Floats, exponent: float) -> Floats:
    """Integral of t ** -exponent from 1 to x: (x ** q - 1) / q with q = 1 - exponent, log(x) at q = 0."""
    q, log = 1 - exponent, np.log(x)
    return log if q == 0 else np.expm1(q * log) / q


def _inverse_integral(u: Floats, exponent: float) -> Floats:
    q = 1 - exponent
    return np.exp(u if q == 0 else np.log1p(q * u) / q)


def scatter(ranks: Ints, rows: int) -> Ints:
    """A bijection of [0, rows) that sends neighbours far apart: rank * p + q modulo rows, p coprime to rows and near 0.618 rows."""
    p = max(1, round(rows * GOLDEN))
    while math.gcd(p, rows) != 1:
        p += 1
    return (ranks * p + rows // 3) % rows


@dataclass(frozen=True, slots=True)
class _Hidden:
    """The model that labels come from: a weight a dense feature, a scale a table, and a normal-like effect of each id."""

    dense: Floats             # (F,)
    scales: Floats            # (T,)
    keys: NDArray[np.uint64]  # (T,) seeds of the ids' effects

    @classmethod
    def draw(cls, shape: Shape, seed: int) -> _Hidden:
        rng = np.random.default_rng([seed, 2**32])
        dense, scales = rng.normal(size=shape.num_dense), rng.uniform(0.5, 1.5, len(shape.rows))
        return cls(DENSE_SHARE * dense / np.linalg.norm(dense), ID_SHARE * scales / np.linalg.norm(scales),
                   rng.integers(0, 2**63, len(shape.rows), dtype=np.uint64))

    def logits(self, dense: Floats, ids: Sequence[Ints]) -> Floats:
        """(B,) logits of dense (B, F) and T arrays (B, L_t) of ids."""
        logits = BIAS + (dense - DENSE_MEAN) / DENSE_SPREAD @ self.dense
        for of_table, scale, key in zip(ids, self.scales, self.keys, strict=True):
            logits += scale * _effect(of_table, key).mean(axis=1)
        return logits


def _effect(ids: Ints, key: np.uint64) -> Floats:
    """A number with mean 0 and variance 1 for each id: uniform bits from the SplitMix64 finaliser."""
    bits = ids.astype(np.uint64) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return (bits / 2.0**64 - 0.5) * math.sqrt(12)


def _batch(shape: Shape, hidden: _Hidden, offsets: torch.Tensor, batch_size: int, max_rows: int | None,
           rng: np.random.Generator) -> Batch:
    dense = rng.normal(DENSE_MEAN, DENSE_SPREAD, (batch_size, shape.num_dense)).clip(min=0)
    ids = [scatter(zipf_ranks(rng, exponent, rows, batch_size * length) % size, size).reshape(batch_size, length)
           for rows, size, length, exponent in zip(shape.rows, shape.capped(max_rows), shape.pooling, shape.exponents, strict=True)]
    clicked = rng.random(batch_size) < 1 / (1 + np.exp(-hidden.logits(dense, ids)))
    return Batch(torch.from_numpy(dense.astype(np.float32)), offsets, [torch.from_numpy(of_table.reshape(-1)) for of_table in ids],
                 torch.from_numpy(clicked[:, None].astype(np.float32)))
