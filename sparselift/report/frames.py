"""A plan and its trials as pandas frames. Every frame has one idea, units in its column names, and no index to keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd

from sparselift.plan import Interval, Plan, TrialRecord
from sparselift.rewrites import Value


def trials_frame(trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """One row a trial, one column a parameter. `ratio` is native time / the trial's time; a parameter that had no effect is missing."""
    columns = ["trial", "label", "state", "ratio", "low", "high", "step_ms", "reason"]
    params = list(dict.fromkeys(name for trial in trials for name in trial.params))
    rows = [[t.number, t.label, t.state, t.ratio, t.low, t.high, None if t.step_s is None else 1e3 * t.step_s, t.reason,
             *(t.params.get(name) for name in params)] for t in trials]
    frame = pd.DataFrame(rows, columns=[*columns, *params])
    return frame.astype(dict.fromkeys(("ratio", "low", "high", "step_ms"), "float64"))


def knobs_frame(trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """What every choice of every parameter was worth: the median and the best ratio of the complete trials that have it, and `effect`,
    its median over the median of the trials with another choice (missing where there is no other).
    """
    seen: dict[str, dict[Value, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial in _complete(trials):
        for name, value in trial.params.items():
            seen[name][value].append(_ratio(trial))
    rows = []
    for name, choices in seen.items():
        for value, ratios in choices.items():
            others = [ratio for other, found in choices.items() if other != value for ratio in found]
            rows.append([name, str(value), len(ratios), median(ratios), max(ratios), median(ratios) / median(others) if others else None])
    columns = ["parameter", "choice", "trials", "median_ratio", "best_ratio", "effect"]
    return pd.DataFrame(rows, columns=columns).astype({"effect": "float64"})


def single_changes_frame(trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """Trials that differ by a single knob, at however many size classes, from the default config or from the best trial.

    `gain` is the reference's speed over the other's: what the reference's choice of that knob is worth, everything else equal.
    """
    planned = [trial for trial in _complete(trials) if trial.params.get("path") != "native"]
    references = {max(planned, key=_ratio).number: "best"} if planned else {}
    references |= {trial.number: "default" for trial in planned if trial.label == "default"}
    rows = []
    for reference in (trial for trial in planned if trial.number in references):
        for trial in planned:
            changed = _changes(reference.params, trial.params)
            knobs = {name.partition("@")[0] for name in changed}
            if len(knobs) == 1:
                rows.append([references[reference.number], *knobs, _choices(reference.params, changed), _choices(trial.params, changed),
                             trial.number, _ratio(reference) / _ratio(trial)])
    return pd.DataFrame(rows, columns=["reference", "knob", "choice", "instead_of", "trial", "gain"])


def tables_frame(plan: Plan) -> pd.DataFrame:
    """One row a table: its shape, its traffic in the batches that were seen, its size class, and what was chosen for it."""
    rows = []
    for table in plan.structure.tables:
        features = plan.structure.features_of(table.name)
        sketches = [plan.sketches[feature.name] for feature in features if feature.name in plan.sketches]
        lookups = sum(sketch.lookups_per_batch for sketch in sketches)
        repeated = sum(sketch.duplicate_ratio * sketch.lookups_per_batch for sketch in sketches)
        held = next((each for each in plan.config.classes if table.name in each.tables), None)
        rows.append({"table": table.name, "rows": table.rows, "dim": table.dim, "size_mb": table.nbytes / 1e6, "features": len(features),
                     "ids_per_batch": lookups, "duplicate_ratio": repeated / lookups if lookups else 0.0,
                     "class": held.name if held else plan.config.path, **(held.knobs if held else {})})
    return pd.DataFrame(rows)


def times_frame(plan: Plan) -> pd.DataFrame:
    """Measured step times: native, under the default config, and under the plan. `speedup` is native time / this time."""
    evidence = plan.evidence
    rows: list[list[Any]] = []
    named: tuple[tuple[str, Interval | None], ...] = (
        ("native", evidence.native), ("default", evidence.default), ("plan", evidence.planned))
    for name, interval in named:
        if interval is not None:
            speedup = evidence.native.value / interval.value if evidence.native else None
            if name == "plan" and evidence.speedup:
                speedup = evidence.speedup.value       # the median of paired ratios, not the ratio of medians
            rows.append([name, *(1e3 * value for value in (interval.value, interval.low, interval.high)), speedup])
    return pd.DataFrame(rows, columns=["config", "step_ms", "low_ms", "high_ms", "speedup"])


def nodes_frame(plan: Plan) -> pd.DataFrame:
    """Time of every node of the step, where known: predicted under the plan, and measured natively while lifting."""
    evidence = plan.evidence
    names = list(dict.fromkeys([*evidence.predicted, *evidence.measured]))
    rows = [[name, _milliseconds(evidence.predicted, name), _milliseconds(evidence.measured, name)] for name in names]
    return pd.DataFrame(rows, columns=["node", "predicted_ms", "measured_ms"]).astype({"predicted_ms": "float64", "measured_ms": "float64"})


def _complete(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if trial.state == "complete" and trial.ratio is not None]


def _ratio(trial: TrialRecord) -> float:
    assert trial.ratio is not None
    return trial.ratio


def _changes(a: Mapping[str, Value], b: Mapping[str, Value]) -> list[str]:
    """Parameters that both have and that differ. One that only one of them has is without effect in the other."""
    return [name for name in a if name in b and a[name] != b[name]]


def _choices(params: Mapping[str, Value], names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(str(params[name]) for name in names))


def _milliseconds(times_s: Mapping[str, float], name: str) -> float | None:
    return 1e3 * times_s[name] if name in times_s else None


