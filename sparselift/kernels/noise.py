"""Stochastic rounding: to one of the two neighbours, by chance, so that the mean is the number itself.

Updates that are small beside the spacing of float16 or bfloat16 weights are lost where every result is rounded to the nearest: the weight
stays where it is for ever. Rounded by chance it moves, now and then, as far as it should on average.

Chance is no state but a function of counters: the same for a key, a row and a column on every backend and instruction set, for any
number of threads and whatever was drawn before. `noise_key` makes the key of a table's step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def noise_key(seed: int, table: int, step: int) -> int:
    """The key of one step of one table, in 0..2**64 - 1. It has no memory: a run that goes on at a step draws what it would have drawn.

    Parameters
    ----------
    seed    of the run
    table   which table, by a number that does not change when tables are grouped another way
    step    the optimizer's count of steps for that table, which its state_dict keeps
    """
    key = 0
    for part in (seed, table, step):
        key = _mix((key + part + 1) * _GOLDEN & _MASK)
    return key


def chance(key: int, rows: Tensor, dim: int) -> Tensor:
    """(N, dim) int64 in 0..2**32 - 1: random bits for the columns of `rows` (N,).

    A row has output row + 1 of SplitMix64 from the key on, in two halves. The low one starts a Weyl sequence over the columns, whose
    numbers are mixed, the high one added half-way (multipliers: Wellons, "Prospecting for hash functions", 2018).
    """
    with np.errstate(over="ignore"):
        z = np.uint64(key) + (rows.numpy().astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        low, high = z.astype(np.uint32)[:, None], (z >> np.uint64(32)).astype(np.uint32)[:, None]
        x = low + np.arange(dim, dtype=np.uint32) * np.uint32(0x9E3779B9)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) + high
        x *= np.uint32(0x846CA68B)
    return torch.from_numpy((x ^ (x >> np.uint32(16))).astype(np.int64))


def round_by_chance(values: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `values`, each made one of its two neighbours in `dtype`, float16 or bfloat16: the farther from 0 with the probability
    of its distance from the nearer. One that `dtype` has stays, an infinity and NaN as well.

    The probability is a multiple of 2**-16 for bfloat16 and exact. For float16 it is exact as well, but for numbers below 2**-22, whose
    bits below 2**-45 are dropped first: there the mean is too near to 0, by less than 2**-45.
    """
    bits = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    size = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        rounded = (size + (random >> 16)) & 0x7FFF0000
    else:
        normal = (size + (random >> 19)) & 0x7FFFE000
        # Below 2**-14 numbers are multiples of 2**-24.
        parts = (values.abs().clamp(max=2.0**-14).double() * 2.0**45).long() + (random >> 11)
        small = ((parts >> 21) * 2.0**-24).float().view(torch.int32).long()
        rounded = torch.where(size < 113 << 23, small, normal)
    rounded = torch.where(size < 0x7F800000, rounded, size)      # a NaN may have its bits among the last
    return (rounded | (bits ^ size)).to(torch.int32).view(torch.float32)
