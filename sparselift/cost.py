"""Predicted time and memory of a training step under a config: a hint for where to look, never the judge of what is faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparselift.ir import Graph, Node
from sparselift.probe import Bandwidth
from sparselift.space import Config, memory_bytes
from sparselift.space.config import rewrites_at

CACHE_BYTES = 32 << 20             # what a core counts on, where `Hardware.cache_bytes` is not given
_CALL_S = 10e-6                    # one call into torch or a kernel, autograd included, on a current x86 core

# What prefetching and huge pages gain on random rows of tables that no cache holds, measured on a two-core AVX-512 machine;
# together they gain more than their product, since a prefetch that misses the TLB is dropped.
_RANDOM_GAIN = {(False, False): 1.0, (True, False): 1.5, (False, True): 1.6, (True, True): 3.4}


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of one training step on one rank."""

    node_s: Mapping[str, float]        # seconds by node; dense nodes as they were measured
    memory_bytes: Mapping[str, int]    # by kind: weights, optimizer_state, outputs, ...

    @property
    def step_s(self) -> float:
        return sum(self.node_s.values())

    @property
    def total_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())


def rewritten(graph: Graph, config: Config) -> Graph:
    """The graph after the config's rewrites, in the catalog's order: size classes first, then the policy."""
    if config.path == "native":
        return graph
    policy, *classes = config.sites
    for site in (*classes, policy):
        for rewrite in rewrites_at(site):
            graph = rewrite.transform(graph, site, config.knobs_at(site.name))
    return graph


def predict(graph: Graph, config: Config, bandwidth: Bandwidth, cache_bytes: int = CACHE_BYTES) -> Cost:
    """Time by node and memory by kind of a step of `graph` under `config`.

    A node takes its measured time, if it has one and no rewrite changed it; else its traffic at the rate of its kind of access, plus
    a fixed time a call. Rows of tables above `cache_bytes` come at the rate of random access.
    """
    nodes = rewritten(graph, config).nodes
    return Cost({node.name: _seconds(graph, node, bandwidth, cache_bytes) for node in nodes}, memory_bytes(graph, config))


def _seconds(graph: Graph, node: Node, bandwidth: Bandwidth, cache_bytes: int) -> float:
    resources = node.resources
    # What is opaque has no traffic to go by, whatever runs it.
    if resources.time_s is not None and (not node.rewrites or node.op in ("dense", "dense_backward")):
        return resources.time_s
    gbps = bandwidth.stream_gbps
    if node.op in ("lookup", "update") and any(graph.structure.table(name).nbytes > cache_bytes for name in node.tables):
        random = bandwidth.random_read_gbps if node.op == "lookup" else bandwidth.random_update_gbps
        gbps = min(gbps, random * _RANDOM_GAIN["prefetch" in node.rewrites, "huge_pages" in node.rewrites])
    return resources.traffic_bytes / (gbps * 1e9) + resources.launches * _CALL_S
