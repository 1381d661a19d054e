"""The search for a plan: lift, try configs under a study, and keep the one that is fastest for certain."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparselift import canonical
from sparselift.cost import predict
from sparselift.errors import MissingExtraError, SparseLiftError
from sparselift.hardware import hardware
from sparselift.ir import Graph
from sparselift.lift import lift
from sparselift.measure import Candidate, Comparison, Stage, compare
from sparselift.plan import Evidence, Interval, Plan, TrialRecord
from sparselift.preserve import preserve
from sparselift.probe import probe
from sparselift.progress import Progress
from sparselift.progress import progress as reporter
from sparselift.schedule import build_schedule
from sparselift.space import Config, Constraints, SearchSpace, equivalence_of, setup_s
from sparselift.tuning import records, study
from sparselift.tuning.judge import Judge, Measure, Verdict, Verify, interval_text
from sparselift.tuning.records import label_of, records_of
from sparselift.tuning.study import Abort, Infeasible, Measured, Storage, StudyResult, StudyTrial
from sparselift.verify import Certifier
from sparselift.workload import Workload, check_workload

if TYPE_CHECKING:
    import optuna
    import pandas as pd

logger = logging.getLogger("sparselift.tuning")

_BATCHES = 16                      # to rotate over: more data than caches hold
_THOROUGH_S = 20.0                 # enough for a comparison that matters, unless its fewest pairs take longer
_LAST_TRIALS = 4                   # the last measurements take about as long as so many trials
_LEAST_TRIALS = 2                  # native and the default: with one of them alone there is nothing to say
_SETUP_SHARE = 0.05                # of a search's time, that setting up one config (compiling) may take: it measures nothing


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a search found.

    Attributes
    ----------
    plan     the fastest config that was confirmed, with its evidence and certificate
    study    the Optuna study, for its plots
    status   "complete", "timeout", "interrupted", "exhausted" (nothing new to try) or "failing" (too many failures in a row)
    records  every finished trial
    """

    plan: Plan
    study: optuna.Study
    status: str
    records: tuple[TrialRecord, ...]

    def trials(self) -> pd.DataFrame:
        """One row a trial, one column a parameter; `ratio` is native time over the trial's. Raises MissingExtraError without pandas."""
        try:
            from sparselift.report.frames import trials_frame
        except ImportError as error:
            raise MissingExtraError(f"trials() needs pandas ({error}); pip install 'sparselift[report]'") from error
        return trials_frame(self.records)


def tune(work: Workload, trials: int = 64, timeout: float | None = None, storage: Storage = None, constraints: Constraints | None = None,
         seed: int = 0, progress: Progress | None = None, measure: Measure | None = None, verify: Verify | None = None) -> TuneResult:
    """Search for the fastest way to run a workload's training step on this machine, by running it.

    Parameters
    ----------
    trials       complete trials of the study, those of earlier calls included
    timeout      seconds for this call, about: after native and the default, no trial begins that would not leave time for the last
                 measurements
    storage      where trials are kept: a study file's path, an Optuna storage or its URL; None: in memory. The same call with the same
                 storage goes on where an earlier one ended, on the same machine for the same model, data shape and constraints
    constraints  what a config must keep to; by default, equal to native up to the order and rounding of sums
    seed         of proposals
    progress     what shows how it goes; None: a bar on a terminal, else lines
    measure      times two configs, in place of running them
    verify       certifies a config, in place of `sparselift.verify`

    Ctrl-C ends the search, and keeps what was measured. Model, optimizers and random state are afterwards bit for bit what they were.

    Raises
    ------
    LiftRefused      nothing can be lifted
    InfeasibleError  no config satisfies the constraints
    SparseLiftError  the native step itself fails, or the storage cannot be used
    TypeError        `work` is no Workload
    ValueError       `trials` below 1, or a timeout not above 0
    """
    check_workload("tune", work)
    if trials < 1 or (timeout is not None and not timeout > 0):
        raise ValueError(f"trials must be at least 1 and timeout above 0 or None; got {trials} and {timeout}")
    begin_s = time.perf_counter()
    graph = lift(work)
    space = SearchSpace(graph, constraints)
    with ExitStack() as stack:
        if measure is None or verify is None:
            batches = work.take(_BATCHES)
            stack.enter_context(preserve(work, batches))
            stage = stack.enter_context(Stage(work, graph.structure))
            measure = measure or _StageMeasure(stage, batches)
            verify = verify or _Verifier(stage, Certifier(work, graph.structure, graph.sketches))
        search = _Search(work.name, space, Judge(space, measure, verify), progress or reporter(), begin_s)
        return search.run(storage, trials, seed, timeout)


