"""The certificate's view of a whole step under a plan that changes the dense part: every gradient, against native torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparselift.apply import Applied
from sparselift.errors import EquivalenceError, LiftRefused
from sparselift.ir import Structure
from sparselift.kernels.base import KernelBackend
from sparselift.preserve import preserve
from sparselift.runtime.compiled import Compiled
from sparselift.schedule import Schedule
from sparselift.workload import Workload

# Of a gradient's norm. Float32 sums of thousands of terms in another order stay below 1e-5; a ReLU whose input changes its sign adds the
# share of one sample. What is wrong rather than rounded is above 1e-2.
TOLERANCE = 1e-3


def check_gradients(structure: Structure, schedule: Schedule, work: Workload, batch: Any, backend: str | KernelBackend) -> dict[str, float]:
    """Compare the loss and all gradients of one batch in norm: the largest share of `TOLERANCE`.

    With native torch, whose lookups of float32 tables are the plan's to a few bits. Those of halves are to two or three digits, which a
    small loss shows as a large share; so there the plan's own lookups are under both dense parts. They are held to native's by themselves.

    Raises EquivalenceError above 1, and LiftRefused for a module that is to be compiled and cannot be.
    """
    halves = any(table.dtype != "float32" for table in structure.tables)
    lookups = Applied(structure, schedule.without_dense(), work.model, backend) if halves else None
    native_loss, native = _gradients(work, batch, lookups)
    applied = Applied(structure, schedule, work.model, backend)
    loss, planned = _gradients(work, batch, applied)
    _require_compiled(applied)
    worst = _share("the loss", loss, native_loss)
    for name, want in native.items():
        if name not in planned:
            raise EquivalenceError(f"gradient of {name}: planned has none, native one")
        worst = max(worst, _share(f"gradient of {name}", planned[name], want))
    return {"gradients of a step": max(worst, 1e-9)}


def _require_compiled(applied: Applied) -> None:
    dense = applied.runtime.dense if applied.runtime is not None else None
    if not isinstance(dense, Compiled):
        return
    if dense.refusals:
        raise LiftRefused(f"compile={dense.knob!r}: " + "; ".join(f"{path}: {why}" for path, why in dense.refusals.items()))
    if not dense.calls:
        raise LiftRefused(f"compile={dense.knob!r}: none of {', '.join(dense.forwards)} is called in training")


def _gradients(work: Workload, batch: Any, applied: Applied | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and by name the gradients, a sparse one as it is, of one backward without a step."""
    model = work.model
    with preserve(work, [batch]):
        if applied is not None:
            applied.attach(model, work.optimizers)
        try:
            with torch.enable_grad():
                loss = work.step(model, batch)
                if loss.requires_grad:
                    loss.backward()
        finally:
            if applied is not None:
                applied.detach(model)               # which leaves torch's own gradients of the tables
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _share(what: str, got: Tensor, want: Tensor) -> float:
    # In float32: torch adds no sparse float16 tensors.
    difference, size = _norm(torch.add(got.float(), want.float(), alpha=-1)), _norm(want.float())
    share = difference / (TOLERANCE * size + torch.finfo(torch.float32).tiny)
    if not share <= 1:
        raise EquivalenceError(f"{what}: planned differs from native by {difference:.3g} in norm, of {size:.3g}; at most "
                               f"{TOLERANCE * size:.3g} is rounding")
    return share


def _norm(tensor: Tensor) -> float:
    return float((tensor.coalesce().values() if tensor.is_sparse else tensor).double().norm())
