"""How CUDA kernels are laid out, where their heuristic is not asked."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.ir import Graph, Node, Structure
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, nodes_at

AUTO = "auto"                      # `default_shape` of csrc/cuda/program.cu


class ShapeKernels(Rewrite):
    """What belongs to a launch, and so is one setting for all tables in it. The heuristic's own values are no choices of their own.

    Small blocks end soon where bags are uneven, large ones are fewer to schedule. Loads under way hide the latency of memory, and take
    registers. Short chunks spread long bags, and rows that are used often, over more groups.
    """

    name = "kernel_shape"
    summary = "lay out launches otherwise than the CUDA kernels' heuristic: threads a block, loads under way, lookups a chunk"
    scope = "policy"
    devices = ("cuda",)
    equivalence_note = "bitwise; reassociated with chunk_lookups"
    knobs = (
        Knob("block_threads", (AUTO, 64, 128, 512), AUTO, "threads of a block of the forward; auto: 256"),
        Knob("loads_in_flight", (AUTO, 8), AUTO, "loads of rows that a lane has under way where it sums without weights; auto: 4"),
        Knob("chunk_lookups", (AUTO, 64, 128, 512, 1024), AUTO,
             "longer bags, and rows used more often, are summed in chunks of so many lookups; auto: 256"),
    )

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if knobs["loads_in_flight"] == AUTO or any(each.pooling in ("sum", "mean") and not each.weighted for each in structure.features):
            return None
        return "no lookup sums without weights, and others keep four loads under way"

    def equivalence(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str:
        return "reassociated" if knobs["chunk_lookups"] != AUTO else "bitwise"

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {knob.name: AUTO for knob in self.knobs}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return nodes_at(graph, site, "lookup", "update")
