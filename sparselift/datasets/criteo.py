"""Reader of the Criteo click logs (Kaggle's 7 days, and the same format elsewhere).

A line has 40 fields, separated by tabs, without a header: a label (0 or 1), thirteen integers I1 to I13, and twenty-six
hexadecimal ids C1 to C26 of at most eight digits. Any of the last 39 may be empty. As in DLRM, an integer x becomes
log(1 + max(x, 0)), and a missing one 0.

Whole blocks of lines are parsed at once with NumPy, so that millions of rows take seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparselift.datasets.tabular import Tabular
from sparselift.datasets.text import bad_field, bad_line, line_blocks
from sparselift.errors import DataError

NUM_DENSE, NUM_CATEGORIES = 13, 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_CATEGORIES
CATEGORIES = tuple(f"C{i}" for i in range(1, NUM_CATEGORIES + 1))
FIELDS = ("label", *(f"I{i}" for i in range(1, NUM_DENSE + 1)), *CATEGORIES)
MISSING = -1                              # of a category, before it is encoded
MAX_DECIMAL_DIGITS, MAX_HEX_DIGITS = 18, 8  # what an int64 holds; what Criteo writes
TAB, NEWLINE, MINUS = 9, 10, 45

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """The parsed rows of a file, before ids are mapped to table rows.

    labels      (N,) int64, 0 or 1
    integers    (N, 13) int64, 0 where missing
    categories  (N, 26) int64 value of the hexadecimal id, -1 where missing
    """

    labels: Ints
    integers: Ints
    categories: Ints


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which hexadecimal ids are known, for each of the 26 columns, and their table rows.

    Row 0 stands for a missing or unknown id. The others are numbered from 1 in order of first appearance, as DLRM's own
    preprocessing does; where that passes `max_rows`, numbers wrap around, so that several ids share a row (but never row 0).
    """

    values: tuple[Ints, ...]              # a column: known ids, ascending
    numbers: tuple[Ints, ...]             # their table rows
    rows: tuple[int, ...]                 # table sizes

    @classmethod
    def build(cls, categories: Ints, min_count: int = 1, max_rows: int | None = None) -> Vocabulary:
        """The ids of (N, 26) `categories` that occur at least `min_count` times.

        Raises ValueError for min_count < 1 or max_rows < 2.
        """
        if min_count < 1:
            raise ValueError(f"min_count must be at least 1; got {min_count}")
        if max_rows is not None and max_rows < 2:
            raise ValueError(f"max_rows must be at least 2 (row 0 stands for missing ids); got {max_rows}")
        columns = [_number(column, min_count, max_rows) for column in categories.T]
        return cls(tuple(values for values, _ in columns), tuple(numbers for _, numbers in columns),
                   tuple(int(numbers.max(initial=0)) + 1 for _, numbers in columns))

    def encode(self, categories: Ints) -> Ints:
        """(N, 26) table rows of (N, 26) hexadecimal ids."""
        rows = [_look_up(values, numbers, column)
                for values, numbers, column in zip(self.values, self.numbers, categories.T, strict=True)]
        return np.stack(rows, axis=1)


def read_criteo(path: str | os.PathLike[str], *, limit: int | None = None, rows: Sequence[int] | None = None, min_count: int = 1,
                max_rows: int | None = None) -> Tabular:
    """Read a Criteo log, plain or gzip.

    Parameters
    ----------
    limit      rows to read, from the start; memory is bounded by them. None: all
    rows       None: ids are numbered by a vocabulary built from the rows that are read (see Vocabulary). Otherwise the size of
               each of the 26 tables, and the ids are used as they stand (a missing one is 0): for files already encoded
    min_count  an id seen fewer times is treated as unknown
    max_rows   cap of the table sizes

    Raises
    ------
    DataError   names the file, line, field and value where the file does not hold what the format says, or an id is beyond its table
    """
    columns = read_columns(path, limit)
    if rows is None:
        vocabulary = Vocabulary.build(columns.categories, min_count, max_rows)
        ids, sizes = vocabulary.encode(columns.categories), vocabulary.rows
    else:
        ids, sizes = _as_they_stand(path, columns.categories, rows), tuple(rows)
    dense = np.log1p(np.maximum(columns.integers, 0)).astype(np.float32)
    return Tabular(torch.from_numpy(dense), torch.from_numpy(np.ascontiguousarray(ids.T)),
                   torch.from_numpy(columns.labels.astype(np.float32)), sizes, CATEGORIES)


