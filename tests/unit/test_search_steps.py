"""The search with real steps: they are timed by a clock, one config at a time, and leave no trace."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn

from sparselift.batches import IndexAhead
from sparselift.cli.tune import summary
from sparselift.errors import SparseLiftError
from sparselift.lift import lift
from sparselift.measure import Stage
from sparselift.plan import Plan
from sparselift.plan import explain as explain_plan
from sparselift.preserve import preserve
from sparselift.progress import Progress
from sparselift.space import SearchSpace
from sparselift.tuning import tune
from sparselift.workload import Workload
from tests.unit.search_models import ROWS, Timer, by_formula, run, small_workload, step


@pytest.fixture(scope="module")
def work():
    return small_workload()


@pytest.fixture(scope="module")
def space(work):
    return SearchSpace(lift(work))


def state_of(work):
    weights = {name: tensor.clone() for name, tensor in work.model.state_dict().items()}
    return (weights, copy.deepcopy(work.optimizer.state_dict()), torch.get_rng_state(), np.random.get_state()[1],
            [p.grad for p in work.model.parameters()])


def assert_same(before, after):
    for name, tensor in before[0].items():
        assert torch.equal(tensor, after[0][name]), name
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert (before[3] == after[3]).all()
    assert before[4] == after[4] == [None] * len(before[4])


def test_real_steps_are_timed_and_leave_no_trace(work):
    before = state_of(work)
    result = tune(work, trials=3, progress=Progress())
    assert_same(before, state_of(work))
    assert all(bag.forward.__func__ is nn.EmbeddingBag.forward for bag in work.model.bags)
    assert [record.state for record in result.records[:2]] == ["complete", "complete"]
    assert all(record.step_s > 0 for record in result.records)
    assert result.plan.evidence.overhead["timed_s"] > 0
    if result.plan.config.path == "planned":
        assert result.plan.certificate["equivalence"] == result.plan.equivalence


@pytest.mark.parametrize("cause", [KeyboardInterrupt, RuntimeError])
def test_steps_that_are_cut_short_leave_no_trace(work, monkeypatch, cause):
    before = state_of(work)
    calls = []

    def dying(model, batch):
        calls.append(None)
        if len(calls) > 60:
            raise cause("enough")
        return step(model, batch)

    mortal = Workload(work.name, work.model, work.optimizer, dying, work.batches, uses=work.uses)
    if cause is KeyboardInterrupt:
        assert tune(mortal, trials=5, progress=Progress(), verify=lambda config: {}).status == "interrupted"
    else:
        with pytest.raises(SparseLiftError, match="enough"):
            tune(mortal, trials=5, progress=Progress(), verify=lambda config: {})
    assert_same(before, state_of(work))


def test_a_stage_runs_one_config_at_a_time(work, space):
    batches = work.take(4)
    losses = {}
    for name, config in (("native", space.native), ("planned", space.default)):
        with preserve(work, batches), Stage(work, space.graph.structure) as stage:
            other, chosen = (stage.candidate(c) for c in (space.default, config))
            for candidate in (other, chosen):
                candidate.enter()
            lifted = any("forward" in bag.__dict__ for bag in work.model.bags)
            assert lifted == (name == "planned")
            losses[name] = [float(stage.train(batch)) for batch in batches]
    assert losses["planned"] == pytest.approx(losses["native"], rel=1e-5)
    assert not any("forward" in bag.__dict__ for bag in work.model.bags)


def test_a_config_that_works_ahead_is_timed_as_it_would_train(work, space, monkeypatch):
    """Every step of the blocks finds its batch prepared, but for the warm-ups, which nothing came before; the bits are those without."""
    deliver = IndexAhead.deliver
    monkeypatch.setattr(IndexAhead, "deliver", lambda self, jobs: (self.finish(jobs), deliver(self, jobs)))     # the thread is never late
    batches = work.take(4)
    assert set(space.graph.structure.in_batch) == {f"bags.{k}" for k in range(len(ROWS))}
    losses = {}
    for ahead in (0, 1, 2):
        config = replace(space.default, policy={**space.default.policy, "prefetch_batches": ahead})
        assert space.check(config) == ()
        losses[ahead] = []
        with preserve(work, batches), Stage(work, space.graph.structure) as stage:
            train = stage.train
            stage.train = lambda batch, train=train, found=losses[ahead]: found.append(float(train(batch)))
            candidate = stage.candidate(config)
            candidate.enter()
            candidate.run(batches[3:], cycle(batches))                       # a warm-up
            candidate.run(batches[:3], cycle([*batches[3:], *batches[:3]]))
            stage.show(None)
            candidate.enter()
            candidate.run(batches[2:3], cycle([*batches[3:], *batches[:3]]))
            candidate.run(batches[3:], cycle(batches))
            group = candidate.applied.runtime.preludes[0].group
            assert (group.calls, group.calls_ahead) == (6, 4 if ahead else 0)
            assert not any("ahead" in why for _, why in candidate.applied.runtime.asides)
    assert losses[0] == losses[1] == losses[2]


def test_a_plan_that_works_ahead_says_how_to_train(work, tmp_path):
    """Found by a search, kept in the file, told by every page, and obeyed by a loop."""
    result = run(work, Timer(lambda config: by_formula(config) - 0.001 * bool(config.policy.get("prefetch_batches"))), trials=16)
    plan = result.plan
    assert plan.config.policy["prefetch_batches"] in (1, 2) and plan.equivalence != "stale"
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert re.search(r"trains with +sl.prefetch_batches\(batches, model, inputs\), [12] ahead", str(plan))
    assert "not prefetch_batches=0" in explain_plan(plan)
    assert "for batch in sl.prefetch_batches(batches, model, inputs)" in summary(plan, tmp_path / "plan.json", "complete", 16)
    assert re.search(r"not prefetch_batches=1 or 2: a batch does not hold", explain_plan(
        run(replace(work, inputs=lambda batch: ()), trials=4).plan))


@pytest.fixture
def nothing_frozen():
    """The garbage collector as a program has it; that of the tests knows their collection as frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_a_stage_lets_go_of_configs_that_nobody_uses(work, space, nothing_frozen):
    batches = work.take(4)
    with preserve(work, batches):
        with Stage(work, space.graph.structure) as stage:
            candidate = stage.candidate(space.default)
            runtime = weakref.ref(candidate.applied.runtime)
            candidate.enter()
            candidate.run(batches[:1], iter(batches[1:]))
            stage.show(None)
            del candidate
            stage.candidate(space.default)
            assert runtime() is None
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
