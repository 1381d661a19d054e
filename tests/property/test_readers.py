"""Whatever a file holds, a reader gives rows or a DataError that names the file."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparselift.datasets import Ragged, Tabular, read_baskets, read_criteo, read_flights
from sparselift.errors import DataError

READERS: list[Callable[[Path], Tabular | Ragged]] = [read_criteo, read_flights, read_baskets]
GOOD = {
    read_criteo: ("1\t" + "\t".join(["3"] * 13 + ["0a"] * 26) + "\n").encode(),
    read_flights: b"month,day,sched_dep_time,carrier,flight,tailnum,origin,dest,distance,arr_delay\n1,2,515,UA,1,N1,EWR,IAH,1400,16\n",
    read_baskets: b"1 2 3\n2 4\n",
}
INSERTS = st.binary(max_size=4) | st.sampled_from([b"\t", b"\n", b"-", b"\r\n", b","])
SPLICES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 4), INSERTS), max_size=4)


def spliced(content: bytes, splices: list[tuple[int, int, bytes]]) -> bytes:
    """`content` with some bytes replaced."""
    for place, length, insert in splices:
        place %= len(content) + 1
        content = content[:place] + insert + content[place + length:]
    return content


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(splices=SPLICES, copies=st.integers(1, 3), packed=st.booleans(), cut=st.integers(0, 40))
def test_rows_or_a_named_error(tmp_path: Path, read: Callable[[Path], Tabular | Ragged], splices: list[tuple[int, int, bytes]], copies: int,
                               packed: bool, cut: int) -> None:
    content = spliced(GOOD[read] * copies, splices)
    if packed:
        content = gzip.compress(content)
    path = tmp_path / "data"
    path.write_bytes(content[:len(content) - cut] if cut < 8 else content)
    try:
        found = read(path)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert len(found) == len(found.labels) == len(found.dense) > 0
        assert set(found.labels.tolist()) <= {0.0, 1.0}
        for ids, rows in zip(found.ids, found.rows):
            assert not len(ids) or (ids.min() >= 0 and ids.max() < rows)
        found.batches(2)
