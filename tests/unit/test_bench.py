"""Benchmarks of a workload: what they report, and that they leave no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparselift import Workload, explain
from sparselift.bench import bench
from sparselift.errors import PlanMismatchError
from sparselift.lift import lift
from sparselift.plan import default_plan
from sparselift.space import Config, Constraints
from tests.cli.tiny import work


def parameters(made: Workload) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def test_bench_reports_both_times_and_a_paired_ratio() -> None:
    found = bench(work(), seconds=0.1)
    assert found.workload == "tiny"
    assert found.plan == "planned"
    assert found.pairs == 6
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    assert found.native.value / found.planned.value == pytest.approx(found.speedup.value, rel=0.5)
    assert found.to_dict()["ratio"] == found.speedup.value
    assert "speed-up" in str(found)


def test_bench_leaves_the_workload_as_it_was() -> None:
    made = work()
    before, random = parameters(made), torch.get_rng_state()
    bench(made, seconds=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(made), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert explain(made.model) == "no plan is applied: torch runs everything"
    assert all("forward" not in module.__dict__ for module in made.model.modules())


def test_bench_is_native_again_after_a_step_that_raises() -> None:
    made = work()
    before = parameters(made)
    calls = 0

    def step(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise RuntimeError("the step broke")
        return made.step(model, batch)

    with pytest.raises(RuntimeError, match="the step broke"):
        bench(replace(made, step=step), seconds=0.1)
    assert explain(made.model) == "no plan is applied: torch runs everything"
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(made), strict=True))


def test_bench_of_a_native_plan_times_native_against_itself() -> None:
    made = work()
    plan = default_plan(lift(made), Constraints(pin={"path": "native"}))
    assert plan.config == Config.native()
    assert bench(made, plan, seconds=0.1).plan == "native"


def test_bench_refuses_a_plan_for_another_model() -> None:
    with pytest.raises(PlanMismatchError, match=r"tables\.bags\.0\.weight\.dim"):
        bench(work(dim=4), default_plan(lift(work())), seconds=0.1)


@pytest.mark.parametrize(("seconds", "batches"), [(0.0, 4), (-1.0, 4), (1.0, 0)])
def test_bench_checks_its_arguments(seconds: float, batches: int) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        bench(work(), seconds=seconds, batches=batches)
