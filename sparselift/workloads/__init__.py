"""Workloads by name or reference."""

from sparselift.workloads.dlrm import dlrm
from sparselift.workloads.reference import BUILT_IN, parse_settings, resolve

__all__ = ["BUILT_IN", "dlrm", "parse_settings", "resolve"]
