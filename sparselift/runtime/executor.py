"""The runtime of one applied plan: the prelude before the root forward, and the forwards of the lifted modules.

The prelude fetches the ids from the arguments of the root forward and runs every group whose ids are all there. Each lifted
module then hands out its result when the tensors that it is given are the ones that the prelude saw; else it looks up by
itself, and where even that would not mean what torch means, torch's own forward runs. Every such step aside is counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting
from torch.nn.parallel import DistributedDataParallel

from sparselift.errors import LiftRefused
from sparselift.ir import Concat, Feature, Interaction, Structure
from sparselift.kernels.base import DeviceFault, KernelBackend
from sparselift.runtime._hot import OPTIONS, Slots, TableGrad, clear_all, is_table, options_of, plain_weights, serve
from sparselift.runtime.compiled import CompiledModel, CompiledModules
from sparselift.runtime.groups import LookupGroup, Prepared
from sparselift.runtime.library import GraphLookups
from sparselift.runtime.linear import DenseLayers
from sparselift.schedule import GroupSchedule, Schedule, TableSchedule

log = logging.getLogger("sparselift")

_Ends = tuple[list[Slots], list[TableGrad]]     # one slot a feature, one gradient a table

ODD_IDS = "the ids are no int32 or int64 tensor on the CPU"
ODD_OPTION = "an option of the module (mode, max_norm ...) changed after apply"
ODD_WEIGHT = "its weight is not a contiguous nn.Parameter of the recorded table, or has hooks"


class Runtime:
    """What `apply` attaches to a model. Refers to the model's modules, never to its optimizers."""

    def __init__(self, structure: Structure, schedule: Schedule, model: nn.Module, backend: str | KernelBackend) -> None:
        self.structure, self.schedule, self.backend = structure, schedule, backend
        self.knobs: Mapping[str, TableSchedule] = schedule.tables or {}
        self.tables = {table.name: table for table in structure.tables}
        modules = {feature.module: model.get_submodule(feature.module) for feature in structure.features}
        self.owners = {table: modules[structure.features_of(table)[0].module] for table in self.tables}
        self.asides: Counter[tuple[str, str]] = Counter()     # (feature, why): lookups that did not come from the prelude
        self.examples: dict[tuple[str, str], str] = {}        # of a reason that says something else every time, the first
        self.updates: Counter[tuple[str, str]] = Counter()    # (table, how): steps of its optimizer
        self._make_grads()
        self._slots: list[Slots] | None = None
        self.graphs = GraphLookups(self)
        self.forwards = {name: _lifted(self, module, [f for f in structure.features if f.module == name])
                         for name, module in modules.items()}
        self.preludes = [Prelude(self, group) for group in schedule.groups if group.prelude]
        self.dense: CompiledModel | CompiledModules | DenseLayers | None = None
        if schedule.compile == CompiledModel.knob:
            self.dense = CompiledModel(model, self.run_preludes, self.is_watched, self.aside)
        elif schedule.compile == CompiledModules.knob:
            self.dense = CompiledModules(structure, model, self.aside)
        elif schedule.linear != "native":
            self.dense = DenseLayers(structure, model, schedule.linear, self.aside)

    def _make_grads(self) -> None:
        self.grads = {name: TableGrad(table) for name, table in self.tables.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**{key: value for key, value in self.__dict__.items() if key != "grads"}, "_slots": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_grads()

    @property
    def slots(self) -> list[Slots]:
        """Where results wait, one a lifted module."""
        if self._slots is None:
            self._slots = [forward.slots for forward in self.forwards.values()]
        return self._slots

    def group(self, features: Sequence[Feature], concat: Concat | None = None, interaction: Interaction | None = None) -> LookupGroup:
        """A group over these features and the tables that they read."""
        names = dict.fromkeys(feature.table for feature in features)
        return LookupGroup(features, [self.tables[name] for name in names], concat, {n: self.knobs[n] for n in names},
                           self.owners, self.backend, interaction, self.schedule.shape)

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The root forward's pre-hook. Raises LiftRefused inside a DistributedDataParallel, which waits for gradients in backward."""
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise LiftRefused("forward: the model is wrapped in DistributedDataParallel, which expects torch's own gradients of the "
                              "tables; call sparselift.unapply first")
        if not isinstance(self.dense, CompiledModel):           # whose graph has its own lookups
            self.run_preludes(args, kwargs)

    def run_preludes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look up what the arguments of the root forward tell."""
        if not is_compiling() and not _transforming():
            for prelude in self.preludes:
                prelude.run(args, kwargs)

    def is_watched(self) -> bool:
        """Whether torch has to carry the gradient of some table."""
        return plain_weights(self.owners.values()) is None

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """The root forward's hook: results that no module asked for go."""
        if not is_compiling():
            clear_all(self.slots)
            for prelude in self.preludes:
                if prelude.group.crossing is not None:
                    prelude.group.crossing.finish()

    def aside(self, feature: str, why: str, example: str = "") -> None:
        """Count a lookup that did not come from the prelude; the first of a kind is logged, and kept if it has particulars."""
        self.asides[feature, why] += 1
        if self.asides[feature, why] == 1:
            if example:
                self.examples[feature, why] = example
            log.info("lookup %s: %s %s", feature, why, example)


class Prelude:
    """One group that runs before the root forward."""

    def __init__(self, runtime: Runtime, schedule: GroupSchedule) -> None:
        structure = runtime.structure
        self.runtime = runtime
        self._ends: _Ends | None = None
        concat = next((c for c in structure.concats if c.name == schedule.concat), None)
        interaction = next((each for each in structure.interactions if each.name == schedule.interaction), None)
        self.group = runtime.group([structure.feature(name) for name in schedule.features], concat, interaction)
        if self.group.crossing is not None:
            self.group.crossing.report = runtime.aside
        self.owners = [runtime.owners[table.name] for table in self.group.tables]
        self.forwards = [runtime.forwards[feature.module] for feature in self.group.features]
        for forward in self.forwards:
            forward.in_prelude = True

    @property
    def ends(self) -> _Ends:
        """What the results go to, and the gradients."""
        if self._ends is None:
            self._ends = [forward.slots for forward in self.forwards], [self.runtime.grads[table.name] for table in self.group.tables]
        return self._ends

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ends": None}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look up everything and leave each result with its module; or nothing, and say why."""
        group = self.group
        weights = plain_weights(self.owners)
        if weights is None:
            return
        slots, grads = self.ends
        try:
            indices, offsets, sample_weights = group.fetch(args, kwargs)
            if torch.is_inference_mode_enabled() and any(ids.is_inference() for ids in indices):
                self.runtime.aside(group.name, "the prelude leaves ids of inference mode to the modules: nothing counts writes to them")
                return
            outputs = group.run(weights, grads, indices, offsets, sample_weights)
        except DeviceFault:
            raise                # perhaps of a batch before this one, which no module would ask about again
        except (LookupError, AttributeError, TypeError, ValueError) as reason:
            # The forward was called in another way than the recorded one, or its ids are wrong: the modules, which see
            # what they are really given, decide and raise.
            self.runtime.aside(group.name, f"the prelude could not use the arguments of the forward ({type(reason).__name__})", str(reason))
            return
        serve(slots, indices, offsets, sample_weights, [weights[t] for t in group.table_of], outputs)

    def ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Prepared] | None:
        """What can be done now for a coming forward with these arguments, by any thread; None, counted, where that does not show."""
        group = self.group
        try:
            inputs = group.fetch(args, kwargs)
        except (LookupError, AttributeError, TypeError, ValueError) as reason:
            self.runtime.aside(group.name, f"not prepared ahead: it is not in what the batch gives ({type(reason).__name__})", str(reason))
            return None
        return partial(group.prepare_ahead, group.program, *inputs)        # the program is made here, by one thread

    def in_vain(self, prepared: Prepared) -> None:
        """Count a batch that was prepared for nothing."""
        self.runtime.aside(self.group.name, f"prepared ahead in vain: {prepared.unused}")


