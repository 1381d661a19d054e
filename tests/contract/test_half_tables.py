"""Tables in float16 and bfloat16, on every kernel backend: sums and formulas in float32, one rounding at the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparselift.dtypes import torch_dtype
from sparselift.kernels.base import COALESCE_METHODS, FeatureSpec, KernelBackend, Segment, TableKnobs, TableSpec, UpdateRule
from tests.contract.naive import fresh_state, integers, parts_of

DTYPES = ("float16", "bfloat16")
RULES = [UpdateRule("sgd", 0.1), UpdateRule("adagrad", 0.1, 1e-3),
         UpdateRule("rowwise_adagrad", 0.1, 1e-3, weight_decay=0.5, maximize=True), UpdateRule("adam", 0.1, 1e-3, betas=(0.9, 0.99))]
FEATURES = [FeatureSpec("sum", 0), FeatureSpec("mean", 0, "mean", padding_idx=3), FeatureSpec("max", 0, "max"),
            FeatureSpec("weighted", 0, weighted=True), FeatureSpec("none", 0, "none")]


def half_table(rows: int, dim: int, name: str) -> Tensor:
    """Real values, and among them the smallest that there are and the largest."""
    table = torch.randn(rows, dim, generator=torch.Generator().manual_seed(dim)).to(torch_dtype(name))
    limits = torch.finfo(table.dtype)
    table[0], table[1, ::2] = limits.smallest_normal * 0.625, limits.max
    return table


def bit_patterns(name: str) -> Tensor:
    """(256, 256): every value that there is."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch_dtype(name)).view(256, 256)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def summing(backend: KernelBackend) -> list[str]:
    return [method for method in COALESCE_METHODS if method != "none" and method in backend.coalesce_methods]


