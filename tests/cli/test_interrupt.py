"""Ctrl-C and kill during a search: no finished trial is lost, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparselift import Plan
from sparselift.tuning.study import read_studies
from tests.cli.conftest import TINY

COMMAND = [sys.executable, "-P", "-c", "import sys; from sparselift.cli import main; sys.exit(main())", "tune", f"{TINY}:work", "--json"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}            # trials at other thread counts are another study


def finished(study: Path) -> int:
    """Complete trials in a study file that another process may be writing."""
    if not study.exists():
        return 0
    return sum(trial.state == "complete" for result in read_studies(str(study)).values() for trial in result.trials)


def interrupted(folder: Path, sent: int) -> tuple[int, str, str]:
    """Start a slow search, and send it a signal once two trials are complete. Returns its exit code and what it printed."""
    slow = [*COMMAND, "--set", "sleep_s=0.002", "--trials", "200"]
    with subprocess.Popen(slow, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=ONE_THREAD) as process:
        try:
            deadline = time.monotonic() + 120
            while finished(folder / "plan.study") < 2:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "no trial ended in two minutes"
                time.sleep(0.2)
            process.send_signal(sent)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    return process.returncode, out, err


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(tmp_path: Path) -> None:
    code, out, err = interrupted(tmp_path, signal.SIGINT)
    assert code == 1
    assert "Traceback" not in err
    assert json.loads(out)["status"] == "interrupted"
    assert Plan.load(tmp_path / "plan.json").evidence.status == "interrupted"
    kept = finished(tmp_path / "plan.study")
    assert kept >= 2
    resume(tmp_path, kept)


@pytest.mark.slow
def test_a_killed_search_loses_no_finished_trial(tmp_path: Path) -> None:
    interrupted(tmp_path, signal.SIGKILL)
    kept = finished(tmp_path / "plan.study")
    assert kept >= 2
    resume(tmp_path, kept)


def resume(folder: Path, kept: int) -> None:
    """One more trial: the study ends with exactly that many, and the plan is a finished one."""
    again = subprocess.run([*COMMAND, "--set", "sleep_s=0.002", "--trials", str(kept + 1)], cwd=folder, capture_output=True, text=True,
                           env=ONE_THREAD)
    assert again.returncode == 0, again.stderr
    assert finished(folder / "plan.study") == kept + 1
    assert Plan.load(folder / "plan.json").evidence.status == "measured"
