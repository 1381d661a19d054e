"""Each distinct row of a batch is gathered once."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.ir import Graph, Node, Table
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, features_at, nodes_at, sketch_of

_MIN_DUPLICATE_RATIO = 0.95        # below it, finding duplicates costs about what their repeated reads cost
_MIN_POOLING = 10


class Dedup(Rewrite):
    """The forward gathers distinct rows into a compact copy that stays in cache, then pools from it in id order."""

    name = "dedup"
    summary = "gather each distinct row of a batch once, then pool from the gathered copy"
    scope = "class"
    equivalence_note = "bitwise"
    devices = ("cpu",)
    knobs = (Knob("dedup", (False, True), False, "whether the forward gathers each distinct row once"),)

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        sketches = [sketch_of(graph, feature.name) for feature in features_at(graph.structure, site)]
        return {"dedup": bool(sketches) and all(s.duplicate_ratio > _MIN_DUPLICATE_RATIO and s.pooling > _MIN_POOLING for s in sketches)}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return nodes_at(graph, site, "lookup")

    def memory_bytes(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> int:
        """The gathered rows and every lookup's int32 place among them."""
        if not self.applied(knobs):
            return 0
        return round(sum(_gathered_bytes(graph, feature.name) + 4 * sketch_of(graph, feature.name).lookups_per_batch
                         for feature in features_at(graph.structure, site)))

    def change(self, graph: Graph, node: Node, knobs: Mapping[str, Value]) -> Node:
        """Reads: ids twice, each distinct row from the table and, in cache, from the copy. Writes: the copy, places, outputs."""
        k = sum(sketch_of(graph, name).lookups_per_batch for name in node.features)
        gathered = sum(_gathered_bytes(graph, name) for name in node.features)
        distinct = sum(sketch_of(graph, name).unique_per_batch * _table(graph, name).row_bytes for name in node.features)
        return node.changed(self.name, read_bytes=round(16 * k + distinct + gathered),
                            write_bytes=round(node.resources.write_bytes + 4 * k + gathered),
                            live_bytes=round(node.resources.live_bytes + 4 * k + gathered))


def _gathered_bytes(graph: Graph, feature: str) -> float:
    """Of the copy, which is float32."""
    return sketch_of(graph, feature).unique_per_batch * 4 * _table(graph, feature).dim


def _table(graph: Graph, feature: str) -> Table:
    return graph.structure.table(graph.structure.feature(feature).table)
