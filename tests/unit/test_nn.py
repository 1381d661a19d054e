"""EmbeddingBag and Embedding in the kernels, beside torch's: the same values and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparselift import ops
from sparselift.functional import lookups
from sparselift.nn import Embedding, EmbeddingBag
from tests.unit.lookup_loops import dense_grad, filled, flat, offsets, pool, use_backend
from tests.unit.module_pairs import BAGS, DIM, IDS, ROWS, STARTS, assert_same_grad, integers, pair, run_both


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(request.param, monkeypatch)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("last", [False, True])
def test_bags_are_torchs_to_the_bit(mode: str, sparse: bool, padding_idx: int | None, last: bool) -> None:
    """Bags of 1, 2 and 4 counted ids, so that means are exact, too."""
    bags = [[1, 2], [], [5], [4, 1, 3, 1], [2]]
    options = {"mode": mode, "sparse": sparse, "padding_idx": padding_idx, "include_last_offset": last}
    for ids_dtype, offsets_dtype in itertools.product((torch.int32, torch.int64), repeat=2):
        ours, theirs = pair(EmbeddingBag, ROWS, DIM, **options)
        if padding_idx is not None:
            bags = [[*ids, ours.padding_idx] for ids in bags]
        run_both(ours, theirs, flat(bags, ids_dtype), offsets(bags, last, offsets_dtype))
        assert ours.last_path == "fused bag"


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (0, 4), (1, 2)])
def test_matrices_of_ids(sparse: bool, padding_idx: int | None, shape: tuple[int, int]) -> None:
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="sum", sparse=sparse, padding_idx=padding_idx)
    ids = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(4))
    run_both(ours, theirs, ids)
    run_both(ours, theirs, ids.t().contiguous().t())
    assert ours.last_path == "fused bag"


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("form", ["offsets", "matrix"])
def test_per_sample_weights(sparse: bool, padding_idx: int | None, trained: tuple[bool, bool], form: str) -> None:
    batch = (IDS, STARTS) if form == "offsets" else (IDS[:8].reshape(4, 2), None)
    grads = []
    for module in pair(EmbeddingBag, ROWS, DIM, mode="sum", sparse=sparse, padding_idx=padding_idx):
        module.requires_grad_(trained[0])
        factors = integers(*batch[0].shape, seed=2).requires_grad_(trained[1])
        out = module(*batch, factors)
        out.backward(integers(*out.shape, seed=1))
        grads.append((out, module.weight, factors))
    (out, weight, factors), (want, their_weight, their_factors) = grads
    assert torch.equal(out, want)
    if trained[0]:
        assert_same_grad(weight, their_weight)
    else:
        assert weight.grad is None
    if trained[1]:
        assert torch.equal(factors.grad, their_factors.grad)
    else:
        assert factors.grad is None


def test_an_unweighted_sum_of_real_values_has_torchs_bits() -> None:
    ours, theirs = pair(EmbeddingBag, 100, 33, real=True, mode="sum")
    ids = torch.randint(0, 100, (500,), generator=torch.Generator().manual_seed(5))
    starts = torch.arange(0, 500, 20)
    assert torch.equal(ours(ids, starts), theirs(ids, starts))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_are_torchs_to_the_bit(sparse: bool, padding_idx: int | None, shape: tuple[int, ...], fused: bool,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        monkeypatch.setattr(lookups, "FUSED_ELEMENTS", 0)
    path = "torch: a sparse gradient without pooling" if sparse else "fused bag" if fused else "torch: a small lookup"
    for dtype in (torch.int32, torch.int64):
        ours, theirs = pair(Embedding, ROWS, DIM, sparse=sparse, padding_idx=padding_idx)
        ids = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(6), dtype=dtype)
        if shape or not sparse or padding_idx is None:           # torch's own backward fails on sparse rows of a 0-d id with padding
            run_both(ours, theirs, ids)
        run_both(ours, theirs, ids.flatten()[:0])
        assert ours.last_path == path


def test_a_single_id_with_padding_has_a_sparse_gradient() -> None:
    module = Embedding(ROWS, DIM, padding_idx=0, sparse=True)
    for row in (0, 3):
        module(torch.tensor(row)).sum().backward()
    assert dense_grad(module.weight).sum(1).tolist() == [0, 0, 0, DIM, 0, 0, 0]


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"max_norm": 1.0}])
@pytest.mark.parametrize("elements", [0, lookups.FUSED_ELEMENTS])
def test_an_embedding_names_ids_out_of_range(options: dict[str, Any], elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "FUSED_ELEMENTS", elements)
    for bad in (-1, ROWS):
        with pytest.raises(IndexError, match=f"id {bad} at position 3 is out of range.* {ROWS} rows"):
            Embedding(ROWS, DIM, **options)(torch.tensor([[0, 1], [2, bad]]))


def test_large_lookups_with_dense_gradients_run_in_the_kernels() -> None:
    ours, theirs = pair(Embedding, ROWS, DIM)
    run_both(ours, theirs, torch.randint(0, ROWS, (lookups.FUSED_ELEMENTS // DIM, 2)))
    assert ours.last_path == "fused bag"


def test_gradients_that_arrive_in_any_layout() -> None:
    """Expanded (a sum's), transposed, and a slice of a wider gradient (a concatenation's)."""
    for arrived in (torch.ones(1, 1).expand(5, DIM), integers(DIM, 5).t(), integers(5, 3 * DIM)[:, DIM:2 * DIM]):
        ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="sum")
        ours(IDS, STARTS).backward(arrived)
        theirs(IDS, STARTS).backward(arrived)
        assert_same_grad(ours.weight, theirs.weight)


def test_gradients_accumulate_over_forwards_and_backwards() -> None:
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="sum", sparse=True)
    for module in (ours, theirs):
        first, second = module(IDS, STARTS), module(IDS.flip(0), STARTS)
        with torch.no_grad():
            module(IDS, STARTS)
        second.sum().backward()
        (2 * first).sum().backward()
    assert_same_grad(ours.weight, theirs.weight)


def test_ids_may_change_after_the_forward() -> None:
    ids, starts = IDS.clone(), STARTS.clone()
    module = filled(EmbeddingBag(ROWS, DIM, mode="sum"), integers(ROWS, DIM))
    out = module(ids, starts)
    ids.zero_()
    starts.zero_()
    out.sum().backward()
    np.testing.assert_array_equal(dense_grad(module.weight), pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)


def test_weights_may_change_before_the_backward_of_a_sum_but_not_of_its_factors() -> None:
    module, factors = EmbeddingBag(ROWS, DIM, mode="sum"), torch.ones(len(IDS))
    out = module(IDS, STARTS, factors)
    with torch.no_grad():
        module.weight.add_(1)
    out.sum().backward()
    out = module(IDS, STARTS, factors.requires_grad_())
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nothing_is_recorded_without_a_gradient_to_give() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    with torch.no_grad():
        assert not module(IDS, STARTS).requires_grad
    with torch.inference_mode():
        assert module(IDS, STARTS).is_inference()
    assert not module.requires_grad_(False)(IDS, STARTS).requires_grad


def test_a_default_dtype_does_not_reach_the_lookups() -> None:
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="mean", dtype=torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        out, want = ours(IDS, STARTS), theirs(IDS, STARTS)
        out.sum().backward()
        want.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == ours.weight.grad.dtype == torch.float32
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"mode": "max"}, {"dtype": torch.bfloat16}])
def test_a_default_device_does_not_reach_the_lookups(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what they allocate for their gradients."""
    monkeypatch.setattr(ops, "BACKEND", "cpu")
    module, factors = EmbeddingBag(ROWS, DIM, **{"mode": "sum", **options}), torch.ones(len(IDS), requires_grad=True)
    weighted = (factors,) if not options else ()
    with torch.device("meta"):
        out = module(IDS, STARTS, *weighted)
        grads = torch.autograd.grad(out, [module.weight, *weighted], torch.ones_like(out, device="cpu"), retain_graph=True)
        if module.mode == "sum":
            twice, = torch.autograd.grad(out, module.weight, torch.ones_like(out, device="cpu"), create_graph=True)
            assert torch.equal(twice.to_dense(), grads[0].to_dense())
    assert {each.device.type for each in (out, *grads)} == {"cpu"}


