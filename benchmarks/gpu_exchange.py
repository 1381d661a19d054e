"""What surrounds an exchange between ranks, on one device: distinct ids, and rows of many matrices in one buffer and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from cases import CheckFailed
from gpu_cases import DeviceShape, Phase
from torch import Tensor

from sparselift.datasets.synthetic import scatter, zipf_ranks
from sparselift.kernels.exchange import WIRE_DTYPES, ExchangeKernels, PackedLayout, PackedPart

STEPS_OF_INT8 = 255


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation in ours and, where there is one, torch's way; they agree on the same data."""

    name: str
    traffic_bytes: int             # least: every input read once, every output written once
    ours: Phase
    torch: Phase | None


def always(run: Callable[[], object]) -> Phase:
    """The same whatever the number of the batch."""
    return Phase(lambda number: number, lambda number: run())


def operations(multi_hot: DeviceShape, one_hot: DeviceShape, kernels: ExchangeKernels, seed: int) -> Iterator[Operation]:
    """Ids of many bags, then pooled rows of many tables. Each is checked before it is yielded; raises CheckFailed."""
    yield dedup(multi_hot, kernels, None, seed)
    yield dedup(multi_hot, kernels, 1.05, seed)
    for precision in WIRE_DTYPES:
        yield from packing(one_hot, kernels, precision, seed)


def dedup(shape: DeviceShape, kernels: ExchangeKernels, exponent: float | None, seed: int) -> Operation:
    """Distinct ids of a batch's in the largest table, and which of them each id is."""
    rows, count = max(shape.rows), shape.num_ids
    drawn = np.random.default_rng(seed)
    ranks = drawn.integers(0, rows, count) if exponent is None else zipf_ranks(drawn, exponent, rows, count)
    ids = torch.from_numpy(scatter(ranks, rows)).to(kernels.device)
    found, (want, inverse) = kernels.dedup(ids, rows), torch.unique(ids, return_inverse=True)
    if not torch.equal(found.trimmed(), want) or not torch.equal(found.slots.long(), inverse):
        raise CheckFailed(f"dedup of {count} ids finds {int(found.count)} distinct ones, torch.unique {len(want)}, or in another order")
    name = "dedup, uniform ids" if exponent is None else "dedup, skewed ids"
    return Operation(name, ids.nbytes + found.slots.nbytes + want.nbytes, always(lambda: kernels.dedup(ids, rows)),
                     always(lambda: torch.unique(ids, return_inverse=True)))


def packing(shape: DeviceShape, kernels: ExchangeKernels, precision: str, seed: int) -> Iterator[Operation]:
    """Pooled rows (B, D) of every table into one buffer, and out of it. Torch has no int8 with a scale a row."""
    size, dim, count = shape.batch_size, shape.dim, shape.num_tables
    pooled = torch.randn(size, count * dim, generator=torch.Generator(kernels.device).manual_seed(seed), device=kernels.device)
    received = torch.full_like(pooled, torch.nan)
    sent, taken = (list(matrix.split(dim, dim=1)) for matrix in (pooled, received))
    layout = PackedLayout((PackedPart(size, dim, precision),) * count)
    buffer = kernels.pack(layout, sent)
    kernels.unpack(layout, buffer, taken)
    kernels.synchronize()
    check_packed(precision, pooled, received, dim)
    ours = {"pack": always(lambda: kernels.pack(layout, sent, buffer)), "unpack": always(lambda: kernels.unpack(layout, buffer, taken))}
    torchs: dict[str, Phase] = {}
    if precision != "int8":
        packed = [torch.empty(size, dim, dtype=getattr(torch, precision), device=kernels.device) for _ in range(count)]
        torchs = {"pack": always(lambda: copy_all(packed, sent)), "unpack": always(lambda: copy_all(taken, packed))}
    for name, phase in ours.items():
        yield Operation(f"{name}, {precision}", pooled.nbytes + layout.nbytes, phase, torchs.get(name))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """A copy a table: what there is without a packed buffer."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def check_packed(precision: str, sent: Tensor, received: Tensor, dim: int) -> None:
    """A conversion there and back; int8: half a step of the row's range, and rounding."""
    if precision != "int8":
        right = torch.equal(received, sent.to(getattr(torch, precision)).float())
    else:
        rows, back = sent.view(-1, dim), received.view(-1, dim)
        step = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / STEPS_OF_INT8
        right = bool(((back - rows).abs() <= 0.5002 * step + 2.0**-21 * rows.abs().amax(1, keepdim=True)).all())
    if not right:
        raise CheckFailed(f"rows that were packed and unpacked as {precision} differ from their conversion")
