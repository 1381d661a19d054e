"""The modules without lookups, or the whole forward, are compiled by torch's own compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from sparselift.ir import Graph, Node, Structure
from sparselift.rewrites.base import Knob, Rewrite, Site, Value

# On two cores, of an MLP of four layers, forward and backward: starting the compiler once, and each module.
_START_S, _MODULE_S = 10.0, 8.0


class CompileDense(Rewrite):
    """torch runs activations, normalisation, dropout and the sums of biases one after the other, each from memory to memory.

    A compiled graph fuses them; its matrix products are torch's. None of it is the sparse path's: what it gains is reported by its own
    knob. A graph of the whole forward has the lookups as nodes, grouped as the schedule groups them, and fuses what lies between modules,
    for which it gives up their concatenation in place and the interaction's kernel. What the compiler fuses, and so what is left of the
    traffic, shows only when it has run: nodes are marked, and keep their bytes.
    """

    name = "compile_dense"
    summary = "compile the modules without lookups with torch.compile, a graph each, or the whole forward as one, lookups included"
    scope = "policy"
    equivalence_note = "reassociated"
    devices = ("cpu",)
    knobs = (Knob("compile", ("eager", "inductor", "inductor_graph"), "eager",
                  "whose kernels run the modules without lookups in training, or all that is no lookup",
                  requires=(("linear", ("native",)),)),)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if knobs["compile"] == "eager":
            return None
        if not structure.dense_modules:
            return "the model has no module of several layers without lookups on the CPU"
        if halves := [table for table in structure.tables if table.dtype != "float32"] if knobs["compile"] == "inductor_graph" else []:
            return f"table {halves[0].name}: {halves[0].dtype} tables are looked up outside of graphs"
        if shutil.which(compiler()) is None:
            return f"torch.compile needs a C++ compiler, and there is no {compiler()!r} (the environment variable CXX names another)"
        return None

    def equivalence(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str:
        return "reassociated" if self.applied(knobs) else "bitwise"

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {"compile": "eager"}          # a gain that only measuring tells, for seconds that every training run pays

    def setup_s(self, structure: Structure, site: Site, knobs: Mapping[str, Value], first: bool) -> float:
        modules_s, start_s = _MODULE_S * len(structure.dense_modules), _START_S if first else 0.0
        if knobs["compile"] == "inductor_graph":               # a graph with lookups is its config's alone
            return start_s + _MODULE_S + modules_s
        return start_s + modules_s if self.applied(knobs) and first else 0.0

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return tuple(node for node in graph.nodes if node.op in ("dense", "dense_backward")) if graph.structure.dense_modules else ()


def compiler() -> str:
    """The C++ compiler that torch.compile calls."""
    return os.environ.get("CXX", "g++")
