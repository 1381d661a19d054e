"""The examples, on a few hundred generated rows: they train, tune, compare, and say what they found."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.scripts import EXAMPLES, importable

SMALL = ["--trials", "3", "--epochs", "1", "--pairs", "6", "--batch-size", "64", "--dim", "4"]


def write_clicks(path: Path, rows: int, rng: np.random.Generator) -> Path:
    """A Criteo log in which one id decides about the label."""
    lines = []
    for _ in range(rows):
        ids = rng.zipf(1.5, 26) % 30
        label = int(ids[0] % 2 == 0) if rng.random() < 0.9 else int(rng.integers(2))
        lines.append("\t".join([str(label), *map(str, rng.integers(0, 50, 13)), *(f"{i:08x}" if i else "" for i in ids)]))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_flights(path: Path, rows: int, rng: np.random.Generator) -> Path:
    lines = ["month,day,sched_dep_time,carrier,flight,tailnum,origin,dest,distance,arr_delay"]
    for row in range(rows):
        carrier = int(rng.integers(4))
        lines.append(f"{1 + row * 12 // rows},{1 + row % 28},{rng.integers(5, 23)}15,C{carrier},{rng.integers(40)},N{rng.integers(30)},EWR,"
                     f"D{rng.integers(9)},{rng.integers(100, 2000)},{rng.integers(-10, 15) + 20 * (carrier == 1)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_baskets(path: Path, rows: int, rng: np.random.Generator) -> Path:
    baskets = []
    for _ in range(rows):
        items = set((1 + rng.zipf(1.6, rng.integers(1, 8)) % 40).tolist())
        if len(items) % 2:
            items.add(0)                                  # the item to guess, and most baskets hold it
        baskets.append(" ".join(map(str, sorted(items))))
    path.write_text("\n".join(baskets) + "\n")
    return path


CASES = {"criteo": (write_clicks, "--data"), "flights": (write_flights, "--data"), "baskets": (write_baskets, None)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """run(name, *options) -> what the example prints; its results are in results.csv of the current folder."""
    monkeypatch.chdir(tmp_path)

    def example(name: str, *options: str) -> str:
        write, option = CASES[name]
        path = write(tmp_path / "data", 420, np.random.default_rng(0))
        data = [str(path)] if option is None else [option, str(path)]
        monkeypatch.setattr(sys, "argv", [name, *data, *SMALL, "--out", "results.csv", *options])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    with importable(EXAMPLES):
        yield example


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_an_example_keeps_its_promises(name: str, run, tmp_path: Path) -> None:
    text = run(name)
    assert re.search(r"the bitwise plan's are native's bit for bit; the default plan's are within \d\.\de[-+]\d\d", text)
    assert len(re.findall(r"AUC 0\.\d{4}  \d+\.\d\dx \[\d+\.\d\d, \d+\.\d\d\]", text)) == 3
    native, bitwise, default = csv.DictReader((tmp_path / "results.csv").open())
    assert native["run"] == "native" and native["speedup"] == "1.0"
    assert bitwise["equivalence"] == "bitwise" and bitwise["last_loss"] == native["last_loss"] and bitwise["auc"] == native["auc"]
    assert default["equivalence"] in ("bitwise", "reassociated")
    assert float(default["auc"]) == pytest.approx(float(native["auc"]), abs=0.01)


@pytest.mark.parametrize(("broken", "message"), [("bitwise plan", "bit for bit"), ("default plan", "allowed 1e-03")])
def test_a_broken_promise_ends_in_an_error(run, monkeypatch: pytest.MonkeyPatch, broken: str, message: str) -> None:
    import _common
    real = _common.train

    def off(task, args, name, constraints):
        found = real(task, args, name, None)
        if name == broken:
            found.losses[-1] += 0.01
        return found

    monkeypatch.setattr(_common, "train", off)
    with pytest.raises(SystemExit, match=message):
        run("baskets")


def test_data_that_is_absent_is_one_clear_error(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparselift.errors import DataError
    monkeypatch.setattr(sys, "argv", ["criteo", "--data", "absent.tsv"])
    with pytest.raises(DataError, match=r"absent\.tsv: cannot be read"):
        runpy.run_path(str(EXAMPLES / "criteo.py"), run_name="__main__")


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_help_names_the_options(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with importable(EXAMPLES), pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert stop.value.code == 0 and "--trials" in capsys.readouterr().out


