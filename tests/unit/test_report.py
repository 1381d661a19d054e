"""Frames, files and the page of a report."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from sparselift.plan import Evidence, Plan
from sparselift.report import knobs_frame, nodes_frame, single_changes_frame, tables_frame, times_frame, trials_frame, write
from sparselift.report.charts import Bar, Point, Scale, bars, search_curve, stacked
from tests.unit.report_plans import tuned_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tuned_plan()


def unmeasured(plan: Plan) -> Plan:
    return replace(plan, evidence=Evidence(note="rules of thumb; nothing was measured"))


def test_trials_frame_has_a_row_a_trial_and_a_column_a_parameter(plan: Plan) -> None:
    frame = trials_frame(plan.evidence.trials)
    assert list(frame["trial"]) == list(range(len(plan.evidence.trials)))
    assert frame.loc[1, "ratio"] == 2.0
    assert frame.loc[1, "step_ms"] == pytest.approx(10.0)
    assert frame.loc[0, "path"] == "native"
    assert pd.isna(frame.loc[0, "group_by"])
    assert pd.isna(frame.iloc[-1]["ratio"])


def test_knobs_frame_compares_a_choice_with_the_others(plan: Plan) -> None:
    frame = knobs_frame(plan.evidence.trials).set_index(["parameter", "choice"])
    planned = frame.loc[("path", "planned")]
    ratios = [t.ratio for t in plan.evidence.trials if t.state == "complete" and t.params["path"] == "planned"]
    assert planned["trials"] == len(ratios)
    assert planned["best_ratio"] == 2.5
    assert planned["effect"] == pytest.approx(planned["median_ratio"])     # native's median is 1
    assert frame.loc[("path", "native"), "median_ratio"] == 1.0


def test_knobs_frame_leaves_out_what_was_not_complete(plan: Plan) -> None:
    only_pruned = [trial for trial in plan.evidence.trials if trial.state != "complete"]
    assert len(knobs_frame(only_pruned)) == 0
    assert len(single_changes_frame(only_pruned)) == 0


def test_single_changes_are_measured_against_the_reference(plan: Plan) -> None:
    frame = single_changes_frame(plan.evidence.trials)
    default = frame[frame["reference"] == "default"].set_index("trial")
    assert set(default.index) == {t.number for t in plan.evidence.trials if "=" in t.label}
    assert default.loc[2, "gain"] == pytest.approx(2.0 / 2.5)
    best = frame[frame["reference"] == "best"].set_index("trial")
    assert best.loc[1, "gain"] == pytest.approx(2.5 / 2.0)
    label = plan.evidence.trials[2].label
    assert f"{default.loc[2, 'knob']}={default.loc[2, 'instead_of']}" == label


def test_tables_frame_tells_every_choice(plan: Plan) -> None:
    frame = tables_frame(plan).set_index("table")
    assert list(frame.index) == [table.name for table in plan.structure.tables]
    assert frame.loc["big.weight", "size_mb"] == pytest.approx(2_000_000 * 16 * 4 / 1e6)
    for held in plan.config.classes:
        for name in held.tables:
            assert frame.loc[name, "class"] == held.name
            assert all(frame.loc[name, knob] == value for knob, value in held.knobs.items())


def test_times_frame_takes_the_paired_speedup_of_the_plan(plan: Plan) -> None:
    frame = times_frame(plan).set_index("config")
    assert list(frame.index) == ["native", "default", "plan"]
    assert frame.loc["native", "speedup"] == 1.0
    assert frame.loc["default", "speedup"] == pytest.approx(2.0)
    assert frame.loc["plan", "speedup"] == 2.5
    assert len(times_frame(unmeasured(plan))) == 0


def test_nodes_frame_holds_what_was_predicted_and_what_was_measured(plan: Plan) -> None:
    frame = nodes_frame(plan).set_index("node")
    assert frame.loc["lookup:big", "predicted_ms"] == pytest.approx(2.0)
    assert pd.isna(frame.loc["dense", "predicted_ms"])
    assert frame.loc["dense", "measured_ms"] == pytest.approx(1.0)


def test_write_of_a_tuned_plan(plan: Plan, tmp_path: Path) -> None:
    files = write(tmp_path / "new" / "report", "a title", plan, ())
    assert sorted(path.name for path in files) == ["knobs.csv", "nodes.csv", "report.html", "report.md", "single_changes.csv", "tables.csv",
                                                   "times.csv", "trials.csv"]
    back = pd.read_csv(tmp_path / "new" / "report" / "trials.csv")
    assert list(back["label"]) == [trial.label for trial in plan.evidence.trials]
    text = (tmp_path / "new" / "report" / "report.md").read_text()
    assert text.startswith("# a title\n")
    assert "| plan | 8 | 7.9 | 8.1 | 2.5 |" in text
    assert r"EquivalenceError: a \| b" in text


def test_write_of_a_plan_without_trials_says_so(plan: Plan, tmp_path: Path) -> None:
    write(tmp_path, "first", plan, ())
    files = write(tmp_path, "second", unmeasured(plan), ())
    assert sorted(path.name for path in files) == ["report.html", "report.md", "tables.csv"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md", "tables.csv"]
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "There are no trials" in text
        assert "The plan is unmeasured: rules of thumb; nothing was measured" in text


def test_write_of_trials_without_a_plan_says_so(plan: Plan, tmp_path: Path) -> None:
    files = write(tmp_path, "study", None, plan.evidence.trials)
    assert sorted(path.name for path in files) == ["knobs.csv", "report.html", "report.md", "single_changes.csv", "trials.csv"]
    assert "There is no plan beside this study" in (tmp_path / "report.md").read_text()


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what the page would fetch or run."""

    VOID = ("meta", "line", "rect", "path", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "action") or name.startswith("on")]
        if tag not in self.VOID or not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "head":
            self.open = [each for each in self.open if each != "meta"]
        assert self.open.pop() == tag, f"</{tag}> closes something else"


