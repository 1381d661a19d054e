"""How CUDA kernels read the rows of a table and share out its bags, where their heuristic is not asked."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.ir import Graph, Node, Structure
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, features_at, nodes_at, tables_at
from sparselift.rewrites.kernel_shape import AUTO

VECTOR_BYTES = 16


class ShapeBags(Rewrite):
    """What a launch takes from each table. Several bags a group overlap the loads of short bags, one bag a group spreads them wider."""

    name = "bag_shape"
    summary = "read rows and share out bags otherwise than the CUDA kernels' heuristic: bytes a load, bags a group of lanes"
    scope = "class"
    devices = ("cuda",)
    equivalence_note = "bitwise"
    knobs = (
        Knob("vector_bytes", (AUTO, 4), AUTO, "bytes of one load of a row; auto: 16 where rows are aligned"),
        Knob("bags_per_group", (AUTO, 1, 2, 4, 8), AUTO,
             "bags that a group of lanes pools one after the other; auto: 4 where bags have one id each, else 1"),
    )

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        widths = {table.row_bytes for table in tables_at(structure, site)}
        if knobs["vector_bytes"] != AUTO and all(width % VECTOR_BYTES for width in widths):
            return f"rows of {', '.join(map(str, sorted(widths)))} bytes are read an element at a time anyway"
        if knobs["bags_per_group"] != AUTO and all(feature.pooling == "max" for feature in features_at(structure, site)):
            return "a group of lanes takes one bag at a time where it looks for maxima"
        return None

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {knob.name: AUTO for knob in self.knobs}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return nodes_at(graph, site, "lookup", "update")
