"""Whole planned training steps over the CUDA kernels. The emulator's memory is the host's, so models, optimizers and ids are a CPU's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from sparselift.apply import Applied
from sparselift.ir import Graph
from sparselift.kernels.base import FeatureSpec, KernelShape, TableSpec
from sparselift.lift import lift
from sparselift.models import DLRM
from sparselift.optim import RowWiseAdagrad
from sparselift.rewrites import Value
from sparselift.rewrites.bag_shape import ShapeBags
from sparselift.rewrites.kernel_shape import ShapeKernels
from sparselift.schedule import Schedule, build_schedule
from sparselift.space import SearchSpace
from sparselift.verify import Certifier
from sparselift.workload import Workload
from tests.simt.module import Simt
from tests.unit.example_graphs import on_cuda
from tests.unit.runtime_models import assert_same

ROWS, DIM, BAGS = (40, 7, 3000), 16, 6
SHAPED: dict[str, Value] = {"block_threads": 64, "loads_in_flight": 8, "chunk_lookups": 64, "vector_bytes": 4, "bags_per_group": 2}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=0.05),
    "adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.02),
    "rowwise": lambda tables: RowWiseAdagrad(tables, lr=0.02),
}


def batch(seed: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Dense features, offsets and ids: empty bags, and in the last one more ids than a chunk of 64 has."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.cat([torch.randint(0, 4, (BAGS - 1,), generator=generator), torch.tensor([70])]) for _ in ROWS]
    ids = [torch.randint(rows, (int(each.sum()),), generator=generator) for rows, each in zip(ROWS, lengths)]
    return torch.randn(BAGS, 13, generator=generator), [each.cumsum(0) - each for each in lengths], ids


def loss_of(model: nn.Module, given: Any) -> Tensor:
    return softplus(model(*given)).mean()


def workload(optimizer: str, mode: str = "sum") -> Workload:
    model = DLRM(ROWS, DIM, (8,), (8, 1), mode=mode, generator=torch.Generator().manual_seed(0))
    dense = [weight for name, weight in model.named_parameters() if not name.startswith("emb_l")]
    optimizers = torch.optim.SGD(dense, lr=0.05), OPTIMIZERS[optimizer](model.emb_l.parameters())
    return Workload("dlrm", model, optimizers, loss_of, [batch(seed) for seed in range(3)], uses=frozenset())


def schedule_of(graph: Graph, **knobs: Value) -> Schedule:
    """The default's, with some knobs otherwise wherever they are."""
    default = SearchSpace(graph).default
    changed = replace(default, policy={name: knobs.get(name, value) for name, value in default.policy.items()}, classes=tuple(
        replace(each, knobs={name: knobs.get(name, value) for name, value in each.knobs.items()}) for each in default.classes))
    return build_schedule(graph.structure, changed)


def train(work: Workload, given: Any) -> None:
    work.train(work.model, work.optimizer, given)


@pytest.fixture
def host(emulator: Simt) -> Simt:
    """One schedule is enough: the kernels by themselves have them all."""
    emulator.set_schedule("random:7")
    return emulator


@pytest.mark.parametrize(("optimizer", "mode", "knobs"), [("sgd", "mean", {}), ("adagrad", "sum", {}), ("rowwise", "sum", SHAPED)])
def test_a_planned_step_computes_what_the_native_one_does(host: Simt, optimizer: str, mode: str, knobs: dict[str, Value]) -> None:
    native, planned = workload(optimizer, mode), workload(optimizer, mode)
    graph = on_cuda(lift(planned))
    applied = Applied(graph.structure, schedule_of(graph, **knobs), planned.model, host.backend())
    applied.attach(planned.model, planned.optimizers)
    for seed in range(3):
        for work in (native, planned):
            train(work, batch(seed))
    assert_same(native.model, planned.model, exact=False)
    text = applied.explain()
    assert "3 lookups over 3 tables in one call, written straight into concat: 3 times" in text
    assert "products of 4 vectors in one kernel, straight into the next layer's input: 3 times" in text
    assert text.endswith("nothing fell back")