@dataclass(slots=True)
class _Search:
    """One call of `tune`, after lifting."""

    name: str
    space: SearchSpace
    judge: Judge
    progress: Progress
    begin_s: float
    finished: int = 0              # trials in this call
    trials_s: float = 0.0          # what they took
    left_out: list[str] = field(default_factory=list)    # seeds that this call has no time for
    seeds: list[tuple[str, dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        seeds = [("native", self.space.native)] if self.judge.native_allowed else []
        if self.space.default.path == "planned":
            seeds += [("default", self.space.default), *self.space.toggles()]
        self.seeds = [(label, dict(self.space.to_params(config))) for label, config in seeds]

    def run(self, storage: Storage, trials: int, seed: int, timeout: float | None) -> TuneResult:
        def go(total: int) -> StudyResult:
            return study.run(self._suggest, self._objective, storage, total, seed, name=self.name, fingerprint=_fingerprint(self.space),
                             seeds=[params for _, params in self.seeds], positive=True, stop=lambda: self._out_of_time(timeout),
                             on_trial=self._report, about={"workload": self.name, "seeds": self.seeds}, check=self._check,
                             later=lambda params: self._has_to_wait(params, timeout))

        before = go(0)
        self.judge.recall(before.trials)
        self.progress.begin(f"tuning {self.name}", trials, sum(trial.state == "complete" for trial in before.trials))
        self.left_out = self._too_long_to_set_up(timeout)
        for text in self.left_out:
            self.progress.say(f"left out: {text}")
        try:
            result = go(trials)
            self.judge.recall(result.trials)
            verdict, status = self._verdict(result)
        except Abort as error:
            raise SparseLiftError(f"workload {self.name!r} cannot be tuned: {error}") from error.__cause__
        finally:
            self.progress.end()
        return TuneResult(self._plan(verdict, result, status, storage), result.study, status, records_of(result))

    # Trials.

    def _suggest(self, trial: Any) -> None:
        chosen: dict[str, Any] = {}
        for dimension in self.space.dimensions:
            if dimension.active(chosen):
                chosen[dimension.name] = trial.suggest_categorical(dimension.name, dimension.choices)

    def _objective(self, params: dict[str, Any]) -> Measured | Infeasible:
        begin_s = time.perf_counter()
        try:
            return self.judge.judge(self.space.from_params(params))
        finally:
            self.finished += 1
            self.trials_s += time.perf_counter() - begin_s

    def _check(self, result: StudyResult) -> None:
        """What the judge reads of a study. Raises where it is damaged."""
        records.check(result)
        for trial in result.trials:
            self.space.from_params(trial.params)
            if trial.value is not None and (missing := {"speedup", "native_s", "planned_s", "pruned"} - set(trial.attrs)):
                raise ValueError(f"trial {trial.number} lacks {sorted(missing)}")

    def _out_of_time(self, timeout: float | None) -> str | None:
        if timeout is None or self.finished < _LEAST_TRIALS:
            return None
        needed_s = (1 + _LAST_TRIALS) * self.trials_s / self.finished
        return "timeout" if time.perf_counter() - self.begin_s + needed_s > timeout else None

    def _has_to_wait(self, params: Mapping[str, Any], timeout: float | None) -> bool:
        """Whether setting a config up would take too much of the search's time, or longer than what is left."""
        if timeout is None:
            return False
        left_s = timeout - (time.perf_counter() - self.begin_s) - _LAST_TRIALS * self.trials_s / max(self.finished, 1)
        return self._setup_s(params) > min(_SETUP_SHARE * timeout, max(left_s, 0.0))

    def _too_long_to_set_up(self, timeout: float | None) -> list[str]:
        """The seeds that wait, and from which timeout on they would not."""
        return [f"{label}, which takes about {self._setup_s(params):.0f} s to set up; a search of "
                f"{self._setup_s(params) / _SETUP_SHARE:.0f} s has time for it"
                for label, params in self.seeds if self._has_to_wait(params, timeout)]

    def _setup_s(self, params: Mapping[str, Any]) -> float:
        """Of what is still to set up: some of it serves the configs after it."""
        return setup_s(self.space.graph.structure, self.space.from_params(params), first=not self.judge.compile_s)

    def _report(self, trial: StudyTrial, _: StudyResult) -> None:
        self.judge.recall([trial])
        champion = self.judge.champion
        best = "best: native" if champion.config.path == "native" else ""
        if champion.config.path == "planned" and champion.trial is not None:
            best = f"best: trial {champion.trial}, confirmed {champion.speedup:.2f}x"
        text = f"{trial.number:>3}  {label_of(trial.params, self.seeds):<22}"
        if trial.value is None:
            self.progress.advance(f"{text}  {trial.state}: {trial.reason}", best, counts=False)
        else:
            self.progress.advance(f"{text}  {self._measured(trial)}", best)

    def _measured(self, trial: StudyTrial) -> str:
        speedup = Interval(*trial.attrs["speedup"])
        if trial.params.get("path") == "native":
            return f"1.00x, and [{speedup.low:.2f}, {speedup.high:.2f}] against itself: the noise"
        compiled = f", compiled in {trial.attrs['compile_s']:.0f} s" if "compile_s" in trial.attrs else ""
        return interval_text(speedup) + compiled + ("  hopeless" if trial.attrs["pruned"] else "")

    # The plan.

    def _verdict(self, result: StudyResult) -> tuple[Verdict, str]:
        """What the trials come to, and the status of the search."""
        if result.status == "interrupted":
            return self.judge.standing(result.trials), result.status
        if failed := self._all_failed(result):
            note = f"every planned trial failed, so this is the default, unmeasured; the first: {failed}"
            return Verdict(self.space.default, note=note), result.status
        if self.judge.champion.config.path == "planned":
            self.progress.say("measuring the best once more")
        try:
            return self.judge.conclude(result.trials), result.status
        except KeyboardInterrupt:
            return self.judge.standing(result.trials), "interrupted"

    def _all_failed(self, result: StudyResult) -> str:
        """Why the first planned trial failed, if all did that were feasible; else empty. A default that is not equivalent is out."""
        planned = [(trial, config) for trial in result.trials if (config := self.space.from_params(trial.params)).path == "planned"]
        failed = [trial for trial, _ in planned if trial.state == "failed"]
        default_refused = any(trial.state == "infeasible" and config == self.space.default for trial, config in planned)
        if not failed or default_refused or any(trial.value is not None for trial, _ in planned):
            return ""
        return failed[0].reason

    def _plan(self, verdict: Verdict, result: StudyResult, status: str, storage: Storage) -> Plan:
        graph, space = self.space.graph, self.space
        if verdict.planned is None:
            measured = "unmeasured"
        else:
            measured = "interrupted" if status == "interrupted" else "measured"
        machine = hardware()
        evidence = Evidence(
            measured, verdict.native, verdict.planned, verdict.default, verdict.speedup, records_of(result),
            predicted=predict(graph, verdict.config, probe(), machine.cache_bytes).node_s,
            measured={node.name: node.resources.time_s for node in graph.nodes if node.resources.time_s is not None},
            overhead=self._overhead(),
            study=result.name if storage is None else f"{_place(storage)}: {result.name}", note=self._note(verdict, result))
        return Plan(graph.workload, graph.structure, graph.batch_size, verdict.config, dict(graph.sketches), machine.to_dict(),
                    space.constraints, verdict.certificate, evidence)

    def _note(self, verdict: Verdict, result: StudyResult) -> str:
        if self.space.blocked:
            return "no planned config is feasible: " + "; ".join(self.space.blocked)
        champion = self.judge.champion
        if verdict.note or champion.trial is None or verdict.config != champion.config:
            return verdict.note
        complete = sum(trial.state == "complete" for trial in result.trials)
        label = label_of(result.trials[champion.trial].params, self.seeds)
        return "; ".join((f"trial {champion.trial} ({label}), the fastest of {complete}", *(f"left out: {text}" for text in self.left_out)))

    def _overhead(self) -> dict[str, float]:
        wall_s = time.perf_counter() - self.begin_s
        judge = self.judge
        spent = {"timed_s": judge.timed_s, "warmup_s": judge.warmup_s, "waited_s": judge.waited_s, "certificate_s": judge.certificate_s,
                 "compile_s": judge.compile_s}
        return {"wall_s": wall_s, **spent, "other_s": wall_s - sum(spent.values())}


class _StageMeasure:
    """Runs the steps themselves."""

    def __init__(self, stage: Stage, batches: Sequence[Any]) -> None:
        self._stage, self._batches = stage, batches
        self._native = _Native(stage.candidate(Config.native()))

    def __call__(self, incumbent: Config, candidate: Config, *, prune_below: float = 0.0, bar: float | None = None,
                 thorough: bool = False) -> Comparison:
        options: dict[str, Any] = {"min_pairs": 12, "max_pairs": 48, "precision": 0.01, "max_s": _THOROUGH_S} if thorough else {}
        return compare(self._candidate(incumbent), self._candidate(candidate), self._batches, prune_below=prune_below, bar=bar,
                       warmups=(1, 3), **options)

    def _candidate(self, config: Config) -> Candidate:
        return self._native if config.path == "native" else self._stage.candidate(config)


@dataclass(frozen=True, slots=True)
class _Native:
    """The native step. Where it fails there is nothing to compare with."""

    inner: Candidate

    def enter(self) -> None:
        self.inner.enter()

    def run(self, batches: Sequence[Any], coming: Iterator[Any]) -> None:
        try:
            self.inner.run(batches, coming)
        except Exception as error:
            raise Abort(f"the native step raises {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Verifier:
    """Certifies configs, with the model native meanwhile."""

    stage: Stage
    certifier: Certifier

    def __call__(self, config: Config) -> Mapping[str, Any]:
        structure = self.certifier.structure
        self.stage.show(None)
        return self.certifier.certify(build_schedule(structure, config), equivalence_of(structure, config)).to_dict()


def _fingerprint(space: SearchSpace) -> str:
    """Of everything that makes two trials comparable."""
    graph: Graph = space.graph
    return canonical.digest([space.fingerprint, graph.structure.to_dict(), graph.batch_size, space.constraints.to_dict(),
                             hardware().fingerprint], 12)


def _place(storage: Storage) -> str:
    if isinstance(storage, (str, os.PathLike)):
        return os.fspath(storage)
    return getattr(storage, "path", type(storage).__name__)
