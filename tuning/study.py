"""Generic studies over Optuna: propose, record, resume. Nothing here knows what is tuned.

A study is a list of trials in a storage. The proposal of a trial is a pure function of the space, the trials before it, the
seed and its number, so that a study that was interrupted continues as if it had not been; a trial enters the storage with its
proposal and its owner in one record, so that a killed process leaves either nothing or a trial that says whose it was.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage, get_storage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sparselift.preserve import sigint_deferred
from sparselift.tuning import owner
from sparselift.tuning.journal import StudyFile, damage_named, open_storage
from sparselift.tuning.propose import OUTCOME, Predicate, Space, Suggest, propose, quiet, suggester, tried

__all__ = ["Abort", "Infeasible", "Measured", "Space", "Storage", "StudyFile", "StudyResult", "StudyTrial", "open_storage",
           "read_studies", "run"]

logger = logging.getLogger("sparselift.tuning")

Storage = BaseStorage | str | os.PathLike[str] | None

Check = Callable[["StudyResult"], object]

_OWNER, _ABOUT = "owner", "about"  # user attributes of a running trial and of a study
_STATES = frozenset({"complete", "infeasible", "failed", "interrupted", "lost"})
_MAX_BARREN = 50                   # trials in a row without a value, infeasible ones included
_FOREIGN_GRACE_S = 6 * 3600.0      # an owner that cannot be checked counts as dead after this


@dataclass(frozen=True, slots=True)
class Measured:
    """What an objective found, with facts to keep beside it (plain JSON types)."""

    value: float
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The configuration breaks a constraint; it has no value and is no failure."""

    reason: str
    attrs: Mapping[str, Any] = field(default_factory=dict)


class Abort(BaseException):
    """Raised by an objective: nothing can be measured any more. Ends the run and is passed on; the trial does not count."""


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """One trial of a study.

    `state` is "complete" (it has a value), "infeasible", "failed" (the objective raised or its value is unusable), "interrupted"
    (Ctrl-C), "lost" (its process died) or "running". `reason` says why there is no value.
    """

    number: int
    state: str
    params: Mapping[str, Any]
    value: float | None = None
    reason: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StudyResult:
    """How a study stands.

    Attributes
    ----------
    name    of the study in its storage
    trials  all of them, by number
    best    the complete trial of the smallest value, or None
    params  of the best trial, or the caller's default where every trial failed
    about   the facts that were stored with the study
    status  "complete", "interrupted", "failing" (too many failures in a row), "exhausted" (nothing new to try), or what `stop` gave
    study   the Optuna study, for its plots
    """

    name: str
    trials: tuple[StudyTrial, ...]
    best: StudyTrial | None
    params: Mapping[str, Any] | None
    about: Mapping[str, Any]
    status: str
    study: optuna.Study


