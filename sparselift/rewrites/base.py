"""What a rewrite is: a change to how the sparse path runs that leaves what it computes alone, up to a stated class of rounding.

Search space, legality messages, runtime schedules and documentation all come from these objects, so that a choice that is
not implemented, or not legal, is never proposed. Letters: B bags of a feature, D columns, K ids of a feature, U distinct rows, R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from sparselift.ir import DEVICES, Feature, Graph, Node, Structure, Table
from sparselift.stats import Sketch

Value = str | int | bool

EQUIVALENCES = ("bitwise", "reassociated", "lossy", "stale")
SCOPES = ("policy", "class")


def weakest(classes: Iterable[str]) -> str:
    """The class of several rewrites together; "bitwise" for none. Raises ValueError for an unknown class."""
    found = list(classes)
    if unknown := sorted(set(found) - set(EQUIVALENCES)):
        raise ValueError(f"equivalence classes are {list(EQUIVALENCES)}; got {unknown}")
    return EQUIVALENCES[max(map(EQUIVALENCES.index, found), default=0)]


def same(a: object, b: object) -> bool:
    """Equality that tells False from 0 and True from 1, as JSON does."""
    return type(a) is type(b) and a == b


@dataclass(frozen=True, slots=True)
class Knob:
    """One choice that a rewrite leaves open.

    Attributes
    ----------
    name      unique over all rewrites
    choices   every implemented value
    off       the choice that leaves the native way; also the value of a knob that has no effect
    about     one line for people
    requires  (knob, values): it has an effect only where each of these knobs has one of these values
    """

    name: str
    choices: tuple[Value, ...]
    off: Value
    about: str
    requires: tuple[tuple[str, tuple[Value, ...]], ...] = ()

    def holds(self, value: object) -> bool:
        return any(same(value, choice) for choice in self.choices)

    def active(self, knobs: Mapping[str, Value]) -> bool:
        """Whether the knob has an effect beside these values. A required knob that is not among them counts as met."""
        return all(name not in knobs or any(same(knobs[name], value) for value in values) for name, values in self.requires)


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Tables that are treated alike."""

    name: str
    tables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """Where a rewrite is applied: the whole step (policy scope, all size classes) or one size class."""

    name: str
    classes: tuple[SizeClass, ...]

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(table for size_class in self.classes for table in size_class.tables)


