"""Training native and lifted side by side: what a training loop does means the same on both."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import sparselift as sl
from sparselift.errors import LiftRefused
from sparselift.grad import PendingGrad
from sparselift.lift import lift
from sparselift.optim import RowWiseAdagrad
from sparselift.plan import default_plan
from sparselift.runtime.step import FusedStep
from sparselift.workload import Workload
from tests.unit.runtime_models import Bags, assert_same, attach, bags_structure, batch, schedule

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, eps=1e-8),
    "rowwise": lambda p: RowWiseAdagrad([q for q in p if q.dim() == 2], lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "sparse_adam": lambda p: torch.optim.SparseAdam([q for q in p if q.shape[-1] == 8 and len(q) in (11, 40, 7)], lr=0.1),
}
FUSED = ("sgd", "adagrad", "rowwise", "sparse_adam")


class Pair:
    """A native and a lifted model from the same start."""

    def __init__(self, optimizer: str = "sgd", backend: str = "reference", sparse: bool = True, mode: str = "sum",
                 padding_idx: int | None = None, weighted: bool = False, **plan: Any) -> None:
        self.native, self.lifted = Bags(sparse, mode, padding_idx), Bags(sparse, mode, padding_idx)
        self.native_opt = OPTIMIZERS[optimizer](self.native.parameters())
        self.lifted_opt = OPTIMIZERS[optimizer](self.lifted.parameters())
        self.structure = bags_structure(self.lifted, [self.lifted_opt], weighted)
        self.schedule = schedule(self.structure, **plan)
        self.applied = attach(self.structure, self.schedule, self.lifted, [self.lifted_opt], backend)

    def both(self, action: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        for model, optimizer in ((self.native, self.native_opt), (self.lifted, self.lifted_opt)):
            action(model, optimizer)

    def check(self, exact: bool = False) -> None:
        assert_same(self.native, self.lifted, exact)


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> Tensor:
    loss = model(*batch(seed)).pow(2).mean() * factor
    loss.backward()
    return loss


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def train(pair: Pair, seeds: range = range(4)) -> None:
    for seed in seeds:
        pair.both(lambda model, optimizer, seed=seed: step(model, optimizer, seed))


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("plan", [{"concat": True}, {"concat": False}, {"concat": False, "prelude": False}],
                         ids=["concat", "group", "alone"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sgd_without_coalescing_has_native_bits(backend: str, plan: dict[str, bool], mode: str) -> None:
    pair = Pair(backend=backend, mode=mode, padding_idx=2, coalesce="none", **plan)
    train(pair)
    pair.check(exact=True)
    assert not pair.applied.runtime.updates


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise"])
@pytest.mark.parametrize("plan", [{"concat": True}, {"concat": False}, {"concat": False, "prelude": False}, {"coalesce": "none"},
                                  {"coalesce": "dense"}], ids=str)
def test_maxima_train_as_natively(backend: str, optimizer: str, plan: dict[str, Any]) -> None:
    if optimizer != "sgd" and plan.get("coalesce") == "none":
        pytest.skip("coalesce='none' is for SGD")
    pair = Pair(optimizer, backend, sparse=False, mode="max", padding_idx=2, **plan)

    def accumulate(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        backward(model, 5)
        with torch.no_grad():
            model(*batch(7))                     # a lookup that is not differentiated leaves the others' maxima alone
        backward(model, 6)
        opt.step()
        opt.zero_grad()

    train(pair)
    pair.both(accumulate)
    pair.check()
    assert not pair.applied.runtime.asides
    assert bool(pair.applied.runtime.updates) == (plan.get("coalesce") == "none")      # two backwards, which torch sums


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_every_optimizer_trains_as_natively(backend: str, optimizer: str, sparse: bool) -> None:
    if optimizer == "sparse_adam" and not sparse:
        pytest.skip("torch's SparseAdam takes sparse gradients only")
    pair = Pair(optimizer, backend, sparse)
    train(pair)
    pair.check()
    by_torch = {how for _, how in pair.applied.runtime.updates}
    assert bool(by_torch) == (optimizer not in FUSED), by_torch


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise", "sparse_adam"])
def test_the_usual_step_is_one_call_for_all_tables(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables that have had as many steps, and of tables that have not, whose rules differ in Adam."""
    pair = Pair(optimizer, "cpu")
    train(pair, range(1))                        # in which SparseAdam makes its state

    def table_by_table(step: FusedStep, optimizer: torch.optim.Optimizer) -> None:
        raise AssertionError("the tables were taken one by one")

    monkeypatch.setattr(FusedStep, "_table_by_table", table_by_table)
    for frozen in (True, False):
        pair.both(lambda model, _, frozen=frozen: model.emb[1].weight.requires_grad_(not frozen))
        train(pair, range(1, 3))
    pair.check()
    for model, made in ((pair.native, pair.native_opt), (pair.lifted, pair.lifted_opt)):
        assert optimizer == "sgd" or [made.state[table.weight]["step"] for table in model.emb] == [5, 3, 5]


