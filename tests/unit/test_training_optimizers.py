"""Optimizers of planned models beside native ones: options, groups, hooks, closures and scalers mean what they mean without a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparselift.apply import apply, explain, unapply
from sparselift.errors import LiftRefused
from sparselift.lift import lift
from sparselift.optim import RowWiseAdagrad
from sparselift.plan import Plan, default_plan
from sparselift.space import Constraints
from sparselift.workload import Workload
from tests.unit.runtime_models import Bags, assert_same, batch

Make = Callable[[Any], torch.optim.Optimizer]


class Side:
    """A model in training, with a plan or natively."""

    def __init__(self, make: Make, sparse: bool, planned: bool, equivalence: str = "reassociated") -> None:
        self.model = Bags(sparse)
        self.optimizer = make(self.model)
        self.plan: Plan | None = None
        if planned:
            work = Workload("side", self.model, self.optimizer, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])
            self.plan = default_plan(lift(work), Constraints(equivalence=equivalence))

    def apply(self) -> None:
        if self.plan is not None:
            apply(self.plan, self.model, self.optimizer)

    def backward(self, seed: int) -> Tensor:
        loss = self.model(*batch(seed)).pow(2).mean()
        loss.backward()
        return loss

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()


def sides(make: Make, sparse: bool = True, loop: Callable[[Side], Any] | None = None, exact: bool = False) -> tuple[Side, Side]:
    """Train natively and planned, and compare parameters and optimizer state."""
    both = Side(make, sparse, False), Side(make, sparse, True, "bitwise" if exact else "reassociated")
    for side in both:
        if loop is None:
            side.apply()
            for seed in range(4):
                side.step(seed)
        else:
            loop(side)
    native, planned = both
    assert_same(native.model, planned.model, exact)
    mine, theirs = planned.optimizer.state_dict(), native.optimizer.state_dict()
    assert list(mine["state"]) == list(theirs["state"]) and len(mine["param_groups"]) == len(theirs["param_groups"])
    for key, state in theirs["state"].items():
        assert list(mine["state"][key]) == list(state)
        for name, value in state.items():
            torch.testing.assert_close(*(torch.as_tensor(v).to_dense() for v in (mine["state"][key][name], value)), rtol=1e-4, atol=1e-6)
    return both


def tables(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda m: kind(m.emb.parameters(), **options)


def whole(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda m: kind(m.parameters(), **options)


SGD, ADAGRAD, ADAM = torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam
FUSED, MOVES, TORCH = "nothing fell back", "moves untouched rows too", "torch's optimizer:"
# make, what happens with sparse gradients, with dense ones: FUSED, what explain or the refusal says, or the error that torch raises
OPTIONS: dict[str, tuple[Make, Any, Any]] = {
    "sgd": (whole(SGD, lr=0.05), FUSED, FUSED),
    "sgd maximize": (whole(SGD, lr=0.05, maximize=True), FUSED, FUSED),
    "sgd foreach": (whole(SGD, lr=0.05, foreach=True), FUSED, FUSED),
    "sgd fused": (whole(SGD, lr=0.05, fused=True), RuntimeError, FUSED),
    "adagrad fused": (whole(ADAGRAD, lr=0.05, fused=True), RuntimeError, FUSED),
    "sgd dampening alone": (whole(SGD, lr=0.05, dampening=0.5), FUSED, FUSED),
    "momentum": (whole(SGD, lr=0.05, momentum=0.9), TORCH, MOVES),
    "momentum foreach": (whole(SGD, lr=0.05, momentum=0.9, foreach=True), TORCH, MOVES),
    "momentum dampened": (whole(SGD, lr=0.05, momentum=0.9, dampening=0.2, maximize=True), TORCH, MOVES),
    "nesterov": (whole(SGD, lr=0.05, momentum=0.9, nesterov=True), TORCH, MOVES),
    "sgd weight decay": (tables(SGD, lr=0.05, weight_decay=0.1), RuntimeError, MOVES),
    "sgd tensor rate": (whole(SGD, lr=torch.tensor(0.05)), TORCH, MOVES),
    "adagrad": (whole(ADAGRAD, lr=0.1), FUSED, FUSED),
    "adagrad options": (whole(ADAGRAD, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3, eps=1e-6), FUSED, FUSED),
    "adagrad foreach": (whole(ADAGRAD, lr=0.1, foreach=True, maximize=True), FUSED, FUSED),
    "adagrad eps 0": (whole(ADAGRAD, lr=0.1, eps=0, initial_accumulator_value=0.1), FUSED, FUSED),
    "adagrad weight decay": (tables(ADAGRAD, lr=0.1, weight_decay=0.1), RuntimeError, MOVES),
    "sparse adam": (tables(ADAM, lr=0.1, betas=(0.8, 0.9), eps=1e-6), FUSED, MOVES),
    "sparse adam maximize": (tables(ADAM, lr=0.1, maximize=True), FUSED, MOVES),
    "sparse adam tensor rate": (tables(ADAM, lr=torch.tensor(0.1)), TORCH, MOVES),
    "rowwise": (tables(RowWiseAdagrad, lr=0.1, eps=1e-6, initial_accumulator_value=0.1), FUSED, FUSED),
    "rowwise maximize": (tables(RowWiseAdagrad, lr=0.1, maximize=True), FUSED, FUSED),
    "rowwise weight decay": (tables(RowWiseAdagrad, lr=0.1, weight_decay=0.1), FUSED, MOVES),
    "adam": (whole(torch.optim.Adam, lr=0.1), RuntimeError, MOVES),
    "adadelta": (whole(torch.optim.Adadelta), RuntimeError, MOVES),
}


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_optimizers(options: str, sparse: bool) -> None:
    make, with_sparse, with_dense = OPTIONS[options]
    expected = with_sparse if sparse else with_dense
    if expected is MOVES:
        with pytest.raises(LiftRefused, match=MOVES):
            Side(make, sparse, True)
    elif expected is RuntimeError:
        for side in (Side(make, sparse, False), Side(make, sparse, True)):
            side.apply()
            side.backward(0)
            with pytest.raises(RuntimeError):
                side.optimizer.step()
    else:
        _, planned = sides(make, sparse)
        assert expected in explain(planned.model)


@pytest.mark.parametrize("options", [name for name, (_, sparse, _) in OPTIONS.items() if sparse is not RuntimeError])
def test_bitwise_plans_have_the_bits_of_every_optimizer(options: str) -> None:
    sides(OPTIONS[options][0], exact=True)


def by_table(kind: Callable[..., torch.optim.Optimizer], *options: dict[str, Any], **common: Any) -> Make:
    """A group a table, with its own options, and one for the rest."""
    def make(model: Bags) -> torch.optim.Optimizer:
        groups = [{"params": [bag.weight], **own} for bag, own in zip(model.emb, options)]
        rest = [p for name, p in model.named_parameters() if not name.startswith("emb")]
        return kind([*groups, *([] if kind is RowWiseAdagrad or kind is ADAM else [{"params": rest}])], **common)
    return make


GROUPS: dict[str, Make] = {
    "sgd": by_table(SGD, {"lr": 0.01}, {"lr": 0.1}, {"momentum": 0.9}, lr=0.05),
    "adagrad": by_table(ADAGRAD, {"lr": 0.01}, {"lr": 0.1, "lr_decay": 0.2}, {"eps": 1e-3}, lr=0.05),
    "rowwise": by_table(RowWiseAdagrad, {"lr": 0.01}, {"weight_decay": 0.1}, {"initial_accumulator_value": 0.5}, lr=0.05),
    "sparse adam": by_table(ADAM, {"lr": 0.01}, {"betas": (0.5, 0.6)}, {}, lr=0.05),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_with_options_of_their_own(name: str) -> None:
    sides(GROUPS[name])
    sides(GROUPS[name], exact=True)


def test_groups_that_join_later() -> None:
    def make(model: Bags) -> torch.optim.Optimizer:
        return torch.optim.Adagrad([*model.bottom.parameters(), model.emb[0].weight], lr=0.1)

    def loop(side: Side) -> None:
        side.apply()
        side.step(0)
        side.optimizer.zero_grad()
        side.model.zero_grad()
        side.optimizer.add_param_group({"params": [*(bag.weight for bag in side.model.emb[1:]), *side.model.top.parameters()], "lr": 0.3})
        for seed in range(1, 4):
            side.step(seed)

    _, planned = sides(make, loop=loop)
    assert "update of emb.1.weight: torch's optimizer: the plan chose update='native': 3 times" in explain(planned.model)


def change(options: dict[str, Any]) -> Callable[[Side], None]:
    def loop(side: Side) -> None:
        side.apply()
        for seed in range(6):
            if seed == 2:
                side.optimizer.param_groups[0].update(options)
            side.step(seed)
    return loop


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize(("make", "options"), [
    (whole(SGD, lr=0.05), {"lr": 0.2}), (whole(SGD, lr=0.05), {"momentum": 0.9}), (whole(SGD, lr=0.05), {"maximize": True}),
    (whole(ADAGRAD, lr=0.1), {"lr": 0.3, "lr_decay": 0.5, "eps": 1e-2}), (whole(SGD, lr=0.05), {"lr": torch.tensor(0.1)}),
    (tables(RowWiseAdagrad, lr=0.1), {"weight_decay": 0.2, "eps": 1e-2}),
])
def test_options_that_change_mid_run(make: Make, options: dict[str, Any], sparse: bool) -> None:
    sides(make, sparse, change(options))


def test_weight_decay_that_comes_mid_run_moves_all_rows_of_dense_tables() -> None:
    for make in (whole(SGD, lr=0.05), whole(ADAGRAD, lr=0.1)):
        native, _ = sides(make, False, change({"weight_decay": 0.1}))
        assert native.optimizer.param_groups[0]["weight_decay"] == 0.1


# ----------------------------------------------------------------------------------------------------------------------------- hooks

def clip_in_hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.25)


def zero_in_hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    optimizer.zero_grad()


class Log:
    """Norms of gradients and weights, as a hook."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.seen.append([0.0 if p.grad is None else p.grad.to_dense().norm().item() for p in params] + [p.norm().item() for p in params])


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("moment", ["before apply", "after apply", "mid-run"])
@pytest.mark.parametrize("make", [whole(SGD, lr=0.05), whole(ADAGRAD, lr=0.1)], ids=["sgd", "adagrad"])
def test_step_hooks_see_and_change_what_they_do_natively(make: Make, moment: str, sparse: bool) -> None:
    logs: list[list[list[float]]] = []

    def loop(side: Side) -> None:
        before, after = Log(), Log()
        logs.append(before.seen)
        logs.append(after.seen)

        def register() -> None:
            side.optimizer.register_step_pre_hook(before)
            side.optimizer.register_step_pre_hook(clip_in_hook)
            side.optimizer.register_step_post_hook(after)
            side.optimizer.register_step_post_hook(zero_in_hook)

        if moment == "before apply":
            register()
        side.apply()
        if moment == "after apply":
            register()
        for seed in range(4):
            if moment == "mid-run" and seed == 2:
                register()
            side.backward(seed)
            side.optimizer.step()
            if moment == "mid-run" and seed < 2:
                side.optimizer.zero_grad()
            assert side.model.emb[0].weight.grad is None

    _, planned = sides(make, sparse, loop)
    for native, lifted in ((logs[0], logs[2]), (logs[1], logs[3])):
        assert native == [pytest.approx(each, rel=1e-4) for each in lifted] and native
    late = [line for line in explain(planned.model).splitlines() if "a step pre-hook was registered after apply" in line]
    assert len(late) == (0 if moment == "before apply" else 3) and all(line.endswith(": 1 times") for line in late)


