"""The nodes of a native training step, and what each needs.

Letters: i id bytes, w bytes of a weight, which pooled rows and gradients have as well, B bags, D dim, K ids, U distinct rows, R rows,
s optimizer state bytes a row, P radix passes or parameters. Memory traffic in bytes:

lookup        K * (i + m*D*w) + B*D*w; m = U/K where the U rows fit into cache, else 1
concat        B * sum(D) * (w + o), o bytes of an element of the result
interaction   products of V vectors (B, D), B * o * (2*V*D + V*V) read or written by bmm, 2*P by the index, 2*(D + P) by the concat
dense         opaque: FLOPs, operator calls and measured seconds, without those of interactions
interaction_backward   B * o * (D + P + 2*P + V*V by the index, 2*(V*V + 2*V*D) by bmm, 3*V*D by their sum)
expand        K*D*w read; K*(D*w + 8) written, or R*D*w where the gradient is dense
coalesce      sort 2*P*K*(8 + 4); K*D*w read, U*(D*w + 8) written
update        2*n*(D*w + s) + n*D*w for the gradient; n = U, K for SGD, which does not coalesce, R for a dense gradient
dense_update  (3 + 2*states)*P*4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

import torch
from torch import Tensor

from sparselift.dtypes import itemsize, torch_dtype
from sparselift.hardware import hardware
from sparselift.ir import Concat, Feature, Interaction, Node, Resources, Structure, Table
from sparselift.kernels.interaction import InteractionSpec
from sparselift.lift.timing import DenseCost, StepCost, measure_interaction
from sparselift.stats import Sketch

_ID_BYTES = {"int64": 8, "int32": 4}
_COO_ID_BYTES = 8                  # a sparse gradient's ids are int64
_POSITION_BYTES = 4                # sorted along with them
_RADIX_BITS = 8


@dataclass(frozen=True, slots=True)
class _OptimizerTraits:
    """State of torch's optimizers: tensors like the parameter, floats a row, and calls of a sparse update into torch."""

    states: int = 0
    row_floats: int = 0
    sparse_calls: int = 1
    coalesces: bool = True         # sums the gradients of a row before it uses them