def test_plan_can_leave_the_update_to_torch(backend: str) -> None:
    pair = Pair(backend=backend, update="native")
    train(pair)
    pair.check(exact=True)
    assert {how for _, how in pair.applied.runtime.updates} == {"torch's optimizer: the plan chose update='native'"}


@pytest.mark.parametrize("optimizer", ["sparse_adam", "momentum", "sgd"])
def test_torchs_update_from_a_coalesced_gradient(backend: str, optimizer: str) -> None:
    pair = Pair(optimizer, backend, update="coalesced")
    for seed in range(4):
        pair.both(lambda model, _, seed=seed: backward(model, seed))
        assert not pair.lifted.emb[0].weight.grad._state.tensor().is_coalesced()      # what the loop sees is torch's
        pair.both(lambda model, opt: (opt.step(), opt.zero_grad()))
    pair.check()
    assert len(pair.applied.runtime.updates) == 3


@pytest.mark.parametrize("optimizer", FUSED)
def test_accumulation_and_skipped_steps(backend: str, optimizer: str) -> None:
    pair = Pair(optimizer, backend)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for seed in range(6):
            backward(model, seed)
            if seed % 2:
                opt.step()
                opt.zero_grad()
        backward(model, 6)                      # skipped: its gradient is dropped
        opt.zero_grad()
        backward(model, 7)
        opt.step()                              # and one that is not zeroed: the next adds to it
        backward(model, 8)
        opt.step()

    pair.both(loop)
    pair.check()


def test_zero_grad_that_keeps_tensors(backend: str) -> None:
    pair = Pair(backend=backend)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for seed in range(3):
            backward(model, seed)
            opt.step()
            opt.zero_grad(set_to_none=False)
        opt.step()                              # a zero gradient moves nothing

    pair.both(loop)
    pair.check()


def test_several_forwards_before_a_backward(backend: str) -> None:
    pair = Pair(backend=backend)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        loss = sum(model(*batch(seed)).pow(2).mean() for seed in range(3))
        assert isinstance(loss, Tensor)
        loss.backward()
        opt.step()

    pair.both(loop)
    pair.check()


def test_evaluation_between_forward_and_backward(backend: str) -> None:
    pair = Pair(backend=backend)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for seed in range(3):
            loss = model(*batch(seed)).pow(2).mean()
            model.eval()
            with torch.no_grad():
                assert not model(*batch(9)).requires_grad
            with torch.inference_mode():
                model(*batch(9))
            model.train()
            loss.backward()
            opt.step()
            opt.zero_grad()

    pair.both(loop)
    pair.check()


def test_learning_rate_schedule(backend: str) -> None:
    pair = Pair(backend=backend, coalesce="none")

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
        for seed in range(4):
            step(model, opt, seed)
            scheduler.step()

    pair.both(loop)
    pair.check(exact=True)


def test_frozen_and_thawed_table(backend: str) -> None:
    pair = Pair(backend=backend, concat=False)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        model.emb[1].weight.requires_grad_(False)
        for seed in range(2):
            step(model, opt, seed)
            assert model.emb[1].weight.grad is None
        model.emb[1].weight.requires_grad_(True)
        step(model, opt, 2)

    pair.both(loop)
    pair.check()