@pytest.mark.parametrize("name", DTYPES)
class TestHalfTables:
    @pytest.mark.parametrize("dedup", [False, True])
    def test_forward_has_the_bits_of_a_float32_table(self, backend, name, dedup):
        """Rows become float32 exactly, so everything after is what it is for float32."""
        for dim in (1, 3, 8, 17, 100, 1000):
            half = half_table(20, dim, name)
            generator = torch.Generator().manual_seed(dim)
            ids = [torch.randint(0, 20, (37,), generator=generator) for _ in FEATURES]
            offsets = [1 if feature.pooling == "none" else torch.tensor([0, 0, 5, 6, 20]) for feature in FEATURES]
            weights = [torch.randn(37, generator=generator) if feature.weighted else None for feature in FEATURES]
            results = []
            for table, dtype in ((half, name), (half.float(), "float32")):
                program = backend.compile([TableSpec("t", 20, dim, dtype, TableKnobs(dedup=dedup))], FEATURES)
                batch = program.prepare(ids, offsets, weights)
                outputs = [torch.empty(bags, dim) for bags in batch.num_bags]
                program.forward([table], batch, outputs)
                results.append(outputs)
            assert all(same(mine, other) for mine, other in zip(*results, strict=True))

    def test_gradient_of_sample_weights(self, backend, name):
        """Of integers: on CUDA the order of a product's sums is that of loads."""
        rng = np.random.default_rng(0)
        for dim in (5, 24, 100):
            table, grad = integers(rng, (20, dim)), integers(rng, (3, dim))
            program = backend.compile([TableSpec("t", 20, dim, name)], [FeatureSpec("f", 0, weighted=True)])
            ids = torch.from_numpy(rng.integers(0, 20, 9))
            batch = program.prepare([ids], [torch.tensor([0, 2, 4])], [torch.ones(9)])
            bags = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 2])
            found = program.weight_grad([table.to(torch_dtype(name))], batch, 0, grad)
            assert torch.equal(found, (table[ids] * grad[bags]).sum(1))

    def test_every_value_is_read_as_it_is(self, backend, name):
        table = bit_patterns(name)
        program = backend.compile([TableSpec("t", 256, 256, name)], [FeatureSpec("f", 0, "none")])
        assert same(program.look_up([table], [torch.arange(256)], [1])[1], table.float())

    def test_every_rounding_is_to_the_nearest(self, backend, name):
        """The sum of nothing and a gradient, for gradients of every exponent, around values of the dtype and right between two."""
        exact = bit_patterns(name).float()
        halfway = (exact.view(torch.int32) + (1 << 15 if name == "bfloat16" else 1 << 12)).view(torch.float32)
        anything = torch.randint(-2**31, 2**31, (256, 256), generator=torch.Generator().manual_seed(1)).to(torch.int32).view(torch.float32)
        toward = [torch.nextafter(halfway, torch.tensor(limit)) for limit in (-torch.inf, torch.inf)]
        program = backend.compile([TableSpec("t", 256, 256, name)], [FeatureSpec("f", 0, "none")])
        for grad in (exact, halfway, *toward, anything):
            table = torch.zeros(256, 256, dtype=torch_dtype(name))
            program.update([table], [None], [UpdateRule("sgd", -1.0)], [Segment(program.prepare([torch.arange(256)], [1]), grad)])
            assert same(table, grad.to(table.dtype))

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
    def test_an_update_rounds_once(self, backend, name, rule):
        for dim, coalesce in ((dim, coalesce) for dim in (3, 100, 264) for coalesce in summing(backend)):
            half = half_table(20, dim, name)
            ids = torch.randint(0, 20, (37,), generator=torch.Generator().manual_seed(dim))
            grad = torch.randint(-4, 5, (37, dim), generator=torch.Generator().manual_seed(1)).float()      # whose squares add up exactly
            if rule.weight_decay:
                half = half.clamp_(-4, 4).round_()
            results = []
            for start, dtype in ((half, name), (half.float(), "float32")):
                table = start.clone()
                spec = TableSpec("t", 20, dim, dtype, TableKnobs(coalesce))
                state = fresh_state(spec, rule)
                program = backend.compile([spec], [FeatureSpec("f", 0, "none")])
                program.update([table], [state], [rule], [Segment(program.prepare([ids], [1]), grad)])
                results.append((table.to(half.dtype), *parts_of(state)))
            assert all(same(mine, other) for mine, other in zip(*results)) and not torch.equal(results[0][0], half)

    def test_a_table_that_is_not_aligned(self, backend, name):
        """CUDA then reads its rows an element at a time."""
        value = integers(np.random.default_rng(2), (9, 8))
        ids = torch.tensor([0, 8, 3, 8])
        program = backend.compile([TableSpec("t", 9, 8, name)], [FeatureSpec("f", 0, "none")])
        for shift in (1, 3):
            block = torch.cat([torch.zeros(shift), value.view(-1), torch.zeros(1)]).to(torch_dtype(name))
            table = block[shift:-1].view(9, 8)
            assert table.data_ptr() % 16 and torch.equal(program.look_up([table], [ids], [1])[1], value[ids])
            program.update([table], [None], [UpdateRule("sgd", 1.0)], [Segment(program.prepare([torch.arange(9)], [1]), value)])
            assert not table.any() and not block.any()

    def test_a_rounding_a_lookup_is_refused(self, backend, name):
        with pytest.raises(ValueError, match=f"table 't': coalesce='none' rounds weights once a lookup .*; got {name}"):
            backend.compile([TableSpec("t", 9, 8, name, TableKnobs("none"))], [])

    def test_a_table_of_another_dtype_than_the_program_was_made_for(self, backend, name):
        program = backend.compile([TableSpec("t", 9, 8, name)], [FeatureSpec("f", 0)])
        assert program.fits([torch.empty(9, 8, dtype=torch_dtype(name))]) and not program.fits([torch.empty(9, 8)])
        batch = program.prepare([torch.tensor([1])], [torch.tensor([0])])
        with pytest.raises(TypeError, match=f"weight of table 't' must be {name}; got float32"):
            program.forward([torch.empty(9, 8)], batch, torch.empty(1, 8))
        with pytest.raises(TypeError, match=f"weight of table 't' must be {name}; got float32"):
            program.update([torch.empty(9, 8)], [None], [UpdateRule("sgd", 1.0)], [Segment(batch, torch.empty(1, 8))])


def test_tables_of_several_dtypes_in_one_call(backend):
    rng = np.random.default_rng(1)
    names = ["float32", "bfloat16", "float16", "float32"]
    tables = [TableSpec(f"t{t}", 9, 8, name) for t, name in enumerate(names)]
    features = [FeatureSpec(f"f{t}", t, column=8 * t) for t in range(4)]
    values = [integers(rng, (9, 8)) for _ in tables]
    weights = [value.to(torch_dtype(name), copy=True) for value, name in zip(values, names)]
    ids, offsets = [torch.from_numpy(rng.integers(0, 9, 12)) for _ in tables], [torch.arange(0, 12, 3)] * 4
    program = backend.compile(tables, features)
    batch, out = program.look_up(weights, ids, offsets)
    assert torch.equal(out, torch.cat([value[i].view(4, 3, 8).sum(1) for value, i in zip(values, ids)], 1))
    grad = 2 * integers(rng, (4, 32))
    program.update(weights, [None] * 4, [UpdateRule("sgd", 0.5)] * 4, [Segment(batch, grad)])
    for t, (value, weight) in enumerate(zip(values, weights)):
        lookups = grad[:, 8 * t:8 * t + 8].repeat_interleave(3, 0)
        assert torch.equal(weight.float(), value.index_add(0, ids[t], lookups, alpha=-0.5))
