"""The dot interaction as a function and as a module: torch's values and gradients, and torch itself where kernels cannot run."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparselift.functional import dot_interaction
from sparselift.functional import interaction as module
from sparselift.nn import DotInteraction


def native(dense: Tensor, lookups: Sequence[Tensor], order: str, diagonal: bool) -> Tensor:
    """facebookresearch/dlrm's interact_features."""
    together = torch.cat([dense, *lookups], dim=1).view((len(dense), len(lookups) + 1, dense.shape[1]))
    products = torch.bmm(together, torch.transpose(together, 1, 2))
    count, shift = len(lookups) + 1, 1 if diagonal else 0
    pairs = [(i, j) for i in range(count) for j in range(i + shift)] if order == "lower" else \
        [(i, j) for i in range(count) for j in range(i + 1 - shift, count)]
    return torch.cat([dense, products[:, torch.tensor([i for i, _ in pairs]).long(), torch.tensor([j for _, j in pairs]).long()]], dim=1)


def inputs(batch: int = 5, tables: int = 6, dim: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(tables + 1)]


def gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out, given, torch.linspace(-1, 1, out.numel()).to(out.dtype).view_as(out)))


def kernel_calls() -> mock._patch:
    return mock.patch.object(module.Interactor, "run", autospec=True, side_effect=module.Interactor.run)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("order", ["lower", "upper"])
@pytest.mark.parametrize(("batch", "tables", "dim"), [(5, 6, 16), (1, 1, 1), (0, 3, 4), (33, 26, 64), (4, 0, 7)])
def test_values_and_gradients_are_torchs(batch: int, tables: int, dim: int, order: str, diagonal: bool) -> None:
    given = inputs(batch, tables, dim)
    exact = inputs(batch, tables, dim, dtype=torch.float64)
    want = native(exact[0], exact[1:], order, diagonal)
    want_grads = gradients(want, exact)
    together = torch.cat(given[1:], 1) if tables else torch.empty(batch, 0)
    for lookups in (given[1:], together):
        with kernel_calls() as calls:
            got = DotInteraction(order, diagonal)(given[0], lookups)
        assert calls.call_count == 1
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(gradients(got, given), want_grads):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_strides_do_not_matter() -> None:
    given = inputs()
    odd = [vector.detach().T.contiguous().T.requires_grad_() for vector in given]
    out, want = dot_interaction(odd[0], odd[1:]), dot_interaction(given[0], given[1:])
    assert torch.equal(out, want)
    expanded = torch.ones(()).expand(out.shape)                      # what sum() sends back
    for mine, theirs in zip(torch.autograd.grad(out, odd, expanded), torch.autograd.grad(want, given, torch.ones_like(want))):
        assert torch.equal(mine, theirs)


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    given = inputs()
    frozen = [given[0].detach(), *given[1:]]
    out = dot_interaction(frozen[0], frozen[1:])
    want = gradients(native(given[0], given[1:], "lower", False), given)[1:]
    for mine, theirs in zip(gradients(out, given[1:]), want):
        torch.testing.assert_close(mine, theirs)
    assert not dot_interaction(frozen[0], [vector.detach() for vector in given[1:]]).requires_grad


def test_it_can_be_differentiated_twice() -> None:
    given = inputs(2, 2, 3)
    second = []
    for function in (lambda *v: dot_interaction(v[0], v[1:]), lambda *v: native(v[0], v[1:], "lower", False)):
        first = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
        second.append(torch.autograd.grad(sum(each.square().sum() for each in first), given))
    for mine, theirs in zip(*second):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_change_between_forward_and_backward_raises_as_in_torch() -> None:
    given = inputs()
    changed = [vector * 1 for vector in given]
    out = dot_interaction(changed[0], changed[1:])
    changed[3].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpointing_runs_it_again() -> None:
    given = inputs()
    want = gradients(dot_interaction(given[0], given[1:]), given)
    out = checkpoint(lambda *v: dot_interaction(v[0], v[1:]), *given, use_reentrant=False)
    assert all(map(torch.equal, gradients(out, given), want))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_run_in_torch(dtype: torch.dtype) -> None:
    given = inputs(dtype=dtype)
    with kernel_calls() as calls:
        got = dot_interaction(given[0], given[1:], "upper", True)
    assert calls.call_count == 0 and got.dtype == dtype
    assert torch.equal(got, native(given[0], given[1:], "upper", True))


def test_autocast_transforms_and_forward_mode_run_in_torch() -> None:
    given = inputs()
    with kernel_calls() as calls:
        with torch.autocast("cpu", torch.bfloat16):
            assert dot_interaction(given[0], given[1:]).dtype == native(given[0], given[1:], "lower", False).dtype
        stacked = torch.stack([vector.detach() for vector in given])
        got = torch.func.vmap(lambda v: dot_interaction(v, [v]))(stacked)
        torch.testing.assert_close(got, torch.stack([native(v, [v], "lower", False) for v in stacked]))
        _, tangent = torch.func.jvp(lambda v: dot_interaction(v, [v]), (stacked[0],), (stacked[1],))
        torch.testing.assert_close(tangent, torch.func.jvp(lambda v: native(v, [v], "lower", False), (stacked[0],), (stacked[1],))[1])
    assert calls.call_count == 0


def test_without_compiled_kernels_it_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparselift.kernels._interaction", None)
    module._interactor.cache_clear()
    try:
        given = inputs(seed=3)
        assert torch.equal(dot_interaction(given[0], given[1:]), native(given[0], given[1:], "lower", False))
    finally:
        module._interactor.cache_clear()


def test_the_module_can_be_copied_and_pickled() -> None:
    layer, given = DotInteraction("upper", True), inputs()
    want = layer(given[0], given[1:])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(given[0], given[1:]), want)
    assert repr(layer) == "DotInteraction(order='upper', diagonal=True)"
    assert not nn.Sequential(layer).state_dict()


@pytest.mark.parametrize(("dense", "lookups", "error", "message"), [
    (torch.zeros(2, 3), torch.zeros(2, 7), ValueError, r"got \(2, 3\) and \(2, 7\)"),
    (torch.zeros(2, 3), torch.zeros(3, 6), ValueError, r"got \(2, 3\) and \(3, 6\)"),
    (torch.zeros(2, 3), [torch.zeros(2, 6)], ValueError, r"got \(2, 3\) and \[\(2, 6\)\]"),
    (torch.zeros(2, 0), [], ValueError, r"with columns.*got \(2, 0\)"),
    (torch.zeros(2), [torch.zeros(2)], ValueError, r"got \(2,\)"),
    (torch.zeros(2, 3), [None], TypeError, "got NoneType"), ([1.0], [], TypeError, "got list")])
def test_wrong_arguments_are_named(dense: object, lookups: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dot_interaction(dense, lookups)
    with pytest.raises(ValueError, match=r"order must be one of .* got 'all'"):
        DotInteraction("all")