def test_the_page_is_whole_and_holds_everything_itself(plan: Plan, tmp_path: Path) -> None:
    write(tmp_path, "a <title> & more", plan, ())
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert page.seen.count("svg") == 4
    assert "script" not in page.seen
    assert not re.search(r"url\(|@import|https?://", text)
    assert "a &lt;title&gt; &amp; more" in text
    assert "prefers-color-scheme: dark" in text
    assert page.seen.count("circle") == sum(trial.ratio is not None for trial in plan.evidence.trials)


def test_search_curve_marks_trials_without_a_measurement() -> None:
    svg = search_curve([Point(0, "native", "complete", 1.0), Point(1, "x", "failed", None), Point(2, "y", "complete", 1.5, 1.4, 1.6)])
    assert svg.count("<circle") == 2
    assert svg.count('class="interval"') == 1
    assert svg.count('class="cross"') == 1
    assert "trial 1, x: failed, not measured" in svg


def test_best_line_never_falls() -> None:
    svg = search_curve([Point(number, "", "complete", ratio) for number, ratio in enumerate([1.0, 1.8, 1.2, 2.0])])
    heights = [float(height) for height in re.findall(r"V([\d.]+)", re.search(r'class="best" d="([^"]+)"', svg)[1])]  # type: ignore[index]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 3


def test_one_huge_interval_does_not_press_the_rest_into_a_corner() -> None:
    points = [Point(0, "a", "complete", 1.0, 0.9, 1.1), Point(1, "b", "complete", 1.2, 1.1, 1.3), Point(2, "c", "complete", 1.1, 0.2, 60.0)]
    heights = [float(y) for y in re.findall(r'circle class="trial complete" cx="[\d.]+" cy="([\d.]+)"', search_curve(points))]
    assert max(heights) - min(heights) > 80, "of 252 pixels"
    ends = [float(y) for y in re.findall(r'class="interval" d="M[\d.]+ [\d.]+V([\d.]+)"', search_curve(points))]
    assert min(ends) >= 20, "inside the picture"
    svg = bars([Bar("a", 10.0, 9.0, 11.0), Bar("b", 12.0, 3.0, 500.0)], "ms", "")
    widths = [float(w) for w in re.findall(r'class="bar" x="[\d.]+" y="\d+" width="([\d.]+)"', svg)]
    assert min(widths) > 200
    assert svg.count("v8") == 3, "the end that is outside is open"


def test_charts_of_nothing_and_of_equal_values() -> None:
    assert bars([], "ms", "empty") == ""
    assert "NaN" not in bars([Bar("a", 1.0)], "×", "one", start=1.0)
    assert "nan" not in stacked({"a": {"x": 0.0}}, "ms", "zero")
    assert "nan" not in search_curve([Point(0, "native", "complete", 1.0)])


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.0, 10.0, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]), (0.95, 1.55, [1.0, 1.2, 1.4]), (0.0, 0.003, [0.0, 0.001, 0.002, 0.003])])
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert Scale(low, high, 0, 100).ticks() == pytest.approx(expected)