class Rewrite(ABC):
    """One rewrite. `knobs` arguments of methods map knob names to values: all of the policy's and, at a class, all of the class's.

    A rewrite has no state, never mutates what it is given, and may be used from any thread.
    """

    name: ClassVar[str]
    summary: ClassVar[str]             # one line for people
    scope: ClassVar[str]               # "policy": one setting for the step; "class": one a size class
    equivalence_note: ClassVar[str]    # which choice has which class, for people
    knobs: ClassVar[tuple[Knob, ...]]
    devices: ClassVar[tuple[str, ...]] = DEVICES     # kinds on which it does anything

    def legal(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        """Why these choices would be wrong or pointless at this site, or None. `Knob.requires` is checked elsewhere."""
        if structure.device not in self.devices and self.applied(knobs):
            return f"{self.name} is for tables on {' or '.join(self.devices)}, and these are on {structure.device}"
        return self.obstacle(structure, site, knobs)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        """What `legal` says on a device that the rewrite is for."""
        return None

    def equivalence(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str:
        """How results relate to native torch's on real values: one of `EQUIVALENCES`."""
        return "bitwise"

    @abstractmethod
    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        """The choice of every knob of this rewrite that is best by rule of thumb, were all of them legal."""

    @abstractmethod
    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        """The nodes that `transform` would change or take away."""

    def transform(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> Graph:
        """The graph after these choices: `change` made to what `match` finds. With every knob off it is `graph`."""
        if not self.applied(knobs):
            return graph
        matched = {node.name for node in self.match(graph, site)}
        return with_nodes(graph, lambda node: self.change(graph, node, knobs) if node.name in matched else node)

    def change(self, graph: Graph, node: Node, knobs: Mapping[str, Value]) -> Node:
        """A matched node after these choices. This one is marked, with the bytes that it had."""
        return node.changed(self.name)

    def memory_bytes(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> int:
        """Memory that these choices hold beyond weights, optimizer state, ids and pooled rows."""
        return 0

    def setup_s(self, structure: Structure, site: Site, knobs: Mapping[str, Value], first: bool) -> float:
        """Seconds, about, that these choices take in every process before their first step. `first`: of all configs there; others may
        share what it has set up.
        """
        return 0.0

    def applied(self, knobs: Mapping[str, Value]) -> bool:
        """Whether any knob is away from the native way."""
        return any(not same(knobs[knob.name], knob.off) for knob in self.knobs)

    def combinations(self) -> tuple[dict[str, Value], ...]:
        """Every distinct setting of this rewrite's own knobs, with knobs that have no effect at their off value."""
        found: list[dict[str, Value]] = []
        for values in product(*(knob.choices for knob in self.knobs)):
            setting = dict(zip((knob.name for knob in self.knobs), values, strict=True))
            if all(knob.active(setting) or same(setting[knob.name], knob.off) for knob in self.knobs):
                found.append(setting)
        return tuple(found)


def features_at(structure: Structure, site: Site) -> tuple[Feature, ...]:
    """Features that look into the site's tables, in the structure's order."""
    tables = set(site.tables)
    return tuple(feature for feature in structure.features if feature.table in tables)


def tables_at(structure: Structure, site: Site) -> tuple[Table, ...]:
    """The site's tables, in the structure's order."""
    names = set(site.tables)
    return tuple(table for table in structure.tables if table.name in names)


def nodes_at(graph: Graph, site: Site, *ops: str) -> tuple[Node, ...]:
    """Nodes of these kinds that work on the site's tables alone."""
    tables = set(site.tables)
    return tuple(node for node in graph.nodes if node.op in ops and node.tables and tables.issuperset(node.tables))


def with_nodes(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    """The graph with `change` applied to every node."""
    return replace(graph, nodes=tuple(map(change, graph.nodes)))


def sketch_of(graph: Graph, feature: str) -> Sketch:
    """The feature's sketch, an empty one where no batch was seen."""
    return graph.sketches.get(feature) or Sketch.empty()


def lookups(graph: Graph, table: str) -> float:
    """Mean ids a batch of all lookups into a table."""
    return sum(sketch_of(graph, feature.name).lookups_per_batch for feature in graph.structure.features_of(table))


def unique_rows(graph: Graph, table: str) -> float:
    """Mean distinct rows a batch, at most: rows that two features share are counted twice, up to the size of the table."""
    total = sum(sketch_of(graph, feature.name).unique_per_batch for feature in graph.structure.features_of(table))
    return min(total, graph.structure.table(table).rows)


def bag_gradient_bytes(graph: Graph, table: str) -> float:
    """Bytes of the gradients of a table's lookups as kernels take them: float32 (B, D) a feature, (K, D) without pooling."""
    dim = graph.structure.table(table).dim
    return sum(4 * dim * outputs_per_batch(graph, feature) for feature in graph.structure.features_of(table))


def outputs_per_batch(graph: Graph, feature: Feature) -> float:
    """Mean output rows of a feature a batch: its bags, or its ids without pooling."""
    sketch = sketch_of(graph, feature.name)
    return sketch.lookups_per_batch if feature.pooling == "none" else sketch.bags_per_batch


def state_row_bytes(table: Table) -> int:
    """Bytes of optimizer state that an update of one row reads and writes. An optimizer that we do not know counts as stateless."""
    kind = table.optimizer.kind if table.optimizer else ""
    return table.state_itemsize * {"Adagrad": table.dim, "RowWiseAdagrad": 1, "SparseAdam": 2 * table.dim}.get(kind, 0)
