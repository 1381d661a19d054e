"""Configs become schedules: every lookup in one group, every table with its knobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselift.ir import Concat, Graph
from sparselift.rewrites import Value
from sparselift.schedule import GroupSchedule, Schedule, TableSchedule, build_schedule
from sparselift.space import Config, SearchSpace
from tests.unit.example_graphs import feature, graph, small_graph, table


def mixed_graph() -> Graph:
    """Two concatenations (one with a lookup whose ids the model computes), an Embedding, a table looked up twice."""
    tables = [table("a", 100), table("b", 100_000), table("c", 100), table("e", 50, 8)]
    features = [feature("a", "a"), feature("b", "b", "mean"), feature("inside", "c", from_inputs=False), feature("e", "e", "none"),
                feature("a#1", "a", call=1)]
    return graph(tables, features, (Concat("cat", ("b", 4, "a")), Concat("late", ("inside", 3))))


def config(g: Graph, **policy: Value) -> Config:
    default = SearchSpace(g).default
    return replace(default, policy={**default.policy, **policy})


def test_native_has_no_schedule() -> None:
    assert build_schedule(small_graph().structure, Config.native()) == Schedule("native")


def test_one_group_a_concatenation_and_one_for_the_rest() -> None:
    g = mixed_graph()
    assert build_schedule(g.structure, config(g)).groups == (
        GroupSchedule(("b", "a"), True, "cat"), GroupSchedule(("e", "a#1"), True), GroupSchedule(("inside",), False))


def test_without_concatenations_all_is_one_group() -> None:
    g = mixed_graph()
    assert build_schedule(g.structure, config(g, concat=False)).groups == (
        GroupSchedule(("a", "b", "e", "a#1"), True), GroupSchedule(("inside",), False))


def test_a_concatenation_wins_over_classes() -> None:
    g = mixed_graph()
    groups = build_schedule(g.structure, config(g, group_by="class")).groups
    assert groups[0] == GroupSchedule(("b", "a"), True, "cat")
    assert set(groups[1:3]) == {GroupSchedule(("e",), True), GroupSchedule(("a#1",), True)}


def test_without_grouping_every_lookup_runs_where_it_stands() -> None:
    g = mixed_graph()
    groups = build_schedule(g.structure, config(g, group_by="none", concat=False)).groups
    assert groups == tuple(GroupSchedule((name,), False) for name in ("a", "b", "inside", "e", "a#1"))


def test_tables_have_their_classes_knobs() -> None:
    g = small_graph()
    tables = build_schedule(g.structure, SearchSpace(g).default).tables
    assert tables == {
        "bags.0.weight": TableSchedule("fused", "none", 64, "bag", False, False, "cached"),
        "bags.1.weight": TableSchedule("fused", "none", 64, "bag", False, False, "cached"),
        "big.weight": TableSchedule("fused", "none", 64, "bag", False, True, "cached"),
    }


def test_small_tables_of_a_class_with_huge_pages_stay() -> None:
    tables = [table("small", 40_000), table("large", 200_000)]                 # 2.4 and 12 MiB, one band
    g = graph(tables, [feature("f", "small"), feature("g", "large")])
    space = SearchSpace(g)
    assert len(space.classes) == 1
    params = {**space.to_params(space.default), f"huge_pages@{space.classes[0].name}": "madvise"}
    found = build_schedule(g.structure, space.from_params(params)).tables or {}
    assert (found["small"].huge_pages, found["large"].huge_pages) == (False, True)


def test_configs_that_cannot_run_are_refused_with_every_reason() -> None:
    g = small_graph()
    broken = replace(config(g, depth=1), classes=())
    with pytest.raises(ValueError, match=r"table 'bags.0.weight' is in no class.*unknown knob 'depth'"):
        build_schedule(g.structure, broken)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_lookup_is_in_one_group_and_every_table_is_scheduled(data: Any) -> None:
    g = mixed_graph()
    space = SearchSpace(g)
    params: dict[str, Value] = {}
    for dimension in space.dimensions:
        if dimension.active(params):
            params[dimension.name] = data.draw(st.sampled_from(dimension.choices))
    schedule = build_schedule(g.structure, space.from_params(params))
    if schedule.path == "native":
        return
    assert sorted(name for group in schedule.groups for name in group.features) == sorted(f.name for f in g.structure.features)
    assert set(schedule.tables or {}) == {t.name for t in g.structure.tables}
    for group in schedule.groups:
        features = [g.structure.feature(name) for name in group.features]
        if group.prelude:
            assert all(each.from_inputs for each in features)
        else:
            assert len(features) == 1 and group.concat is None
        if group.concat is not None:
            assert group.features == next(c.features for c in g.structure.concats if c.name == group.concat)
