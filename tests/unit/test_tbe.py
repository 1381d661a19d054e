"""TableBatchedEmbeddingBags beside one torch.nn.EmbeddingBag a table."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparselift import ops
from sparselift.ir import Table
from sparselift.nn import TableBatchedEmbeddingBags
from sparselift.optim import RowWiseAdagrad
from tests.unit.lookup_loops import use_backend

TABLES = [(7, 5), (3, 1), (100, 8)]


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(request.param, monkeypatch)


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def whole_numbers(module: TableBatchedEmbeddingBags) -> TableBatchedEmbeddingBags:
    with torch.no_grad():
        for seed, weight in enumerate(module.weights):
            weight.copy_(integers(*weight.shape, seed=seed))
    return module


def batch(tables: list[tuple[int, int]], lengths: list[list[int]], seed: int = 0,
          dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Ids and offsets of bags with these lengths, a list a table."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, rows, (sum(each),), generator=generator, dtype=dtype) for (rows, _), each in zip(tables, lengths)]
    bounds = torch.tensor([0, *(length for each in lengths for length in each)]).cumsum(0)
    return torch.cat(ids), bounds.to(dtype)


def torchs(module: TableBatchedEmbeddingBags, indices: Tensor, offsets: Tensor, factors: Tensor | None = None) -> tuple[Tensor, list]:
    """The same lookups, a torch.nn.EmbeddingBag a table; and those modules."""
    count = (len(offsets) - 1) // len(module.weights)
    bags, parts = [], []
    for t, weight in enumerate(module.weights):
        bag = nn.EmbeddingBag(*weight.shape, mode=module.mode, sparse=module.sparse, include_last_offset=True,
                              _weight=weight.detach().clone())
        bounds = offsets[t * count:(t + 1) * count + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        parts.append(bag(indices[begin:end], bounds - begin, None if factors is None else factors[begin:end]))
        bags.append(bag)
    return torch.cat(parts, 1), bags


def assert_same_grads(module: TableBatchedEmbeddingBags, bags: list[nn.EmbeddingBag]) -> None:
    for weight, bag in zip(module.weights, bags):
        assert weight.grad.layout == bag.weight.grad.layout
        assert torch.equal(weight.grad.to_dense(), bag.weight.grad.to_dense())
        if weight.grad.is_sparse:
            assert torch.equal(weight.grad._indices(), bag.weight.grad._indices())
            assert torch.equal(weight.grad._values(), bag.weight.grad._values())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_column_block_is_its_tables_bag(data: st.DataObject) -> None:
    tables = data.draw(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=5), "tables")
    count = data.draw(st.integers(0, 6), "batch size")
    lengths = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=count, max_size=count), min_size=len(tables), max_size=len(tables)))
    sparse = data.draw(st.booleans(), "sparse")
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    module = TableBatchedEmbeddingBags(tables, sparse=sparse)
    indices, offsets = batch(tables, lengths, dtype=dtype)
    out = module(indices, offsets)
    want, bags = torchs(module, indices, offsets)
    assert torch.equal(out, want)                            # real values: an unweighted sum has torch's bits
    arrived = integers(*out.shape)
    out.backward(arrived)
    want.backward(arrived)
    assert_same_grads(module, bags)


@pytest.mark.parametrize("sparse", [False, True])
def test_means(sparse: bool) -> None:
    module = whole_numbers(TableBatchedEmbeddingBags(TABLES, "mean", sparse=sparse))
    indices, offsets = batch(TABLES, [[2, 0, 1], [4, 4, 4], [1, 2, 8]])
    out, (want, bags) = module(indices, offsets), torchs(module, indices, offsets)
    assert torch.equal(out, want)
    for each in (out, want):
        each.sum().backward()
    assert_same_grads(module, bags)


@pytest.mark.parametrize("sparse", [False, True])
def test_per_sample_weights(sparse: bool) -> None:
    module = whole_numbers(TableBatchedEmbeddingBags(TABLES, sparse=sparse))
    indices, offsets = batch(TABLES, [[2, 0, 1], [3, 5, 0], [1, 2, 9]])
    ours, theirs = integers(len(indices), seed=4).requires_grad_(), integers(len(indices), seed=4).requires_grad_()
    out, (want, bags) = module(indices, offsets, ours), torchs(module, indices, offsets, theirs)
    assert torch.equal(out, want)
    arrived = integers(*out.shape, seed=5)
    out.backward(arrived)
    want.backward(arrived)
    assert_same_grads(module, bags)
    assert torch.equal(ours.grad, theirs.grad)


def test_one_call_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = ops.BagLookup.run

    def count(self: ops.BagLookup, tables: Any, *rest: Any) -> Tensor:
        calls.append(len(tables))
        return run(self, tables, *rest)

    monkeypatch.setattr(ops.BagLookup, "run", count)
    module = TableBatchedEmbeddingBags(TABLES)
    module(*batch(TABLES, [[1, 2]] * 3))
    assert calls == [3]
    assert module.last_path == "fused bag"


@pytest.mark.parametrize("sparse", [False, True])
def test_frozen_tables_get_no_gradient(sparse: bool) -> None:
    module = TableBatchedEmbeddingBags(TABLES, sparse=sparse)
    module.weights[1].requires_grad_(False)
    module(*batch(TABLES, [[1, 2]] * 3)).sum().backward()
    assert [weight.grad is None for weight in module.weights] == [False, True, False]
    module.requires_grad_(False)
    assert not module(*batch(TABLES, [[1, 2]] * 3)).requires_grad


def test_tables_by_name() -> None:
    tables = [Table("users", 5, 2, "float32", True, None), Table("items", 9, 3, "float64", True, None)]
    module = TableBatchedEmbeddingBags(tables)
    assert [(tuple(w.shape), w.dtype) for w in module.weights] == [((5, 2), torch.float32), ((9, 3), torch.float64)]
    with pytest.raises(IndexError, match=r"'users'.*id 5 at position 1"):
        module(torch.tensor([0, 5, 0]), torch.tensor([0, 2, 3]))


def test_parameters_and_state() -> None:
    torch.manual_seed(0)
    module = TableBatchedEmbeddingBags(TABLES)
    torch.manual_seed(0)
    bags = [nn.EmbeddingBag(rows, dim) for rows, dim in TABLES]
    assert [name for name, _ in module.named_parameters()] == ["weights.0", "weights.1", "weights.2"]
    assert list(module.state_dict()) == ["weights.0", "weights.1", "weights.2"]
    assert all(torch.equal(weight, bag.weight) for weight, bag in zip(module.weights, bags))
    indices, offsets = batch(TABLES, [[1, 2]] * 3)
    want = module(indices, offsets)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), TableBatchedEmbeddingBags(TABLES)):
        other.load_state_dict(module.state_dict())
        assert other.last_path == "no call yet"
        assert torch.equal(other(indices, offsets), want)
    assert "mode='sum', sparse=True" in repr(module)


def test_training_beside_torch() -> None:
    module = TableBatchedEmbeddingBags(TABLES)
    optimizer = RowWiseAdagrad(module.parameters(), lr=0.1)
    _, bags = torchs(module, *batch(TABLES, [[1]] * 3))
    other = RowWiseAdagrad([bag.weight for bag in bags], lr=0.1)
    for seed in range(3):
        indices, offsets = batch(TABLES, [[2, 0, 1], [3, 5, 0], [1, 2, 9]], seed)
        module(indices, offsets).square().sum().backward()
        losses = [bag(indices[offsets[3 * t]:offsets[3 * t + 3]], offsets[3 * t:3 * t + 4] - offsets[3 * t]).square().sum()
                  for t, bag in enumerate(bags)]
        sum(losses).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    for weight, bag in zip(module.weights, bags):
        torch.testing.assert_close(weight, bag.weight)


@pytest.mark.parametrize(("dtype", "path"), [(torch.float64, "torch: weights.0 is torch.float64"), (torch.bfloat16, "fused bag"),
                                             (None, "torch: tables are bfloat16 and float32, and one call gives one dtype")])
def test_other_dtypes(dtype: torch.dtype | None, path: str) -> None:
    module = whole_numbers(TableBatchedEmbeddingBags(TABLES, dtype=dtype))
    if dtype is None:
        module.weights[0].data = module.weights[0].data.bfloat16()
    indices, offsets = batch(TABLES, [[2, 0, 1], [3, 5, 0], [1, 2, 9]])
    out, (want, bags) = module(indices, offsets), torchs(module, indices, offsets)
    assert torch.equal(out, want) and out.dtype == want.dtype
    for each in (out, want):
        each.sum().backward()
    assert all(torch.equal(weight.grad.to_dense(), bag.weight.grad.to_dense()) for weight, bag in zip(module.weights, bags))
    assert module.last_path == path


def test_modules_that_change_dtype_after_a_call() -> None:
    module, (indices, offsets) = TableBatchedEmbeddingBags(TABLES), batch(TABLES, [[1, 2]] * 3)
    want = module(indices, offsets)
    torch.testing.assert_close(module.double()(indices, offsets), want.double())
    assert module.last_path == "torch: weights.0 is torch.float64"
    assert torch.equal(module.float()(indices, offsets), want)
    assert module.last_path == "fused bag"


def test_second_derivatives() -> None:
    module = TableBatchedEmbeddingBags(TABLES, sparse=False)
    indices, offsets = batch(TABLES, [[2, 0, 1], [3, 5, 0], [1, 2, 9]])
    factors = torch.rand(len(indices), requires_grad=True)
    results = []
    for dense in (False, True):
        if dense:
            parts = []
            for t, weight in enumerate(module.weights):
                bounds = offsets[3 * t:3 * t + 4].tolist()
                parts.append(torch.stack([(factors[b:e, None] * weight[indices[b:e]]).sum(0) for b, e in zip(bounds, bounds[1:])]))
            out = torch.cat(parts, 1)
        else:
            out = module(indices, offsets, factors)
        inputs = [*module.weights, factors]
        grads = torch.autograd.grad(out.pow(3).sum(), inputs, create_graph=True)
        results.append([*grads, *torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs)])
    for ours, want in zip(*results):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


def test_compiled_models_compute_the_same() -> None:
    module = TableBatchedEmbeddingBags(TABLES)
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager")
    for lengths in ([1, 2], [3, 0, 1]):
        args = batch(TABLES, [lengths] * 3)
        outputs = [each(*args) for each in (module, compiled)]
        assert torch.equal(*outputs)
        for out in outputs:
            out.sum().backward()
    for weight, other in zip(module.weights, compiled.weights):
        assert torch.equal(weight.grad.to_dense(), other.grad.to_dense())


@pytest.mark.parametrize("ids, offsets, error, message", [
    ([0, 0, 0], [0, 1], ValueError, r"T \* B \+ 1 with T = 3 tables; got 2"),
    ([], [], ValueError, "got 0"),
    ([0, 0, 0], [0, 1, 2, 4], ValueError, r"number of indices \(3\); got 0 to 4"),
    ([0, 0, 0], [0, 1, 2, 2], ValueError, "got 0 to 2"),
    ([0, 0, 0], [1, 1, 2, 3], ValueError, "got 1 to 3"),
    ([0, 0, 0], [0, 2, 1, 3], ValueError, "'weights.1'.*must not decrease"),
    ([0, 0, 0], [0, -1, 1, 3], ValueError, "'weights.0'.*must not decrease"),
    ([0] * 6, [0, 3, 2, 4, 4, 6, 6], ValueError, "'weights.0'.*offset 3"),
    ([0] * 6, [0, 1, 2, 4, 4, 3, 6], ValueError, "'weights.2'.*must not decrease"),
    ([7, 0, 0], [0, 1, 2, 3], IndexError, "'weights.0'.*id 7 at position 0 .* 7 rows"),
    ([0, 0, -1], [0, 1, 1, 3], IndexError, "'weights.2'.*id -1 at position 1 .* 100 rows"),
    ([[0, 0, 0]], [0, 1, 2, 3], ValueError, "one dimension"),
    ([0.0, 0, 0], [0, 1, 2, 3], TypeError, "indices must be int32 or int64; got float32"),
    ([0, 0, 0], [0.0, 1, 2, 3], TypeError, "offsets must be int32 or int64; got torch.float32"),
])
def test_batches_that_make_no_sense_are_refused(ids: list, offsets: list, error: type, message: str) -> None:
    module = TableBatchedEmbeddingBags(TABLES)
    with pytest.raises(error, match=message):
        module(torch.tensor(ids), torch.tensor(offsets) if offsets else torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("count", [0, 3])
def test_ids_without_bags_are_refused(count: int) -> None:
    module = TableBatchedEmbeddingBags(TABLES)
    ids = torch.zeros(count, dtype=torch.int64)
    if not count:
        assert module(ids, torch.tensor([0])).shape == (0, 14)
        return
    with pytest.raises(ValueError, match="got 0 to 0"):
        module(ids, torch.tensor([0]))


def test_per_sample_weights_that_make_no_sense_are_refused() -> None:
    indices, offsets = batch(TABLES, [[1, 2]] * 3)
    with pytest.raises(ValueError, match="mode='sum'; got mode='mean'"):
        TableBatchedEmbeddingBags(TABLES, "mean")(indices, offsets, torch.ones(9))
    with pytest.raises(ValueError, match=r"shape of indices \(9,\); got \(3,\)"):
        TableBatchedEmbeddingBags(TABLES)(indices, offsets, torch.ones(3))


def test_constructors_refuse_by_name() -> None:
    with pytest.raises(ValueError, match="mode must be one of sum, mean; got 'max'"):
        TableBatchedEmbeddingBags(TABLES, "max")
    with pytest.raises(ValueError, match="at least one"):
        TableBatchedEmbeddingBags([])


def test_values_that_cannot_be_read_are_refused_by_name() -> None:
    module = TableBatchedEmbeddingBags(TABLES)
    with pytest.raises(RuntimeError, match=r"cannot be read: a torch\.func transform is active"):
        torch.func.grad(lambda weight: torch.func.functional_call(module, {"weights.0": weight}, batch(TABLES, [[1]] * 3)).sum())(
            torch.ones(7, 5))
