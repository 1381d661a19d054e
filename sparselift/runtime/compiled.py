"""Modules in torch.compile, each as one graph, in training: those without lookups, or the whole model, with its lookups as nodes.

A module's own forward is replaced. What a module without lookups compiles to belongs to it, not to a plan: a search that switches between
plans compiles once. A graph with lookups belongs to its plan. Every call is checked; whatever the graph was not made for runs as torch
runs it, and is counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._functorch import config as graph_config
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves

from sparselift.functional.interaction import is_lowered
from sparselift.ir import Structure
from sparselift.lift.dense_modules import has_hooks
from sparselift.ops import nobody_watches
from sparselift.runtime.dense import OwnForward, OwnForwards, is_free, plain_modules
from sparselift.runtime.merging import merge_lookups

_MODEL = "the model"
_FEWEST_ROWS = 2                   # of an input: the compiler makes graphs of their own for none and one


class Compiled(OwnForwards["CompiledForward"]):
    """Modules of one model that are compiled."""

    knob: str                  # its value

    @property
    def refusals(self) -> dict[str, str]:
        """By path, why the compiler does not take a module."""
        return {path: reason for path, own in self.forwards.items() if (reason := own.program.refusal)}

    def obstacle(self) -> str:
        """Why no graph of the model may run now; empty: they may."""
        return ""

    def uncompiled(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's forward as its class has it."""
        return type(module).forward(module, *args, **kwargs)

    @property
    def compile_s(self) -> float:
        return sum(own.program.compile_s for own in self.forwards.values())


class CompiledModules(Compiled):
    """Those without lookups."""

    knob = "inductor"

    def __init__(self, structure: Structure, model: nn.Module, report: Callable[[str, str], None]) -> None:
        super().__init__(report)
        modules = plain_modules(model)
        for path in (each.name for each in structure.dense_modules):
            if path in modules:
                self.forwards[path] = CompiledForward(self, path, modules[path])
            else:
                report(path, "it is not in the model any more, or its forward has been replaced")

    def __str__(self) -> str:
        return (f"dense part, no part of the sparse path's gains: {len(self.forwards) - len(self.refusals)} modules "
                f"({', '.join(self.forwards)}) compiled in {self.compile_s:.1f} s: {self.calls} calls")


