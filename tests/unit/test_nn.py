"""EmbeddingBag and Embedding beside torch's: the same values, gradients and module protocol."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import logging
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from sparselift import ops
from sparselift.functional import lookups
from sparselift.kernels import checks
from sparselift.nn import Embedding, EmbeddingBag
from tests.unit.lookup_loops import dense_grad, filled, flat, offsets, pool, use_backend

ROWS, DIM = 7, 5
BAGS = [[1, 2, 1], [], [6], [0, 0, 3, 6], [0]]
IDS, STARTS = flat(BAGS), offsets(BAGS)


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(request.param, monkeypatch)


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: their sums and products are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def pair(kind: type, *args: Any, real: bool = False, **options: Any) -> tuple[Any, Any]:
    """Our module and torch's, with the same weights."""
    ours = kind(*args, **options)
    rows, dim = ours.weight.shape
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(3)) if real else integers(rows, dim)
    theirs = {EmbeddingBag: nn.EmbeddingBag, Embedding: nn.Embedding}[kind](*args, **options)
    return filled(ours, values), filled(theirs, values)


def assert_same_grad(ours: Tensor, theirs: Tensor) -> None:
    a, b = ours.grad, theirs.grad
    assert a.layout == b.layout
    if a.is_sparse:
        assert a.is_coalesced() == b.is_coalesced()
        assert torch.equal(a._indices(), b._indices())
        assert torch.equal(a._values(), b._values())
    else:
        assert torch.equal(a, b)


def run_both(ours: nn.Module, theirs: nn.Module, *args: Any) -> None:
    """One forward and backward of each; equal to the bit."""
    out, want = ours(*args), theirs(*args)
    assert torch.equal(out, want)
    arrived = integers(*out.shape, seed=1)
    out.backward(arrived)
    want.backward(arrived)
    assert_same_grad(ours.weight, theirs.weight)


# ------------------------------------------------------------------------------------------------------ the kernels' way

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


# -------------------------------------------------------------------------------------------------------- torch's way

FALLBACKS = [
    ({"mode": "sum", "max_norm": 1.0}, "max_norm=1.0"),
    ({"mode": "max", "max_norm": 1.0}, "max_norm=1.0"),
    ({"mode": "max", "dtype": torch.float64}, "weight is torch.float64"),
    ({"mode": "mean", "max_norm": 0.5, "norm_type": 1.0}, "max_norm=0.5"),
    ({"mode": "sum", "dtype": torch.float64}, "weight is torch.float64"),
    ({"mode": "mean", "dtype": torch.float64, "padding_idx": 0}, "weight is torch.float64"),
]


@pytest.mark.parametrize("options, reason", FALLBACKS)
def test_what_the_kernels_lack_runs_in_torch(options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, real=True, **options)
    with caplog.at_level(logging.INFO, "sparselift"):
        run_both(ours, theirs, IDS, STARTS)
        run_both(ours, theirs, IDS[:8].reshape(2, 4))
    assert torch.equal(ours.weight, theirs.weight)               # max_norm rescales rows in place
    assert ours.last_path == f"torch: {reason}"
    assert [reason in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("options, reason", [
    ({"max_norm": 1.0}, "max_norm=1.0"),
    ({"dtype": torch.float64, "padding_idx": 1}, "weight is torch.float64"),
])
def test_rows_that_the_kernels_lack_run_in_torch(options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "FUSED_ELEMENTS", 0)
    ours, theirs = Embedding(ROWS, DIM, **options), nn.Embedding(ROWS, DIM, **options)
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        out = module(IDS[:8].reshape(2, 4))
        out.backward(torch.ones_like(out))
    assert torch.equal(ours.weight, theirs.weight)
    assert_same_grad(ours.weight, theirs.weight)
    assert ours.last_path == f"torch: {reason}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_rows_scaled_by_frequency(dtype: torch.dtype, sparse: bool, padding_idx: int | None) -> None:
    module = filled(Embedding(ROWS, DIM, sparse=sparse, padding_idx=padding_idx, scale_grad_by_freq=True, dtype=dtype), integers(ROWS, DIM))
    bags = [[row] for row in IDS.tolist()]
    want = pool(module.weight.detach().double().numpy(), bags, "sum", padding_idx=padding_idx, by_freq=True)
    out = module(IDS)
    out.sum().backward()
    assert torch.equal(out, module.weight[IDS])                  # the padding row is handed out like any other
    np.testing.assert_allclose(dense_grad(module.weight), want.weight_grad, rtol=1e-6)
    assert module.weight.grad.is_sparse == sparse


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_half_precision_values(mode: str) -> None:
    """Sums in float32, rounded once, in the kernels."""
    module = filled(EmbeddingBag(ROWS, DIM, mode=mode, dtype=torch.bfloat16, padding_idx=0), torch.rand(ROWS, DIM))
    want = pool(module.weight.detach().double().numpy(), BAGS, mode, padding_idx=0)
    out = module(IDS, STARTS)
    assert torch.equal(out, torch.from_numpy(want.out).float().bfloat16())
    assert module.last_path == "fused bag"


def test_half_precision_per_sample_weights() -> None:
    factors = [[0.5] * len(ids) for ids in BAGS]
    module = filled(EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float16), integers(ROWS, DIM))
    want = pool(module.weight.detach().double().numpy(), BAGS, "sum", factors)
    with pytest.raises(TypeError, match=r"per-sample weights must have the weight's dtype torch\.float16; got torch\.float32"):
        module(IDS, STARTS, flat(factors, torch.float32))
    given = flat(factors, torch.float16).requires_grad_()
    out = module(IDS, STARTS, given)
    assert module.last_path == "fused bag"
    out.sum().backward()
    np.testing.assert_array_equal(out.detach().numpy(), want.out)
    np.testing.assert_array_equal(dense_grad(module.weight), want.weight_grad)
    np.testing.assert_array_equal(given.grad.numpy(), want.sample_weight_grad)


