"""Rows are asked for some lookups before they are used."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.ir import Graph, Node
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, nodes_at, with_nodes


class Prefetch(Rewrite):
    """A lookup's rows are scattered, so that hardware prefetchers do not see them coming, but the ids are known in advance."""

    name = "prefetch"
    summary = "prefetch rows a fixed number of lookups ahead of their use"
    scope = "class"
    equivalence_note = "bitwise"
    devices = ("cpu",)
    knobs = (Knob("prefetch", (0, 8, 32, 64, 128), 0, "rows ahead of use to prefetch; 0 is off"),)

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {"prefetch": 64}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return nodes_at(graph, site, "lookup", "update")

    def transform(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> Graph:
        """Marks nodes: the same bytes, with more of them in flight."""
        if not self.applied(knobs):
            return graph
        matched = {node.name for node in self.match(graph, site)}
        return with_nodes(graph, lambda node: node.changed(self.name) if node.name in matched else node)
