"""The benchmark's own parts: pairing, the CSV, the checks before timing, and kernels that do nothing."""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import sparselift as sl
from sparselift.plan import default_plan
from tests.unit.scripts import BENCHMARKS, SHARED_BENCH, importable

needs_bench = pytest.mark.skipif(not SHARED_BENCH.exists(), reason="no ../shared/bench")


@pytest.fixture
def benchmarks() -> Iterator[ModuleType]:
    """The scripts, importable."""
    with importable(BENCHMARKS, SHARED_BENCH):
        import first_light
        yield first_light


@pytest.fixture
def case(benchmarks: ModuleType) -> object:
    """A small workload, multi-hot and with duplicates."""
    return make_case("sgd")


def make_case(optimizer: str, dlrm: bool = False) -> object:
    from cases import Bench, Case
    bench = Bench.load(SHARED_BENCH)
    shape = bench.workloads.Workload("small", "", (50, 20, 7), (3, 1, 5), 8, 16, None, (optimizer,), dlrm)
    return Case(bench, shape, optimizer, seed=0)


def test_both_sides_see_the_same_batches_in_mixed_order(benchmarks: ModuleType) -> None:
    from interleave import WARMUP_REPS, interleave
    seen: list[tuple[str, int]] = []
    times = interleave([lambda n: seen.append(("native", n)), lambda n: seen.append(("planned", n))], num_batches=3, reps=40, seed=0)
    assert times.shape == (40, 2) and (times > 0).all()
    pairs = [seen[i:i + 2] for i in range(0, len(seen), 2)]
    assert len(pairs) == 40 + WARMUP_REPS
    assert all(a[1] == b[1] == rep % 3 and {a[0], b[0]} == {"native", "planned"} for rep, (a, b) in enumerate(pairs))
    assert {pair[0][0] for pair in pairs} == {"native", "planned"}


def test_rows_hold_paired_ratios_and_make_a_csv(benchmarks: ModuleType, tmp_path: Path) -> None:
    from interleave import paired_row, single_row, write_rows
    native = np.array([2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]) * 1e-3
    row = paired_row(native, native / [2, 2, 2, 4, 4, 4, 4], workload="W", side="plan", config="default", optimizer="sgd", huge_pages="on",
                     traffic_bytes=10**6)
    assert (row.ratio, row.low, row.high) == pytest.approx((4, 2, 4)) and row.baseline_median_ms == pytest.approx(8)
    assert row.median_ms == pytest.approx(2.5) and row.gbps == pytest.approx(0.4) and row.spread == pytest.approx(2)
    path = tmp_path / "rows.csv"
    write_rows(path, [row, single_row([0.25], workload="lift", side="plan", config="", optimizer="sgd")])
    one, two = csv.DictReader(path.open())
    assert one["ratio"] == "4" and one["threads"] == str(torch.get_num_threads()) and "torch=" in one["versions"]
    assert two["median_ms"] == "250" and two["ratio"] == ""


@needs_bench
@pytest.mark.parametrize(("optimizer", "dlrm"), [("sgd", False), ("rowwise_adagrad", False), ("adagrad", False), ("sparse_adam", False),
                                                 ("sgd", True), ("rowwise_adagrad", True)])
def test_planned_and_native_sides_agree(benchmarks: ModuleType, optimizer: str, dlrm: bool) -> None:
    from cases import check
    case = make_case(optimizer, dlrm)
    native, planned = case.side(planned=False), case.side(planned=True)
    start = [bag.weight.detach().clone() for bag in native.model.emb_l]
    sl.apply(default_plan(sl.lift(planned.workload())), planned.model, planned.optimizers)
    check(native, planned)
    assert not any(torch.equal(bag.weight, old) for bag, old in zip(native.model.emb_l, start))


