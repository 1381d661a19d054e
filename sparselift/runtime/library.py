"""Planned lookups as operators of torch.library: nodes of the graphs that torch.compile makes of a model with a plan.

`sparselift::planned_lookup` is one node, of one lookup or of several that are made in one call. Its gradient,
`sparselift::planned_lookup_backward`, leaves what arrived with the tables, in `.grad`, as a lookup in eager code does, and gives autograd
none for them. That is an effect outside of the graph, and registered as one: the compiler neither drops such a node, nor makes one of two.

Only tensors and constants pass through a graph. So the nodes name the plan and the lookups, and the backward prepares the ids once more,
if they are not those of the latest forward.

Letters in shapes: B bags, D columns of a table, K ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._library.effects import EffectType
from torch.autograd.graph import get_gradient_edge

from sparselift.errors import LiftRefused
from sparselift.ir import Feature, Structure, Table
from sparselift.kernels.base import IndexBatch
from sparselift.runtime import engine
from sparselift.runtime._hot import TableGrad, plain_weights
from sparselift.runtime.groups import LookupGroup, deliver
from sparselift.schedule import Schedule

_INPUTS = "Tensor[] indices, Tensor[] offsets, Tensor[] sample_weights, str[] features, str[] forms, bool[] weighted, str plan"

_numbers = itertools.count()
_plans: WeakValueDictionary[str, GraphLookups] = WeakValueDictionary()


class Lookups(NamedTuple):
    """What one node looks up: an entry a feature."""

    features: tuple[str, ...]
    forms: tuple[str, ...]         # as ir.Feature.form, of this call
    weighted: tuple[bool, ...]     # whether it has per-sample weights

    @property
    def with_offsets(self) -> tuple[bool, ...]:
        return tuple(form == "offsets" for form in self.forms)


class Runtime(Protocol):
    """What is needed of a plan's runtime."""

    structure: Structure
    schedule: Schedule
    tables: dict[str, Table]
    owners: dict[str, nn.Module]
    grads: dict[str, TableGrad]

    def group(self, features: Sequence[Feature]) -> LookupGroup:
        """A group over these features and the tables that they read."""


