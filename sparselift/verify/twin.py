"""A small model with the sparse path of a structure and nothing else, to run native and planned side by side.

Tables and features keep their names and their modules get short ones. Tables are capped, ids are the arguments of the forward, and
every concat of the structure is made, so that a schedule of the structure runs here by the very code that runs in production.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.dtypes import torch_dtype
from sparselift.ir import Feature, InputPath, Structure, Table
from sparselift.optim import fused_rule

MAX_ROWS = 512                     # enough for several row bands, small enough to build and compare in microseconds
LR = EPS = 0.25                    # powers of two: they scale without rounding
BETAS = (0.75, 0.5)                # and so are what is left to 1, as many bits as three steps have room for


@dataclass(frozen=True, slots=True)
class TwinBatch:
    """What one forward of the twin takes: an entry a feature, and for each concat its parts that are no lookups."""

    indices: tuple[Tensor, ...]
    offsets: tuple[Tensor | None, ...]
    weights: tuple[Tensor | None, ...]
    foreign: tuple[tuple[Tensor, ...], ...]


class Twin(nn.Module):
    """The sparse path alone. `table_weights` and the outputs go by the structure's names."""

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self.structure = structure
        self.table_weights: dict[str, nn.Parameter] = {}
        for feature in structure.features:
            if feature.module in self._modules:
                continue
            module = _module(feature, structure.table(feature.table))
            if feature.table in self.table_weights:
                module.weight = self.table_weights[feature.table]
            self.table_weights[feature.table] = module._parameters["weight"]  # type: ignore[assignment]
            self.add_module(feature.module, module)

    def forward(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | None], weights: Sequence[Tensor | None],
                foreign: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """What the step's dense part would see: each concat, and each lookup that is in none."""
        pooled: dict[str, Tensor] = {}
        for feature, ids, bags, factors in zip(self.structure.features, indices, offsets, weights):
            if not feature.from_inputs:
                ids = ids.clone()                             # so that, as in the real model, they are no input
            module = self._modules[feature.module]
            assert module is not None
            pooled[feature.name] = module(ids) if feature.form == "ids" else module(ids, bags, per_sample_weights=factors)
        outputs: dict[str, Tensor] = {}
        for concat, others in zip(self.structure.concats, foreign):
            rest = iter(others)
            outputs[concat.name] = torch.cat([pooled.pop(p) if isinstance(p, str) else next(rest) for p in concat.parts], dim=1)
        return {**pooled, **outputs}


def twin_structure(structure: Structure) -> Structure:
    """`structure` with capped tables, and with ids that are arguments of the twin's forward where they are inputs of the model."""
    modules = {name: f"lookup{place}" for place, name in enumerate(dict.fromkeys(f.module for f in structure.features))}
    features = tuple(_twin_feature(replace(f, module=modules[f.module]), place) for place, f in enumerate(structure.features))
    tables = tuple(replace(table, rows=min(table.rows, MAX_ROWS)) for table in structure.tables)
    return replace(structure, tables=tables, features=features)


def _twin_feature(feature: Feature, place: int) -> Feature:
    if feature.padding_idx is not None:
        feature = replace(feature, padding_idx=min(feature.padding_idx, MAX_ROWS - 1))
    if not feature.from_inputs:
        return feature
    path = [InputPath(("args", argument, place)) for argument in range(3)]
    return replace(feature, indices=path[0], offsets=path[1] if feature.offsets else None, weights=path[2] if feature.weights else None)


def _module(feature: Feature, table: Table) -> nn.EmbeddingBag | nn.Embedding:
    dtype = torch_dtype(table.dtype)
    if feature.pooling == "none":
        return nn.Embedding(table.rows, table.dim, padding_idx=feature.padding_idx, sparse=table.sparse, dtype=dtype)
    return nn.EmbeddingBag(table.rows, table.dim, mode=feature.pooling, padding_idx=feature.padding_idx, sparse=table.sparse,
                           include_last_offset=feature.include_last_offset, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Rule:
    """How the twin's optimizer updates a table: the formula of a fused rule, and its options, all powers of two."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    formula: str                   # "sgd", "adagrad", "rowwise_adagrad" or "adam"

    @property
    def sign(self) -> float:
        return -1.0 if self.options.get("maximize") else 1.0


def table_rules(structure: Structure, weights: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Rule]:
    """The twin's rule for every table that an optimizer holds.

    The options are the user's, with rates made powers of two. An optimizer without a fused rule gets an ordinary gradient, in which
    the plan has no part beyond computing it: there SGD, which shows that gradient, stands in.
    """
    rules = {}
    for table in structure.tables:
        if table.optimizer is None:
            continue
        optimizer = optimizers[table.optimizer.index]
        group = next(g for g in optimizer.param_groups if any(p is weights[table.name] for p in g["params"]))
        formula, _ = fused_rule(optimizer, group, table.sparse, torch_dtype(table.dtype))
        if formula is None:
            rules[table.name] = Rule(torch.optim.SGD, {"lr": LR}, "sgd")
            continue
        known: dict[str, Any] = {"maximize": bool(group["maximize"]), "lr": LR}
        if formula != "sgd":
            known["eps"] = EPS if group["eps"] else 0.0
        if formula == "adam":
            known["betas"] = tuple(beta if given else 0.0 for beta, given in zip(BETAS, group["betas"]))
        if formula in ("adagrad", "rowwise_adagrad"):
            known["initial_accumulator_value"] = 1.0 if group["initial_accumulator_value"] or not group["eps"] else 0.0
            known["weight_decay"] = 0.25 if group["weight_decay"] else 0.0
        if formula == "rowwise_adagrad":
            known["rounding_seed"] = group["rounding_seed"]
        if formula == "adagrad":
            known["lr_decay"] = 1.0 if group["lr_decay"] else 0.0
        rules[table.name] = Rule(type(optimizer), known, formula)
    return rules


def twin_optimizers(structure: Structure, twin: Twin, rules: Mapping[str, Rule]) -> list[torch.optim.Optimizer]:
    """One optimizer a table, in the order of the tables that have a rule."""
    return [rules[t.name].kind([twin.table_weights[t.name]], **rules[t.name].options)
            for t in structure.tables if t.name in rules]
