"""Every command on a tiny workload: what it prints, what it writes, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sparselift
from sparselift import Plan
from sparselift.cli import main
from sparselift.cli.tune import summary
from sparselift.lift import lift
from sparselift.plan import Evidence, Interval, TrialRecord, default_plan
from sparselift.space import Config
from sparselift.workloads import resolve
from tests.cli.conftest import TINY, Ran

Run = Callable[..., Ran]
WORK = f"{TINY}:work"


def test_version_and_help_leave_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, shown in ((["--version"], f"sparselift {sparselift.__version__}\n"), (["tune", "--help"], "--trials")):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
        assert shown in capsys.readouterr().out


def test_lift_prints_the_graph(run: Run) -> None:
    ran = run("lift", WORK)
    assert ran.code == 0
    assert "tiny" in ran.out
    assert "bags.0" in ran.out


def test_lift_json_holds_structure_nodes_and_refusals(run: Run) -> None:
    document = run("lift", WORK, "--json").document
    assert {key: document[key] for key in ("schema", "command", "status", "errors")} == {
        "schema": 1, "command": "lift", "status": "done", "errors": []}
    assert [table["rows"] for table in document["data"]["structure"]["tables"]] == [50, 400, 3000]
    assert any(node["op"] == "lookup" for node in document["data"]["nodes"])
    assert document["data"]["refusals"] == []


def test_settings_reach_the_workload(run: Run) -> None:
    document = run("lift", WORK, "--set", "dim=4", "--set", "batch_size=32", "--json").document
    assert document["data"]["batch_size"] == 32
    assert {table["dim"] for table in document["data"]["structure"]["tables"]} == {4}


def test_tune_saves_plan_and_study(tuned: Path) -> None:
    plan = Plan.load(tuned)
    assert plan.workload == "tiny"
    assert plan.evidence.status == "measured"
    assert tuned.with_suffix(".study").stat().st_size > 0


def test_tune_prints_times_equivalence_and_next_steps(run: Run, tmp_path: Path) -> None:
    ran = run("tune", WORK, "--trials", "2", "--out", "p.json", "--pin", "path=planned")
    assert ran.code == 0
    for text in ("native", "default", "equivalence", "p.json", 'sl.apply(sl.Plan.load("p.json"), model, optimizer)'):
        assert text in ran.out
    assert Plan.load(tmp_path / "p.json").constraints.pin == {"path": "planned"}


@pytest.mark.parametrize(("search", "path", "text"), [
    ("timeout", "planned", "Stopped after 5 of 9 trials: the timeout. The same command goes on."),
    ("exhausted", "planned", "Stopped after 5 of 9 trials: there is nothing new to try."),
    ("complete", "planned", 'sl.apply(sl.Plan.load("p.json"), model, optimizer)'),
    ("complete", "native", "A native plan changes nothing: train as before."),
    ("interrupted", "native", "the same command goes on from there.")])
def test_the_summary_says_why_the_search_ended_and_what_to_do(tuned: Path, search: str, path: str, text: str) -> None:
    trials = tuple(TrialRecord(number, "search", {}, "complete" if number else "failed", 1.0) for number in range(6))
    plan = replace(Plan.load(tuned), config=Config.native(), certificate=None, evidence=Evidence("measured", trials=trials))
    if path == "planned":
        plan = replace(default_plan(lift(resolve(WORK))), evidence=plan.evidence)
    shown = summary(plan, Path("p.json"), search, 9)
    assert text in shown
    assert ("Stopped after" in shown) == (search in ("timeout", "exhausted"))


def test_tune_again_measures_nothing_twice(run: Run) -> None:
    first = run("tune", WORK, "--trials", "3", "--json")
    second = run("tune", WORK, "--trials", "3", "--json")
    assert first.code == second.code == 0
    trials = [[trial["number"] for trial in ran.document["data"]["plan"]["evidence"]["trials"]] for ran in (first, second)]
    assert trials[0] == trials[1]


@pytest.mark.parametrize(("there", "new", "kept"), [
    (("measured", 1.2), ("interrupted", 1.5), True), (("interrupted", 1.2), ("unmeasured", None), True),
    (("interrupted", 1.2), ("interrupted", 1.1), True), (("interrupted", 1.2), ("interrupted", 1.3), False),
    (("unmeasured", None), ("interrupted", None), False)])
def test_an_interrupted_search_never_makes_the_plan_file_worse(run: Run, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               there: tuple[str, Any], new: tuple[str, Any], kept: bool) -> None:
    def plan(status: str, speedup: float | None) -> Plan:
        return replace(Plan.load(tuned), evidence=Evidence(status, speedup=speedup and Interval(speedup, 1.0, 2.0)))

    plan(*there).save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()
    monkeypatch.setattr("sparselift.tuning.tune", lambda *_, **__: SimpleNamespace(plan=plan(*new), status="interrupted"))
    ran = run("tune", WORK)
    assert (ran.code, "stays as it was" in ran.out) == (1, kept)
    assert ((tmp_path / "plan.json").read_bytes() == before) == kept


def test_tune_takes_constraints(run: Run, tmp_path: Path) -> None:
    ran = run("tune", WORK, "--trials", "2", "--equivalence", "bitwise", "--deny", "dedup", "--memory", "1GiB", "--pin", "prefetch=0")
    assert ran.code == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.equivalence == "bitwise"
    assert plan.constraints.deny == ("dedup",)
    assert plan.constraints.memory_bytes == 2**30
    assert plan.constraints.pin == {"prefetch": 0}


def test_show_and_explain(run: Run, tuned: Path) -> None:
    assert "plan for tiny" in run("show", tuned).out
    assert "plan for tiny" in run("explain", tuned).out
    assert run("show", tuned, "--json").document["data"] == json.loads(tuned.read_text())


def test_diff_of_a_plan_with_itself_and_with_an_edited_one(run: Run, tuned: Path, tmp_path: Path) -> None:
    assert run("diff", tuned, tuned).out == "the plans are equal\n"
    document = json.loads(tuned.read_text())
    document["batch_size"] = 7
    (tmp_path / "edited.json").write_text(json.dumps(document))
    ran = run("diff", tuned, "edited.json", "--json")
    assert ran.code == 0
    assert [(d["field"], d["saved"], d["current"]) for d in ran.document["data"]["differences"]] == [("batch_size", 64, 7)]


def test_check_of_the_machine_alone_and_with_the_workload(run: Run, tuned: Path) -> None:
    alone = run("check", tuned).out
    assert "the plan fits this machine" in alone
    assert "_version" not in alone, "saved and current versions are equal"
    ran = run("check", tuned, WORK)
    assert ran.code == 0
    assert "the plan fits this machine and tiny" in ran.out


def test_check_refuses_another_model_field_by_field(run: Run, tuned: Path) -> None:
    ran = run("check", tuned, WORK, "--set", "dim=4")
    assert ran.code == 1
    assert "does not fit" in ran.out
    assert "tables.bags.0.weight.dim" in ran.out
    document = run("check", tuned, WORK, "--set", "dim=4", "--json").document
    assert document["status"] == "failed"
    assert document["data"]["fits"] is False


def test_check_notes_an_edited_file(run: Run, tuned: Path, tmp_path: Path) -> None:
    document = json.loads(tuned.read_text())
    document["workload"] = "renamed"
    (tmp_path / "edited.json").write_text(json.dumps(document))
    ran = run("check", "edited.json")
    assert ran.code == 0
    assert "edited by hand" in ran.out


def test_verify_prints_the_certificate(run: Run, tuned: Path) -> None:
    ran = run("verify", tuned, WORK)
    assert ran.code == 0
    assert run("verify", tuned, WORK, "--json").document["data"]["certificate"]["equivalence"] == Plan.load(tuned).equivalence


def test_verify_says_its_verdict_first_and_saves_the_certificate(run: Run, tmp_path: Path) -> None:
    plan = default_plan(lift(resolve(WORK)))
    plan.save(tmp_path / "plan.json")
    assert "certificate  none yet: sparselift verify --out saves one" in run("show", "plan.json").out
    assert run("verify", "plan.json", WORK, "--out", "plan.json").out.startswith(f"holds: {plan.equivalence}, kernels cpu")
    saved = Plan.load(tmp_path / "plan.json")
    assert saved.certificate is not None and saved.config == plan.config and not saved.edited
    assert "none yet" not in run("show", "plan.json").out
    replace(plan, config=Config.native()).save(tmp_path / "native.json")
    assert run("verify", "native.json", WORK).out == "nothing to verify: the plan is native\n"
    assert "certificate" not in run("show", "native.json").out


def test_verify_of_a_plan_for_another_model_is_refused(run: Run, tuned: Path) -> None:
    ran = run("verify", tuned, WORK, "--set", "dim=4")
    assert ran.code == 1
    assert "tables.bags.0.weight.dim" in ran.err


def test_bench_gives_a_ratio_with_an_interval(run: Run, tuned: Path) -> None:
    data = run("bench", WORK, "--plan", tuned, "--seconds", "0.3", "--json").document["data"]
    assert 0 < data["low"] <= data["ratio"] <= data["high"]
    assert data["native_s"] > 0
    assert data["planned_s"] > 0
    assert run("bench", WORK, "--seconds", "0.3").code == 0


def test_report_on_a_plan_and_on_its_study(run: Run, tuned: Path, tmp_path: Path) -> None:
    for source in (tuned, tuned.with_suffix(".study")):
        ran = run("report", source, "--out", "report")
        assert ran.code == 0
        assert (tmp_path / "report" / "report.html").is_file()
        assert "trials.csv" in ran.out


def test_report_on_a_study_alone(run: Run, tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "alone.study").write_bytes(tuned.with_suffix(".study").read_bytes())
    ran = run("report", "alone.study", "--out", "report", "--json")
    assert ran.code == 0
    assert ran.document["data"]["trials"] >= 4
    assert not (tmp_path / "report" / "tables.csv").exists()
