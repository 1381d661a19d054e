"""DLRM: the interaction by plain loops, the official structure, and the numbers of the benchmark's dense part."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from sparselift.models import DLRM
from tests.unit.scripts import SHARED_BENCH, importable

ROWS = (7, 11, 5)


def small(**options: object) -> DLRM:
    return DLRM(ROWS, 4, (6,), (8, 1), num_dense=3, generator=torch.Generator().manual_seed(0), **options)


def inputs(batch_size: int = 5, length: int = 2) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    offsets = torch.arange(0, batch_size * length, length).repeat(len(ROWS), 1)
    indices = [torch.randint(rows, (batch_size * length,), generator=generator) for rows in ROWS]
    return torch.rand(batch_size, 3, generator=generator), offsets, indices


def test_names_and_layers_are_the_official_ones() -> None:
    model = DLRM(ROWS, 16, (512, 256, 64), (512, 256, 1))
    linear = {name: (m.in_features, m.out_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert linear == {"bot_l.0": (13, 512), "bot_l.2": (512, 256), "bot_l.4": (256, 64), "bot_l.6": (64, 16),
                      "top_l.0": (16 + 6, 512), "top_l.2": (512, 256), "top_l.4": (256, 1)}
    assert [type(bag) for bag in model.emb_l] == [nn.EmbeddingBag] * 3
    assert all(bag.sparse and bag.mode == "sum" for bag in model.emb_l)
    assert isinstance(model.bot_l[-1], nn.ReLU) and isinstance(model.top_l[-1], nn.Linear)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_the_interaction_is_that_of_plain_loops() -> None:
    model, (dense, offsets, indices) = small(), inputs()
    x = model.bot_l(dense)
    pooled = [torch.stack([bag.weight[ids[2 * b:2 * b + 2]].sum(0) for b in range(5)]) for bag, ids in zip(model.emb_l, indices)]
    vectors = [x, *pooled]
    pairs = [(j, i) for i in range(4) for j in range(i + 1, 4)]      # below the diagonal, column by column
    dots = [(vectors[j] * vectors[i]).sum(1) for j, i in pairs]
    want = model.top_l(torch.cat([x, torch.stack(dots, 1)], 1))
    torch.testing.assert_close(model(dense, offsets, indices), want)


def test_offsets_and_indices_may_be_sequences_or_stacked() -> None:
    model, (dense, offsets, indices) = small(), inputs()
    want = model(dense, offsets, indices)
    assert want.shape == (5, 1)
    assert torch.equal(model(dense, list(offsets), torch.stack(indices)), want)


def test_mean_pooling_and_concatenation() -> None:
    dense, offsets, indices = inputs()
    model = small(arch_interaction="cat", mode="mean")
    assert model.top_l[0].in_features == 4 * 4
    x, ly = model.bot_l(dense), model.apply_emb(offsets, indices)
    torch.testing.assert_close(ly[1][2], model.emb_l[1].weight[indices[1][4:6]].mean(0))
    assert torch.equal(model(dense, offsets, indices), model.top_l(torch.cat([x, *ly], 1)))


def test_gradients_are_sparse_or_dense_as_asked() -> None:
    dense, offsets, indices = inputs()
    for sparse in (True, False):
        model = small(sparse=sparse)
        model(dense, offsets, indices).sum().backward()
        assert all(bag.weight.grad.is_sparse is sparse for bag in model.emb_l)


def test_initial_weights_have_the_official_scale_and_the_generators_seed() -> None:
    one, two = small(), small()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    model = DLRM((100,), 64, (512, 256), (512, 256, 1), generator=torch.Generator().manual_seed(2))
    assert model.emb_l[0].weight.abs().max() <= 0.1
    layer = model.bot_l[2]
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (512 + 256)), rel=0.02)
    assert layer.bias.std().item() == pytest.approx(math.sqrt(1 / 256), rel=0.2)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"rows": (5, 0), "dim": 4}, r"rows must be at least 1; got \(5, 0\)"),
    ({"rows": (5,), "dim": 0}, "dim must be at least 1; got 0"),
    ({"rows": (5,), "dim": 4, "top": (8, 2)}, r"top must end in 1, the logit; got \(8, 2\)"),
    ({"rows": (5,), "dim": 4, "top": ()}, r"top must end in 1, the logit; got \(\)"),
    ({"rows": (5,), "dim": 4, "mode": "max"}, "mode must be 'sum' or 'mean'; got 'max'"),
    ({"rows": (5,), "dim": 4, "arch_interaction": "fm"}, "arch_interaction must be one of .* got 'fm'"),
])
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DLRM(**arguments)


@pytest.mark.skipif(not SHARED_BENCH.exists(), reason="no ../shared/bench")
def test_the_loss_and_gradients_are_those_of_the_benchmarks_dense_part() -> None:
    with importable(SHARED_BENCH):
        from implementations import DenseDlrm
        from workloads import Workload as BenchWorkload

    dim, batch_size, rows = 16, 32, (50, 60, 70, 80)
    workload = BenchWorkload("small", "", rows, (1,) * 4, dim, batch_size, None, ("sgd",), True)
    theirs, ours = DenseDlrm(workload, seed=3), DLRM(rows, dim)
    for mine, other in ((ours.bot_l, theirs.bottom), (ours.top_l, theirs.top)):
        mine.load_state_dict(other.state_dict())
    dense, labels = torch.rand(batch_size, 13), torch.randint(2, (batch_size, 1)).float()
    indices = [torch.randint(count, (batch_size,)) for count in rows]
    offsets = torch.arange(batch_size).repeat(4, 1)
    pooled = torch.cat([bag.weight[ids] for bag, ids in zip(ours.emb_l, indices)], 1).detach().requires_grad_()
    want = theirs(dense, pooled, labels)
    want.backward()
    got = nn.functional.binary_cross_entropy_with_logits(ours(dense, offsets, indices), labels)
    got.backward()
    assert torch.equal(got, want)
    assert torch.equal(ours.bot_l[0].weight.grad, theirs.bottom[0].weight.grad)
    for table, bag in enumerate(ours.emb_l):
        part = pooled.grad[:, table * dim:(table + 1) * dim]
        torch.testing.assert_close(bag.weight.grad.to_dense(), torch.zeros_like(bag.weight).index_add_(0, indices[table], part))
    for name in ("implementations", "workloads"):
        sys.modules.pop(name, None)
