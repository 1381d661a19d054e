"""One group of lookups that run in one fused call: from the arguments of a forward to outputs with an autograd edge.

Letters: B bags, D columns of a table, K ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sparselift.dtypes import torch_dtype
from sparselift.errors import LiftRefused
from sparselift.grad import Arrival
from sparselift.ir import Concat, Feature, Interaction, Table
from sparselift.kernels import get_backend
from sparselift.kernels.base import (
    BagProgram,
    FeatureSpec,
    IndexBatch,
    KernelBackend,
    KernelShape,
    Segment,
    TableKnobs,
    TableSpec,
)
from sparselift.kernels.interaction import InteractionSpec
from sparselift.ops import widened
from sparselift.runtime import engine
from sparselift.runtime._hot import Inputs, TableGrad, accumulate, trainable
from sparselift.runtime.concat import ConcatBuffer, ConcatLayout, Uses
from sparselift.runtime.inputs import Fetch, compile_fetch
from sparselift.runtime.interaction import Crossing
from sparselift.schedule import TableSchedule


class LookupGroup:
    """Features that are looked up together, compiled for one backend.

    Pickling and copying take the description along and leave the compiled parts behind; they are made again on first use.
    """

    def __init__(self, features: Sequence[Feature], tables: Sequence[Table], concat: Concat | None,
                 knobs: dict[str, TableSchedule], owners: Mapping[str, nn.Module], backend: str | KernelBackend,
                 interaction: Interaction | None = None, shape: KernelShape | None = None) -> None:
        """`owners`: the modules that hold the tables of the whole model. `interaction`: of the concat. `shape`: of the kernels."""
        self.features = tuple(features)
        self.tables = tuple(tables)
        self.concat = concat
        self.knobs = dict(knobs)
        self.owners = owners
        self.backend, self.shape = backend, shape
        names = [table.name for table in tables]
        self.place = {name: position for position, name in enumerate(names)}
        self.table_of = tuple(self.place[feature.table] for feature in features)
        self.dtypes = tuple(torch_dtype(self.tables[t].dtype) for t in self.table_of)
        self.is_rounded = any(dtype is not torch.float32 for dtype in self.dtypes)     # kernels compute in float32
        self._shapes = {(table.rows, table.dim) for table in tables}
        self.widths = self._widths()
        self.layout = None if concat is None else ConcatLayout(
            self.widths, [isinstance(part, str) for part in concat.parts], torch_dtype(concat.dtype))
        self.is_flat = all(feature.form == "offsets" for feature in features)
        self.has_weights = any(feature.weighted for feature in features)
        self.calls = self.calls_ahead = 0             # the latter with a batch that was prepared ahead
        self.crossing = None if interaction is None else Crossing(interaction.name, self._products(interaction), backend)
        self._reset()

    def _reset(self) -> None:
        self._program: BagProgram | None = None
        self._fetch: Fetch | None = None
        self.ahead: Prepared | None = None            # for the next call, perhaps
        with torch.inference_mode(False), torch.enable_grad():       # the first call may be an evaluation
            self.anchor = torch.zeros((), dtype=torch.float32, requires_grad=True)
            self.anchor_node = get_gradient_edge(self.anchor).node
        engine.watch(self)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for transient in ("_program", "_fetch", "ahead", "memory", "anchor", "anchor_node"):
            state.pop(transient, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def name(self) -> str:
        """Some of the features, for people."""
        names = [feature.name for feature in self.features]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def has_shape(self, shape: torch.Size) -> bool:
        """Whether one of the tables has this shape."""
        return tuple(shape) in self._shapes

    @property
    def program(self) -> BagProgram:
        if self._program is None:
            kernels = get_backend(self.backend)
            self.memory = kernels.outputs()                # no output is taken before there is a program
            self._program = kernels.compile(self._table_specs(), self._feature_specs(), self.shape)
        return self._program

    @property
    def fetch(self) -> Fetch:
        if self._fetch is None:
            self._fetch = compile_fetch(self.features)
        return self._fetch

    def _widths(self) -> tuple[int, ...]:
        if self.concat is None:
            return tuple(self.tables[t].dim for t in self.table_of)
        dims = {feature.name: self.tables[t].dim for feature, t in zip(self.features, self.table_of)}
        return tuple(dims[part] if isinstance(part, str) else part for part in self.concat.parts)

    def _products(self, interaction: Interaction) -> InteractionSpec:
        return InteractionSpec(len(self.widths), self.widths[0], interaction.order, interaction.diagonal, interaction.passed)

    def _table_specs(self) -> list[TableSpec]:
        specs = []
        for table in self.tables:
            k = self.knobs[table.name]
            specs.append(TableSpec(table.name, table.rows, table.dim, table.dtype,
                                   TableKnobs(k.coalesce, k.prefetch, k.partition, k.dedup, k.stores, k.vector_bytes, k.bags_per_group)))
        return specs

    def _feature_specs(self) -> list[FeatureSpec]:
        columns, start = [], 0
        for place, width in enumerate(self.widths):
            if self.layout is None or self.layout.is_lookup[place]:
                columns.append(start)
            start += width
        return [FeatureSpec(f.name, t, f.pooling, column, f.padding_idx, f.include_last_offset, f.weighted)
                for f, t, column in zip(self.features, self.table_of, columns)]

    def flat(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | None], sample_weights: Sequence[Tensor | None]) -> Flat:
        """The ids as kernels take them: (B, L) ids are bags of L, and each id of an nn.Embedding is a bag of its own."""
        if self.is_rounded and self.has_weights:
            sample_weights = widened(sample_weights, self.dtypes)
        if self.is_flat:
            return Flat((), indices, offsets, sample_weights)
        return Flat(tuple(ids.shape for ids in indices), [ids if ids.dim() == 1 else ids.reshape(-1) for ids in indices],
                    [_bag_length(f, ids) if f.form != "offsets" else o for f, ids, o in zip(self.features, indices, offsets)],
                    [w if w is None or w.dim() == 1 else w.reshape(-1) for w in sample_weights])

    def rounded(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """What kernels have computed in float32, in a table's dtype."""
        return outputs if dtype is torch.float32 else self.memory.take(tuple(outputs.shape), dtype).copy_(outputs)

    def prepare_ahead(self, program: BagProgram, indices: Sequence[Tensor], offsets: Sequence[Tensor | None],
                      sample_weights: Sequence[Tensor | None]) -> Prepared:
        """A batch for a later `run`, from any thread. Raises what BagProgram.prepare raises."""
        inputs = Inputs(indices, offsets, sample_weights)            # before they are read: a write during that is noticed, too
        flat = self.flat(indices, offsets, sample_weights)
        return Prepared(inputs, program.prepare_ahead(flat.indices, flat.lengths, flat.sample_weights if self.has_weights else None))

    def take_ahead(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | None],
                   sample_weights: Sequence[Tensor | None]) -> IndexBatch | None:
        """The waiting batch, if it was prepared from these very tensors, as they are; another one goes on waiting."""
        prepared = self.ahead
        if prepared is None:
            return None
        prepared.unused = prepared.inputs.difference(indices, offsets, sample_weights)
        if prepared.unused:
            return None
        self.ahead = None
        self.calls_ahead += 1
        return prepared.batch

    def run(self, weights: Sequence[Tensor], grads: Sequence[TableGrad], indices: Sequence[Tensor],
            offsets: Sequence[Tensor | None], sample_weights: Sequence[Tensor | None]) -> list[Tensor]:
        """Look up one batch: one output a feature, with an autograd edge where a table or a per-sample weight needs one.

        `weights` and `grads` are those of `tables`; `indices`, `offsets` and `sample_weights` of `features`, as the
        modules' forwards take them. Raises what BagProgram.prepare raises.
        """
        call = LookupCall(self, weights, grads)
        call.prepare(indices, offsets, sample_weights)
        outputs = call.outputs()
        self.calls += 1
        if not torch.is_grad_enabled():
            return call.hand_out(outputs)
        differentiable = [sample_weights[f] for f in call.weighted]
        if not call.trainable and not differentiable:
            return call.hand_out(outputs)
        if differentiable:
            call.versions = [weight._version for weight in weights]
        return call.hand_out(_record(self.anchor, call, outputs, *differentiable))


