"""The equivalence certificate: does a planned step compute what the native step computes?

Two parts. On small integers every sum is exact in any order, so native, planned and the formulas must agree bit for bit (`exact`). On
real values one whole step of the user's model is held to float64 with a derived bound, or, for a bitwise plan, to native's bits (`real`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparselift import canonical
from sparselift.apply import check_model_fits
from sparselift.errors import EquivalenceError
from sparselift.ir import Structure
from sparselift.kernels import get_backend
from sparselift.kernels.base import KernelBackend
from sparselift.plan import Plan, check_plan
from sparselift.schedule import Schedule, build_schedule
from sparselift.verify.exact import ROUNDS, check_exact
from sparselift.verify.linears import check_linears_exact
from sparselift.verify.products import check_products_exact
from sparselift.verify.real import check_real
from sparselift.verify.twin import Rule, table_rules
from sparselift.workload import Workload, check_workload

__all__ = ["Certificate", "Certifier", "verify"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was checked, and how.

    Attributes
    ----------
    equivalence  class of the plan: "bitwise", "reassociated" ...
    backend      kernel backend and the variant of it that ran
    key          equal for configs that differ in nothing that could change a number
    steps        integer steps compared
    exact        values compared bit for bit on integers, by kind
    real         largest share of its rounding bound that a real value used, by kind; 0.0: native's bits. Empty for a native plan
    """

    equivalence: str
    backend: str
    key: str
    steps: int
    exact: Mapping[str, int]
    real: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        compared = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.exact.items()))
        lines = [f"{self.equivalence}, kernels {self.backend}"]
        if self.exact:
            lines.append(f"on integers, {self.steps} steps, equal bit for bit to native and to the formulas: {compared}")
        for kind, share in sorted(self.real.items()):
            lines.append(f"on real values, {kind}: " + ("native's bits" if share == 0 else f"within {share:.2g} of the rounding bound"))
        return "\n".join(lines)


def verify(plan: Plan, work: Workload, *, backend: str | KernelBackend = "cpu", seed: int = 0) -> Certificate:
    """Check a plan against native torch on this machine, with the user's model and the first of its batches.

    Model, optimizer and random state are left bit for bit as they were.

    Raises
    ------
    TypeError           `plan` is no Plan, or `work` no Workload
    PlanMismatchError   the plan is for another model: names each field
    EquivalenceError    the planned step computes something else: names the first value that differs
    LiftRefused         a module that the plan compiles cannot be compiled: names it and why
    """
    check_plan("verify", plan)
    check_workload("verify", work)
    check_model_fits(plan, work.model, work.optimizers)
    certifier = Certifier(work, plan.structure, plan.sketches, backend, seed)
    return certifier.certify(build_schedule(plan.structure, plan.config), plan.equivalence)


class Certifier:
    """Certificates for many schedules of one workload. What was checked once is not checked again."""

    def __init__(self, work: Workload, structure: Structure, sketches: Mapping[str, Any], backend: str | KernelBackend = "cpu",
                 seed: int = 0) -> None:
        self.work, self.structure, self.sketches, self.backend, self.seed = work, structure, sketches, backend, seed
        self._batch = work.take(1)[0]
        weights = {table.name: work.model.get_parameter(table.name) for table in structure.tables}
        self._rules: dict[str, Rule] = table_rules(structure, weights, work.optimizers)
        self._known: dict[str, Certificate | EquivalenceError] = {}

    def certify(self, schedule: Schedule, equivalence: str) -> Certificate:
        """Raises EquivalenceError; the same again for a schedule that failed before."""
        kernels = get_backend(self.backend)
        variant = f"{kernels.name}-{kernels.variant()}"
        key = canonical.digest([variant, equivalence, self.seed, _numbers(schedule)])
        if key not in self._known:
            try:
                self._known[key] = self._check(schedule, equivalence, variant, key)
            except EquivalenceError as failure:
                self._known[key] = failure
        found = self._known[key]
        if isinstance(found, EquivalenceError):
            raise found
        return found

    def _check(self, schedule: Schedule, equivalence: str, variant: str, key: str) -> Certificate:
        if schedule.path == "native":
            return Certificate(equivalence, variant, key, 0, {}, {})
        exact = check_exact(self.structure, schedule, self.sketches, self._rules, self.backend, self.seed)
        exact |= check_products_exact(self.structure, schedule, self.backend, self.seed)
        exact |= check_linears_exact(self.structure, schedule, self.seed)
        real = check_real(self.structure, schedule, equivalence, self.work, self._batch, self.backend)
        return Certificate(equivalence, variant, key, len(ROUNDS), exact, real)


def _numbers(schedule: Schedule) -> dict[str, Any]:
    """The schedule without what cannot change a number: hints to the memory system."""
    hints = {"prefetch": 0, "huge_pages": False, "stores": ""}
    tables = {name: {**asdict(knobs), **hints} for name, knobs in (schedule.tables or {}).items()}
    return {"path": schedule.path, "groups": [asdict(group) for group in schedule.groups], "tables": tables, "linear": schedule.linear,
            "compile": schedule.compile, "shape": asdict(schedule.shape), "ahead": schedule.prefetch_batches > 0}