class LiftedForward:
    """The forward of a lifted module: an attribute of the instance, bound to an object of an importable class."""

    def __init__(self, runtime: Runtime, module: nn.Module, features: Sequence[Feature]) -> None:
        self.runtime, self.module, self.features = runtime, module, tuple(features)
        self.in_prelude = False
        self.options = options_of(module)
        self.slots = Slots(module, self.options)
        self.alone: dict[tuple[str, bool], LookupGroup] = {}  # by form and whether weighted
        self.parameter: nn.Parameter | None = None            # that compiled graphs look up in

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("slots", "alone", "parameter")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.slots, self.alone, self.parameter = Slots(self.module, self.options), {}, None

    def by_itself(self, form: str, ids: Any, offsets: Any, sample_weights: Any) -> Tensor | None:
        """One fused lookup of this module alone, or None where only torch's forward means what it should."""
        runtime, feature = self.runtime, self.features[0]
        if is_compiling() or _transforming():                 # torch.export, without dynamo
            return None
        if not isinstance(ids, Tensor) or not ids.is_cpu or ids.dtype not in (torch.int64, torch.int32):
            runtime.aside(feature.name, f"torch's forward ran: {ODD_IDS}")
            return None
        if not self.slots.has_its_options():
            runtime.aside(feature.name, f"torch's forward ran: {ODD_OPTION}")
            return None
        table = runtime.tables[feature.table]
        weights = plain_weights([runtime.owners[table.name]])
        if weights is None or weights[0] is not self.module._parameters.get("weight") \
                or not is_table(weights[0], runtime.grads[table.name].state):
            runtime.aside(feature.name, f"torch's forward ran: {ODD_WEIGHT}")
            return None
        if self.in_prelude:
            runtime.aside(feature.name, "looked up by itself: its ids were not those that the prelude saw")
        key = form, sample_weights is not None
        if key not in self.alone:
            self.alone[key] = runtime.group([replace(feature, form=form, weighted=key[1])])
        return self.alone[key].run(weights, [runtime.grads[feature.table]], [ids], [offsets], [sample_weights])[0]

    def in_graph(self, form: str | None, ids: Any, offsets: Any, sample_weights: Any) -> Tensor | None:
        """A node of a graph that torch.compile makes, or None where torch's own forward is what it should hold. Runs under its tracer, so
        that whatever is asked here is asked again before the graph runs.
        """
        runtime, feature, weight = self.runtime, self.features[0], self.module.weight
        table = runtime.tables[feature.table]
        if form is None or is_exporting():
            return None
        why = ""
        if table.dtype != "float32":
            why = "a node has float32 tables"
        elif not self._enter() or weight is not self.parameter or weight.dtype != torch.float32 \
                or weight.shape != (table.rows, table.dim) or weight.device.type != "cpu" or not weight.is_contiguous():
            why = ODD_WEIGHT
        elif any(getattr(self.module, name, None) != value for name, value in zip(OPTIONS, self.options)):
            why = ODD_OPTION
        elif feature.pooling == "max":
            why = "the backward of maxima needs what their forward noted"
        elif ids.dtype not in (torch.int64, torch.int32) or ids.device.type != "cpu":
            why = ODD_IDS
        if why:
            self._leave(why)
            return None
        found: list[Tensor] = torch.ops.sparselift.planned_lookup(
            [weight], [ids], [offsets] if form == "offsets" else [], [] if sample_weights is None else [sample_weights],
            [feature.name], [form], [sample_weights is not None], runtime.graphs.name)
        return found[0]

    def _enter(self) -> bool:
        """Whether a graph may hold the lookup: asked once a graph, by its tracer."""
        if torch._C._are_functorch_transforms_active():
            return False
        self.parameter = self.runtime.graphs.enter(self.features[0].table)
        return self.parameter is not None

    def _leave(self, why: str) -> None:
        """Count a graph that holds torch's own lookup."""
        self.runtime.aside(self.features[0].name, f"a compiled graph has torch's own lookup: {why}")

    # torch.compiler.assume_constant_result, which would load the compiler: its tracer calls these instead of following them.
    _enter._dynamo_marked_constant = _leave._dynamo_marked_constant = True       # type: ignore[attr-defined]