def test_global_step_hooks() -> None:
    log, handles = Log(), []
    try:
        handles = [register_optimizer_step_pre_hook(clip_in_hook), register_optimizer_step_post_hook(log)]
        sides(whole(SGD, lr=0.05))
    finally:
        for handle in handles:
            handle.remove()
    assert log.seen[:4] == [pytest.approx(each, rel=1e-4) for each in log.seen[4:]]


def test_hooks_outlive_a_plan() -> None:
    def loop(side: Side) -> None:
        log = side.optimizer.register_step_pre_hook(clip_in_hook)
        side.apply()
        kept = side.optimizer.register_step_pre_hook(clip_in_hook)
        side.step(0)
        if side.plan is not None:
            unapply(side.model, side.optimizer)
        side.step(1)
        log.remove()
        side.step(2)
        kept.remove()
        assert not side.optimizer._optimizer_step_pre_hooks and not side.optimizer._optimizer_step_post_hooks
        side.step(3)

    sides(whole(SGD, lr=0.05), loop=loop)


def test_two_models_under_one_optimizer() -> None:
    """Both have a plan, and tables of the same names."""
    trained = []
    for planned in (False, True):
        models = [Bags(), Bags()]
        with torch.no_grad():
            models[1].emb[0].weight.mul_(2)
        optimizer = torch.optim.Adagrad([p for model in models for p in model.parameters()], lr=0.1)
        for model in models if planned else ():
            work = Workload("two", model, optimizer, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])
            apply(default_plan(lift(work)), model, optimizer)
        for seed in range(4):
            (models[0](*batch(seed)) + models[1](*batch(seed + 9))).pow(2).mean().backward()
            if seed == 2:
                models[1].zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        if planned:
            assert all(FUSED in explain(model) for model in models)
            unapply(models[0], optimizer)
            models[1](*batch(3)).sum().backward()
            optimizer.step()
        else:
            models[1](*batch(3)).sum().backward()
            optimizer.step()
        trained.append(nn.ModuleList(models))
    assert_same(*trained, exact=False)


