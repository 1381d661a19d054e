"""The dataflow by torch.fx, where a model traces: it confirms, on all of the graph, what the recorded step showed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from sparselift.ir import Concat, Feature
from sparselift.lift.modules import is_embedding

_CATS = (torch.cat, torch.concat, torch.concatenate)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_METADATA = ("size", "dim", "shape", "dtype", "device", "ndim", "numel", "stride", "is_contiguous")


def trace(model: nn.Module) -> fx.Graph | str:
    """The model's graph with embedding modules as leaves, or why there is none.

    Tracing runs the forward on stand-ins, which a forward may store; so it runs on shallow copies of the modules.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Tracer().trace(_shadow(model, {}))
    except Exception as error:     # whatever the user's forward makes of the stand-ins
        lines = str(error).strip().splitlines()
        return f"does not trace: {type(error).__name__}" + (f": {lines[0]}" if lines else "")


def confirm(graph: fx.Graph | str, concats: Sequence[Concat], features: Mapping[str, Feature]) -> tuple[tuple[Concat, ...], str]:
    """The concats that the traced graph does not contradict, and what it said. Without a graph, all of them."""
    if isinstance(graph, str):
        return tuple(concats), graph
    lookups: dict[tuple[str, int], fx.Node] = {}
    calls: Counter[Any] = Counter()
    for node in graph.nodes:
        if node.op == "call_module":
            lookups[node.target, calls[node.target]] = node
            calls[node.target] += 1
    kept, other = [], []
    for concat in concats:
        nodes = [lookups.get((features[name].module, features[name].call)) for name in concat.features]
        users = {user for node in nodes if node is not None for user in node.users}
        readers = {str(user) for user in users if not _is_concat(user) and not _is_metadata(user)}
        if readers:
            other.append(f"{concat.name} is not alone: {', '.join(sorted(readers))} reads its lookups too")
        else:
            kept.append(concat)
    return tuple(kept), f"{len(graph.nodes)} nodes; " + ("; ".join(other) if other else f"confirms {len(kept)} concats")


def _is_concat(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _CATS


def _is_metadata(node: fx.Node) -> bool:
    name = node.target if node.op == "call_method" else node.args[1] if node.target is getattr else None
    return name in _METADATA


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_embedding(m) or super().is_leaf_module(m, module_qualified_name)


def _shadow(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy whose attributes can be set without a trace; parameters, buffers and everything else are the original's.

    It has no hooks: they would be given stand-ins too. Raises TypeError for a module whose forward would lead back to the original.
    """
    if module not in made:
        if "forward" in module.__dict__ and not is_embedding(module):
            raise TypeError(f"the forward of {type(module).__name__} is replaced on the instance")
        copy = made[module] = type(module).__new__(type(module))
        for name, value in module.__dict__.items():
            copy.__dict__[name] = type(value)() if name in _HOOKS else value.copy() if isinstance(value, (dict, list, set)) else value
        # Not through setattr, which a module may forward to the original (torch.compile's wrapper does).
        copy.__dict__["_modules"] = {name: child and _shadow(child, made) for name, child in module._modules.items()}
    return made[module]