class LiftedBag(LiftedForward):
    """For nn.EmbeddingBag."""

    module: nn.EmbeddingBag

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """As torch.nn.EmbeddingBag.forward."""
        if is_dynamo_compiling():
            output = self.in_graph(_bag_form(self.module, input, offsets, per_sample_weights), input, offsets, per_sample_weights)
            return type(self.module).forward(self.module, input, offsets, per_sample_weights) if output is None else output
        output = self.slots.take(input, offsets, per_sample_weights)
        if output is not None:
            return output
        form = self._form(input, offsets, per_sample_weights)
        if form is not None:
            output = self.by_itself(form, input, offsets, per_sample_weights)
        return type(self.module).forward(self.module, input, offsets, per_sample_weights) if output is None else output

    def _form(self, ids: Any, offsets: Any, sample_weights: Any) -> str | None:
        """How the ids make bags; None, counted, for a call that torch's forward refuses."""
        form = _bag_form(self.module, ids, offsets, sample_weights)
        if form is None:
            self.runtime.aside(self.features[0].name, "torch's forward ran: a call that it refuses")
        return form


class LiftedEmbedding(LiftedForward):
    """For nn.Embedding."""

    module: nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        """As torch.nn.Embedding.forward."""
        if is_dynamo_compiling():
            output = self.in_graph("ids", input, None, None)
            return type(self.module).forward(self.module, input) if output is None else output
        output = self.slots.take(input, None, None)
        if output is None:
            output = self.by_itself("ids", input, None, None)
        return type(self.module).forward(self.module, input) if output is None else output


def _bag_form(module: nn.EmbeddingBag, ids: Any, offsets: Any, sample_weights: Any) -> str | None:
    """How the ids make bags; None for a call that torch's forward refuses."""
    if isinstance(ids, Tensor) and (sample_weights is None or module.mode == "sum"):
        if ids.dim() == 2 and offsets is None and not module.include_last_offset:
            return "matrix"
        if ids.dim() == 1 and isinstance(offsets, Tensor):
            return "offsets"
    return None


def _transforming() -> bool:
    """Whether more than values is asked of a forward, or somebody follows torch's operations: kernels give values alone."""
    return (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None
            or torch._C._len_torch_dispatch_stack() > 0)


def _lifted(runtime: Runtime, module: nn.Module, features: Sequence[Feature]) -> LiftedBag | LiftedEmbedding:
    kind = LiftedBag if isinstance(module, nn.EmbeddingBag) else LiftedEmbedding
    return kind(runtime, module, features)
