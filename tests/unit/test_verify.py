"""The certificate: it holds for every schedule that is right, and fails for faults planted in kernels and in the executor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparselift.errors import EquivalenceError
from sparselift.ir import Feature, InputPath, Structure, Table
from sparselift.kernels import get_backend
from sparselift.kernels.base import BagProgram, KernelBackend, KernelShape
from sparselift.optim import RowWiseAdagrad, holders, optimizer_info
from sparselift.runtime import groups
from sparselift.schedule import GroupSchedule, Schedule, TableSchedule
from sparselift.stats import Sketch
from sparselift.verify import Certifier
from sparselift.verify.exact import check_exact
from sparselift.verify.integers import Oracle, exact_run
from sparselift.verify.real import check_real
from sparselift.verify.twin import LR, table_rules, twin_structure
from sparselift.workload import Workload
from tests.unit.runtime_models import ROWS, Bags, HalfBags, bags_structure, batch, schedule

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.03),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.03, lr_decay=0.1),
    "rowwise": lambda p: RowWiseAdagrad([q for q in p if q.dim() == 2], lr=0.03, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "adam": lambda p: torch.optim.SparseAdam(tables(p), lr=0.03, betas=(0.8, 0.95)),
}

LONG_BAGS = Sketch(rows=40, batches=1, bags=8, lookups=16, unique=8, max_length=4, lengths=((1, 2), (2, 4), (4, 2)))


def tables(parameters: Any) -> list[nn.Parameter]:
    return [p for p in parameters if p.dim() == 2 and len(p) in ROWS]


def rounded(parameters: Any) -> torch.optim.Optimizer:
    return RowWiseAdagrad(tables(parameters), lr=0.03, rounding_seed=3)


def prepared(optimizer: str = "sgd", **kind: Any) -> tuple[Bags, torch.optim.Optimizer, Structure]:
    model = Bags(**kind)
    opt = OPTIMIZERS[optimizer](model.parameters())
    return model, opt, bags_structure(model, [opt], weighted=kind.get("mode", "sum") == "sum" and kind.get("sparse", True))


def exact(optimizer: str, backend: str | KernelBackend, plan: dict[str, Any], **kind: Any) -> dict[str, int]:
    model, opt, structure = prepared(optimizer, **kind)
    rules = table_rules(structure, {t.name: model.get_parameter(t.name) for t in structure.tables}, [opt])
    sketches = {f.name: LONG_BAGS for f in structure.features} if kind.get("mode") == "max" else {}      # else a maximum of one row
    return check_exact(structure, schedule(structure, **plan), sketches, rules, backend, seed=0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("plan", [{"ahead": 1}, {"concat": False}, {"concat": False, "prelude": False}, {"update": "native"}],
                         ids=["concat", "group", "alone", "torchs-update"])
def test_right_schedules_are_certified(backend: str, optimizer: str, mode: str, plan: dict[str, Any]) -> None:
    for sparse in (True, False):
        if optimizer == "rowwise" and not sparse:
            continue                    # weight decay moves every row of a dense gradient: no fused rule
        if mode == "max" and sparse:
            continue                    # torch has no sparse gradient of maxima
        counts = exact(optimizer, backend, plan, mode=mode, sparse=sparse, padding_idx=2)
        assert counts["output"] > 0 and counts["gradient"] > 0 and counts["weights"] > 0
        keeps = optimizer in ("adagrad", "rowwise") or (optimizer == "adam" and sparse)      # else SGD shows the gradient
        assert ("optimizer sums" in counts) == keeps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["sgd", "rounded", "adam"])
@pytest.mark.parametrize("plan", [{}, {"concat": False, "prelude": False}, {"update": "coalesced"}], ids=["concat", "alone", "coalesced"])
def test_right_schedules_of_half_tables_are_certified(optimizer: str, plan: dict[str, Any], dtype: torch.dtype) -> None:
    for mode, sparse in (("sum", True), ("mean", True), ("mean", False), ("max", False)):
        model = HalfBags(dtype, mode=mode, sparse=sparse, padding_idx=2)
        opt = {**OPTIMIZERS, "rounded": rounded}[optimizer](model.parameters())
        structure = bags_structure(model, [opt], weighted=mode == "sum")
        rules = table_rules(structure, {t.name: model.get_parameter(t.name) for t in structure.tables}, [opt])
        if plan.get("update") == "coalesced" and not sparse:
            continue
        counts = check_exact(structure, schedule(structure, **plan), {f.name: LONG_BAGS for f in structure.features}, rules, "cpu", seed=0)
        assert counts["output"] > 0 and counts["gradient"] > 0 and counts["weights"] > 0
        assert ("optimizer sums" in counts) == (optimizer == "rounded")


def test_rows_too_wide_for_the_bits_of_a_half_are_drawn_thinner() -> None:
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(3, 1000, mode="sum", sparse=True, dtype=torch.bfloat16)})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    info = optimizer_info(True, holders([opt])[model["bag"].weight], torch.bfloat16)
    paths = [InputPath(("args", argument, 0)) for argument in range(3)]
    feature = Feature("bag", "bag", 0, "bag.weight", "sum", None, False, "offsets", True, "int64", *paths)
    structure = Structure((Table("bag.weight", 3, 1000, "bfloat16", True, info),), (feature,), (), ("SGD",), None)
    rules = table_rules(structure, {"bag.weight": model["bag"].weight}, [opt])
    twin = twin_structure(structure)
    weights, rounds = exact_run(twin, {"bag": LONG_BAGS}, rules, 0, (1, 2, 1))
    assert 0 < weights["bag.weight"].count_nonzero() < 1500 and rounds[0][0].grads["bag"].count_nonzero() > 0
    knobs = TableSchedule("fused", "chain", 8, "bag", False, False, "cached")
    plan = Schedule("planned", (GroupSchedule(("bag",), True),), {"bag.weight": knobs})
    assert check_exact(structure, plan, {"bag": LONG_BAGS}, rules, "cpu", seed=0)["per-sample weight gradient"] > 0


class Faulty(BagProgram):
    """A program that runs another one, wrongly."""

    def __init__(self, inner: BagProgram) -> None:
        self.inner, self.tables, self.features = inner, inner.tables, inner.features

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare(self, indices: Any, offsets: Any, weights: Any = None) -> Any:
        return self.inner.prepare(indices, offsets, weights)

    def forward(self, tables: Any, batch: Any, out: Any) -> None:
        self.inner.forward(tables, batch, out)

    def weight_grad(self, tables: Any, batch: Any, feature: int, grad: Tensor) -> Tensor:
        return self.inner.weight_grad(tables, batch, feature, grad)

    def update(self, tables: Any, states: Any, rules: Any, segments: Any) -> None:
        self.inner.update(tables, states, rules, segments)

    def coalesced_grad(self, table: int, segments: Any) -> tuple[Tensor, Tensor]:
        return self.inner.coalesced_grad(table, segments)

    def expanded_grad(self, table: int, segments: Any) -> tuple[Tensor, Tensor]:
        return self.inner.expanded_grad(table, segments)


class WrongOffset(Faulty):
    """One bag of one feature starts an id late."""

    def prepare(self, indices: Any, offsets: Any, weights: Any = None) -> Any:
        offsets = list(offsets)
        starts = offsets[0].clone()
        starts[2] += 1
        offsets[0] = starts
        return self.inner.prepare(indices, offsets, weights)


class DroppedRowInForward(Faulty):
    """The last id of the last feature is not looked up: the row counts as another one."""

    def prepare(self, indices: Any, offsets: Any, weights: Any = None) -> Any:
        indices = list(indices)
        ids = indices[-1].clone()
        ids[-1] = 0
        indices[-1] = ids
        return self.inner.prepare(indices, offsets, weights)


class DroppedRowInUpdate(Faulty):
    """One touched row of the first table keeps its value."""

    def update(self, tables: Sequence[Tensor], states: Any, rules: Any, segments: Any) -> None:
        if rules[0] is None:
            self.inner.update(tables, states, rules, segments)
            return
        row = int(self.inner.coalesced_grad(0, segments)[0][0])
        kept = tables[0][row].clone()
        self.inner.update(tables, states, rules, segments)
        tables[0].data[row] = kept


class MissingMeanDivideInForward(Faulty):
    """The first feature is summed."""

    def forward(self, tables: Any, batch: Any, out: Any) -> None:
        self.inner.forward(tables, batch, out)
        view = out[:, self.features[0].column:self.features[0].column + self.tables[0].dim] if isinstance(out, Tensor) else out[0]
        view *= batch.offsets(0).diff().clamp(min=1)[:, None]


class MissingMeanDivideInUpdate(Faulty):
    """The gradient of the first table is not divided by its bags' lengths."""

    def update(self, tables: Any, states: Any, rules: Any, segments: Any) -> None:
        self.inner.update(tables, states, rules, segments)
        if rules[0] is not None:
            rows, values = self.inner.coalesced_grad(0, segments)
            tables[0].data[rows] -= (rules[0].lr * values).to(tables[0].dtype)


