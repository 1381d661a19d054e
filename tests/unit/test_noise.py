"""The random bits of stochastic rounding, and that it is right on average."""

from __future__ import annotations

import math

import pytest
import torch

from sparselift.kernels.noise import chance, noise_key, round_by_chance

HALVES = [torch.float16, torch.bfloat16]
CERTAINTY = 1e-9      # of a mean of independent draws being farther off than the tests allow (Hoeffding's inequality); the draws are fixed


def bits(count: int, dim: int) -> torch.Tensor:
    return chance(noise_key(0, 0, 0), torch.arange(count), dim)


def allowed(draws: int) -> float:
    """How far the mean of so many draws from [0, 1] may be off."""
    return math.sqrt(math.log(2 / CERTAINTY) / (2 * draws))


def test_the_bits_are_those_that_they_have_always_been():
    """Models that are trained on draw them again."""
    assert noise_key(1, 2, 3) == 17281550289527850393
    drawn = [[3141477301, 2925586098], [4289713875, 4121175985], [3874663762, 3308327136]]
    assert chance(5, torch.tensor([0, 7, 2**31]), 2).tolist() == drawn


def test_every_bit_is_set_every_other_time():
    drawn = bits(1000, 64)
    for bit in range(32):
        assert abs(float(((drawn >> bit) & 1).double().mean()) - 0.5) < allowed(drawn.numel())


def test_neighbours_know_nothing_of_each_other():
    """Rows, columns, and the keys of tables and steps that come one after the other agree in as many bits as not."""
    drawn = bits(1000, 64)
    keyed = [chance(noise_key(*parts), torch.arange(1000), 64) for parts in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    for other in (drawn.roll(1, 0), drawn.roll(1, 1), *keyed):
        for bit in (0, 12, 19, 31):
            assert abs(float((((drawn ^ other) >> bit) & 1).double().mean()) - 0.5) < allowed(drawn.numel())


def test_keys_differ():
    assert len({noise_key(seed, table, step) for seed in range(8) for table in range(8) for step in range(8)}) == 512


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("exponent", [-26, -24, -15, -14, 0, 10])
def test_the_mean_is_the_number(dtype, exponent):
    """Of normal numbers and of those below, which have fewer bits in float16."""
    numbers = 2.0**exponent * (1 + torch.rand(16, generator=torch.Generator().manual_seed(0)))
    values = torch.cat([numbers, -numbers]).expand(4000, 32).contiguous()
    rounded = round_by_chance(values, bits(4000, 32), dtype)
    assert torch.equal(rounded, rounded.to(dtype).float())
    below, above = rounded.min(0).values, rounded.max(0).values
    spacing = above - below
    assert (below <= values).all() and (values <= above).all() and (spacing > 0).all()
    assert ((rounded == below) | (rounded == above)).all()
    off = (rounded.double().mean(0) - values[0].double()) / spacing
    assert (off.abs() < allowed(4000)).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_the_dtype_has_stays(dtype):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float().view(256, 256)
    for random in (torch.zeros(256, 256, dtype=torch.int64), torch.full((256, 256), 2**32 - 1), bits(256, 256)):
        rounded = round_by_chance(values, random, dtype)
        assert torch.equal(rounded.isnan(), values.isnan())
        assert torch.equal(rounded.nan_to_num().view(torch.int32), values.nan_to_num().view(torch.int32))