@pytest.mark.parametrize("concat", [True, False])
def test_all_tables_frozen(backend: str, concat: bool) -> None:
    pair = Pair(backend=backend, concat=concat)
    pair.both(lambda model, opt: [e.weight.requires_grad_(False) for e in model.emb])
    train(pair)
    pair.check(exact=True)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_equals_the_dense_native_result(backend: str, foreach: bool) -> None:
    dense, lifted = Pair(backend=backend, sparse=False), Pair(backend=backend, sparse=True)
    for seed in range(3):
        norms = []
        for model, opt in ((dense.native, dense.native_opt), (lifted.lifted, lifted.lifted_opt)):
            backward(model, seed)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach))
            opt.step()
            opt.zero_grad()
        torch.testing.assert_close(*norms)
    assert_same(dense.native, lifted.lifted, exact=False)
    assert not lifted.applied.runtime.updates         # the clipped update stayed in the kernel


def test_per_sample_weights_get_their_gradient(backend: str) -> None:
    pair = Pair(backend=backend, weighted=True, coalesce="none")
    grads = []
    for model, opt in ((pair.native, pair.native_opt), (pair.lifted, pair.lifted_opt)):
        for seed in range(3):
            dense, offsets, indices = batch(seed)
            generator = torch.Generator().manual_seed(seed)
            weights = [torch.randn(len(i), generator=generator).requires_grad_() for i in indices]
            model(dense, offsets, indices, weights).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
            grads.append([w.grad for w in weights])
    for native, lifted in zip(grads[:3], grads[3:]):
        for a, b in zip(native, lifted):
            torch.testing.assert_close(a, b)
    pair.check()


def test_closure_runs_once_and_before_the_update(backend: str) -> None:
    pair = Pair(backend=backend, coalesce="none")
    calls = []

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for seed in range(3):
            def closure(seed: int = seed) -> Tensor:
                calls.append(seed)
                opt.zero_grad()
                return backward(model, seed)
            assert opt.step(closure).item() > 0

    pair.both(loop)
    assert calls == [0, 1, 2] * 2
    pair.check(exact=True)


def test_two_optimizers() -> None:
    native, lifted = Bags(), Bags()
    pairs = []
    for model in (native, lifted):
        tables = list(model.emb.parameters())
        others = [p for name, p in model.named_parameters() if not name.startswith("emb")]
        pairs.append((torch.optim.SGD(others, lr=0.1), RowWiseAdagrad(tables, lr=0.1)))
    structure = bags_structure(lifted, pairs[1])
    attach(structure, schedule(structure), lifted, pairs[1], "reference")
    for model, optimizers in zip((native, lifted), pairs):
        for seed in range(3):
            backward(model, seed)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert_same(native, lifted, exact=False)


@pytest.mark.parametrize("optimizer", FUSED)
def test_state_dicts_are_native_both_ways(optimizer: str) -> None:
    pair = Pair(optimizer)
    train(pair)
    for native, lifted in ((pair.native.state_dict(), pair.lifted.state_dict()),
                           (pair.native_opt.state_dict(), pair.lifted_opt.state_dict())):
        assert list(native) == list(lifted)
    for key, state in pair.native_opt.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(pair.lifted_opt.state_dict()["state"][key][name], value)
    # And over: the native states loaded into the lifted pair, then on from there.
    pair.lifted.load_state_dict(pair.native.state_dict())
    pair.lifted_opt.load_state_dict(copy.deepcopy(pair.native_opt.state_dict()))
    train(pair, range(4, 7))
    pair.check()
    assert not pair.applied.runtime.updates


@pytest.mark.parametrize("moment", ["before", "between backwards", "after backward", "after step"])
@pytest.mark.parametrize("optimizer", FUSED)
def test_unapply_at_any_moment(backend: str, moment: str, optimizer: str) -> None:
    pair = Pair(optimizer, backend)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        train_step = range(2)
        for seed in train_step:
            step(model, opt, seed)
        for name in ("before", "between backwards", "after backward", "after step"):
            if model is pair.lifted and name == moment:
                pair.applied.detach(model)
                assert "forward" not in model.emb[0].__dict__
                assert not isinstance(model.emb[0].weight.grad, PendingGrad)
            if name in ("before", "between backwards"):
                backward(model, 5 if name == "before" else 6)
            elif name == "after backward":
                opt.step()
        opt.zero_grad()
        step(model, opt, 7)

    pair.both(loop)
    pair.check()


