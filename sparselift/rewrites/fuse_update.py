"""The optimizer's update runs in one kernel with the sum of duplicate gradients, and no gradient is written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparselift.ir import Graph, Node, Structure, Table
from sparselift.kernels import cuda
from sparselift.kernels.base import COALESCE_METHODS
from sparselift.rewrites.base import (
    Knob,
    Rewrite,
    Site,
    Value,
    bag_gradient_bytes,
    lookups,
    nodes_at,
    state_row_bytes,
    tables_at,
    unique_rows,
)

_CUDA_ENTRY_BYTES, _CUDA_ORIGIN_BYTES = 12, 8      # of a lookup: key and position, which are sorted; the backward and the bag
MAX_DENSE_BYTES = 4 << 20          # of sums, beside which weights and state want room in a core's share of the caches


class FuseUpdate(Rewrite):
    """Natively a backward writes a (K, D) gradient, and an optimizer sorts, sums and reads it again.

    Fused, the update reads the (B, D) gradients of the bags. With coalesce="none" it keeps torch's order and rounding for SGD:
    w = fma(-lr, g, w), lookup by lookup.
    """

    name = "fuse_update"
    summary = "sum duplicate gradients and update rows in one kernel, in optimizer.step()"
    scope = "class"
    equivalence_note = ("reassociated; bitwise for update='native' and for coalesce='none', where a table has sparse gradients "
                        "and one lookup a step, and the loop does not clip (nor accumulate, for coalesce='none')")
    knobs = (
        Knob("update", ("native", "coalesced", "fused"), "native",
             "native: torch's optimizer gets an ordinary gradient; coalesced: one whose duplicates a kernel has summed; "
             "fused: a kernel updates rows"),
        Knob("coalesce", COALESCE_METHODS, "chain",
             "sum a row's gradients and update it once, with its lookups found by a head for every row of the table (chain) or by a "
             "sort, or with sums in a matrix of the table's shape (dense); none: SGD lookup by lookup, in id order",
             requires=(("update", ("fused",)),)),
    )

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if knobs["update"] == "native":
            return None
        for table in tables_at(structure, site):
            if table.optimizer is None:
                return f"table {table.name}: no optimizer holds it, so there is no update to fuse"
            if knobs["update"] == "coalesced":
                if not table.sparse:
                    return f"table {table.name}: its gradient is dense, so there are no duplicates to sum"
                continue
            if table.optimizer.fused_rule is None:
                return f"table {table.name}: {table.optimizer.reason or f'no fused update for {table.optimizer.kind}'}"
            if structure.device == "cuda":
                if reason := _cuda_obstacle(table, str(knobs["coalesce"])):
                    return reason
            elif knobs["coalesce"] == "dense" and 4 * table.rows * table.dim > MAX_DENSE_BYTES:
                return (f"table {table.name}: coalesce='dense' would keep sums of {4 * table.rows * table.dim:,} bytes; "
                        f"above {MAX_DENSE_BYTES:,} they leave the cache")
            if knobs["coalesce"] == "none" and table.optimizer.fused_rule != "sgd":
                return f"table {table.name}: coalesce='none' is for SGD; {table.optimizer.kind} needs the sum of a row's gradients"
            if knobs["coalesce"] == "none" and table.dtype != "float32":
                return f"table {table.name}: coalesce='none' is for float32; {table.dtype} weights would be rounded once a lookup"
        return None

    def equivalence(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str:
        # A norm over all gradients is summed in another order than torch's, and clipping scales by it. Adding up two sparse gradients,
        # torch sums some of their rows before the optimizer sees them.
        uses = structure.uses or ()
        if "clip" in uses or (knobs["update"] == "fused" and "accumulate" in uses):
            return "reassociated"
        # Autograd adds up the gradients of a shared table in its own order, and a dense gradient sums before it is ours to see.
        one_sparse_lookup = all(table.sparse and len(structure.features_of(table.name)) <= 1 for table in tables_at(structure, site))
        in_torchs_order = knobs["update"] == "native" or knobs["coalesce"] == "none"
        return "bitwise" if one_sparse_lookup and in_torchs_order else "reassociated"

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        tables = tables_at(graph.structure, site)
        if not all(table.optimizer and table.optimizer.fused_rule for table in tables):
            # torch coalesces with a comparison sort; our kernel does not.
            return {"update": "coalesced", "coalesce": "chain"}
        if graph.structure.device == "cuda":
            return {"update": "fused", "coalesce": "chain"}             # whichever suits an update
        # torch's SGD takes a sparse gradient lookup by lookup, a dense one summed. So do we, which is the faster and the exact way.
        in_turn = all(table.optimizer and table.optimizer.fused_rule == "sgd" and table.sparse and table.dtype == "float32"
                      for table in tables)
        return {"update": "fused", "coalesce": "none" if in_turn else "sort"}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return nodes_at(graph, site, "expand", "coalesce", "update")

    def transform(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> Graph:
        """Fused, expand and coalesce go away: the update reads gradients of bags instead of lookups. Coalesced, expand does."""
        if knobs["update"] != "fused":
            return self._coalesced(graph, site) if knobs["update"] == "coalesced" else graph
        gone = {node.name: node.inputs for node in self.match(graph, site) if node.op != "update"}
        updates = {node.name for node in self.match(graph, site) if node.op == "update"}
        nodes = []
        for node in graph.nodes:
            if node.name in gone:
                continue
            node = replace(node, inputs=_past(node.inputs, gone))
            nodes.append(self._fused(graph, node, str(knobs["coalesce"])) if node.name in updates else node)
        return replace(graph, nodes=tuple(nodes))

    def memory_bytes(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> int:
        """Gradients: natively (K, D) rows and ids, or (R, D) where dense; fused, those of bags, and what finds the lookups of a row."""
        total = 0.0
        for table in tables_at(graph.structure, site):
            k = lookups(graph, table.name)
            if knobs["update"] == "native":
                total += k * (8 + table.row_bytes) if table.sparse else float(table.nbytes)
            elif knobs["update"] == "coalesced":
                total += bag_gradient_bytes(graph, table.name) + _workspace_bytes(graph, table, k, "chain")
                total += unique_rows(graph, table.name) * (8 + table.row_bytes)
            else:
                total += bag_gradient_bytes(graph, table.name) + _workspace_bytes(graph, table, k, str(knobs["coalesce"]))
        return round(total)

    def _coalesced(self, graph: Graph, site: Site) -> Graph:
        """From bags' gradients to distinct rows in one kernel; torch expands them first, and for some optimizers sorts and sums."""
        summed = {table for node in nodes_at(graph, site, "coalesce") for table in node.tables}
        expand = nodes_at(graph, site, "expand")
        gone = {node.name: node.inputs for node in expand if summed.issuperset(node.tables)}
        changed = {node.name for node in (*expand, *nodes_at(graph, site, "coalesce"))} - set(gone)
        nodes = []
        for node in graph.nodes:
            if node.name in gone:
                continue
            node = replace(node, inputs=_past(node.inputs, gone))
            nodes.append(self._chained(graph, node) if node.name in changed else node)
        return replace(graph, nodes=tuple(nodes))

    def _chained(self, graph: Graph, node: Node) -> Node:
        read = write = live = 0.0
        for name in node.tables:
            table = graph.structure.table(name)
            k, u = lookups(graph, name), unique_rows(graph, name)
            links = _link_bytes(graph, table, k, u, "chain")
            read += 4 * k + links + 4 * k * table.dim
            write += links + u * (8 + table.row_bytes)
            live += bag_gradient_bytes(graph, name) + _workspace_bytes(graph, table, k, "chain") + u * (8 + table.row_bytes)
        return node.changed(self.name, read_bytes=round(read), write_bytes=round(write), live_bytes=round(live), launches=1, time_s=None)

    def _fused(self, graph: Graph, node: Node, coalesce: str) -> Node:
        read = write = live = 0.0
        for name in node.tables:
            table = graph.structure.table(name)
            k, u = lookups(graph, name), unique_rows(graph, name)
            rows = k * table.row_bytes if coalesce == "none" else u * (table.row_bytes + state_row_bytes(table))
            links = _link_bytes(graph, table, k, u, coalesce)
            read += 4 * k + links + 4 * k * table.dim + rows                   # ids, chain, the bag's gradient a lookup, rows
            write += links + rows
            live += bag_gradient_bytes(graph, name) + _workspace_bytes(graph, table, k, coalesce)
        return node.changed(self.name, read_bytes=round(read), write_bytes=round(write), live_bytes=round(live), launches=1, time_s=None)