def run(space: Space, objective: Callable[[dict[str, Any]], float | Measured | Infeasible], storage: Storage = None,
        trials: int = 64, seed: int = 0, *, name: str = "study", fingerprint: str | None = None,
        seeds: Sequence[Mapping[str, Any]] = (), default: Mapping[str, Any] | None = None, positive: bool = False,
        max_failures: int = 12, stop: Callable[[], str | None] | None = None,
        on_trial: Callable[[StudyTrial, StudyResult], None] | None = None, about: Mapping[str, Any] | None = None,
        check: Check | None = None, later: Predicate | None = None) -> StudyResult:
    """Minimise `objective` until the study holds `trials` complete trials, those of earlier runs included.

    Parameters
    ----------
    space         name -> a list of choices (None, bool, int, float, str), or a (low, high) tuple of ints or floats, both included; or
                  space(trial), which calls trial.suggest_categorical and the like, for conditional spaces
    objective     objective(params) -> a value, or Measured or Infeasible. What it raises (but for Abort), and a value that is not finite,
                  make the trial fail
    storage       a study file's path, an Optuna storage or its URL; None keeps the study in memory
    seed          of proposals, >= 0; the same seed and the same recorded values give the same proposals
    name          prefix of the study's name; the space's fingerprint is the rest, so that another space starts another study
    fingerprint   of the space; needed where it is a function
    seeds         configurations to try first, in order
    default       `params` of the result where no trial completes
    positive      values <= 0 fail as well, as those of durations do
    max_failures  failures in a row that end the run
    stop          asked before every trial: a status that ends the run, or None
    on_trial      told of every finished trial, and how the study stands
    about         facts to store with a new study (plain JSON types)
    check         raises where the facts that were stored are not what the caller stores: the file is damaged then
    later         whether a configuration is not to be tried now, for lack of time, say; it is asked anew before every trial

    Ctrl-C ends the run, and everything that was measured stays. No configuration is tried twice, unless it was interrupted or its
    process died. Running trials of processes that no longer live are closed first.

    Raises
    ------
    ValueError        an illegal space, seed or number of trials
    SparseLiftError   a storage that cannot be used, or whose records are damaged: names the file, and the line or trial
    """
    if trials < 0 or seed < 0:
        raise ValueError(f"trials and seed must be at least 0; got {trials} and {seed}")
    suggest, digest = suggester(space, fingerprint)
    records = _Records.open(_storage(storage), f"{name}-{digest}", about or {}, positive, check)
    status = _Loop(records, suggest, objective, trials, seed, seeds, max_failures, stop, on_trial,
                   later or (lambda params: False)).run()
    return records.result(status, default)


def read_studies(storage: Storage, check: Check | None = None) -> dict[str, StudyResult]:
    """Every study of a storage by name, as it stands. `check` as in `run`.

    Raises SparseLiftError for a path that is no study file or does not exist, or whose records are damaged.
    """
    opened = _storage(storage, create=False)
    with damage_named(_place(opened)):
        names = [study.study_name for study in opened.get_all_studies()]
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"studies have names; got {names}")
        studies = [optuna.load_study(study_name=name, storage=opened) for name in names]
    return {study.study_name: _Records(study, opened, False, check).result("stored", None) for study in studies}


@dataclass(slots=True)
class _Loop:
    """One run of a study. Ctrl-C waits for operations on the storage, so that none is cut in two."""

    records: _Records
    suggest: Suggest
    objective: Callable[[dict[str, Any]], float | Measured | Infeasible]
    trials: int
    seed: int
    seeds: Sequence[Mapping[str, Any]]
    max_failures: int
    stop: Callable[[], str | None] | None
    on_trial: Callable[[StudyTrial, StudyResult], None] | None
    later: Predicate
    failures: int = 0              # in a row
    barren: int = 0                # trials in a row without a value
    open_trial: int | None = None  # id of the trial that is running here

    def run(self) -> str:
        """Returns the status."""
        try:
            with sigint_deferred():
                self.records.close_dead()
            while (status := self._ended()) is None:
                with sigint_deferred():
                    params = self._claim()
                if params is None:
                    return "exhausted"
                self._evaluate(params)
        except KeyboardInterrupt as error:
            self._close("interrupted", None, _one_line(error), {})
            return "interrupted"
        except BaseException as error:
            self._close("interrupted", None, _one_line(error), {})
            raise
        return status

    def _ended(self) -> str | None:
        if self.records.count_complete() >= self.trials:
            return "complete"
        if self.failures >= self.max_failures:
            return "failing"
        if self.barren >= _MAX_BARREN:
            return "exhausted"
        return self.stop() if self.stop is not None else None

    def _claim(self) -> dict[str, Any] | None:
        """Store a new running trial and return its params; None if there is nothing new to try."""
        with self.records.exclusive():
            past = self.records.frozen()
            proposal = propose(self.suggest, past, tried(past), self.seeds, self.seed, self.later)
            if proposal is None:
                return None
            self.open_trial = self.records.create(*proposal)
        return dict(proposal[0])

    def _evaluate(self, params: dict[str, Any]) -> None:
        try:
            state, value, reason, attrs = self.records.grade(self.objective(params))
        except Exception as error:
            logger.debug("the objective raised", exc_info=True)
            state, value, reason, attrs = "failed", None, _one_line(error), {}
        number = self._close(state, value, reason, attrs)
        self.failures = self.failures + 1 if state == "failed" else 0
        self.barren = 0 if state == "complete" else self.barren + 1
        if self.on_trial is not None and number is not None:
            result = self.records.result("running", None)
            self.on_trial(result.trials[number], result)

    def _close(self, state: str, value: float | None, reason: str, attrs: Mapping[str, Any]) -> int | None:
        """Finish the trial that runs here, if one does. Returns its number."""
        if self.open_trial is None:
            return None
        with sigint_deferred():
            number = self.records.close(self.open_trial, state, value, reason, attrs)
            self.open_trial = None
        return number


