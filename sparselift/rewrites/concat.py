"""Lookups write straight into the buffer of the concatenation that consumes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparselift.ir import Graph, Node, Structure
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, outputs_per_batch
from sparselift.rewrites.group_tables import eligible_concats


class FuseConcat(Rewrite):
    """Saves writing pooled rows once more and reading them back, and a launch for every part."""

    name = "fuse_concat"
    summary = "write pooled rows straight into the concatenation that consumes them"
    scope = "policy"
    equivalence_note = "bitwise"
    knobs = (Knob("concat", (False, True), False, "whether grouped lookups write into the consumer's buffer",
                  requires=(("group_by", ("class", "all")),)),)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if knobs["concat"] is False or eligible_concats(structure):
            return None
        if not structure.concats:
            return "the step has no torch.cat(..., dim=1) whose parts are lookups that nothing else reads"
        return f"no part of {', '.join(concat.name for concat in structure.concats)} can be looked up before the forward, pooled and once"

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {"concat": True}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        written = {concat.features for concat in eligible_concats(graph.structure)}
        return tuple(node for node in graph.nodes if node.op == "concat" and node.features in written)

    def transform(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> Graph:
        """The concatenation copies what is no lookup, and all where it converts lookups; one with lookups alone goes away."""
        if not self.applied(knobs):
            return graph
        matched = {node.name for node in self.match(graph, site)}
        gone = {node.name: node.inputs for node in graph.nodes if node.name in matched and self._copied(graph, node) == 0}
        nodes = []
        for node in graph.nodes:
            if node.name in gone:
                continue
            inputs = tuple(dict.fromkeys(name for given in node.inputs for name in gone.get(given, (given,))))
            if node.name in matched:
                copied = self._copied(graph, node)
                converts = copied == node.resources.read_bytes
                node = node.changed(self.name, read_bytes=copied, write_bytes=node.resources.write_bytes if converts else copied)
            nodes.append(replace(node, inputs=inputs))
        return replace(graph, nodes=tuple(nodes))

    @staticmethod
    def _copied(graph: Graph, node: Node) -> int:
        """Bytes that are still read for the copy: those of the parts that are no lookups, or of all."""
        features = [graph.structure.feature(name) for name in node.features]
        concat = next(each for each in graph.structure.concats if each.features == node.features)
        if any(graph.structure.table(feature.table).dtype != concat.dtype for feature in features):
            return node.resources.read_bytes
        lookups = sum(graph.structure.table(feature.table).row_bytes * outputs_per_batch(graph, feature)
                      for feature in features)
        return max(0, round(node.resources.read_bytes - lookups))
