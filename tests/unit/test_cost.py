from __future__ import annotations

from dataclasses import replace

import pytest

from sparselift.cost import predict, rewritten
from sparselift.probe import Bandwidth
from sparselift.space import Config, SearchSpace, memory_bytes
from tests.unit.example_graphs import small_graph

MACHINE = Bandwidth(stream_gbps=10.0, random_read_gbps=2.0, random_update_gbps=1.0)

G = small_graph()
SPACE = SearchSpace(G)


def test_native_is_the_graph_as_it_was_lifted() -> None:
    assert rewritten(G, Config.native()) is G
    cost = predict(G, Config.native(), MACHINE)
    assert set(cost.node_s) == {node.name for node in G.nodes}
    assert cost.step_s == pytest.approx(sum(cost.node_s.values()))
    assert cost.memory_bytes == memory_bytes(G, Config.native())
    assert cost.total_memory_bytes == sum(cost.memory_bytes.values())


def test_measured_nodes_take_their_measured_time() -> None:
    for config in (SPACE.native, SPACE.default):
        cost = predict(G, config, MACHINE)
        assert (cost.node_s["dense"], cost.node_s["dense_backward"]) == (1e-3, 2e-3)


def test_a_node_that_a_rewrite_changed_is_predicted_anew() -> None:
    nodes = tuple(replace(n, resources=replace(n.resources, time_s=5.0)) if n.name == "lookup:big" else n for n in G.nodes)
    g = replace(G, nodes=nodes)
    assert predict(g, SPACE.native, MACHINE).node_s["lookup:big"] == 5.0
    assert predict(g, SPACE.default, MACHINE).node_s["lookup:big"] == predict(G, SPACE.default, MACHINE).node_s["lookup:big"]


def test_large_tables_read_rows_at_the_rate_of_random_access() -> None:
    cost = predict(G, Config.native(), MACHINE)
    traffic = next(node.resources.traffic_bytes for node in G.nodes if node.name == "lookup:big")
    overhead = predict(G, Config.native(), Bandwidth(1e9, 1e9, 1e9)).node_s["lookup:big"]
    assert cost.node_s["lookup:big"] - overhead == pytest.approx(traffic / 2e9, rel=1e-3)
    cached = predict(G, Config.native(), MACHINE, cache_bytes=2**40)
    assert cached.node_s["lookup:big"] - overhead == pytest.approx(traffic / 10e9, rel=1e-3)


def test_rewrites_are_applied_once_each_in_order() -> None:
    nodes = {node.name: node for node in rewritten(G, SPACE.default).nodes}
    assert nodes["lookup:big"].rewrites == ("prefetch", "huge_pages", "group_tables")
    assert nodes["update:big.weight"].rewrites == ("fuse_update", "prefetch", "huge_pages", "group_tables")
    assert not [node for node in nodes.values() if node.op in ("expand", "coalesce")]


def test_what_helps_is_predicted_to_help() -> None:
    default = predict(G, SPACE.default, MACHINE).step_s
    assert default < predict(G, SPACE.native, MACHINE).step_s
    toggles = dict(SPACE.toggles())
    for label in ("group_by=none", "update=native", "prefetch=0", "huge_pages=off"):
        assert predict(G, toggles[label], MACHINE).step_s > default


def test_nodes_that_a_knob_does_not_touch_keep_their_cost() -> None:
    name = next(each.name for each in SPACE.classes if "big.weight" in each.tables)
    other = replace(SPACE.default, classes=tuple(replace(c, knobs={**c.knobs, "prefetch": 0}) if c.name == name else c
                                                 for c in SPACE.default.classes))
    a, b = predict(G, SPACE.default, MACHINE).node_s, predict(G, other, MACHINE).node_s
    assert {node for node in a if a[node] != b[node]} == {"lookup:big", "update:big.weight"}