class CompiledModel(Compiled):
    """The whole model.

    `prelude` makes the lookups of a forward that is not compiled, from its arguments. `is_watched` says whether a table has hooks, which
    would hear nothing of the gradients that a graph leaves with it.
    """

    knob = "inductor_graph"

    def __init__(self, model: nn.Module, prelude: Callable[[Any, Any], None], is_watched: Callable[[], bool],
                 report: Callable[[str, str], None]) -> None:
        super().__init__(report)
        self.prelude, self.is_watched = prelude, is_watched
        if is_free(model):
            self.forwards[_MODEL] = CompiledForward(self, _MODEL, model)
        else:
            report(_MODEL, "its forward has been replaced")

    def obstacle(self) -> str:
        return "a table has hooks, or is no parameter any more" if self.is_watched() else ""

    def uncompiled(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.prelude(args, kwargs)
        return super().uncompiled(module, args, kwargs)

    def __str__(self) -> str:
        return f"the model, lookups and dense part in one graph: compiled in {self.compile_s:.1f} s: {self.calls} calls"


class CompiledForward(OwnForward):
    """The forward of a module that is compiled on its first call in training."""

    def __init__(self, owner: Compiled, path: str, module: nn.Module) -> None:
        self.owner, self.path, self.module = owner, path, module

    @property
    def program(self) -> _Program:
        whole = isinstance(self.owner, CompiledModel)
        key = self if whole else self.module
        found = _programs.get(key)
        if found is None:
            found = _programs[key] = _Program(_with_lookups if whole else _inductor)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's class has it."""
        module, owner = self.module, self.owner
        if is_dynamo_compiling() or not torch.is_grad_enabled() or not module.training:      # a graph is for training
            return owner.uncompiled(module, args, kwargs)
        program = self.program
        why = program.refusal or owner.obstacle() or _obstacle(module, args, kwargs)
        if not why:
            try:
                found = program(module, args, kwargs)      # what the graph itself raises is for the caller
                owner.calls += 1
                return found
            except _NotCompiled as refusal:
                why = str(refusal)
            found = owner.uncompiled(module, args, kwargs)      # raises what the module raises, which is no refusal
            program.refusal = why
        else:
            found = owner.uncompiled(module, args, kwargs)
        owner.report(self.path, f"it ran uncompiled: {why}")
        return found


def compile_seconds() -> float:
    """What this process has spent in torch.compile since its first module was compiled here, in seconds."""
    return _clock.total_s


class _Program:
    """What one module compiles to. Holds no reference to it.

    Attributes
    ----------
    refusal    why it cannot be compiled; empty: it can, or nobody tried
    compile_s  seconds that compiling took, for all its graphs
    """

    def __init__(self, backend: Callable[[GraphModule, Any], Any]) -> None:
        self.refusal, self.compile_s, self._backend = "", 0.0, backend
        self._run: Callable[..., Any] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's graph. Raises what that raises, and _NotCompiled where the compiler makes none."""
        if self._run is None:
            try:
                self._run = self._compiled()
            except Exception as error:
                raise _NotCompiled(error) from error
        _clock.watch()
        before_s = _clock.total_s
        try:
            return self._run(module, *args, **kwargs)
        except Exception as error:
            from torch._dynamo.exc import TorchDynamoException  # loaded by now
            if isinstance(error, TorchDynamoException):
                raise _NotCompiled(error) from error
            raise
        finally:
            self.compile_s += _clock.total_s - before_s

    def _compiled(self) -> Callable[..., Any]:
        # The compiler limits the graphs of a code object, which all modules of a class would share.
        code = _run_module.__code__.replace(co_name=f"run_module_{next(_numbers)}")
        own = FunctionType(code, _run_module.__globals__, code.co_name)
        return torch.compile(own, fullgraph=True, dynamic=True, backend=self._backend)      # one graph for all batch sizes


class _NotCompiled(Exception):
    """The compiler's error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"torch.compile: {_first_line(error)}")


def _with_lookups(graph: GraphModule, inputs: Any) -> Any:
    merge_lookups(graph)
    return _inductor(graph, inputs)


def _inductor(graph: GraphModule, inputs: Any) -> Any:
    """torch's compiler."""
    from torch._inductor.compile_fx import compile_fx
    # The backward's graph is made now, too: what it cannot compile is refused here, where the module itself can still run.
    with graph_config.patch(force_non_lazy_backward_lowering=True):
        return compile_fx(graph, inputs, config_patches={"fallback_random": True})      # dropout has the bits that it has in eager code


def _run_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


_numbers = itertools.count()
_programs: WeakKeyDictionary[object, _Program] = WeakKeyDictionary()


class _Clock:
    """Seconds spent compiling, by the compiler's own account: a call that compiles also runs."""

    def __init__(self) -> None:
        self.total_s = self._began = 0.0

    def watch(self) -> None:
        """Have the compiler tell. It forgets everybody when it is reset."""
        handler = torch._dynamo.callback_handler
        if self._start not in handler.start_callbacks:
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)

    def _start(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, _: Any) -> None:
        self.total_s += time.perf_counter() - self._began


_clock = _Clock()


def _obstacle(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    for given in tree_leaves((args, kwargs)):
        if isinstance(given, Tensor):
            if type(given) not in (Tensor, Parameter) or not given.is_cpu or given.layout is not torch.strided:
                return "an input is no plain tensor on the CPU"
            if given.dim() and len(given) < _FEWEST_ROWS:
                return f"an input has fewer than {_FEWEST_ROWS} rows"
    if _has_any_global_hook() or has_hooks(module):
        return "a part of it has hooks"
    if is_lowered():
        return "autocast computes in a smaller dtype"
    if not nobody_watches():
        return "its operations are being watched"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors (checkpointing, offloading) are active"
    return ""


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
