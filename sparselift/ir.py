"""The graph of one training step's sparse path, as frozen data.

`Structure` is what must hold for a plan to fit: tables, features, where their ids come from, and how results are
consumed. `Graph` adds what was seen: nodes with resources, sketches of the batches, and what could not be lifted.
Letters: B local batch, D dim, K ids of a feature, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sparselift.stats import Sketch

POOLINGS = ("sum", "mean", "none")


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
    fused_rule: str | None         # the kernel's rule ("sgd", "adagrad", "rowwise_adagrad"), or None
    reason: str = ""               # why there is no fused rule


@dataclass(frozen=True, slots=True)
class Table:
    """One embedding table (rows, dim): a parameter of the model under its native name."""

    name: str                      # as in model.named_parameters()
    rows: int
    dim: int
    dtype: str                     # "float32"
    sparse: bool                   # torch gives it a COO gradient (sparse=True), or a dense one
    optimizer: OptimizerInfo | None  # None: no optimizer holds it (frozen, or updated by hand)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.rows * self.dim * {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]


@dataclass(frozen=True, slots=True)
class Feature:
    """One lookup of a step: one call of one embedding module."""

    name: str                      # the module's path; "#1" and up appended for its second and later calls in a step
    module: str                    # path in model.named_modules()
    call: int                      # 0 for the module's first call in a step
    table: str                     # Table.name
    pooling: str                   # "sum", "mean", "none" (nn.Embedding)
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
    """A `torch.cat(parts, dim=1)` whose parts are lookups and, perhaps, other (B, n) tensors.

    `parts` holds a feature's name, or the width of another tensor at that place.
    """

    name: str
    parts: tuple[str | int, ...]

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Structure:
    """What a plan is made for. Two models with equal structures can run each other's plans."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    concats: tuple[Concat, ...]
    optimizers: tuple[str, ...]    # class names, in the workload's order
    uses: tuple[str, ...] | None   # what the loop does (Workload.uses, sorted)
    world_size: int = 1

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
            concats=tuple(Concat(c["name"], tuple(c["parts"])) for c in document["concats"]),
            optimizers=tuple(document["optimizers"]),
            uses=None if document["uses"] is None else tuple(document["uses"]),
            world_size=document["world_size"],
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
    op: str                        # "lookup", "concat", "dense", "dense_backward", "expand", "coalesce", "update", "dense_update"
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
