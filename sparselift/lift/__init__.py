"""From a workload to its graph: which lookups a training step has, what feeds and consumes them, and what all of it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparselift.errors import LiftRefused
from sparselift.ir import Feature, Graph, Refusal, Structure
from sparselift.lift.dense_modules import find_dense_modules
from sparselift.lift.fx import confirm, trace
from sparselift.lift.linears import find_linears
from sparselift.lift.modules import EmbeddingModule, Survey, drop_sharers, is_embedding, survey
from sparselift.lift.nodes import build_nodes
from sparselift.lift.record import Key, Recording, record
from sparselift.lift.sketches import sketch_lookups
from sparselift.lift.structure import find_concats, find_features, find_in_batch, find_interactions, find_unfit
from sparselift.lift.timing import measure
from sparselift.preserve import eager, preserve
from sparselift.workload import Workload, check_workload

__all__ = ["lift"]

_EXPORT = "not run: the record holds the dataflow between lookups and their consumers, and an export takes seconds"


def lift(work: Workload, batches: int = 8) -> Graph:
    """The graph of a workload's training step, from running its forward on real batches and its backward on the first.

    Nothing is updated, and model, optimizers and random state are afterwards bit for bit what they were.

    Parameters
    ----------
    batches   how many of the workload's batches to look at, at least 1. More make better sketches and check more often where the
              ids come from. Of a longer sequence of batches the last one, often shorter, is a further check.

    Raises
    ------
    LiftRefused     no embedding module, or none that can be lifted: names each and why; several ranks; a model that runs a plan
    TypeError       `work` is no Workload
    WorkloadError   no batches, or a step that gives no scalar loss
    """
    check_workload("lift", work)
    if batches < 1:
        raise ValueError(f"batches must be at least 1; got {batches}")
    found = survey(work)
    if not found.modules:
        raise _nothing_lifted(work, found.refusals)
    taken = _take(work, batches)
    with preserve(work, ()) as kept, kept.watch(), eager():
        recording = record(work, found.modules, taken)
        cost = measure(work, found.modules, taken[0])
        traced = trace(work.model)
    modules, refusals = _fit(work, found, recording)
    if not modules:
        raise _nothing_lifted(work, refusals)
    notes = {path: note for path, note in found.notes.items() if path in modules}
    hooked = frozenset(notes)
    features = find_features(recording, modules, found.tables, notes)
    concats, fx = confirm(traced, find_concats(recording, features, hooked), {f.name: f for f in features.values()})
    linears, others = find_linears(work.model)
    notes |= {path: f"stays with torch's matrix product: {reason}" for path, reason in others.items()}
    dense_modules, others = find_dense_modules(work.model)
    notes |= {path: "; ".join([*filter(None, [notes.get(path)]), f"is not compiled: {reason}"]) for path, reason in others.items()}
    weights = {found.tables[module.weight].name: module.weight for module in modules.values()}
    structure = Structure(
        tables=tuple(table for table in found.tables.values() if table.name in weights), features=tuple(features.values()), concats=concats,
        optimizers=tuple(type(optimizer).__name__ for optimizer in work.optimizers),
        uses=None if work.uses is None else tuple(sorted(work.uses)), interactions=find_interactions(recording, features, concats),
        linears=linears, dense_modules=dense_modules,
        in_batch=find_in_batch(recording, features, [work.arguments(batch) for batch in taken]))
    sketches = sketch_lookups(recording, features, {table.name: table.rows for table in structure.tables}, batches)
    return Graph(
        workload=work.name, structure=structure, nodes=build_nodes(structure, sketches, cost, work.optimizers, weights), sketches=sketches,
        refusals=tuple(refusals), batch_size=_batch_size(recording, features), notes=notes,
        frontends={"record": f"saw {len(taken)} batches", "fx": fx, "export": _EXPORT})


def _take(work: Workload, count: int) -> list[Any]:
    taken = work.take(count)
    if isinstance(work.batches, Sequence) and len(work.batches) > count:
        taken.append(work.batches[-1])
    return taken


def _fit(work: Workload, found: Survey, recording: Recording) -> tuple[dict[str, EmbeddingModule], list[Refusal]]:
    """The modules that the recorded steps confirm, and everything that is not lifted."""
    modules, refusals = dict(found.modules), list(found.refusals)
    for refusal in find_unfit(recording, modules):
        del modules[refusal.where]
        refusals.append(refusal)
    drop_sharers(modules, refusals, work.model)
    owned = {weight for module in work.model.modules() if is_embedding(module) for weight in module.parameters()}
    names: dict[Tensor, str] = {weight: name for name, weight in work.model.named_parameters() if weight not in owned}
    refusals += [Refusal(names[weight], f"is looked up by {function}, without an embedding module", "use torch.nn.EmbeddingBag")
                 for weight, function in recording.functional.items() if weight in names]
    return modules, refusals


def _nothing_lifted(work: Workload, refusals: Sequence[Refusal]) -> LiftRefused:
    if not refusals:
        return LiftRefused(f"lift: {type(work.model).__name__} of workload {work.name!r} has no embedding to lift; looked for "
                           "torch.nn.EmbeddingBag, torch.nn.Embedding and sparselift.nn.EmbeddingBag among its modules")
    lines = "\n".join(f"  {refusal}" for refusal in refusals)
    return LiftRefused(f"lift: none of the {len(refusals)} embedding modules of workload {work.name!r} can be lifted:\n{lines}")


def _batch_size(recording: Recording, features: Mapping[Key, Feature]) -> int:
    """B of the first batch: the most bags of any lookup."""
    bags = []
    for key, feature in features.items():
        _, lookup = next(recording.seen(key))
        counted = lookup.ids if lookup.offsets is None else lookup.offsets
        bags.append(len(counted) - (feature.form == "offsets" and feature.include_last_offset) if counted.dim() else 1)
    return max(bags)
