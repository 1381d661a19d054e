"""Columns of features, as lookups leave them and as their consumers want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .checks import check_whole


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """Columns [column, column + width) of one result, as the sum of `terms`: (matrix, first column) of as many columns each."""

    matrix: int
    column: int
    width: int
    terms: tuple[tuple[int, int], ...]

    def joins(self, after: ColumnRange) -> bool:
        """Whether `after` goes on where this ends, in the result and in every term."""
        return (after.matrix, after.column) == (self.matrix, self.column + self.width) and after.terms == tuple(
            (matrix, column + self.width) for matrix, column in self.terms)


@dataclass(frozen=True, slots=True)
class RegroupSpec:
    """Features' columns, as they lie side by side in some matrices and as consumers want them: KeyedTensor.regroup.

    Attributes
    ----------
    sources   the widths of the features in each source matrix, in order. Features are numbered through all of them
    groups    the features of each result, in order. A feature may be in several, or in none

    Other sequences are kept as tuples. Raises ValueError for a negative width, or a feature that is none, and TypeError for numbers that
    are not whole.
    """

    sources: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for name, what in (("sources", "a feature's width"), ("groups", "a group's feature")):
            object.__setattr__(self, name, _nested(name, what, getattr(self, name)))
        count = sum(map(len, self.sources))
        for widths in self.sources:
            if min(widths, default=0) < 0:
                raise ValueError(f"a feature's width must be at least 0; got {min(widths)}")
        for feature in (feature for group in self.groups for feature in group):
            if not 0 <= feature < count:
                raise ValueError(f"a group's feature must be one of the {count} of the sources; got {feature}")

    @classmethod
    def of_keys(cls, keys: Sequence[Sequence[str]], widths: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]) -> RegroupSpec:
        """The same by name: keys and widths of every source's features. Raises ValueError for a name that is twice there, or not at all."""
        numbers: dict[str, int] = {}
        for key in (key for source in keys for key in source):
            if key in numbers:
                raise ValueError(f"the feature {key!r} is in two places of the sources")
            numbers[key] = len(numbers)
        missing = [key for group in groups for key in group if key not in numbers]
        if missing:
            raise ValueError(f"no source has the feature {missing[0]!r}; they have {', '.join(numbers)}")
        if [len(source) for source in keys] != [len(source) for source in widths]:
            raise ValueError("there must be one width a key")
        return cls(tuple(map(tuple, widths)), tuple(tuple(numbers[key] for key in group) for group in groups))

    @property
    def widths(self) -> tuple[int, ...]:
        """Of every feature."""
        return tuple(width for source in self.sources for width in source)

    @property
    def source_widths(self) -> tuple[int, ...]:
        return tuple(map(sum, self.sources))

    @property
    def group_widths(self) -> tuple[int, ...]:
        widths = self.widths
        return tuple(sum(widths[feature] for feature in group) for group in self.groups)

    def places(self) -> list[tuple[int, int]]:
        """(source, first column) of every feature."""
        found = []
        for source, widths in enumerate(self.sources):
            found += [(source, sum(widths[:i])) for i in range(len(widths))]
        return found

    def uses(self) -> list[list[tuple[int, int]]]:
        """(group, first column) of every use of every feature, by group and position."""
        widths = self.widths
        found: list[list[tuple[int, int]]] = [[] for _ in widths]
        for number, group in enumerate(self.groups):
            column = 0
            for feature in group:
                found[feature].append((number, column))
                column += widths[feature]
        return found

    def forward_ranges(self) -> list[ColumnRange]:
        """What makes the groups from the sources."""
        places, widths = self.places(), self.widths
        ranges = [ColumnRange(number, column, widths[feature], (places[feature],))
                  for feature, uses in enumerate(self.uses()) for number, column in uses]
        return _joined(sorted(ranges, key=lambda part: (part.matrix, part.column)))

    def backward_ranges(self) -> list[ColumnRange]:
        """What makes the sources' gradients from the groups'."""
        return _joined([ColumnRange(*place, width, tuple(uses)) for place, width, uses in zip(self.places(), self.widths, self.uses())])


def _nested(name: str, what: str, given: object) -> tuple[tuple[int, ...], ...]:
    """Sequences of sequences of whole numbers, as tuples."""
    for each in (given, *given) if isinstance(given, Sequence) else (given,):
        if not isinstance(each, Sequence) or isinstance(each, str):
            raise TypeError(f"{name} must be a sequence of sequences of whole numbers; got {each!r}")
    assert isinstance(given, Sequence)
    for number in (number for inner in given for number in inner):
        check_whole(what, number)
    return tuple(tuple(int(number) for number in inner) for inner in given)


def _joined(ranges: Sequence[ColumnRange]) -> list[ColumnRange]:
    """As few ranges as do the same."""
    found: list[ColumnRange] = []
    for part in ranges:
        if not part.width:
            continue
        if found and found[-1].joins(part):
            last = found.pop()
            part = ColumnRange(last.matrix, last.column, last.width + part.width, last.terms)
        found.append(part)
    return found