def test_tables_that_are_not_contiguous_run_in_torch() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    module.weight = nn.Parameter(integers(DIM, ROWS).t())
    out = module(IDS, STARTS)
    np.testing.assert_array_equal(out.detach().numpy(), pool(module.weight.detach().numpy(), BAGS, "sum").out)
    assert module.last_path == "torch: weight has strides (1, 7)"


def test_meta_modules_run_in_torch() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum", device="meta")
    assert module(IDS.to("meta"), STARTS.to("meta")).shape == (5, DIM)
    assert module.last_path == "torch: weight is on meta"
    assert Embedding(ROWS, DIM, device="meta")(IDS.to("meta")).shape == (len(IDS), DIM)


def test_tables_that_no_backend_takes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="sum")
    monkeypatch.setattr(checks, "MAX_ROWS", ROWS - 1)
    run_both(ours, theirs, IDS, STARTS)
    assert ours.last_path == f"torch: table 'weight': rows must be in 1..{ROWS - 1}; got {ROWS}"
    ours.padding_idx = ROWS
    with pytest.raises(RuntimeError, match="padding_idx"):
        ours(IDS, STARTS)


def test_complex_rows_run_in_torch() -> None:
    module = Embedding(ROWS, DIM, dtype=torch.complex64).requires_grad_(False)
    assert torch.equal(module(IDS), module.weight[IDS])
    assert module.last_path == "torch: weight is torch.complex64"


def test_nested_inputs_run_in_torch() -> None:
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="sum")
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    assert torch.equal(ours(nested), theirs(nested))


@pytest.mark.parametrize("args, options", [
    ((IDS,), {}),
    ((IDS, STARTS.reshape(1, -1)), {}),
    ((IDS.reshape(3, 3), STARTS), {}),
    ((IDS.reshape(3, 3, 1),), {}),
    ((IDS, STARTS, torch.ones(3)), {}),
    ((IDS.reshape(3, 3), None, torch.ones(9)), {}),
    ((IDS, STARTS, torch.ones(3, 3)), {}),
    ((IDS[:0].reshape(5, 0), None, torch.ones(1, 0, 1)), {}),
    ((IDS, STARTS, torch.ones(9)), {"mode": "mean"}),
    ((IDS, STARTS), {"mode": "median"}),
    ((IDS, STARTS), {"mode": "max", "sparse": True}),
    ((IDS, STARTS.tolist()), {}),
])
@pytest.mark.parametrize("calls_before", [[], [(IDS, STARTS)], [(IDS.reshape(3, 3),)], [(IDS, STARTS, torch.ones(9))]])
def test_arguments_that_torch_refuses_are_refused_in_its_words(args: tuple, options: dict[str, Any], calls_before: list) -> None:
    errors = []
    for module in pair(EmbeddingBag, ROWS, DIM, **{"mode": "sum", **options}):
        for call in calls_before if not options else ():
            module(*call)
        with pytest.raises((ValueError, NotImplementedError, AttributeError, TypeError)) as caught:
            module(*args)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_per_sample_weights_of_another_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match="per-sample weights must be float32; got float64"):
        EmbeddingBag(ROWS, DIM, mode="sum")(IDS, STARTS, torch.ones(len(IDS), dtype=torch.float64))


