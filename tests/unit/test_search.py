"""The search, on a small model whose steps are timed by a formula, and once by a clock."""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import weakref
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn

from sparselift.batches import IndexAhead
from sparselift.cli.tune import summary
from sparselift.errors import EquivalenceError, SparseLiftError
from sparselift.lift import lift
from sparselift.measure import Comparison, Stage
from sparselift.plan import Interval, Plan
from sparselift.plan import explain as explain_plan
from sparselift.preserve import preserve
from sparselift.progress import Progress
from sparselift.schedule import build_schedule
from sparselift.space import Config, Constraints, SearchSpace, memory_bytes
from sparselift.tuning import search, study, trial_records, tune
from sparselift.tuning.judge import Judge
from sparselift.tuning.study import Infeasible, StudyTrial
from sparselift.workload import Workload
from tests.unit.example_graphs import on_cuda

BATCH = 16
ROWS = (50, 300, 70_000)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum", sparse=True) for rows in ROWS)
        self.head = nn.Linear(8 * len(ROWS), 1)

    def forward(self, ids, offsets):
        return self.head(torch.cat([bag(i, o) for bag, i, o in zip(self.bags, ids, offsets)], 1))


def step(model, batch):
    return model(*batch).square().mean()


@pytest.fixture(scope="module")
def work():
    torch.manual_seed(0)
    model = Model()
    rng = torch.Generator().manual_seed(1)
    batches = [([torch.randint(rows, (3 * BATCH,), generator=rng) for rows in ROWS], [torch.arange(0, 3 * BATCH, 3)] * len(ROWS))
               for _ in range(4)]
    return Workload("small", model, torch.optim.SGD(model.parameters(), lr=0.1), step, batches, uses=frozenset(), inputs=tuple)


@pytest.fixture(scope="module")
def space(work):
    return SearchSpace(lift(work))


def comparison(ratio, incumbent_s=0.010, spread=0.001, pruned=False):
    def interval(value):
        return Interval(value, value * (1 - spread), value * (1 + spread))

    return Comparison(interval(ratio), interval(incumbent_s), interval(incumbent_s / ratio), 0.96, 6, 4, pruned, timed_s=0.5, warmup_s=0.25,
                      total_s=0.8)


def by_formula(config):
    """Seconds a step: fusing, a concat, a partition by table and a prefetch distance of 32 help, everything else is in the way."""
    if config.path == "native":
        return 0.010
    cost = 0.008 - 0.001 * bool(config.policy["concat"])
    for each in config.classes:
        cost += 0.0000025 * abs(each.knobs["prefetch"] - 32) - 0.0002 * (each.knobs["partition"] == "table")
        cost += 0.0003 * (each.knobs["update"] == "native") + 0.0002 * bool(each.knobs["dedup"])
    return cost


class Timer:
    """Measures by a formula, and remembers what it was asked: who against whom, and whether it was one of the last."""

    def __init__(self, cost=by_formula, hooks=()):
        self.cost, self.calls, self.bars, self.hooks = cost, [], [], dict(hooks)

    def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
        self.calls.append((incumbent, candidate, thorough and bar is None))
        self.bars.append(bar)
        if len(self.calls) in self.hooks:
            self.hooks[len(self.calls)]()
        a, b = self.cost(incumbent), self.cost(candidate)
        return comparison(a / b, a, pruned=a / b < prune_below)


def run(work, measure=None, verify=lambda config: {"checked": True}, **options):
    measure = Timer() if measure is None else measure
    return tune(work, measure=measure, verify=verify, progress=options.pop("progress", Progress()), **options)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def params_of(result):
    return [dict(record.params) for record in result.records]


