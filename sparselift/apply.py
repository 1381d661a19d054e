"""Puts a plan onto a live model and its optimizers, takes it off again, and says what ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.dtypes import dtype_name
from sparselift.errors import LiftRefused
from sparselift.ir import DEVICES, Feature, OptimizerInfo, Structure, Table
from sparselift.kernels.base import KernelBackend
from sparselift.lift.dense_modules import find_dense_modules
from sparselift.lift.linears import find_linears
from sparselift.lift.modules import check_model, is_embedding, unliftable
from sparselift.memory import HugePageSet
from sparselift.optim import holders, large_state, optimizer_info
from sparselift.plan import Plan, check_fits, check_plan
from sparselift.runtime.executor import Runtime
from sparselift.runtime.step import FusedStep
from sparselift.schedule import Schedule, build_schedule
from sparselift.workload import Optimizers, as_tuple, check_kind, check_ranks

ATTRIBUTE = "_sparselift"          # of an applied root module


def apply(plan: Plan, model: nn.Module, optimizer: Optimizers, process_group: object = None, *,
          backend: str = "cpu") -> tuple[nn.Module, Optimizers]:
    """Run a plan in this model from now on.

    Parameters
    ----------
    plan       made for a model of the same structure
    model      the root module, the one whose forward the training loop calls; modified in place
    optimizer  one or a sequence, as the plan's workload had them; they get step hooks
    backend    "cpu" (compiled kernels) or "reference" (plain torch: for tests and for reading)

    Returns
    -------
    The same model and optimizer objects. A native plan changes nothing.

    Raises
    ------
    TypeError           arguments of another kind, or in another order
    PlanMismatchError   model or optimizers differ from the plan's: names each field
    LiftRefused         more than one rank (no exchange yet), a model that has a plan already, or modules that `lift` would not take
    """
    check_plan("apply", plan)
    _check_pair("apply", "plan, model, optimizer", model, optimizer)
    check_ranks("apply")
    if process_group is not None:
        raise LiftRefused("apply: a process group; lifted tables are not synchronised between ranks yet: a plan runs in one process")
    if ATTRIBUTE in model.__dict__:
        raise LiftRefused(f"apply: {type(model).__name__} has a plan already; call sparselift.unapply first")
    optimizers = as_tuple(optimizer)
    check_model_fits(plan, model, optimizers)
    if plan.config.path == "planned":
        check_model(model, "apply")
        refusals = unliftable(dict.fromkeys(feature.module for feature in plan.structure.features), model, optimizers)
        if refusals:
            raise LiftRefused("apply: " + "; ".join(map(str, refusals)))
    Applied(plan.structure, build_schedule(plan.structure, plan.config), model, backend).attach(model, optimizers)
    return model, optimizer


def unapply(model: nn.Module, optimizer: Optimizers) -> tuple[nn.Module, Optimizers]:
    """Give the native pair back, at any step: same parameters, state and gradients.

    Raises LiftRefused if no plan is applied, TypeError for arguments in another order.
    """
    _check_pair("unapply", "model, optimizer", model, optimizer)
    applied: Applied | None = model.__dict__.get(ATTRIBUTE)
    if applied is None:
        raise LiftRefused(f"unapply: no plan is applied to this {type(model).__name__}")
    applied.detach(model)
    applied.huge_pages.replace({})
    return model, optimizer


def explain(model: nn.Module) -> str:
    """What ran in an applied model since `apply`: which lookups came from the prelude, which stepped aside, how often and why."""
    check_kind("explain", "model", model, nn.Module, "a plan's own page is sparselift.plan.explain(plan)")
    applied: Applied | None = model.__dict__.get(ATTRIBUTE)
    return "no plan is applied: torch runs everything" if applied is None else applied.explain()


def _check_pair(call: str, order: str, model: object, optimizer: object) -> None:
    """Raises TypeError naming the right call."""
    for name, value, kind in (("model", model, nn.Module), *(("optimizer", each, torch.optim.Optimizer) for each in _several(optimizer))):
        check_kind(call, name, value, kind, f"the call is sl.{call}({order})")


def _several(optimizer: object) -> tuple[object, ...]:
    return tuple(optimizer) if isinstance(optimizer, Sequence) and not isinstance(optimizer, str) else (optimizer,)


class Applied:
    """A schedule compiled for a model. Attaching and detaching cost microseconds, so that a tuner can switch between several."""

    def __init__(self, structure: Structure, schedule: Schedule, model: nn.Module, backend: str | KernelBackend = "cpu",
                 huge_pages: HugePageSet | None = None) -> None:
        self.structure, self.schedule = structure, schedule
        self.runtime = None if schedule.path == "native" else Runtime(structure, schedule, model, backend)
        self.huge_pages = HugePageSet() if huge_pages is None else huge_pages
        self._model_hooks: list[Any] = []
        self._optimizer_hooks: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled optimizer has no hooks: torch leaves them behind.
        return {**self.__dict__, "_optimizer_hooks": []}

    def attach(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Install the hooks and the lifted forwards. An exception leaves the model native."""
        model.__dict__[ATTRIBUTE] = self
        if self.runtime is None:
            return
        self.runtime.graphs.attach()
        self.huge_pages.replace(dict(self._tensors_for_huge_pages(optimizers)))
        for name, forward in self.runtime.forwards.items():
            model.get_submodule(name).forward = forward.forward
        if self.runtime.dense is not None:
            self.runtime.dense.attach()
        self._model_hooks = [model.register_forward_pre_hook(self.runtime.before_forward, with_kwargs=True, prepend=True),
                             model.register_forward_hook(self.runtime.after_forward, always_call=True)]
        for optimizer in optimizers:
            self._optimizer_hooks += FusedStep(self.runtime, self.huge_pages).register(optimizer)

    def detach(self, model: nn.Module) -> None:
        """Remove hooks and forwards; pending gradients become the tensors that torch would have."""
        del model.__dict__[ATTRIBUTE]
        for hook in (*self._model_hooks, *self._optimizer_hooks):
            hook.remove()
        self._model_hooks, self._optimizer_hooks = [], []
        if self.runtime is None:
            return
        self.runtime.graphs.detach()
        for name, forward in self.runtime.forwards.items():
            forward.slots.clear()
            model.get_submodule(name).__dict__.pop("forward", None)
        if self.runtime.dense is not None:
            self.runtime.dense.detach()
        for name, owner in self.runtime.owners.items():
            weight = owner._parameters.get("weight")
            if weight is not None:
                self.runtime.grads[name].settle(weight)

    def _tensors_for_huge_pages(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
        """The tables that the schedule wants in huge pages, each with its optimizers' state."""
        assert self.runtime is not None
        for name, knobs in (self.schedule.tables or {}).items():
            weight = self.runtime.owners[name]._parameters.get("weight")
            if knobs.huge_pages and weight is not None:
                yield name, weight
                for optimizer in optimizers:
                    yield from large_state(name, optimizer, weight)

    def explain(self) -> str:
        """Text for people; one line a fact."""
        runtime = self.runtime
        if runtime is None:
            return "a native plan is applied: torch runs everything"
        lines = []
        for prelude in runtime.preludes:
            group = prelude.group
            target = f", written straight into {group.concat.name}" if group.concat else ""
            ahead = f", {group.calls_ahead} of them with index work done ahead" if group.calls_ahead else ""
            lines.append(f"prelude: {len(group.features)} lookups over {len(group.tables)} tables in one call{target}: {group.calls} times"
                         f"{ahead}")
            if group.crossing is not None:
                lines.append(str(group.crossing))
        if self.schedule.prefetch_batches and not any(prelude.group.calls_ahead for prelude in runtime.preludes):
            lines.append(f"the plan has the index work of {self.schedule.prefetch_batches} batches done ahead, and no step found any: "
                         "train in a loop over sl.prefetch_batches(batches, model, inputs)")
        lines += runtime.graphs.lines()
        if runtime.dense is not None:
            lines.append(str(runtime.dense))
        outside = [f.name for g in self.schedule.groups if not g.prelude for f in map(self.structure.feature, g.features)]
        if outside:
            lines.append(f"outside the prelude, each a fused lookup where its module stands: {', '.join(outside)}")
        for (feature, why), count in sorted(runtime.asides.items()):
            example = runtime.examples.get((feature, why))
            lines.append(f"stepped aside: {feature}: {why}: {count} times" + (f", first: {example}" if example else ""))
        lines += [f"update of {table}: {how}: {count} times" for (table, how), count in sorted(runtime.updates.items())]
        lines += [f"huge pages: {name}: {pages.huge_bytes / 2**20:.0f} of {pages.requested_bytes / 2**20:.0f} MiB"
                  for name, pages in sorted(self.huge_pages.found.items())]
        if not runtime.asides and not runtime.updates:
            ran = any(prelude.group.calls for prelude in runtime.preludes) or not runtime.preludes or bool(runtime.graphs.groups)
            lines.append("nothing fell back" if ran else "nothing has run in the plan: no forward yet")
        return "\n".join(lines)


def check_model_fits(plan: Plan, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises PlanMismatchError naming what differs between a plan and a model with its optimizers."""
    present = [f"{path}.weight" for path, module in model.named_modules() if is_embedding(module)]
    check_fits(plan, structure=current_structure(plan.structure, model, optimizers), present=present)


def current_structure(recorded: Structure, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Structure:
    """`recorded` with everything that can be read from a model and its optimizers replaced by what they say now.

    What is gone is left out. Input paths and concats show only when a forward runs; they are checked there.
    """
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    features = [f for f in (_current_feature(f, modules) for f in recorded.features) if f is not None]
    sparse = {f.table: bool(modules[f.module].sparse) for f in features}
    held = holders(optimizers)
    tables = []
    for table in recorded.tables:
        if table.name in parameters:
            weight, is_sparse = parameters[table.name], sparse.get(table.name, table.sparse)
            tables.append(_current_table(table, weight, is_sparse, optimizer_info(is_sparse, held.get(weight, ()), weight.dtype)))
    devices = {parameters[table.name].device.type for table in tables}
    linears, _ = find_linears(model)
    dense_modules, _ = find_dense_modules(model)
    return replace(recorded, tables=tuple(tables), features=tuple(features), optimizers=tuple(type(o).__name__ for o in optimizers),
                   linears=linears, dense_modules=dense_modules,
                   device=next(iter(devices)) if len(devices) == 1 and devices.issubset(DEVICES) else recorded.device)


def _current_feature(feature: Feature, modules: dict[str, nn.Module]) -> Feature | None:
    module = modules.get(feature.module)
    if isinstance(module, nn.EmbeddingBag):
        return replace(feature, pooling=module.mode, padding_idx=module.padding_idx, include_last_offset=module.include_last_offset)
    if isinstance(module, nn.Embedding):
        return replace(feature, pooling="none", padding_idx=module.padding_idx)
    return None


def _current_table(table: Table, weight: Tensor, sparse: bool, optimizer: OptimizerInfo | None) -> Table:
    shape = tuple(weight.shape) if weight.dim() == 2 else (weight.numel(), 1)
    return replace(table, rows=shape[0], dim=shape[1], dtype=dtype_name(weight.dtype), sparse=sparse,
                   optimizer=optimizer)