def test_each_of_two_models_follows_its_own_plan() -> None:
    models = [Bags(), Bags()]
    optimizer = torch.optim.Adagrad([p for model in models for p in model.parameters()], lr=0.1)
    for model, equivalence in zip(models, ("reassociated", "bitwise")):
        work = Workload("two", model, optimizer, lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(3)])
        apply(default_plan(lift(work), Constraints(equivalence=equivalence)), model, optimizer)
    models[1](*batch(0)).sum().backward()
    optimizer.step()                              # the first model has no gradients
    assert TORCH not in explain(models[0]) and "the plan chose update='native': 1 times" in explain(models[1])


# -------------------------------------------------------------------------------------------------------------- closures and scalers

@pytest.mark.parametrize("make", [whole(SGD, lr=0.05), whole(SGD, lr=0.05, momentum=0.9), whole(ADAGRAD, lr=0.1)],
                         ids=["sgd", "momentum", "adagrad"])
def test_closures(make: Make) -> None:
    def loop(side: Side) -> None:
        side.apply()
        for seed in range(4):
            def closure(seed: int = seed) -> Tensor:
                assert torch.is_grad_enabled()
                side.optimizer.zero_grad()
                return side.backward(seed)
            assert side.optimizer.step(closure).requires_grad

    sides(make, loop=loop)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_an_optimizer_that_evaluates_its_closure_often(sparse: bool) -> None:
    calls: list[int] = []

    def make(model: Bags) -> torch.optim.Optimizer:
        for bag in model.emb if not sparse else ():
            bag.weight.requires_grad_(False)             # LBFGS moves untouched rows, but no frozen ones
        return torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=4)

    def loop(side: Side) -> None:
        side.apply()
        calls.append(0)
        for seed in range(2):
            def closure(seed: int = seed) -> Tensor:
                calls[-1] += 1
                side.optimizer.zero_grad()
                return side.backward(seed)
            side.optimizer.step(closure)

    both = Side(make, sparse, False), Side(make, sparse, True)
    for side in both:
        loop(side)
    assert calls[0] == calls[1] > 4
    assert_same(both[0].model, both[1].model, exact=False)
    assert not sparse or "it calls the closure itself" in explain(both[1].model)