def test_model_called_without_its_root_or_with_other_arguments(backend: str) -> None:
    pair = Pair(backend=backend, coalesce="none", concat=False)
    _, offsets, indices = batch(0)
    alone = pair.lifted.emb[1](indices[1], offsets[1])
    assert torch.equal(alone, pair.native.emb[1](indices[1], offsets[1])) and alone.requires_grad
    dense, offsets, indices = batch(1)
    assert torch.equal(pair.lifted(dense, indices=indices, offsets=offsets), pair.native(dense, offsets, indices))
    assert pair.applied.runtime.asides


def test_ids_changed_between_prelude_and_lookup() -> None:
    pair = Pair(concat=False)
    for model in (pair.native, pair.lifted):
        def meddle(module: nn.Module, args: Any) -> None:
            args[0].zero_()
        model.emb[1].register_forward_pre_hook(meddle)
    args = batch(3)
    native = pair.native(*copy.deepcopy(args))
    assert torch.equal(native, pair.lifted(*copy.deepcopy(args)))


def test_weight_changed_between_prelude_and_lookup() -> None:
    pair = Pair(concat=False)
    for model in (pair.native, pair.lifted):
        def meddle(module: nn.Module, args: Any) -> None:
            with torch.no_grad():
                module.weight.mul_(2)
        model.emb[1].register_forward_pre_hook(meddle)
    assert torch.equal(pair.native(*batch(3)), pair.lifted(*batch(3)))


def test_hooks_on_a_weight_take_the_native_road() -> None:
    pair = Pair()
    seen: list[int] = []
    for model in (pair.native, pair.lifted):
        model.emb[0].weight.register_hook(lambda grad: seen.append(grad.is_sparse))
    train(pair, range(2))
    pair.check()
    assert seen == [True] * 4


def test_out_of_range_id_raises_and_changes_nothing(backend: str) -> None:
    pair = Pair(backend=backend)
    before = copy.deepcopy(pair.lifted.state_dict())
    dense, offsets, indices = batch(0)
    indices[1] = torch.cat([indices[1], torch.tensor([40])])
    with pytest.raises(IndexError, match="40"):
        pair.lifted(dense, offsets, indices)
    assert all(torch.equal(before[k], v) for k, v in pair.lifted.state_dict().items())
    train(pair)
    pair.check()


def test_second_backward_raises_as_natively() -> None:
    pair = Pair()
    for model in (pair.native, pair.lifted):
        out = model.emb[0](*batch(0)[2:][0][:1], torch.tensor([0]))
        out.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


def test_create_graph_is_refused_by_name() -> None:
    pair = Pair()
    with pytest.raises(LiftRefused, match="create_graph"):
        pair.lifted(*batch(0)).pow(2).mean().backward(create_graph=True)


def test_gradient_for_other_inputs_leaves_tables_alone() -> None:
    pair = Pair()
    dense, offsets, indices = batch(0)
    dense.requires_grad_()
    (grad,) = torch.autograd.grad(pair.lifted(dense, offsets, indices).sum(), [dense])
    assert grad.abs().sum() > 0 and pair.lifted.emb[0].weight.grad is None


def test_output_gradient_written_to_before_the_step_raises() -> None:
    pair = Pair(concat=False)
    _, offsets, indices = batch(0)
    out = pair.lifted.emb[1](indices[1], offsets[1])
    grad = torch.ones_like(out)
    out.backward(grad)
    grad.zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        pair.lifted_opt.step()


def test_copies_and_pickles_train_alone(backend: str) -> None:
    pair = Pair(backend=backend, coalesce="none")
    train(pair, range(2))
    before = copy.deepcopy(pair.native.state_dict())
    for twin in (copy.deepcopy(pair.lifted), pickle.loads(pickle.dumps(pair.lifted))):
        optimizer = OPTIMIZERS["sgd"](twin.parameters())
        native = copy.deepcopy(pair.native)
        native_optimizer = OPTIMIZERS["sgd"](native.parameters())
        for seed in range(3):
            step(twin, optimizer, seed)
            step(native, native_optimizer, seed)
        assert_same(native, twin)
        assert all(torch.equal(before[k], v) for k, v in pair.lifted.state_dict().items())
    train(pair, range(2, 4))
    pair.check(exact=True)


