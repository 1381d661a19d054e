"""The graph of one training step's sparse path, as frozen data.

`Structure` is what must hold for a plan to fit: tables, features, where their ids come from, and how results are
consumed. `Graph` adds what was seen: nodes with resources, sketches of the batches, and what could not be lifted.
Letters: B local batch, D dim, K ids of a feature, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sparselift.errors import MissingExtraError
from sparselift.stats import Sketch

POOLINGS = ("sum", "mean", "max", "none")
FORMS = ("offsets", "matrix", "ids")
INDEX_DTYPES = ("int64", "int32")
DEVICES = ("cpu", "cuda")          # kinds that a plan may be for
TABLE_DTYPES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}       # bytes of an element


@dataclass(frozen=True, slots=True)
class InputPath:
    """Where a tensor is found among the arguments of the root module's forward.

    `keys` walk from (args, kwargs): ("args", 1, 3) is args[1][3], ("kwargs", "sparse", "ids") is kwargs["sparse"]["ids"].
    A key on an object that is no container is an attribute name. `select` = (dim, index) means `.select(dim, index)` of that tensor
    (the ids are a column or row of a larger input).
    """

    keys: tuple[str | int, ...]
    select: tuple[int, int] | None = None

    def fetch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What is at this path. Raises LookupError, AttributeError or TypeError where there is nothing."""
        value: Any = args if self.keys[0] == "args" else kwargs
        for key in self.keys[1:]:
            value = getattr(value, key) if isinstance(key, str) and not isinstance(value, Mapping) else value[key]
        return value.select(*self.select) if self.select else value

    def __str__(self) -> str:
        text = "".join(f"[{k!r}]" if i else str(k) for i, k in enumerate(self.keys))
        return text + (f".select{self.select}" if self.select else "")


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """The optimizer of some tables."""

    index: int                     # position in the workload's sequence of optimizers
    kind: str                      # class name: "SGD", "Adagrad", "RowWiseAdagrad", ...
    fused_rule: str | None         # the kernel's rule ("sgd", "adagrad", "rowwise_adagrad", "adam"), or None
    reason: str = ""               # why there is no fused rule


@dataclass(frozen=True, slots=True)
class Table:
    """One embedding table (rows, dim): a parameter of the model under its native name."""

    name: str                      # as in model.named_parameters()
    rows: int
    dim: int
    dtype: str                     # "float32"; of its rows when looked up, of their gradients and of its own
    sparse: bool                   # torch gives it a COO gradient (sparse=True), or a dense one
    optimizer: OptimizerInfo | None  # None: no optimizer holds it (frozen, or updated by hand)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of weights, of pooled rows or of a gradient."""
        return self.dim * TABLE_DTYPES[self.dtype]

    @property
    def state_itemsize(self) -> int:
        """Bytes of a number that its optimizer keeps: torch has them in the table's dtype, and kernels take float32 ones."""
        return 4 if self.optimizer is not None and self.optimizer.fused_rule else TABLE_DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Feature:
    """One lookup of a step: one call of one embedding module."""

    name: str                      # the module's path; "#1" and up appended for its second and later calls in a step
    module: str                    # path in model.named_modules()
    call: int                      # 0 for the module's first call in a step
    table: str                     # Table.name
    pooling: str                   # "sum", "mean", "max", "none" (nn.Embedding)
    padding_idx: int | None
    include_last_offset: bool
    form: str                      # "offsets" (1-D ids and offsets), "matrix" ((B, L) ids into an EmbeddingBag), "ids" (nn.Embedding)
    weighted: bool
    index_dtype: str               # "int64" or "int32"
    indices: InputPath | None      # None: computed inside the model, so this lookup runs where it stands
    offsets: InputPath | None
    weights: InputPath | None      # per-sample weights

    @property
    def from_inputs(self) -> bool:
        """Whether everything that the lookup reads is an input of the root forward, so that the prelude can run it."""
        return (self.indices is not None and (self.offsets is not None) == (self.form == "offsets")
                and (self.weights is not None) == self.weighted)


