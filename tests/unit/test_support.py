"""The tables of what is supported: the page is written from them, and each of their rules is met by an example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from sparselift.functional.fallback import LookupOptions
from sparselift.functional.routes import FOREIGN_TABLES, UNFUSED_OPTIONS, UNFUSED_TABLES, plan_route
from sparselift.lift.modules import MODULE_RULES, UPDATE_RULES, WEIGHT_RULES, unliftable
from sparselift.nn import EmbeddingBag, TableBatchedEmbeddingBags
from sparselift.optim import OPTIMIZER_RULES, STATE_RULES, RowWiseAdagrad, fused_rule
from sparselift.report.support import page
from sparselift.rules import Rule, in_general

ROOT = Path(__file__).parents[2]


def bag(change: Callable[[nn.EmbeddingBag], Any] = lambda bag: None, **options: Any) -> nn.EmbeddingBag:
    module = nn.EmbeddingBag(5, 4, **{"sparse": True, "mode": "sum", **options})
    change(module)
    return module


def replace_weight(weight: Any) -> Callable[[nn.EmbeddingBag], None]:
    def change(module: nn.EmbeddingBag) -> None:
        del module._parameters["weight"]
        module.weight = weight
    return change


class Marked(nn.Parameter):
    pass


class Mine(nn.EmbeddingBag):
    pass


MODULES: dict[str, Callable[[], nn.Module]] = {
    "`TableBatchedEmbeddingBags`": lambda: TableBatchedEmbeddingBags([(5, 4)]),
    "a parametrized weight": lambda: bag(lambda m: parametrize.register_parametrization(m, "weight", nn.Identity())),
    "a subclass": lambda: Mine(5, 4),
    "a replaced forward": lambda: bag(lambda m: setattr(m, "forward", m.forward)),
    "`max_norm`": lambda: bag(max_norm=1.0),
    "`scale_grad_by_freq`": lambda: bag(scale_grad_by_freq=True, sparse=False),
    "a weight that is no parameter": lambda: bag(replace_weight(torch.zeros(5, 4))),
    "a weight of another class": lambda: bag(replace_weight(torch.Tensor._make_subclass(Marked, torch.zeros(5, 4), True))),
    "another dtype": lambda: bag(dtype=torch.float64),
    "another device": lambda: bag(device="meta"),
    "a weight with other strides": lambda: bag(replace_weight(nn.Parameter(torch.zeros(4, 5).t()))),
    "a table without elements": lambda: nn.EmbeddingBag(0, 4, sparse=True, mode="sum"),
    "gradient hooks on the weight": lambda: bag(lambda m: m.weight.register_hook(lambda grad: grad)),
}


def matches(rule: Rule, reason: str) -> bool:
    """Whether a reason is the rule's, whatever stands in its fields."""
    place, parts = 0, in_general(rule.reason).split("…")
    for part in parts:
        place = reason.find(part, place)
        if place < 0:
            return False
    return reason.startswith(parts[0])


def test_the_page_is_written_from_the_tables() -> None:
    assert (ROOT / "docs" / "support.md").read_text(encoding="utf-8") == page(), "python -m sparselift.report.support > docs/support.md"


@pytest.mark.parametrize("rule", [*MODULE_RULES, *WEIGHT_RULES], ids=lambda rule: rule.what)
def test_every_kind_of_module_that_is_not_lifted(rule: Rule) -> None:
    model = nn.ModuleDict({"bag": MODULES[rule.what]()})
    (refusal,) = unliftable(["bag"], model, [])
    assert matches(rule, refusal.reason) and "{" not in refusal.reason + refusal.remedy
    fine = nn.ModuleDict({"bag": bag(), "ours": EmbeddingBag(5, 4)})
    assert not unliftable(["bag", "ours"], fine, [])


@pytest.mark.parametrize("rule", UPDATE_RULES, ids=lambda rule: rule.what)
def test_every_kind_of_update_that_is_not_taken_over(rule: Rule) -> None:
    model = nn.ModuleDict({"bag": bag(sparse=False), "other": bag()})
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), 0.1)]
    if rule is UPDATE_RULES[0]:
        model["other"].weight = model["bag"].weight
    elif rule is UPDATE_RULES[1]:
        optimizers.append(torch.optim.SGD(model.parameters(), 0.1))
    else:
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]
    refusals = unliftable(["bag"] if rule is not UPDATE_RULES[0] else ["bag", "other"], model, optimizers)
    assert refusals and all(matches(rule, refusal.reason) and "{" not in refusal.reason for refusal in refusals)


