"""The cases and rules of the contract, and how an update is checked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from sparselift.kernels.base import COALESCE_METHODS, BagProgram, KernelBackend, Segment, TableKnobs, UpdateRule
from tests.contract.naive import Case, fresh_state, parts_of, row_sums, updated

SGD = UpdateRule("sgd", lr=0.5)
RULES = [SGD, UpdateRule("sgd", lr=0.25, maximize=True), UpdateRule("adagrad", lr=0.5, eps=0.25),
         UpdateRule("rowwise_adagrad", lr=0.5, eps=0.25), UpdateRule("rowwise_adagrad", lr=0.5, eps=0.25, weight_decay=0.5, maximize=True),
         UpdateRule("adam", lr=0.5, eps=0.25, betas=(0.75, 0.5)), UpdateRule("adam", lr=0.5, eps=0.25, betas=(0.5, 0.75), maximize=True)]
DIMS = [1, 3, 4, 17, 64, 128, 1000]
SUMMING = [method for method in COALESCE_METHODS if method != "none"]
CASES = {
    "sum": {},
    "mean": {"pooling": ["mean"]},
    "none": {"pooling": ["none"]},
    "max": {"pooling": ["max"]},
    "mixed": {"pooling": ["sum", "mean", "none", "max"], "dims": (4, 17, 64), "shared": True},
    "padding": {"pooling": ["sum", "mean", "none", "max"], "dims": (4, 8, 16, 5), "padding": True},
    "weighted": {"weighted": True},
    "weighted_padding": {"weighted": True, "padding": True, "pooling": ["sum", "mean"]},
    "include_last": {"include_last": True, "pooling": ["sum", "mean"]},
    "int32": {"index_dtypes": [torch.int32]},
    "mixed_ints": {"index_dtypes": [torch.int32, torch.int64, torch.int64], "dims": (4, 8, 3)},
}


def with_knobs(case: Case, **knobs) -> Case:
    case.tables = [dataclasses.replace(table, knobs=TableKnobs(**knobs)) for table in case.tables]
    return case


def is_refused(case: Case, backend: KernelBackend, coalesce: str) -> bool:
    """Whether the backend says that it lacks this way of summing, and then refuses it by name."""
    if coalesce in backend.coalesce_methods:
        return False
    with pytest.raises(ValueError, match=f"table 't0': coalesce must be one of .*; got '{coalesce}'"):
        with_knobs(case, coalesce=coalesce).compile(backend)
    return True


def check_update(case: Case, program: BagProgram, rule: UpdateRule, segments: list[Segment], parts: list[list]) -> None:
    """`parts` a table: (ids, gradients) of every lookup. SGD is exact, the others round at the square root and the division."""
    states = [fresh_state(table, rule) for table in case.tables]
    expected = [updated(w, s, rule, row_sums(p)) for w, s, p in zip(case.weights, states, parts)]
    program.update(case.weights, states, [rule] * len(states), segments)
    for weight, state, (want_weight, want_parts) in zip(case.weights, states, expected):
        if rule.kind == "sgd":
            assert np.array_equal(weight.numpy(), want_weight)
        else:
            assert np.allclose(weight.numpy(), want_weight, rtol=1e-6, atol=1e-6)
        for part, want in zip(parts_of(state), want_parts, strict=True):
            assert np.allclose(part.numpy(), want, rtol=2e-7, atol=0)
