"""Size classes: tables that should be treated alike, so that a thousand tables need some thirty numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

from sparselift.ir import Graph, Table
from sparselift.rewrites.base import SizeClass, lookups, sketch_of

MAX_CLASSES = 8

# Bands are a factor of 8 wide from 4,096 rows on, the scale on which tables outgrow one level of cache after the other.
_FIRST_BAND_ROWS = 4096
_BAND_FACTOR = 8

_DUPLICATES = ((0.3, "few"), (0.8, "some"), (math.inf, "many"))


@dataclass(frozen=True, slots=True)
class _Cell:
    """Tables of a class, and the ranges that they span. `kind` is what legality hangs on: cells of two kinds never merge."""

    kind: tuple[str, ...]
    poolings: frozenset[str]
    dims: frozenset[int]
    bands: frozenset[int]
    duplicates: frozenset[str]
    tables: tuple[Table, ...]

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def distance(self, other: _Cell) -> tuple[float, ...]:
        """How unlike two cells are; what changes a kernel's code path weighs most."""
        labels = [label for _, label in _DUPLICATES]
        return (self.poolings != other.poolings,
                _gap([math.log2(dim) for dim in self.dims], [math.log2(dim) for dim in other.dims]), _gap(self.bands, other.bands),
                _gap([labels.index(label) for label in self.duplicates], [labels.index(label) for label in other.duplicates]))

    def merged(self, other: _Cell) -> _Cell:
        return _Cell(self.kind, self.poolings | other.poolings, self.dims | other.dims,
                     self.bands | other.bands, self.duplicates | other.duplicates, self.tables + other.tables)

    @property
    def name(self) -> str:
        rows = "-".join(f"to{_rows_label(band)}" for band in sorted({min(self.bands), max(self.bands)}))
        dims = "-".join(f"d{dim}" for dim in sorted({min(self.dims), max(self.dims)}))
        duplicates = f"{next(iter(self.duplicates))}-dup" if len(self.duplicates) == 1 else "any-dup"
        return "-".join([dims, "+".join(sorted(self.poolings)), rows, duplicates, *filter(None, self.kind)])


def size_classes(graph: Graph) -> tuple[SizeClass, ...]:
    """The graph's tables by dim, dtype, pooling, way of update, band of rows and band of duplicates, largest tables last.

    Above `MAX_CLASSES`, the class with the fewest bytes joins the one most like it, as long as both have the same legal choices.
    The same graph always gives the same classes, and every table is in exactly one.
    """
    rules = {_rule(table) for table in graph.structure.tables}
    cells: dict[tuple[object, ...], _Cell] = {}
    for table in graph.structure.tables:
        cell = _cell(graph, table, name_rule=len(rules) > 1)
        key = (cell.kind, cell.poolings, cell.dims, cell.bands, cell.duplicates)
        cells[key] = cells[key].merged(cell) if key in cells else cell
    found = _merge_smallest(list(cells.values()))
    found.sort(key=lambda cell: (max(cell.bands), max(cell.dims), cell.name))
    order = {table.name: position for position, table in enumerate(graph.structure.tables)}
    return tuple(SizeClass(name, tuple(sorted((table.name for table in cell.tables), key=order.__getitem__)))
                 for name, cell in zip(_unique_names(found), found, strict=True))


def _cell(graph: Graph, table: Table, name_rule: bool) -> _Cell:
    features = graph.structure.features_of(table.name)
    kind = (_rule(table) if name_rule else "", "" if table.sparse else "dense", "shared" if len(features) > 1 else "",
            "" if table.dtype == "float32" else table.dtype)
    pooling = "+".join(sorted({feature.pooling for feature in features})) or "unused"
    return _Cell(kind, frozenset({pooling}), frozenset({table.dim}), frozenset({_band(table.rows)}),
                 frozenset({_duplicates(graph, table)}), (table,))


def _rule(table: Table) -> str:
    if table.optimizer is None:
        return "frozen"
    return table.optimizer.fused_rule or f"native-{table.optimizer.kind}"


def _band(rows: int) -> int:
    """0 up to 4,096 rows, 1 up to 32,768, ..."""
    band, limit = 0, _FIRST_BAND_ROWS
    while rows > limit:
        band, limit = band + 1, limit * _BAND_FACTOR
    return band


def _rows_label(band: int) -> str:
    rows = _FIRST_BAND_ROWS * _BAND_FACTOR ** band
    for bits, unit in ((30, "G"), (20, "M"), (10, "k")):
        if rows >> bits:
            return f"{rows >> bits}{unit}"
    return str(rows)


def _duplicates(graph: Graph, table: Table) -> str:
    """The band of the share of lookups that repeat a row of the batch, over the table's lookups."""
    total = lookups(graph, table.name)
    repeated = sum(sketch.duplicate_ratio * sketch.lookups_per_batch
                   for sketch in (sketch_of(graph, feature.name) for feature in graph.structure.features_of(table.name)))
    ratio = repeated / total if total else 0.0
    return next(label for limit, label in _DUPLICATES if ratio < limit)


def _merge_smallest(cells: list[_Cell]) -> list[_Cell]:
    while len(cells) > MAX_CLASSES:
        pairs = ((cell, other) for cell in sorted(cells, key=lambda c: (c.nbytes, c.name))
                 for other in sorted(cells, key=lambda o: (cell.distance(o), o.name)) if other is not cell and other.kind == cell.kind)
        pair = next(pairs, None)
        if pair is None:
            break
        cells = [*(cell for cell in cells if cell is not pair[0] and cell is not pair[1]), pair[0].merged(pair[1])]
    return cells


def _unique_names(cells: list[_Cell]) -> list[str]:
    """Merged ranges can coincide; later ones get a number."""
    names: list[str] = []
    for cell in cells:
        numbered = chain([cell.name], (f"{cell.name}-{n}" for n in range(2, len(cells) + 2)))
        names.append(next(name for name in numbered if name not in names))
    return names


def _gap(a: frozenset[int] | list[float] | list[int], b: frozenset[int] | list[float] | list[int]) -> float:
    """Distance between the nearest values of two sets."""
    return min(abs(x - y) for x in a for y in b)