OPTIMIZERS: dict[tuple[type, str], tuple[dict[str, Any], bool]] = {       # options, and whether the gradient is sparse
    (torch.optim.SGD, "`differentiable=True`"): ({"differentiable": True}, True),
    (torch.optim.SGD, "`fused=True` with sparse gradients"): ({"fused": True}, True),
    (torch.optim.Adagrad, "`fused=True` with sparse gradients"): ({"fused": True}, True),
    (torch.optim.SGD, "`momentum` with sparse gradients"): ({"momentum": 0.9}, True),
    (torch.optim.SGD, "`momentum` with a dense gradient"): ({"momentum": 0.9}, False),
    (torch.optim.SGD, "`weight_decay` with sparse gradients"): ({"weight_decay": 0.1}, True),
    (torch.optim.SGD, "`weight_decay` with a dense gradient"): ({"weight_decay": 0.1}, False),
    (torch.optim.SGD, "a tensor as learning rate"): ({"lr": torch.tensor(0.1)}, True),
    (torch.optim.Adagrad, "`differentiable=True`"): ({"differentiable": True}, True),
    (torch.optim.Adagrad, "`weight_decay`"): ({"weight_decay": 0.1}, True),
    (torch.optim.Adagrad, "a tensor as learning rate"): ({"lr": torch.tensor(0.1)}, True),
    (torch.optim.Adagrad, "a dense gradient, `eps=0` and no initial accumulator"): ({"eps": 0.0}, False),
    (torch.optim.SparseAdam, "a dense gradient"): ({}, False),
    (torch.optim.SparseAdam, "a tensor as learning rate"): ({"lr": torch.tensor(0.1)}, True),
    (RowWiseAdagrad, "`weight_decay` with a dense gradient"): ({"weight_decay": 0.1}, False),
    (RowWiseAdagrad, "a dense gradient, `eps=0` and no initial accumulator"): ({"eps": 0.0}, False),
}


@pytest.mark.parametrize(("kind", "rule"), [(kind, rule) for kind, rules in OPTIMIZER_RULES.items() for rule in rules],
                         ids=lambda each: getattr(each, "what", getattr(each, "__name__", "")))
def test_every_option_without_a_fused_update(kind: Any, rule: Rule) -> None:
    options, sparse = OPTIMIZERS[kind, rule.what]
    optimizer = kind([nn.Parameter(torch.zeros(5, 4))], **{"lr": 0.1, **options})
    found, reason = fused_rule(optimizer, optimizer.param_groups[0], sparse)
    assert found is None and matches(rule, reason) and "{" not in reason
    plain = kind([nn.Parameter(torch.zeros(5, 4))], lr=0.1)
    assert fused_rule(plain, plain.param_groups[0], sparse=True)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", STATE_RULES, ids=lambda each: each.__name__)
def test_every_optimizer_whose_state_is_as_narrow_as_the_table(kind: Any, dtype: torch.dtype) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(5, 4, dtype=dtype))], lr=0.1)
    found, reason = fused_rule(optimizer, optimizer.param_groups[0], True, dtype)
    (rule,) = STATE_RULES[kind]
    assert found is None and matches(rule, reason) and "{" not in reason
    assert fused_rule(optimizer, optimizer.param_groups[0], True, torch.float32)[0]
    rounded = RowWiseAdagrad([nn.Parameter(torch.zeros(5, 4, dtype=dtype))], rounding_seed=1)
    assert fused_rule(rounded, rounded.param_groups[0], True, dtype) == ("rowwise_adagrad", "")


LOOKUPS: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "a table on another device": (torch.zeros(5, 4, device="meta"), {}),
    "a table of another layout": (torch.zeros(5, 4).to_sparse(), {}),
    "a weight that is no matrix": (torch.zeros(5, 4, 1), {}),
    "`max_norm`": (torch.zeros(5, 4), {"max_norm": 1.0}),
    "`scale_grad_by_freq`": (torch.zeros(5, 4), {"scale_grad_by_freq": True}),
    "a table of another dtype than float32, float16 and bfloat16": (torch.zeros(5, 4).double(), {}),
    "a table with other strides": (torch.zeros(4, 5).t(), {}),
    "a table without elements": (torch.zeros(5, 0), {}),
}


@pytest.mark.parametrize("rule", [*FOREIGN_TABLES, *UNFUSED_OPTIONS, *UNFUSED_TABLES], ids=lambda rule: rule.what)
def test_every_kind_of_lookup_that_runs_in_torch(rule: Rule) -> None:
    weight, options = LOOKUPS[rule.what]
    route = plan_route([weight], ["weight"], LookupOptions(**{"mode": "sum", "sparse": False, **options}), False)
    assert matches(rule, route.reason) and "{" not in route.reason
    assert not plan_route([torch.zeros(5, 4)], ["weight"], LookupOptions("sum", False), False).reason
