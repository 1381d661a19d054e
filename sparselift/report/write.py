"""The files of a report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import pandas as pd

from sparselift.canonical import write_atomic
from sparselift.plan import Plan, TrialRecord
from sparselift.report import charts, page
from sparselift.report.frames import knobs_frame, nodes_frame, single_changes_frame, tables_frame, times_frame, trials_frame

_CSV = ("times", "trials", "knobs", "single_changes", "tables", "nodes")
_MAX_ROWS = 40                     # of a table that people read; the CSV has all

_LEADS = {
    "times": ("Step time", "Real training steps, native and planned interleaved in one process. Intervals are 95%."),
    "trials": ("Search", "Speed-up over native of every trial. The line is the best so far."),
    "single_changes": ("What one change is worth", "Trials that differ by a single knob: speed with the choice over speed with the other."),
    "knobs": ("Choices", "Over all complete trials: the median with a choice over the median without it. Trials differ in more than "
                         "this one parameter, so small effects mean little."),
    "nodes": ("Where the time of a step goes", "By kind of node. Under the plan as the cost model predicts it; natively as far as nodes "
                                               "were timed by themselves while lifting, which takes longer than a plain step."),
    "tables": ("Tables", "What was chosen for each table, and the traffic it was chosen for."),
}


def write(out: Path, title: str, plan: Plan | None, trials: Sequence[TrialRecord]) -> list[Path]:
    """Write CSV files, report.md and report.html into `out`, which is made if need be. Returns their paths.

    `trials` are shown where there are any, else those that the plan holds. Without a plan there are no step times, nodes and
    tables. Files of an earlier report that have no content now are removed. Raises OSError naming the path.
    """
    out.mkdir(parents=True, exist_ok=True)
    shown = tuple(trials) or (plan.evidence.trials if plan else ())
    frames = _frames(plan, shown)
    contents = {f"{name}.csv": frame.to_csv(index=False, float_format="%.9g") for name, frame in frames.items()}
    contents["report.md"] = _markdown(title, plan, frames)
    contents["report.html"] = _html(title, plan, shown, frames)
    for name in (*(f"{name}.csv" for name in _CSV), "report.md", "report.html"):
        if name in contents:
            write_atomic(out / name, contents[name])
        else:
            (out / name).unlink(missing_ok=True)
    return [out / name for name in contents]


def _frames(plan: Plan | None, trials: Sequence[TrialRecord]) -> dict[str, pd.DataFrame]:
    """The frames that have rows, in the order of the page."""
    found: dict[str, pd.DataFrame] = {}
    if plan:
        found["times"] = times_frame(plan)
    found |= {"trials": trials_frame(trials), "single_changes": single_changes_frame(trials), "knobs": knobs_frame(trials)}
    if plan:
        found |= {"nodes": nodes_frame(plan), "tables": tables_frame(plan)}
    return {name: frame for name, frame in found.items() if len(frame)}


def _readable(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """A frame as people want to see it: fewer columns, the most telling rows first."""
    if name == "trials":
        frame = frame[["trial", "label", "state", "ratio", "low", "high", "step_ms", "reason"]]
    if name == "knobs":
        frame = frame.dropna(subset="effect").sort_values("effect", ascending=False, kind="stable")
    if name == "single_changes":
        frame = frame.sort_values("gain", ascending=False, kind="stable")
    if name == "nodes":
        frame = _by_kind(frame)
    return frame.head(_MAX_ROWS)


def _by_kind(nodes: pd.DataFrame) -> pd.DataFrame:
    """Node times summed by kind of node: the part of a node's name before its first colon."""
    kinds = nodes["node"].str.partition(":")[0].rename("kind")
    return nodes[["predicted_ms", "measured_ms"]].groupby(kinds, sort=False).sum(min_count=1).reset_index()


def _absent(plan: Plan | None, frames: Mapping[str, pd.DataFrame]) -> list[str]:
    """What the report lacks, and why."""
    found = []
    if plan is None:
        found.append("There is no plan beside this study, so step times, nodes and tables are absent.")
    elif "times" not in frames:
        found.append(f"The plan is unmeasured: {plan.evidence.note or 'it rests on rules of thumb'}.")
    if "trials" not in frames:
        found.append("There are no trials: report on a study file to see its search.")
    return found


