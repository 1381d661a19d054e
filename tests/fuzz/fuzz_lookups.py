"""Random calls of every lookup, module and functional, over all their arguments.

    python -m tests.fuzz.fuzz_lookups --seconds 60 --seed 0

A valid call must give what plain float64 loops give, forward and backward. A call with one fault in it must raise the error
that names the fault, before any weight has changed. A failure prints the seed of its call: `--seed N --calls 1` repeats it.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparselift import functional
from sparselift.functional import lookups
from sparselift.nn import Embedding, EmbeddingBag, TableBatchedEmbeddingBags
from tests.unit.lookup_loops import flat, offsets, pool

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

Bags = list[list[int]]


class Fault(Exception):
    """A call did something else than it must."""


@dataclass
class Call:
    """One call of a lookup of one table. Faults are planted by changing it."""

    form: str                                  # "module", "functional"
    pooled: bool                               # an EmbeddingBag, else an Embedding
    rows: int
    dim: int
    dtype: torch.dtype
    bags: Bags
    matrix: bool                               # pooled: ids (B, L) without offsets
    mode: str = "none"
    sparse: bool = False
    padding_idx: int | None = None
    last: bool = False
    max_norm: float | None = None
    norm_type: float = 2.0
    by_freq: bool = False
    factors: list[list[float]] | None = None
    ids: Tensor = field(default_factory=lambda: torch.empty(0))
    starts: Tensor | None = None
    sample_weights: Tensor | None = None
    before: tuple[Tensor | None, ...] | None = None       # the arguments of a valid call of the same module that comes first
    expected: tuple[type[Exception], str] | None = None


def draw(rng: random.Random) -> Call:
    """A valid call."""
    pooled, matrix = rng.random() < 0.7, rng.random() < 0.3
    rows, dim = rng.choice([1, 2, 7, 7, 7, 40]), rng.choice([0, 1, 2, 3, 4, 5, 8, 17, 33])
    count, length = rng.choice([0, 1, 2, 5, 9]), rng.choice([0, 1, 2, 4])
    lengths = [length] * count if matrix and pooled else [rng.choice([0, 0, 1, 2, 5]) for _ in range(count)]
    bags = [[rng.randrange(rows) for _ in range(each)] for each in (lengths if pooled else [1] * count)]
    call = Call(rng.choice(["module", "functional"]), pooled, rows, dim, rng.choice(DTYPES), bags, matrix and pooled)
    call.mode = rng.choice(["sum", "mean", "max"]) if pooled else "none"
    call.sparse = rng.random() < 0.5 and call.mode != "max"
    call.by_freq = rng.random() < 0.1 and call.mode != "max"
    call.last = rng.random() < 0.3 and pooled
    if rng.random() < 0.3:
        call.padding_idx = rng.randrange(-rows, rows)
    if rng.random() < 0.1:
        call.max_norm, call.norm_type = rng.choice([0.5, 1.0, 3.0]), rng.choice([1.0, 2.0])
    if call.mode == "sum" and rng.random() < 0.6:
        call.factors = [[rng.choice([-2.0, -1.0, 0.5, 1.0, 3.0]) for _ in bag] for bag in bags]
    place(call, rng, rng.choice(INDEX_DTYPES), rng.choice(INDEX_DTYPES))
    return call


def place(call: Call, rng: random.Random, index_dtype: torch.dtype, offset_dtype: torch.dtype) -> None:
    """The tensors of the call."""
    call.ids = strided(flat(call.bags, index_dtype), rng)
    if call.matrix:
        shape = len(call.bags), len(call.bags[0]) if call.bags else 3
        call.ids = strided(flat(call.bags, index_dtype).reshape(shape), rng)
    elif call.pooled:
        call.starts = strided(offsets(call.bags, call.last, offset_dtype), rng)
    if call.factors is not None:
        call.sample_weights = strided(flat(call.factors, call.dtype).reshape(call.ids.shape), rng)


def strided(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same values, sometimes with gaps between them."""
    if rng.random() < 0.7 or not tensor.numel():
        return tensor
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 99, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


# ---------------------------------------------------------------------------------------------------------------- faults

def bad_id(call: Call, rng: random.Random) -> bool:
    ids = call.ids.reshape(-1).clone()
    if not len(ids):
        return False
    position = rng.randrange(len(ids))
    value = rng.choice([-1, -call.rows, call.rows, call.rows + 7, 2**31 - 1, *([2**40, -2**63] if ids.dtype == torch.int64 else [-2**31])])
    ids[position] = value
    call.ids = ids.reshape(call.ids.shape)
    call.expected = IndexError, f"'weight': id {value} at position {position} is out of range for table 'weight' of {call.rows} rows"
    return True


