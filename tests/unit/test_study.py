"""Studies: proposals, records, resume. Journals have a file of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import optuna
import pytest

from sparselift.tuning import owner, study
from sparselift.tuning.study import Infeasible, Measured

CONTEXT = multiprocessing.get_context("fork")


def conditional(trial):
    if trial.suggest_categorical("path", ["native", "planned"]) == "planned":
        trial.suggest_categorical("prefetch", [0, 4, 8, 16, 32])
        if trial.suggest_categorical("update", ["native", "fused"]) == "fused":
            trial.suggest_categorical("coalesce", ["chain", "none"])
        trial.suggest_float("share", 0.0, 1.0)


def cost(params):
    return 2.0 if params["path"] == "native" else 1.0 + abs(params["prefetch"] - 8) / 32 + params["share"] / 10


def params_of(result):
    return [dict(trial.params) for trial in result.trials]


def states_of(result):
    return [trial.state for trial in result.trials]


def test_finds_the_minimum_of_a_small_space():
    result = study.run({"a": [1, 2, 3], "b": (0, 3)}, lambda p: p["a"] * 10 + p["b"], trials=12)
    assert result.status == "complete"
    assert result.params == {"a": 1, "b": 0}
    assert result.best.value == 10.0
    assert len({json.dumps(p, sort_keys=True) for p in params_of(result)}) == 12, "a configuration was tried twice"


def test_ranges_keep_their_types_and_bounds():
    result = study.run({"i": (3, 5), "f": (0, 1.0)}, lambda p: p["f"], trials=20)
    assert {type(p["i"]) for p in params_of(result)} == {int}
    assert all(3 <= p["i"] <= 5 and isinstance(p["f"], float) and 0 <= p["f"] <= 1 for p in params_of(result))


@pytest.mark.parametrize("space, named", [
    ({"x": (2, 1)}, "low <= high"), ({"x": (0.0, float("inf"))}, "finite"), ({"x": (1, 2, 3)}, "range"), ({"x": (True, 2)}, "range"),
    ({"x": []}, "list"), ({"x": [1, 1]}, "repeats"), ({"x": [[1]]}, "must be a list of"), ({"x": "ab"}, "list"),
])
def test_an_illegal_space_is_refused_by_name(space, named):
    with pytest.raises(ValueError, match=r"space\['x'\]") as error:
        study.run(space, lambda p: 0.0)
    assert named in str(error.value)


def test_other_illegal_arguments_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        study.run({"x": [1]}, lambda p: 0.0, trials=-1)
    with pytest.raises(ValueError, match="at least 0"):
        study.run({"x": [1]}, lambda p: 0.0, seed=-1)
    with pytest.raises(ValueError, match="fingerprint"):
        study.run(conditional, cost)


@pytest.mark.parametrize("first", [1, 13])
def test_a_resumed_study_proposes_what_an_uninterrupted_one_does(tmp_path, first):
    whole = study.run(conditional, cost, trials=18, seed=5, fingerprint="v1")
    path = str(tmp_path / "s")
    study.run(conditional, cost, study.open_storage(path), trials=first, seed=5, fingerprint="v1")
    parts = study.run(conditional, cost, study.open_storage(path), trials=18, seed=5, fingerprint="v1")
    assert params_of(parts) == params_of(whole)
    assert len(whole.trials) == 18
    assert whole.params["path"] == "planned"


def test_another_seed_proposes_something_else():
    one, two = (study.run(conditional, cost, trials=12, seed=seed, fingerprint="v1") for seed in (1, 2))
    assert params_of(one) != params_of(two)


def test_every_second_proposal_differs_from_the_best_in_one_parameter():
    space = {f"p{i}": [0, 1, 2] for i in range(8)}
    found = study.run(space, lambda p: sum(abs(value - i % 3) for i, value in enumerate(p.values())), trials=40,
                      seeds=[dict.fromkeys(space, 0)])
    for number in range(1, 40, 2):
        best = min(found.trials[:number], key=lambda trial: (trial.value, trial.number))
        assert sum(found.trials[number].params[name] != value for name, value in best.params.items()) == 1
    assert found.best.value == 0, "every parameter counts by itself: steps to a better neighbour end at the optimum"


def test_the_neighbours_of_a_number_in_a_range_are_beside_it():
    space = {"whole": (0, 9), "real": (0.0, 2.0)}
    found = study.run(space, lambda p: abs(p["whole"] - 3) + p["real"], trials=2, seeds=[{"whole": 9, "real": 1.0}])
    moved = {name: value for name, value in found.trials[1].params.items() if value != found.trials[0].params[name]}
    assert len(moved) == 1 and moved.items() <= {"whole": 8, "real": 0.8}.items() | {"real": 1.2}.items()


def test_neighbours_stay_in_the_space_where_one_choice_opens_others():
    found = study.run(conditional, cost, trials=30, seed=2, fingerprint="v1", seeds=[{"path": "native"}])
    for trial in found.trials:
        assert ("prefetch" in trial.params) == (trial.params["path"] == "planned")
        assert ("coalesce" in trial.params) == (trial.params.get("update") == "fused")
    assert found.best.value < 1.1


def test_proposals_do_not_depend_on_the_hash_seed():
    program = ("import json\nfrom sparselift.tuning import study\nfrom test_study import conditional, cost\n"
               "print(json.dumps([dict(t.params) for t in study.run(conditional, cost, trials=16, seed=3, fingerprint='v1').trials]))")
    other = subprocess.run([sys.executable, "-c", program], cwd=os.path.dirname(__file__), check=True, capture_output=True,
                           env={**os.environ, "PYTHONHASHSEED": "1"})
    assert json.loads(other.stdout) == params_of(study.run(conditional, cost, trials=16, seed=3, fingerprint="v1"))


def test_the_budget_counts_earlier_trials(tmp_path):
    calls = []
    path = str(tmp_path / "s")
    for total in (4, 4, 6):
        result = study.run({"x": (0.0, 1.0)}, lambda p: calls.append(p) or p["x"], study.open_storage(path), trials=total)
    assert len(calls) == len(result.trials) == 6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), None, "fast", ZeroDivisionError("by zero\nsecond line")])
def test_unusable_values_fail_and_never_win(bad):
    def objective(params):
        if params["x"] != 1:
            if isinstance(bad, Exception):
                raise bad
            return bad
        return 5.0

    result = study.run({"x": [1, 2, 3]}, objective, trials=3, default={"x": 0})
    assert result.params == {"x": 1}
    assert sorted(states_of(result)) == ["complete", "failed", "failed"]
    assert all(t.reason and "second line" not in t.reason for t in result.trials if t.state == "failed")
    assert sorted(t.state.name for t in result.study.trials) == ["COMPLETE", "FAIL", "FAIL"]


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_durations_must_be_positive_where_asked(bad):
    result = study.run({"x": [1, 2]}, lambda p: bad if p["x"] == 1 else 3.0, trials=2, positive=True)
    assert result.params == {"x": 2}
    assert study.run({"x": [1]}, lambda p: bad, trials=1).best.value == bad


def test_when_all_fail_the_default_is_given_and_the_run_ends():
    result = study.run({"x": (0.0, 1.0)}, lambda p: 1 / 0, trials=50, default={"x": 0.5}, max_failures=4)
    assert (result.best, result.params, result.status) == (None, {"x": 0.5}, "failing")
    assert states_of(result) == ["failed"] * 4
    assert result.trials[0].reason == "ZeroDivisionError: division by zero"


def test_a_success_resets_the_count_of_failures():
    outcomes = iter([1 / 3, None, None, 1 / 3, None, None, 1 / 3])
    result = study.run({"x": (0.0, 1.0)}, lambda p: next(outcomes), trials=3, max_failures=3)
    assert result.status == "complete"


def test_values_stored_by_others_never_win(tmp_path):
    storage = study.open_storage(tmp_path / "s")
    result = study.run({"x": (0.0, 1.0)}, lambda p: p["x"], storage, trials=3)
    worst = optuna.trial.create_trial(value=float("-inf"), params={"x": 0.5},
                                      distributions={"x": optuna.distributions.FloatDistribution(0.0, 1.0)})
    result.study.add_trial(worst)
    again = study.run({"x": (0.0, 1.0)}, lambda p: p["x"], storage, trials=16)
    assert again.trials[3].state == "failed"
    assert again.best.value >= 0


def test_a_space_that_is_used_up_ends_the_run():
    result = study.run({"x": [1, 2], "y": [1, 2]}, lambda p: p["x"] + p["y"], trials=50)
    assert (result.status, len(result.trials)) == ("exhausted", 4)


def test_infeasible_trials_have_no_value_and_are_told_to_optuna():
    def objective(params):
        return Infeasible("too much memory", {"bytes": 9}) if params["x"] < 3 else params["x"]

    result = study.run({"x": [1, 2, 3, 4]}, objective, trials=2)
    assert result.params == {"x": 3}
    refused = [t for t in result.trials if t.state == "infeasible"]
    assert all(t.value is None and t.reason == "too much memory" and t.attrs == {"bytes": 9} for t in refused)
    for trial in result.study.trials:
        assert (trial.state.name == "PRUNED") == (trial.params["x"] < 3) == any(v > 0 for v in trial.constraints.values())


def test_endless_infeasibility_ends():
    result = study.run({"x": (0.0, 1.0)}, lambda p: Infeasible("no"), trials=1, default={"x": 9})
    assert result.status == "exhausted"
    assert result.params == {"x": 9}


def test_seeds_come_first_and_once(tmp_path):
    path = str(tmp_path / "s")
    seeds = [{"path": "native"}, {"path": "planned", "prefetch": 8, "update": "native", "share": 0.5}, {"path": "native"}]
    for total in (1, 2, 5):
        result = study.run(conditional, cost, study.open_storage(path), total, 0, fingerprint="v1", seeds=seeds)
    assert params_of(result)[:2] == seeds[:2]
    assert params_of(result).count({"path": "native"}) == 1


def test_a_seed_outside_the_space_is_refused():
    with pytest.raises(ValueError, match="prefetch"):
        study.run(conditional, cost, fingerprint="v1", seeds=[{"path": "planned"}])


def test_measured_values_keep_their_facts(tmp_path):
    path = str(tmp_path / "s")
    study.run({"x": [1, 2]}, lambda p: Measured(p["x"], {"low": 0.5, "who": ["a"]}), study.open_storage(path), trials=2,
              about={"workload": "w"})
    found = study.read_studies(path)
    assert [t.attrs for result in found.values() for t in result.trials] == [{"low": 0.5, "who": ["a"]}] * 2
    assert [result.study.user_attrs["about"] for result in found.values()] == [{"workload": "w"}]


def test_another_space_is_another_study_in_the_same_file(tmp_path):
    storage = study.open_storage(tmp_path / "s")
    study.run({"tile": [32, 64], "threads": (1, 64)}, lambda p: p["tile"] / 1000 - p["threads"], storage, trials=8)
    new = study.run({"tile": [32, 64, 128], "threads": (1, 8)}, lambda p: p["tile"] / 1000 - p["threads"], storage, trials=8)
    assert new.params["threads"] <= 8
    assert [len(result.trials) for result in study.read_studies(storage).values()] == [8, 8]


def test_stop_and_on_trial_are_asked_and_told():
    seen = []
    result = study.run({"x": (0.0, 1.0)}, lambda p: p["x"], trials=9, stop=lambda: "timeout" if len(seen) == 3 else None,
                       on_trial=lambda trial, standing: seen.append((trial.number, standing.best.value)))
    assert result.status == "timeout"
    assert [number for number, _ in seen] == [0, 1, 2]
    assert seen[-1][1] == result.best.value == min(t.value for t in result.trials)


def test_ctrl_c_keeps_everything_and_the_same_call_resumes(tmp_path):
    calls = []

    def objective(params):
        calls.append(params)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return params["x"]

    path = str(tmp_path / "s")
    result = study.run({"x": (0.0, 1.0)}, objective, study.open_storage(path), trials=5)
    assert (result.status, states_of(result)) == ("interrupted", ["complete", "complete", "interrupted"])
    assert result.best is not None
    again = study.run({"x": (0.0, 1.0)}, objective, study.open_storage(path), trials=5)
    assert (again.status, states_of(again).count("complete"), len(calls)) == ("complete", 5, 6)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_the_storage(tmp_path, monkeypatch):
    storage = study.open_storage(tmp_path / "s")
    create = storage.create_new_trial

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return create(*arguments)

    monkeypatch.setattr(storage, "create_new_trial", interrupted)
    result = study.run({"x": (0.0, 1.0)}, lambda p: p["x"], storage, trials=5)
    assert (result.status, states_of(result)) == ("interrupted", ["interrupted"])


def test_what_ends_the_program_closes_the_trial_and_goes_on(tmp_path):
    def objective(params):
        raise SystemExit(3)

    path = str(tmp_path / "s")
    with pytest.raises(SystemExit):
        study.run({"x": (0.0, 1.0)}, objective, study.open_storage(path), trials=5)
    assert [states_of(result) for result in study.read_studies(path).values()] == [["interrupted"]]


def _run_and_die(path, seeds):
    study.run({"x": (0.0, 1.0)}, lambda p: os.kill(os.getpid(), signal.SIGKILL), study.open_storage(path), trials=3, seeds=seeds)


def killed(path, seeds=()):
    child = CONTEXT.Process(target=_run_and_die, args=(path, seeds))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL


def test_a_killed_trial_is_closed_and_made_up_for(tmp_path):
    path = str(tmp_path / "s")
    killed(path)
    result = study.run({"x": (0.0, 1.0)}, lambda p: p["x"], study.open_storage(path), trials=2)
    assert states_of(result) == ["lost", "complete", "complete"]
    assert [t.state.name for t in result.study.trials] == ["FAIL", "COMPLETE", "COMPLETE"]


def test_a_configuration_that_kills_its_process_twice_is_given_up(tmp_path):
    path, seeds = str(tmp_path / "s"), [{"x": 0.25}]
    killed(path, seeds)
    killed(path, seeds)
    result = study.run({"x": (0.0, 1.0)}, lambda p: p["x"], study.open_storage(path), trials=1, seeds=seeds)
    assert [t.params["x"] == 0.25 for t in result.trials] == [True, True, False]


def test_the_trial_of_a_live_process_is_left_alone(tmp_path):
    storage = study.open_storage(tmp_path / "s")
    inner = []

    def objective(params):
        if not inner:
            inner.append(None)
            inner[0] = study.run({"x": (0.0, 1.0)}, lambda p: p["x"], study.open_storage(storage.path), trials=2)
        return params["x"]

    study.run({"x": (0.0, 1.0)}, objective, storage, trials=3)
    assert states_of(inner[0]) == ["running", "complete", "complete"]
    assert states_of(next(iter(study.read_studies(storage).values()))) == ["complete"] * 3


def test_owners_are_told_apart():
    me = owner.myself()
    assert owner.lives(me) is True
    assert owner.lives({**me, "start": "1"}) is False, "a reused pid is another process"
    assert owner.lives({**me, "boot": "another"}) is False
    assert owner.lives({**me, "pid": 0}) is False
    assert owner.lives({**me, "host": "elsewhere"}) is None
    assert owner.lives({}) is None


def test_a_zombie_runs_nothing():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)    # dead, and not yet reaped
    try:
        assert owner.lives({**owner.myself(), "pid": pid}) is False
    finally:
        os.waitpid(pid, 0)


@pytest.mark.parametrize("age_s, expected", [(60, "running"), (24 * 3600, "lost")])
def test_owners_elsewhere_count_as_dead_after_a_while(tmp_path, monkeypatch, age_s, expected):
    path = str(tmp_path / "s")
    monkeypatch.setattr(owner, "myself", lambda: {"host": "elsewhere", "boot": "b", "pid": 1, "start": "1"})
    killed(path)
    now = study.time.time()
    monkeypatch.setattr(study.time, "time", lambda: now + age_s)
    result = study.run({"x": (0.0, 1.0)}, lambda p: p["x"], study.open_storage(path), trials=1)
    assert states_of(result) == [expected, "complete"]


def _work(path, gate):
    gate.wait(30)
    study.run({"x": (0.0, 1.0)}, lambda p: p["x"], study.open_storage(path), trials=12)


def test_processes_share_a_study(tmp_path):
    path, gate = str(tmp_path / "s"), CONTEXT.Barrier(4)
    children = [CONTEXT.Process(target=_work, args=(path, gate)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    (result,) = study.read_studies(path).values()
    assert 12 <= states_of(result).count("complete") <= 15
    assert set(states_of(result)) == {"complete"}
    assert len({t.params["x"] for t in result.trials}) == len(result.trials)
