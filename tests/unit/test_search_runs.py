"""Searches that are resumed, interrupted or out of time, and what they say meanwhile."""

from __future__ import annotations

import os
import re
import signal

import pytest

from sparselift.errors import SparseLiftError
from sparselift.progress import Progress
from sparselift.space import Constraints
from sparselift.tuning import search, trial_records
from tests.unit.search_models import Timer, comparison, run, small_workload


@pytest.fixture(scope="module")
def work():
    return small_workload()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def params_of(result):
    return [dict(record.params) for record in result.records]


def test_a_resumed_search_goes_on_where_it_ended(work, tmp_path):
    whole = run(work, trials=24, seed=3)
    path, calls = tmp_path / "s", 0
    for total in (1, 9, 24):
        timer = Timer()
        result = run(work, timer, storage=path, trials=total, seed=3)
        calls += sum(not thorough for _, _, thorough in timer.calls)
    assert params_of(result) == params_of(whole)
    assert result.plan.config == whole.plan.config
    timer = Timer()
    again = run(work, timer, storage=path, trials=24, seed=3)
    assert all(thorough for _, _, thorough in timer.calls), "nothing but the last measurements is repeated"
    assert again.plan.config == whole.plan.config
    assert trial_records(path) == again.records


@pytest.mark.parametrize(("good", "bad"), [
    (r'"speedup":\[[^]]*\]', '"speedup":[1,"x",1]'), (r'"native_s":\[[^]]*\]', '"native_s":[]'), (r'"values":\[[^]]*\]', '"values":["x"]'),
    (r'"confirmed":[0-9.]+', '"confirmed":{}'), (r'"pruned":false', '"pruned":3'), (r'"certificate":\{[^}]*\}', '"certificate":1'),
    (r'"seeds":\[\[', '"seeds":["xy",[')])
def test_damaged_facts_are_named_to_every_reader(work, tmp_path, good, bad):
    path = tmp_path / "s"
    run(work, storage=path, trials=3)
    text, changes = re.subn(good, bad, path.read_text(), count=1)
    assert changes
    path.write_text(text)
    for read in (lambda: trial_records(path), lambda: run(work, storage=path, trials=4)):
        with pytest.raises(SparseLiftError, match="damaged") as error:
            read()
        assert str(path) in str(error.value)


def test_other_constraints_are_another_study(work, tmp_path):
    path = tmp_path / "s"
    run(work, storage=path, trials=5)
    result = run(work, storage=path, trials=5, constraints=Constraints(equivalence="bitwise"))
    assert len(result.records) == 5
    assert trial_records(path) == result.records


@pytest.mark.parametrize("at", [1, 2, 3, 9])
def test_ctrl_c_in_a_trial_keeps_what_was_measured(work, tmp_path, at):
    path = tmp_path / "s"
    result = run(work, Timer(hooks={at: interrupt}), storage=path, trials=12)
    assert result.status == "interrupted"
    assert [record.reason for record in result.records if record.state == "failed"] == ["KeyboardInterrupt"]
    assert result.plan.evidence.status == ("unmeasured" if at == 1 else "interrupted")
    if at == 9:
        assert result.plan.config.path == "planned"
        assert result.plan.evidence.speedup.value > 1
        assert result.plan.certificate == {"checked": True}
    again = run(work, storage=path, trials=12)
    assert again.status == "complete"
    assert sum(record.state in ("complete", "pruned") for record in again.records) == 12


def test_ctrl_c_in_a_resumed_search_keeps_certificate_and_confirmed_speedup(work, tmp_path):
    class Flattering(Timer):
        def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
            found = super().__call__(incumbent, candidate, prune_below=prune_below, bar=bar, thorough=thorough)
            return found if bar or thorough or candidate.path == "native" else comparison(9.0, 0.010)

    path = tmp_path / "s"
    first = run(work, Flattering(), storage=path, trials=2).plan
    again = run(work, Timer(hooks={1: interrupt}), storage=path, trials=12)
    assert (again.status, again.plan.config) == ("interrupted", first.config)
    assert again.plan.certificate == first.certificate == {"checked": True}
    assert again.plan.evidence.speedup.value == pytest.approx(first.evidence.speedup.value), "not the trial's own nine"


