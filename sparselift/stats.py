"""Sketches: what real batches look like to one lookup, in about a KiB.

Every field is a count, so sketches merge exactly, in any order and across batches and ranks, and the shares that are read from
them are weighted by what was seen. Letters: K ids of a batch, U distinct rows of a batch, n the first n of its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import Tensor

_EXACT_LENGTH_BITS = 5             # bag lengths below 2**6 are counted one by one, longer ones in 32 bins an octave (3% wide)
_HOT_STEP = 8                      # coverage is kept for the 1, 8, 64, 512 ... hottest rows
_SCATTER_ROWS = 16                 # rows an id, up to which a pass over all rows is cheaper than sorting the ids

# What counts as drift: relative for the pooling factor, absolute for shares. Wider than the noise of a few small batches.
_POOLING_DRIFT = 0.2
_SHARE_DRIFT = 0.1


@dataclass(frozen=True, slots=True)
class Sketch:
    """Counts over batches of one feature. Ids equal to `padding_idx` count as ids, but neither as distinct nor as hot rows.

    Attributes
    ----------
    rows             of the table; 0 before any batch
    batches, bags    seen
    lookups          ids seen, padding included: the sum of K
    empty_bags       bags without an id
    padding          ids equal to padding_idx
    unique           sum over batches of U, padding left out
    id_min, id_max   over all ids; -1 while there are none
    max_length       of a bag
    lengths          (length, bags of about that length), ascending; lengths of 64 and more are rounded down by up to 3%
    unique_curve     for k = 0, 1, ...: (sum of U(2**k) over the batches with so many ids, number of those batches), padding left out
    hot              for k = 1, 8, 64, ...: sum over batches of the lookups that fall on the batch's k hottest rows
    """

    rows: int = 0
    batches: int = 0
    bags: int = 0
    lookups: int = 0
    empty_bags: int = 0
    padding: int = 0
    unique: int = 0
    id_min: int = -1
    id_max: int = -1
    max_length: int = 0
    lengths: tuple[tuple[int, int], ...] = ()
    unique_curve: tuple[tuple[int, int], ...] = ()
    hot: tuple[int, ...] = ()

    @classmethod
    def empty(cls) -> Sketch:
        """The sketch of no batch: merging it changes nothing."""
        return cls()

    @property
    def pooling(self) -> float:
        """Mean ids a bag, L."""
        return self.lookups / self.bags if self.bags else 0.0

    @property
    def bags_per_batch(self) -> float:
        return self.bags / self.batches if self.batches else 0.0

    @property
    def lookups_per_batch(self) -> float:
        """Mean K."""
        return self.lookups / self.batches if self.batches else 0.0

    @property
    def unique_per_batch(self) -> float:
        """Mean U."""
        return self.unique / self.batches if self.batches else 0.0

    @property
    def duplicate_ratio(self) -> float:
        """Share of a batch's lookups whose row the batch has already named: 1 - U/K, padding left out."""
        named = self.lookups - self.padding
        return 1 - self.unique / named if named else 0.0

    @property
    def empty_share(self) -> float:
        """Share of bags without an id."""
        return self.empty_bags / self.bags if self.bags else 0.0

    @property
    def padding_share(self) -> float:
        """Share of ids equal to padding_idx."""
        return self.padding / self.lookups if self.lookups else 0.0

    def length_quantile(self, share: float) -> int:
        """The bag length that `share` of the bags do not exceed; 0 without bags. Raises ValueError unless 0 <= share <= 1."""
        if not 0 <= share <= 1:
            raise ValueError(f"share must be between 0 and 1; got {share}")
        seen = 0
        for length, bags in self.lengths:
            seen += bags
            if seen >= share * self.bags:
                return length if seen < self.bags else self.max_length
        return 0

    def unique_at(self, lookups: int) -> float:
        """Mean U(n) at the largest kept n = 2**k that is not above `lookups`; 0.0 if there is none."""
        k = min(max(lookups, 0).bit_length(), len(self.unique_curve)) - 1
        return self.unique_curve[k][0] / self.unique_curve[k][1] if k >= 0 else 0.0

    def coverage(self, rows: int) -> float:
        """Share of a batch's lookups that its hottest rows take: those of the largest kept k = 8**j not above `rows`. 0.0 for none."""
        named = self.lookups - self.padding
        if not named or rows < 1:
            return 0.0
        j = 0
        while _HOT_STEP ** (j + 1) <= rows:
            j += 1
        return self.hot[j] / named if j < len(self.hot) else 1.0

    def merge(self, other: Sketch) -> Sketch:
        """The sketch of both sets of batches. Raises ValueError for tables of different sizes."""
        if not self.batches or not other.batches:
            return self if self.batches else other
        if self.rows != other.rows:
            raise ValueError(f"sketches of tables with {self.rows} and {other.rows} rows cannot be merged")
        lengths = dict(self.lengths)
        for length, bags in other.lengths:
            lengths[length] = lengths.get(length, 0) + bags
        known_ids = [id_ for id_ in (self.id_min, other.id_min) if id_ >= 0]
        return Sketch(
            self.rows, self.batches + other.batches, self.bags + other.bags, self.lookups + other.lookups,
            self.empty_bags + other.empty_bags, self.padding + other.padding, self.unique + other.unique,
            min(known_ids, default=-1), max(self.id_max, other.id_max), max(self.max_length, other.max_length),
            tuple(sorted(lengths.items())),
            tuple((a[0] + b[0], a[1] + b[1]) for a, b in zip_longest(self.unique_curve, other.unique_curve, fillvalue=(0, 0))),
            _merge_hot(self, other),
        )

    def drift(self, other: Sketch) -> dict[str, tuple[float, float]]:
        """What differs by more than batches of the same data do: name -> (value here, value there).

        Shares of duplicates are compared at an equal number of ids, since a longer batch repeats more.
        """
        found: dict[str, tuple[float, float]] = {}
        if not self.batches or not other.batches:
            return found
        if self.rows != other.rows:
            found["rows"] = (self.rows, other.rows)
        if abs(self.pooling - other.pooling) > _POOLING_DRIFT * max(self.pooling, other.pooling):
            found["pooling"] = (self.pooling, other.pooling)
        shares = {"empty_share": (self.empty_share, other.empty_share), "padding_share": (self.padding_share, other.padding_share)}
        if common := min(len(self.unique_curve), len(other.unique_curve)):
            n = 1 << (common - 1)
            shares["duplicate_ratio"] = (1 - self.unique_at(n) / n, 1 - other.unique_at(n) / n)
            if max(len(self.unique_curve), len(other.unique_curve)) - common <= 1:
                shares["coverage_64"] = (self.coverage(64), other.coverage(64))
        found.update({name: pair for name, pair in shares.items() if abs(pair[0] - pair[1]) > _SHARE_DRIFT})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {name: [list(item) if isinstance(item, tuple) else item for item in value] if isinstance(value, tuple) else value
                for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Sketch:
        """Inverse of `to_dict`. Raises ValueError naming fields that are missing, unknown or not counts."""
        names = {field.name for field in fields(cls)}
        if set(document) != names:
            raise ValueError(f"a sketch has the fields {sorted(names)}; missing {sorted(names - set(document))}, "
                             f"unknown {sorted(set(document) - names)}")
        return cls(**{name: _FIELD_PARSERS.get(name, _count)(name, value) for name, value in document.items()})


def sketch(indices: Tensor | np.ndarray, bag_lengths: Tensor | np.ndarray, rows: int, padding_idx: int | None = None) -> Sketch:
    """The sketch of one batch of one feature.

    Parameters
    ----------
    indices      (K,) ids
    bag_lengths  (B,) ids of every bag, padding included
    rows         of the table
    padding_idx  the id that counts for nothing, if any

    Raises
    ------
    ValueError   bag lengths that are negative or do not add up to K, or an id outside [0, rows)
    """
    ids = np.asarray(indices).ravel()
    bag_sizes = np.asarray(bag_lengths).ravel().astype(np.int64, copy=False)
    if bag_sizes.min(initial=0) < 0:
        raise ValueError(f"bag lengths must not be negative (do offsets decrease?); got {bag_sizes.min()}")
    if bag_sizes.sum() != ids.size:
        raise ValueError(f"bag lengths must add up to the number of ids ({ids.size}); got {bag_sizes.sum()}")
    id_min, id_max = (int(ids.min()), int(ids.max())) if ids.size else (-1, -1)
    if ids.size and not 0 <= id_min <= id_max < rows:
        raise ValueError(f"ids must be in [0, {rows}); got {id_min if id_min < 0 else id_max}")
    named = ids if padding_idx is None else ids[ids != padding_idx]
    first_seen, counts = _distinct(named, rows)
    lengths, bags = np.unique(_length_bins(bag_sizes), return_counts=True)
    return Sketch(
        rows, 1, bag_sizes.size, ids.size, int((bag_sizes == 0).sum()), ids.size - named.size, first_seen.size,
        id_min, id_max, int(bag_sizes.max(initial=0)),
        tuple(zip(lengths.tolist(), bags.tolist(), strict=True)),
        _unique_curve(named.size, first_seen), _hottest(counts),
    )


def _distinct(ids: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(U,) ascending positions of every row's first id, and (U,) how often the rows occur, in some order."""
    if rows > _SCATTER_ROWS * ids.size:
        _, first_seen, counts = np.unique(ids, return_index=True, return_counts=True)
        return np.sort(first_seen), counts
    positions = np.arange(ids.size)
    first = np.empty(rows, dtype=np.int64)
    first[ids[::-1]] = positions[::-1]  # of several values for one row the last one stays, which is the first position
    counts = np.bincount(ids, minlength=rows)
    return positions[first[ids] == positions], counts[counts > 0]


def _length_bins(lengths: np.ndarray) -> np.ndarray:
    """(B,) lower bound of every length's bin: the length itself below 64, else its leading 6 bits."""
    shift = np.maximum(np.frexp(lengths)[1] - 1 - _EXACT_LENGTH_BITS, 0)
    return (lengths >> shift) << shift


def _unique_curve(num_ids: int, first_seen: np.ndarray) -> tuple[tuple[int, int], ...]:
    """U(n) at n = 2**k <= num_ids: the number of rows whose first lookup is among the first n."""
    points = 1 << np.arange(num_ids.bit_length())
    return tuple((int(u), 1) for u in np.searchsorted(first_seen, points))


def _hottest(counts: np.ndarray) -> tuple[int, ...]:
    """Lookups of the 1, 8, 64, ... hottest rows, as long as there are more rows than that; the rest is full coverage."""
    cumulated = np.cumsum(np.sort(counts)[::-1])
    hot, k = [], 1
    while k < counts.size:
        hot.append(int(cumulated[k - 1]))
        k *= _HOT_STEP
    return tuple(hot)


def _merge_hot(a: Sketch, b: Sketch) -> tuple[int, ...]:
    """Where one sketch's curve ends, all of its named lookups are covered."""
    full = (a.lookups - a.padding, b.lookups - b.padding)
    return tuple((full[0] if x is None else x) + (full[1] if y is None else y) for x, y in zip_longest(a.hot, b.hot))


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"sketch field {name!r} must hold integers; got {value!r}")
    if not (-1 if name in ("id_min", "id_max") else 0) <= value < 2**63:
        raise ValueError(f"sketch field {name!r} must hold counts; got {value!r}")
    return value


def _counts(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"sketch field {name!r} must hold a list of integers; got {values!r}")
    return tuple(_count(name, value) for value in values)


def _pairs(name: str, values: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(item, (list, tuple)) and len(item) == 2 for item in values):
        raise ValueError(f"sketch field {name!r} must hold a list of pairs of integers; got {values!r}")
    return tuple(_counts(name, item) for item in values)


def _curve(name: str, values: Any) -> tuple[tuple[int, ...], ...]:
    """A point of the curve is of at least one batch."""
    points = _pairs(name, values)
    if any(batches < 1 for _, batches in points):
        raise ValueError(f"sketch field {name!r} must hold (distinct rows, batches) with batches of at least 1; got {values!r}")
    return points


_FIELD_PARSERS: dict[str, Callable[[str, Any], Any]] = {"lengths": _pairs, "unique_curve": _curve, "hot": _counts}
