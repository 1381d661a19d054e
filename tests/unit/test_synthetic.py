"""Synthetic clicks: the sampler's law, the skew of the published logs, and labels that can be learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparselift.datasets.synthetic import CRITEO_KAGGLE, MLPERF_DCNV2, Shape, click_batches, scatter, zipf_ranks
from sparselift.models import DLRM

# Share of repeated ids among 2,048 consecutive clicks of the published log, C1 to C26.
MEASURED_DUPLICATES = (0.9614, 0.876, 0.3465, 0.4639, 0.9842, 0.9963, 0.4229, 0.978, 0.9987, 0.5299, 0.5485, 0.3659, 0.6014, 0.9906, 0.5828,
                       0.4087, 0.9956, 0.7306, 0.9012, 0.998, 0.3854, 0.9966, 0.9941, 0.6217, 0.9839, 0.7137)
SMALL = Shape("small", rows=(50, 400, 7), pooling=(1, 5, 2), exponents=(1.0, 0.8, 2.0), num_dense=4)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 0.99, 1.0, 1.01, 2.5])
@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_ranks_follow_the_bounded_zipf_law(exponent: float, rows: int) -> None:
    count = 200_000
    ranks = zipf_ranks(np.random.default_rng(1), exponent, rows, count)
    assert len(ranks) == count and ranks.min() >= 0 and ranks.max() < rows
    probability = np.arange(1, rows + 1.0) ** -exponent
    probability /= probability.sum()
    error = np.bincount(ranks, minlength=rows) - count * probability
    deviation = np.sqrt(count * probability * (1 - probability))
    assert (np.abs(error) <= 5 * deviation).all()                  # 5 sigma of a binomial, for each rank


def test_no_draws_are_no_ranks() -> None:
    assert len(zipf_ranks(np.random.default_rng(0), 1.0, 10, 0)) == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 10, 97, 1000, 1024])
def test_scatter_is_a_bijection(rows: int) -> None:
    assert sorted(scatter(np.arange(rows), rows)) == list(range(rows))


def test_scatter_parts_neighbours() -> None:
    places = scatter(np.arange(100), 1_000_000)
    assert np.diff(np.sort(places)).min() > 1000


def test_duplicates_are_those_of_the_published_log() -> None:
    batches = click_batches(CRITEO_KAGGLE, 2048, 6)
    for table, measured in enumerate(MEASURED_DUPLICATES):
        distinct = np.mean([len(batch.indices[table].unique()) for batch in batches])
        assert 1 - distinct / 2048 == pytest.approx(measured, abs=0.03)


@pytest.mark.parametrize(("shape", "max_rows"), [(CRITEO_KAGGLE, 1000), (MLPERF_DCNV2, 5000), (SMALL, None)])
def test_batches_have_the_shape(shape: Shape, max_rows: int | None) -> None:
    batch = click_batches(shape, 16, 2, max_rows=max_rows)[1]
    assert batch.dense.shape == (16, shape.num_dense) and batch.dense.dtype == torch.float32 and (batch.dense >= 0).all()
    assert batch.labels.shape == (16, 1) and set(batch.labels.unique().tolist()) <= {0.0, 1.0}
    for table, (rows, length) in enumerate(zip(shape.capped(max_rows), shape.pooling)):
        ids = batch.indices[table]
        assert ids.shape == (16 * length,) and ids.dtype == torch.int64 and ids.min() >= 0 and ids.max() < rows
        assert batch.offsets[table].tolist() == list(range(0, 16 * length, length))


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    few, many, other = (click_batches(SMALL, 64, n, seed=s) for n, s in ((2, 3), (5, 3), (2, 4)))
    for mine, same in zip(few, many):
        assert all(torch.equal(a, b) for a, b in zip([mine.dense, mine.labels, *mine.indices], [same.dense, same.labels, *same.indices]))
    assert not torch.equal(few[0].dense, few[1].dense)
    assert not torch.equal(few[0].dense, other[0].dense)


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    want = torch.rand(3), np.random.rand(3)
    torch.manual_seed(7)
    np.random.seed(7)
    click_batches(SMALL, 8, 1)
    DLRM((5, 6), 4, (8,), (8, 1), generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(3), want[0]) and (np.random.rand(3) == want[1]).all()


def auc(labels: torch.Tensor, scores: torch.Tensor) -> float:
    """Share of (click, no click) pairs in the right order."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    return float((positive[:, None] > negative).float().mean())


def test_training_learns_the_clicks() -> None:
    batches = click_batches(SMALL, 256, 60)
    model = DLRM(SMALL.rows, 8, (16,), (16, 1), num_dense=4, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    train, test = batches[:50], batches[50:]
    for batch in train * 2:
        logits = model(batch.dense, batch.offsets, batch.indices)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        scores = torch.cat([model(batch.dense, batch.offsets, batch.indices) for batch in test])
    assert auc(torch.cat([batch.labels for batch in test]), scores) > 0.65


@pytest.mark.parametrize(("sizes", "message"), [
    ({"batch_size": 0, "num_batches": 1}, "batch_size must be at least 1; got 0"),
    ({"batch_size": 1, "num_batches": -1}, "num_batches must be at least 1; got -1"),
    ({"batch_size": 1, "num_batches": 1, "max_rows": 0}, "max_rows must be at least 1; got 0"),
])
def test_sizes_below_one_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        click_batches(SMALL, **sizes)
