"""What the kernels lack runs in torch, says why, and is refused in torch's words."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparselift import ops
from sparselift.functional import lookups
from sparselift.kernels import checks
from sparselift.nn import Embedding, EmbeddingBag
from tests.unit.lookup_loops import dense_grad, filled, flat, pool, use_backend
from tests.unit.module_pairs import BAGS, DIM, IDS, ROWS, STARTS, assert_same_grad, integers, pair, run_both


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(request.param, monkeypatch)

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