@pytest.mark.parametrize("make", [whole(SGD, lr=0.05, fused=True), whole(ADAGRAD, lr=0.1, fused=True), whole(SGD, lr=0.05)],
                         ids=["fused sgd", "fused adagrad", "sgd"])
@pytest.mark.parametrize("unscale", [True, False])
def test_scalers_that_leave_unscaling_to_the_optimizer(make: Make, unscale: bool) -> None:
    scales: list[list[float]] = []

    def loop(side: Side) -> None:
        side.apply()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        scales.append([])
        for seed in range(5):
            loss = side.model(*batch(seed)).pow(2).mean() * (float("inf") if seed in (1, 3) else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(side.optimizer)
                nn.utils.clip_grad_norm_(side.model.parameters(), 0.3)
            scaler.step(side.optimizer)
            scaler.update()
            side.optimizer.zero_grad()
            scales[-1].append(scaler.get_scale())

    sides(make, sparse=False, loop=loop)
    assert scales[0] == scales[1] == [256, 128, 128, 64, 64]


def test_a_scale_that_only_the_optimizer_knows() -> None:
    def loop(side: Side) -> None:
        side.apply()
        for found_inf in (0.0, 1.0):
            side.backward(0)
            side.optimizer.grad_scale, side.optimizer.found_inf = torch.tensor(4.0), torch.tensor(found_inf)
            side.optimizer.step()
            del side.optimizer.grad_scale, side.optimizer.found_inf
            side.optimizer.zero_grad()

    _, planned = sides(whole(SGD, lr=0.05, fused=True), False, loop)
    assert "the scale and the finite check of a GradScaler: 2 times" in explain(planned.model)


def test_a_step_that_raises_keeps_gradients() -> None:
    """What is wrong with a gradient shows before any table is touched."""
    side = Side(whole(SGD, lr=0.05), True, True)
    side.apply()
    _, offsets, indices = batch(0)
    out = side.model.emb[1](indices[1], offsets[1])
    grad = torch.ones_like(out)
    out.backward(grad)
    grad.mul_(2)
    before = {name: value.clone() for name, value in side.model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified in place"):
            side.optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in side.model.state_dict().items())
    assert side.model.emb[1].weight.grad is not None
