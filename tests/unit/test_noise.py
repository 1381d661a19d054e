"""The random bits of stochastic rounding, and that it is right on average."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from sparselift.dtypes import dtype_name
from sparselift.kernels import get_backend
from sparselift.kernels.base import FeatureSpec, Segment, TableSpec, UpdateRule
from sparselift.kernels.noise import chance, noise_key, round_by_chance
from sparselift.optim import RowWiseAdagrad

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


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_nans_stay_whichever_of_their_bits_are_set(dtype):
    """Also where the dtype has none of these bits, and an infinity is what is left of them."""
    payloads = torch.tensor([0, *(1 << bit for bit in range(23)), 2**23 - 1])
    values = torch.stack([payloads | 0x7F800000, payloads - 0x00800000]).to(torch.int32).view(torch.float32)
    rounded = round_by_chance(values, bits(2, 25), dtype)
    assert torch.equal(rounded.isnan(), values.isnan()) and int(rounded.isnan().sum()) == 48
    assert rounded[:, 0].tolist() == [math.inf, -math.inf]


def rounded_steps(dtype: torch.dtype, steps: range, weight: nn.Parameter, optimizer: RowWiseAdagrad) -> None:
    """Steps with integers, so that sums of squares are exact."""
    for step in steps:
        values = torch.randint(-4, 5, (5, 8), generator=torch.Generator().manual_seed(step)).to(dtype)
        weight.grad = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3, 0, 3]]), values, weight.shape, check_invariants=True)
        optimizer.step()


def parameter(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8).to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rowwise_adagrad_rounds_as_the_kernels_do(dtype: torch.dtype) -> None:
    """The second parameter of an optimizer, in its first step."""
    other, weight = parameter(dtype), parameter(dtype)
    optimizer = RowWiseAdagrad([other, weight], lr=0.01, initial_accumulator_value=1.0, rounding_seed=7)
    start = weight.detach().clone()
    rounded_steps(dtype, range(1), weight, optimizer)
    program = get_backend("reference").compile([TableSpec("t", 6, 8, dtype_name(dtype))], [FeatureSpec("f", 0, "none")])
    table, sums = start.clone(), torch.ones(6)
    segment = Segment(program.prepare([weight.grad._indices()[0]], [1]), weight.grad._values().float())
    program.update([table], [sums], [UpdateRule("rowwise_adagrad", 0.01, 1e-8, noise_key=noise_key(7, 1, 0))], [segment])
    assert torch.equal(weight, table) and torch.equal(optimizer.state[weight]["sum"], sums)
    program.update([start], [torch.ones(6)], [UpdateRule("rowwise_adagrad", 0.01, 1e-8)], [segment])
    assert not torch.equal(weight, start)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(dtype: torch.dtype) -> None:
    kept = parameter(dtype)
    optimizer = RowWiseAdagrad([kept], lr=0.01, rounding_seed=7)
    rounded_steps(dtype, range(2), kept, optimizer)
    resumed = nn.Parameter(kept.detach().clone())
    again = RowWiseAdagrad([resumed], lr=99.0)
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for each in ((kept, optimizer), (resumed, again)):
        rounded_steps(dtype, range(2, 4), *each)
    assert torch.equal(kept, resumed) and torch.equal(optimizer.state[kept]["sum"], again.state[resumed]["sum"])
    assert again.state[resumed]["sum"].dtype == torch.float32


def test_dense_gradients_are_rounded_alike() -> None:
    sparse, dense = parameter(torch.bfloat16), parameter(torch.bfloat16)
    optimizers = [RowWiseAdagrad([each], lr=0.01, rounding_seed=7) for each in (sparse, dense)]
    sparse.grad = torch.sparse_coo_tensor(torch.tensor([[0, 4]]), torch.ones(2, 8, dtype=torch.bfloat16), (6, 8), check_invariants=True)
    dense.grad = sparse.grad.to_dense()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(sparse, dense) and not torch.equal(sparse, parameter(torch.bfloat16))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_weight_decay_is_in_float32_too(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.full((1, 8), 1e-2, dtype=dtype))
    optimizer = RowWiseAdagrad([weight], eps=1e-12, weight_decay=1e-6, rounding_seed=0)
    decay = 1e-6 * weight.detach().double()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["sum"].double(), decay.square().mean(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_a_state_that_was_saved_without_a_seed_is_of_none(dtype: torch.dtype) -> None:
    weight = parameter(dtype)
    optimizer = RowWiseAdagrad([weight], lr=0.01)
    rounded_steps(dtype, range(2), weight, optimizer)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["rounding_seed"]
    again = RowWiseAdagrad([parameter(dtype)])
    again.load_state_dict(saved)
    assert again.param_groups[0]["rounding_seed"] is None
    rounded_steps(dtype, range(1), again.param_groups[0]["params"][0], again)


def test_seeds_are_integers() -> None:
    for seed in (0.5, "a", float("nan")):
        with pytest.raises(ValueError, match=f"rounding_seed must be None or an integer; got {seed!r}"):
            RowWiseAdagrad([parameter(torch.bfloat16)], rounding_seed=seed)
    assert RowWiseAdagrad([parameter(torch.bfloat16)], rounding_seed=np.int64(5)).param_groups[0]["rounding_seed"] == 5


def test_float32_is_not_rounded() -> None:
    chosen, plain = parameter(torch.float32), parameter(torch.float32)
    rounded_steps(torch.float32, range(2), chosen, RowWiseAdagrad([chosen], lr=0.01, rounding_seed=7))
    rounded_steps(torch.float32, range(2), plain, RowWiseAdagrad([plain], lr=0.01))
    assert torch.equal(chosen, plain)
