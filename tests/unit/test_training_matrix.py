"""What a training loop does x optimizers x layouts of gradients: a model with a plan trains as natively, or is refused with a reason.

Equal means bit for bit where the plan says bitwise. Where torch itself raises (a norm of sparse gradients), the dense native result counts.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparselift.apply import apply, unapply
from sparselift.errors import LiftRefused
from sparselift.lift import lift
from sparselift.optim import RowWiseAdagrad
from sparselift.plan import Plan, default_plan
from sparselift.space import Constraints
from sparselift.workload import Workload
from tests.unit.runtime_models import Bags, assert_same, batch

Optimizers = list[torch.optim.Optimizer]


def split(model: Bags, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Optimizers:
    """SGD for the dense part, `kind` for the tables."""
    tables = list(model.emb.parameters())
    return [torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.05), kind(tables, **options)]


OPTIMIZERS: dict[str, Callable[[Bags], Optimizers]] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=0.05)],
    "momentum": lambda m: [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9, dampening=0.1)],
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1)],
    "sparse_adam": lambda m: split(m, torch.optim.SparseAdam, lr=0.05),
    "rowwise": lambda m: split(m, RowWiseAdagrad, lr=0.1),
}
REFUSED = {   # with dense gradients
    "momentum": "SGD natively raises or moves untouched rows too: SGD with momentum=0.9",
    "sparse_adam": "SparseAdam natively raises or moves untouched rows too: SparseAdam takes sparse gradients alone",
}


class Run:
    """A model in training, with a plan (`plan` is not None) or natively, and what it has shown."""

    def __init__(self, optimizer: str, sparse: bool, plan: Plan | None) -> None:
        self.make, self.sparse, self.plan = OPTIMIZERS[optimizer], sparse, plan
        self.seen: list[Any] = []
        self._fresh()
        self.switch(True)

    def _fresh(self) -> None:
        self.model = Bags(self.sparse)
        self.optimizers = self.make(self.model)

    def switch(self, on: bool) -> None:
        """Put the plan on or take it off; nothing without one."""
        if self.plan is not None:
            (apply if on else lambda _, *pair: unapply(*pair))(self.plan, self.model, self.optimizers)

    def backward(self, seed: int, factor: float = 1.0) -> None:
        loss = self.loss(seed) * factor
        self.seen.append(loss.item())
        loss.backward()

    def loss(self, seed: int) -> Tensor:
        return self.model(*batch(seed)).pow(2).mean()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self, **options: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**options)

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.update()
        self.zero()

    def resume(self) -> None:
        """Into fresh objects, by way of files."""
        files = []
        for part in (self.model, *self.optimizers):
            files.append(io.BytesIO())
            torch.save(part.state_dict(), files[-1])
            files[-1].seek(0)
        self._fresh()
        for part, file in zip((self.model, *self.optimizers), files):
            part.load_state_dict(torch.load(file, weights_only=True))


def plain(run: Run) -> None:
    for seed in range(4):
        run.step(seed)


def accumulate(run: Run) -> None:
    for seed in range(6):
        run.backward(seed, 0.5)
        if seed % 2:
            run.update()
            run.zero(set_to_none=seed == 3)


def skip(run: Run) -> None:
    for seed in range(5):
        run.backward(seed)
        if seed != 2:
            run.update()
        run.zero()


def schedule(run: Run) -> None:
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in run.optimizers]
    for seed in range(4):
        run.step(seed)
        for scheduler in schedulers:
            scheduler.step()
    for optimizer in run.optimizers:
        optimizer.param_groups[0]["lr"] = 0.01
    run.step(4)


def clip(run: Run) -> None:
    for seed in range(4):
        run.backward(seed)
        run.seen.append((_clip_sparse if run.plan is None else nn.utils.clip_grad_norm_)(run.model.parameters(), 0.3).item())
        run.update()
        run.zero()


def _clip_sparse(parameters: Any, max_norm: float) -> Tensor:
    """clip_grad_norm_ as it is for dense gradients. torch's raises for sparse ones."""
    grads = [p.grad for p in parameters]
    norm = torch.stack([torch.linalg.vector_norm(g.to_dense()) for g in grads]).norm()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def scaler(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for seed in range(5):
        loss = run.loss(seed)
        scaler.scale(loss * (float("inf") if seed == 1 else 1.0)).backward()
        for optimizer in run.optimizers:
            scaler.step(optimizer)
        scaler.update()
        run.zero()
        run.seen += [loss.item(), scaler.get_scale()]
    assert run.seen[3] == run.seen[1] / 2 and run.seen[-1] == run.seen[1]


def two_forwards(run: Run) -> None:
    for seed in range(0, 12, 2):
        (run.loss(seed) + run.loss(seed + 1)).backward()
        if seed % 3:                              # once, or twice into one gradient
            run.update()
            run.zero()


def freeze(run: Run) -> None:
    for seed in range(6):
        run.model.emb[1].weight.requires_grad_(seed not in (2, 3))
        run.step(seed)


def resume(run: Run) -> None:
    for seed in range(2):
        run.step(seed)
    run.resume()
    run.switch(True)
    for seed in range(2, 4):
        run.step(seed)
    run.resume()            # and on without a plan
    for seed in range(4, 6):
        run.step(seed)


def switch(run: Run) -> None:
    for seed in range(8):
        run.switch(bool(seed % 2))
        run.backward(seed)
        if seed == 3:
            run.switch(False)
            run.switch(True)
        run.update()
        run.zero()


LOOPS = {loop.__name__: loop for loop in (plain, accumulate, skip, schedule, clip, scaler, two_forwards, freeze, resume, switch)}


USES = {"accumulate": "accumulate", "two_forwards": "accumulate", "skip": "skip", "clip": "clip", "scaler": "scaler"}


@cache
def made_plan(optimizer: str, sparse: bool, equivalence: str, uses: str | None) -> Plan:
    model = Bags(sparse)
    work = Workload("matrix", model, OPTIMIZERS[optimizer](model), lambda m, b: m(*b).pow(2).mean(), [batch(seed) for seed in range(4)],
                    uses=frozenset({uses} if uses else ()))
    return default_plan(lift(work), Constraints(equivalence=equivalence))


PLANS = [*((name, True, equivalence) for name in OPTIMIZERS for equivalence in ("reassociated", "bitwise")),
         *((name, False, "reassociated") for name in OPTIMIZERS if name not in REFUSED)]
# A clipped plan is never bitwise: torch has no norm of sparse gradients to have the bits of.
CASES = [(*plan, loop) for plan in PLANS for loop in LOOPS if (plan[2], loop) != ("bitwise", "clip")]


@pytest.mark.parametrize("optimizer, sparse, equivalence, loop", CASES,
                         ids=[f"{loop}-{name}-{'sparse' if sparse else 'dense'}-{kind}" for name, sparse, kind, loop in CASES])
def test_a_planned_loop_trains_as_natively(optimizer: str, sparse: bool, equivalence: str, loop: str) -> None:
    plan = made_plan(optimizer, sparse, equivalence, USES.get(loop))
    native, planned = Run(optimizer, sparse, None), Run(optimizer, sparse, plan)
    for run in (native, planned):
        LOOPS[loop](run)
    exact = plan.equivalence == "bitwise"
    assert exact >= (equivalence == "bitwise")
    assert planned.seen == (native.seen if exact else pytest.approx(native.seen, rel=1e-4))
    assert_same(native.model, planned.model, exact)
    for mine, theirs in zip(planned.optimizers, native.optimizers):
        assert_same_state(mine.state_dict(), theirs.state_dict(), exact)


def assert_same_state(mine: dict[str, Any], theirs: dict[str, Any], exact: bool) -> None:
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        assert mine["state"][key].keys() == state.keys()
        for name, value in state.items():
            tensors = [torch.as_tensor(v).to_dense() for v in (mine["state"][key][name], value)]
            torch.testing.assert_close(*tensors, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}))


@pytest.mark.parametrize("optimizer", REFUSED)
def test_dense_gradients_whose_untouched_rows_move_are_refused(optimizer: str) -> None:
    with pytest.raises(LiftRefused, match=REFUSED[optimizer]):
        made_plan(optimizer, False, "reassociated", None)