def bad_id_dtype(call: Call, rng: random.Random) -> bool:
    dtype = rng.choice([torch.float32, torch.float64, torch.int16, torch.int8, torch.uint8, torch.bool])
    call.ids, call.expected = call.ids.to(dtype), (TypeError, "indices must be int32 or int64; got ")
    return True


def bad_offset_dtype(call: Call, rng: random.Random) -> bool:
    if call.starts is None:
        return False
    call.starts = call.starts.to(rng.choice([torch.float32, torch.int16, torch.uint8, torch.bool]))
    call.expected = TypeError, "offsets must be int32 or int64; got "
    return True


def bad_offset(call: Call, rng: random.Random) -> bool:
    if call.starts is None or not len(call.starts):
        return False
    starts = call.starts.clone()
    position = rng.randrange(len(starts))
    count = call.ids.numel()
    value = rng.choice([-1, -5, count + 1, count + 1000, 2**31 - 1])
    starts[position] = value
    call.starts = starts
    call.expected = ValueError, "'weight': (offsets must (start at 0|not decrease)|offset .* passes the|the last offset must equal)"
    return True


def decreasing_offsets(call: Call, rng: random.Random) -> bool:
    if call.starts is None or len(call.starts) < 3 or call.ids.numel() < 1:
        return False
    starts = call.starts.clone()
    starts[1], starts[2] = 1, 0
    call.starts, call.expected = starts, (ValueError, "'weight': offsets must not decrease; got 0 after 1 at position 2")
    return True


def ids_after_the_last_offset(call: Call, rng: random.Random) -> bool:
    if call.starts is None:
        return False
    call.before = None
    call.last, call.starts = True, offsets(call.bags, True, call.starts.dtype)
    call.ids = torch.cat([call.ids, call.ids.new_zeros(2)])
    if call.sample_weights is not None:
        call.sample_weights = torch.cat([call.sample_weights, call.sample_weights.new_ones(2)])
    call.expected = ValueError, "'weight': the last offset must equal the number of ids"
    return True


def no_offsets_for_ids(call: Call, rng: random.Random) -> bool:
    if call.starts is None or not (call.ids.numel() or call.last):
        return False
    call.starts, call.expected = call.starts[:0], (ValueError, "'weight': no offsets for ")
    return True


def missing_offsets(call: Call, rng: random.Random) -> bool:
    if call.starts is None:
        return False
    call.starts, call.expected = None, (ValueError, "offsets has to be a 1D Tensor but got None")
    return True


def offsets_beside_a_matrix(call: Call, rng: random.Random) -> bool:
    if not call.matrix:
        return False
    call.starts, call.expected = torch.zeros(len(call.bags), dtype=torch.int64), (ValueError, "if input is 2D, then offsets has to be None")
    return True


def offsets_of_two_dimensions(call: Call, rng: random.Random) -> bool:
    if call.starts is None:
        return False
    call.starts, call.expected = call.starts[None], (ValueError, "offsets has to be a 1D Tensor")
    return True


def other_weight_shape(call: Call, rng: random.Random) -> bool:
    if call.sample_weights is None:
        return False
    count = call.ids.numel()
    call.sample_weights = torch.ones(rng.choice([(count + 1,), (1, count, 1), (count,) if call.matrix else (1, count)]), dtype=call.dtype)
    call.expected = ValueError, "must have the same shape as the input"
    return True


def other_weight_dtype(call: Call, rng: random.Random) -> bool:
    if call.sample_weights is None:
        return False
    other = rng.choice([dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.int64) if dtype != call.dtype])
    call.sample_weights, call.expected = call.sample_weights.to(other), (TypeError, "per-sample weights must ")
    return True


def weights_for_a_mean(call: Call, rng: random.Random) -> bool:
    if call.mode not in ("mean", "max"):
        return False
    call.sample_weights = torch.ones(call.ids.shape, dtype=call.dtype)
    call.expected = NotImplementedError, "per_sample_weights is only supported for mode='sum'"
    call.max_norm = None                       # torch rescales rows before it refuses
    return True


def another_device(call: Call, rng: random.Random) -> bool:
    call.ids, call.expected = call.ids.to("meta"), (TypeError, "indices must be on the CPU; got meta")
    return True