def test_the_best_config_is_found_and_the_plan_says_why(work, space, tmp_path):
    timer = Timer()
    result = run(work, timer, trials=20)
    best = max((r for r in result.records if r.state == "complete"), key=lambda r: r.ratio)
    evidence = result.plan.evidence
    assert result.status == "complete"
    assert result.plan.config.path == "planned"
    assert by_formula(result.plan.config) <= by_formula(space.default) / 1.01
    assert evidence.speedup.value == pytest.approx(0.010 / by_formula(result.plan.config), rel=1e-6)
    assert best.ratio <= evidence.speedup.value * 1.011, "a trial within the margin of the champion need not replace it"
    assert evidence.native.value == pytest.approx(0.010)
    assert evidence.default.value == pytest.approx(by_formula(space.default), rel=1e-6)
    assert (evidence.status, result.plan.certificate) == ("measured", {"checked": True})
    assert [record.label for record in result.records][:2] == ["native", "default"]
    assert "update=native" in [record.label for record in result.records]
    assert evidence.trials == result.records
    assert evidence.predicted and "trial" in evidence.note
    result.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == result.plan


def test_the_last_measurements_are_against_native_and_the_default(work, space):
    timer = Timer()
    result = run(work, timer, trials=20)
    thorough = [(incumbent, candidate) for incumbent, candidate, is_thorough in timer.calls if is_thorough]
    assert thorough == [(space.default, result.plan.config), (Config.native(), result.plan.config)]


def test_the_shapes_of_cuda_kernels_are_searched(work, monkeypatch, tmp_path):
    """Blocks of 128 threads help, and two bags a group in the largest class; the heuristic has neither."""
    graph = on_cuda(lift(work))
    largest = SearchSpace(graph).classes[-1].name
    monkeypatch.setattr(search, "lift", lambda work: graph)

    def seconds(config):
        if config.path == "native":
            return 0.010
        shape = config.policy["block_threads"] == 128, config.knobs_at(largest)["bags_per_group"] == 2
        return 0.008 - 0.001 * shape[0] - 0.0005 * shape[1]

    result = run(work, Timer(seconds), trials=60)
    assert {record.params["block_threads"] for record in result.records if "block_threads" in record.params} == {"auto", 64, 128, 512}
    assert result.plan.config.policy["block_threads"] == 128
    assert result.plan.config.knobs_at(largest)["bags_per_group"] == 2
    result.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == result.plan
    schedule = build_schedule(graph.structure, result.plan.config)
    assert schedule.shape.block_threads == 128
    assert {schedule.tables[name].bags_per_group for name in SearchSpace(graph).classes[-1].tables} == {2}


def test_trials_are_a_frame(work):
    pytest.importorskip("pandas")
    frame = run(work, trials=5).trials()
    assert list(frame["label"][:2]) == ["native", "default"]
    assert frame["ratio"][0] == 1.0


def test_where_nothing_beats_native_the_plan_is_native_and_says_so(work):
    result = run(work, Timer(lambda config: 0.010 if config.path == "native" else 0.011), trials=8)
    assert result.plan.config == Config.native()
    assert result.plan.equivalence == "bitwise"
    assert "no planned config is faster than native by 1%" in result.plan.evidence.note
    assert "0.91x" in result.plan.evidence.note
    assert result.plan.evidence.default.value == pytest.approx(0.011)


def test_half_a_percent_is_no_reason_to_leave_native(work):
    result = run(work, Timer(lambda config: 0.010 if config.path == "native" else 0.00995), trials=6)
    assert result.plan.config == Config.native()


def test_a_trial_too_noisy_to_tell_is_measured_longer(work):
    class Noisy(Timer):
        def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
            first = len(self.calls) == 1
            super().__call__(incumbent, candidate, prune_below=prune_below, bar=bar, thorough=thorough)
            return comparison(self.cost(incumbent) / self.cost(candidate), 0.010, spread=0.5 if first else 0.001)

    timer = Noisy()
    result = run(work, timer, trials=2)
    assert result.plan.config.path == "planned"
    assert timer.bars == [None, None, 1.01, 1.01, None]