class Flat(NamedTuple):
    """A batch as kernels take it, an entry a feature, and the shapes that the ids had; none where all were 1-D."""

    shapes: tuple[torch.Size, ...]
    indices: Sequence[Tensor]
    lengths: Sequence[Any]                     # offsets, or the one length of every bag
    sample_weights: Sequence[Tensor | None]


@dataclass(slots=True)
class Prepared:
    """A batch that was prepared before its forward."""

    inputs: Inputs
    batch: IndexBatch
    unused: str = "no forward came"            # why, so far


class LookupCall:
    """One batch on its way through a group: the prepared ids, and what its backward must do."""

    __slots__ = ("batch", "buffer", "grads", "group", "hooks", "shapes", "trainable", "uses", "versions", "weighted", "weights", "wide")

    group: LookupGroup
    batch: IndexBatch
    shapes: tuple[torch.Size, ...]  # of the ids; empty where all are 1-D
    weighted: tuple[int, ...]      # features whose per-sample weights want a gradient
    versions: list[int]            # of the weights at the lookup, where a per-sample weight wants a gradient
    buffer: Tensor | None
    wide: Tensor | None            # memory of a concat that is wider than its lookups
    uses: Uses | None              # of a concat's slices

    def __init__(self, group: LookupGroup, weights: Sequence[Tensor], grads: Sequence[TableGrad]) -> None:
        self.group, self.weights, self.grads = group, weights, grads
        self.trainable = trainable(weights)
        self.hooks = RemovableHandle.next_id           # torch counts every hook that is registered anywhere
        self.buffer = self.wide = self.uses = None

    def prepare(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | None], sample_weights: Sequence[Tensor | None]) -> None:
        """Hand the ids to the kernels, unless that was done ahead."""
        group = self.group
        flat = group.flat(indices, offsets, sample_weights)
        self.shapes = flat.shapes
        factors = flat.sample_weights if group.has_weights else None
        self.batch = group.take_ahead(indices, offsets, sample_weights) or group.program.prepare(flat.indices, flat.lengths, factors)
        self.weighted = () if factors is None else tuple(f for f, w in enumerate(factors) if w is not None and w.requires_grad)

    def outputs(self) -> tuple[Tensor, ...]:
        """Run the forward kernel: the one (B, width) buffer of a concat, or a contiguous output a feature."""
        group, batch = self.group, self.batch
        if group.concat is not None:
            bags = batch.num_bags[0] if batch.num_bags else 0
            if any(n != bags for n in batch.num_bags):
                raise ValueError(f"the parts of {group.concat.name} must have as many bags each; got {batch.num_bags}")
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():    # whose tensors count no writes
                self.buffer = group.memory.take((bags, sum(group.widths)))
                group.program.forward(self.weights, batch, self.buffer)
                if group.is_rounded:
                    self.wide = self.buffer if group.concat.dtype == "float32" else None
                    self.buffer = group.rounded(self.buffer, group.dtypes[0])
            return (self.buffer,)
        sizes = [bags * width for bags, width in zip(batch.num_bags, group.widths)]
        block = group.memory.take((sum(sizes),))
        flat = [piece.view(-1, width) for piece, width in zip(block.split(sizes), group.widths)]
        group.program.forward(self.weights, batch, flat)
        if group.is_rounded:
            pieces = group.rounded(block, group.dtypes[0]).split(sizes) if len(set(group.dtypes)) == 1 \
                else map(group.rounded, flat, group.dtypes)
            flat = [piece.view(-1, width) for piece, width in zip(pieces, group.widths)]
        if group.is_flat:
            return tuple(flat)
        return tuple(piece.view(*shape, width) if feature.pooling == "none" else piece
                     for piece, shape, width, feature in zip(flat, self.shapes, group.widths, group.features))

    def hand_out(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs by feature; slices of the concat's buffer where there is one."""
        if self.group.layout is None:
            return list(outputs)
        assert self.buffer is not None
        buffer, wide, self.buffer, self.wide = self.buffer, self.wide, None, None      # the call outlives the forward; outputs must not
        self.uses = Uses()
        return ConcatBuffer(outputs[0], buffer, wide, self.group.layout, self.uses, self.group.crossing).slices()

    def accumulate(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take what arrived at the outputs. Returns the gradients of the differentiable per-sample weights."""
        group, grad = self.group, self._arranged(grads)
        if engine.wanted() is not None or torch._C._will_engine_execute_node(group.anchor_node):    # else tables are none of the inputs
            deliver(group, self.batch, grad, self._reached(grad), self.weights, self.grads, self.hooks != RemovableHandle.next_id)
        weight_grads = [self._sample_weight_grad(f, grad) for f in self.weighted]
        if self.uses is not None:
            self.uses.reached.clear()          # a graph that is kept may be run again, from another loss
        return weight_grads

    def _arranged(self, grads: Sequence[Tensor | None]) -> Tensor | list[Tensor | None]:
        if self.group.is_rounded:
            grads = [None if grad is None else grad.float() for grad in grads]
        if self.group.concat is not None:
            assert grads[0] is not None
            return _rows(grads[0], sum(self.group.widths))
        return [None if grad is None else _rows(grad, width) for grad, width in zip(grads, self.group.widths)]

    def _reached(self, grad: Tensor | Sequence[Tensor | None]) -> Sequence[int]:
        """The trainable tables that a gradient arrived at."""
        if isinstance(grad, Tensor):
            if self.uses is None or not self.uses.apart:
                return self.trainable
            reached = {t for feature, t in enumerate(self.group.table_of) if self._is_reached(feature)}
        else:
            reached = {t for t, g in zip(self.group.table_of, grad) if g is not None}
        return [t for t in self.trainable if t in reached]

    def _is_reached(self, feature: int) -> bool:
        """Whether a concat's gradient is this lookup's, too, and not only zeros in its columns."""
        assert self.group.layout is not None
        return self.uses is None or not self.uses.apart or self.group.layout.lookups[feature] in self.uses.reached

    def _sample_weight_grad(self, feature: int, grad: Tensor | Sequence[Tensor | None]) -> Tensor | None:
        if isinstance(grad, Tensor):
            if not self._is_reached(feature):
                return None
            spec = self.group.program.features[feature]
            own: Tensor | None = grad[:, spec.column:spec.column + self.group.tables[self.group.table_of[feature]].dim]
        else:
            own = grad[feature]
        if own is None:
            return None
        table = self.group.table_of[feature]
        if self.weights[table]._version != self.versions[table]:
            raise RuntimeError(f"the table {self.group.tables[table].name} was modified in place between a lookup with per-sample weights "
                               "and its backward, which needs the rows that were looked up")
        flat = self.group.program.weight_grad(self.weights, self.batch, feature, own)
        if self.group.is_rounded:
            flat = flat.to(self.group.dtypes[feature])
        return flat.view(self.shapes[feature]) if self.shapes else flat


def deliver(group: LookupGroup, batch: IndexBatch, grad: Tensor | Sequence[Tensor | None], places: Sequence[int], weights: Sequence[Tensor],
            tables: Sequence[TableGrad], may_be_watched: bool) -> None:
    """Leave what arrived at the outputs of a batch with the tables at `places`, in `.grad`, or with the backward that asks for it."""
    wanted = engine.wanted()
    arrival = Arrival(group.program, Segment.arrived(batch, grad), group.place, group.owners, torch._C._current_graph_task_id())
    if wanted is not None:
        places = [place for place in places if id(weights[place]) in wanted.weights]
    if wanted is None or wanted.keeps:
        accumulate(places, weights, tables, arrival, may_be_watched)
    else:
        for place in places:
            wanted.collect(weights[place], tables[place].alone(arrival))


def _bag_length(feature: Feature, ids: Tensor) -> int:
    if feature.form == "ids":
        return 1
    if ids.dim() != 2:
        raise ValueError(f"{feature.name} was recorded with (B, L) ids; got ids of shape {tuple(ids.shape)}")
    return ids.shape[1]


def _rows(grad: Tensor, width: int) -> Tensor:
    """`grad` as (rows, width) with a last stride of 1, which kernels read; a copy if it is a part of something that others write to.

    The backward of a torch.cat gives parts of one tensor, and what AccumulateGrad makes of its part is a parameter's `.grad`. An inference
    tensor could be written to unseen.
    """
    shared = grad._is_view() or grad.is_inference()
    if grad.dim() != 2:
        grad = grad.reshape(-1, width)
    if not shared and grad.stride(1) == 1 and grad.stride(0) >= width:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)    # contiguous() leaves the strides of a tensor without elements


class FusedLookup(torch.autograd.Function):
    """The one autograd edge of a fused call. Weights are no inputs: their gradients wait in `.grad` for the optimizer."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: LookupCall, outputs: tuple[Tensor, ...], *sample_weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call                         # nothing is saved: checkpointing counts what a forward and its repetition save
        fresh = tuple([output.data for output in outputs])
        if call.group.concat is None and len(call.trainable) < len(call.weights):
            ctx.mark_non_differentiable(*(output for feature, output in enumerate(fresh) if _is_frozen(call, feature)))
        return fresh

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call = ctx.call
        if call is None:
            raise RuntimeError("Trying to backward through a lifted lookup a second time, after its ids were freed; "
                               "pass retain_graph=True to the first backward()")
        if torch.is_grad_enabled():
            raise LiftRefused(f"create_graph=True through the lifted lookups {call.group.name}: their backward is not differentiable; "
                              "call sparselift.unapply first")
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None
        if all(grad is None for grad in grads):
            return (None,) * (3 + len(call.weighted))
        return (None, None, None, *call.accumulate(grads))


# Function.apply itself: what Python adds to it serves torch.func transforms, under which no lookup gets here.
_record = super(torch.autograd.Function, FusedLookup).apply


def _is_frozen(call: LookupCall, feature: int) -> bool:
    return call.group.table_of[feature] not in call.trainable and feature not in call.weighted
