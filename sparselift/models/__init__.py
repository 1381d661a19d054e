"""Models that the built-in workloads, examples and benchmarks train."""

from sparselift.models.dlrm import DLRM

__all__ = ["DLRM"]