def test_the_champion_is_as_fast_as_its_confirmation_says(work, tmp_path):
    class Flattering(Timer):
        def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
            found = super().__call__(incumbent, candidate, prune_below=prune_below, bar=bar, thorough=thorough)
            return comparison(9.0, 0.010) if len(self.calls) == 2 else found

    path = tmp_path / "s"
    result = run(work, Flattering(), storage=path, trials=3)
    assert result.records[1].ratio == pytest.approx(9.0)
    assert result.records[2].state == "complete", "what is 0.85 of nine times native at best would be hopeless"


def test_the_fastest_confirmed_trial_is_the_champion_whoever_ran_it(space):
    configs = [space.native, space.default, *(config for _, config in space.toggles()[:2])]
    trials = [StudyTrial(number, "complete", space.to_params(config), 1 / speedup, "", {"confirmed": speedup})
              for number, (config, speedup) in enumerate(zip(configs, (1.0, 1.2, 1.5, 1.4), strict=True))]
    judge = Judge(space, Timer(), lambda config: {})
    judge.recall(trials)
    assert (judge.champion.config, judge.champion.trial) == (configs[2], 2)


class Lucky(Timer):
    """Every first measurement of a config flatters it; a repetition does not."""

    def __call__(self, incumbent, candidate, **options):
        first = all(candidate != seen for _, seen, _ in self.calls)
        found = super().__call__(incumbent, candidate, **options)
        return comparison(1.5, 0.010) if first and candidate.path == "planned" else found


def test_luck_that_a_fresh_measurement_does_not_confirm_is_not_promoted(work):
    result = run(work, Lucky(lambda config: 0.010), trials=6)
    assert result.plan.config == Config.native()


def test_a_champion_that_does_not_hold_gives_way_to_the_default(work, space):
    class Fading(Timer):
        def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
            if thorough and bar is None and incumbent.path == "planned":
                return comparison(1.0, by_formula(incumbent))
            return super().__call__(incumbent, candidate, prune_below=prune_below, bar=bar, thorough=thorough)

    result = run(work, Fading(), trials=16)
    assert result.plan.config == space.default
    assert "nothing beats it" in result.plan.evidence.note


def test_a_champion_that_does_not_hold_against_native_gives_way_to_it(work):
    class Fading(Timer):
        def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
            found = super().__call__(incumbent, candidate, prune_below=prune_below, bar=bar, thorough=thorough)
            return comparison(1.001, 0.010, spread=0.01) if thorough and bar is None and incumbent.path == "native" else found

    result = run(work, Fading(), trials=8)
    assert result.plan.config == Config.native()
    assert "measured again" in result.plan.evidence.note
    assert result.plan.evidence.planned == result.plan.evidence.native


def test_one_noisy_last_measurement_does_not_undo_a_champion(work):
    class Shaky(Timer):
        def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
            found = super().__call__(incumbent, candidate, prune_below=prune_below, bar=bar, thorough=thorough)
            first = thorough and bar is None and sum(last for _, _, last in self.calls) == 1
            return comparison(1.3, 0.010, spread=0.5) if first else found

    result = run(work, Shaky(), trials=2)
    assert result.plan.config.path == "planned"
    assert result.plan.evidence.speedup.low > 1


def test_hopeless_configs_are_pruned_and_never_chosen(work):
    result = run(work, Timer(lambda config: 0.010 if config.path == "native" else 0.02), trials=6)
    assert {record.state for record in result.records[1:]} == {"pruned"}
    assert result.records[1].ratio == pytest.approx(0.5)


def test_if_every_planned_trial_fails_the_plan_is_the_default_unmeasured(work, space):
    def cost(config):
        if config.path == "planned":
            raise MemoryError("no room")
        return 0.010

    result = run(work, Timer(cost), trials=30)
    assert result.plan.config == space.default
    assert result.plan.evidence.status == "unmeasured"
    assert result.plan.evidence.speedup is None
    assert "MemoryError: no room" in result.plan.evidence.note
    assert result.status == "failing"
    assert {record.state for record in result.records[1:]} == {"failed"}


