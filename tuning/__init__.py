"""The search: `tune`, and under it the generic studies that it runs on. The only importer of Optuna."""

from __future__ import annotations

from importlib.util import find_spec

from sparselift.errors import MissingExtraError

if find_spec("optuna") is None:
    raise MissingExtraError("tuning needs Optuna, which is not installed; pip install 'sparselift[tune]'")

from sparselift.tuning.records import trial_records
from sparselift.tuning.search import TuneResult, tune

__all__ = ["TuneResult", "trial_records", "tune"]
