"""How configs are judged: feasible, equivalent to native, how fast, and which is the fastest for certain."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparselift.errors import EquivalenceError, LiftRefused
from sparselift.measure import Comparison
from sparselift.plan import Interval
from sparselift.runtime.compiled import compile_seconds
from sparselift.space import Config, SearchSpace
from sparselift.tuning.study import Abort, Infeasible, Measured, StudyTrial

logger = logging.getLogger("sparselift.tuning")

MARGIN = 1.01                      # a challenger has to be faster by 1%, for certain
_HOPELESS = 0.85                   # of the champion's speed-up: what does not reach it in a few pairs is not timed further


class Measure(Protocol):
    """Times two configs against each other."""

    def __call__(self, incumbent: Config, candidate: Config, *, prune_below: float = 0.0, bar: float | None = None,
                 thorough: bool = False) -> Comparison:
        """`prune_below` and `bar` as in `sparselift.measure.compare`; `thorough` asks for more pairs. Raises what the steps raise, and
        `Abort` where native itself cannot run.
        """


Verify = Callable[[Config], Mapping[str, Any]]  # -> certificate; raises EquivalenceError


@dataclass(frozen=True, slots=True)
class Champion:
    """The fastest config so far, by trials and their confirmations. Before any trial, what the first one has to beat."""

    config: Config
    speedup: float = 1.0           # over native
    trial: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the trials come to. Times are in seconds a step, and absent where nothing was measured."""

    config: Config
    certificate: Mapping[str, Any] | None = None
    speedup: Interval | None = None
    native: Interval | None = None
    planned: Interval | None = None
    default: Interval | None = None
    note: str = ""