def test_if_native_fails_tuning_fails_with_its_cause(work, tmp_path):
    def cost(config):
        raise ZeroDivisionError("in the loss")

    path = tmp_path / "s"
    with pytest.raises(SparseLiftError, match=r"'small'.*in the loss") as error:
        run(work, Timer(cost), storage=path)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert run(work, storage=path, trials=3).status == "complete", "a native step that was mended is tried again"


def test_what_is_not_equivalent_is_never_timed(work):
    def verify(config):
        if any(each.knobs["update"] == "fused" for each in config.classes):
            raise EquivalenceError("output 3 differs")
        return {}

    timer = Timer()
    result = run(work, timer, verify, trials=4)
    timed = {config for call in timer.calls for config in call[:2] if config.path == "planned"}
    assert timed
    assert all(each.knobs["update"] != "fused" for config in timed for each in config.classes)
    refused = [record for record in result.records if record.state == "infeasible"]
    assert any("not equivalent to native: output 3 differs" in record.reason for record in refused)


def test_where_nothing_is_equivalent_the_plan_is_native(work, monkeypatch):
    monkeypatch.setattr(study, "_MAX_BARREN", 10)

    def verify(config):
        raise EquivalenceError("wrong")

    result = run(work, verify=verify, trials=4)
    assert result.plan.config == Config.native()
    assert result.status == "exhausted"


def test_a_default_that_is_not_equivalent_is_never_the_plan(work):
    def verify(config):
        if all(each.knobs["update"] == "fused" for each in config.classes):
            raise EquivalenceError("wrong")
        return {}

    def cost(config):
        if config.path == "planned":
            raise MemoryError
        return 0.010

    result = run(work, Timer(cost), verify, trials=40)
    assert result.plan.config == Config.native()


def test_constraints_hold_for_every_config_that_runs(work):
    timer = Timer()
    limits = Constraints(equivalence="bitwise", deny=("dedup",), pin={"prefetch": 8})
    result = run(work, timer, trials=12, constraints=limits)
    planned = [config for call in timer.calls for config in call[:2] if config.path == "planned"]
    assert {each.knobs["prefetch"] for config in planned for each in config.classes} == {8}
    assert {each.knobs["dedup"] for config in planned for each in config.classes} == {False}
    assert result.plan.equivalence == "bitwise"
    assert result.plan.constraints == limits


def test_what_needs_too_much_memory_is_infeasible_and_does_not_run(work, space):
    chained = next(config for label, config in space.toggles() if label == "coalesce=chain")       # heads for every row
    limit = sum(memory_bytes(space.graph, chained).values()) - 1
    limits = Constraints(memory_bytes=limit)
    timer = Timer()
    found = Judge(SearchSpace(space.graph, limits), timer, lambda config: {}).judge(chained)
    assert isinstance(found, Infeasible) and "memory_bytes" in found.reason
    assert timer.calls == []
    run(work, timer, trials=10, constraints=limits)
    planned = {config for call in timer.calls for config in call[:2] if config.path == "planned"}
    assert all(sum(memory_bytes(space.graph, config).values()) <= limit for config in planned)


def test_a_pinned_path_needs_not_beat_native(work):
    timer = Timer(lambda config: 0.010 if config.path == "native" else 0.012)
    result = run(work, timer, trials=5, constraints=Constraints(pin={"path": "planned"}))
    assert result.plan.config.path == "planned"
    assert result.plan.evidence.speedup.value == pytest.approx(0.010 / 0.012)
    native = run(work, trials=5, constraints=Constraints(pin={"path": "native"}))
    assert native.plan.config == Config.native()
    assert native.status == "exhausted"
    assert "pinned" in native.plan.evidence.note


