"""The Criteo reader: what a line becomes, and where and why a file is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from sparselift.datasets import read_criteo
from sparselift.datasets.criteo import FIELDS, NUM_CATEGORIES, NUM_DENSE, NUM_FIELDS, Vocabulary, read_columns
from sparselift.datasets.text import line_blocks
from sparselift.errors import DataError

REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "criteo_kaggle_8k.tsv.gz"


def line(label: object = 1, integers: dict[int, object] | None = None, ids: dict[int, object] | None = None) -> str:
    """A line with the given I and C fields, the others empty."""
    fields = [str(label)] + [str((integers or {}).get(i, "")) for i in range(1, 14)] + [str((ids or {}).get(i, "")) for i in range(1, 27)]
    return "\t".join(fields)


def write(tmp_path: Path, *lines: str, end: str = "\n") -> Path:
    path = tmp_path / "clicks.tsv"
    path.write_bytes("".join(text + end for text in lines).encode("latin-1"))
    return path


def random_lines(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [line(rng.integers(2), {i: rng.integers(-3, 10**6) for i in range(1, 14) if rng.random() < 0.8},
                 {i: f"{rng.integers(0, 40):08x}" for i in range(1, 27) if rng.random() < 0.9}) for _ in range(count)]


def plain_parse(lines: list[str]) -> np.ndarray:
    """The same values by a plain loop."""
    rows = []
    for text in lines:
        fields = text.split("\t")
        rows.append([int(fields[0])] + [int(f or 0) for f in fields[1:14]] + [int(f, 16) if f else -1 for f in fields[14:]])
    return np.array(rows)


def test_every_value_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    lines = random_lines(200)
    columns = read_columns(write(tmp_path, *lines))
    assert (np.column_stack([columns.labels, columns.integers, columns.categories]) == plain_parse(lines)).all()


@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/data/criteo_kaggle_8k.tsv.gz")
def test_real_clicks() -> None:
    lines = gzip.decompress(REAL.read_bytes()).decode().splitlines()
    columns = read_columns(REAL)
    assert (np.column_stack([columns.labels, columns.integers, columns.categories]) == plain_parse(lines)).all()


def test_dense_features_are_logs_and_missing_is_zero(tmp_path: Path) -> None:
    clicks = read_criteo(write(tmp_path, line(0, {1: 5, 2: -2, 3: ""}), line(1, {13: 10**9})))
    want = torch.zeros(2, NUM_DENSE)
    want[0, 0], want[1, 12] = np.log(6), np.log(1e9 + 1)
    assert clicks.dense.dtype == torch.float32
    torch.testing.assert_close(clicks.dense, want)
    assert clicks.labels.tolist() == [0, 1]


def test_ids_are_numbered_by_first_appearance_after_the_missing_one(tmp_path: Path) -> None:
    clicks = read_criteo(write(tmp_path, *(line(0, ids={1: id_}) for id_ in ("ff", "", "0", "FF", "7"))))
    assert clicks.ids[0].tolist() == [1, 0, 2, 1, 3]
    assert clicks.rows == (4,) + (1,) * 25
    assert (clicks.ids[1:] == 0).all()


def test_rare_and_unseen_ids_share_the_row_of_missing_ones() -> None:
    categories = np.tile(np.array([[7], [9], [7], [-1], [-1]]), (1, NUM_CATEGORIES))
    vocabulary = Vocabulary.build(categories, min_count=2)
    assert vocabulary.rows == (2,) * NUM_CATEGORIES
    assert vocabulary.encode(categories)[:, 3].tolist() == [1, 0, 1, 0, 0]
    assert vocabulary.encode(np.full((1, NUM_CATEGORIES), 8)).tolist() == [[0] * NUM_CATEGORIES]


def test_a_cap_wraps_ids_around_but_not_onto_the_missing_row(tmp_path: Path) -> None:
    path = write(tmp_path, line(), *(line(ids={5: f"{n:x}"}) for n in range(20)))
    clicks = read_criteo(path, max_rows=8)
    assert clicks.ids[4].tolist() == [0] + [1 + n % 7 for n in range(20)]
    assert clicks.rows[4] == 8


def test_ids_as_they_stand(tmp_path: Path) -> None:
    path = write(tmp_path, line(ids={1: "a", 2: ""}), line(ids={26: "3"}))
    clicks = read_criteo(path, rows=[11] * NUM_CATEGORIES)
    assert clicks.ids[:, 0].tolist() == [10] + [0] * 25
    assert clicks.ids[25].tolist() == [0, 3]
    with pytest.raises(DataError, match=r"clicks\.tsv, line 1, field C1: id 10 \(0xa\) is beyond its table of 10 rows"):
        read_criteo(path, rows=[10] * NUM_CATEGORIES)
    with pytest.raises(ValueError, match="26 tables; got 3"):
        read_criteo(path, rows=[1, 2, 3])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_compression_do_not_matter(tmp_path: Path, end: str) -> None:
    lines = random_lines(30)
    want = read_criteo(write(tmp_path, *lines))
    text = end.join(lines).encode()                                   # no newline at the end
    packed = tmp_path / "named_without_gz.tsv"
    packed.write_bytes(gzip.compress(text))
    plain = tmp_path / "plain.gz"
    plain.write_bytes(text)
    for path in (packed, plain):
        clicks = read_criteo(path)
        assert torch.equal(clicks.ids, want.ids) and torch.equal(clicks.dense, want.dense) and torch.equal(clicks.labels, want.labels)


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, *random_lines(10), "this line is never reached")
    assert len(read_criteo(path, limit=10)) == 10
    assert len(read_criteo(path, limit=3)) == 3
    with pytest.raises(DataError, match="line 11"):
        read_criteo(path, limit=11)
    with pytest.raises(ValueError, match="limit must be at least 1; got 0"):
        read_criteo(path, limit=0)


def test_blocks_hold_whole_lines_and_count_them(tmp_path: Path) -> None:
    lines = [f"line {i} " + "x" * (i % 7) for i in range(1, 100)]
    path = write(tmp_path, *lines)
    seen = []
    for first, block in line_blocks(path, block_bytes=32):
        assert block.endswith(b"\n")
        for number, text in enumerate(block.decode().splitlines(), first):
            assert text == lines[number - 1]
            seen.append(number)
    assert seen == list(range(1, 100))


def test_an_error_beyond_the_first_block_names_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_blocks, "__defaults__", (256,))
    path = write(tmp_path, *random_lines(40), line(ids={3: "xyz"}))
    with pytest.raises(DataError, match="line 41, field C3"):
        read_criteo(path)


@pytest.mark.parametrize(("bad", "message"), [
    (line(2), "field label: must be 0 or 1; got '2'"),
    (line(""), "field label: must be 0 or 1; got ''"),
    (line("-1"), "field label: must be 0 or 1; got '-1'"),
    (line("01"), "field label: must be 0 or 1; got '01'"),
    (line(1, {4: "1.5"}), "field I4: must be an integer of at most 18 digits, or empty; got '1.5'"),
    (line(1, {1: "-"}), "field I1: must be an integer .* got '-'"),
    (line(1, {13: "9" * 19}), "field I13: must be an integer .* got '9{19}'"),
    (line(1, {2: "1a"}), "field I2: must be an integer"),
    (line(1, {2: " 1"}), "field I2: must be an integer"),
    (line(ids={1: "68fd1e6g"}), "field C1: must be a hexadecimal id of at most 8 digits, or empty; got '68fd1e6g'"),
    (line(ids={26: "123456789"}), "field C26: must be a hexadecimal id .* got '123456789'"),
    (line(ids={7: "-1"}), "field C7: must be a hexadecimal id"),
    (line(ids={7: "z" * 1000}), r"field C7: must be a hexadecimal id .* got 'z{40}\.\.\.'"),
    (line().rsplit("\t", 1)[0], "a line must have 40 fields separated by tabs; got 39"),
    (line() + "\t", "a line must have 40 fields separated by tabs; got 41"),
    ("", "a line must have 40 fields separated by tabs; got 1"),
    (line(ids={2: "\xe9"}), "the file must be ASCII text; got byte 0xe9"),
    (line(ids={2: "\0"}), "the file must be ASCII text; got byte 0x00"),
])
def test_a_bad_line_is_named_with_field_and_value(tmp_path: Path, bad: str, message: str) -> None:
    path = write(tmp_path, line(), line(0), bad, line())
    with pytest.raises(DataError, match=rf"clicks\.tsv, line 3[,:] {message}"):
        read_criteo(path)


def test_the_first_of_several_faults_is_the_one_reported(tmp_path: Path) -> None:
    path = write(tmp_path, line(), line(ids={9: "?"}), "too short", line(3))
    with pytest.raises(DataError, match="line 2, field C9"):
        read_criteo(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    empty, cut, damaged, endless = (tmp_path / name for name in ("empty.tsv", "cut.gz", "damaged.gz", "endless"))
    empty.write_bytes(b"")
    packed = gzip.compress("\n".join(random_lines(500)).encode())
    cut.write_bytes(packed[:len(packed) // 2])
    damaged.write_bytes(packed[:300] + bytes(200) + packed[500:])
    endless.write_bytes(b"a" * (6 << 20))
    for path, message in ((empty, "empty"), (cut, "the compressed stream ends early; the file was cut"), (damaged, "damaged"),
                          (tmp_path, "is a directory"), (tmp_path / "absent", "cannot be read: No such file"),
                          (endless, "line 1: a line must be at most")):
        with pytest.raises(DataError, match=message) as error:
            read_criteo(path)
        assert str(path) in str(error.value)
    empty.write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match="empty"):
        read_criteo(empty)


def test_batches_are_dlrms_and_cover_the_rows(tmp_path: Path) -> None:
    clicks = read_criteo(write(tmp_path, *random_lines(25)))
    batches = clicks.batches(10)
    assert [len(batch.labels) for batch in batches] == [10, 10, 5]
    assert len(clicks.batches(10, drop_last=True)) == 2
    first = batches[0]
    assert first.dense.shape == (10, NUM_DENSE) and first.labels.shape == (10, 1)
    assert first.offsets.tolist() == [list(range(10))] * NUM_CATEGORIES
    assert torch.equal(torch.stack(first.indices), clicks.ids[:, :10])
    assert all(ids.is_contiguous() for ids in first.indices)
    train, test = clicks.split(0.6)
    assert len(train) == 15 and torch.equal(torch.cat([train.ids, test.ids], 1), clicks.ids)
    for share in (0.0, 1.0, 2.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            clicks.split(share)


def test_bad_vocabulary_settings() -> None:
    one = np.zeros((1, NUM_CATEGORIES), np.int64)
    with pytest.raises(ValueError, match=r"max_rows must be at least 2 .* got 1"):
        Vocabulary.build(one, max_rows=1)
    with pytest.raises(ValueError, match="min_count must be at least 1; got 0"):
        Vocabulary.build(one, min_count=0)
    assert len(FIELDS) == NUM_FIELDS == 40
