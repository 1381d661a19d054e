"""The dot products of a concat's parts are made in one kernel, where the layer that reads them wants them."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.ir import Graph, Interaction, Node, Structure
from sparselift.rewrites.base import Knob, Rewrite, Site, Value
from sparselift.rewrites.group_tables import eligible_concats

_OPS = ("interaction", "interaction_backward")


class FuseInteraction(Rewrite):
    """torch makes all V x V products, picks half of them, copies them behind the dense vector, and in backward scatters them back."""

    name = "fuse_interaction"
    summary = "make the dot products of all pairs of lookups in one kernel, straight into the next layer's input"
    scope = "policy"
    equivalence_note = "reassociated"
    knobs = (Knob("interaction", (False, True), False, "whether pairs of vectors are multiplied by our kernel",
                  requires=(("concat", (True,)),)),)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if knobs["interaction"] is False or eligible_interactions(structure):
            return None
        if not structure.interactions:
            return ("the step has no torch.cat([part, torch.bmm(v, v.transpose(1, 2))[:, i, j]], dim=1) of a concatenation of lookups, "
                    "with i and j one triangle row by row")
        concats = {each.name: each for each in structure.concats}
        for each in structure.interactions:
            if concats[each.concat].dtype != "float32":
                return f"the kernel multiplies float32 vectors, and those of {each.name} are {concats[each.concat].dtype}"
        return f"{', '.join(each.concat for each in structure.interactions)} cannot be written by lookups before the forward"

    def equivalence(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str:
        return "reassociated" if self.applied(knobs) else "bitwise"

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {"interaction": True}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        names = {each.name for each in eligible_interactions(graph.structure)}
        return tuple(node for node in graph.nodes if node.op in _OPS and node.name.removesuffix("_backward") in names)

    def change(self, graph: Graph, node: Node, knobs: Mapping[str, Value]) -> Node:
        """Vectors are read once and products written once, each way; the V x V products are nowhere."""
        interaction = next(each for each in graph.structure.interactions if each.name == node.name.removesuffix("_backward"))
        concat = next(each for each in graph.structure.concats if each.name == interaction.concat)
        dim = graph.structure.table(graph.structure.feature(concat.features[0]).table).dim
        count = len(concat.parts)
        pairs = count * (count - 1) // 2 + count * interaction.diagonal
        batch = round(sum(graph.sketches[name].bags_per_batch for name in concat.features[:1]))
        vectors, out = 4 * batch * count * dim, 4 * batch * (dim + pairs)
        forward = node.op == "interaction"
        return node.changed(
            self.name, flops=2 * batch * dim * (pairs if forward else count * count), launches=1, time_s=None, live_bytes=vectors + out,
            read_bytes=vectors if forward else vectors + out, write_bytes=out if forward else vectors)


def eligible_interactions(structure: Structure) -> tuple[Interaction, ...]:
    """Those of float32 concatenations that lookups may write into."""
    concats = {concat.name for concat in eligible_concats(structure) if concat.dtype == "float32"}
    return tuple(each for each in structure.interactions if each.concat in concats)
