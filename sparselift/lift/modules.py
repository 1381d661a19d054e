"""Which embedding modules of a model can be lifted, as far as the modules and their optimizers tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparselift.dtypes import dtype_name
from sparselift.errors import LiftRefused
from sparselift.ir import Refusal, Table
from sparselift.kernels.base import WEIGHT_DTYPES
from sparselift.nn import Embedding, EmbeddingBag, TableBatchedEmbeddingBags
from sparselift.optim import Holder, fused_rule, holders, optimizer_info
from sparselift.rules import Rule, first
from sparselift.workload import Workload, check_ranks

EmbeddingModule = nn.Embedding | nn.EmbeddingBag

_NATIVE = (nn.EmbeddingBag, nn.Embedding)
_LIFTED_TYPES = (*_NATIVE, EmbeddingBag, Embedding)
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


@dataclass(frozen=True, slots=True)
class Survey:
    """The embedding modules of a model, and what is known without running it.

    Attributes
    ----------
    modules    path -> module, in the model's order: those that may be lifted
    tables     weight -> table, of those modules
    refusals   the other embedding modules
    notes      path -> a remark about a module that may be lifted
    """

    modules: dict[str, EmbeddingModule]
    tables: dict[Tensor, Table]
    refusals: tuple[Refusal, ...]
    notes: dict[str, str]


def survey(work: Workload) -> Survey:
    """Look at every module. Raises LiftRefused for a model that cannot be lifted at all."""
    check_model(work.model, "lift")
    names: dict[Tensor, str] = {weight: name for name, weight in work.model.named_parameters()}
    modules: dict[str, EmbeddingModule] = {}
    refusals: list[Refusal] = []
    for path, module in work.model.named_modules():
        refusal = _refusal(path, module)
        if refusal is not None:
            refusals.append(refusal)
        elif isinstance(module, _NATIVE):
            modules[path] = module
    tables, unfit = _tables(work, names, modules)
    refusals.extend(unfit)
    drop_sharers(modules, refusals, work.model)
    kept = {module.weight for module in modules.values()}
    return Survey(modules, {weight: table for weight, table in tables.items() if weight in kept}, tuple(refusals),
                  {path: note for path, module in modules.items() if (note := _note(module))})


def is_embedding(module: nn.Module) -> bool:
    """Whether a module holds embedding tables: torch's classes, their subclasses, and our fused ones."""
    return isinstance(module, (*_NATIVE, TableBatchedEmbeddingBags))


def drop_sharers(modules: dict[str, EmbeddingModule], refusals: list[Refusal], model: nn.Module) -> None:
    """Refuse modules that share their weight with a refused one: half of a table's gradient would pass by the lifted lookups."""
    paths = dict(model.named_modules())
    refused = {weight: refusal.where for refusal in refusals if refusal.where in paths
               for weight in paths[refusal.where]._parameters.values() if weight is not None}
    for path in [path for path, module in modules.items() if module.weight in refused]:
        other = refused[modules.pop(path).weight]
        refusals.append(Refusal(path, f"shares its weight with {other}, which is not lifted", f"lift {other}, or untie the two"))


def check_model(model: nn.Module, doing: str) -> None:
    """Raises LiftRefused for several ranks, a wrapped model, and one that runs a plan. `doing`: "lift" or "apply", for the message."""
    check_ranks(doing)
    for path, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            raise LiftRefused(f"{doing}: {path or 'the model'} is wrapped in {type(module).__name__}, which expects torch's own gradients "
                              "of the tables; hand over the module inside")
        forward = module.__dict__.get("forward")
        if type(getattr(forward, "__self__", None)).__module__.startswith("sparselift.runtime"):
            raise LiftRefused(f"{doing}: the model runs a plan already (its {path!r} is lifted); "
                              "call sparselift.unapply(model, optimizer) first")


def unliftable(paths: Iterable[str], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Refusal, ...]:
    """Why modules that a plan lifts cannot be lifted now; empty if all can."""
    found: dict[str, Refusal] = {}
    fit: dict[str, EmbeddingModule] = {}
    for path in paths:
        module = model.get_submodule(path)
        refusal = _refusal(path, module)
        if refusal is not None:
            found[path] = refusal
        elif isinstance(module, _NATIVE):
            fit[path] = module
    found.update(_unfit(fit, holders(optimizers)))
    return tuple(found.values())


def _refusal(path: str, module: nn.Module) -> Refusal | None:
    """Why a module cannot be lifted, or None: it can, or it is no embedding."""
    if not is_embedding(module):
        return None
    rule = first(MODULE_RULES, module)
    if rule is None:
        rule = first(WEIGHT_RULES, module.weight)
    if rule is None:
        return None
    kind, weight = type(module), module._parameters.get("weight")
    facts = {"module": module, "kind": kind.__name__, "where": f"{kind.__module__}.{kind.__qualname__}",
             "native": "EmbeddingBag" if isinstance(module, nn.EmbeddingBag) else "Embedding"}
    if weight is not None:
        facts |= {"weight": type(weight).__name__, "dtype": dtype_name(weight.dtype), "device": weight.device,
                  "strides": weight.stride(), "shape": tuple(weight.shape)}
    return Refusal(path, rule.reason.format(**facts), rule.remedy.format(**facts))


