"""Rows are asked for some lookups before they are used."""

from __future__ import annotations

from sparselift.ir import Graph, Node
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, nodes_at


class Prefetch(Rewrite):
    """A lookup's rows are scattered, so that hardware prefetchers do not see them coming, but the ids are known in advance.

    The bytes stay the same, with more of them in flight.
    """

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
