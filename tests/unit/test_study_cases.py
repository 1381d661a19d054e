"""The shared tuner cases, through adapters of at most five lines over `sparselift.tuning.study`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from sparselift.tuning import study

CASES = Path(__file__).parents[2] / ".." / "shared" / "cases"


def cold_start(path):
    return study.open_storage(path)


def space_change(path, space, seed):
    dimensions = {"tile": space["tile"], "threads": (1, space["threads"])}
    return study.run(dimensions, lambda p: p["tile"] / 1000 - p["threads"], study.open_storage(path), trials=8, seed=seed).params


def all_failed(objective):
    return study.run({"tile": [64, 128]}, lambda params: objective(), trials=3, default={"tile": 32}).params


def seeded_resume(path, trials, seed):
    def upto(total):
        return study.run({"x": (0.0, 1.0)}, lambda p: p["x"], study.open_storage(path), total, seed).trials
    return [trial.params["x"] for trial in upto(len(upto(0)) + trials)]


def killed_trial(path, budget, die):
    import os
    result = study.run({"x": (0.0, 1.0)}, lambda p: os.kill(os.getpid(), 9) if die else p["x"], study.open_storage(path), budget)
    return [trial.state.upper() for trial in result.trials]


ADAPTERS = {
    "47_tuner_sqlite_cold_start": cold_start,
    "48_tuner_space_change": space_change,
    "49_tuner_all_failed": all_failed,
    "51_tuner_seeded_resume": seeded_resume,
    "53_tuner_killed_trial": killed_trial,
}


def load(name: str) -> ModuleType:
    path = CASES / f"{name}.py"
    if not path.exists():
        pytest.skip(f"the shared case {name} is not here")
    spec = importlib.util.spec_from_file_location(f"case_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ADAPTERS)
def test_case_is_right(name):
    assert load(name).check(ADAPTERS[name]) == []
