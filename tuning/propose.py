"""Where the next trial of a study comes from: a pure function of the space, the trials before it, and a seed."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FixedTrial, FrozenTrial, TrialState

from sparselift.canonical import digest

Space = Mapping[str, Sequence[Any]] | Callable[[Any], object]
Suggest = Callable[[Any], object]
Predicate = Callable[[Mapping[str, Any]], bool]

OUTCOME = "outcome"                # the user attribute of a finished trial: its state, reason and facts
_TPE_ATTEMPTS = 8                  # proposals that repeat an earlier trial before asking at random
_RANDOM_ATTEMPTS = 256             # and then before calling the space exhausted
_STEPS_OF_A_RANGE = 10             # between its ends, for a neighbour
_MAX_LOST = 2                      # a configuration that was lost with its process twice is not proposed again


def suggester(space: Space, fingerprint: str | None) -> tuple[Suggest, str]:
    """The space as a function of an Optuna trial, and its fingerprint."""
    if callable(space):
        if fingerprint is None:
            raise ValueError("a space that is a function needs a fingerprint, which must change when the space does")
        return space, fingerprint
    for name, choices in space.items():
        _check_dimension(name, choices)
    dimensions = {name: (tuple(choices), isinstance(choices, tuple)) for name, choices in space.items()}

    def suggest(trial: Any) -> None:
        for name, (values, is_range) in dimensions.items():
            if not is_range:
                trial.suggest_categorical(name, values)
            elif all(isinstance(bound, int) for bound in values):
                trial.suggest_int(name, *values)
            else:
                trial.suggest_float(name, *values)

    return suggest, fingerprint or digest(dimensions, 12)


def _check_dimension(name: str, choices: Sequence[Any]) -> None:
    if isinstance(choices, tuple):
        numbers = all(isinstance(bound, (int, float)) and not isinstance(bound, bool) and math.isfinite(bound) for bound in choices)
        if not (numbers and len(choices) == 2 and choices[0] <= choices[1]):
            raise ValueError(f"space[{name!r}]: a tuple is a range (low, high) of finite numbers with low <= high; got {choices!r}")
    elif not isinstance(choices, list) or not choices or not all(c is None or isinstance(c, (bool, int, float, str)) for c in choices):
        raise ValueError(f"space[{name!r}] must be a list of None, bool, int, float or str, or a (low, high) tuple; got {choices!r}")
    elif len(set(choices)) != len(choices):
        raise ValueError(f"space[{name!r}] repeats a choice: {choices!r}")


def propose(suggest: Suggest, past: Sequence[FrozenTrial], tried: set[str], seeds: Sequence[Mapping[str, Any]],
            seed: int, later: Predicate = lambda params: False) -> tuple[dict[str, Any], dict[str, BaseDistribution]] | None:
    """The next configuration as (params, distributions): the first seed that was not tried; else, in turn, one from TPE and a neighbour of
    the best, which differs from it in one parameter.

    Most parameters change little, and those that do change the step by themselves: near the best there is nearly always something to
    gain, which TPE, drawing all parameters at once, reaches only after many trials.

    Depends on its arguments alone. None where nothing new was found. What `later` holds for is passed over.
    """
    def is_due(params: Mapping[str, Any]) -> bool:
        return _key(params) not in tried and not later(params)

    for params in seeds:
        fixed = FixedTrial(dict(params))
        suggest(fixed)
        if is_due(fixed.params):
            return fixed.params, fixed.distributions
    if len(past) % 2:
        neighbour = _neighbour(suggest, past, is_due, seed)
        if neighbour is not None:
            return neighbour
    with quiet():
        mirror = optuna.create_study(direction="minimize")
        mirror.add_trials([trial for trial in past if _informs(trial)])
        for attempt in range(_TPE_ATTEMPTS + _RANDOM_ATTEMPTS):
            draw = int(np.random.SeedSequence((seed, len(past), attempt)).generate_state(1)[0])
            mirror.sampler = (optuna.samplers.TPESampler(seed=draw, multivariate=True, group=True) if attempt < _TPE_ATTEMPTS
                              else optuna.samplers.RandomSampler(seed=draw))
            trial = mirror.ask()
            suggest(trial)
            if is_due(trial.params):
                return trial.params, trial.distributions
            mirror.tell(trial, state=TrialState.FAIL)
    return None


def _neighbour(suggest: Suggest, past: Sequence[FrozenTrial], is_due: Predicate,
               seed: int) -> tuple[dict[str, Any], dict[str, BaseDistribution]] | None:
    """A configuration that differs from the best in one parameter, and is due; None where there is none."""
    measured = [trial for trial in past if trial.state == TrialState.COMPLETE and _informs(trial)]
    best = min(measured, key=lambda trial: (trial.value, trial.number), default=None)
    if best is None:
        return None
    moves = [(name, other) for name, kind in sorted(best.distributions.items()) for other in _others(kind, best.params[name])]
    for position in np.random.default_rng((seed, len(past))).permutation(len(moves)):
        name, other = moves[position]
        fixed = FixedTrial({**best.params, name: other})
        try:
            suggest(fixed)
        except ValueError:                                     # leads to parameters that the best does not have
            continue
        if is_due(fixed.params):
            return fixed.params, fixed.distributions
    return None


def _others(kind: BaseDistribution, value: Any) -> list[Any]:
    """The values beside `value`: all others of a choice, the next ones up and down of a range."""
    if isinstance(kind, CategoricalDistribution):
        return [choice for choice in kind.choices if choice != value]
    assert isinstance(kind, (IntDistribution, FloatDistribution))
    step = kind.step or (kind.high - kind.low) / _STEPS_OF_A_RANGE
    return [other for other in (value - step, value + step) if kind.low <= other <= kind.high]


def _informs(trial: FrozenTrial) -> bool:
    """Whether a sampler may learn from a trial. Others may have stored infinite values, which would always win."""
    return trial.state != TrialState.FAIL and all(math.isfinite(value) for value in trial.values or ())


def tried(past: Sequence[FrozenTrial]) -> set[str]:
    """Keys of the configurations that are not to be tried (again)."""
    keys, lost = set(), Counter[str]()
    for trial in past:
        state = trial.user_attrs.get(OUTCOME, {}).get("state")
        if state == "lost":
            lost[_key(trial.params)] += 1
        elif state != "interrupted":
            keys.add(_key(trial.params))
    return keys | {key for key, count in lost.items() if count >= _MAX_LOST}


def _key(params: Mapping[str, Any]) -> str:
    return dumps(params, sort_keys=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's chatter on standard error and its warnings that a sampler option is experimental."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
