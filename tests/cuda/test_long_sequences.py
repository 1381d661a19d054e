"""Bags and rows of more lookups than a chunk: summed in pieces by different groups of lanes, and then in order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from sparselift.kernels.base import FeatureSpec, Segment, TableKnobs, TableSpec, UpdateRule
from sparselift.kernels.cuda import KernelShape
from tests.contract.naive import Case, integers, lookup_grads, pooled, random_grads, row_sums, updated
from tests.simt.module import Simt

CHUNK = 32
SHAPE = KernelShape(chunk_lookups=CHUNK)
SORTED, DENSE = TableKnobs(coalesce="sort"), TableKnobs(coalesce="dense")
# Around one chunk and several, beside empty and short bags.
LENGTHS = [0, 3, CHUNK - 1, CHUNK, CHUNK + 1, 1, 2 * CHUNK, 0, 5 * CHUNK + 7, 2 * CHUNK + 1, 9]


def long_case(dim: int, *, pooling: str = "sum", padding: bool = False, weighted: bool = False, hot: bool = False,
              knobs: TableKnobs = SORTED) -> Case:
    """Bags of LENGTHS (of a power of two ids that count, if mean). `hot`: most ids are one of three rows."""
    rng = np.random.default_rng(dim)
    lengths = [64, 0, 32, 1, 256, 2, 128, 64] if pooling == "mean" else LENGTHS
    ids = rng.choice([0, 4, 6], sum(lengths)) if hot else rng.integers(0, 11, sum(lengths))
    if padding and pooling == "mean":
        ids[ids == 5] = 6
    spec = FeatureSpec("f", 0, pooling, padding_idx=5 if padding else None, weighted=weighted)
    weights = [integers(rng, (len(ids),), 2)] if weighted else [None]
    return Case([TableSpec("t0", 11, dim, knobs=knobs)], [spec], [integers(rng, (11, dim))], [torch.from_numpy(ids)],
                [torch.from_numpy(np.cumsum([0, *lengths[:-1]]))], weights)


@pytest.mark.parametrize("dim", [1, 4, 17, 64, 300, 1000])
@pytest.mark.parametrize("options", [{}, {"pooling": "mean"}, {"padding": True}, {"pooling": "mean", "padding": True}, {"weighted": True},
                                     {"weighted": True, "padding": True}, {"pooling": "max"}, {"pooling": "max", "padding": True}], ids=str)
def test_long_bags(simt: Simt, dim: int, options: dict) -> None:
    case = long_case(dim, **options)
    program = case.compile(simt.backend(SHAPE))
    batch = case.prepare(program)
    outputs = case.outputs(batch)
    program.forward(case.weights, batch, outputs)
    assert np.array_equal(outputs[0].numpy(), pooled(case, 0))


def test_bags_of_one_length_that_are_long(simt: Simt) -> None:
    case = long_case(8)
    case.indices, case.offsets = [torch.arange(400) % 11], [100]
    program = case.compile(simt.backend(SHAPE))
    batch = case.prepare(program)
    outputs = case.outputs(batch)
    program.forward(case.weights, batch, outputs)
    assert np.array_equal(outputs[0].numpy(), pooled(case, 0))


def test_a_long_bag_has_the_same_bits_wherever_it_lies(simt: Simt) -> None:
    generator = torch.Generator().manual_seed(0)
    table, ids = torch.randn(50, 20, generator=generator), torch.randint(0, 50, (5 * CHUNK + 3,), generator=generator)
    program = simt.backend(SHAPE).compile([TableSpec("t", 50, 20)], [FeatureSpec("f", 0)])
    results = []
    for before in (0, 1, 7, CHUNK, 3 * CHUNK + 5):
        batch = program.prepare([torch.cat([torch.zeros(before, dtype=torch.int64), ids])], [torch.tensor([0, before])])
        out = torch.empty(2, 20)
        program.forward([table], batch, out)
        results.append(out[1])
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("rule", [UpdateRule("sgd", lr=0.5), UpdateRule("adagrad", lr=0.5, eps=0.25),
                                  UpdateRule("rowwise_adagrad", lr=0.5, eps=0.25, weight_decay=0.5)], ids=lambda rule: rule.kind)
@pytest.mark.parametrize("dim", [1, 3, 16, 64, 300, 1000])
@pytest.mark.parametrize("knobs", [SORTED, DENSE], ids=lambda knobs: knobs.coalesce)
def test_rows_of_many_lookups(simt: Simt, dim: int, rule: UpdateRule, knobs: TableKnobs) -> None:
    case = long_case(dim, hot=True, knobs=knobs)
    program = case.compile(simt.backend(SHAPE))
    batch = case.prepare(program)
    grads = random_grads(case, batch, 5, bound=1)
    state = {"sgd": None, "adagrad": torch.ones(11, dim), "rowwise_adagrad": torch.ones(11)}[rule.kind]
    sums = row_sums([lookup_grads(case, 0, grads)])
    want, want_state = updated(case.weights[0], state, rule, sums)
    rows, values = program.coalesced_grad(0, [Segment(batch, grads)])
    assert rows.tolist() == list(sums) and np.array_equal(values.numpy(), np.array(list(sums.values())))
    program.update(case.weights, [state], [rule], [Segment(batch, grads)])
    if rule.kind == "sgd":
        assert np.array_equal(case.weights[0].numpy(), want)
    else:
        assert np.allclose(case.weights[0].numpy(), want, rtol=1e-6, atol=1e-6)
        assert np.allclose(state.numpy(), want_state, rtol=2e-7, atol=0)


@pytest.mark.parametrize("count", [3, 40, 500, 3000])
def test_dense_sums_have_the_bits_of_sorted_ones(simt: Simt, count: int) -> None:
    """However many warps share a row: of three rows of 3,000 lookups, all eight."""
    generator = torch.Generator().manual_seed(count)
    grad, more = torch.randn(count, 20, generator=generator), torch.randn(7, 20, generator=generator)
    ids, results = torch.randint(0, 3, (count,), generator=generator), []
    for knobs in (SORTED, DENSE):
        features = [FeatureSpec("f", 0, "none"), FeatureSpec("g", 0, weighted=True)]
        program = simt.backend(SHAPE).compile([TableSpec("t", 3, 20, knobs=knobs)], features)
        batch = program.prepare([ids, ids[:3]], [1, torch.tensor([0, 0, 2, 3, 3, 3, 3])], [None, torch.tensor([0.3, 0.7, 1.1])])
        weight, sums = torch.zeros(3, 20), torch.zeros(3)
        segments = [Segment(batch, [grad, more], [0.7]), Segment(batch, [grad, None])]
        program.update([weight], [sums], [UpdateRule("rowwise_adagrad", 0.1, 1e-8)], segments)
        results.append((weight, sums))
    assert all(torch.equal(*pair) for pair in zip(*results))


@pytest.mark.parametrize("dim", [640, 768, 900, 1200])
def test_dense_sums_have_room_in_shared_memory_at_every_width(simt: Simt, dim: int) -> None:
    """What kernels have static counts, too."""
    weight, ids = torch.zeros(3, dim), torch.tensor([0, 2, 2])
    program = simt.backend().compile([TableSpec("t", 3, dim, knobs=DENSE)], [FeatureSpec("f", 0)])
    segment = Segment(program.prepare([ids], [3]), [torch.ones(1, dim)])
    program.update([weight], [None], [UpdateRule("sgd", 1.0)], [segment])
    assert weight.unique(dim=1).tolist() == [[-1], [0], [-2]]


def test_a_long_maximum_is_that_of_a_short_bag(simt: Simt) -> None:
    """NaNs count where they come first, wherever the bag is cut; so do equal rows."""
    generator = torch.Generator().manual_seed(4)
    table = torch.randint(-3, 4, (40, 12), generator=generator).float()
    table[5], table[7, :6] = torch.nan, torch.nan
    lengths = [3 * CHUNK + 5, 2 * CHUNK, CHUNK + 1, 4 * CHUNK]
    ids = torch.randint(0, 40, (sum(lengths),), generator=generator)
    ids[3 * CHUNK + 5] = 5                                          # the second bag begins with NaNs
    ids[-4 * CHUNK:-4 * CHUNK + 2 * CHUNK + 3] = 9                  # padding for two pieces, then NaNs
    ids[-4 * CHUNK + 2 * CHUNK + 3] = 7
    results = []
    for backend in (simt.backend(SHAPE), simt.backend()):
        program = backend.compile([TableSpec("t", 40, 12)], [FeatureSpec("f", 0, "max", padding_idx=9)])
        batch, out = program.look_up([table], [ids], [torch.tensor([0, *lengths[:-1]]).cumsum(0)])
        results.append((out, batch.maxima(0)))
    assert results[0][0].nan_to_num(nan=1e9).equal(results[1][0].nan_to_num(nan=1e9)) and results[0][1].equal(results[1][1])
    assert results[0][0][1].isnan().all() and results[0][0][3, :6].isnan().all() and not results[0][0][0].isnan().all()


def test_a_row_has_the_same_bits_whatever_others_are_updated(simt: Simt) -> None:
    """The pieces of a run are cut from its own beginning."""
    generator = torch.Generator().manual_seed(1)
    spec = TableSpec("t", 400, 12, knobs=SORTED)
    grad = torch.randn(5 * CHUNK + 3, 12, generator=generator)
    results = []
    for others in (0, 1, 31, 70, 200):
        program = simt.backend(SHAPE).compile([spec], [FeatureSpec("f", 0, "none")])
        ids = torch.cat([torch.full((len(grad),), 300), torch.arange(others)])
        arrived = torch.cat([grad, torch.ones(others, 12)])
        weight = torch.zeros(400, 12)
        program.update([weight], [None], [UpdateRule("sgd", 1.0)], [Segment(program.prepare([ids], [1]), arrived)])
        results.append(weight[300])
    assert all(torch.equal(results[0], result) for result in results)


def test_tables_of_any_width_share_an_update(simt: Simt) -> None:
    """A warp's 32 sorted lookups may belong to several tables."""
    rng = np.random.default_rng(3)
    dims = [1, 300, 4, 17, 64, 2]
    tables = [TableSpec(f"t{t}", 5 + t, dim, knobs=DENSE if t == 4 else SORTED) for t, dim in enumerate(dims)]
    case = Case(tables, [FeatureSpec(f"f{t}", t) for t in range(6)], [integers(rng, (t.rows, t.dim)) for t in tables],
                [torch.from_numpy(rng.integers(0, t.rows, 6 + t.rows)) for t in tables], [torch.arange(0, 6 + t.rows, 3) for t in tables],
                [None] * 6)
    program = case.compile(simt.backend(SHAPE))
    batch = case.prepare(program)
    grads = random_grads(case, batch, 4)
    rules: list[UpdateRule | None] = [UpdateRule("sgd", 0.5)] * 6
    rules[3] = None
    want = [updated(w, None, UpdateRule("sgd", 0.5), row_sums([lookup_grads(case, t, grads)]))[0] for t, w in enumerate(case.weights)]
    want[3] = case.weights[3].double().numpy().copy()
    program.update(case.weights, [None] * 6, rules, [Segment(batch, grads)])
    assert all(np.array_equal(weight.numpy(), expected) for weight, expected in zip(case.weights, want))