def test_threads_that_train_one_model_take_turns() -> None:
    pair = Pair(backend="cpu", concat=False)
    before = copy.deepcopy(pair.lifted.state_dict())
    native = [pair.native(*batch(seed, bags=200)) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            lifted = list(pool.map(lambda seed: pair.lifted(*batch(seed, bags=200)), range(8)))
            assert all(torch.equal(a, b) for a, b in zip(native, lifted))
    assert all(torch.equal(before[k], v) for k, v in pair.lifted.state_dict().items())


def test_a_step_that_raises_in_torchs_part_updates_no_table_twice(backend: str) -> None:
    pair = Pair(backend=backend, coalesce="none")
    for model, optimizer in ((pair.native, pair.native_opt), (pair.lifted, pair.lifted_opt)):
        backward(model, 0)
        top = model.top.weight
        values, top.data = top.data, top.data[:, :3]
        with pytest.raises(RuntimeError):
            optimizer.step()                          # it updates the tables first on both sides
        top.data = values
        optimizer.zero_grad()
        step(model, optimizer, 1)
    for native, lifted in zip(pair.native.emb, pair.lifted.emb):
        assert torch.equal(native.weight, lifted.weight)


def test_functional_transforms_see_torchs_forward() -> None:
    pair = Pair(sparse=False)
    dense, offsets, indices = batch(0)
    seen = []
    for model in (pair.native, pair.lifted):
        def loss(parameters: Any, model: nn.Module = model) -> Tensor:
            return torch.func.functional_call(model, parameters, (dense, offsets, indices)).sum()
        seen.append([loss(dict(model.named_parameters())), *torch.func.grad(loss)(dict(model.named_parameters())).values()])
    for a, b in zip(*seen):
        assert torch.equal(a, b)


def test_forward_mode_is_refused_as_natively() -> None:
    pair = Pair()
    for model in (pair.native, pair.lifted):
        weight = model.emb[0].weight
        with pytest.raises(NotImplementedError, match="forward AD"), forward_ad.dual_level():
            torch.func.functional_call(model, {"emb.0.weight": forward_ad.make_dual(weight, torch.ones_like(weight))}, batch(0))


@pytest.mark.parametrize("optimizer", FUSED)
def test_another_default_dtype_changes_nothing(backend: str, optimizer: str) -> None:
    pair = Pair(optimizer, backend, weighted=True)
    seen = []
    torch.set_default_dtype(torch.float64)
    try:
        for model, opt in ((pair.native, pair.native_opt), (pair.lifted, pair.lifted_opt)):
            dense, offsets, indices = batch(0)
            weights = [torch.ones(len(i), dtype=torch.float32, requires_grad=True) for i in indices]
            model(dense.float(), offsets, indices, weights).pow(2).mean().backward()
            opt.step()
            seen.append([w.grad for w in weights] + [e.weight.grad.to_dense() for e in model.emb])
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(*seen):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    pair.check()


class Prefixed(nn.Module):
    """A parameter concatenated with an embedding's rows: their gradients are parts of one tensor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.own, self.dim = nn.Embedding(30, 8, sparse=True), nn.Parameter(torch.randn(1, 8)), dim

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.own, self.rows(ids)], self.dim).pow(2).mean()


@pytest.mark.parametrize("action", ["accumulate", "scale", "hook"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_gradient_that_shares_memory_with_another_parameters(dim: int, action: str) -> None:
    ids = torch.tensor([[3], [29], [3]]) if dim == 0 else torch.tensor([[4]])
    models = []
    for lifted in (False, True):
        model = Prefixed(dim)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if lifted:
            work = Workload("prefixed", model, optimizer, lambda model, ids: model(ids), [ids[:, 0]], uses=frozenset({"accumulate"}))
            sl.apply(default_plan(lift(work)), model, optimizer)
        if action == "hook":
            model.own.register_hook(lambda grad: grad.mul_(3))
        for row in (0, len(ids) - 1):
            model(ids[:, 0]).backward()
            if action == "accumulate":
                model(ids[row]).backward()
            elif action == "scale":
                model.own.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_same(*models, exact=action != "accumulate")


class Shifting(Bags):
    """Writes to the ids before they are looked up."""

    def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor], *weights: Any) -> Tensor:
        for ids in indices:
            ids.mul_(0)
        return super().forward(dense, offsets, indices, *weights)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ids_that_the_forward_writes_to_are_looked_up_as_they_are_then(backend: str, mode: Any) -> None:
    """Nothing counts the writes to tensors that were made in inference mode."""
    pair = Pair(backend=backend)
    pair.native.__class__ = pair.lifted.__class__ = Shifting
    with mode():
        assert torch.equal(pair.lifted(*batch(0)), pair.native(*batch(0)))


@pytest.mark.parametrize("plan", [{}, {"concat": False}, {"concat": False, "prelude": False}])
def test_training_after_a_first_call_in_inference_mode(backend: str, plan: dict[str, bool]) -> None:
    pair = Pair(backend=backend, **plan)
    with torch.inference_mode():
        for twin in (pair.lifted, copy.deepcopy(pair.lifted), pickle.loads(pickle.dumps(pair.lifted))):
            assert torch.equal(twin(*batch(0)), pair.native(*batch(0)))
    train(pair)
    pair.check()


@pytest.mark.parametrize("plan", [{}, {"concat": False}])
def test_a_batch_without_bags(backend: str, plan: dict[str, bool]) -> None:
    pair = Pair(backend=backend, weighted=True, **plan)
    empty = torch.zeros(0, dtype=torch.int64)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        weights = [torch.zeros(0, requires_grad=True) for _ in range(3)]
        for read in (False, True):
            model(torch.zeros(0, 3), [empty] * 3, [empty] * 3, weights).sum().backward()
            for module, i in zip(model.emb, range(3)):                                  # gradients that are expanded
                module(empty, empty, weights[i]).sum().backward()
            if read:
                assert not any(module.weight.grad.to_dense().any() for module in model.emb)
            opt.step()

    pair.both(loop)
    train(pair)
    pair.check()


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise"])
@pytest.mark.parametrize("change", [lambda state, table: state.pop(table), lambda state, table: state[table].clear(),
                                    lambda state, table: state[table].pop("sum"), lambda state, table: state[table].pop("step"),
                                    lambda state, table: state[table].update(sum=state[table]["sum"].double())])
def test_an_optimizer_state_that_the_kernels_cannot_use_is_torchs_matter(backend: str, optimizer: str, change: Callable[..., Any]) -> None:
    pair = Pair(optimizer, backend)
    raised = []

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        step(model, opt, 0)
        change(opt.state, model.emb[1].weight)
        backward(model, 1)
        try:
            opt.step()
        except (KeyError, RuntimeError) as error:          # torch's, on either side
            raised.append(type(error))

    pair.both(loop)
    assert len(raised) in (0, 2) and len(set(raised)) < 2
    if not raised:                                          # else torch updated some parameters and not others
        pair.check()
    assert any("state" in how for _, how in pair.applied.runtime.updates)


def other_strides(weight: nn.Parameter) -> None:
    weight.data = weight.data.t().contiguous().t()


def other_dtype(weight: nn.Parameter) -> None:
    weight.data = weight.data.double()


@pytest.mark.parametrize("change", [other_strides, other_dtype])
def test_a_table_that_moves_between_backward_and_step_is_torchs_matter(backend: str, change: Callable[[nn.Parameter], None]) -> None:
    pair = Pair(backend=backend)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for seed in range(2):
            backward(model, seed)
            change(model.emb[1].weight)
            opt.step()
            opt.zero_grad()
            model.emb[1].weight.data = model.emb[1].weight.data.float().contiguous()

    pair.both(loop)
    pair.check()
    ((table, how),) = pair.applied.runtime.updates
    assert table == "emb.1.weight" and "the table is no contiguous float32 tensor" in how


def test_reasons_that_differ_in_particulars_are_of_one_kind() -> None:
    pair = Pair()
    for bad in range(100, 105):
        dense, offsets, indices = batch(0)
        indices[1] = torch.cat([indices[1], torch.tensor([bad])])
        with pytest.raises(IndexError, match=str(bad)):
            pair.lifted(dense, offsets, indices)
    (line,) = [line for line in pair.applied.explain().splitlines() if "the prelude could not use" in line]
    assert line.startswith("stepped aside: emb.0, emb.1, emb.2: ") and "(IndexError): 5 times, first: " in line and "100" in line
