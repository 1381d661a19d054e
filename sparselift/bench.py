"""Native against planned training steps of a workload, alternating in one process on one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparselift.apply import check_model_fits
from sparselift.hardware import hardware
from sparselift.lift import lift
from sparselift.measure import Stage, compare
from sparselift.plan import Interval, Plan, check_plan, default_plan
from sparselift.preserve import preserve
from sparselift.space import Config
from sparselift.workload import Workload, check_workload

_BLOCK_S = 0.25
_MIN_PAIRS = 6                     # the fewest that give an interval of 95%


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What `bench` measured. Intervals are of medians, at 95% where there are 6 pairs or more."""

    workload: str
    plan: str                      # "planned" or "native": what the plan's config is
    native: Interval               # seconds a step
    planned: Interval              # seconds a step
    speedup: Interval              # native time / planned time, from pairs of blocks
    pairs: int
    steps_per_block: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"workload": self.workload, "plan": self.plan, "native_s": self.native.value, "planned_s": self.planned.value,
                "ratio": self.speedup.value, "low": self.speedup.low, "high": self.speedup.high, "pairs": self.pairs,
                "steps_per_block": self.steps_per_block}

    def __str__(self) -> str:
        lines = [f"{self.workload}: {self.pairs} pairs of blocks of {self.steps_per_block} steps, native and {self.plan} in turn"]
        for name, interval in (("native", self.native), ("plan", self.planned)):
            ms = interval.scaled(1e3)
            lines.append(f"  {name:<8}  {ms.value:8.2f} ms a step  [{ms.low:.2f}, {ms.high:.2f}]")
        return "\n".join([*lines, f"  speed-up  {self.speedup.value:8.2f}x  [{self.speedup.low:.2f}, {self.speedup.high:.2f}]"])


def bench(work: Workload, plan: Plan | None = None, *, seconds: float = 20.0, batches: int = 16) -> Benchmark:
    """Time native steps against steps under a plan.

    Model, optimizers and random state are afterwards bit for bit what they were.

    Parameters
    ----------
    plan      None: the one that rules of thumb choose
    seconds   time to measure for, about; six pairs of blocks are the least
    batches   how many of the workload's to rotate over

    Raises
    ------
    TypeError           `work` is no Workload, or `plan` no Plan
    PlanMismatchError   the plan is for another model
    LiftRefused         without a plan: nothing can be lifted
    ValueError          `seconds` or `batches` not above 0
    """
    check_workload("bench", work)
    if plan is not None:
        check_plan("bench", plan)
    if seconds <= 0 or batches < 1:
        raise ValueError(f"seconds must be above 0 and batches at least 1; got {seconds} and {batches}")
    plan = plan or default_plan(lift(work), hardware=hardware().to_dict())
    check_model_fits(plan, work.model, work.optimizers)
    taken = work.take(batches)
    pairs = max(_MIN_PAIRS, round(seconds / (2 * _BLOCK_S)))
    with preserve(work, taken), Stage(work, plan.structure) as stage:
        found = compare(stage.candidate(Config.native()), stage.candidate(plan.config), taken,
                        min_pairs=_MIN_PAIRS, max_pairs=pairs, block_s=_BLOCK_S, precision=0.0)
    return Benchmark(work.name, plan.config.path, found.incumbent, found.candidate, found.speedup, found.pairs, found.steps_per_block)