class SwappedTables(Faulty):
    """Two tables of equal shape change places."""

    def forward(self, tables: Any, batch: Any, out: Any) -> None:
        self.inner.forward([tables[1], tables[0], *tables[2:]], batch, out)


class StaleSegment(Faulty):
    """Of two accumulated backwards, only the last reaches the update."""

    def update(self, tables: Any, states: Any, rules: Any, segments: Any) -> None:
        self.inner.update(tables, states, rules, segments[-1:])


FAULTS = [WrongOffset, DroppedRowInForward, DroppedRowInUpdate, MissingMeanDivideInForward, MissingMeanDivideInUpdate, SwappedTables,
          StaleSegment]


class Planted(KernelBackend):
    """A backend all of whose programs have a fault."""

    name = "planted"

    def __init__(self, fault: type[Faulty], inner: str) -> None:
        self.fault, self.inner = fault, get_backend(inner)

    def compile(self, tables: Any, features: Any, shape: KernelShape | None = None) -> BagProgram:
        return self.fault(self.inner.compile(tables, features, shape))

    def variant(self) -> str:
        return self.fault.__name__


class EqualBags(Bags):
    """All tables of one shape, so that nothing but the values can tell them apart."""

    def __init__(self, mode: str, dtype: torch.dtype) -> None:
        super().__init__(mode=mode)
        self.emb = nn.ModuleList(nn.EmbeddingBag(40, 8, mode=mode, sparse=True, dtype=dtype) for _ in range(3))