def test_a_pinned_path_that_is_not_equivalent_is_an_error(work):
    def verify(config):
        raise EquivalenceError("output 3 differs")

    with pytest.raises(EquivalenceError, match="output 3"):
        run(work, verify=verify, trials=3, constraints=Constraints(pin={"path": "planned"}))


def test_a_champion_that_is_not_equivalent_any_more_gives_way_to_native(work, tmp_path):
    path = tmp_path / "s"
    assert run(work, storage=path, trials=6).plan.config.path == "planned"

    def verify(config):
        raise EquivalenceError("another kernel")

    result = run(work, verify=verify, storage=path, trials=6)
    assert result.plan.config == Config.native()
    assert "another kernel" in result.plan.evidence.note


def test_a_resumed_search_goes_on_where_it_ended(work, tmp_path):
    whole = run(work, trials=24, seed=3)
    path, calls = tmp_path / "s", 0
    for total in (1, 9, 24):
        timer = Timer()
        result = run(work, timer, storage=path, trials=total, seed=3)
        calls += sum(not thorough for _, _, thorough in timer.calls)
    assert params_of(result) == params_of(whole)
    assert result.plan.config == whole.plan.config
    timer = Timer()
    again = run(work, timer, storage=path, trials=24, seed=3)
    assert all(thorough for _, _, thorough in timer.calls), "nothing but the last measurements is repeated"
    assert again.plan.config == whole.plan.config
    assert trial_records(path) == again.records


@pytest.mark.parametrize(("good", "bad"), [
    (r'"speedup":\[[^]]*\]', '"speedup":[1,"x",1]'), (r'"native_s":\[[^]]*\]', '"native_s":[]'), (r'"values":\[[^]]*\]', '"values":["x"]'),
    (r'"confirmed":[0-9.]+', '"confirmed":{}'), (r'"pruned":false', '"pruned":3'), (r'"certificate":\{[^}]*\}', '"certificate":1'),
    (r'"seeds":\[\[', '"seeds":["xy",[')])
def test_damaged_facts_are_named_to_every_reader(work, tmp_path, good, bad):
    path = tmp_path / "s"
    run(work, storage=path, trials=3)
    text, changes = re.subn(good, bad, path.read_text(), count=1)
    assert changes
    path.write_text(text)
    for read in (lambda: trial_records(path), lambda: run(work, storage=path, trials=4)):
        with pytest.raises(SparseLiftError, match="damaged") as error:
            read()
        assert str(path) in str(error.value)


def test_other_constraints_are_another_study(work, tmp_path):
    path = tmp_path / "s"
    run(work, storage=path, trials=5)
    result = run(work, storage=path, trials=5, constraints=Constraints(equivalence="bitwise"))
    assert len(result.records) == 5
    assert trial_records(path) == result.records


@pytest.mark.parametrize("at", [1, 2, 3, 9])
def test_ctrl_c_in_a_trial_keeps_what_was_measured(work, tmp_path, at):
    path = tmp_path / "s"
    result = run(work, Timer(hooks={at: interrupt}), storage=path, trials=12)
    assert result.status == "interrupted"
    assert [record.reason for record in result.records if record.state == "failed"] == ["KeyboardInterrupt"]
    assert result.plan.evidence.status == ("unmeasured" if at == 1 else "interrupted")
    if at == 9:
        assert result.plan.config.path == "planned"
        assert result.plan.evidence.speedup.value > 1
        assert result.plan.certificate == {"checked": True}
    again = run(work, storage=path, trials=12)
    assert again.status == "complete"
    assert sum(record.state in ("complete", "pruned") for record in again.records) == 12