def test_a_step_in_the_plan_copies_nothing_and_waits_for_nothing(host: Simt) -> None:
    work = workload("rowwise")
    graph = on_cuda(lift(work))
    Applied(graph.structure, schedule_of(graph, loads_in_flight=8), work.model, host.backend()).attach(work.model, work.optimizers)
    train(work, batch(0))
    host.take_counts()
    host.take_launches()
    train(work, batch(1))
    counts, launches = host.take_counts(), host.take_launches()
    assert counts.copies == counts.synchronizations == 0
    assert {name: count for name, count in launches.items() if name.startswith(("bag_forward", "interaction"))} == {
        "bag_forward_kernel<float, 8>": 1, "interaction_forward_kernel": 1, "interaction_backward_kernel": 1}


@pytest.mark.parametrize("knobs", [{}, SHAPED], ids=["auto", "shaped"])
def test_a_plan_is_certified(host: Simt, knobs: dict[str, Value]) -> None:
    work = workload("rowwise")
    graph = on_cuda(lift(work))
    certifier = Certifier(work, graph.structure, graph.sketches, host.backend())
    certificate = certifier.certify(schedule_of(graph, **knobs), "reassociated")
    assert certificate.backend == "cuda-cuda" and certificate.exact["weights"] > 0
    assert all(0 <= share <= 1 for share in certificate.real.values()) and certificate.real["interactions"] > 0


def test_every_choice_is_one_that_kernels_have_and_the_heuristic_does_not_make(emulator: Simt) -> None:
    heuristic = emulator.module.default_shape()
    for knob in (*ShapeBags.knobs, *ShapeKernels.knobs):
        for choice in knob.choices[1:]:
            assert choice != heuristic[knob.name]
            assert emulator.backend().compile([TableSpec("t", 5, 4)], [FeatureSpec("f", 0)], KernelShape(**{knob.name: int(choice)}))


def test_tables_and_calls_have_the_shapes_of_the_schedule(host: Simt) -> None:
    work = workload("sgd")
    graph = on_cuda(lift(work))
    applied = Applied(graph.structure, schedule_of(graph, **SHAPED), work.model, host.backend())
    assert applied.runtime is not None
    for runtime in (applied.runtime, pickle.loads(pickle.dumps(applied)).runtime, copy.deepcopy(applied).runtime):
        group = runtime.preludes[0].group
        assert group.backend.device == torch.device("cpu") and group.shape == applied.schedule.shape
        assert {(each.knobs.vector_bytes, each.knobs.bags_per_group) for each in group.program.tables} == {(4, 2)}
    assert (applied.schedule.shape.block_threads, applied.schedule.shape.chunk_lookups) == (64, 64)


def test_ids_that_are_no_rows_raise_and_change_nothing(host: Simt) -> None:
    work = workload("sgd")
    graph = on_cuda(lift(work))
    Applied(graph.structure, schedule_of(graph), work.model, host.backend()).attach(work.model, work.optimizers)
    before = copy.deepcopy(work.model.state_dict())
    dense, offsets, ids = batch(0)
    ids[1][2] = 7
    with pytest.raises(IndexError, match=r"feature 'emb_l\.1': id 7 at position 2 is out of range for table 'emb_l\.1\.weight' of 7 rows"):
        train(work, (dense, offsets, ids))
    assert all(torch.equal(value, before[name]) for name, value in work.model.state_dict().items())


def test_what_the_device_tells_of_an_earlier_batch_raises_in_the_next_step(host: Simt) -> None:
    """A device finds a bad id after the call that gave it the ids; the next forward hears of it, whose own arguments are right."""
    work = workload("sgd")
    graph = on_cuda(lift(work))
    applied = Applied(graph.structure, schedule_of(graph), work.model, host.backend())
    applied.attach(work.model, work.optimizers)
    assert applied.runtime is not None
    program = applied.runtime.preludes[0].group.program
    ids, starts, memory = torch.tensor([3, 7000]), torch.tensor([0]), torch.empty(1 << 16, dtype=torch.uint8)
    given = (ids.data_ptr(), 2, 1, True, starts.data_ptr(), 1, 1, True, 0, 0, 0)
    program.raw.prepare([given] * len(ROWS), memory.data_ptr(), 0)                # below what looks for faults
    before = copy.deepcopy(work.model.state_dict())
    with pytest.raises(IndexError, match="id 7000 at position 1 is out of range"):
        train(work, batch(0))
    assert all(torch.equal(value, before[name]) for name, value in work.model.state_dict().items())
    train(work, batch(0))
    assert "stepped aside" not in applied.explain()