class Judge:
    """Judges one config after another, and knows where the time went.

    What it must not forget is in the facts of each trial, from which `recall` finds it again.
    """

    def __init__(self, space: SearchSpace, measure: Measure, verify: Verify, clock: Callable[[], float] = time.perf_counter,
                 compiling: Callable[[], float] = compile_seconds) -> None:
        """`compiling` says how many seconds this process has spent in compilers."""
        self._space, self._time, self._verify, self._clock, self._compiling = space, measure, verify, clock, compiling
        self._certificates: dict[Config, Mapping[str, Any]] = {}
        self._logged: set[str] = set()
        self.native_allowed = not space.check(space.native)
        self.champion = Champion(space.native) if self.native_allowed else Champion(space.default, speedup=0.0)
        self.timed_s = self.warmup_s = self.waited_s = self.certificate_s = self.compile_s = 0.0

    def judge(self, config: Config) -> Measured | Infeasible:
        """A config's time over native's, on the way to a trial. Raises what its steps raise, and Abort where native cannot run."""
        if reasons := self._space.check(config):
            return Infeasible("; ".join(reasons))
        if config.path == "native":
            return self._judge_native()
        compiled_s = self.compile_s
        try:
            self.certify(config)
        except EquivalenceError as error:
            logger.warning("a config is refused, since it does not compute what native computes: %s", error)
            return Infeasible(f"not equivalent to native: {error}")
        except LiftRefused as error:
            return self._refused(str(error))
        found = self.measure(self._space.native, config, prune_below=_HOPELESS * self.champion.speedup)
        confirmed = self._confirmed(config, found)
        facts = _facts(found, confirmed, None if confirmed is None else self._certificates[config])
        if self.compile_s > compiled_s:
            facts["compile_s"] = self.compile_s - compiled_s
        return Measured(1 / found.speedup.value, facts)

    def _refused(self, reason: str) -> Infeasible:
        """Many configs share a choice that the model does not allow: the log has its reason once."""
        if reason not in self._logged:
            self._logged.add(reason)
            logger.info("a config is refused: %s", reason)
        return Infeasible(reason)

    def recall(self, trials: Iterable[StudyTrial]) -> None:
        """Crown the fastest trial that was confirmed, also by other processes that work on the same study."""
        for trial in trials:
            confirmed = trial.attrs.get("confirmed")
            if confirmed and (self.champion.trial is None or confirmed > self.champion.speedup):
                self.champion = Champion(self._space.from_params(trial.params), confirmed, trial.number)

    def conclude(self, trials: Sequence[StudyTrial]) -> Verdict:
        """Measure the champion again, against native and against the default, and settle for the simplest that holds."""
        if self.champion.config.path == "native":
            return self.standing(trials)
        try:
            return self._confirm(self.champion.config, trials)
        except EquivalenceError as error:
            if not self.native_allowed:
                raise
            return Verdict(self._space.native, note=f"the best planned config is not equivalent to native (any more): {error}")

    def _confirm(self, winner: Config, trials: Sequence[StudyTrial]) -> Verdict:
        space, default_s, note = self._space, None, ""
        certificate = self.certify(winner)
        if winner != space.default and self._recorded(space.default, trials):
            default_certificate = self.certify(space.default)
            against = self.measure(space.default, winner, thorough=True)
            default_s = against.incumbent
            if against.speedup.low <= 1.0:
                winner, certificate, note = space.default, default_certificate, "the default; nothing beats it for certain"
        final = self.measure(space.native, winner, thorough=True)
        if self.native_allowed and final.speedup.low <= 1.0 < final.speedup.value:
            final = self.measure(space.native, winner, thorough=True)      # it won twice before: noise gets no last word
        if winner == space.default:
            default_s = final.candidate
        if self.native_allowed and final.speedup.low <= 1.0:
            return Verdict(space.native, None, None, final.incumbent, final.incumbent, default_s,
                           f"the best planned config does not beat native for certain when measured again: {interval_text(final.speedup)}")
        return Verdict(winner, certificate, final.speedup, final.incumbent, final.candidate, default_s, note)

    def standing(self, trials: Sequence[StudyTrial]) -> Verdict:
        """The champion by what its trial recorded, in this call or an earlier one, without measuring or certifying again."""
        space, config = self._space, self.champion.config
        own = self._recorded(config, trials)
        default = self._recorded(space.default, trials)
        default_s = Interval(*default["planned_s"]) if default else None
        if not own:
            return Verdict(config, default=default_s)
        native_s, planned_s = Interval(*own["native_s"]), Interval(*own["planned_s"])
        if config.path == "native":
            best = max((1 / t.value for t in trials if t.value and t.params.get("path") != "native"), default=None)
            note = f"no planned config is faster than native by 1% for certain; the best trial: {best:.2f}x" if best else ""
            return Verdict(config, None, None, planned_s, planned_s, default_s, note)
        certificate = self._certificates.get(config) or own.get("certificate")
        speedup = Interval(*(own.get("confirmed_speedup") or own["speedup"]))
        return Verdict(config, certificate, speedup, native_s, planned_s, default_s)

    def certify(self, config: Config) -> Mapping[str, Any]:
        """Raises EquivalenceError, and LiftRefused for what cannot be compiled. The first step of a config, in which it is, is in here."""
        begin_s, compiled_s = self._clock(), self._compiling()
        try:
            self._certificates[config] = self._verify(config)
        finally:
            compiling_s = self._compiling() - compiled_s
            self.compile_s += compiling_s
            self.certificate_s += self._clock() - begin_s - compiling_s
        return self._certificates[config]

    def measure(self, incumbent: Config, candidate: Config, prune_below: float = 0.0, bar: float | None = None,
                thorough: bool = False) -> Comparison:
        found = self._time(incumbent, candidate, prune_below=prune_below, bar=bar, thorough=thorough)
        self.timed_s += found.timed_s
        self.warmup_s += found.warmup_s
        self.waited_s += found.waited_s
        return found

    def _judge_native(self) -> Measured:
        """Native against itself: its time, and how far apart two measurements of the same thing are here."""
        try:
            return Measured(1.0, _facts(self.measure(self._space.native, self._space.native), Interval(1.0, 1.0, 1.0)))
        except Exception as error:
            raise Abort(f"the native step: {error}") from error

    def _confirmed(self, config: Config, found: Comparison) -> Interval | None:
        """The speed-up over native of a config that is faster than the champion by the margin, for certain and by a fresh measurement.

        It is the fresh one that counts: the trial was picked for its value, and so flatters. None for any other config.
        """
        champion = self.champion
        if found.pruned:
            return None
        if config == champion.config:
            return found.speedup                         # the default, where native is not allowed
        if found.speedup.value <= MARGIN * champion.speedup:
            return None
        if champion.config.path == "native" and found.speedup.low <= MARGIN and self._gain(champion.config, config) is None:
            return None
        gain = self._gain(champion.config, config)
        return None if gain is None else gain.scaled(champion.speedup)

    def _gain(self, incumbent: Config, candidate: Config) -> Interval | None:
        """How much faster a candidate is, if that is more than the margin for certain."""
        speedup = self.measure(incumbent, candidate, bar=MARGIN, thorough=True).speedup
        return speedup if speedup.low > MARGIN else None

    def _recorded(self, config: Config, trials: Sequence[StudyTrial]) -> Mapping[str, Any]:
        """The facts of a config's complete trial; empty if there is none."""
        return next((trial.attrs for trial in trials if trial.value and self._space.from_params(trial.params) == config), {})


def _facts(found: Comparison, confirmed: Interval | None, certificate: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a trial keeps of its measurement. Intervals are (value, low, high); a champion has its confirmation and certificate."""
    intervals = {"speedup": found.speedup, "native_s": found.incumbent, "planned_s": found.candidate}
    facts: dict[str, Any] = {**{name: _triple(held) for name, held in intervals.items()}, "pairs": found.pairs,
                             "pruned": found.pruned, "confirmed": None if confirmed is None else confirmed.value}
    if certificate is not None and confirmed is not None:
        facts |= {"confirmed_speedup": _triple(confirmed), "certificate": dict(certificate)}
    return facts


def _triple(held: Interval) -> list[float]:
    return [held.value, held.low, held.high]


def interval_text(speedup: Interval) -> str:
    return f"{speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
