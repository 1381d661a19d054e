"""The page of what is supported, written from the tables that the code decides by: python -m sparselift.report.support > docs/support.md"""

from __future__ import annotations

from collections.abc import Iterable

from sparselift.functional.routes import FOREIGN_TABLES, UNFUSED_OPTIONS, UNFUSED_TABLES
from sparselift.grad import LAZY_OPERATIONS
from sparselift.lift.dense_modules import DENSE_RULES
from sparselift.lift.linears import LINEAR_RULES
from sparselift.lift.modules import MODULE_RULES, UPDATE_RULES, WEIGHT_RULES
from sparselift.optim import OPTIMIZER_RULES, STATE_RULES
from sparselift.rules import Rule, in_general

_PAGE = """# What is supported

This page is written from the tables that the code decides by (`python -m sparselift.report.support`). An ellipsis stands for the actual
value.

## Lookups by themselves

`sparselift.nn.EmbeddingBag` and `Embedding` and `sparselift.functional.embedding_bag` and `embedding` take whatever torch's take, in any
dtype. Float32, float16 and bfloat16 tables on the CPU run in the fused kernels. In these cases torch's own operations run, on batches
that were validated first, and `last_path` says so:

| case | `last_path` |
|---|---|
{lookups}

## Modules under a plan

Any `nn.EmbeddingBag` and `nn.Embedding`, and ours, with float32, float16 or bfloat16 tables are lifted, but for these. They stay native,
and `graph.explain()` names each with its reason:

| not lifted | reason | what would help |
|---|---|---|
{modules}

A model that is wrapped in `DistributedDataParallel` or `DataParallel`, that runs a plan already, or that trains on several ranks is
refused as a whole (`LiftRefused`).

## Optimizers

Updates of these optimizers run fused with the sum of duplicate gradients, but for the cases named:

| optimizer | not fused with | reason |
|---|---|---|
{optimizers}

Any other optimizer, subclasses included, updates the tables itself. It gets torch's sparse gradient (`update=native`), or one whose
duplicates a kernel has summed (`update=coalesced`); `sparselift.explain(model)` counts such updates with their reason.

## Linear layers under a plan

With `linear=onednn` every `nn.Linear` runs in oneDNN, but for these, which `graph.explain()` names. Calls of the others that the library
does not take run in torch one by one, and `sparselift.explain(model)` counts them:

| stays with torch | reason |
|---|---|
{linears}

## Compiled modules under a plan

With `compile=inductor` the largest modules without lookups are compiled for training, but for these, which `graph.explain()` names. Calls
that a graph is not made for (evaluations, fewer than 2 rows, autocast, transforms, checkpointing, hooks) run in torch one by one. With
`compile=inductor_graph` it is the whole forward, and such calls run in the plan, uncompiled:

| not compiled | reason |
|---|---|
{dense_modules}

## Gradients

A lifted table's `.grad` is a tensor of the layout that torch's gradient would have. These operations are answered without computing it:

{gradients}

Any other operation gives what it gives on torch's gradient, which is computed for it. One that writes, or hands out memory, makes that
tensor the gradient from then on: no write is lost.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return _PAGE.format(
        lookups=_rows((rule.what, f"torch: {in_general(rule.reason)}") for rule in (*FOREIGN_TABLES, *UNFUSED_OPTIONS, *UNFUSED_TABLES)),
        modules=_rows(_case(rule) for rule in (*MODULE_RULES, *WEIGHT_RULES, *UPDATE_RULES)),
        dense_modules=_rows((rule.what, in_general(rule.reason)) for rule in DENSE_RULES),
        linears=_rows((rule.what, in_general(rule.reason)) for rule in LINEAR_RULES),
        optimizers=_rows((f"`{kind.__name__}`", rule.what, in_general(rule.reason))
                         for kind, rules in OPTIMIZER_RULES.items() for rule in (*rules, *STATE_RULES.get(kind, ()))),
        gradients=", ".join(f"`{name}`" for name in sorted({str(name).removeprefix("aten.") for name in LAZY_OPERATIONS})) + ".")


def _case(rule: Rule) -> tuple[str, str, str]:
    return rule.what, in_general(rule.reason), in_general(rule.remedy)


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(page(), end="")
