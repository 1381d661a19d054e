"""The fully connected layers of a model that another matrix product could run, and why others stay with torch's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize

from sparselift.ir import Linear
from sparselift.rules import Rule, first

LINEAR_RULES = (
    Rule("a parametrized weight", parametrize.is_parametrized, "its weight is parametrized, so it is computed anew at every forward"),
    Rule("a subclass", lambda m: type(m) is not nn.Linear, "{where} is a subclass, whose forward may compute something else"),
    Rule("a replaced forward", lambda m: "forward" in m.__dict__, "its forward has been replaced on the instance"),
    Rule("a weight that is no parameter", lambda m: not all(isinstance(m._parameters.get(name), (nn.Parameter, type(None)))
                                                            for name in ("weight", "bias")) or m._parameters.get("weight") is None,
         "its weight or bias is not a plain parameter"),
    Rule("another dtype or device",
         lambda m: any(p.dtype != torch.float32 or not p.is_cpu for p in m._parameters.values() if p is not None),
         "its parameters are not float32 on the CPU"),
    Rule("other strides", lambda m: not m.weight.is_contiguous(), "its weight is not contiguous"),
    Rule("no elements", lambda m: not m.weight.numel(), "its weight has no elements"),
)


def find_linears(model: nn.Module) -> tuple[tuple[Linear, ...], dict[str, str]]:
    """The layers that may run elsewhere, in the model's order, and by path why others may not."""
    activated = {linear for module in model.modules() if type(module) is nn.Sequential for linear, _ in pairs(module)}
    found, refused = [], {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            rule = first(LINEAR_RULES, module)
            if rule is None:
                found.append(Linear(path, module.in_features, module.out_features, module in activated))
            else:
                refused[path] = rule.reason.format(where=path or "the model")
    return tuple(found), refused


def pairs(chain: nn.Sequential) -> Iterator[tuple[nn.Linear, nn.ReLU]]:
    """Layers of a chain with the ReLU that alone reads them there."""
    layers = list(chain._modules.values())
    for layer, following in zip(layers, layers[1:]):
        if type(layer) is nn.Linear and type(following) is nn.ReLU:
            yield layer, following