def _markdown(title: str, plan: Plan | None, frames: Mapping[str, pd.DataFrame]) -> str:
    parts = [f"# {title}", *_absent(plan, frames)]
    if plan:
        parts += ["```\n" + str(plan).rstrip() + "\n```"]
    for name, frame in frames.items():
        heading, lead = _LEADS[name]
        parts += [f"## {heading}", lead, _markdown_table(_readable(name, frame))]
        if len(frame) > _MAX_ROWS:
            parts.append(f"All {len(frame)} rows are in [{name}.csv]({name}.csv).")
    return "\n\n".join(parts) + "\n"


def _markdown_table(frame: pd.DataFrame) -> str:
    rows = [[str(name) for name in frame.columns], ["---"] * len(frame.columns),
            *([page.cell(value).replace("|", "\\|") for value in row] for row in frame.itertuples(index=False))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _html(title: str, plan: Plan | None, trials: Sequence[TrialRecord], frames: Mapping[str, pd.DataFrame]) -> str:
    pictures = {
        "times": lambda: charts.bars(_time_bars(frames["times"]), "ms", "Step time of native, default and plan"),
        "trials": lambda: charts.search_curve([charts.Point(t.number, t.label, t.state, t.ratio, t.low, t.high) for t in trials]),
        "single_changes": lambda: charts.bars(_gain_bars(frames["single_changes"]), "×", "Gain of single changes", start=1.0),
        "nodes": lambda: charts.stacked(_stacks(frames["nodes"]), "ms", "Time of a step by kind of node"),
    }
    sections = [page.Section(*_LEADS[name], (pictures[name]() if name in pictures else "") + page.table(_readable(name, frame)))
                for name, frame in frames.items()]
    if plan:
        sections.append(page.Section("Plan", "As `sparselift show` prints it.", f"<pre>{escape(str(plan))}</pre>"))
    return page.render(title, " ".join(_absent(plan, frames)) or "Native torch against the tuned plan, on real training steps.",
                       _facts(plan, frames), sections, "Written by sparselift report. The CSV files beside this page hold all rows.")


def _facts(plan: Plan | None, frames: Mapping[str, pd.DataFrame]) -> list[tuple[str, str]]:
    found = []
    if plan and plan.evidence.speedup:
        found.append((f"{plan.evidence.speedup.value:.2f}×", "speed-up over native"))
    if plan and plan.evidence.native and plan.evidence.planned:
        found.append((f"{1e3 * plan.evidence.planned.value:.1f} ms", f"a step; native {1e3 * plan.evidence.native.value:.1f} ms"))
    if plan:
        found += [(plan.equivalence, "equivalence to native"), (str(len(plan.structure.tables)), "tables")]
    if "trials" in frames:
        states = frames["trials"]["state"].value_counts()
        found.append((str(len(frames["trials"])), "trials: " + ", ".join(f"{count} {state}" for state, count in states.items())))
    return found


def _time_bars(frame: pd.DataFrame) -> list[charts.Bar]:
    return [charts.Bar(row["config"], row["step_ms"], row["low_ms"], row["high_ms"], f"{row['step_ms']:.2f} ms, {row['speedup']:.2f}×")
            for row in frame.to_dict("records")]


def _gain_bars(frame: pd.DataFrame) -> list[charts.Bar]:
    """The default's choices where it was measured: a search tries each of them alone."""
    shown = frame[frame["reference"] == ("default" if "default" in set(frame["reference"]) else "best")]
    return [charts.Bar(f"{row['knob']}={row['choice']}", row["gain"], note=f"{row['gain']:.2f}× over {row['instead_of']}")
            for row in _readable("single_changes", shown).head(16).to_dict("records")]


def _stacks(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    stacks: dict[str, dict[str, float]] = defaultdict(dict)
    for row in _by_kind(frame).to_dict("records"):
        for label, column in (("native, measured", "measured_ms"), ("plan, predicted", "predicted_ms")):
            if not math.isnan(row[column]):
                stacks[label][row["kind"]] = row[column]
    return stacks
