"""Interleaved timing, on a clock that the steps themselves advance."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import random
import tempfile
import threading
from itertools import pairwise
from statistics import median

import pytest

from sparselift.measure import Steps, _tell_of_waiting, compare, median_interval

CONTEXT = multiprocessing.get_context("fork")


class World:
    """A clock, and candidates whose steps take what they are told to."""

    def __init__(self, drift=0.0, entering_s=0.0):
        self.now, self.drift, self.entering_s, self.log = 0.0, drift, entering_s, []

    def clock(self):
        return self.now

    def candidate(self, name, step_s):
        return _Timed(self, name, step_s if callable(step_s) else lambda: step_s)


class _Timed:
    def __init__(self, world, name, step_s):
        self.world, self.name, self.step_s = world, name, step_s

    def enter(self):
        self.world.now += self.world.entering_s
        self.world.log.append(f"enter {self.name}")

    def run(self, batches, coming):
        for batch in batches:
            self.world.now += self.step_s() * (1 + self.world.drift * self.world.now)
            self.world.log.append((self.name, batch))


def run(a=0.02, b=0.01, batches=range(5), drift=0.0, entering_s=0.0, **options):
    world = World(drift, entering_s)
    result = compare(world.candidate("a", a), world.candidate("b", b), list(batches), clock=world.clock, **options)
    return result, world


def test_a_candidate_is_told_what_comes_next():
    """Its own next block, whatever the other one runs in between."""
    class Asking:
        def __init__(self, world):
            self.world, self.calls = world, []

        def enter(self):
            return

        def run(self, batches, coming):
            self.world.now += 0.01 * len(batches)
            self.calls.append((batches, [next(coming) for _ in range(7)]))

    world = World()
    sides = Asking(world), Asking(world)
    compare(*sides, list(range(5)), clock=world.clock, steps_per_block=3, min_pairs=4, max_pairs=4, warmups=(1, 2))
    for side in sides:
        blocks = [(batches, coming) for batches, coming in side.calls if len(batches) == 3]
        assert [batches for batches, _ in blocks] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
        for (batches, coming), (after, _) in pairwise(side.calls):
            if len(batches) == 3 and len(after) == 3:
                assert coming[:3] == after
        for batches, coming in side.calls:
            own = batches[0] if len(batches) == 1 else None
            start = coming[0]
            assert coming == [(start + k) % 5 for k in range(7)] and (own is None or own in (3, 4))


def test_the_ratio_is_that_of_the_steps():
    result, _ = run(a=0.03, b=0.01)
    assert result.speedup.value == pytest.approx(3)
    assert (result.incumbent.value, result.candidate.value) == (pytest.approx(0.03), pytest.approx(0.01))
    assert result.speedup.low <= result.speedup.value <= result.speedup.high
    assert not result.pruned


def test_blocks_run_in_abba_order_on_the_same_batches():
    _, world = run(steps_per_block=2, min_pairs=6, max_pairs=6, warmups=(1, 1))
    switched = [entry for entry in world.log if isinstance(entry, str)]
    assert switched == ["enter b", "enter a"] + ["enter b", "enter a"] * 3
    steps = [entry for entry in world.log if not isinstance(entry, str)]
    blocks = steps[2:]                                             # the first warm-ups
    expected = []
    for pair, order in enumerate(("ab", "ba") * 3):
        chosen = [(pair * 2) % 5, (pair * 2 + 1) % 5]
        expected += [(order[0], batch) for batch in chosen] + [(order[1], 4)] + [(order[1], batch) for batch in chosen]
    assert blocks == expected


def test_a_drift_that_is_steady_cancels():
    result, _ = run(a=0.02, b=0.02, drift=0.05, min_pairs=8, max_pairs=8, steps_per_block=5)
    one_sided = [run(a=0.02, b=0.02, drift=0.05, min_pairs=1, max_pairs=1, steps_per_block=5)[0].speedup.value]
    assert abs(math.log(result.speedup.value)) < abs(math.log(one_sided[0])) / 5
    assert result.speedup.low < 1 < result.speedup.high


def test_outliers_do_not_move_the_median():
    calls = []

    def sometimes_stalled():
        calls.append(None)
        return 1.0 if len(calls) % 17 == 0 else 0.01

    result, _ = run(a=0.02, b=sometimes_stalled, min_pairs=11, max_pairs=11, steps_per_block=2)
    assert result.speedup.value == pytest.approx(2)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(1)
    covered = 0
    for _ in range(300):
        result, _ = run(a=lambda: 0.012 * rng.lognormvariate(0, 0.2), b=lambda: 0.01 * rng.lognormvariate(0, 0.2), min_pairs=9, max_pairs=9,
                        steps_per_block=1)
        covered += result.speedup.low <= 1.2 <= result.speedup.high
    assert covered / 300 > 0.92


def test_a_hopeless_candidate_is_pruned_early():
    result, _ = run(a=0.01, b=0.02, prune_below=0.9)
    assert (result.pruned, result.pairs, result.speedup.value) == (True, 3, pytest.approx(0.5))
    assert result.confidence == pytest.approx(0.75), "three pairs cannot give an interval of 95%"


def test_one_pair_that_reaches_the_bar_keeps_a_candidate():
    times = iter([0.01] * 3 + [0.01, 0.005] + [0.01] * 1000)
    result, _ = run(a=0.01, b=lambda: next(times), prune_below=1.5, steps_per_block=1, max_pairs=6)
    assert (result.pruned, result.pairs) == (False, 6)


def test_noise_takes_more_pairs_up_to_the_bound():
    rng = random.Random(2)
    noisy, _ = run(b=lambda: 0.01 * rng.uniform(0.7, 1.3), max_pairs=20, steps_per_block=1)
    steady, _ = run(max_pairs=20, steps_per_block=1)
    assert (noisy.pairs, steady.pairs) == (20, 6)


def test_a_question_that_is_answered_takes_no_more_pairs():
    rng = random.Random(2)
    noisy = {"b": lambda: 0.01 * rng.uniform(0.7, 1.3), "steps_per_block": 1, "max_pairs": 40}
    assert run(**noisy, bar=1.01)[0].pairs == run(**noisy, bar=4.0)[0].pairs == 8, "the fewest that give an interval of 99%"
    assert run(**noisy, bar=2.0)[0].pairs == 40


def test_looking_after_every_pair_seldom_errs():
    rng = random.Random(3)
    results = [run(a=0.01, b=lambda: 0.01 * rng.lognormvariate(0, 0.1), steps_per_block=1, bar=1.0, max_pairs=40, precision=0.0)[0]
               for _ in range(200)]
    assert sum(not result.speedup.low <= 1 <= result.speedup.high for result in results) / 200 < 0.1


def test_time_that_is_up_ends_a_comparison_that_has_its_fewest_pairs():
    rng = random.Random(2)
    noisy = {"b": lambda: 0.01 * rng.uniform(0.7, 1.3), "steps_per_block": 1, "max_pairs": 20}
    assert 6 < run(**noisy, max_s=0.5)[0].pairs < 20
    assert run(**noisy, max_s=0.0)[0].pairs == 6


def test_blocks_of_one_step_come_in_twos():
    _, world = run(a=0.2, b=0.2, min_pairs=6, max_pairs=6, warmups=(1, 1))
    assert [entry for entry in world.log if isinstance(entry, str)] == ["enter b", "enter a"] * 2 + ["enter b"]


def test_blocks_fill_the_time_that_they_are_given():
    assert run(a=0.02, b=0.01, block_s=0.11)[0].steps_per_block == 6
    assert run(a=0.01, b=0.02, block_s=0.11)[0].steps_per_block == 6, "the slower one counts"
    assert run(a=2.0, b=1.0, block_s=0.12)[0].steps_per_block == 1
    assert run(a=1e-6, b=1e-6, block_s=0.12)[0].steps_per_block == 64


def test_every_second_is_accounted_for():
    result, world = run(entering_s=0.5, min_pairs=6, max_pairs=6, steps_per_block=4)
    switches = sum(isinstance(entry, str) for entry in world.log)
    assert result.total_s == pytest.approx(world.now)
    assert result.timed_s == pytest.approx(6 * 4 * 0.03)
    assert result.total_s - result.timed_s - result.warmup_s == pytest.approx(switches * 0.5)
    assert result.incumbent.value == pytest.approx(0.02), "switching is not timed"


def test_a_candidate_that_is_costly_to_enter_stays_longer():
    result, world = run(entering_s=0.1, min_pairs=8, max_pairs=8)
    switched = [entry for entry in world.log if isinstance(entry, str)]
    assert switched == ["enter b", "enter a"] * 2
    assert result.pairs == 8
    assert (result.total_s - result.timed_s - result.warmup_s) / result.total_s < 0.25
    cheap, world = run(entering_s=0.005, min_pairs=8, max_pairs=8)
    assert len([entry for entry in world.log if isinstance(entry, str)]) == 10
    assert (cheap.total_s - cheap.timed_s - cheap.warmup_s) / cheap.total_s < 0.05


def test_garbage_collection_is_off_inside_and_as_it_was_outside():
    seen = []
    compare(Steps(lambda batch: seen.append(gc.isenabled())), Steps(lambda batch: None), [0], min_pairs=1, max_pairs=1)
    assert set(seen) == {False}
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        compare(Steps(lambda batch: 1 / 0), Steps(lambda batch: None), [0])
    assert gc.isenabled()
    gc.disable()
    try:
        compare(Steps(lambda batch: None), Steps(lambda batch: None), [0], min_pairs=1, max_pairs=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def _compare_elsewhere(path, started, release):
    tempfile.tempdir = path

    def step(batch):
        started.set()
        release.wait(30)

    compare(Steps(step), Steps(step), [0], min_pairs=1, max_pairs=1)


def test_two_processes_do_not_time_each_other(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started, release = CONTEXT.Event(), CONTEXT.Event()
    child = CONTEXT.Process(target=_compare_elsewhere, args=(str(tmp_path), started, release))
    child.start()
    assert started.wait(30)
    _tell_of_waiting.cache_clear()
    done = []
    with caplog.at_level(logging.WARNING, "sparselift"):
        waiting = threading.Thread(target=lambda: done.append(run()))
        waiting.start()
        waiting.join(0.2)
        assert not done
        release.set()
        waiting.join(30)
    child.join(30)
    assert done and child.exitcode == 0
    assert "take turns" in caplog.text


def test_a_place_without_locks_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    assert run()[0].speedup.value == pytest.approx(2)


@pytest.mark.parametrize("options, named", [
    ({"batches": ()}, "batch"), ({"min_pairs": 0}, "min_pairs"), ({"min_pairs": 7, "max_pairs": 6}, "max_pairs"),
    ({"steps_per_block": 0}, "steps_per_block"), ({"warmups": (0, 1)}, "warmups"), ({"prune_pairs": 0}, "prune_pairs"),
])
def test_illegal_counts_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        run(**options)


def test_a_clock_that_stands_still_is_refused():
    with pytest.raises(ValueError, match="clock"):
        compare(Steps(lambda batch: None), Steps(lambda batch: None), [0], clock=lambda: 1.0)


def test_a_real_clock_orders_real_work():
    result = compare(Steps(lambda batch: sum(range(40_000))), Steps(lambda batch: sum(range(4_000))), [0], block_s=0.002, max_pairs=9)
    assert result.speedup.low > 2


@pytest.mark.parametrize("count, rank, coverage", [(1, 1, 0.0), (5, 1, 0.9375), (6, 1, 0.96875), (8, 1, 0.9921875), (9, 2, 0.9609375),
                                                   (12, 3, 0.961426), (25, 8, 0.956715)])
def test_order_statistics_are_those_of_the_tables(count, rank, coverage):
    low, mid, high, covered = median_interval(range(count, 0, -1))
    assert (low, high) == (rank, count + 1 - rank)
    assert mid == median(range(1, count + 1))
    assert covered == pytest.approx(coverage, abs=1e-6)


def test_the_median_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        median_interval([])