class _Records:
    """The trials of one study in a storage. Every trial that leaves it was checked."""

    def __init__(self, study: optuna.Study, storage: BaseStorage, positive: bool, check: Check | None = None) -> None:
        self._study, self._storage, self._positive, self._check = study, storage, positive, check
        with damage_named(_place(storage)):
            self._id = storage.get_study_id_from_name(study.study_name)
            if study.directions != [StudyDirection.MINIMIZE]:
                raise ValueError(f"study {study.study_name} does not minimise one value")

    @classmethod
    def open(cls, storage: BaseStorage, name: str, about: Mapping[str, Any], positive: bool, check: Check | None) -> _Records:
        """Load the study, or create it."""
        with quiet(), damage_named(_place(storage)):
            study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)
        if about and _ABOUT not in study.user_attrs:
            study.set_user_attr(_ABOUT, dict(about))
        return cls(study, storage, positive, check)

    def exclusive(self) -> AbstractContextManager[None]:
        """Keeps other processes from claiming a trial between our look at the trials and our own claim, where the storage can."""
        return self._storage.exclusive() if isinstance(self._storage, StudyFile) else nullcontext()

    def frozen(self) -> list[FrozenTrial]:
        trials = self._storage.get_all_trials(self._id, deepcopy=False)
        for trial in trials:
            with damage_named(f"{_place(self._storage)}: trial {trial.number} of {self._study.study_name}"):
                _check_trial(trial)
        return trials

    def count_complete(self) -> int:
        return sum(trial.state == TrialState.COMPLETE for trial in self.frozen())

    def create(self, params: dict[str, Any], distributions: dict[str, BaseDistribution]) -> int:
        """Store a running trial of ours, in one record. Returns its id."""
        template = optuna.trial.create_trial(state=TrialState.RUNNING, params=params, distributions=distributions,
                                             user_attrs={_OWNER: owner.myself()})
        return self._storage.create_new_trial(self._id, template)

    def grade(self, outcome: float | Measured | Infeasible) -> tuple[str, float | None, str, Mapping[str, Any]]:
        """(state, value, reason, attrs) of what an objective returned. Raises TypeError for what is no number."""
        if isinstance(outcome, Infeasible):
            return "infeasible", None, outcome.reason, outcome.attrs
        measured = outcome if isinstance(outcome, Measured) else Measured(float(outcome))
        if not self._usable(measured.value):
            rule = "finite and above 0" if self._positive else "finite"
            return "failed", None, f"the value must be {rule}; got {measured.value}", measured.attrs
        return "complete", float(measured.value), "", measured.attrs

    def close(self, trial: int, state: str, value: float | None, reason: str, attrs: Mapping[str, Any]) -> int:
        """Finish a running trial and return its number. What another process has finished stays as it is."""
        number = self._storage.get_trial(trial).number
        optuna_state = {"complete": TrialState.COMPLETE, "infeasible": TrialState.PRUNED}.get(state, TrialState.FAIL)
        try:
            self._storage.set_trial_user_attr(trial, OUTCOME, {"state": state, "reason": reason, "attrs": dict(attrs)})
            if state == "infeasible":
                with quiet():
                    optuna.trial.Trial(self._study, trial).set_constraint("feasible", 1.0)
            self._storage.set_trial_state_values(trial, optuna_state, None if value is None else [value])
        except UpdateFinishedTrialError:
            logger.warning("trial %d of study %s was closed by another process, which took this one for dead",
                           number, self._study.study_name)
        return number

    def close_dead(self) -> None:
        """Close running trials whose processes no longer live, so that a resumed study does not wait for them for ever."""
        with self.exclusive():
            for trial in self.frozen():
                if trial.state == TrialState.RUNNING and _is_dead(trial):
                    self.close(trial._trial_id, "lost", None, "its process died", {})

    def result(self, status: str, default: Mapping[str, Any] | None) -> StudyResult:
        trials = tuple(self._plain(trial) for trial in self.frozen())
        complete = [trial for trial in trials if trial.value is not None]
        best = min(complete, key=lambda trial: (trial.value, trial.number), default=None)
        about = self._study.user_attrs.get(_ABOUT, {})
        found = StudyResult(self._study.study_name, trials, best, default if best is None else best.params, about, status, self._study)
        with damage_named(f"{_place(self._storage)}: {found.name}"):
            _check_types({"about": about}, about=dict)
            if self._check is not None:
                self._check(found)
        return found

    def _usable(self, value: float | None) -> bool:
        return value is not None and math.isfinite(value) and not (self._positive and value <= 0)

    def _plain(self, trial: FrozenTrial) -> StudyTrial:
        outcome = trial.user_attrs.get(OUTCOME, {})
        attrs = outcome.get("attrs", {})
        if trial.state == TrialState.COMPLETE:
            if self._usable(trial.value):
                return StudyTrial(trial.number, "complete", trial.params, trial.value, "", attrs)
            return StudyTrial(trial.number, "failed", trial.params, None, f"the stored value {trial.value} is unusable", attrs)
        if not trial.state.is_finished():
            return StudyTrial(trial.number, "running", trial.params)
        return StudyTrial(trial.number, outcome.get("state", "failed"), trial.params, None, outcome.get("reason", ""), attrs)