def test_ctrl_c_in_the_last_measurements_keeps_the_best_by_its_trial(work):
    class Impatient(Timer):
        def __call__(self, incumbent, candidate, **options):
            if options.get("thorough") and not options.get("bar"):
                interrupt()
            return super().__call__(incumbent, candidate, **options)

    result = run(work, Impatient(), trials=10)
    assert (result.status, result.plan.evidence.status) == ("interrupted", "interrupted")
    assert result.plan.config.path == "planned"
    assert result.plan.evidence.native.value == pytest.approx(0.010)
    assert result.plan.evidence.default is not None


@pytest.mark.parametrize(("timeout", "waits"), [(None, False), (150_000.0, True), (250_000.0, False)])
def test_what_takes_long_to_set_up_waits_unless_there_is_time_for_it(work, monkeypatch, timeout, waits):
    """A configuration that takes 10,000 s is for searches of twenty times that, and others name it."""
    monkeypatch.setattr(search, "setup_s", lambda structure, config, first: 1e4 * (config.policy.get("concat") is False))
    result = run(work, trials=14, timeout=timeout)
    assert result.status == "complete"
    assert waits == all(params.get("concat") is not False for params in params_of(result))
    said = "left out: concat=False, which takes about 10000 s to set up; a search of 200000 s has time for it"
    assert waits == (said in result.plan.evidence.note)


def test_a_timeout_leaves_time_for_the_last_measurements(work, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(search.time, "perf_counter", lambda: now[0])

    class Slow(Timer):
        def __call__(self, incumbent, candidate, **options):
            now[0] += 10.0
            return super().__call__(incumbent, candidate, **options)

    timer = Slow()
    result = run(work, timer, trials=64, timeout=200.0)
    assert result.status == "timeout"
    assert now[0] <= 200
    assert any(thorough for _, _, thorough in timer.calls)
    assert len(result.records) >= 5
    overhead = result.plan.evidence.overhead
    assert overhead["wall_s"] == pytest.approx(now[0])
    assert overhead["timed_s"] == pytest.approx(0.5 * len(timer.calls))
    assert overhead["warmup_s"] == pytest.approx(0.25 * len(timer.calls))
    assert sum(seconds for name, seconds in overhead.items() if name != "wall_s") == pytest.approx(overhead["wall_s"])


@pytest.mark.parametrize("options", [{"trials": 0}, {"timeout": 0.0}, {"timeout": float("nan")}])
def test_illegal_budgets_are_refused(work, options):
    with pytest.raises(ValueError, match="at least 1"):
        run(work, **options)


def test_progress_tells_every_trial(work):
    class Told(Progress):
        def __init__(self):
            self.log = []

        def begin(self, title, total, done=0):
            self.log.append(("begin", total, done))

        def advance(self, text, best="", counts=True):
            self.log.append((text, best, counts))

        def end(self):
            self.log.append("end")

    told = Told()
    run(work, trials=5, progress=told)
    assert told.log[0] == ("begin", 5, 0)
    assert told.log[-1] == "end"
    assert len(told.log) == 7
    assert "default" in told.log[2][0] and "1.38x" in told.log[2][0]
    assert told.log[1][0].endswith("1.00x, and [1.00, 1.00] against itself: the noise")
    assert [entry[1] for entry in told.log[1:3]] == ["best: native", "best: trial 1, confirmed 1.38x"]


def test_the_default_is_tried_however_short_the_time(work):
    result = run(work, trials=64, timeout=1e-3)
    assert result.status == "timeout" and len(result.records) == 2
    assert result.plan.config.path == "planned"
