"""What commands read: workloads, plans, studies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sparselift.cli.console import existing_file
from sparselift.errors import PlanError
from sparselift.plan import Plan, TrialRecord
from sparselift.workload import Workload
from sparselift.workloads import parse_settings, resolve

_JOURNAL_START = b'{"op_code"'


def workload(args: argparse.Namespace) -> Workload:
    """The workload that the arguments name. Raises WorkloadError, DataError."""
    return resolve(args.workload, parse_settings(args.set))


def load_plan(path: str) -> Plan:
    """Raises UsageError where there is no such file, PlanError where it is no plan."""
    file = existing_file(path)
    if _is_study(file):
        beside = file.with_suffix(".json")
        raise PlanError(f"{file}: this is a study; " + (f"its plan is {beside}" if beside.is_file() else "sparselift report reads it"))
    return Plan.load(file)


def _is_study(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(_JOURNAL_START)


def plan_or_study(path: Path) -> tuple[Plan | None, Sequence[TrialRecord]]:
    """The plan of a plan file; or the trials of a study file, and the plan beside it where there is one."""
    if not _is_study(path):
        return Plan.load(path), ()
    from sparselift.tuning import trial_records  # needs optuna, which a plan does not

    beside = path.with_suffix(".json")
    return Plan.load(beside) if beside.is_file() else None, trial_records(path)
