"""What a step costs outside of lookups, measured: FLOPs, operator calls and seconds, forward and backward apart."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sparselift.kernels.interaction import InteractionSpec, interact
from sparselift.lift.modules import EmbeddingModule
from sparselift.lift.record import check_loss
from sparselift.workload import Workload

_MIN_RUNS, _MAX_RUNS = 2, 3                      # timed; the fastest counts
_ENOUGH_S = 0.2


@dataclass(frozen=True, slots=True)
class DenseCost:
    """The dense part of one step, in one direction."""

    seconds: float
    flops: int
    calls: int                     # torch operators


@dataclass(frozen=True, slots=True)
class StepCost:
    """One native step. `lookup_s` and `lookup_backward_s` are of its lookups, by module."""

    forward: DenseCost
    backward: DenseCost
    lookup_s: Mapping[str, float]
    lookup_backward_s: Mapping[str, float]


def measure(work: Workload, modules: Mapping[str, EmbeddingModule], batch: Any) -> StepCost:
    """Run forward and backward: once counting, which also warms up, then a few times timing. To be called under `preserve`.

    Raises WorkloadError if the step gives no scalar loss.
    """
    lookups = _Timed()
    with lookups.hooks(modules), FlopCounterMode(display=False) as flops, _Calls(lookups) as calls:
        loss = work.step(work.model, batch)
        check_loss(work, loss)
        forward = flops.get_total_flops(), calls.count
        if loss.requires_grad:
            loss.backward()
        backward = flops.get_total_flops() - forward[0], calls.count - forward[1]
    del loss
    _drop_gradients(work)
    runs: list[_Timed] = []
    while len(runs) < _MIN_RUNS or (len(runs) < _MAX_RUNS and sum(run.seconds for run in runs) < _ENOUGH_S):
        runs.append(_time_step(work, modules, batch))
    fastest = min(runs, key=lambda run: run.seconds)
    return StepCost(DenseCost(fastest.dense_forward_s, *forward), DenseCost(fastest.dense_backward_s, *backward),
                    fastest.lookup_s, fastest.lookup_backward_s)


def measure_interaction(batch: int, spec: InteractionSpec, dtype: torch.dtype) -> tuple[DenseCost, DenseCost]:
    """torch's own forward and backward of an interaction of (batch, V, D) vectors."""
    vectors = torch.ones(batch, spec.num_vectors, spec.dim, dtype=dtype, requires_grad=True)
    grad = torch.ones(batch, spec.width, dtype=dtype)
    with FlopCounterMode(display=False) as flops, _Calls(_Timed()) as calls:
        out = interact(vectors, spec)
        forward = flops.get_total_flops(), calls.count
        torch.autograd.grad(out, vectors, grad)
        backward = flops.get_total_flops() - forward[0], calls.count - forward[1]
    fastest = [math.inf, math.inf]
    for _ in range(_MAX_RUNS):
        start = time.perf_counter()
        out = interact(vectors, spec)
        middle = time.perf_counter()
        torch.autograd.grad(out, vectors, grad)
        fastest = [min(fastest[0], middle - start), min(fastest[1], time.perf_counter() - middle)]
    return DenseCost(fastest[0], *forward), DenseCost(fastest[1], *backward)


def _time_step(work: Workload, modules: Mapping[str, EmbeddingModule], batch: Any) -> _Timed:
    timed = _Timed()
    with timed.hooks(modules):
        start = time.perf_counter()
        loss = work.step(work.model, batch)
        middle = time.perf_counter()
        if loss.requires_grad:
            loss.backward()
        end = time.perf_counter()
    _drop_gradients(work)
    timed.dense_forward_s = max(middle - start - sum(timed.lookup_s.values()), 0.0)
    timed.dense_backward_s = max(end - middle - sum(timed.lookup_backward_s.values()), 0.0)
    timed.seconds = end - start
    return timed


def _drop_gradients(work: Workload) -> None:
    for optimizer in work.optimizers:
        optimizer.zero_grad(set_to_none=True)
    work.model.zero_grad(set_to_none=True)


class _Calls(TorchDispatchMode):
    """Counts operator calls of the dense part: those outside of lookups and their autograd nodes, on strided tensors."""

    def __init__(self, lookups: _Timed) -> None:
        super().__init__()
        self.count = 0
        self._lookups = lookups

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_table = self._lookups.inside or any(isinstance(value, Tensor) and value.is_sparse for value in args)
        self.count += not of_table and func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


class _Timed:
    """Seconds of one step, apart for the forwards of embedding modules and for their autograd nodes."""

    def __init__(self) -> None:
        self.seconds = self.dense_forward_s = self.dense_backward_s = 0.0
        self.lookup_s: dict[str, float] = defaultdict(float)
        self.lookup_backward_s: dict[str, float] = defaultdict(float)
        self.inside = False
        self._started = 0.0

    @contextmanager
    def hooks(self, modules: Mapping[str, EmbeddingModule]) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in modules.items():
                stack.callback(module.register_forward_pre_hook(self._start).remove)
                stack.callback(module.register_forward_hook(partial(self._stop_forward, path)).remove)
            yield

    def _start(self, *_: Any) -> None:
        self.inside = True
        self._started = time.perf_counter()

    def _stop_forward(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self.lookup_s[path] += time.perf_counter() - self._started
        self.inside = False
        if getattr(output, "grad_fn", None) is not None:         # a forward hook may have made something else of it
            output.grad_fn.register_prehook(self._start)
            output.grad_fn.register_hook(partial(self._stop_backward, path))

    def _stop_backward(self, path: str, *_: Any) -> None:
        self.lookup_backward_s[path] += time.perf_counter() - self._started
        self.inside = False
