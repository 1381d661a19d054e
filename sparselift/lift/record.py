"""The recorded run: real steps, seen through hooks on the root and on every embedding module. Works on any model that runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparselift.dtypes import dtype_name
from sparselift.errors import WorkloadError
from sparselift.lift.modules import EmbeddingModule
from sparselift.lift.paths import Inputs
from sparselift.lift.products import Found, Products
from sparselift.preserve import values_read
from sparselift.workload import Workload

_CATS = (torch.cat, torch.concat, torch.concatenate)

Key = tuple[str, int]              # a lookup: module path, and which of the module's calls in a forward it is
Parts = tuple[Key | int, ...]      # of a concat: lookups, and widths of other tensors


class Joined(NamedTuple):
    """A concat of lookups that nothing else reads."""

    parts: Parts
    dtype: str                     # of the result


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one call of an embedding module was given."""

    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None         # per-sample


@dataclass(slots=True)
class Scope:
    """One call of the root forward; or (args None) what a step looks up outside of any."""

    step: int                      # position of the batch
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    lookups: dict[Key, Lookup] = field(default_factory=dict)
    concats: list[Joined] = field(default_factory=list)  # torch.cat(dim=1) calls that alone read the lookups in them
    interactions: list[tuple[Parts, Found]] = field(default_factory=list)  # of those concats, which alone read them


