"""The fully connected layers of the dense part run with bias and ReLU in one pass, or in another library's matrix products."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.hardware import hardware
from sparselift.ir import Graph, Node, Structure
from sparselift.rewrites.base import Knob, Rewrite, Site, Value


class LinearLibrary(Rewrite):
    """torch multiplies float32 matrices by the BLAS that it was built with, and runs bias and ReLU as passes of their own.

    Where that BLAS is MKL, it runs at half of oneDNN's speed on processors of other makers than its own; elsewhere the passes are what
    there is to gain. None of it is the sparse path's: what it gains is reported by its own knob.
    """

    name = "linear_library"
    summary = "run the dense part's linear layers with bias and ReLU in one pass, or in another matrix library"
    scope = "policy"
    equivalence_note = "reassociated"
    devices = ("cpu",)
    knobs = (Knob("linear", ("native", "fused", "onednn_forward", "onednn"), "native",
                  "whose matrix products nn.Linear runs; fused: torch's, with bias and ReLU in one pass; onednn_forward: oneDNN's with the "
                  "ReLU, and torch's in backward"),)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if knobs["linear"] == "native" or structure.linears:
            return None
        return "the model has no torch.nn.Linear with contiguous float32 parameters on the CPU"

    def equivalence(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str:
        return "reassociated" if self.applied(knobs) else "bitwise"

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        machine = hardware()
        if machine.architecture == "x86_64" and machine.cpu.startswith("AMD"):
            return {"linear": "onednn"}
        # Where nothing else changes roundings, neither does the default.
        return {"linear": "fused" if graph.structure.interactions and graph.structure.linears else "native"}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return tuple(node for node in graph.nodes if node.op in ("dense", "dense_backward")) if graph.structure.linears else ()

    def change(self, graph: Graph, node: Node, knobs: Mapping[str, Value]) -> Node:
        """The same FLOPs; a ReLU is no call of its own, forward or backward."""
        fused = sum(linear.relu for linear in graph.structure.linears)
        return node.changed(self.name, launches=max(node.resources.launches - fused, 0))