def _check_trial(trial: FrozenTrial) -> None:
    """What the readers of a trial rely on. Raises TypeError or ValueError."""
    if trial.values is not None and not (len(trial.values) == 1 and type(trial.values[0]) in (int, float)):
        raise ValueError(f"its value must be one number; got {trial.values!r}")
    trial._validate()
    _check_types(trial.user_attrs, **{_OWNER: dict, OUTCOME: dict})
    outcome = trial.user_attrs.get(OUTCOME, {})
    _check_types(outcome, state=str, reason=str, attrs=dict)
    if outcome.get("state", "failed") not in _STATES:
        raise ValueError(f"its state must be one of {sorted(_STATES)}; got {outcome['state']!r}")


def _check_types(found: Mapping[str, Any], **kinds: type) -> None:
    for name, kind in kinds.items():
        if name in found and not isinstance(found[name], kind):
            raise TypeError(f"{name!r} must be {'an object' if kind is dict else 'text'}; got {found[name]!r}")


def _place(storage: BaseStorage) -> str:
    return f"study file {storage.path}" if isinstance(storage, StudyFile) else f"storage {type(storage).__name__}"


def _is_dead(trial: FrozenTrial) -> bool:
    alive = owner.lives(trial.user_attrs.get(_OWNER, {}))
    if alive is None:
        return trial.datetime_start is None or time.time() - trial.datetime_start.timestamp() > _FOREIGN_GRACE_S
    return not alive


def _storage(storage: Storage, create: bool = True) -> BaseStorage:
    if storage is None:
        return InMemoryStorage()
    if isinstance(storage, BaseStorage):
        return storage
    place = os.fspath(storage)
    return get_storage(place) if "://" in place else open_storage(place, create)


def _one_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
