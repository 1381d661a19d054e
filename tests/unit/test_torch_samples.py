"""The samples and errors that torch tests its own embeddings with, from torch.testing._internal, against our modules and functions."""

from __future__ import annotations

import copy
import pickle
import sys
import types
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import sparselift.functional as ours
from sparselift.functional import lookups
from sparselift.nn import Embedding, EmbeddingBag

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMES = ("embedding", "embedding_bag")


@pytest.fixture(scope="module")
def internals() -> Any:
    """torch's databases of operators and modules. They need expecttest, a small package, for other tests than these."""
    missing = find_spec("expecttest") is None
    if missing:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    if missing:
        del sys.modules["expecttest"]
    return types.SimpleNamespace(
        operators={info.name.rpartition(".")[2]: info for info in op_db if info.name in [f"nn.functional.{name}" for name in NAMES]},
        embedding=next(info for info in module_db if info.module_cls is torch.nn.Embedding))


@pytest.fixture(params=["kernels", "torch when small"])
def elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of a small lookup."""
    if request.param == "kernels":
        monkeypatch.setattr(lookups, "FUSED_ELEMENTS", 0)


def call(function: Callable[..., Tensor], sample: Any, dtype: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
    """The result on copies of the sample's tensors, those of floats in `dtype`; and these copies."""
    floats: list[Tensor] = []

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        floats.append(value.detach().to(dtype or value.dtype, copy=True).requires_grad_(value.requires_grad))
        return floats[-1]

    weight, (ids,) = copied(sample.input), sample.args
    return function(ids, weight, **{name: copied(value) for name, value in sample.kwargs.items()}), floats


@pytest.mark.usefixtures("elements")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_every_sample_of_an_operator(internals: Any, name: str, dtype: torch.dtype, requires_grad: bool) -> None:
    """Against torch in float64: values, what max_norm made of the weights, and gradients."""
    samples = list(internals.operators[name].sample_inputs("cpu", dtype, requires_grad))
    assert len(samples) >= (3 if name == "embedding" else 24)
    for sample in samples:
        # Torch scales rows of half precision with a factor of half precision.
        near = {"rtol": 0.03, "atol": 0.01} if "max_norm" in sample.kwargs and dtype.itemsize == 2 else {}
        out, floats = call(getattr(ours, name), sample)
        want, exact = call(getattr(torch.nn.functional, name), sample, torch.float64)
        torch.testing.assert_close(out, want.to(dtype), **near)
        if requires_grad:
            arrived = torch.randn(out.shape, dtype=torch.float64).to(dtype)
            out.backward(arrived)
            want.backward(arrived.double())
        for mine, theirs in zip(floats, exact, strict=True):
            torch.testing.assert_close(mine, theirs.to(dtype), **near)
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad.to(dtype))


@pytest.mark.usefixtures("elements")
@pytest.mark.parametrize("name", NAMES)
def test_numeric_gradients(internals: Any, name: str) -> None:
    """And second ones, forward mode and batched ones, where torch has them; pooled second derivatives although torch has none."""
    info = internals.operators[name]
    for sample in info.sample_inputs("cpu", torch.float64, True):
        options = {key: value for key, value in sample.kwargs.items() if key != "per_sample_weights"}
        factors = sample.kwargs.get("per_sample_weights")
        inputs = (sample.input,) if factors is None else (sample.input, factors)

        def function(weight: Tensor, *weights: Tensor, ids: Tensor = sample.args[0], options: dict[str, Any] = options) -> Tensor:
            return getattr(ours, name)(ids, weight, **options, **({"per_sample_weights": weights[0]} if weights else {}))

        assert gradcheck(function, inputs, check_forward_ad=info.supports_forward_ad, check_batched_grad=name == "embedding")
        if info.supports_gradgrad:
            assert gradgradcheck(function, inputs)


@pytest.mark.usefixtures("elements")
def test_every_error_of_an_operator(internals: Any) -> None:
    """In torch's words. embedding_bag has no error samples."""
    errors = list(internals.operators["embedding"].error_inputs("cpu"))
    assert len(errors) == 2
    for error in errors:
        with pytest.raises(error.error_type, match=error.error_regex):
            ours.embedding(*error.sample_input.args, error.sample_input.input, **error.sample_input.kwargs)


@pytest.mark.usefixtures("elements")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sample_of_the_module(internals: Any, dtype: torch.dtype) -> None:
    inputs = internals.embedding.module_inputs_func(internals.embedding, device="cpu", dtype=dtype, requires_grad=False, training=True)
    assert len(inputs) == 2
    for each in inputs:
        arguments, options = each.constructor_input.args, each.constructor_input.kwargs
        module = Embedding(*arguments, **options, dtype=dtype)
        theirs = torch.nn.Embedding(*arguments, **options, dtype=dtype)
        theirs.load_state_dict(module.state_dict())
        theirs = theirs.double()
        assert repr(module) == repr(theirs)
        for mine in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            theirs.zero_grad()
            out, want = mine(*each.forward_input.args), theirs(*each.forward_input.args)
            assert torch.equal(out, want.to(dtype))
            arrived = torch.randint(-4, 5, out.shape)
            out.backward(arrived.to(dtype))
            want.backward(arrived.double())
            torch.testing.assert_close(mine.weight.grad, theirs.weight.grad.to(dtype))


@pytest.mark.usefixtures("elements")
def test_every_error_of_the_module(internals: Any) -> None:
    """Of torch's type, so that who catches it is served. Where torch names a function of its own, ours say more."""
    errors = internals.embedding.module_error_inputs_func(internals.embedding, device="cpu", dtype=torch.float32, requires_grad=False,
                                                          training=True)
    said = {r"index out of range": "feature 'weight': id 15 at position 2 is out of range for table 'weight' of 10 rows",
            r"Expected tensor for argument": "feature 'weight': indices must be int32 or int64; got float32"}
    assert len(errors) == 3
    for error in errors:
        each = error.module_error_input
        with pytest.raises(error.error_type) as caught:
            Embedding(*each.constructor_input.args, **each.constructor_input.kwargs)(*each.forward_input.args)
        message = next((ours for theirs, ours in said.items() if error.error_regex.startswith(theirs)), error.error_regex)
        assert caught.match(message)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_numeric_gradients_of_the_module(mode: str, weighted: bool, padding_idx: int | None) -> None:
    if weighted and mode == "mean":
        return
    module = EmbeddingBag(7, 3, mode=mode, padding_idx=padding_idx, dtype=torch.float64)
    ids, starts = torch.tensor([1, 2, 1, 6, 3, 0]), torch.tensor([0, 2, 2, 5])
    inputs = (module.weight.detach().requires_grad_(), *([torch.rand(6, dtype=torch.float64, requires_grad=True)] if weighted else []))

    def function(weight: Tensor, *factors: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (ids, starts, *factors))

    assert gradcheck(function, inputs)