def read_columns(path: str | os.PathLike[str], limit: int | None = None) -> Columns:
    """Parse the first `limit` rows of a file, or all. Raises DataError as `read_criteo` does, ValueError for a limit < 1."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1; got {limit}")
    parts, wanted = [], limit
    for first_line, block in line_blocks(path):
        if wanted is not None:
            block = _first_lines(block, wanted)
        parts.append(_parse(path, first_line, block))
        if wanted is not None and (wanted := wanted - len(parts[-1])) <= 0:
            break
    table = np.concatenate(parts)
    return Columns(table[:, 0], table[:, 1:1 + NUM_DENSE], table[:, 1 + NUM_DENSE:])


def _first_lines(block: bytes, count: int) -> bytes:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == NEWLINE)
    return block if len(ends) <= count else block[:int(ends[count - 1]) + 1]


def _parse(path: str | os.PathLike[str], first_line: int, block: bytes) -> Ints:
    """(N, 40) int64 values of the block's lines. Raises DataError for the first field, in reading order, that is not legal."""
    text = np.frombuffer(block, np.uint8)
    separators = np.flatnonzero((text == TAB) | (text == NEWLINE))
    closing = np.flatnonzero(text[separators] == NEWLINE)             # a line: the position of its last separator
    counts = np.diff(closing, prepend=-1)                             # a line: its number of fields
    malformed = np.flatnonzero(counts != NUM_FIELDS)
    lines = int(malformed[0]) if len(malformed) else len(counts)
    ends = separators[:lines * NUM_FIELDS].reshape(lines, NUM_FIELDS)
    starts = np.concatenate([[0], ends.ravel() + 1])[:ends.size].reshape(ends.shape)
    values, legal = _values(text, starts, ends - starts)
    if not legal.all():
        row, field = divmod(int(legal.argmin()), NUM_FIELDS)
        value = block[starts[row, field]:ends[row, field]].decode("ascii")
        raise bad_field(path, first_line + row, FIELDS[field], _rule(field), value)
    if len(malformed):
        raise bad_line(path, first_line + lines, f"a line must have {NUM_FIELDS} fields separated by tabs; got {counts[lines]}")
    return values


def _rule(field: int) -> str:
    if field == 0:
        return "must be 0 or 1"
    if field <= NUM_DENSE:
        return f"must be an integer of at most {MAX_DECIMAL_DIGITS} digits, or empty"
    return f"must be a hexadecimal id of at most {MAX_HEX_DIGITS} digits, or empty"


def _values(text: Bytes, starts: Ints, lengths: Ints) -> tuple[Ints, Bools]:
    """(N, 40) values of fields, and whether each is legal."""
    decimal, category = np.s_[:, :1 + NUM_DENSE], np.s_[:, 1 + NUM_DENSE:]
    negative = text[starts[decimal]] == MINUS                         # an empty field starts at the separator after it
    digits = lengths[decimal] - negative
    numbers, numbers_legal = _digits(text, starts[decimal] + negative, digits, 10, MAX_DECIMAL_DIGITS)
    numbers_legal &= ~(negative & (digits == 0))                      # a lone minus sign
    numbers_legal[:, 0] &= (lengths[:, 0] == 1) & (numbers[:, 0] <= 1) & ~negative[:, 0]
    ids, ids_legal = _digits(text, starts[category], lengths[category], 16, MAX_HEX_DIGITS)
    values = np.concatenate([np.where(negative, -numbers, numbers), np.where(lengths[category] == 0, MISSING, ids)], axis=1)
    return values, np.concatenate([numbers_legal, ids_legal], axis=1)


def _digits(text: Bytes, starts: Ints, lengths: Ints, base: int, most: int) -> tuple[Ints, Bools]:
    """Values of unsigned numbers in `text`, and whether each has at most `most` characters, all of them digits."""
    value_of = np.full(256, 255, np.uint8)
    for digit, character in enumerate("0123456789abcdef"[:base]):
        value_of[[ord(character), ord(character.upper())]] = digit
    values, legal = np.zeros(starts.shape, np.int64), lengths <= most
    for place in range(min(int(lengths.max(initial=0)), most)):
        inside = lengths > place
        digits = value_of[text[np.where(inside, starts + place, 0)]]
        legal &= ~inside | (digits < base)
        values = np.where(inside, values * base + digits, values)
    return values, legal


def _number(column: Ints, min_count: int, max_rows: int | None) -> tuple[Ints, Ints]:
    """The known ids of a column, ascending, and their table rows."""
    values, first, counts = np.unique(column, return_index=True, return_counts=True)
    known = (values != MISSING) & (counts >= min_count)
    values, first = values[known], first[known]
    numbers = np.empty(len(values), np.int64)
    numbers[first.argsort()] = np.arange(len(values))
    return values, 1 + (numbers if max_rows is None else numbers % (max_rows - 1))


def _look_up(values: Ints, numbers: Ints, column: Ints) -> Ints:
    if not len(values):
        return np.zeros(len(column), np.int64)
    place = np.searchsorted(values, column).clip(max=len(values) - 1)
    return np.where(values[place] == column, numbers[place], 0)


def _as_they_stand(path: str | os.PathLike[str], categories: Ints, rows: Sequence[int]) -> Ints:
    if len(rows) != NUM_CATEGORIES:
        raise ValueError(f"rows must give the size of {NUM_CATEGORIES} tables; got {len(rows)}")
    beyond = categories >= np.asarray(rows)
    if beyond.any():
        row, column = divmod(int(beyond.argmax()), NUM_CATEGORIES)
        value = int(categories[row, column])
        raise DataError(f"{os.fspath(path)}, line {row + 1}, field {CATEGORIES[column]}: id {value} (0x{value:x}) is beyond its table of "
                        f"{rows[column]} rows")
    return np.where(categories == MISSING, 0, categories)