# An optimizer that is not here counts as stateless.
_TRAITS = {
    "SGD": _OptimizerTraits(coalesces=False),
    "Adagrad": _OptimizerTraits(states=1, sparse_calls=8),
    "RowWiseAdagrad": _OptimizerTraits(row_floats=1, sparse_calls=9),
    "SparseAdam": _OptimizerTraits(states=2, sparse_calls=14),
    "Adam": _OptimizerTraits(states=2),
    "AdamW": _OptimizerTraits(states=2),
}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Means a batch of one table, over all of its lookups."""

    ids: float                     # K
    unique: float                  # U, at most: rows that two features share count twice, up to R
    outputs: float                 # pooled rows: B, or K without pooling


def build_nodes(structure: Structure, sketches: Mapping[str, Sketch], cost: StepCost,
                optimizers: Sequence[torch.optim.Optimizer], tables: Mapping[str, Tensor]) -> tuple[Node, ...]:
    """The whole step: lookups, concats and the dense part, their backward, and the updates.

    `tables` holds the weights by table name. A table that needs no gradient has neither backward nor update.
    """
    calls = Counter(feature.module for feature in structure.features)
    cache_bytes = hardware().cache_bytes
    forward = [_lookup(structure, feature, sketches[feature.name], _share(cost.lookup_s, feature.module, calls), cache_bytes)
               for feature in structure.features]
    concats = [_concat(structure, concat, sketches) for concat in structure.concats]
    products = [_interaction(structure, each, sketches) for each in structure.interactions]
    backward = [_opaque("dense_backward", "backward", ("dense",), cost.backward, [node for _, node in products]),
                *(node for _, node in products)]
    updates: list[Node] = []
    for table in structure.tables:
        if tables[table.name].requires_grad:
            features = structure.features_of(table.name)
            sizes = _sizes(table, features, sketches)
            seconds = sum(cost.lookup_backward_s.get(module, 0.0) for module in {feature.module for feature in features})
            arriving = _arrives_from(structure, {feature.name for feature in features})
            backward += _gradient(table, tuple(feature.name for feature in features), sizes, seconds, arriving)
            if table.optimizer is not None:
                updates.append(_update(table, sizes, backward[-1].name))
    table_weights = set(tables.values())
    dense_updates = [_dense_update(index, optimizer, table_weights) for index, optimizer in enumerate(optimizers)]
    joined = {name for node in concats for name in node.inputs}
    multiplied = {each.concat for each in structure.interactions}
    inputs = (*(node.name for node in forward if node.name not in joined), *(node.name for node in concats if node.name not in multiplied),
              *(node.name for node, _ in products))
    dense = _opaque("dense", "forward", inputs, cost.forward, [node for node, _ in products])
    return (*forward, *concats, *(node for node, _ in products), dense, *backward, *updates,
            *(node for node in dense_updates if node is not None))


def _arrives_from(structure: Structure, features: set[str]) -> tuple[str, ...]:
    """Where the gradients of lookups come from: the interactions of their concats, and the dense part for those that are in none."""
    concats = {each.concat: f"{each.name}_backward" for each in structure.interactions}
    through = {name: concats[concat.name] for concat in structure.concats if concat.name in concats for name in concat.features}
    return tuple(dict.fromkeys(through.get(name, "dense_backward") for name in sorted(features)))


def interaction_spec(structure: Structure, interaction: Interaction) -> InteractionSpec:
    """What an interaction computes."""
    concat = next(each for each in structure.concats if each.name == interaction.concat)
    dim = structure.table(structure.feature(concat.features[0]).table).dim
    return InteractionSpec(len(concat.parts), dim, interaction.order, interaction.diagonal, interaction.passed)


def _interaction(structure: Structure, interaction: Interaction, sketches: Mapping[str, Sketch]) -> tuple[Node, Node]:
    """Its forward and backward, as torch runs them."""
    spec = interaction_spec(structure, interaction)
    concat = next(each for each in structure.concats if each.name == interaction.concat)
    batch = round(sketches[concat.features[0]].bags_per_batch)
    forward, backward = measure_interaction(batch, spec, torch_dtype(concat.dtype))
    vectors, square, pairs, out = (itemsize(concat.dtype) * batch * each for each in (
        spec.num_vectors * spec.dim, spec.num_vectors ** 2, spec.num_pairs, spec.width))
    tables = tuple(dict.fromkeys(structure.feature(name).table for name in concat.features))
    return (
        Node(interaction.name, "interaction", "forward", (concat.name,), tables, concat.features, Resources(
            flops=forward.flops, read_bytes=2 * vectors + pairs + out, write_bytes=square + pairs + out, live_bytes=vectors + square + out,
            launches=forward.calls, time_s=forward.seconds)),
        Node(f"{interaction.name}_backward", "interaction_backward", "backward", ("dense_backward",), tables, concat.features, Resources(
            flops=backward.flops, read_bytes=out + pairs + 2 * square + 4 * vectors, write_bytes=square + pairs + 3 * vectors,
            live_bytes=out + square + 3 * vectors, launches=backward.calls, time_s=backward.seconds)))


def _share(seconds: Mapping[str, float], module: str, calls: Mapping[str, int]) -> float | None:
    return seconds[module] / calls[module] if module in seconds else None


def _opaque(name: str, phase: str, inputs: tuple[str, ...], cost: DenseCost, apart: Sequence[Node] = ()) -> Node:
    """The dense part without the nodes that stand apart from it."""
    flops, calls, seconds = cost.flops, cost.calls, cost.seconds
    for each in (node.resources for node in apart):
        flops, calls, seconds = flops - each.flops, calls - each.launches, seconds - (each.time_s or 0.0)
    return Node(name, name, phase, inputs, resources=Resources(flops=max(flops, 0), launches=max(calls, 0), time_s=max(seconds, 0.0)))


def _lookup(structure: Structure, feature: Feature, sketch: Sketch, seconds: float | None, cache_bytes: int) -> Node:
    table = structure.table(feature.table)
    k = sketch.lookups_per_batch
    rows_read = sketch.unique_per_batch if sketch.unique_per_batch * table.row_bytes <= cache_bytes else k
    outputs = _outputs(feature, sketch)
    bag_bytes = sketch.bags_per_batch * 8 if feature.form == "offsets" else 0
    id_bytes = k * (_ID_BYTES[feature.index_dtype] + (itemsize(table.dtype) if feature.weighted else 0)) + bag_bytes
    return Node(f"lookup:{feature.name}", "lookup", "forward", (), (table.name,), (feature.name,), Resources(
        flops=round(k * table.dim * (2 if feature.weighted else 1)) if feature.pooling != "none" else 0,
        read_bytes=round(id_bytes + rows_read * table.row_bytes), write_bytes=round(outputs * table.row_bytes),
        live_bytes=round(id_bytes + outputs * table.row_bytes), time_s=seconds))


def _concat(structure: Structure, concat: Concat, sketches: Mapping[str, Sketch]) -> Node:
    features = [structure.feature(name) for name in concat.features]
    tables = [structure.table(feature.table) for feature in features]
    others = sum(part for part in concat.parts if isinstance(part, int))
    bags, element = sketches[features[0].name].bags_per_batch, itemsize(concat.dtype)
    read = round(bags * (others * element + sum(table.row_bytes for table in tables)))
    written = round(bags * element * (others + sum(table.dim for table in tables)))
    return Node(concat.name, "concat", "forward", tuple(f"lookup:{feature.name}" for feature in features),
                tuple(dict.fromkeys(feature.table for feature in features)), concat.features,
                Resources(read_bytes=read, write_bytes=written, live_bytes=read + written))


def _gradient(table: Table, features: tuple[str, ...], sizes: _Sizes, seconds: float, arriving: tuple[str, ...]) -> list[Node]:
    """From gradients of pooled rows to the gradient of a table, as the optimizer wants it. `arriving`: the nodes that give them."""
    written = sizes.ids * (table.row_bytes + _COO_ID_BYTES) if table.sparse else table.nbytes
    nodes = [Node(f"expand:{table.name}", "expand", "backward", arriving, (table.name,), features, Resources(
        read_bytes=round(sizes.ids * table.row_bytes), write_bytes=round(written),
        live_bytes=round(written + sizes.outputs * table.row_bytes), launches=len(features), time_s=seconds))]
    if table.sparse and table.optimizer is not None and _traits(table).coalesces:
        passes = max(1, ceil(log2(max(table.rows, 2)) / _RADIX_BITS))
        sorting = passes * sizes.ids * (_COO_ID_BYTES + _POSITION_BYTES)
        summed = sizes.unique * (table.row_bytes + _COO_ID_BYTES)
        nodes.append(Node(f"coalesce:{table.name}", "coalesce", "backward", (nodes[0].name,), (table.name,), features, Resources(
            flops=round(sizes.ids * table.dim), read_bytes=round(sorting + sizes.ids * table.row_bytes),
            write_bytes=round(sorting + summed), live_bytes=round(written + summed))))
    return nodes


def _update(table: Table, sizes: _Sizes, gradient: str) -> Node:
    traits = _traits(table)
    rows = table.rows if not table.sparse else sizes.unique if traits.coalesces else sizes.ids
    moved = rows * (table.row_bytes + table.state_itemsize * (traits.states * table.dim + traits.row_floats))
    return Node(f"update:{table.name}", "update", "update", (gradient,), (table.name,), (), Resources(
        flops=round(rows * table.dim * (2 + 3 * traits.states)), read_bytes=round(moved + rows * table.row_bytes), write_bytes=round(moved),
        live_bytes=round(rows * table.row_bytes), launches=traits.sparse_calls if table.sparse else 1))


def _dense_update(index: int, optimizer: torch.optim.Optimizer, tables: set[Tensor]) -> Node | None:
    """The update of everything that is no lifted table; None if the optimizer has nothing else."""
    sizes = [weight.numel() for group in optimizer.param_groups for weight in group["params"]
             if weight.requires_grad and weight not in tables]
    if not sizes:
        return None
    kind = type(optimizer).__name__
    states = _TRAITS.get(kind, _OptimizerTraits()).states + any(group.get("momentum") for group in optimizer.param_groups)
    elements = sum(sizes)
    return Node(f"dense_update:{index}", "dense_update", "update", ("dense_backward",), resources=Resources(
        flops=elements * (2 + 3 * states), read_bytes=(2 + states) * elements * 4, write_bytes=(1 + states) * elements * 4,
        live_bytes=elements * 4, launches=len(sizes)))


def _sizes(table: Table, features: Sequence[Feature], sketches: Mapping[str, Sketch]) -> _Sizes:
    seen = [sketches[feature.name] for feature in features]
    return _Sizes(sum(sketch.lookups_per_batch for sketch in seen), min(sum(sketch.unique_per_batch for sketch in seen), table.rows),
                  sum(_outputs(feature, sketch) for feature, sketch in zip(features, seen)))


def _outputs(feature: Feature, sketch: Sketch) -> float:
    return sketch.lookups_per_batch if feature.pooling == "none" else sketch.bags_per_batch


def _traits(table: Table) -> _OptimizerTraits:
    return _TRAITS.get(table.optimizer.kind if table.optimizer else "", _OptimizerTraits())
