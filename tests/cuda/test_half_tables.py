"""Tables in float16 and bfloat16: sums and formulas in float32, one rounding at the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparselift.kernels.base import FeatureSpec, Segment, TableSpec, UpdateRule
from tests.contract.naive import integers
from tests.simt.module import Simt

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DIMS = [1, 3, 8, 17, 64, 256, 264, 1000]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_forward_has_the_bits_of_a_float32_table(simt: Simt, name: str, dim: int, pooling: str) -> None:
    """Rows become float32 exactly, so everything after is what it is for float32."""
    generator = torch.Generator().manual_seed(dim)
    half = torch.randn(20, dim, generator=generator).to(DTYPES[name])
    ids = torch.randint(0, 20, (37,), generator=generator)
    offsets: torch.Tensor | int = 1 if pooling == "none" else torch.tensor([0, 0, 5, 6, 20])
    results = []
    for table, dtype in ((half, name), (half.float(), "float32")):
        program = simt.backend().compile([TableSpec("t", 20, dim, dtype)], [FeatureSpec("f", 0, pooling)])
        results.append(program.look_up([table], [ids], [offsets])[1])
    assert results[0].dtype == torch.float32 and torch.equal(*results)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dim", [3, 8, 264])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_an_update_rounds_once(simt: Simt, name: str, dim: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(dim)
    half = torch.randn(20, dim, generator=generator).to(DTYPES[name])
    ids = torch.randint(0, 20, (37,), generator=generator)
    grad = torch.randint(-4, 5, (37, dim), generator=generator).float()      # sums of squares, whose order is that of loads, are exact
    rule = UpdateRule(kind, 0.1, 1e-3)
    results = []
    for start, dtype in ((half, name), (half.float(), "float32")):
        table = start.clone()
        state = {"sgd": None, "adagrad": torch.ones(20, dim), "rowwise_adagrad": torch.ones(20)}[kind]
        program = simt.backend().compile([TableSpec("t", 20, dim, dtype)], [FeatureSpec("f", 0, "none")])
        program.update([table], [state], [rule], [Segment(program.prepare([ids], [1]), grad)])
        results.append((table.to(DTYPES[name]), state))
    assert torch.equal(results[0][0], results[1][0]) and not torch.equal(results[0][0], half)
    assert kind == "sgd" or torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", DTYPES)
def test_gradient_of_sample_weights(simt: Simt, name: str) -> None:
    rng = np.random.default_rng(0)
    table, grad = integers(rng, (20, 24)), integers(rng, (3, 24))
    program = simt.backend().compile([TableSpec("t", 20, 24, name)], [FeatureSpec("f", 0, weighted=True)])
    ids = torch.from_numpy(rng.integers(0, 20, 9))
    batch = program.prepare([ids], [torch.tensor([0, 2, 4])], [torch.ones(9)])
    bags = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 2])
    assert torch.equal(program.weight_grad([table.to(DTYPES[name])], batch, 0, grad), (table[ids] * grad[bags]).sum(1))


def test_tables_of_several_dtypes_in_one_call(simt: Simt) -> None:
    rng = np.random.default_rng(1)
    names = ["float32", "bfloat16", "float16", "float32"]
    tables = [TableSpec(f"t{t}", 9, 8, name) for t, name in enumerate(names)]
    features = [FeatureSpec(f"f{t}", t, column=8 * t) for t in range(4)]
    values = [integers(rng, (9, 8)) for _ in tables]
    weights = [value.to(getattr(torch, name), copy=True) for value, name in zip(values, names)]
    ids, offsets = [torch.from_numpy(rng.integers(0, 9, 12)) for _ in tables], [torch.arange(0, 12, 3)] * 4
    program = simt.backend().compile(tables, features)
    batch, out = program.look_up(weights, ids, offsets)
    assert torch.equal(out, torch.cat([value[i].view(4, 3, 8).sum(1) for value, i in zip(values, ids)], 1))
    grad = 2 * integers(rng, (4, 32))
    program.update(weights, [None] * 4, [UpdateRule("sgd", 0.5)] * 4, [Segment(batch, grad)])
    for t, (value, weight) in enumerate(zip(values, weights)):
        lookups = grad[:, 8 * t:8 * t + 8].repeat_interleave(3, 0)
        assert torch.equal(weight.float(), value.index_add(0, ids[t], lookups, alpha=-0.5))


@pytest.mark.parametrize("shift", [1, 3])
def test_a_table_that_is_not_aligned(simt: Simt, shift: int) -> None:
    """Rows then come an element at a time."""
    rng = np.random.default_rng(2)
    value = integers(rng, (9, 8))
    table = torch.cat([torch.zeros(shift), value.view(-1)]).half()[shift:].view(9, 8)
    assert table.data_ptr() % 16
    program = simt.backend().compile([TableSpec("t", 9, 8, "float16")], [FeatureSpec("f", 0, "none")])
    ids = torch.from_numpy(rng.integers(0, 9, 5))
    assert torch.equal(program.look_up([table], [ids], [1])[1], value[ids])
