"""Shopping baskets in the FIMI format: a line is a basket, its item ids separated by blanks.

The task: given the rest of a basket, does it hold the item that most baskets hold?
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sparselift.datasets.tabular import Ragged
from sparselift.datasets.text import bad_field, line_blocks
from sparselift.errors import DataError

PAIR_ROWS = 1 << 16
MAX_ID = 10**8

Ints = NDArray[np.int64]


def read_baskets(path: str | os.PathLike[str], *, limit: int | None = None) -> Ragged:
    """Baskets as two bags: `items`, the basket without the item to guess, and `pairs`, its neighbouring items, hashed together.

    A basket that holds nothing else gives empty bags. The dense feature is log(1 + number of items). Item ids are table rows as they
    stand; pairs fall on 65,536 rows.

    Parameters
    ----------
    path   plain, gzip or zip
    limit  baskets to read, from the start; None: all

    Raises
    ------
    DataError   names the file, line and item where the file does not hold item ids from 0 to 99,999,999
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1; got {limit}")
    items, lengths = _read(path, limit)
    if not len(items):
        raise DataError(f"{os.fspath(path)}: the baskets hold no items")
    basket_of = np.repeat(np.arange(len(lengths)), lengths)
    # An item counts once a basket: FIMI baskets are sets, but nothing in the format says so.
    target = np.bincount(np.unique(np.stack([items, basket_of]), axis=1)[0]).argmax()
    guessed = items == target
    labels = np.zeros(len(lengths), np.float32)
    labels[basket_of[guessed]] = 1
    rows = int(items.max()) + 1
    items, basket_of = items[~guessed], basket_of[~guessed]
    same = basket_of[1:] == basket_of[:-1]
    pairs = (items[:-1] * 1_000_003 + items[1:])[same] % PAIR_ROWS
    bags = [(items, _starts(basket_of, len(lengths))), (pairs, _starts(basket_of[1:][same], len(lengths)))]
    counts = np.diff(bags[0][1])
    return Ragged(torch.from_numpy(np.log1p(counts).astype(np.float32)[:, None]), tuple(torch.from_numpy(ids) for ids, _ in bags),
                  tuple(torch.from_numpy(starts) for _, starts in bags), torch.from_numpy(labels), (rows, PAIR_ROWS), ("items", "pairs"))


def _starts(basket_of: Ints, baskets: int) -> Ints:
    return np.concatenate([[0], np.bincount(basket_of, minlength=baskets).cumsum()]).astype(np.int64)


def _read(path: str | os.PathLike[str], limit: int | None) -> tuple[Ints, Ints]:
    """Items of all baskets, and the number of each basket's."""
    items: list[Ints] = []
    lengths: list[Ints] = []
    wanted = limit
    for first_line, block in line_blocks(path):
        lines = block.split(b"\n")[:-1][:wanted]
        words = [line.split() for line in lines]
        _check(path, first_line, words)
        items.append(np.array([word for basket in words for word in basket], dtype="S8").astype(np.int64))
        lengths.append(np.array([len(basket) for basket in words]))
        if wanted is not None and (wanted := wanted - len(lines)) <= 0:
            break
    return np.concatenate(items), np.concatenate(lengths)


def _check(path: str | os.PathLike[str], first_line: int, words: Sequence[Sequence[bytes]]) -> None:
    for line, basket in enumerate(words, first_line):
        for place, word in enumerate(basket, 1):
            if not (word.isdigit() and len(word) <= 8):
                raise bad_field(path, line, f"item {place}", f"must be an item id from 0 to {MAX_ID - 1}", word.decode("ascii"))