@dataclass(slots=True)
class Recording:
    """What the steps showed."""

    scopes: list[Scope] = field(default_factory=list)
    inputs: Inputs | None = None   # of the first root forward, as they were when it started
    weight_uses: dict[Tensor, str] = field(default_factory=dict)  # weight of an embedding module -> what else reads it
    functional: dict[Tensor, str] = field(default_factory=dict)   # other parameter -> the torch function that looks up its rows

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every lookup, in the order of first calls."""
        return tuple(dict.fromkeys(key for scope in self.scopes for key in scope.lookups))

    def seen(self, key: Key) -> Iterator[tuple[Scope, Lookup]]:
        for scope in self.scopes:
            if key in scope.lookups:
                yield scope, scope.lookups[key]


def record(work: Workload, modules: Mapping[str, EmbeddingModule], batches: Sequence[Any]) -> Recording:
    """Run the forward of `work.step` on every batch. To be called under `preserve`.

    Raises WorkloadError if a step gives no scalar loss.
    """
    recording = Recording()
    for number, batch in enumerate(batches):
        # The first one with autograd, whose graph shows every consumer of a lookup, custom functions included.
        with torch.set_grad_enabled(number == 0):
            run = _Run(work.model, modules, recording, number)
            with run.hooks(), _Watch(run):
                loss = work.step(work.model, batch)
            check_loss(work, loss)
            run.close(loss)
    return recording


def check_loss(work: Workload, loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise WorkloadError(f"workload {work.name!r}: step must return a scalar loss tensor; got {got}")


class _Run:
    """One step while it is recorded."""

    def __init__(self, model: nn.Module, modules: Mapping[str, EmbeddingModule], recording: Recording, number: int) -> None:
        self.model, self.modules, self.recording = model, modules, recording
        self.outside = self.scope = Scope(number)
        self.calls: Counter[str] = Counter()                     # of modules in this scope
        self.inside = 0                                          # depth of embedding modules' forwards
        self.outputs: dict[int, tuple[Key, Tensor]] = {}         # by id(); kept alive, so that an id stays its tensor's
        self.readers: Counter[int] = Counter()                   # torch functions that got an output, by its id()
        self.cats: list[tuple[Scope, Joined, list[int]]] = []    # and the id() of the outputs in it
        self.products = Products()
        self.weights = {id(module.weight) for module in modules.values()}
        self.others = {id(weight) for weight in model.parameters()} - self.weights

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            register = [partial(self.model.register_forward_pre_hook, self._enter_root, with_kwargs=True)]
            for path, module in self.modules.items():
                register.append(partial(module.register_forward_pre_hook, self._enter_lookup))
                register.append(partial(module.register_forward_hook, partial(self._leave_lookup, path), with_kwargs=True))
            register.append(partial(self.model.register_forward_hook, self._leave_root))
            for each in register:
                stack.callback(each().remove)
            yield

    def _enter_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.recording.inputs is None:
            self.recording.inputs = Inputs(args, kwargs)
        self.scope, self.calls = Scope(self.outside.step, args, kwargs), Counter()
        self.recording.scopes.append(self.scope)

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self.scope = self.outside

    def _enter_lookup(self, module: nn.Module, args: Any) -> None:
        self.inside += 1

    def _leave_lookup(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        self.inside -= 1
        given = dict(zip(("input", "offsets", "per_sample_weights"), args), **kwargs)
        key = path, self.calls[path]
        self.calls[path] += 1
        self.scope.lookups[key] = Lookup(given["input"], given.get("offsets"), given.get("per_sample_weights"))
        self.outputs[id(output)] = key, output

    def saw_cat(self, tensors: Any, result: Tensor) -> None:
        """A torch.cat(dim=1): a concat if it has lookups, of one dtype, and everything in it is (B, n), the rest of the result's dtype,
        which is the lookups' or float32.
        """
        self.products.join(tensors)
        parts: list[Key | int] = []
        for tensor in tensors:
            is_lookup = id(tensor) in self.outputs
            if tensor.dim() != 2 or not (is_lookup or tensor.dtype == result.dtype):
                return
            parts.append(self.outputs[id(tensor)][0] if is_lookup else tensor.shape[1])
        outputs = [tensor for tensor in tensors if id(tensor) in self.outputs]
        if len({output.dtype for output in outputs}) == 1 and result.dtype in (outputs[0].dtype, torch.float32):
            self.products.start(len(self.cats), tensors, result)
            self.cats.append((self.scope, Joined(tuple(parts), dtype_name(result.dtype)), [id(output) for output in outputs]))

    def close(self, loss: Tensor) -> None:
        """Keep the concats whose lookups have no other reader, by torch functions and by the autograd graph."""
        edges = _edges(loss)
        interactions = {found.cat: found for found in self.products.close()}
        for number, (scope, joined, outputs) in enumerate(self.cats):
            nodes = [self.outputs[output][1].grad_fn for output in outputs]
            if all(self.readers[output] == 1 for output in outputs) and all(edges[node] <= 1 for node in nodes if node is not None):
                scope.concats.append(joined)
                if number in interactions:
                    scope.interactions.append((joined.parts, interactions[number]))
        if self.outside.lookups:
            self.recording.scopes.append(self.outside)


class _Watch(TorchFunctionMode):
    """Sees which torch functions read lookups and weights."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        run = self.run
        if func in (F.embedding, F.embedding_bag) and not run.inside:
            weight: Any = args[1] if len(args) > 1 else kwargs.get("weight")
            if id(weight) in run.weights:
                run.recording.weight_uses.setdefault(weight, f"torch.nn.functional.{func.__name__}")
            elif id(weight) in run.others:
                run.recording.functional.setdefault(weight, f"torch.nn.functional.{func.__name__}")
        result = func(*args, **kwargs)
        if func in _CATS and _dim(args, kwargs) in (1, -1):
            run.saw_cat(args[0] if args else kwargs["tensors"], result)
        run.products.follow(func, args, result)
        for tensor in values_read(func, args, kwargs, result, run.products.tensors):
            run.products.read(tensor)
        for output in values_read(func, args, kwargs, result, run.outputs):
            run.readers[id(output)] += 1
        for weight in values_read(func, args, kwargs, result, run.weights):
            # What is detached does not add to the gradient, and a write to it shows in the weight's version.
            if not run.inside and func is not Tensor.detach:
                run.recording.weight_uses.setdefault(weight, _name(func))
        return result


def _name(func: Any) -> str:
    """A torch function's name for people; a property's getter is a method of the property's descriptor."""
    return f"Tensor.{func.__self__.__name__}" if getattr(func, "__name__", "") == "__get__" else getattr(func, "__qualname__", str(func))


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dimension of a torch.cat that allocates its result; None for one that writes to `out`."""
    return None if "out" in kwargs else args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))


def _edges(loss: Tensor) -> Counter[Any]:
    """Autograd node -> edges that lead to it from the nodes that the loss depends on."""
    counts: Counter[Any] = Counter()
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    met = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None:
                counts[node] += 1
                if node not in met:
                    met.add(node)
                    waiting.append(node)
    return counts
