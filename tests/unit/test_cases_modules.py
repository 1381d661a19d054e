"""Inputs on which embedding modules have been wrong somewhere: each gives the float64 value, or a clear error before anything changes."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from sparselift.nn import Embedding, EmbeddingBag
from tests.unit.lookup_loops import dense_grad, filled, flat, offsets, pool, use_backend

MODES = ["sum", "mean", "max"]
KINDS = [*((mode, False) for mode in MODES), ("sum", True), ("mean", True)]     # (mode, sparse): torch has no sparse max


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(request.param, monkeypatch)


def check(module: EmbeddingBag, bags: list, **options: object) -> None:
    """Forward and backward of `bags` against the loops, on values whose sums are exact."""
    want = pool(module.weight.detach().double().numpy(), bags, module.mode, padding_idx=module.padding_idx, **options)
    out = module(flat(bags), offsets(bags, module.include_last_offset))
    out.sum().backward()
    np.testing.assert_allclose(out.detach().double().numpy(), want.out, rtol=1e-6)
    np.testing.assert_allclose(dense_grad(module.weight), want.weight_grad, rtol=1e-6)
    assert module.weight.grad.is_sparse == module.sparse


@pytest.mark.parametrize("mode, sparse", KINDS)
@pytest.mark.parametrize("bags", [[[0], [], [1, 2], [], [3]], [[], []], [[], [4, 4], []]], ids=["between", "all", "around"])
def test_empty_bags_are_zeros_and_send_no_gradient(mode: str, sparse: bool, bags: list) -> None:
    weight = [[-0.5, 1, 2], [3, -1.5, 0.5], [-2, -2.5, -3], [0.25, 0.75, -1], [9, 9, 9]]
    check(filled(EmbeddingBag(5, 3, mode=mode, sparse=sparse), weight), bags)


@pytest.mark.parametrize("mode", MODES)
def test_include_last_offset_means_nothing_for_2d_inputs(mode: str) -> None:
    ids = [[1, 2], [4, 4], [9, 0]]
    module = filled(EmbeddingBag(10, 3, mode=mode, include_last_offset=True), np.arange(30).reshape(10, 3))
    out = module(torch.tensor(ids))
    np.testing.assert_allclose(out.detach().numpy(), pool(module.weight.detach().numpy(), ids, mode).out)


@pytest.mark.parametrize("mode, sparse", KINDS)
def test_ids_after_the_last_offset_are_refused(mode: str, sparse: bool) -> None:
    module = EmbeddingBag(3, 4, mode=mode, sparse=sparse, include_last_offset=True)
    with pytest.raises(ValueError, match=r"last offset must equal the number of ids \(5\); got 4"):
        module(torch.tensor([0, 0, 1, 2, 0]), torch.tensor([0, 3, 4]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ids, starts, message", [
    ([1, 2, 3], [0, 1000, 3], "offset 1000 at position 1 passes the 3 ids"),
    ([1, 2, 3], [0, 4], "offset 4 at position 1 passes the 3 ids"),
    ([], [0, 2, 0], "offset 2 at position 1 passes the 0 ids"),
    ([1, 2, 3], [0, -5, 3], "must not decrease; got -5 after 0 at position 1"),
    ([1, 2, 3], [0, 2, 1], "must not decrease; got 1 after 2 at position 2"),
    ([1, 2, 3], [1, 2], "must start at 0; got 1"),
    ([1, 2], [], "no offsets for 2 ids"),
])
def test_offsets_that_make_no_bags_are_refused(mode: str, dtype: torch.dtype, ids: list, starts: list, message: str) -> None:
    module = EmbeddingBag(10, 5, mode=mode, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        module(torch.tensor(ids, dtype=torch.int64), torch.tensor(starts, dtype=torch.int64))


@pytest.mark.parametrize("bad", [3, -1, 10**9, 2**40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_are_named(bad: int, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    if bad > torch.iinfo(index_dtype).max:
        return
    for mode in MODES:
        module = EmbeddingBag(3, 4, mode=mode, dtype=dtype)
        before = module.weight.detach().clone()
        with pytest.raises(IndexError, match=f"id {bad} at position 2 is out of range.* 3 rows"):
            module(torch.tensor([0, 2, bad], dtype=index_dtype), torch.tensor([0], dtype=index_dtype))
        assert torch.equal(module.weight, before)
        assert module.weight.grad is None


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bags", [[[1, 1, 3]], [[1, 1], [3, 0, 1]]])
def test_scale_grad_by_freq_divides_by_the_rows_own_count(mode: str, sparse: bool, bags: list) -> None:
    check(filled(EmbeddingBag(4, 3, mode=mode, sparse=sparse, scale_grad_by_freq=True), np.ones((4, 3))), bags, by_freq=True)


def test_per_sample_weights_of_a_frozen_table_get_their_gradient() -> None:
    weight = [[1, 2, 3], [0.5, -1, 0.25], [0, 0, 0], [0, 0, 0], [0, 0, 0], [2, 2, -7]]
    bags, factors, arrived = [[0, 1], [1, 5]], [[1.0, 2], [3, 4]], [[1, 0.5, -1], [2, 1, 1]]
    want = pool(weight, bags, "sum", factors, grad=arrived)
    module = filled(EmbeddingBag(6, 3, mode="sum"), weight).requires_grad_(False)
    given = flat(factors, torch.float32).requires_grad_()
    out = module(flat(bags), offsets(bags), given)
    out.backward(torch.tensor(arrived))
    np.testing.assert_allclose(out.detach().numpy(), want.out)
    np.testing.assert_allclose(given.grad.numpy(), want.sample_weight_grad)
    assert module.weight.grad is None


@pytest.mark.parametrize("mode, sparse", KINDS)
def test_padding_counts_for_nothing(mode: str, sparse: bool) -> None:
    """Not in sums, not in means; what the padding row holds never leaks, and it gets no gradient."""
    weight = -np.arange(1.0, 19).reshape(6, 3)
    weight[1] = np.nan
    module = filled(EmbeddingBag(6, 3, mode=mode, sparse=sparse, padding_idx=-5), weight)
    check(module, [[1, 1], [0, 1, 5]])
    assert np.array_equal(dense_grad(module.weight)[1], [0, 0, 0])


def test_the_maximum_of_negative_rows() -> None:
    """One winner a column takes the whole gradient, empty bags give zero."""
    weight = [[-1.0 - 0.1 * ((i * 5 + c * 3) % 7) - i * 0.01 for c in range(4)] for i in range(7)]
    bags, arrived = [[0, 1], [], [0], [2, 3, 4, 6, 4]], [[1.0, 2, 3, 4], [9, 9, 9, 9], [5, 6, 7, 8], [-1, -2, -3, -4]]
    want = pool(weight, bags, "max", grad=arrived)
    module = filled(EmbeddingBag(7, 4, mode="max", include_last_offset=True), weight)
    out = module(flat(bags), offsets(bags, last=True))
    out.backward(torch.tensor(arrived))
    np.testing.assert_allclose(out.detach().numpy(), want.out, rtol=1e-6)
    np.testing.assert_allclose(dense_grad(module.weight), want.weight_grad, rtol=1e-6)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_ids_and_offsets_may_differ_in_dtype(ids_dtype: torch.dtype, offsets_dtype: torch.dtype) -> None:
    bags = [[0, 1], [6]]
    for mode in MODES:
        module = filled(EmbeddingBag(7, 4, mode=mode), np.arange(28).reshape(7, 4))
        out = module(flat(bags, ids_dtype), offsets(bags, dtype=offsets_dtype))
        np.testing.assert_allclose(out.detach().numpy(), pool(module.weight.detach().numpy(), bags, mode).out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
@pytest.mark.parametrize("mode", MODES)
def test_ids_of_other_dtypes_are_refused(dtype: torch.dtype, mode: str) -> None:
    module = EmbeddingBag(7, 4, mode=mode)
    with pytest.raises(TypeError, match="indices must be int32 or int64"):
        module(torch.tensor([0, 1]).to(dtype), torch.tensor([0]))
    with pytest.raises(TypeError, match="offsets must be int32 or int64"):
        module(torch.tensor([0, 1]), torch.tensor([0]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode, sparse", [("sum", False), ("sum", True), ("max", False)])
def test_half_precision_sums_do_not_stall(dtype: torch.dtype, mode: str, sparse: bool) -> None:
    """bf16 sums of ones stop at 256 and fp16 sums at 2048, unless they are summed in float32 and rounded once."""
    ids = torch.ones(4096, dtype=torch.int64)
    for starts, total in ((torch.tensor([0]), 1 if mode == "max" else 4096), (torch.arange(4096), 4096)):
        module = filled(EmbeddingBag(2, 5, mode=mode, sparse=sparse, dtype=dtype), np.ones((2, 5)))
        out = module(ids, starts)
        out.float().sum().backward()
        assert out.dtype == dtype
        assert set(out.flatten().tolist()) == {4096.0 if mode == "sum" and len(starts) == 1 else 1.0}
        assert module.weight.grad.dtype == dtype
        assert dense_grad(module.weight).tolist() == [[0.0] * 5, [total] * 5]


@pytest.mark.parametrize("mode, sparse", KINDS)
@pytest.mark.parametrize("shape, bags", [((0, 3), 0), ((3, 0), 3), ((0,), 0)])
def test_no_bags_and_bags_of_nothing(mode: str, sparse: bool, shape: tuple, bags: int) -> None:
    module = EmbeddingBag(10, 5, mode=mode, sparse=sparse)
    ids = torch.zeros(shape, dtype=torch.int64)
    out = module(ids) if len(shape) == 2 else module(ids, ids)
    out.sum().backward()
    assert out.tolist() == [[0.0] * 5] * bags
    assert module.weight.grad.shape == (10, 5)
    assert not dense_grad(module.weight).any()


@pytest.mark.parametrize("mode", MODES)
def test_a_table_without_rows(mode: str) -> None:
    module = EmbeddingBag(0, 5, mode=mode)
    out = module(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
    out.sum().backward()
    assert out.tolist() == [[0.0] * 5] * 2
    assert module.weight.grad.shape == (0, 5)
    with pytest.raises(IndexError, match="id 0 at position 0 is out of range for table 'weight' of 0 rows"):
        module(torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize("mode, sparse", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("by_freq", [False, True])
def test_a_table_without_columns(mode: str, sparse: bool, dtype: torch.dtype, by_freq: bool) -> None:
    if by_freq and mode == "max":
        return
    module = EmbeddingBag(5, 0, mode=mode, sparse=sparse, dtype=dtype, scale_grad_by_freq=by_freq)
    out = module(torch.tensor([0, 1, 4]), torch.tensor([0, 2]))
    out.sum().backward()
    assert (out.shape, out.dtype, module.weight.grad.shape) == ((2, 0), dtype, (5, 0))
    with pytest.raises(IndexError, match=r"id 5 at position 2 .* 5 rows"):
        module(torch.tensor([0, 1, 5]), torch.tensor([0, 2]))


@pytest.mark.parametrize("kind", [EmbeddingBag, Embedding])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
def test_ids_without_values_are_refused(kind: type, dtype: torch.dtype, sparse: bool) -> None:
    """torch gives rows of memory that nobody wrote."""
    with pytest.raises(TypeError, match="indices must be on the CPU; got meta"):
        kind(5, 3, dtype=dtype, sparse=sparse)(torch.zeros(2, 2, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("mode, sparse", KINDS)
def test_a_table_is_as_it_was_after_a_call_that_is_refused(mode: str, sparse: bool) -> None:
    """max_norm rescales no row before all ids, offsets and weights are known to be good."""
    module = filled(EmbeddingBag(5, 3, mode=mode, sparse=sparse, max_norm=0.5), np.ones((5, 3)))
    for ids, starts, weights in (([0, 1, 5], [0, 2], None), ([0, 1, 2], [0, 4], None), ([0, 1, 2], [1, 2], None), ([0, 1, 2], [], None),
                                 ([0, 1, 2], [0, 2], torch.ones(3, dtype=torch.float64))):
        if weights is not None and mode != "sum":
            continue
        with pytest.raises((IndexError, ValueError, TypeError)):
            module(torch.tensor(ids), torch.tensor(starts, dtype=torch.int64), weights)
        assert torch.equal(module.weight, torch.ones(5, 3))


def test_sparse_gradients_of_two_backwards_add_up() -> None:
    module = filled(EmbeddingBag(5, 2, mode="sum", sparse=True), np.zeros((5, 2)))
    for bags in ([[1, 1, 3]], [[1, 4]]):
        module(flat(bags), offsets(bags)).sum().backward()
    assert dense_grad(module.weight).tolist() == [[0, 0], [3, 3], [0, 0], [1, 1], [1, 1]]
    assert torch.linalg.vector_norm(module.weight.grad.coalesce().values()).item() == pytest.approx(22**0.5)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 9, 13, 17, 31, 33, 127, 129, 1023, 1025, 1280, 2049])
def test_any_width_on_rows_off_the_16_byte_boundary(dim: int) -> None:
    values = np.random.RandomState(dim).randint(-8, 9, (20, dim)) / 4.0
    bags = [[(7 * b + 3 * k) % 20 for k in range(4)] for b in range(10)]
    for mode in ("sum", "max"):
        shifted = torch.zeros(20 * dim + 1)[1:].view(20, dim)
        shifted.copy_(torch.from_numpy(values))
        module = EmbeddingBag(20, dim, mode=mode)
        module.weight = nn.Parameter(shifted)
        check(module, bags)


def test_gradients_are_the_same_bits_in_every_run_and_at_any_thread_count() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, arrived = torch.randn(50, 16, generator=generator), torch.randn(400, 16, generator=generator)
    ids, starts = torch.randint(0, 50, (2000,), generator=generator), torch.arange(0, 2000, 5)

    def grad(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        module = filled(EmbeddingBag(50, 16, mode="sum"), weight)
        module(ids, starts).backward(arrived)
        return module.weight.grad

    threads = torch.get_num_threads()
    try:
        runs = [grad(2) for _ in range(5)] + [grad(1)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(runs[0], run) for run in runs)
    want = np.zeros((50, 16))
    np.add.at(want, ids.numpy(), arrived.double().numpy().repeat(5, 0))
    np.testing.assert_allclose(runs[0].numpy(), want, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_copies_and_checkpoints_keep_every_option(mode: str) -> None:
    bags = [[0, 2], [3]]
    batch = flat(bags), offsets(bags, last=True)
    options = {"mode": mode, "padding_idx": 2, "include_last_offset": True}
    module = filled(EmbeddingBag(4, 3, **options), np.arange(12).reshape(4, 3))
    want = pool(module.weight.detach().numpy(), bags, mode, padding_idx=2).out
    module(*batch)
    assert list(module.state_dict()) == ["weight"]
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    stock = nn.EmbeddingBag(4, 3, **options)
    stock.load_state_dict(torch.load(saved, weights_only=True))
    back = EmbeddingBag(4, 3, **options)
    back.load_state_dict(stock.state_dict())
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), stock, back]
    with torch.no_grad():
        module.weight.zero_()
    for other in copies:
        np.testing.assert_allclose(other(*batch).detach().numpy(), want)
        assert (other.mode, other.padding_idx, other.include_last_offset) == (mode, 2, True)