def test_without_a_kernel_library_torch_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparselift.errors import KernelError

    build = ops.get_backend

    def missing(name: str) -> Any:
        if name != "reference":
            raise KernelError("the extension is not built")
        return build(name)

    monkeypatch.setattr(ops, "BACKEND", "cpu")
    monkeypatch.setattr(ops, "get_backend", missing)
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="sum")
    run_both(ours, theirs, IDS, STARTS)
    assert ours.last_path == "torch: the extension is not built"
    with pytest.raises(ValueError, match="no offsets for 9 ids"):
        ours(IDS, STARTS[:0])


# ------------------------------------------------------------------------------------------------- module protocol

@pytest.mark.parametrize("ours, theirs", [(EmbeddingBag, nn.EmbeddingBag), (Embedding, nn.Embedding)])
def test_the_face_is_torchs(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    assert ours.__name__ == theirs.__name__
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert list(inspect.signature(ours.forward).parameters) == list(inspect.signature(theirs.forward).parameters)
    options = {"padding_idx": 2, "max_norm": 1.0, "sparse": True}
    assert repr(ours(ROWS, DIM, **options)) == repr(theirs(ROWS, DIM, **options))
    torch.manual_seed(0)
    a = ours(ROWS, DIM, padding_idx=1)
    torch.manual_seed(0)
    b = theirs(ROWS, DIM, padding_idx=1)
    assert torch.equal(a.weight, b.weight)
    assert a.state_dict().keys() == b.state_dict().keys()
    pretrained = ours.from_pretrained(b.weight.detach(), sparse=True)
    assert type(pretrained) is ours
    assert not pretrained.weight.requires_grad


def test_options_that_change_after_a_call_count() -> None:
    module = filled(EmbeddingBag(ROWS, DIM, mode="sum"), integers(ROWS, DIM))

    def check(path: str = "fused bag") -> None:
        module.zero_grad()
        starts = offsets(BAGS, module.include_last_offset)
        want = pool(module.weight.detach().double().numpy(), BAGS, module.mode, padding_idx=module.padding_idx)
        out = module(IDS, starts)
        out.sum().backward()
        np.testing.assert_allclose(out.detach().double().numpy(), want.out, rtol=1e-6)
        np.testing.assert_allclose(dense_grad(module.weight), want.weight_grad, rtol=1e-6)
        assert module.weight.grad.is_sparse == module.sparse
        assert module.last_path == path

    check()
    module.mode = "mean"
    check()
    module.padding_idx = 6
    check()
    module.sparse = True
    check()
    module.include_last_offset = True
    check()
    module.weight = nn.Parameter(integers(ROWS + 3, DIM + 2, seed=9))
    check()
    module.double()
    check("torch: weight is torch.float64")
    module.float()
    check()


def test_a_table_that_grows_leaves_no_programs_behind() -> None:
    module, counts = EmbeddingBag(1, DIM, mode="sum"), []
    for rows in range(1, 30):
        module.weight = nn.Parameter(torch.ones(rows, DIM))
        assert module(torch.tensor([rows - 1]), torch.tensor([0])).sum() == DIM
        counts.append(len(module._routes))
    assert max(counts) < 10


@pytest.mark.parametrize("kind", [EmbeddingBag, Embedding])
def test_copies_are_independent_and_compile_their_own_lookups(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "FUSED_ELEMENTS", 0)
    module = kind(ROWS, DIM)
    args = (IDS[:8].reshape(4, 2),)
    want = module(*args).detach()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert type(other) is kind
        assert other.last_path == "no call yet"
        assert torch.equal(other(*args), want)
        assert other._routes is not module._routes
    with torch.no_grad():
        module.weight.zero_()
    assert [bool(other(*args).any()) for other in copies] == [True, False, True, True]    # a shallow copy shares its weight


def test_state_loaded_by_assignment_is_used() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    module(IDS, STARTS)
    module.load_state_dict({"weight": torch.ones(ROWS, DIM)}, assign=True)
    assert torch.equal(module(IDS, STARTS)[0], torch.full((DIM,), 3.0))


def test_hooks_run() -> None:
    module, seen = EmbeddingBag(ROWS, DIM, mode="sum"), []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_hook(lambda *_: seen.append("module"))
    module.weight.register_hook(lambda grad: seen.append("weight") or 2 * grad)
    module.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    module(IDS, STARTS).sum().backward()
    assert seen[:2] == ["before", "after"]
    assert sorted(seen[2:]) == ["accumulated", "module", "weight"]
    np.testing.assert_array_equal(dense_grad(module.weight), 2 * pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)


def test_parametrized_weights_are_trained() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module = filled(EmbeddingBag(ROWS, DIM, mode="sum"), integers(ROWS, DIM))
    plain = module.weight.detach().numpy().copy()
    parametrize.register_parametrization(module, "weight", Double())
    out = module(IDS, STARTS)
    out.sum().backward()
    np.testing.assert_array_equal(out.detach().numpy(), 2 * pool(plain, BAGS, "sum").out)
    assert module.last_path == "fused bag"
    np.testing.assert_array_equal(dense_grad(module.parametrizations.weight.original), 2 * pool(plain, BAGS, "sum").weight_grad)


def test_modules_may_share_a_weight() -> None:
    bag, rows = EmbeddingBag(ROWS, DIM, mode="sum"), Embedding(ROWS, DIM)
    rows.weight = bag.weight
    (bag(IDS, STARTS).sum() + rows(IDS).sum()).backward()
    np.testing.assert_array_equal(dense_grad(bag.weight), 2 * pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)


def test_threads_may_share_a_module() -> None:
    module = filled(EmbeddingBag(1000, 16, mode="sum"), integers(1000, 16))
    batches = [torch.randint(0, 1000, (64, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    wrong = []

    def work(ids: Tensor) -> None:
        for _ in range(20):
            out = module(ids)
            grad, = torch.autograd.grad(out.sum(), module.weight)
            if not torch.equal(out, module.weight[ids].sum(1)) or grad.sum() != ids.numel() * 16:
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(ids,)) for ids in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --------------------------------------------------------------------------------- transforms, tracers, higher orders

def test_backward_may_be_repeated_where_the_graph_is_kept() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    loss = module(IDS, STARTS).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    np.testing.assert_array_equal(dense_grad(module.weight), 2 * pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)
    with pytest.raises(RuntimeError, match=r"a second time.*retain_graph=True"):
        loss.backward()


def test_a_backward_frees_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the loss, and with it the graph, is still there."""
    batches, run = [], ops.BagLookup.run

    def remember(self: ops.BagLookup, *args: Any) -> Any:
        batch, out = run(self, *args)
        batches.append(batch)
        return batch, out

    monkeypatch.setattr(ops.BagLookup, "run", remember)
    loss = EmbeddingBag(ROWS, DIM, mode="sum")(IDS, STARTS).sum()
    counts = [sys.getrefcount(batches[0])]
    for retain_graph in (True, False):
        loss.backward(retain_graph=retain_graph)
        counts.append(sys.getrefcount(batches[0]))
    assert counts == [counts[0], counts[0], counts[0] - 1]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives(mode: str, padding_idx: int | None, weighted: bool) -> None:
    """Against the same bags written as a matrix product, which torch differentiates twice."""
    if weighted and mode == "mean":
        return
    module = filled(EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx), torch.rand(ROWS, DIM))
    factors = torch.rand(len(IDS))
    results = []
    for fused in (True, False):
        weight, given = module.weight, factors.clone().requires_grad_()
        weight.grad = None
        if fused:
            out = module(IDS, STARTS, given if weighted else None)
        else:
            kept = (padding_idx != IDS).float() if padding_idx is not None else torch.ones(len(IDS))
            member = torch.zeros(len(BAGS), len(IDS))
            for bag, (begin, ids) in enumerate(zip(STARTS.tolist(), BAGS)):
                member[bag, begin:begin + len(ids)] = kept[begin:begin + len(ids)]
            if mode == "mean":
                member = member / member.sum(1, keepdim=True).clamp(min=1)
            out = (member * given if weighted else member) @ weight[IDS]
        wanted = (weight, given) if weighted else (weight,)
        grads = torch.autograd.grad(out.pow(3).sum(), wanted, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        results.append([out.detach(), *(grad.detach() for grad in grads), weight.grad.clone(), *([given.grad] if weighted else [])])
    for ours, want in zip(*results):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_can_be_differentiated_twice(sparse: bool) -> None:
    ours, theirs = pair(Embedding, ROWS, DIM, sparse=sparse, padding_idx=2)
    results = []
    for module in (ours, theirs):
        x = torch.ones(DIM, requires_grad=True)
        grad, = torch.autograd.grad((module(IDS) * x).sum(), module.weight, create_graph=True)
        results.append((grad.to_dense(), *torch.autograd.grad(grad.to_dense().square().sum(), x)))
    assert all(map(torch.equal, *results))


def test_batched_gradients() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    out, arrived = module(IDS, STARTS), integers(3, 5, DIM)
    batched, = torch.autograd.grad(out, module.weight, arrived, is_grads_batched=True, retain_graph=True)
    for each, want in zip(arrived, batched):
        assert torch.equal(torch.autograd.grad(out, module.weight, each, retain_graph=True)[0], want)


def test_torch_func_sees_torchs_operations() -> None:
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="sum")
    grads = []
    for module in (ours, theirs):
        def loss(parameters: dict[str, Tensor], ids: Tensor, module: nn.Module = module) -> Tensor:
            return torch.func.functional_call(module, parameters, (ids[None],)).square().sum()

        parameters = {"weight": module.weight.detach()}
        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, IDS[:8].reshape(4, 2))
        grads.append(per_sample["weight"])
    assert torch.equal(*grads)
    assert ours.last_path == "torch: a torch.func transform is active"


def test_functional_call_replaces_the_weight() -> None:
    module, other = EmbeddingBag(ROWS, DIM, mode="sum"), integers(ROWS, DIM).requires_grad_()
    out = torch.func.functional_call(module, {"weight": other}, (IDS, STARTS))
    out.sum().backward()
    np.testing.assert_array_equal(out.detach().numpy(), pool(other.detach().numpy(), BAGS, "sum").out)
    np.testing.assert_array_equal(dense_grad(other), pool(other.detach().numpy(), BAGS, "sum").weight_grad)
    assert module.last_path == "fused bag"


@pytest.mark.parametrize("elements", [0, lookups.FUSED_ELEMENTS])
def test_forward_mode_derivatives_of_rows(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "FUSED_ELEMENTS", elements)
    module, tangent = Embedding(ROWS, DIM), integers(ROWS, DIM, seed=3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(module.weight.detach(), tangent)
        out = torch.func.functional_call(module, {"weight": dual}, (IDS,))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(out).tangent, tangent[IDS])


@pytest.mark.parametrize("options", [{"mode": "sum"}, {"mode": "max"}])
def test_traces_hold_torchs_operations_and_replay_on_other_ids(options: dict[str, Any]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = EmbeddingBag(ROWS, DIM, **options)
    traced = make_fx(lambda ids, starts: module(ids, starts))(IDS, STARTS)
    assert any("embedding_bag" in str(node.target) for node in traced.graph.nodes)
    assert torch.equal(traced(IDS.flip(0), STARTS), module(IDS.flip(0), STARTS))
    assert torch.equal(torch.fx.symbolic_trace(module)(IDS, STARTS), module(IDS, STARTS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "error::torch.jit.TracerWarning")
def test_jit_traces_hold_torchs_operations() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    traced = torch.jit.trace(module, (IDS, STARTS))
    assert torch.equal(traced(IDS.flip(0), STARTS), module(IDS.flip(0), STARTS))


def test_a_watched_batch_is_checked_all_the_same() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = EmbeddingBag(ROWS, DIM, mode="sum")
    with FlopCounterMode(display=False), pytest.raises(IndexError, match="id 7 at position 0"):
        module(torch.tensor([7]), torch.tensor([0]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    factors = torch.ones(len(IDS), requires_grad=True)
    checkpoint(module, IDS, STARTS, factors, use_reentrant=reentrant).sum().backward()
    np.testing.assert_array_equal(dense_grad(module.weight), pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)
    torch.testing.assert_close(factors.grad, module.weight.detach()[IDS].sum(1))


@pytest.mark.parametrize("kind", [EmbeddingBag, Embedding])
def test_compiled_models_compute_the_same(kind: type) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = filled(kind(ROWS, DIM, sparse=True), integers(ROWS, DIM))
            self.dense = nn.Linear(DIM, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.dense(self.table(ids) * 2).sum()

    model = Model()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=kind is Embedding)
    for ids in (IDS[:8].reshape(4, 2), IDS[:6].reshape(2, 3)):
        losses = [each(ids) for each in (model, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(model.table.weight.grad.to_dense(), compiled.table.weight.grad.to_dense())
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.full((4, 2), ROWS))
