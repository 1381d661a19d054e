"""A small model to search plans for, and a timer that knows how fast each config is."""

from __future__ import annotations

import torch
from torch import nn

from sparselift.measure import Comparison
from sparselift.plan import Interval
from sparselift.progress import Progress
from sparselift.tuning import tune
from sparselift.workload import Workload

BATCH = 16
ROWS = (50, 300, 70_000)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum", sparse=True) for rows in ROWS)
        self.head = nn.Linear(8 * len(ROWS), 1)

    def forward(self, ids, offsets):
        return self.head(torch.cat([bag(i, o) for bag, i, o in zip(self.bags, ids, offsets)], 1))


def step(model, batch):
    return model(*batch).square().mean()


def small_workload():
    """Three tables under SGD, and four batches."""
    torch.manual_seed(0)
    model = Model()
    rng = torch.Generator().manual_seed(1)
    batches = [([torch.randint(rows, (3 * BATCH,), generator=rng) for rows in ROWS], [torch.arange(0, 3 * BATCH, 3)] * len(ROWS))
               for _ in range(4)]
    return Workload("small", model, torch.optim.SGD(model.parameters(), lr=0.1), step, batches, uses=frozenset(), inputs=tuple)


def comparison(ratio, incumbent_s=0.010, spread=0.001, pruned=False):
    def interval(value):
        return Interval(value, value * (1 - spread), value * (1 + spread))

    return Comparison(interval(ratio), interval(incumbent_s), interval(incumbent_s / ratio), 0.96, 6, 4, pruned, timed_s=0.5, warmup_s=0.25,
                      total_s=0.8)


def by_formula(config):
    """Seconds a step: fusing, a concat, a partition by table and a prefetch distance of 32 help, everything else is in the way."""
    if config.path == "native":
        return 0.010
    cost = 0.008 - 0.001 * bool(config.policy["concat"])
    for each in config.classes:
        cost += 0.0000025 * abs(each.knobs["prefetch"] - 32) - 0.0002 * (each.knobs["partition"] == "table")
        cost += 0.0003 * (each.knobs["update"] == "native") + 0.0002 * bool(each.knobs["dedup"])
    return cost


class Timer:
    """Measures by a formula, and remembers what it was asked: who against whom, and whether it was one of the last."""

    def __init__(self, cost=by_formula, hooks=()):
        self.cost, self.calls, self.bars, self.hooks = cost, [], [], dict(hooks)

    def __call__(self, incumbent, candidate, *, prune_below=0.0, bar=None, thorough=False):
        self.calls.append((incumbent, candidate, thorough and bar is None))
        self.bars.append(bar)
        if len(self.calls) in self.hooks:
            self.hooks[len(self.calls)]()
        a, b = self.cost(incumbent), self.cost(candidate)
        return comparison(a / b, a, pruned=a / b < prune_below)


def run(work, measure=None, verify=lambda config: {"checked": True}, **options):
    measure = Timer() if measure is None else measure
    return tune(work, measure=measure, verify=verify, progress=options.pop("progress", Progress()), **options)
