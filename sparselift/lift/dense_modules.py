"""The modules of a model that hold no lookups: what a compiler could take as one graph each, and why others are left alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sparselift.ir import DenseModule
from sparselift.lift.modules import is_embedding
from sparselift.rules import Rule, first

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)

DENSE_RULES = (
    Rule("a module that is compiled or scripted already",
         lambda m: any(isinstance(part, torch.jit.ScriptModule) or part._compiled_call_impl is not None or "_orig_mod" in part._modules
                       for part in m.modules()),
         "a part of it is compiled or scripted already"),
    Rule("a replaced forward", lambda m: any("forward" in part.__dict__ for part in m.modules()),
         "the forward of a part of it has been replaced on the instance"),
    Rule("hooks", lambda m: has_hooks(m), "a part of it has hooks, and a compiled graph would not notice those that come and go"),
    Rule("another device", lambda m: any(not each.is_cpu for each in m.parameters()), "its parameters are not all on the CPU"),
)


def find_dense_modules(model: nn.Module) -> tuple[tuple[DenseModule, ...], dict[str, str]]:
    """The largest modules without lookups and with parameters, in the model's order, and by path why others are not compiled.

    A single layer has nothing to fuse, and is none of them.
    """
    found, refused = [], {}
    for path, module in _largest("", model, set()):
        rule = first(DENSE_RULES, module)
        if rule is None:
            found.append(DenseModule(path, sum(each.numel() for each in module.parameters())))
        else:
            refused[path] = rule.reason
    return tuple(found), refused


def has_hooks(module: nn.Module) -> bool:
    """Whether any part of a module below it has hooks. Its own run outside of its forward."""
    parts = module.modules()
    next(parts)
    return any(getattr(part, name) for part in parts for name in HOOKS)


def _largest(path: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None or child in seen or isinstance(child, nn.ParameterList):
            continue
        seen.add(child)
        where = f"{path}.{name}" if path else name
        if isinstance(child, _NEVER_CALLED) or any(map(is_embedding, child.modules())):
            yield from _largest(where, child, seen)
        elif child._modules and next(child.parameters(), None) is not None:
            yield where, child