class GraphLookups:
    """One applied plan in compiled graphs.

    A copy and what comes out of a pickle have a name of their own, so that a graph belongs to one model.

    Attributes
    ----------
    name         of the plan in graphs
    is_attached  whether the plan is applied
    parameters   table -> the parameter that graphs were made for
    groups       that ran
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.is_attached = runtime, False
        self._reset()

    def _reset(self) -> None:
        self.name = f"plan {next(_numbers)}"
        self.parameters: dict[str, nn.Parameter] = {}
        self.groups: dict[Lookups, LookupGroup] = {}
        self._nodes: dict[str, Any] = {}               # of the parameters, in autograd
        _plans[self.name] = self

    def __getstate__(self) -> dict[str, Any]:
        return {"runtime": self.runtime, "is_attached": self.is_attached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def attach(self) -> None:
        """The plan is applied."""
        self.is_attached = True

    def detach(self) -> None:
        """It is not any more: no new lookups, but backwards of old ones."""
        self.is_attached = False

    def lines(self) -> list[str]:
        """What ran, for people: a line a node."""
        return [f"in compiled graphs: {len(group.features)} lookups over {len(group.tables)} tables in one node ({group.name}): "
                f"{group.calls} times" for group in self.groups.values()]

    def enter(self, table: str) -> nn.Parameter | None:
        """The table's parameter, for which a graph is made from now on; None if it is none any more, or watched by hooks."""
        weights = plain_weights([self.runtime.owners[table]])
        if weights is None:
            return None
        parameter = self.parameters[table] = weights[0]
        if parameter.requires_grad:
            with torch.inference_mode(False), torch.enable_grad():
                self._nodes[table] = get_gradient_edge(parameter).node
        return parameter

    def recorded(self, feature: str, call: int) -> tuple[str, int] | None:
        """What the plan knows the call, counted from 0, of a feature's module as: a feature, and the number of the schedule's group that
        it is looked up with. None for one that it does not have, or that is looked up by itself.
        """
        structure = self.runtime.structure
        calls = [each.name for each in structure.features if each.module == structure.feature(feature).module]
        groups = [number for number, group in enumerate(self.runtime.schedule.groups) if group.prelude and calls[call:]
                  and calls[call] in group.features]
        return (calls[call], groups[0]) if groups else None

    def features(self, lookups: Lookups) -> list[Feature]:
        """As this call has them."""
        structure = self.runtime.structure
        return [replace(structure.feature(name), form=form, weighted=weighted) for name, form, weighted in zip(*lookups)]

    def look_up(self, lookups: Lookups, weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor],
                sample_weights: Sequence[Tensor]) -> list[Tensor]:
        """One output a feature, each with memory of its own. Raises what BagProgram.prepare raises, and LiftRefused."""
        group = self._group(lookups)
        if not self.is_attached:
            raise LiftRefused(f"a compiled graph looks up {group.name} in a plan that is not applied any more; compile the model again")
        if plain_weights([self.runtime.owners[table.name] for table in group.tables]) is None:
            raise LiftRefused(f"a compiled graph looks up {group.name}, and a table among them got a hook, or is no parameter any more; "
                              "register hooks before the model is compiled")
        batch = self._prepared(group, lookups, indices, offsets, sample_weights)
        sizes = [(bags, width) for bags, width in zip(batch.num_bags, group.widths)]
        outputs = [group.memory.take(size) for size in sizes]
        group.program.forward(_by_table(group, weights), batch, outputs)
        group.calls += 1
        return [out.view(*ids.shape, width) if form == "ids" else out
                for out, ids, width, form in zip(outputs, indices, group.widths, lookups.forms)]

    def accumulate(self, lookups: Lookups, grads: Sequence[Tensor | None], weights: Sequence[Tensor], trained: Sequence[bool],
                   factored: Sequence[bool], indices: Sequence[Tensor], offsets: Sequence[Tensor],
                   sample_weights: Sequence[Tensor]) -> list[Tensor]:
        """Leave what arrived with the tables. Returns the gradients of the `factored` per-sample weights, whose tables `weights` are."""
        group = self._group(lookups)
        if engine.creates_graph():
            raise LiftRefused(f"create_graph=True through the lifted lookups {group.name}: their backward is not differentiable; "
                              "call sparselift.unapply first")
        batch = self._prepared(group, lookups, indices, offsets, sample_weights)
        # Their memory is the compiler's, which writes to it again as soon as nothing in the graph reads it.
        own = [None if grad is None else group.memory.take((bags, width)).copy_(grad.reshape(bags, width))
               for grad, bags, width in zip(grads, batch.num_bags, group.widths)]
        places = [place for place in dict.fromkeys(t for t, wanted in zip(group.table_of, trained) if wanted)
                  if self._is_reached(group.tables[place].name)]
        if places:
            tables = [table.name for table in group.tables]
            deliver(group, batch, [grad if wanted else None for grad, wanted in zip(own, trained)], places,
                    [self.parameters[name] for name in tables], [self.runtime.grads[name] for name in tables], True)
        found = [feature for feature, wanted in enumerate(factored) if wanted]
        by_table = _by_table(group, weights, [group.table_of[feature] for feature in found])
        return [group.program.weight_grad(by_table, batch, feature, grad).view(indices[feature].shape)
                for feature in found if (grad := own[feature]) is not None]

    def _is_reached(self, table: str) -> bool:
        """Whether this run of torch's engine is to accumulate into the table."""
        if engine.wanted() is not None or torch._C._will_engine_execute_node(self._nodes[table]):
            return True
        if not engine.has_inputs():
            raise LiftRefused(f"the parameter {table} was replaced between a compiled lookup and its backward; run the forward again")
        return False

    def _group(self, lookups: Lookups) -> LookupGroup:
        found = self.groups.get(lookups)
        if found is None:
            found = self.groups[lookups] = self.runtime.group(self.features(lookups))
        return found

    @staticmethod
    def _prepared(group: LookupGroup, lookups: Lookups, indices: Sequence[Tensor], offsets: Sequence[Tensor],
                  sample_weights: Sequence[Tensor]) -> IndexBatch:
        """Made anew by every node, the backward's too: what a graph computes lies where something else lay before, and no version tells."""
        by_feature = _spread(offsets, lookups.with_offsets), _spread(sample_weights, lookups.weighted)
        flat = group.flat(indices, *by_feature)
        return group.program.prepare(flat.indices, flat.lengths, flat.sample_weights if group.has_weights else None)


def _spread(tensors: Sequence[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    """One entry a feature from those of the features that have one."""
    rest = iter(tensors)
    return [next(rest) if there else None for there in present]


def _by_table(group: LookupGroup, weights: Sequence[Tensor], places: Sequence[int] | None = None) -> list[Tensor]:
    """The tables of a group from those of its features, or of some at `places`; of the others, which nobody reads, any."""
    found = dict(zip(group.table_of if places is None else places, weights))
    return [found.get(place, weights[0]) for place in range(len(group.tables))] if weights else []


def find(plan: str) -> GraphLookups:
    """A plan by its name in graphs. Raises LiftRefused if its model is gone."""
    found = _plans.get(plan)
    if found is None:
        raise LiftRefused(f"a compiled graph looks up in {plan!r}, which this process does not have; compile the model here")
    return found


# --------------------------------------------------------------------------------------------------------------- operators

@torch.library.custom_op("sparselift::planned_lookup", mutates_args=(), schema=f"(Tensor[] weights, {_INPUTS}) -> Tensor[]")
def planned_lookup(weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor], sample_weights: Sequence[Tensor],
                   features: Sequence[str], forms: Sequence[str], weighted: Sequence[bool], plan: str) -> list[Tensor]:
    """Rows of each feature: (B, D), or (*, D) of ids (*).

    Parameters
    ----------
    weights          a feature: its table (R, D)
    indices          a feature: (K,) with offsets, (B, L) of form "matrix", (*) of form "ids"
    offsets          a feature of form "offsets": (B,), or (B + 1,) with include_last_offset
    sample_weights   a weighted feature: of the shape of its indices
    """
    return find(plan).look_up(_lookups(features, forms, weighted), weights, indices, offsets, sample_weights)


@planned_lookup.register_fake
def _(weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor], sample_weights: Sequence[Tensor],
      features: Sequence[str], forms: Sequence[str], weighted: Sequence[bool], plan: str) -> list[Tensor]:
    lookups = _lookups(features, forms, weighted)
    found = []
    for feature, weight, ids, starts in zip(find(plan).features(lookups), weights, indices, _spread(offsets, lookups.with_offsets)):
        if starts is not None:
            bags: tuple[int, ...] = (starts.shape[0] - feature.include_last_offset,)
        else:
            bags = tuple(ids.shape) if feature.form == "ids" else (ids.shape[0],)
        found.append(weight.new_empty((*bags, weight.shape[1])))
    return found


