"""The index work of coming batches is done while the step before them runs."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.ir import Graph, Node, Structure
from sparselift.rewrites.base import (
    Knob,
    Rewrite,
    Site,
    Value,
    features_at,
    lookups,
    nodes_at,
    outputs_per_batch,
    sketch_of,
    unique_rows,
    with_nodes,
)


class PrefetchBatches(Rewrite):
    """Checking ids, narrowing them and sorting them for the update need no weights and no gradients, so another thread can do them early.

    It moves work off the step and saves none. What it gains depends on whether the step leaves a core idle, which only measuring tells.
    """

    name = "prefetch_batches"
    summary = "do the index work of the next batches on a thread beside the step, in a loop over sl.prefetch_batches(batches, model)"
    scope = "policy"
    equivalence_note = "bitwise"
    devices = ("cpu",)
    knobs = (Knob("prefetch_batches", (0, 1, 2), 0, "batches ahead whose index work is done; 0 is off",
                  requires=(("group_by", ("class", "all")), ("compile", ("eager", "inductor")))),)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if not knobs["prefetch_batches"]:
            return None
        early = [feature.name for feature in structure.features if feature.from_inputs]
        if not early:
            return "no lookup's ids are arguments of the model's forward, so nothing is known of them before"
        missing = [name for name in early if name not in structure.in_batch]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return (f"a batch does not hold what {missing[0]}{more} is given, or not at the same place of the forward's arguments: "
                    "Workload(inputs=...) says what the forward gets of a batch")
        return None

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {"prefetch_batches": 0}           # with every core at work, or a loop over the bare loader, there is nothing to gain

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        late = {feature.table for feature in graph.structure.features if not feature.from_inputs}
        return tuple(node for node in nodes_at(graph, site, "lookup", "update") if late.isdisjoint(node.tables))

    def transform(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> Graph:
        """Marks nodes: the same bytes, some of them moved beside another step."""
        if not self.applied(knobs):
            return graph
        matched = {node.name for node in self.match(graph, site)}
        return with_nodes(graph, lambda node: node.changed(self.name) if node.name in matched else node)

    def memory_bytes(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> int:
        """Of every batch ahead: ids and offsets as kernels take them, and at most 8 bytes of chains a lookup and as many a distinct row."""
        early = [feature for feature in features_at(graph.structure, site) if feature.from_inputs]
        ids = sum(4 * (sketch_of(graph, feature.name).lookups_per_batch + outputs_per_batch(graph, feature)) for feature in early)
        chains = sum(8 * (lookups(graph, table) + unique_rows(graph, table)) for table in {feature.table for feature in early})
        return round(int(knobs["prefetch_batches"]) * (ids + chains))
