"""Plans: what was chosen, why, and whether it still fits."""

from __future__ import annotations

from sparselift.plan.compare import Difference, check_fits, compare, diff
from sparselift.plan.document import SCHEMA, Plan, check_plan, default_plan
from sparselift.plan.evidence import Evidence, Interval, TrialRecord
from sparselift.plan.show import explain, show

__all__ = ["SCHEMA", "Difference", "Evidence", "Interval", "Plan", "TrialRecord", "check_fits", "check_plan", "compare",
           "default_plan", "diff", "explain", "show"]
