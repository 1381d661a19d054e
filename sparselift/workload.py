"""What a user hands to the compiler: a model, its optimizer, one training step, and real batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from inspect import isfunction
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.errors import LiftRefused, WorkloadError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
USES = frozenset({"accumulate", "clip", "scaler", "skip"})


@dataclass(frozen=True, slots=True, repr=False)
class Workload:
    """One training job.

    Attributes
    ----------
    name        of the plan's study and reports
    model       the module whose `forward` a training step calls
    optimizer   one torch optimizer, or a sequence of them
    step        step(model, batch) -> 0-d loss; backward, every optimizer.step() and zero_grad(set_to_none=True) are the tool's
    batches     a sequence of batches, or a callable that gives an iterator over them; a batch is whatever `step` takes
    train_step  train_step(model, optimizer, batch) -> 0-d loss: the whole step of a loop that accumulates, clips or scales; `optimizer`
                is as given above, one or a sequence. Replaces `step` wherever a step is measured; what is lifted is still `step`
    uses        what the loop does: a subset of {"accumulate", "clip", "scaler", "skip"}; None: unknown
    inputs      inputs(batch) -> what `step` gives the model's forward of a batch, the very tensors: a tuple of its arguments, or a mapping
                of its keywords, as for `sl.prefetch_batches`; None: the batch itself, alone

    Raises
    ------
    WorkloadError   an argument of another kind, such as an iterator as `batches`, which could be read once only
    """

    name: str
    model: nn.Module
    optimizer: Optimizers
    step: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any] | Callable[[], Iterable[Any]]
    train_step: Callable[[nn.Module, Any, Any], Tensor] | None = None
    uses: frozenset[str] | None = None
    inputs: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise WorkloadError(f"workload {self.name!r}: model must be an nn.Module; got {type(self.model).__name__}")
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise WorkloadError(f"workload {self.name!r}: optimizer must be a torch optimizer or a sequence of them; "
                                    f"got {type(optimizer).__name__}")
        if not callable(self.step):
            raise WorkloadError(f"workload {self.name!r}: step must be a function step(model, batch) that returns the loss, beside a "
                                f"train_step too, since it is what is lifted; got {self.step!r}")
        if self.train_step is not None and not callable(self.train_step):
            raise WorkloadError(f"workload {self.name!r}: train_step must be a function train_step(model, optimizer, batch) or None; "
                                f"got {self.train_step!r}")
        if self.inputs is not None and not callable(self.inputs):
            raise WorkloadError(f"workload {self.name!r}: inputs must be a function inputs(batch) that returns the forward's arguments, or "
                                f"None; got {self.inputs!r}")
        if not callable(self.batches) and (not isinstance(self.batches, Iterable) or isinstance(self.batches, (str, Iterator))):
            raise WorkloadError(f"workload {self.name!r}: batches must be a list, or a callable that returns an iterator, since they are "
                                f"read more than once; got {type(self.batches).__name__}")
        if self.uses is not None:
            object.__setattr__(self, "uses", frozenset(self.uses))
            if unknown := self.uses - USES:
                raise WorkloadError(f"workload {self.name!r}: uses may hold {sorted(USES)}; got {sorted(unknown)}")

    def __repr__(self) -> str:
        """Without the batches, which may be long."""
        batches = f"{len(self.batches)} batches" if isinstance(self.batches, Sized) else "batches from a callable"
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return f"<Workload {self.name!r}: {type(self.model).__name__}, {kinds}, {batches}>"

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers as a tuple, one or many."""
        return as_tuple(self.optimizer)

    def iterate(self) -> Iterator[Any]:
        """A fresh pass over the batches."""
        return iter(self.batches() if callable(self.batches) else self.batches)

    def take(self, count: int) -> list[Any]:
        """The first `count` batches, fewer if there are not so many. Raises WorkloadError if there is none."""
        batches = list(islice(self.iterate(), count))
        if not batches:
            raise WorkloadError(f"workload {self.name!r} gives no batches")
        return batches

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the model's forward, by `inputs`. Raises TypeError where that gives neither."""
        return forward_arguments(batch, self.inputs)

    def train(self, model: nn.Module, optimizer: Optimizers, batch: Any) -> Tensor:
        """One whole training step, the way the user's loop does it. Returns the loss, detached."""
        if self.train_step is not None:
            return self.train_step(model, optimizer, batch).detach()
        loss = self.step(model, batch)
        loss.backward()
        for each in as_tuple(optimizer):
            each.step()
        for each in as_tuple(optimizer):
            each.zero_grad(set_to_none=True)
        return loss.detach()


def forward_arguments(batch: Any, inputs: Callable[[Any], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a forward that gets `inputs(batch)`: a tuple of arguments or a mapping of keywords; None: the batch, alone."""
    if inputs is None:
        return (batch,), {}
    given = inputs(batch)
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, Sequence):
        return tuple(given), {}
    raise TypeError(f"inputs must give a tuple of the forward's arguments or a mapping of its keywords; got {type(given).__name__}")


def check_kind(call: str, name: str, value: object, kind: type, made_by: str) -> None:
    """Raises TypeError unless `value` is a `kind`. `call` is the function, `made_by` what makes the right argument."""
    if isinstance(value, kind):
        return
    got = type(value).__name__
    if isinstance(value, (str, os.PathLike)):
        got = f"{os.fspath(value)!r}"
    elif isfunction(value):
        got = f"the function {value.__name__}" + (f": call it, {value.__name__}()" if kind is Workload else "")
    raise TypeError(f"{call}: {name} must be {'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__} ({made_by}); got {got}")


def check_workload(call: str, value: object) -> None:
    """Raises TypeError unless `value` is a Workload."""
    reference = " or sparselift.workloads.resolve('file.py:function')" if isinstance(value, str) else ""
    check_kind(call, "work", value, Workload, "sl.Workload(name, model, optimizer, step, batches)" + reference)


def check_ranks(doing: str) -> None:
    """Raises LiftRefused in a job of several ranks. `doing` what, for the message."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise LiftRefused(f"{doing}: {distributed.get_world_size()} ranks; lifted tables are not synchronised between ranks yet: "
                          "a plan runs in one process")


def as_tuple(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """One optimizer or a sequence of them, as a tuple."""
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
