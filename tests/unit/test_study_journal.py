"""Study files: creation races, torn records, files that are something else."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time

import pytest

from sparselift.errors import SparseLiftError
from sparselift.tuning import study

CONTEXT = multiprocessing.get_context("fork")
SPACE = {"x": (0.0, 1.0)}


def objective(params):
    return params["x"]


def fill(path, trials=4):
    return study.run(SPACE, objective, study.open_storage(path), trials=trials)


def values(result):
    return [(t.number, t.value) for t in result.trials if t.value is not None]


def test_a_file_cut_anywhere_keeps_every_whole_record(tmp_path):
    path = tmp_path / "s"
    whole = values(fill(path))
    content = path.read_bytes()
    boundaries = {0} | {i + 1 for i, byte in enumerate(content) if byte == ord("\n")}
    cuts = sorted({*range(0, len(content), 97), *boundaries, *(b - 1 for b in boundaries if b), *(b + 1 for b in boundaries)})
    for cut in (c for c in cuts if c <= len(content)):
        path.write_bytes(content[:cut])
        torn = tmp_path / "s.torn"
        torn.unlink(missing_ok=True)
        found = study.read_studies(study.open_storage(path))
        kept = max(b for b in boundaries if b <= cut)
        assert path.read_bytes() == content[:kept]
        assert (torn.read_bytes() if torn.exists() else b"") == content[kept:cut], "nothing may be lost"
        assert all(values(result) == whole[:len(values(result))] for result in found.values())


def test_a_cut_study_resumes_to_its_budget(tmp_path, caplog):
    path = tmp_path / "s"
    before = values(fill(path))
    content = path.read_bytes()
    path.write_bytes(content[:len(content) // 2])
    with caplog.at_level(logging.WARNING, "sparselift"):
        after = fill(path)
    assert len(values(after)) == 4
    assert values(after)[0] == before[0]
    assert str(path) in caplog.text and "torn" in caplog.text
    assert content[:len(content) // 2].endswith((tmp_path / "s.torn").read_bytes())


def test_records_after_a_broken_one_move_aside_with_it(tmp_path):
    path = tmp_path / "s"
    fill(path)
    lines = path.read_bytes().splitlines(keepends=True)
    broken = [*lines[:5], b'{"op_code":4,"wor' + lines[5], *lines[6:]]
    path.write_bytes(b"".join(broken))
    study.open_storage(path)
    assert path.read_bytes() == b"".join(lines[:5])
    assert (tmp_path / "s.torn").read_bytes() == b"".join(broken[5:])


def test_a_record_torn_while_the_file_is_open_is_cut_before_the_next_one(tmp_path):
    path = tmp_path / "s"
    storage = study.open_storage(path)
    study.run(SPACE, objective, storage, trials=2)
    with open(path, "ab") as file:
        file.write(b'{"op_code":4,"worker_id":"a killed wr')
    assert len(values(study.run(SPACE, objective, storage, trials=4))) == 4
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
    assert (tmp_path / "s.torn").read_bytes() == b'{"op_code":4,"worker_id":"a killed wr'


@pytest.mark.parametrize("content", [
    b"hello\n", b"hello", b"\n", b"[1, 2]\n", b'{"schema": 1}\n', b'{\n  "schema": 1\n}\n', b"SQLite format 3\x00\x10\x00", b"\x80\x04",
    b'"op_code"\n',
])
def test_another_kind_of_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "s"
    path.write_bytes(content)
    with pytest.raises(SparseLiftError, match="is not a study file") as error:
        study.open_storage(path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["s"]


def test_records_that_contradict_each_other_are_refused(tmp_path):
    path = tmp_path / "s"
    path.write_bytes(b'{"op_code":4,"worker_id":"w"}\n')
    with pytest.raises(SparseLiftError, match=r"study file .*/s is damaged: .*\(line 1\)"):
        study.open_storage(path)


def leaves(value, path=()):
    """Paths of everything in a record."""
    if path:
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(item, (*path, key))


def damaged(path):
    """Write copies of a study file in which one value is another, one after the other; the places of each record kind are tried once."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    seen = set()
    for number, record in enumerate(records):
        for place in leaves(record):
            kind = (record["op_code"], *place)
            for value in (None, "x", {}, -1, 99) if kind not in seen else ():
                changed = copy.deepcopy(record)
                inner = changed
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
                lines = [*records[:number], changed, *records[number + 1:]]
                path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
                yield
            seen.add(kind)


def test_a_study_with_any_one_value_replaced_is_refused_by_name_or_read(tmp_path):
    path = tmp_path / "s"
    space = {"x": (0.0, 1.0), "way": ["a", "b"]}

    def some_infeasible(params):
        return study.Infeasible("no") if params["way"] == "b" else study.Measured(params["x"], {"seen": [1]})

    study.run(space, some_infeasible, study.open_storage(path), trials=2, seeds=[{"x": 0.5, "way": "b"}], about={"what": "test"})
    refused = 0
    for _ in damaged(path):
        for read in (lambda: study.read_studies(str(path)), lambda: study.run(space, some_infeasible, str(path), trials=3)):
            try:
                read()
            except SparseLiftError as error:
                assert str(path) in str(error)
                refused += 1
    assert refused > 80


def test_an_empty_file_is_a_new_study(tmp_path):
    path = tmp_path / "s"
    path.touch()
    assert len(values(fill(path))) == 4


@pytest.mark.parametrize("make", [lambda path: path / "missing" / "s", lambda path: path])
def test_a_place_that_cannot_be_opened_is_named(tmp_path, make):
    with pytest.raises(SparseLiftError, match="cannot be opened") as error:
        study.open_storage(make(tmp_path))
    assert str(make(tmp_path)) in str(error.value)


def test_reading_does_not_create(tmp_path):
    with pytest.raises(SparseLiftError, match="does not exist"):
        study.read_studies(str(tmp_path / "s"))
    assert os.listdir(tmp_path) == []


def test_only_the_study_file_is_left_behind(tmp_path):
    fill(tmp_path / "s")
    assert os.listdir(tmp_path) == ["s"]


def test_a_study_file_is_not_pickled(tmp_path):
    with pytest.raises(TypeError, match="open_storage"):
        pickle.dumps(study.open_storage(tmp_path / "s"))


def _hold(path, ready):
    with study.open_storage(path).exclusive():
        ready.set()
        time.sleep(60)


def test_a_killed_holder_of_the_lock_blocks_nobody(tmp_path):
    path, ready = tmp_path / "s", CONTEXT.Event()
    child = CONTEXT.Process(target=_hold, args=(path, ready))
    child.start()
    assert ready.wait(30)
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    assert len(values(fill(path))) == 4


def test_threads_of_one_process_share_a_file(tmp_path):
    storage = study.open_storage(tmp_path / "s")
    runs = [threading.Thread(target=study.run, args=(SPACE, objective, storage, 12)) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    (result,) = study.read_studies(storage).values()
    assert 12 <= len(values(result)) <= 15


def _create(path, gate):
    gate.wait(30)
    try:
        study.run(SPACE, objective, study.open_storage(path), trials=1)
    except BaseException:
        os._exit(1)
    os._exit(0)


def test_twelve_processes_create_one_file_at_once(tmp_path):
    for attempt in range(3):
        path, gate = tmp_path / f"s{attempt}", CONTEXT.Barrier(12)
        children = [CONTEXT.Process(target=_create, args=(path, gate)) for _ in range(12)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0] * 12
        (result,) = study.read_studies(str(path)).values()
        assert len(values(result)) >= 1