@torch.library.custom_op("sparselift::planned_lookup_backward", mutates_args=(), schema=(
    f"(Tensor[] grads, Tensor[] weights, bool[] arrived, bool[] trained, bool[] factored, {_INPUTS}) -> Tensor[]"))
def planned_lookup_backward(grads: Sequence[Tensor], weights: Sequence[Tensor], arrived: Sequence[bool], trained: Sequence[bool],
                            factored: Sequence[bool], indices: Sequence[Tensor], offsets: Sequence[Tensor],
                            sample_weights: Sequence[Tensor], features: Sequence[str], forms: Sequence[str], weighted: Sequence[bool],
                            plan: str) -> list[Tensor]:
    """Leave the gradients of `planned_lookup` with the tables.

    Parameters
    ----------
    arrived   a feature: whether a gradient arrived at its rows
    trained   a feature: whether one did that its table wants
    factored  a feature: whether one did that its per-sample weights want
    grads     a feature that one arrived at
    weights   a factored feature: its table

    Returns
    -------
    The gradients of the factored per-sample weights, each of the shape of its indices
    """
    with torch.no_grad():
        return find(plan).accumulate(_lookups(features, forms, weighted), _spread(grads, arrived), weights, trained, factored, indices,
                                     offsets, sample_weights)


@planned_lookup_backward.register_fake
def _(grads: Sequence[Tensor], weights: Sequence[Tensor], arrived: Sequence[bool], trained: Sequence[bool], factored: Sequence[bool],
      indices: Sequence[Tensor], offsets: Sequence[Tensor], sample_weights: Sequence[Tensor], features: Sequence[str],
      forms: Sequence[str], weighted: Sequence[bool], plan: str) -> list[Tensor]:
    return [grads[0].new_empty(ids.shape) for ids, wanted in zip(indices, factored) if wanted]


planned_lookup_backward.register_effect(EffectType.ORDERED)


def _lookups(features: Sequence[str], forms: Sequence[str], weighted: Sequence[bool]) -> Lookups:
    return Lookups(tuple(features), tuple(forms), tuple(weighted))


# ---------------------------------------------------------------------------------------------------------------- autograd

def _remember(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    weights, indices, offsets, sample_weights, *constants = inputs
    ctx.set_materialize_grads(False)
    _, _, weighted, _ = constants
    ctx.constants, ctx.counts = constants, (len(indices), len(offsets), len(sample_weights))
    ctx.trained = [weight.requires_grad for weight in weights]
    ctx.factored = [factors is not None and factors.requires_grad for factors in _spread(sample_weights, weighted)]
    # A sum's gradient does not depend on the tables: they may change before the backward.
    needed = [weight for weight, wanted in zip(weights, ctx.factored) if wanted]
    ctx.save_for_backward(*indices, *offsets, *sample_weights, *needed)


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    rest = iter(ctx.saved_tensors)
    indices, offsets, sample_weights = ([next(rest) for _ in range(count)] for count in ctx.counts)
    weights = _spread(list(rest), ctx.factored)
    arrived = [grad is not None for grad in grads]
    trained, factored = ([there and wanted for there, wanted in zip(arrived, each)] for each in (ctx.trained, ctx.factored))
    found = []
    if any(arrived):
        found = torch.ops.sparselift.planned_lookup_backward(
            [grad for grad in grads if grad is not None], [weight for weight, wanted in zip(weights, factored) if wanted],
            arrived, trained, factored, indices, offsets, sample_weights, *ctx.constants)
    _, _, weighted, _ = ctx.constants
    factors = [grad for grad, has_weights in zip(_spread(found, factored), weighted) if has_weights]
    return [None] * len(ctx.trained), [None] * len(indices), [None] * len(offsets), factors, None, None, None, None


planned_lookup.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("a compiled lookup cannot be differentiated twice; call sparselift.unapply first")


planned_lookup_backward.register_autograd(_refuse)
