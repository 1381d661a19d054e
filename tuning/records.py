"""The trials of a search as plans and reports hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparselift.errors import SparseLiftError
from sparselift.plan import TrialRecord
from sparselift.tuning.study import Storage, StudyResult, StudyTrial, read_studies

OTHER = "tpe"                      # the label of what the sampler proposed


def trial_records(storage: Storage) -> tuple[TrialRecord, ...]:
    """The finished trials of the study that was begun last. Raises SparseLiftError for a path that is no study file, or an empty one."""
    studies = [result for result in read_studies(storage).values() if result.trials]
    if not studies:
        raise SparseLiftError(f"{storage} holds no trials")
    return records_of(studies[-1])


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
