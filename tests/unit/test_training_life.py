"""The life of a planned model: copies, files, dtypes, processes, hooks, compilation. It goes on as a native one, or says why not."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from sparselift.apply import ATTRIBUTE, apply, explain, unapply
from sparselift.errors import LiftRefused
from sparselift.grad import PendingGrad
from sparselift.lift import lift
from sparselift.plan import Plan, default_plan
from sparselift.workload import Workload
from tests.unit.runtime_models import ROWS, Bags, assert_same, batch

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def work_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Workload:
    return Workload("life", model, optimizer, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])


def plan_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Plan:
    return default_plan(lift(work_of(model, optimizer)))


class Side:
    """A model in training, with a plan or natively."""

    def __init__(self, kind: str, planned: bool, sparse: bool = True) -> None:
        self.model, self.kind = Bags(sparse), KINDS[kind]
        self.optimizer = self.kind(self.model.parameters())
        self.plan = plan_of(self.model, self.optimizer) if planned else None
        self.on()

    def on(self) -> None:
        if self.plan is not None:
            apply(self.plan, self.model, self.optimizer)

    def off(self) -> None:
        if self.plan is not None:
            unapply(self.model, self.optimizer)

    def backward(self, seed: int, model: nn.Module | None = None) -> None:
        dense, offsets, indices = batch(seed)
        (self.model if model is None else model)(dense.to(self.model.top.weight.dtype), offsets, indices).pow(2).mean().backward()

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()


Loop = Callable[[Side], Any]


def sides(loop: Loop, kind: str = "sgd", exact: bool | None = None, sparse: bool = True) -> tuple[Side, Side]:
    """Live natively and with a plan, and compare."""
    both = Side(kind, False, sparse), Side(kind, True, sparse)
    for side in both:
        loop(side)
    assert_same(both[0].model, both[1].model, kind == "sgd" and sparse if exact is None else exact)
    return both


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -------------------------------------------------------------------------------------------------------------------- copies and files

def deep_copy(pair: Any) -> Any:
    return copy.deepcopy(pair)


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def saved(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def sent(pair: Any) -> Any:
    """As to another process, by way of shared memory."""
    return pickle.loads(ForkingPickler.dumps(pair))


@pytest.mark.parametrize("copied", [deep_copy, pickled, saved, sent])
@pytest.mark.parametrize("moment", ["between steps", "before a step"])
def test_copies_of_model_and_optimizer_go_on(kind: str, copied: Callable[[Any], Any], moment: str) -> None:
    shared = copied is sent

    def loop(side: Side) -> None:
        side.step(0)
        if moment == "before a step":
            side.backward(1)
        first = side.model
        side.model, side.optimizer = copied((side.model, side.optimizer))
        assert (ATTRIBUTE in side.model.__dict__) == (side.plan is not None)
        before = copy.deepcopy(first.state_dict())
        for seed in range(2, 5):
            side.step(seed)
        if not shared:                            # the original has not moved
            assert all(torch.equal(before[name], value) for name, value in first.state_dict().items())
        side.off()
        side.step(5)
        side.on()
        side.step(6)

    sides(loop, kind)


def test_a_copy_of_the_model_alone_trains_alone(kind: str) -> None:
    def loop(side: Side) -> None:
        side.step(0)
        side.backward(1)
        twin = copy.deepcopy(side.model)
        own = side.kind(twin.parameters())
        for seed in range(3):
            side.backward(seed, twin)
            own.step()
            own.zero_grad()
        side.optimizer.step()
        with torch.no_grad():
            for mine, other in zip(side.model.parameters(), twin.parameters()):
                mine.mul_(other)

    sides(loop, kind)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("applied_first", [True, False])
def test_state_dicts_are_loaded_before_and_after_apply(kind: str, assign: bool, applied_first: bool) -> None:
    file = io.BytesIO()
    source = Side(kind, True)
    source.step(0)
    torch.save((source.model.state_dict(), source.optimizer.state_dict()), file)

    def loop(side: Side) -> None:
        side.step(3)
        side.backward(4)                          # a gradient that stays, as natively, unless the parameter goes
        if not applied_first:
            side.off()
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        assert not side.model.load_state_dict(weights, strict=True, assign=assign).missing_keys
        if assign:
            side.optimizer = side.kind(side.model.parameters())
            if applied_first:
                side.off()
                side.on()
        side.optimizer.load_state_dict(state)
        if not applied_first:
            side.on()
        for seed in range(3):
            side.step(seed)
        with pytest.raises(RuntimeError, match="Missing key"):
            side.model.load_state_dict({}, strict=True)

    _, planned = sides(loop, kind)
    assert "looked up by itself" not in explain(planned.model)


def test_assigned_parameters_without_a_new_optimizer_stay_as_natively() -> None:
    def loop(side: Side) -> None:
        side.step(0)
        old = list(side.model.parameters())
        side.model.load_state_dict({name: value.clone() for name, value in side.model.state_dict().items()}, assign=True)
        for seed in range(3):
            side.backward(seed)
            side.optimizer.step()                 # of the old parameters, which get no gradient
        assert all(p.grad is None for p in old) and all(p.grad is not None for p in side.model.parameters())

    sides(loop)


# -------------------------------------------------------------------------------------------------------------------- dtypes and memory

@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_another_dtype_and_back(sparse: bool) -> None:
    def loop(side: Side) -> None:
        side.step(0)
        side.model.double()
        for seed in range(2):
            side.step(seed)
        assert side.model.emb[0].weight.dtype == torch.float64
        side.model.float()
        for seed in range(2):
            side.step(seed)

    _, planned = sides(loop, sparse=sparse)
    assert "the prelude could not use" in explain(planned.model) and "torch's forward ran" in explain(planned.model)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("move", [lambda m: m.double(), lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.share_memory()],
                         ids=["double", "cpu", "float", "share"])
def test_moves_with_gradients_that_wait(move: Callable[[nn.Module], Any], sparse: bool) -> None:
    def loop(side: Side) -> None:
        side.backward(0)
        try:
            move(side.model)
        except (RuntimeError, NotImplementedError):
            side.model.zero_grad()                # torch cannot share the memory of sparse gradients
            move(side.model)
        side.backward(1)
        side.optimizer.step()
        side.model.float()
        side.optimizer.zero_grad()
        side.step(2)

    sides(loop, sparse=sparse, exact=False)


class Batches(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, seed: int) -> Any:
        return batch(seed)


def first(batches: list[Any]) -> Any:
    return batches[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batches_from_worker_processes(method: str, kind: str) -> None:
    def loop(side: Side) -> None:
        loader = DataLoader(Batches(), num_workers=1, multiprocessing_context=method, collate_fn=first)
        for dense, offsets, indices in loader:
            side.model(dense, offsets, indices).pow(2).mean().backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    _, planned = sides(loop, kind)
    assert "stepped aside" not in explain(planned.model)


def _train(side: Side) -> None:
    for seed in range(3):
        side.step(seed)


def test_a_forked_process_trains_shared_memory(kind: str) -> None:
    def loop(side: Side) -> None:
        side.step(5)
        side.model.share_memory()
        worker = multiprocessing.get_context("fork").Process(target=_train, args=(side,))
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0
        side.step(6)

    if kind == "sgd":                             # Adagrad's state is not shared, natively either
        sides(loop, kind)


# ------------------------------------------------------------------------------------------------------------------------------- modules

class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_parametrizations_that_come_and_go() -> None:
    def loop(side: Side) -> None:
        side.step(0)
        bag = side.model.emb[1]
        side.backward(1)
        parametrize.register_parametrization(bag, "weight", Halved())
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.step(2)
        parametrize.remove_parametrizations(bag, "weight", leave_parametrized=False)
        side.step(3)
        side.off()
        side.step(4)

    sides(loop, sparse=False, exact=False)


def test_pruning_that_comes_and_goes() -> None:
    def loop(side: Side) -> None:
        side.step(0)
        prune.l1_unstructured(side.model.emb[1], "weight", amount=0.3)
        for seed in range(2):
            side.step(seed)
        prune.remove(side.model.emb[1], "weight")
        side.step(3)

    _, planned = sides(loop, sparse=False, exact=False)
    assert "torch's forward ran: its weight is not" in explain(planned.model)


def test_hooks_of_lifted_modules() -> None:
    logs: list[list[str]] = []

    def loop(side: Side) -> None:
        log: list[str] = []
        logs.append(log)
        bag = side.model.emb[1]
        handles = [bag.register_forward_pre_hook(lambda m, args: (args[0] * 1, *args[1:])),
                   bag.register_forward_hook(lambda m, args, out: log.append("forward") or out * 2),
                   side.model.emb[2].register_full_backward_hook(lambda m, i, o: log.append("backward"))]
        for seed in range(2):
            side.step(seed)
        for handle in handles:
            handle.remove()
        side.step(2)

    sides(loop, exact=False)
    assert logs[0] == logs[1] == ["forward", "backward"] * 2


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("option", [("mode", "mean"), ("padding_idx", 3), ("max_norm", 0.5), ("sparse", False)])
def test_options_of_modules_that_change_after_apply(option: tuple[str, Any], copied: bool) -> None:
    def loop(side: Side) -> None:
        side.step(0)
        setattr(side.model.emb[1], *option)
        for seed in range(2):
            side.step(seed)
        if copied and side.plan is not None:      # a copy has not forgotten
            side.model, side.optimizer = copy.deepcopy((side.model, side.optimizer))
        side.backward(5)
        assert side.model.emb[1].weight.grad.is_sparse == side.model.emb[1].sparse
        side.optimizer.step()
        side.optimizer.zero_grad()

    _, planned = sides(loop, exact=False)
    assert "emb.1: torch's forward ran: an option of the module" in explain(planned.model)


def test_tables_tied_and_untied_after_apply() -> None:
    def loop(side: Side) -> None:
        side.step(0)
        weight = side.model.emb[0].weight
        side.model.emb[2].weight, own = nn.Parameter(weight[:ROWS[2]].detach().clone()), side.model.emb[2].weight
        side.optimizer.add_param_group({"params": [side.model.emb[2].weight]})
        for seed in range(2):
            side.step(seed)
        side.model.emb[2].weight = own
        side.step(3)

    sides(loop)


def test_frozen_and_thawed_tables(kind: str) -> None:
    def loop(side: Side) -> None:
        side.backward(0)
        side.model.emb[0].weight.requires_grad_(False)       # its gradient waits and is applied, as natively
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.model.requires_grad_(False)
        side.model.top.requires_grad_(True)
        side.step(1)
        side.model.requires_grad_(True)
        side.model.eval()
        side.step(2)
        side.model.train()
        side.step(3)

    sides(loop, kind, exact=False)


@pytest.mark.parametrize("options", [{"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {}], ids=["ema", "swa"])
def test_averaged_copies(kind: str, options: dict[str, Any]) -> None:
    seen: list[list[Tensor]] = []

    def loop(side: Side) -> None:
        seen.append([])
        average = AveragedModel(side.model, **options)
        for seed in range(4):
            side.step(seed)
            average.update_parameters(side.model)
            with torch.no_grad():
                seen[-1].append(average(*batch(9)))
        with torch.no_grad():
            for mine, other in zip(side.model.parameters(), average.module.parameters()):
                mine.add_(other)

    sides(loop, kind)
    for native, planned in zip(*seen):
        torch.testing.assert_close(native, planned)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_train_as_natively(backend: str, kind: str) -> None:
    def loop(side: Side) -> None:
        compiled = torch.compile(side.model, backend=backend, fullgraph=True)
        for seed in range(2):
            side.backward(seed, compiled)
            side.optimizer.step()
            side.optimizer.zero_grad()
            side.step(seed + 5)                   # and uncompiled in between
        side.backward(0, compiled)
        side.backward(1)                          # into one gradient
        side.optimizer.step()

    sides(loop, kind, exact=False)


def test_more_than_one_rank_is_refused_whenever_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side("sgd", True)
    side.backward(0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    before = copy.deepcopy(side.model.state_dict())
    with pytest.raises(LiftRefused, match="step: 2 ranks"):
        side.optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in side.model.state_dict().items())
    assert type(side.model.emb[0].weight.grad) is PendingGrad


def test_a_model_wrapped_for_data_parallel_training_is_refused(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        side = Side("sgd", True, sparse=False)
        wrapped = nn.parallel.DistributedDataParallel(side.model)
        with pytest.raises(LiftRefused, match="DistributedDataParallel"):
            wrapped(*batch(0))
        with pytest.raises(LiftRefused, match="process group"):
            apply(side.plan, Bags(), side.optimizer, process_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()