def check_equal_bags(mode: str, backend: str | KernelBackend, dtype: torch.dtype = torch.float32) -> None:
    model = EqualBags(mode, dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    structure = bags_structure(model, [opt])
    rules = table_rules(structure, {t.name: model.get_parameter(t.name) for t in structure.tables}, [opt])
    check_exact(structure, schedule(structure), {f.name: LONG_BAGS for f in structure.features}, rules, backend, seed=0)


@pytest.mark.parametrize(("backend", "dtype"), [("reference", torch.float32), ("cpu", torch.float32), ("cpu", torch.float16),
                                                ("cpu", torch.bfloat16)], ids=lambda each: str(each).removeprefix("torch."))
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_kernel_faults_fail(fault: type[Faulty], backend: str, dtype: torch.dtype) -> None:
    if fault is StaleSegment and dtype == torch.float16:
        return                          # torch adds no sparse float16 tensors, so that natively no step has two backwards
    mode = "mean" if "Mean" in fault.__name__ else "sum"
    check_equal_bags(mode, backend, dtype)
    with pytest.raises(EquivalenceError):
        check_equal_bags(mode, Planted(fault, backend), dtype)


def test_planted_executor_faults_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    original = groups.LookupCall.hand_out
    monkeypatch.setattr(groups.LookupCall, "hand_out", lambda self, outputs: original(self, outputs)[::-1])
    with pytest.raises(EquivalenceError, match="output"):
        check_equal_bags("sum", "reference")
    monkeypatch.undo()

    accumulate = groups.LookupCall.accumulate

    def rolled(self: groups.LookupCall, grads: Sequence[Any]) -> Any:
        return accumulate(self, [None if g is None else g.roll(1, 0) for g in grads])

    monkeypatch.setattr(groups.LookupCall, "accumulate", rolled)
    with pytest.raises(EquivalenceError, match="gradient"):
        check_equal_bags("sum", "reference")


class SwappedBetas(Faulty):
    """Each of Adam's moments decays at the other's rate."""

    def update(self, tables: Any, states: Any, rules: Any, segments: Any) -> None:
        self.inner.update(tables, states, [rule and replace(rule, betas=rule.betas[::-1]) for rule in rules], segments)


class NoBiasCorrection(Faulty):
    """Every step of Adam goes as far as it will in the end."""

    def update(self, tables: Any, states: Any, rules: Any, segments: Any) -> None:
        self.inner.update(tables, states, [rule and replace(rule, lr=LR) for rule in rules], segments)


@pytest.mark.parametrize(("fault", "kind"), [(SwappedBetas, "optimizer sums"), (NoBiasCorrection, "weights")])
def test_faults_planted_in_adam_fail(fault: type[Faulty], kind: str) -> None:
    with pytest.raises(EquivalenceError, match=kind):
        exact("adam", Planted(fault, "cpu"), {})


class WrongMaxima(Faulty):
    """Outputs are right, gradients go to the minima."""

    def forward(self, tables: Any, batch: Any, out: Any) -> None:
        self.inner.forward(tables, batch, out)
        self.inner.forward([-table for table in tables], batch, torch.empty_like(out))


def test_gradients_of_the_wrong_rows_of_maxima_fail() -> None:
    with pytest.raises(EquivalenceError, match="gradient"):
        exact("sgd", Planted(WrongMaxima, "cpu"), {}, mode="max", sparse=False)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_real_maxima(backend: str) -> None:
    model = Bags(sparse=False, mode="max", padding_idx=2)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.03)
    work = Workload("bags", model, opt, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])
    structure = bags_structure(model, [opt])
    certificate = Certifier(work, structure, {}, backend).certify(schedule(structure), "reassociated")
    assert certificate.real["outputs"] == 0.0 and 0 <= certificate.real["updates"] <= 1