@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("real", [False, True])
def test_maxima_are_torchs(padding_idx: int | None, real: bool) -> None:
    """Small integers, of which many are equal, and bags that are empty, of padding alone, and of one row twice."""
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, real=real, mode="max", padding_idx=padding_idx)
    run_both(ours, theirs, torch.tensor([0, 3, 0, 1, 1, 5, 2, 4, 2]), torch.tensor([0, 0, 3, 5]))
    run_both(ours, theirs, IDS[:8].reshape(2, 4))
    assert ours.last_path == "fused bag"


def test_maxima_can_be_differentiated_twice() -> None:
    module = filled(EmbeddingBag(ROWS, DIM, mode="max"), integers(ROWS, DIM))
    arrived = integers(len(STARTS), DIM, seed=5).requires_grad_()
    once, = torch.autograd.grad(module(IDS, STARTS), module.weight, arrived, create_graph=True)
    factors = integers(ROWS, DIM, seed=6)
    twice, = torch.autograd.grad(once, arrived, factors)
    reference = nn.EmbeddingBag(ROWS, DIM, mode="max")
    reference.load_state_dict(module.state_dict())
    want, = torch.autograd.grad(reference(IDS, STARTS), reference.weight, arrived.detach())
    assert torch.equal(once, want)
    assert torch.equal((twice * arrived).sum(), (want * factors).sum())      # the gradient is linear in what arrived
