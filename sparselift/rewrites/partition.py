"""How the lookups of one call are split among threads."""

from __future__ import annotations

from sparselift.ir import Graph, Node
from sparselift.kernels.base import PARTITIONS
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, nodes_at


class Partition(Rewrite):
    """By bag, threads share the reads of every table; by table, a small table stays in one core's cache.

    Either way one thread pools a bag, in id order, and moves the same bytes.
    """

    name = "partition"
    summary = "split a call's lookups among threads by bag or by table"
    scope = "class"
    equivalence_note = "bitwise"
    devices = ("cpu",)
    knobs = (Knob("partition", PARTITIONS, "bag", "what a thread takes at a time in the forward: a range of bags, or a table"),)

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {"partition": "bag"}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return nodes_at(graph, site, "lookup")
