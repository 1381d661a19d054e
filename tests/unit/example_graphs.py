"""Small graphs built by hand, as a lift would give them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparselift.ir import Concat, Feature, Graph, InputPath, Node, OptimizerInfo, Resources, Structure, Table
from sparselift.stats import Sketch, sketch

SGD = OptimizerInfo(0, "SGD", "sgd")
ADAGRAD = OptimizerInfo(0, "Adagrad", "adagrad")
MOMENTUM = OptimizerInfo(0, "SGD", None, "SGD with momentum=0.9 moves rows that no id names")


def table(name: str, rows: int, dim: int = 16, sparse: bool = True, optimizer: OptimizerInfo | None = SGD) -> Table:
    return Table(name, rows, dim, "float32", sparse, optimizer)


def feature(name: str, table: str, pooling: str = "sum", from_inputs: bool = True, weighted: bool = False, call: int = 0) -> Feature:
    path = InputPath(("args", 2, call)) if from_inputs else None
    form = "ids" if pooling == "none" else "offsets"
    return Feature(name, name.partition("#")[0], call, table, pooling, None, False, form, weighted, "int64", path,
                   path if form == "offsets" else None, path if weighted else None)


def batch_sketch(rows: int, bags: int = 64, pooling: int = 4, distinct: int | None = None) -> Sketch:
    """One batch of `bags` bags of `pooling` ids, `distinct` different ones (as many as there can be, if not given)."""
    k = bags * pooling
    return sketch(np.arange(k) % min(rows, distinct or k), np.full(bags, pooling), rows)


def graph(tables: list[Table], features: list[Feature], concats: tuple[Concat, ...] = (), sketches: dict[str, Sketch] | None = None,
          uses: tuple[str, ...] | None = None) -> Graph:
    """A step with a node a lookup, the concatenations, one dense block, and native backward and update nodes a table."""
    optimizers = tuple(dict.fromkeys(t.optimizer.kind for t in tables if t.optimizer)) or ("SGD",)
    structure = Structure(tuple(tables), tuple(features), concats, optimizers, uses)
    sketches = {f.name: batch_sketch(structure.table(f.table).rows) for f in features} | (sketches or {})
    nodes = [Node(f"lookup:{f.name}", "lookup", "forward", (), (f.table,), (f.name,),
                  Resources(read_bytes=round(sketches[f.name].lookups_per_batch * (8 + 4 * structure.table(f.table).dim)),
                            write_bytes=round(sketches[f.name].bags_per_batch * 4 * structure.table(f.table).dim)))
             for f in features]
    for c in concats:
        width = sum(part if isinstance(part, int) else structure.table(structure.feature(part).table).dim for part in c.parts)
        nodes.append(Node(f"concat:{c.name}", "concat", "forward", tuple(f"lookup:{name}" for name in c.features), (), c.features,
                          Resources(read_bytes=4 * 64 * width, write_bytes=4 * 64 * width)))
    nodes.append(Node("dense", "dense", "forward", tuple(n.name for n in nodes[-1:]), resources=Resources(flops=1000, time_s=1e-3)))
    nodes.append(Node("dense_backward", "dense_backward", "backward", ("dense",), resources=Resources(flops=2000, time_s=2e-3)))
    for t in tables:
        k = sum(sketches[f.name].lookups_per_batch for f in structure.features_of(t.name))
        nodes.append(Node(f"expand:{t.name}", "expand", "backward", ("dense_backward",), (t.name,),
                          resources=Resources(write_bytes=round(k * (8 + 4 * t.dim)))))
        nodes.append(Node(f"coalesce:{t.name}", "coalesce", "backward", (f"expand:{t.name}",), (t.name,),
                          resources=Resources(read_bytes=round(k * (8 + 4 * t.dim)))))
        nodes.append(Node(f"update:{t.name}", "update", "update", (f"coalesce:{t.name}",), (t.name,),
                          resources=Resources(read_bytes=round(k * 4 * t.dim), write_bytes=round(k * 4 * t.dim))))
    return Graph("example", structure, tuple(nodes), sketches, (), 64)


def small_graph(optimizer: OptimizerInfo | None = SGD, sparse: bool = True, uses: tuple[str, ...] | None = None) -> Graph:
    """Three tables, the last one large; a concatenation of the first two lookups behind 8 other columns, and a lookup by itself."""
    names = ("bags.0", "bags.1", "big")
    tables = [table(f"{name}.weight", rows, 16, sparse, optimizer) for name, rows in zip(names, (100, 200, 2_000_000), strict=True)]
    features = [feature(name, f"{name}.weight") for name in names]
    return graph(tables, features, (Concat("cat", (8, "bags.1", "bags.0")),), uses=uses)


def on_cuda(g: Graph) -> Graph:
    """The same step with its tables on a CUDA device."""
    return replace(g, structure=replace(g.structure, device="cuda"))