SHAPES = [KernelShape(vector_bytes=4), KernelShape(block_threads=64), KernelShape(block_threads=512), KernelShape(bags_per_group=3),
          KernelShape(loads_in_flight=8), KernelShape(vector_bytes=4, block_threads=128, bags_per_group=5, loads_in_flight=8)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(f"{k}={v}" for k, v in dataclasses.asdict(s).items() if v))
@pytest.mark.parametrize("lengths", ["ragged", "one"])
def test_no_shape_changes_a_bit(simt: Simt, shape: KernelShape, lengths: str) -> None:
    generator = torch.Generator().manual_seed(2)
    tables = [TableSpec(f"t{dim}", 30, dim, knobs=SORTED) for dim in (3, 16, 128, 260, 1000)]
    features = [FeatureSpec(f"f{t}", t, weighted=True, padding_idx=2 if t % 2 else None) for t in range(5)]
    weights = [torch.randn(t.rows, t.dim, generator=generator) for t in tables]
    count = 40 if lengths == "ragged" else 11
    offsets: list[torch.Tensor | int] = [torch.tensor([0, 3, 3, 10, 11, 20, 30, 31, 32, 33, 34])] * 5 if lengths == "ragged" else [1] * 5
    ids = [torch.randint(0, 30, (count,), generator=generator) for _ in tables]
    factors = [torch.randn(count, generator=generator) for _ in tables]
    grads = [torch.randn(11, t.dim, generator=generator) for t in tables]
    results = []
    for backend in (simt.backend(), simt.backend(shape)):
        program = backend.compile(tables, features)
        batch = program.prepare(ids, offsets, factors)
        outputs, mine = [torch.empty(11, t.dim) for t in tables], [w.clone() for w in weights]
        program.forward(mine, batch, outputs)
        sums = [torch.zeros(w.shape) for w in weights]
        program.update(mine, sums, [UpdateRule("adagrad", 0.1, 1e-3)] * 5, [Segment(batch, grads)])
        results.append([*outputs, *mine, *sums])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(("shape", "message"), [
    (KernelShape(vector_bytes=8), "vector_bytes must be 4 or 16; got 8"),
    (KernelShape(block_threads=96), "block_threads must be 64, 128, 256 or 512; got 96"),
    (KernelShape(bags_per_group=-1), "bags_per_group must be at least 1; got -1"),
    (KernelShape(loads_in_flight=3), "loads_in_flight must be 4 or 8; got 3"),
    (KernelShape(chunk_lookups=40), "chunk_lookups must be a multiple of 32; got 40"),
])
def test_wrong_shapes(simt: Simt, shape: KernelShape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simt.backend(shape).compile([], [])
