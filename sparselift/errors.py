"""Exceptions that callers may want to catch by kind. Wrong arguments raise ValueError, TypeError or IndexError instead, as torch does."""

from __future__ import annotations


class SparseLiftError(Exception):
    """Base of everything that SparseLift raises on its own account."""


class LiftRefused(SparseLiftError):
    """Something cannot be lifted without changing what it means. The message says what, why, and what would lift it."""


class PlanError(SparseLiftError):
    """A plan file cannot be read: not JSON, another schema, a wrong checksum field, an illegal value."""


class PlanMismatchError(SparseLiftError):
    """A plan does not fit the model, optimizer or machine.

    `differences` lists the fields as (field, saved value, current value).
    """

    def __init__(self, message: str, differences: tuple[tuple[str, object, object], ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class InfeasibleError(SparseLiftError):
    """No configuration satisfies the constraints. Names the binding constraint and the smallest relaxation."""


class EquivalenceError(SparseLiftError):
    """A planned step does not compute what the native step computes."""


class KernelError(SparseLiftError):
    """A kernel reported a status other than success."""


class ExchangeError(SparseLiftError):
    """What arrived from another rank is not what was waited for. Names what differs."""


class DataError(SparseLiftError):
    """An input file does not hold what its format says. Names the file, line, field and value."""


class WorkloadError(SparseLiftError):
    """A workload is wrong: its reference, its arguments, or its own code."""


class WorkloadReferenceError(WorkloadError):
    """A workload reference leads nowhere, a setting is not its function's, or the function returns something else than a Workload."""


class MissingExtraError(SparseLiftError):
    """An optional dependency or device is needed and absent. Names the extra to install."""


class DtypeError(TypeError, RuntimeError):
    """A tensor of a dtype that a lookup does not take: a TypeError as in Python, and the RuntimeError that torch raises for it."""
