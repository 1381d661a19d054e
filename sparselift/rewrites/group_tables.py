"""One fused call for the lookups of many tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sparselift.ir import Concat, Graph, Node, Structure
from sparselift.rewrites.base import Knob, Rewrite, Site, SizeClass, Value, nodes_at, with_nodes


class LookupGroup(NamedTuple):
    """Lookups of one call; `prelude` and `concat` as in schedule.GroupSchedule."""

    features: tuple[str, ...]
    prelude: bool
    concat: str | None = None


class GroupTables(Rewrite):
    """Lookups whose ids are inputs of the root forward run in a prelude, many tables a call.

    A call into torch costs microseconds and a parallel region, whatever the table's size, and threads balance better over
    many tables than over one.
    """

    name = "group_tables"
    summary = "look up many tables in one call before the model's forward"
    scope = "policy"
    equivalence_note = "bitwise"
    knobs = (Knob("group_by", ("none", "class", "all"), "none",
                  "none: every lookup where its module stands; class: one call a size class; all: one call"),)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if knobs["group_by"] == "none":
            return None
        if not any(feature.from_inputs for feature in structure.features):
            return "no lookup takes its ids from the arguments of the root forward, so none can run before it"
        if knobs["group_by"] == "class" and len(site.classes) == 1:
            return f"there is one size class ({site.classes[0].name}), so it is the same as group_by='all'"
        return None

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        return {"group_by": "all"}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        grouped = {feature.name for feature in graph.structure.features if feature.from_inputs}
        return tuple(node for node in nodes_at(graph, site, "lookup") if grouped.issuperset(node.features))

    def transform(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> Graph:
        """The first lookup of a group carries the call; the others keep their traffic and lose their launches. So do fused updates."""
        if not self.applied(knobs):
            return graph
        groups = lookup_groups(graph.structure, site.classes, str(knobs["group_by"]), bool(knobs.get("concat", False)))
        leaders = {group.features[0] for group in groups}
        leading_tables = {graph.structure.feature(name).table for name in leaders}
        matched = {node.name for node in self.match(graph, site)}

        def change(node: Node) -> Node:
            if node.name in matched:
                return node.changed(self.name, launches=1 if leaders.intersection(node.features) else 0)
            if node.op == "update" and "fuse_update" in node.rewrites:
                return node.changed(self.name, launches=1 if leading_tables.intersection(node.tables) else 0)
            return node

        return with_nodes(graph, change)


def eligible_concats(structure: Structure) -> tuple[Concat, ...]:
    """Concatenations that lookups may write into: pooled, each once, all with ids from the root forward's arguments, and of one dtype."""
    features = {feature.name: feature for feature in structure.features}
    return tuple(concat for concat in structure.concats
                 if concat.features and len(set(concat.features)) == len(concat.features)
                 and len({structure.table(features[name].table).dtype for name in concat.features}) == 1
                 and all(features[name].from_inputs and features[name].pooling != "none" for name in concat.features))


def lookup_groups(structure: Structure, classes: Iterable[SizeClass], group_by: str, concat: bool) -> tuple[LookupGroup, ...]:
    """Which lookups run together, every feature once.

    A concatenation that is written into holds all of its features, whatever `group_by` says. A lookup whose ids the
    model computes runs by itself.
    """
    if group_by == "none":
        return tuple(LookupGroup((feature.name,), False) for feature in structure.features)
    groups = [LookupGroup(each.features, True, each.name) for each in eligible_concats(structure)] if concat else []
    placed = {name for group in groups for name in group.features}
    class_of = {table: size_class.name for size_class in classes for table in size_class.tables}
    left: dict[str, list[str]] = {}
    alone: list[LookupGroup] = []
    for feature in structure.features:
        if not feature.from_inputs:
            alone.append(LookupGroup((feature.name,), False))
        elif feature.name not in placed:
            left.setdefault(class_of[feature.table] if group_by == "class" else "", []).append(feature.name)
    return (*groups, *(LookupGroup(tuple(names), True) for names in left.values()), *alone)
