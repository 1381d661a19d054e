from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparselift import canonical


@dataclass(frozen=True)
class Inner:
    size: int
    label: str | None = None


@dataclass(frozen=True)
class Outer:
    names: tuple[str, ...]
    pair: tuple[int, float]
    inner: Inner | None
    values: Mapping[str, str | int | bool]
    anything: Any = None


EXAMPLE = Outer(("a", "b"), (1, 0.5), Inner(3, "x"), {"k": True, "n": 1}, [1, {"z": None}])


def test_text_is_sorted_rounded_and_ends_with_a_newline() -> None:
    assert canonical.dumps({"b": 1, "a": (1.00000000001, "é")}) == '{\n  "a": [\n    1.0,\n    "é"\n  ],\n  "b": 1\n}\n'


def test_rounding_is_idempotent() -> None:
    once = canonical.rounded([1 / 3, 1e-30 / 7, 123456789.123])
    assert once != [1 / 3, 1e-30 / 7, 123456789.123]
    assert canonical.rounded(once) == once


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_numbers_that_json_lacks_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="finite"):
        canonical.dumps(value)


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, {1, 2}])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        canonical.dumps(value)


def test_digest_depends_on_values_alone() -> None:
    assert canonical.digest({"a": 1, "b": 2}) == canonical.digest({"b": 2, "a": 1})
    assert canonical.digest({"a": 1}) != canonical.digest({"a": True})
    assert len(canonical.digest({}, 32)) == 32


def test_decode_inverts_plain() -> None:
    assert canonical.decode(Outer, canonical.plain(EXAMPLE), "it") == EXAMPLE


@pytest.mark.parametrize(("change", "message"), [
    ({"names": "ab"}, "it.names must be a list; got 'ab'"),
    ({"names": ["a", 3]}, r"it.names\[1\] must be a string; got 3"),
    ({"pair": [1]}, "it.pair must be a list of 2"),
    ({"pair": [True, 1.0]}, r"it.pair\[0\] must be a whole number; got True"),
    ({"inner": {"size": 1}}, "it.inner lacks the field 'label'"),
    ({"inner": {"size": 1, "label": None, "lable": 2}}, "it.inner has the unknown field 'lable'"),
    ({"inner": 4}, "it.inner must be an object with the fields"),
    ({"values": {"k": None}}, "it.values.k must be a string or a whole number or true or false; got None"),
])
def test_decode_names_the_field_and_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canonical.decode(Outer, {**canonical.plain(EXAMPLE), **change}, "it")


def test_decode_takes_whole_numbers_as_floats_but_not_the_reverse() -> None:
    assert canonical.decode(tuple[int, float], [1, 2], "it") == (1, 2.0)
    with pytest.raises(ValueError, match=r"it\[0\] must be a whole number"):
        canonical.decode(tuple[int, float], [1.5, 2], "it")


def test_write_replaces_whole_files_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    canonical.write_atomic(path, "one")
    canonical.write_atomic(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["file.json"]


def test_whoever_has_the_file_open_keeps_reading_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    canonical.write_atomic(path, "old")
    with open(path) as reader:
        canonical.write_atomic(path, "new")
        assert reader.read() == "old"


def test_write_follows_links(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    canonical.write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    canonical.write_atomic(tmp_path / "ours", "")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_unwritable_places_are_named_and_lose_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "file.json"
    with pytest.raises(OSError, match=r"cannot write.*nowhere/file\.json"):
        canonical.write_atomic(missing, "text")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kept").write_text("old")
    with pytest.raises(OSError, match="cannot write"):
        canonical.write_atomic(folder, "text")
    assert (folder / "kept").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["folder"]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        canonical.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.json"]