def _cuda_obstacle(table: Table, coalesce: str) -> str | None:
    """Why the CUDA kernels do not coalesce a table's gradients so, or None."""
    if coalesce == "none":
        return f"table {table.name}: coalesce='none' needs lookups in turn, and on CUDA those of one row run at the same time"
    if coalesce == "dense" and not cuda.takes_dense(table.rows, table.dim):
        return (f"table {table.name}: coalesce='dense' takes up to {cuda.MOST_DENSE_ROWS:,} rows of {cuda.MOST_DENSE_COLUMNS:,} columns on "
                f"CUDA; got {table.rows:,} of {table.dim}")
    return None


def _workspace_bytes(graph: Graph, table: Table, lookups_per_batch: float, coalesce: str) -> float:
    """Heads and links of chains; links and what is sorted; sums. On CUDA: what is sorted, twice, and where each lookup came from."""
    if graph.structure.device == "cuda":
        return 0.0 if coalesce == "dense" else (2 * _CUDA_ENTRY_BYTES + _CUDA_ORIGIN_BYTES) * lookups_per_batch
    if coalesce == "none":
        return 0.0
    if coalesce == "dense":
        return 4 * table.rows * table.dim + table.rows / 8
    return 8 * lookups_per_batch + (4 * table.rows if coalesce == "chain" else 16 * lookups_per_batch)


def _link_bytes(graph: Graph, table: Table, k: float, u: float, coalesce: str) -> float:
    """Moved one way to bring the lookups of each row together: links and heads, an 8-byte entry a lookup and digit of 11 bits, or sums. On
    CUDA an entry and an origin a lookup, and the entry again for each digit of 8 bits; nothing where rows look for their lookups.
    """
    if graph.structure.device == "cuda":
        digits = -(-(table.rows - 1).bit_length() // 8)
        return 0.0 if coalesce == "dense" else k * (_CUDA_ENTRY_BYTES * (1 + digits) + _CUDA_ORIGIN_BYTES)
    if coalesce == "none":
        return 0.0
    if coalesce == "dense":
        return 4 * table.dim * (k + u)
    return 4 * k + 4 * u if coalesce == "chain" else 8 * k * (1 + -(-(table.rows - 1).bit_length() // 11))


def _past(inputs: tuple[str, ...], gone: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Inputs with nodes that went away replaced by what those read, through chains of them."""
    found: list[str] = []
    for name in inputs:
        found.extend(_past(gone[name], gone) if name in gone else (name,))
    return tuple(dict.fromkeys(found))
