"""What a search finds and settles for, on a small model whose steps are timed by a formula."""

from __future__ import annotations

import pytest

from sparselift.errors import EquivalenceError, LiftRefused, SparseLiftError
from sparselift.lift import lift
from sparselift.plan import Plan
from sparselift.schedule import build_schedule
from sparselift.space import Config, Constraints, SearchSpace, memory_bytes
from sparselift.tuning import search, study
from sparselift.tuning.judge import Judge
from sparselift.tuning.study import Infeasible, StudyTrial
from tests.unit.example_graphs import on_cuda
from tests.unit.search_models import Timer, by_formula, comparison, run, small_workload


@pytest.fixture(scope="module")
def work():
    return small_workload()


@pytest.fixture(scope="module")
def space(work):
    return SearchSpace(lift(work))


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


def test_what_the_model_does_not_allow_is_logged_once(work, caplog):
    """Many configs share the choice."""
    def verify(config):
        if config.policy["concat"]:
            raise LiftRefused("concat=True: no room")
        return {}

    with caplog.at_level("INFO", "sparselift.tuning"):
        result = run(work, verify=verify, trials=8)
    assert sum("concat=True: no room" in record.reason for record in result.records) > 1
    assert [record.levelname for record in caplog.records if record.getMessage().endswith("concat=True: no room")] == ["INFO"]


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