MODULE_RULES = (
    Rule("`TableBatchedEmbeddingBags`", lambda m: isinstance(m, TableBatchedEmbeddingBags), "{kind} is already one fused call"),
    Rule("a parametrized weight", parametrize.is_parametrized, "its weight is parametrized, so it is computed anew at every forward",
         "torch.nn.utils.parametrize.remove_parametrizations"),
    Rule("a subclass", lambda m: type(m) not in _LIFTED_TYPES, "{where} is a subclass, whose forward may compute something else",
         "use torch.nn.{native} itself"),
    Rule("a replaced forward", lambda m: "forward" in m.__dict__, "its forward has been replaced on the instance",
         "delete the instance's forward attribute"),
    Rule("`max_norm`", lambda m: m.max_norm is not None, "max_norm={module.max_norm} rewrites rows during the forward", "max_norm=None"),
    Rule("`scale_grad_by_freq`", lambda m: m.scale_grad_by_freq,
         "scale_grad_by_freq=True divides gradients by the counts of a whole batch", "scale_grad_by_freq=False"),
    Rule("a weight that is no parameter", lambda m: not isinstance(m._parameters.get("weight"), nn.Parameter),
         "its weight is not a plain parameter (weight normalisation, pruning, a property)", "remove what replaces it"),
)

WEIGHT_RULES = (
    Rule("a weight of another class", lambda w: type(w) is not nn.Parameter, "its weight is a {weight}", "use a plain nn.Parameter"),
    Rule("another dtype", lambda w: dtype_name(w.dtype) not in WEIGHT_DTYPES, "its weight is {dtype}",
         "float32, float16 and bfloat16 are lifted"),
    Rule("another device", lambda w: w.device.type != "cpu", "its weight is on {device}", "tables on the CPU are lifted"),
    Rule("a weight with other strides", lambda w: not w.is_contiguous(), "its weight is not contiguous (strides {strides})",
         "weight.data = weight.data.contiguous()"),
    Rule("a table without elements", lambda w: not w.numel(), "its weight has no elements (shape {shape})"),
    Rule("gradient hooks on the weight", lambda w: bool(w._backward_hooks or w._post_accumulate_grad_hooks),
         "its weight has gradient hooks, which expect a gradient in backward", "remove the hooks"),
)


def _tables(work: Workload, names: Mapping[Tensor, str], modules: dict[str, EmbeddingModule]) -> tuple[
        dict[Tensor, Table], list[Refusal]]:
    """The tables of the modules. Modules whose table's update cannot be taken over leave `modules` and are refused."""
    held = holders(work.optimizers)
    refusals = _unfit(modules, held)
    for path in refusals:
        del modules[path]
    tables: dict[Tensor, Table] = {}
    for module in modules.values():
        weight = module.weight
        info = optimizer_info(module.sparse, held.get(weight, []), weight.dtype)
        tables[weight] = Table(names[weight], len(weight), weight.shape[1], dtype_name(weight.dtype), module.sparse, info)
    return tables, list(refusals.values())


def _unfit(modules: Mapping[str, EmbeddingModule], held: Mapping[Tensor, Sequence[Holder]]) -> dict[str, Refusal]:
    """The modules whose table's update cannot be taken over, and why."""
    sparse: dict[Tensor, set[bool]] = {}
    for module in modules.values():
        sparse.setdefault(module.weight, set()).add(module.sparse)
    found = {}
    for path, module in modules.items():
        update = _Update(module.weight, frozenset(sparse[module.weight]), held.get(module.weight, []))
        rule = first(UPDATE_RULES, update)
        if rule is not None:
            optimizer, obstacle = update.obstacle()
            found[path] = Refusal(path, rule.reason.format(count=len(update.held), optimizer=optimizer, obstacle=obstacle), rule.remedy)
    return found


class _Update(NamedTuple):
    """What is known about the update of one table."""

    weight: Tensor
    sparse: frozenset[bool]                  # of the modules that look into it
    held: Sequence[Holder]

    def obstacle(self) -> tuple[str, str]:
        """(optimizer, why it has no rule for a dense gradient) of the first such one; empty texts where there is none."""
        for _, optimizer, group in self.held if self.weight.requires_grad and False in self.sparse else ():
            rule, reason = fused_rule(optimizer, group, sparse=False)
            if rule is None:
                return type(optimizer).__name__, reason
        return "", ""


UPDATE_RULES = (
    Rule("shared, with both kinds of gradients", lambda update: len(update.sparse) > 1,
         "modules that share its weight differ in sparse=, so that torch adds a sparse to a dense gradient", "give them the same sparse="),
    Rule("in several parameter groups", lambda update: len(update.held) > 1,
         "its weight is in {count} parameter groups, so that a step updates it more than once", "keep it in one"),
    Rule("a dense gradient under an optimizer that moves untouched rows", lambda update: bool(update.obstacle()[1]),
         "its gradient is dense (sparse=False), and {optimizer} natively raises or moves untouched rows too: {obstacle}",
         "sparse=True, or an optimizer that leaves untouched rows alone"),
)


def _note(module: nn.Module) -> str:
    """What is special about a module that may be lifted."""
    hooks = [kind for kind, registered in (
        ("forward", {**module._forward_hooks, **module._forward_pre_hooks}),
        ("backward", {**module._backward_hooks, **module._backward_pre_hooks})) if registered]
    return f"has {' and '.join(hooks)} hooks, which keep running" if hooks else ""