@needs_bench
@pytest.mark.parametrize("fault", ["touched row", "other row", "output"])
def test_the_check_sees_faults(benchmarks: ModuleType, case: object, fault: str) -> None:
    from cases import CheckFailed, check
    native, planned = case.side(planned=False), case.side(planned=True)
    rows = case.touched(0, steps=2)
    untouched = next(row for row in range(50) if row not in rows)

    class Faulty(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()
            with torch.no_grad():
                if fault != "output":
                    planned.model.emb_l[0].weight[rows[3] if fault == "touched row" else untouched, 2] += 1e-6
                else:
                    planned.model.emb_l[1].weight.add_(1.0)

    planned.optimizers = [Faulty(planned.model.parameters(), lr=0.01)]
    with pytest.raises(CheckFailed, match={"touched row": "table 0 is off", "other row": f"row {untouched} changed",
                                           "output": "output of step 2 is off"}[fault]):
        check(native, planned)


def test_calls_of_modules_are_timed_beside_torchs(benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import module_overhead
    monkeypatch.setattr(module_overhead, "CALLS", 2)
    path = tmp_path / "rows.csv"
    assert module_overhead.main(["--workloads", "tiny", "--reps", "2", "--out", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == len(list(module_overhead.tiny_cases())) and all(float(row["ratio"]) > 0 for row in rows)


@needs_bench
def test_our_modules_train_the_shared_workloads_as_torchs_do(benchmarks: ModuleType, case: object) -> None:
    import module_overhead
    from cases import check
    ours = module_overhead.with_our_modules(case.side(planned=False))
    check(case.side(planned=False), ours)
    assert {bag.last_path for bag in ours.model.emb_l} == {"fused bag"}


@needs_bench
def test_rewrites_of_the_dense_part_are_timed_apart(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import dense_part
    shape = make_case("sgd", dlrm=True).shape
    monkeypatch.setattr("workloads.load_workloads", lambda: {"small": shape})
    path = tmp_path / "rows.csv"
    assert dense_part.main(["--workloads", "small", "--threads", "1", "--reps", "2", "--out", str(path)]) == 0
    rows = [(row["side"], row["baseline"]) for row in csv.DictReader(path.open())]
    assert rows[:3] == [("modules", "torch"), ("sparse", "torch"), ("interaction", "torch")]
    assert set(rows[1:]) == {(side, baseline) for side in dense_part.SIDES for baseline in ("torch", "sparse") if side != baseline}


@needs_bench
def test_plans_of_one_model_are_switched_and_each_runs_its_own(benchmarks: ModuleType) -> None:
    import dense_part
    variants = dense_part.Variants(make_case("sgd", dlrm=True).side(planned=True))
    for name in (*dense_part.SIDES, *dense_part.SIDES):
        variants.step(name)(0)
    variants.switch("")
    assert not [path for path, module in variants.side.model.named_modules() if "forward" in module.__dict__]
    for name, pins in dense_part.SIDES.items():
        runtime = variants.applied[name].runtime
        crossing = runtime.preludes[0].group.crossing
        assert (crossing is not None) == pins["interaction"] and (crossing is None or crossing.calls == 2)
        assert (runtime.dense is not None) == (pins["linear"] != "native") and (runtime.dense is None or runtime.dense.calls == 2 * 6)


@needs_bench
def test_traffic_is_counted(benchmarks: ModuleType, case: object) -> None:
    unique = sum(len(ids.unique()) for batch in case.batches for ids in batch.table_indices) / len(case.batches)
    lookups, outputs = 16 * (3 + 1 + 5), 16 * 3 * 8
    assert case.traffic_bytes() == int(2 * 8 * lookups + 2 * 4 * outputs + unique * 3 * 4 * 8)


@needs_bench
@pytest.mark.parametrize(("optimizer", "states"), [("sgd", None), ("rowwise_adagrad", (5, 16)), ("adagrad", (39, 16))])
def test_the_floor_moves_each_distinct_row_once_and_the_rest_in_a_cache(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                                                        optimizer: str, states: tuple[int, int] | None) -> None:
    import floor
    case, seen = make_case(optimizer), []

    def visit(table: torch.Tensor, ids: torch.Tensor, update: bool = False) -> None:
        seen.append((table.shape, len(ids), len(ids.unique()), update))

    monkeypatch.setattr(floor, "visit_rows", visit)
    side = floor.FloorSide(case)
    side.step(1)
    unique, lookups, bags = len(case.batches[1].row_ids.unique()), 16 * (3 + 1 + 5), 16 * 3
    assert seen[:1] + seen[2:3] == [((77, 16), unique, unique, update) for update in (False, True)]
    assert seen[1] == (side.cached.shape, lookups - unique + lookups - bags, seen[1][2], False) and side.output.numel() == bags * 8
    assert [(*shape,) for shape, *_ in seen[3:]] == ([] if states is None else [states])
    for _, visited, distinct, update in seen[3:]:
        assert visited == distinct and update


@needs_bench
def test_peers_are_timed_beside_the_plan(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch, case: object,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    import peer_sides
    from cases import check
    monkeypatch.setattr(case.bench.implementations, "FbgemmPeer", _stands_in_for_fbgemm(case.bench.implementations))
    monkeypatch.setattr(case.bench.implementations, "TorchRecPeer", _missing)
    peer_sides._say.cache_clear()
    [peer] = peer_sides.peer_sides(case, peer_sides.PEERS)
    assert peer.name == "fbgemm" and "skipped torchrec: not installed (No module named 'torchrec')" in capsys.readouterr().err
    assert logging.getLogger("sparselift").isEnabledFor(logging.WARNING), "only the peers are to be silent"
    check(case.side(planned=False), peer)
    peer.model.emb_l[0].weight[case.touched(0, steps=2)[0]] += 1
    with pytest.raises(Exception, match="is off by"):
        check(case.side(planned=False), peer)


def _stands_in_for_fbgemm(implementations: ModuleType) -> type:
    class StandIn(implementations.TorchPeer):
        pass

    return StandIn


def _missing(*_: object) -> None:
    raise ImportError("No module named 'torchrec'")


@needs_bench
def test_silent_kernels_leave_everything_and_come_back(benchmarks: ModuleType, case: object) -> None:
    from quiet import silence
    side = case.side(planned=True)
    sl.apply(default_plan(sl.lift(side.workload())), side.model, side.optimizers)
    before = [bag.weight.detach().clone() for bag in side.model.emb_l]
    with silence(side.model):
        for _ in range(3):
            side.step(0)
    assert all(torch.equal(bag.weight, old) for bag, old in zip(side.model.emb_l, before))
    side.step(0)
    assert not any(torch.equal(bag.weight, old) for bag, old in zip(side.model.emb_l, before))


@needs_bench
def test_a_hollow_step_looks_nothing_up_and_leaves_the_modules_native(benchmarks: ModuleType, case: object) -> None:
    side = case.side(planned=False)
    before = [bag.weight.detach().clone() for bag in side.model.emb_l]
    assert all(seconds > 0 for seconds in benchmarks.torch_seconds(side, 2))
    assert all(torch.equal(bag.weight, old) for bag, old in zip(side.model.emb_l, before))
    assert side.step(0).shape == case.output_grad.shape
    assert not any(torch.equal(bag.weight, old) for bag, old in zip(side.model.emb_l, before))


@pytest.mark.slow
@needs_bench
def test_the_driver_writes_rows(benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:
    import cases
    bench = cases.Bench.load(SHARED_BENCH)
    small = bench.workloads.Workload("W2", "", (50, 20), (3, 1), 8, 16, None, ("sgd", "adagrad"), False)
    full = bench.workloads.Workload("W6b", "", (50, 20), (3, 1), 8, 16, None, ("sgd",), True)
    monkeypatch.setattr(bench.workloads, "load_workloads", lambda: {"W2": small, "W6b": full})
    out, threads = tmp_path / "rows.csv", torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["first_light.py", "--workloads", "W2,W6b", "--threads", "1", "--reps", "7", "--out", str(out),
                                      "--bench-folder", str(SHARED_BENCH), "--no-floor", "--peers", ""])
    try:
        assert benchmarks.main() == 0
    finally:
        torch.set_num_threads(threads)
    rows = list(csv.DictReader(out.open()))
    assert [(row["workload"], row["optimizer"], row["huge_pages"]) for row in rows] == [
        ("W2", "sgd", "on"), ("W2 without kernels", "sgd", ""), ("W2, torch alone", "sgd", ""), ("W2", "sgd", "off"),
        ("W2", "adagrad", "on"), ("W2 without kernels", "adagrad", ""), ("W2, torch alone", "adagrad", ""), ("W2", "adagrad", "off"),
        ("W6b lift, 8 batches", "sgd", ""), ("W6b", "sgd", "on"),
        ("W6b", "sgd", "off")]
    assert capsys.readouterr().out.count(" ms") >= len(rows)


@needs_bench
def test_unknown_workloads_are_a_usage_error(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["first_light.py", "--workloads", "W1,W99"])
    with pytest.raises(SystemExit, match="2"):
        benchmarks.main()
    assert "there is no workload W99; there are W1, W2" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["first_light.py", "--peers", "hugectr"])
    with pytest.raises(SystemExit, match="2"):
        benchmarks.main()
    assert "there is no peer hugectr; there are fbgemm, torchrec" in capsys.readouterr().err


def test_without_the_shared_benchmark_nothing_runs(benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["first_light.py", "--bench-folder", str(tmp_path)])
    assert benchmarks.main() == 3
    assert "skipped W1, W2" in capsys.readouterr().err