@dataclass(frozen=True, slots=True)
class Concat:
    """A `torch.cat(parts, dim=1)` whose parts are lookups of one dtype and, perhaps, other (B, n) tensors.

    `parts` holds a feature's name, or the width of another tensor at that place. Those have the dtype of the result, to which torch
    converts narrower lookups.
    """

    name: str
    parts: tuple[str | int, ...]
    dtype: str = "float32"         # of the result

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Interaction:
    """Dot products of all pairs of the parts of a concat, which are (B, D) vectors, written behind one of the parts:
    `torch.cat([part, torch.bmm(v, v.transpose(1, 2))[:, i, j]], dim=1)` of `v = concat.view(B, -1, D)`.
    """

    name: str
    concat: str
    passed: int                    # place in the concat of the part that they are written behind; it is no lookup
    order: str                     # "lower" or "upper" triangle of the products, row by row
    diagonal: bool                 # whether products of a vector with itself are among them


@dataclass(frozen=True, slots=True)
class Linear:
    """A torch.nn.Linear of the dense part that another matrix library could run."""

    name: str                      # the module's path
    in_features: int
    out_features: int
    relu: bool                     # a torch.nn.ReLU follows it in a torch.nn.Sequential


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A module without lookups, not part of another one, that a compiler could take as one graph."""

    name: str                      # its path
    parameters: int                # elements of all of them


@dataclass(frozen=True, slots=True)
class Structure:
    """What a plan is made for. Two models with equal structures can run each other's plans."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    concats: tuple[Concat, ...]
    optimizers: tuple[str, ...]    # class names, in the workload's order
    uses: tuple[str, ...] | None   # what the loop does (Workload.uses, sorted)
    world_size: int = 1
    interactions: tuple[Interaction, ...] = ()
    linears: tuple[Linear, ...] = ()
    dense_modules: tuple[DenseModule, ...] = ()
    device: str = "cpu"            # the kind, one of DEVICES, of the one that all tables are on
    in_batch: tuple[str, ...] = ()  # features whose tensors Workload.inputs gives of every batch, the very ones

    def table(self, name: str) -> Table:
        """Raises KeyError with the known names."""
        return _named(self.tables, name, "table")

    def feature(self, name: str) -> Feature:
        """Raises KeyError with the known names."""
        return _named(self.features, name, "feature")

    def features_of(self, table: str) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.table == table)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return _plain(asdict(self))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Structure:
        """Inverse of `to_dict`. Raises KeyError, TypeError or ValueError for a document of another shape."""
        return cls(
            tables=tuple(Table(**{**t, "optimizer": OptimizerInfo(**t["optimizer"]) if t["optimizer"] else None})
                         for t in document["tables"]),
            features=tuple(Feature(**{**f, **{key: _path(f[key]) for key in ("indices", "offsets", "weights")}})
                           for f in document["features"]),
            concats=tuple(Concat(c["name"], tuple(c["parts"]), c["dtype"]) for c in document["concats"]),
            optimizers=tuple(document["optimizers"]),
            uses=None if document["uses"] is None else tuple(document["uses"]),
            world_size=document["world_size"],
            interactions=tuple(Interaction(**each) for each in document["interactions"]),
            linears=tuple(Linear(**each) for each in document["linears"]),
            dense_modules=tuple(DenseModule(**each) for each in document["dense_modules"]),
            device=document["device"],
            in_batch=tuple(document["in_batch"]),
        )


@dataclass(frozen=True, slots=True)
class Resources:
    """What one execution of a node needs."""

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    wire_bytes: int = 0            # sent by this rank
    live_bytes: int = 0            # memory held while the node runs, its outputs included
    launches: int = 1              # separate calls into torch or a kernel library
    engine: str = "cpu"            # what the node occupies
    time_s: float | None = None    # measured in the recorded step, where it was

    @property
    def traffic_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of the training step."""

    name: str
    op: str                        # "lookup", "concat", "interaction", "dense", "dense_backward", "interaction_backward", "expand",
                                   # "coalesce", "update", "dense_update"
    phase: str                     # "forward", "backward", "update"
    inputs: tuple[str, ...] = ()   # names of nodes
    tables: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    resources: Resources = field(default_factory=Resources)
    rewrites: tuple[str, ...] = ()  # what changed it, in order

    def changed(self, rewrite: str, **resources: Any) -> Node:
        """This node after a rewrite, with some resources replaced."""
        return replace(self, resources=replace(self.resources, **resources), rewrites=(*self.rewrites, rewrite))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A module that was not lifted, or a rewrite that does not apply: where, why, and the smallest change that would help."""

    where: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" ({self.remedy})" if self.remedy else "")


