"""Weights rounded by chance: the same bits on every kernel backend, and what is exact stays exact."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from sparselift.dtypes import torch_dtype
from sparselift.kernels import BACKENDS, available_backends, get_backend
from sparselift.kernels.base import FeatureSpec, KernelBackend, Segment, State, TableKnobs, TableSpec, UpdateRule
from sparselift.kernels.noise import noise_key
from tests.contract.naive import fresh_state, parts_of
from tests.contract.test_half_tables import DTYPES, half_table, same, summing

ROWS, DIMS = 20, (3, 100, 264)
KEY = noise_key(seed=1, table=2, step=3)
RULES = [UpdateRule("sgd", 0.1), UpdateRule("adagrad", 0.1, 1e-3), UpdateRule("rowwise_adagrad", 0.1, 1e-3),
         UpdateRule("adam", 0.1, 1e-3, betas=(0.9, 0.99))]


def stepped(backend: KernelBackend, start: Tensor, name: str, rule: UpdateRule, grad: Tensor,
            coalesce: str = "chain") -> tuple[Tensor, State]:
    """Weights and state after one step on every row but a few, some of which come twice."""
    spec = TableSpec("t", ROWS, start.shape[1], name, TableKnobs(coalesce))
    program = backend.compile([spec], [FeatureSpec("f", 0, "none")])
    table, state = start.clone(), fresh_state(spec, rule)
    ids = torch.randint(0, ROWS, (37,), generator=torch.Generator().manual_seed(start.shape[1]))
    program.update([table], [state], [rule], [Segment(program.prepare([ids], [1]), grad)])
    return table, state


def integer_grad(dim: int) -> Tensor:
    """Whose squares add up exactly, in any order."""
    return torch.randint(-4, 5, (37, dim), generator=torch.Generator().manual_seed(1)).float()


@pytest.mark.parametrize("name", DTYPES)
class TestStochasticRounding:
    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
    def test_the_bits_are_those_of_the_reference(self, backend, name, rule):
        chosen = dataclasses.replace(rule, noise_key=KEY)
        for dim in DIMS:
            start, grad = half_table(ROWS, dim, name), integer_grad(dim)
            table, state = stepped(get_backend("reference"), start, name, chosen, grad)
            assert not torch.equal(table, stepped(get_backend("reference"), start, name, rule, grad)[0])
            for coalesce in summing(backend):
                mine, own = stepped(backend, start, name, chosen, grad, coalesce)
                assert same(mine, table) and all(same(*pair) for pair in zip(parts_of(own), parts_of(state)))

    def test_every_exponent_is_rounded_as_the_reference_does(self, backend, name):
        """The sum of nothing and a gradient: numbers of the dtype stay, others become a neighbour, by chance."""
        generator = torch.Generator().manual_seed(2)
        exact = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch_dtype(name)).view(256, 256)
        anything = torch.randint(-2**31, 2**31, (256, 256), generator=generator).to(torch.int32)
        anything[0, :23] = 0x7F800000 | 1 << torch.arange(23)                        # NaNs whose one bit the dtype may lack
        anything = anything.view(torch.float32)
        small = torch.randn(256, 256, generator=generator) * 2.0 ** torch.randint(-40, -12, (256, 256), generator=generator)
        rule = UpdateRule("sgd", -1.0, noise_key=KEY)
        for grad in (exact.float(), anything, small):
            results = []
            for each in (backend, get_backend("reference")):
                program = each.compile([TableSpec("t", 256, 256, name)], [FeatureSpec("f", 0, "none")])
                table = torch.zeros(256, 256, dtype=torch_dtype(name))
                program.update([table], [None], [rule], [Segment(program.prepare([torch.arange(256)], [1]), grad)])
                results.append(table)
            assert same(*results)
            if grad is not small and grad is not anything:
                assert same(results[0], exact)

    def test_small_steps_add_up(self, backend, name):
        """To the nearest, a step of 1/16 of the spacing is lost each time. By chance the mean moves by as much as it should: up to what
        Azuma's inequality allows in a thousand million trials.
        """
        spacing = torch.finfo(torch_dtype(name)).eps / 2                             # of numbers from 0.5 to 1
        steps, rate = 64, spacing / 16
        program = backend.compile([TableSpec("t", 64, 16, name)], [FeatureSpec("f", 0, "none")])
        segment = Segment(program.prepare([torch.arange(64)], [1]), torch.ones(64, 16))
        nearest, moved = (torch.full((64, 16), 0.75, dtype=torch_dtype(name)) for _ in range(2))
        for step in range(steps):
            program.update([nearest], [None], [UpdateRule("sgd", rate)], [segment])
            program.update([moved], [None], [UpdateRule("sgd", rate, noise_key=noise_key(0, 0, step))], [segment])
        allowed = spacing * math.sqrt(steps * moved.numel() * math.log(2e9) / 2) / moved.numel()
        assert (nearest == 0.75).all()
        assert abs(0.75 - steps * rate - float(moved.double().mean())) < allowed < steps * rate / 2

    def test_another_key_draws_otherwise(self, backend, name):
        start, grad = half_table(ROWS, 8, name), integer_grad(8)
        first, again, other = (stepped(backend, start, name, UpdateRule("sgd", 0.1, noise_key=key), grad)[0] for key in (KEY, KEY, KEY + 1))
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert ((first.float() - other.float()).abs() <= torch.finfo(start.dtype).eps * other.abs().float() + 1e-7).all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("isa", [each for each in BACKENDS if each.startswith("cpu-")])
def test_any_number_of_threads_draws_the_same(isa, name):
    """Of the processor's, on rows enough for threads to share them."""
    if isa not in available_backends():
        pytest.skip(f"{isa}: its instruction set is missing here")
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        program = get_backend(isa).compile([TableSpec("t", 2000, 40, name)], [FeatureSpec("f", 0)])
        table = torch.ones(2000, 40, dtype=torch_dtype(name))
        batch = program.prepare([torch.arange(6000) * 7 % 2000], [2])
        grad = torch.linspace(-1, 1, 3000 * 40).view(3000, 40)
        program.update([table], [None], [UpdateRule("sgd", 0.1, noise_key=KEY)], [Segment(batch, grad)])
        results.append(table)
    assert all(torch.equal(results[0], other) for other in results[1:]) and len(results[0].unique()) > 10


@pytest.mark.parametrize(("dtype", "key", "message"), [
    ("float32", 1, "table 't': rounding by chance is for float16 and bfloat16 weights; got a noise_key for float32"),
    ("float16", 2**64, r"table 't': noise_key must be in 0\.\.2\*\*64 - 1; got 18446744073709551616"),
])
def test_what_is_refused(backend, dtype, key, message):
    program = backend.compile([TableSpec("t", 9, 8, dtype)], [FeatureSpec("f", 0)])
    with pytest.raises(ValueError, match=message):
        program.update([torch.zeros(9, 8, dtype=torch_dtype(dtype))], [None], [UpdateRule("sgd", 1.0, noise_key=key)], [])
