"""The trials of a search as plans and reports hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparselift.errors import SparseLiftError
from sparselift.plan import TrialRecord
from sparselift.tuning.study import Storage, StudyResult, StudyTrial, read_studies

OTHER = "search"                   # the label of what is no seed


def trial_records(storage: Storage) -> tuple[TrialRecord, ...]:
    """The finished trials of the study that was begun last. Raises SparseLiftError for a path that is no study file, or an empty one."""
    studies = [result for result in read_studies(storage, check).values() if result.trials]
    if not studies:
        raise SparseLiftError(f"{storage} holds no trials")
    return records_of(studies[-1])


def check(result: StudyResult) -> None:
    """What plans, reports and a resumed search read of a study. Raises TypeError or ValueError."""
    for label, params in result.about.get("seeds", ()):
        if not isinstance(label, str) or not isinstance(params, dict):
            raise TypeError(f"seeds must be pairs of a label and parameters; got {label!r}, {params!r}")
    for trial in result.trials:
        try:
            _check_facts(trial)
        except (TypeError, ValueError) as error:
            raise type(error)(f"trial {trial.number}: {error}") from error


def _check_facts(trial: StudyTrial) -> None:
    if not all(value is None or isinstance(value, (str, bool, int, float)) for value in trial.params.values()):
        raise TypeError(f"parameters must be plain values; got {trial.params!r}")
    if trial.value is None:
        return
    if not 0 < trial.value < float("inf"):
        raise ValueError(f"its value must be above 0; got {trial.value}")
    facts = trial.attrs
    for name in ("speedup", "native_s", "planned_s", "confirmed_speedup"):
        if name in facts and not (isinstance(facts[name], list) and len(facts[name]) == 3 and all(map(_is_positive, facts[name]))):
            raise ValueError(f"{name} must be (value, low, high), above 0; got {facts[name]!r}")
    if facts.get("confirmed") is not None and not _is_positive(facts["confirmed"]):
        raise ValueError(f"confirmed must be null or above 0; got {facts['confirmed']!r}")
    for name, kind in (("pruned", bool), ("certificate", dict)):
        if name in facts and not isinstance(facts[name], kind):
            raise TypeError(f"{name} must be {'true or false' if kind is bool else 'an object'}; got {facts[name]!r}")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e9


def records_of(result: StudyResult) -> tuple[TrialRecord, ...]:
    """The study's finished trials, by number."""
    seeds = result.about.get("seeds", ())
    return tuple(_record(trial, seeds) for trial in result.trials if trial.state != "running")


def label_of(params: Mapping[str, Any], seeds: Sequence[Sequence[Any]]) -> str:
    """Where a configuration came from; `seeds` holds (label, params)."""
    return next((label for label, seed in seeds if seed == params), OTHER)


def _record(trial: StudyTrial, seeds: Sequence[Sequence[Any]]) -> TrialRecord:
    label = label_of(trial.params, seeds)
    if trial.value is None:
        state = "infeasible" if trial.state == "infeasible" else "failed"
        return TrialRecord(trial.number, label, dict(trial.params), state, reason=trial.reason)
    pruned = trial.attrs.get("pruned", False)
    _, low, high = trial.attrs.get("speedup", (None, None, None))
    return TrialRecord(trial.number, label, dict(trial.params), "pruned" if pruned else "complete", 1 / trial.value,
                       trial.attrs.get("planned_s", (None,))[0], low, high, "hopeless after a few pairs" if pruned else "")