@dataclass(frozen=True, slots=True)
class Graph:
    """The training step of a workload, lifted."""

    workload: str
    structure: Structure
    nodes: tuple[Node, ...]
    sketches: Mapping[str, Sketch]  # by feature name
    refusals: tuple[Refusal, ...]
    batch_size: int                # B of the recorded batch
    frontends: Mapping[str, str] = field(default_factory=dict)  # what saw the step, or why not: {"record": "8 forwards", "fx": "..."}
    notes: Mapping[str, str] = field(default_factory=dict)      # remarks on what was lifted, by module or feature

    def __str__(self) -> str:
        """The graph for people: tables (those that look alike in one line, where there are many), the step, and what was refused."""
        return "\n\n".join("\n".join(part) for part in (_header(self), _tables_text(self), _step_text(self), _refused_text(self)) if part)

    def explain(self) -> str:
        """Every embedding module: how it was lifted, or why not."""
        lines = [line for feature in self.structure.features for line in _feature_text(self, feature)]
        lifted = {name for feature in self.structure.features for name in (feature.name, feature.module)}
        lines += [f"{name}: {note}" for name, note in self.notes.items() if name not in lifted]
        if self.refusals:
            lines += ["", "not lifted:", *(f"  {refusal}" for refusal in self.refusals)]
        lines += ["", "seen by:", *(f"  {name}: {what}" for name, what in self.frontends.items())]
        return "\n".join(lines)

    def to_pandas(self) -> Any:
        """A DataFrame of the nodes, one row each, with a column for every resource. Raises MissingExtraError without pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("Graph.to_pandas needs pandas: pip install 'sparselift[report]'") from error
        return pd.DataFrame([{
            "name": node.name, "op": node.op, "phase": node.phase, "inputs": ", ".join(node.inputs), "tables": ", ".join(node.tables),
            "features": ", ".join(node.features), **asdict(node.resources), "rewrites": ", ".join(node.rewrites)} for node in self.nodes])


def _named(items: tuple[Any, ...], name: str, kind: str) -> Any:
    for item in items:
        if item.name == name:
            return item
    raise KeyError(f"no {kind} {name!r}; there are {[item.name for item in items]}")


def _path(document: Mapping[str, Any] | None) -> InputPath | None:
    if document is None:
        return None
    return InputPath(tuple(document["keys"]), tuple(document["select"]) if document["select"] else None)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


# Text.

_MAX_TABLE_LINES = 40              # up to so many tables get a line each
_MAX_REFUSAL_LINES = 12
_OPS = {"lookup": "lookups", "concat": "concatenations", "interaction": "interaction", "interaction_backward": "interaction",
        "dense": "dense part", "dense_backward": "dense part", "expand": "table gradients",
        "coalesce": "duplicates summed", "update": "table updates", "dense_update": "dense updates"}


def _header(graph: Graph) -> list[str]:
    structure = graph.structure
    rows, nbytes = sum(table.rows for table in structure.tables), sum(table.nbytes for table in structure.tables)
    early = sum(feature.from_inputs for feature in structure.features)
    lines = [f"{graph.workload}: {_count(len(structure.tables), 'table')}, {rows:,} rows, {_size(nbytes)}; batch {graph.batch_size:,}; "
             f"{' and '.join(structure.optimizers)}",
             f"{_count(len(structure.features), 'lookup')} a step, {early if early < len(structure.features) else 'all'} of them with ids "
             f"from the arguments of the forward"]
    for concat in structure.concats:
        others = [part for part in concat.parts if isinstance(part, int)]
        beside = f" beside {_count(len(others), 'other part')} ({sum(others)} columns)" if others else ""
        lines.append(f"{concat.name} joins {_count(len(concat.features), 'lookup')}{beside}")
    for each in structure.interactions:
        lines.append(f"{each.name} multiplies the parts of {each.concat} pair by pair")
    return lines


def _tables_text(graph: Graph) -> list[str]:
    groups: dict[Any, list[Table]] = {}
    many = len(graph.structure.tables) > _MAX_TABLE_LINES
    for table in graph.structure.tables:
        groups.setdefault(_looks(graph, table) if many else table.name, []).append(table)
    cells: list[tuple[str, ...]] = [("table", "rows", "dim", "size", "pooling", "ids a bag", "ids a batch", "distinct", "update")]
    cells += [_table_cells(graph, tables) for tables in groups.values()]
    return _columns(cells, left=(0, 4, 8))


def _looks(graph: Graph, table: Table) -> tuple[Any, ...]:
    """Tables with equal looks share a line: same kind, rows within a factor of 8, ids a bag within 2, duplicates within a quarter."""
    sketch = _table_sketch(graph, table)
    poolings = {feature.pooling for feature in graph.structure.features_of(table.name)}
    return (table.dim, table.dtype, table.sparse, table.optimizer, tuple(sorted(poolings)), table.rows.bit_length() // 3,
            round(sketch.pooling).bit_length(), int(4 * sketch.duplicate_ratio))


def _table_cells(graph: Graph, tables: list[Table]) -> tuple[str, ...]:
    features = [feature for table in tables for feature in graph.structure.features_of(table.name)]
    seen = [graph.sketches[feature.name] for feature in features if feature.name in graph.sketches]
    ids = sum(sketch.lookups_per_batch for sketch in seen)
    named = ids - sum(sketch.padding / sketch.batches for sketch in seen if sketch.batches)
    name = tables[0].name if len(tables) == 1 else f"{tables[0].name} and {len(tables) - 1:,} like it"
    pooling = "+".join(sorted({feature.pooling for feature in features})) + (" weighted" if any(f.weighted for f in features) else "")
    return (name, _span([table.rows for table in tables]), str(tables[0].dim), _size(sum(table.nbytes for table in tables)),
            pooling + (f" x{len(features)}" if len(features) > len(tables) else ""), _span([round(sketch.pooling, 1) for sketch in seen]),
            f"{ids:,.0f}", f"{sum(sketch.unique_per_batch for sketch in seen) / named:.0%}" if named else "", _update_text(tables[0]))


def _table_sketch(graph: Graph, table: Table) -> Sketch:
    """Of all lookups into the table, each counted as a batch of its own."""
    total = Sketch.empty()
    for feature in graph.structure.features_of(table.name):
        total = total.merge(graph.sketches.get(feature.name, Sketch.empty()))
    return total


def _update_text(table: Table) -> str:
    if table.optimizer is None:
        return "by no optimizer"
    return f"{table.optimizer.kind}{'' if table.optimizer.fused_rule else ', native only'}{'' if table.sparse else ', dense gradient'}"


def _step_text(graph: Graph) -> list[str]:
    """One line for all nodes of a kind."""
    kinds: dict[tuple[str, str], list[Resources]] = {}
    for node in graph.nodes:
        kinds.setdefault((node.phase, node.op), []).append(node.resources)
    cells: list[tuple[str, ...]] = [("a step", "", "calls", "read", "written", "FLOPs", "measured")]
    phase = ""
    for (here, op), found in kinds.items():
        times = [each.time_s for each in found if each.time_s is not None]
        traffic = [sum(each.read_bytes for each in found), sum(each.write_bytes for each in found)]
        cells.append((here if here != phase else "", _OPS.get(op, op), f"{sum(each.launches for each in found):,}",
                      *(_size(nbytes) if nbytes else "" for nbytes in traffic), _flops(sum(each.flops for each in found)),
                      f"{sum(times) * 1e3:,.2f} ms" if times else ""))
        phase = here
    return _columns(cells, left=(0, 1))


def _refused_text(graph: Graph) -> list[str]:
    if not graph.refusals:
        return []
    shown = [f"  {refusal}" for refusal in graph.refusals[:_MAX_REFUSAL_LINES]]
    rest = len(graph.refusals) - len(shown)
    return ["not lifted:", *shown, *([f"  and {rest} more; explain() names them"] if rest else [])]


def _feature_text(graph: Graph, feature: Feature) -> list[str]:
    table = graph.structure.table(feature.table)
    ids = f"{feature.index_dtype} ids {feature.indices or 'computed inside the model'}"
    offsets = f", offsets {feature.offsets or 'computed inside the model'}" if feature.form == "offsets" else ""
    weights = f", weights {feature.weights or 'computed inside the model'}" if feature.weighted else ""
    pooling = "rows of" if feature.pooling == "none" else f"{feature.pooling} over bags of"
    lines = [f"{feature.name}: lifted; {pooling} {table.name} ({table.rows:,} x {table.dim}); {ids}{offsets}{weights}"]
    info = table.optimizer
    if info is None:
        lines.append("  no optimizer updates its table")
    elif info.fused_rule is None:
        lines.append(f"  its table is updated by torch's {info.kind}: {info.reason}")
    lines += [f"  {note}" for name, note in graph.notes.items() if name in (feature.name, feature.module)]
    return lines


def _columns(rows: list[tuple[str, ...]], left: tuple[int, ...]) -> list[str]:
    """Aligned text; the columns in `left` to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if column in left else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]


def _span(values: Sequence[float]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _size(nbytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes:,.0f} B"


def _flops(count: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}" if count else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
