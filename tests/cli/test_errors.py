"""Hostile input: one clear error on stderr, the documented exit code, no traceback, and nothing lost."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparselift.cli import main
from tests.cli.conftest import TINY, Ran

Run = Callable[..., Ran]
WORK = f"{TINY}:work"
ROW = "\t".join(["1", *["3"] * 13, *["1a2b"] * 26])


def refused(ran: Ran, code: int, *texts: str) -> None:
    assert ran.code == code
    assert ran.err.startswith("sparselift: error: ")
    assert ran.err.count("\n") == 1, ran.err
    assert "Traceback" not in ran.err
    for text in texts:
        assert text in ran.err


@pytest.mark.parametrize(("arguments", "text"), [
    ([], "COMMAND"),
    (["frobnicate"], "frobnicate"),
    (["tune"], "WORKLOAD"),
    (["tune", WORK, "--trials", "0"], "at least 1"),
    (["tune", WORK, "--trials", "x"], "at least 1"),
    (["tune", WORK, "--timeout", "nan"], "above 0"),
    (["tune", WORK, "--memory", "lots"], "'lots'"),
    (["tune", WORK, "--deny", "nothing"], "'nothing'"),
    (["tune", WORK, "--pin", "prefetch"], "KNOB=VALUE"),
    (["tune", WORK, "--pin", "prefetch=7"], "got 7"),
    (["tune", WORK, "--storage", "plan.json"], "same file"),
    (["tune", WORK, "--tri", "3"], "--tri"),
    (["check", "plan.json", "--set", "a=1"], "--set"),
    (["show", "missing.json"], "missing.json: no such file"),
    (["report", ".", "--out", "x"], "is a folder"),
    (["bench", WORK, "--seconds", "-1"], "above 0"),
])
def test_usage_errors(run: Run, arguments: list[str], text: str) -> None:
    refused(run(*arguments), 2, text)


@pytest.mark.parametrize(("reference", "text"), [
    ("nothing", "nothing"),
    ("no_such_module:work", "no_such_module"),
    ("missing/file.py:work", "missing/file.py"),
    (f"{TINY}:absent", "absent"),
    (f"{TINY}:ROWS", "ROWS"),
    (f"{TINY}:not_a_workload", "dict"),
])
def test_a_workload_that_does_not_exist(run: Run, reference: str, text: str) -> None:
    refused(run("lift", reference), 2, text)


def test_an_unknown_setting_names_the_accepted_ones(run: Run) -> None:
    refused(run("lift", WORK, "--set", "dims=4"), 2, "dims", "batch_size")
    refused(run("lift", WORK, "--set", "dim"), 2, "key=value")


@pytest.mark.parametrize(("content", "texts"), [
    (b"", ["empty"]),
    (ROW.encode() + b"\n" + ROW.encode()[:60], ["line 2"]),
    (ROW.replace("1a2b", "zz", 1).encode(), ["line 1", "zz"]),
    (ROW.replace("3", "3.5x", 1).encode(), ["line 1", "3.5x"]),
    (b"7" + ROW.encode()[1:], ["line 1", "7"]),
    (gzip.compress((ROW + "\n").encode() * 2000)[:200], ["clicks.tsv"]),
    (bytes(range(256)), ["clicks.tsv"]),
], ids=["empty", "truncated", "not hex", "not an integer", "bad label", "half a gzip", "binary"])
def test_damaged_click_logs(run: Run, tmp_path: Path, content: bytes, texts: list[str]) -> None:
    (tmp_path / "clicks.tsv").write_bytes(content)
    refused(run("lift", "dlrm", "--set", "data=clicks.tsv"), 1, "clicks.tsv", *texts)


def test_a_click_log_that_does_not_exist(run: Run) -> None:
    refused(run("lift", "dlrm", "--set", "data=missing.tsv"), 1, "missing.tsv")


def test_a_model_without_embeddings(run: Run) -> None:
    refused(run("lift", f"{TINY}:no_embeddings"), 1, "embedding")
    refused(run("tune", f"{TINY}:no_embeddings"), 1, "embedding")


def test_an_id_beyond_the_table(run: Run) -> None:
    ran = run("lift", f"{TINY}:id_beyond_table")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert "50" in ran.err


def test_an_error_in_the_workloads_own_code_names_its_type(run: Run) -> None:
    refused(run("lift", f"{TINY}:broken_step"), 1, "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("function", "text"), [
    ("broken_function", "failed: ValueError: no data here: neither there; nor elsewhere\n"),
    ("broken_arguments", "step must be a function")])
def test_a_workload_whose_code_raises_is_no_usage_error(run: Run, function: str, text: str) -> None:
    refused(run("lift", f"{TINY}:{function}"), 1, text)
    assert run("lift", f"{TINY}:{function}", "--json").document["status"] == "error"


def test_debug_shows_where(run: Run) -> None:
    ran = run("lift", f"{TINY}:broken_step", "--debug")
    assert ran.code == 1
    assert "Traceback" in ran.err
    assert "tiny.py" in ran.err


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00\x01", '{"schema": 1}', '{"schema": 99}', "null"])
@pytest.mark.parametrize("command", ["show", "explain", "check"])
def test_a_file_that_is_no_plan(run: Run, tmp_path: Path, command: str, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    refused(run(command, "plan.json"), 1, "plan.json")
    assert (tmp_path / "plan.json").read_text() == content


@pytest.mark.parametrize("command", [["show"], ["explain"], ["check"], ["diff", "plan.study"]])
def test_a_study_in_the_place_of_a_plan_names_its_plan(run: Run, tuned: Path, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "plan.study").write_bytes(tuned.with_suffix(".study").read_bytes())
    refused(run(*command, "plan.study"), 1, "plan.study: this is a study; sparselift report reads it")
    (tmp_path / "plan.json").write_bytes(tuned.read_bytes())
    refused(run(*command, "plan.study"), 1, "plan.study: this is a study; its plan is plan.json")


def test_a_plan_edited_into_something_illegal(run: Run, tuned: Path, tmp_path: Path) -> None:
    document = json.loads(tuned.read_text())
    document["config"] = {"path": "planned", "policy": {"group_by": "moon"}, "classes": []}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    refused(run("show", "plan.json"), 1, "group_by", "moon")


@pytest.mark.parametrize("out", ["missing/plan.json", "folder", "file/plan.json"])
def test_an_unwritable_output_is_found_before_anything_runs(run: Run, tmp_path: Path, out: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    refused(run("tune", f"{TINY}:broken_step", "--out", out), 2, f"cannot write {out}")
    refused(run("tune", f"{TINY}:broken_step", "--storage", out), 2, f"cannot write {out}")


def test_a_report_folder_that_is_a_file(run: Run, tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    refused(run("report", tuned, "--out", "file"), 2, "file")
    refused(run("report", tuned, "--out", "file/report"), 2, "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_study_file_cut_in_half(run: Run, tuned: Path, tmp_path: Path) -> None:
    whole = tuned.with_suffix(".study").read_bytes()
    half = whole[:len(whole) // 2]
    (tmp_path / "plan.study").write_bytes(half)
    assert run("tune", WORK, "--trials", "3").code == 0
    kept = half[:half.rindex(b"\n") + 1]
    assert (tmp_path / "plan.study").read_bytes().startswith(kept)
    torn = (tmp_path / "plan.study.torn").read_bytes() if len(kept) < len(half) else b""
    assert kept + torn == half


def test_a_study_that_is_no_study(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.study").write_text("my notes\n")
    refused(run("tune", WORK), 1, "plan.study")
    assert (tmp_path / "plan.study").read_text() == "my notes\n"


def test_json_reports_an_error_as_one_object(run: Run) -> None:
    ran = run("show", "missing.json", "--json")
    assert ran.code == 2
    assert ran.document == {"schema": 1, "command": "show", "status": "usage", "data": {},
                            "errors": [{"kind": "UsageError", "message": "missing.json: no such file"}]}


def test_json_tune_prints_nothing_else_on_stdout(run: Run) -> None:
    ran = run("tune", WORK, "--trials", "1", "--json")
    assert ran.document["status"] == "done"
    assert "tiny" in ran.err


@pytest.mark.parametrize(("module", "arguments", "extra"), [
    ("optuna", ["tune", WORK], "sparselift[tune]"), ("pandas", ["report", "PLAN", "--out", "x"], "sparselift[report]")])
def test_a_missing_extra_is_exit_code_three(run: Run, tuned: Path, monkeypatch: pytest.MonkeyPatch, module: str, arguments: list[str],
                                            extra: str) -> None:
    affected = (module, "sparselift.tuning", "sparselift.report")
    for name in [name for name in sys.modules if name in affected or name.startswith(tuple(f"{each}." for each in affected))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    refused(run(*(str(tuned) if argument == "PLAN" else argument for argument in arguments)), 3, extra)


def test_a_reader_that_has_gone(tuned: Path) -> None:
    """`sparselift ... | head` ends quietly."""
    code = f"from sparselift.cli import main; raise SystemExit(main(['show', {str(tuned)!r}]))"
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait() == 1


def test_ctrl_c_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt
    monkeypatch.setattr("sparselift.cli.commands.lift", interrupt)
    ran = run("lift", WORK)
    assert ran.code == 1
    assert ran.err == "sparselift: stopped by Ctrl-C\n"
    assert main(["--bogus"]) == 2