def offsets_on_another_device(call: Call, rng: random.Random) -> bool:
    if call.starts is None:
        return False
    call.starts, call.expected = call.starts.to("meta"), (TypeError, "offsets must be on the CPU; got meta")
    return True


def unknown_mode(call: Call, rng: random.Random) -> bool:
    if not call.pooled or call.sample_weights is not None:
        return False
    call.before = None
    call.mode, call.expected = "median", (ValueError, "mode has to be one of sum, mean or max")
    return True


FAULTS: Sequence[Callable[[Call, random.Random], bool]] = (
    bad_id, bad_id, bad_id_dtype, bad_offset_dtype, bad_offset, bad_offset, decreasing_offsets, ids_after_the_last_offset,
    no_offsets_for_ids, missing_offsets, offsets_beside_a_matrix, offsets_of_two_dimensions, *[other_weight_shape] * 4,
    *[other_weight_dtype] * 4, weights_for_a_mean, another_device, offsets_on_another_device, unknown_mode)


# ----------------------------------------------------------------------------------------------------------------- calls

def values(rows: int, dim: int, dtype: torch.dtype, rng: random.Random) -> Tensor:
    """Small multiples of a quarter: their sums are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return (torch.randint(-16, 17, (rows, dim), generator=generator) / 4).to(dtype)


def run(call: Call, weight: Tensor) -> Tensor:
    """The lookup, on a table that is trained."""
    if call.form == "functional":
        if not call.pooled:
            return functional.embedding(call.ids, weight, call.padding_idx, call.max_norm, call.norm_type, call.by_freq, call.sparse)
        return functional.embedding_bag(call.ids, weight, call.starts, call.max_norm, call.norm_type, call.by_freq, call.mode, call.sparse,
                                        call.sample_weights, call.last, call.padding_idx)
    options: dict[str, Any] = {"padding_idx": call.padding_idx, "max_norm": call.max_norm, "norm_type": call.norm_type,
                               "scale_grad_by_freq": call.by_freq, "sparse": call.sparse, "_weight": weight.detach()}
    if not call.pooled:
        rows = Embedding(call.rows, call.dim, **options)
        rows.weight = weight
        if call.before is not None:
            rows(call.before[0])
        return rows(call.ids)
    bags = EmbeddingBag(call.rows, call.dim, mode=call.mode, include_last_offset=call.last, **options)
    bags.weight = weight
    if call.before is not None:
        bags(*call.before)
    return bags(call.ids, call.starts, call.sample_weights)


def check_valid(call: Call, rng: random.Random) -> None:
    weight = torch.nn.Parameter(values(call.rows, call.dim, call.dtype, rng))
    table = weight.detach().double().numpy().copy()
    if call.max_norm is not None:
        rescale(table, {row for bag in call.bags for row in bag}, call.max_norm, call.norm_type)
    if call.sample_weights is not None and rng.random() < 0.7:
        call.sample_weights.requires_grad_()
    padding = None if call.padding_idx is None else call.padding_idx % call.rows
    out = run(call, weight)
    compare("weight", weight.detach(), table, call.dtype)
    table = weight.detach().double().numpy()       # rounded, which decides who is the largest
    arrived = values(len(call.bags), call.dim, call.dtype, rng)
    want = pool(table, call.bags, call.mode if call.pooled else "sum", call.factors, padding, arrived.double().numpy(), call.by_freq)
    if not call.pooled:
        want.out = table[np.array([row for bag in call.bags for row in bag], dtype=int)].reshape(len(call.bags), call.dim)
    compare("output", out.detach(), want.out, call.dtype)
    out.backward(arrived)
    grad = weight.grad
    if grad is None or grad.is_sparse != call.sparse or grad.dtype != call.dtype:
        raise Fault(f"the gradient is {None if grad is None else (grad.layout, grad.dtype)}")
    exact = grad.double()
    compare("gradient", exact.to_dense() if call.sparse else exact, want.weight_grad, call.dtype)
    if call.sample_weights is not None and call.sample_weights.requires_grad:
        assert call.sample_weights.grad is not None
        compare("gradient of the per-sample weights", call.sample_weights.grad.reshape(-1), want.sample_weight_grad, call.dtype)


def rescale(table: np.ndarray, rows: set[int], max_norm: float, norm_type: float) -> None:
    for row in rows:
        norm = (np.abs(table[row]) ** norm_type).sum() ** (1 / norm_type)
        if norm > max_norm:
            table[row] *= max_norm / (norm + 1e-7)


def compare(what: str, got: Tensor, want: np.ndarray, dtype: torch.dtype) -> None:
    if tuple(got.shape) != want.shape:
        raise Fault(f"{what} has shape {tuple(got.shape)}, not {want.shape}")
    scale = max(1.0, float(np.abs(want).max(initial=0)))
    off = np.abs(got.double().numpy() - want).max(initial=0)
    if not off <= TOLERANCE[dtype] * scale:
        raise Fault(f"{what} is off by {off:.3g} where values reach {scale:.3g}:\n{got}\nnot\n{want}")


def check_faulty(call: Call, rng: random.Random) -> None:
    weight = torch.nn.Parameter(values(call.rows, call.dim, call.dtype, rng))
    before = weight.detach().clone()
    assert call.expected is not None
    kind, message = call.expected
    try:
        out = run(call, weight)
    except kind as error:
        if not re.search(message, str(error)):
            raise Fault(f"the error does not say {message!r}: {error}") from error
    else:
        raise Fault(f"no error that says {message!r}; got {out}")
    if not torch.equal(weight, before):
        raise Fault("the call failed, and has changed the table")


def check_tables(rng: random.Random) -> None:
    """TableBatchedEmbeddingBags, valid or with a wrong id."""
    count, dtype = rng.choice([0, 1, 3]), rng.choice([torch.float32, torch.float32, torch.float64])
    shapes = [(rng.choice([1, 7]), rng.choice([1, 4, 9])) for _ in range(rng.choice([1, 2, 4]))]
    mode = rng.choice(["sum", "mean"])
    module = TableBatchedEmbeddingBags(shapes, mode, sparse=rng.random() < 0.5, dtype=dtype)
    for weight in module.weights:
        weight.data.copy_(values(*weight.shape, dtype, rng))
    bags = [[[rng.randrange(rows) for _ in range(rng.choice([0, 1, 3]))] for _ in range(count)] for rows, _ in shapes]
    every = [bag for each in bags for bag in each]
    ids, bounds = flat(every, rng.choice(INDEX_DTYPES)), offsets(every, True, rng.choice(INDEX_DTYPES))
    if len(ids) and rng.random() < 0.3:
        position = rng.randrange(len(ids))
        ids[position] = rng.choice([-1, 7, 2**31 - 1])
        try:
            module(ids, bounds)
        except IndexError:
            return
        raise Fault("no error for a wrong id")
    out = module(ids, bounds)
    arrived = values(count, out.shape[1], dtype, rng)
    out.backward(arrived)
    column = 0
    for (_, dim), weight, each in zip(shapes, module.weights, bags):
        want = pool(weight.detach().double().numpy(), each, mode, grad=arrived[:, column:column + dim].double().numpy())
        compare("output", out[:, column:column + dim].detach(), want.out, dtype)
        compare("gradient", weight.grad.to_dense(), want.weight_grad, dtype)
        column += dim


def one(seed: int) -> str:
    """The call of this seed. Returns what it was. Raises Fault, or whatever the call should not have raised."""
    rng = random.Random(seed)
    lookups.FUSED_ELEMENTS = rng.choice([0, 2**14])
    if rng.random() < 0.1:
        check_tables(rng)
        return "tables"
    call = draw(rng)
    if rng.random() < 0.5 and call.max_norm is None:
        call.before = call.ids, call.starts, call.sample_weights
    plant = rng.choice(FAULTS) if rng.random() < 0.4 else None
    if plant is not None and plant(call, rng):
        check_faulty(call, rng)
        return plant.__name__
    check_valid(call, rng)
    return f"valid {call.mode}"


def fuzz(seed: int, calls: int | None = None, seconds: float | None = None) -> Counter[str]:
    """Calls of this seed and those after it, until there were so many, or for so long."""
    seen: Counter[str] = Counter()
    before, start = lookups.FUSED_ELEMENTS, time.monotonic()
    try:
        while (calls is None or seen.total() < calls) and (seconds is None or time.monotonic() - start < seconds):
            number = seed + seen.total()
            try:
                seen[one(number)] += 1
            except Exception as error:
                raise Fault(f"seed {number}: {type(error).__name__}: {error}") from error
    finally:
        lookups.FUSED_ELEMENTS = before
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.seconds is None and args.calls is None:
        args.seconds = 10.0
    try:
        seen = fuzz(args.seed, args.calls, args.seconds)
    except Fault:
        traceback.print_exc()
        return 1
    print(f"{seen.total()} calls from seed {args.seed}: {dict(sorted(seen.items()))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