def test_ctrl_c_in_a_resumed_search_keeps_certificate_and_confirmed_speedup(work, tmp_path):
    class Flattering(Timer):
        def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
            found = super().__call__(incumbent, candidate, prune_below=prune_below, bar=bar, thorough=thorough)
            return found if bar or thorough or candidate.path == "native" else comparison(9.0, 0.010)

    path = tmp_path / "s"
    first = run(work, Flattering(), storage=path, trials=2).plan
    again = run(work, Timer(hooks={1: interrupt}), storage=path, trials=12)
    assert (again.status, again.plan.config) == ("interrupted", first.config)
    assert again.plan.certificate == first.certificate == {"checked": True}
    assert again.plan.evidence.speedup.value == pytest.approx(first.evidence.speedup.value), "not the trial's own nine"


def test_ctrl_c_in_the_last_measurements_keeps_the_best_by_its_trial(work):
    class Impatient(Timer):
        def __call__(self, incumbent, candidate, **options):
            if options.get("thorough") and not options.get("bar"):
                interrupt()
            return super().__call__(incumbent, candidate, **options)

    result = run(work, Impatient(), trials=10)
    assert (result.status, result.plan.evidence.status) == ("interrupted", "interrupted")
    assert result.plan.config.path == "planned"
    assert result.plan.evidence.native.value == pytest.approx(0.010)
    assert result.plan.evidence.default is not None


@pytest.mark.parametrize(("timeout", "waits"), [(None, False), (150_000.0, True), (250_000.0, False)])
def test_what_takes_long_to_set_up_waits_unless_there_is_time_for_it(work, monkeypatch, timeout, waits):
    """A configuration that takes 10,000 s is for searches of twenty times that, and others name it."""
    monkeypatch.setattr(search, "setup_s", lambda structure, config, first: 1e4 * (config.policy.get("concat") is False))
    result = run(work, trials=14, timeout=timeout)
    assert result.status == "complete"
    assert waits == all(params.get("concat") is not False for params in params_of(result))
    said = "left out: concat=False, which takes about 10000 s to set up; a search of 200000 s has time for it"
    assert waits == (said in result.plan.evidence.note)


def test_a_timeout_leaves_time_for_the_last_measurements(work, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(search.time, "perf_counter", lambda: now[0])

    class Slow(Timer):
        def __call__(self, incumbent, candidate, **options):
            now[0] += 10.0
            return super().__call__(incumbent, candidate, **options)

    timer = Slow()
    result = run(work, timer, trials=64, timeout=200.0)
    assert result.status == "timeout"
    assert now[0] <= 200
    assert any(thorough for _, _, thorough in timer.calls)
    assert len(result.records) >= 5
    overhead = result.plan.evidence.overhead
    assert overhead["wall_s"] == pytest.approx(now[0])
    assert overhead["timed_s"] == pytest.approx(0.5 * len(timer.calls))
    assert overhead["warmup_s"] == pytest.approx(0.25 * len(timer.calls))
    assert sum(seconds for name, seconds in overhead.items() if name != "wall_s") == pytest.approx(overhead["wall_s"])


@pytest.mark.parametrize("options", [{"trials": 0}, {"timeout": 0.0}, {"timeout": float("nan")}])
def test_illegal_budgets_are_refused(work, options):
    with pytest.raises(ValueError, match="at least 1"):
        run(work, **options)


def test_progress_tells_every_trial(work):
    class Told(Progress):
        def __init__(self):
            self.log = []

        def begin(self, title, total, done=0):
            self.log.append(("begin", total, done))

        def advance(self, text, best="", counts=True):
            self.log.append((text, best, counts))

        def end(self):
            self.log.append("end")

    told = Told()
    run(work, trials=5, progress=told)
    assert told.log[0] == ("begin", 5, 0)
    assert told.log[-1] == "end"
    assert len(told.log) == 7
    assert "default" in told.log[2][0] and "1.38x" in told.log[2][0]
    assert told.log[1][0].endswith("1.00x, and [1.00, 1.00] against itself: the noise")
    assert [entry[1] for entry in told.log[1:3]] == ["best: native", "best: trial 1, confirmed 1.38x"]


# With real steps.

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
