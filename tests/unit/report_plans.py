"""A tuned plan of a small graph with a search of a few trials, as a search would give it."""

from __future__ import annotations

from sparselift.plan import Evidence, Interval, Plan, TrialRecord
from sparselift.space import SearchSpace
from tests.unit.example_graphs import small_graph


def trials(space: SearchSpace) -> tuple[TrialRecord, ...]:
    """Native, the default, every knob alone, a pruned and a failed trial. The best one is the first single change."""
    default = space.to_params(space.default)
    found = [TrialRecord(0, "native", space.to_params(space.native), "complete", 1.0, 0.020, 0.99, 1.01),
             TrialRecord(1, "default", default, "complete", 2.0, 0.010, 1.9, 2.1)]
    for number, (label, config) in enumerate(space.toggles(), start=2):
        ratio = 2.5 if number == 2 else 2.0 - 0.1 * number
        found.append(TrialRecord(number, label, space.to_params(config), "complete", ratio, 0.020 / ratio, ratio - 0.05, ratio + 0.05))
    count = len(found)
    found.append(TrialRecord(count, "search", default, "pruned", 0.8, 0.025, 0.7, 0.9, "hopeless after 3 pairs"))
    found.append(TrialRecord(count + 1, "search", default, "failed", reason="EquivalenceError: a | b"))
    return tuple(found)


def tuned_plan() -> Plan:
    space = SearchSpace(small_graph())
    evidence = Evidence(
        "measured", Interval(0.020, 0.0198, 0.0202), Interval(0.008, 0.0079, 0.0081), Interval(0.010, 0.0099, 0.0101),
        Interval(2.5, 2.45, 2.55), trials(space), {"lookup:bags.0": 1e-3, "lookup:big": 2e-3, "update:big.weight": 1.5e-3},
        {"dense": 1e-3, "dense_backward": 2e-3}, {"timed": 20.0, "other": 1.0}, "plan.study", "confirmed against native and default")
    graph = space.graph
    return Plan(graph.workload, graph.structure, graph.batch_size, space.toggles()[0][1], dict(graph.sketches), {"cpu": "a cpu"},
                space.constraints, evidence=evidence)
