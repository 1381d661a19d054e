"""Pooled rows are written past the caches."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.ir import Graph, Node, Structure
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, nodes_at, outputs_per_batch, tables_at

LINE_BYTES = 64
_PREFER_OUTPUT_BYTES = 1 << 20     # outputs of that size have left L2 before anyone reads them


class Stores(Rewrite):
    """An ordinary store reads its cache line first. A streaming store does not, and leaves the caches to the rows of tables.

    The lines that a store reads are not counted in a graph, so that bytes stay the same there.
    """

    name = "stores"
    summary = "write pooled rows past the caches, in whole cache lines"
    scope = "class"
    equivalence_note = "bitwise"
    devices = ("cpu",)
    knobs = (Knob("stores", ("cached", "streamed"), "cached", "how the forward writes its output"),)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        widths = {4 * table.dim for table in tables_at(structure, site)}
        if knobs["stores"] == "cached" or any(width % LINE_BYTES == 0 for width in widths):
            return None
        return f"pooled rows of {', '.join(map(str, sorted(widths)))} bytes are no whole cache lines of {LINE_BYTES}"

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        features = graph.structure.features
        outputs = sum(4 * graph.structure.table(f.table).dim * outputs_per_batch(graph, f) for f in features)
        return {"stores": "streamed" if outputs >= _PREFER_OUTPUT_BYTES else "cached"}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return tuple(node for node in nodes_at(graph, site, "lookup")
                     if all(4 * graph.structure.table(name).dim % LINE_BYTES == 0 for name in node.tables))
