"""What was measured while a plan was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from sparselift import canonical
from sparselift.rewrites import Value

TRIAL_STATES = ("complete", "pruned", "infeasible", "failed")
STATUSES = ("unmeasured", "interrupted", "measured")         # from the weakest evidence to the strongest


@dataclass(frozen=True, slots=True)
class Interval:
    """A measured value and its confidence interval."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _round_floats(self)

    def scaled(self, factor: float) -> Interval:
        """In other units."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One config that a search looked at."""

    number: int
    label: str                     # "native", "default", "prefetch=0", "search" ...: where the config came from
    params: Mapping[str, Value]    # SearchSpace.to_params of the config
    state: str                     # "complete", "pruned" (measured, hopeless), "infeasible" (not run) or "failed"
    ratio: float | None = None     # native time / this config's time; above 1 is faster than native
    step_s: float | None = None    # median time of a step
    low: float | None = None       # confidence interval of `ratio`
    high: float | None = None
    reason: str = ""               # why it was not complete

    def __post_init__(self) -> None:
        if self.state not in TRIAL_STATES:
            raise ValueError(f"a trial's state must be one of {list(TRIAL_STATES)}; got {self.state!r}")
        _round_floats(self)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a plan's config is the one. All of it may be absent: an unmeasured plan rests on rules of thumb.

    Attributes
    ----------
    status     "unmeasured", "measured", or "interrupted" (measured in part)
    native     time of a native step, in seconds
    planned    time of a step under the plan's config; of a native plan, as `native`
    default    time of a step under the default config
    speedup    native / planned, from interleaved steps
    trials     every config that was looked at
    predicted  seconds by node, by the cost model
    measured   seconds by node of the native step, where a node was timed by itself while lifting
    overhead   where the search's wall time went, in seconds
    study      where the trials are stored, and the study's name
    note       one line for people: why this config
    """

    status: str = "unmeasured"
    native: Interval | None = None
    planned: Interval | None = None
    default: Interval | None = None
    speedup: Interval | None = None
    trials: tuple[TrialRecord, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    overhead: Mapping[str, float] = field(default_factory=dict)
    study: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"evidence.status must be one of {list(STATUSES)}; got {self.status!r}")
        _round_floats(self)


def _round_floats(value: object) -> None:
    """What is kept in memory is what a file can hold, so that a plan equals itself after a round trip."""
    for each in fields(value):                                                # type: ignore[arg-type]
        held = getattr(value, each.name)
        if isinstance(held, float):
            object.__setattr__(value, each.name, canonical.rounded(held))
        elif isinstance(held, Mapping):
            object.__setattr__(value, each.name, {key: canonical.rounded(item) for key, item in held.items()})