def test_batches_that_are_prepared_wrong_ahead_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """On integers and on real values; without work ahead the same fault is not reached."""
    inner = groups.LookupGroup.prepare_ahead

    def swapped(self: groups.LookupGroup, program: BagProgram, indices: Any, offsets: Any, weights: Any) -> Any:
        made = inner(self, program, indices, offsets, weights)
        made.batch = program.prepare([ids.flip(0) for ids in indices], offsets, weights)
        return made

    monkeypatch.setattr(groups.LookupGroup, "prepare_ahead", swapped)
    exact("sgd", "cpu", {})
    with pytest.raises(EquivalenceError, match="output"):
        exact("sgd", "cpu", {"ahead": 1})
    model, opt, _ = prepared()
    structure = bags_structure(model, [opt])
    work = Workload("w", model, opt, lambda model, given: model(*given).square().mean(), [batch(0)], inputs=tuple)
    check_real(structure, schedule(structure), "reassociated", work, batch(0), "cpu")
    with pytest.raises(EquivalenceError, match="output"):
        check_real(structure, schedule(structure, ahead=2), "reassociated", work, batch(0), "cpu")


def test_message_names_what_differs() -> None:
    with pytest.raises(EquivalenceError, match=r"step 1: weights emb\.0\.weight differs in \d+ of \d+ values: at \[\d+, \d+\] planned has"):
        check_equal_bags("sum", Planted(DroppedRowInUpdate, "reference"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sums_of_drawn_integers_are_exact(optimizer: str) -> None:
    model, opt, structure = prepared(optimizer)
    rules = table_rules(structure, {t.name: model.get_parameter(t.name) for t in structure.tables}, [opt])
    twin = twin_structure(structure)
    weights, rounds = exact_run(twin, {}, rules, 3, (1, 2, 1))
    oracle = Oracle.start(twin, rules, weights)
    for drawn in (each for batches in rounds for each in batches):
        for value in oracle.lookup(drawn).values():
            assert torch.equal(value, value.float().double())
        oracle.backward(drawn)
    assert 0 < oracle.largest < 1


def workload(optimizer: str) -> Workload:
    model, opt, _ = prepared(optimizer)
    return Workload("bags", model, opt, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_real_values_and_nothing_left_behind(backend: str, optimizer: str) -> None:
    work = workload(optimizer)
    structure = bags_structure(work.model, work.optimizers)
    before = copy.deepcopy((work.model.state_dict(), work.optimizers[0].state_dict(), torch.get_rng_state()))
    certificate = Certifier(work, structure, {}, backend).certify(schedule(structure), "reassociated")
    assert certificate.real["outputs"] == 0.0 and 0 <= certificate.real["updates"] <= 1
    after = (work.model.state_dict(), work.optimizers[0].state_dict(), torch.get_rng_state())
    assert str(before) == str(after) and all(torch.equal(before[0][k], v) for k, v in after[0].items())
    assert "forward" not in work.model.emb[0].__dict__ and work.model.emb[0].weight.grad is None


def test_a_plan_that_calls_itself_bitwise_is_held_to_the_bits() -> None:
    work = workload("sgd")
    work = replace(work, batches=[batch(0, bags=400)])        # so many duplicates that summing first must round differently
    structure = bags_structure(work.model, work.optimizers)
    certifier = Certifier(work, structure, {}, "reference")
    with pytest.raises(EquivalenceError, match="native's bits"):
        certifier.certify(schedule(structure), "bitwise")


@pytest.mark.parametrize(("dtype", "nudge"), [(torch.float32, 2.0 ** -20), (torch.float16, 2.0 ** -8),
                                              (torch.bfloat16, 2.0 ** -5)], ids=str)
def test_real_values_outside_the_bound_fail(dtype: torch.dtype, nudge: float) -> None:
    class Nudged(Faulty):
        def update(self, tables: Any, states: Any, rules: Any, segments: Any) -> None:
            self.inner.update(tables, states, rules, segments)
            row = int(self.inner.coalesced_grad(1, segments)[0][0])
            tables[1].data[row] *= 1 + nudge

    model = HalfBags(dtype)
    opt = OPTIMIZERS["sgd"](model.parameters())
    work = Workload("bags", model, opt, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])
    structure = bags_structure(work.model, work.optimizers)
    check_real(structure, schedule(structure), "reassociated", work, batch(0), "reference")

    with pytest.raises(EquivalenceError, match="rounding bound"):
        check_real(structure, schedule(structure), "reassociated", work, batch(0), Planted(Nudged, "reference"))


def test_configs_that_differ_in_hints_share_a_certificate() -> None:
    work = workload("sgd")
    structure = bags_structure(work.model, work.optimizers)
    certifier = Certifier(work, structure, {}, "reference")
    first, second = schedule(structure), schedule(structure)
    assert second.tables is not None
    second = replace(second, tables={name: replace(knobs, prefetch=32, huge_pages=True) for name, knobs in second.tables.items()})
    assert certifier.certify(first, "reassociated") is certifier.certify(second, "reassociated")
    for other in (schedule(structure, concat=False), schedule(structure, ahead=1)):
        assert certifier.certify(other, "reassociated") is not certifier.certify(first, "reassociated")
    one, two = (certifier.certify(schedule(structure, ahead=ahead), "reassociated") for ahead in (1, 2))
    assert one is two
