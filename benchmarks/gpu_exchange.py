"""What surrounds an exchange between ranks, on one device: distinct ids, ids by owner, rows of many matrices in one buffer and back, and
columns regrouped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from cases import CheckFailed
from gpu_cases import DeviceShape, Phase
from torch import Tensor

from sparselift.datasets.synthetic import scatter, zipf_ranks
from sparselift.kernels.exchange import WIRE_DTYPES, ExchangeKernels, PackedLayout, PackedPart, RegroupSpec, RowOwners

STEPS_OF_INT8 = 255
NUM_OWNERS = 8                     # ranks of a machine


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


def operations(multi_hot: DeviceShape, one_hot: DeviceShape, kernels: ExchangeKernels,
               seed: int) -> Iterator[tuple[DeviceShape, Operation]]:
    """Ids of many bags, then pooled rows of many tables; of which shape. Each is checked before it is yielded; raises CheckFailed."""
    yield multi_hot, dedup(multi_hot, kernels, None, seed)
    yield multi_hot, dedup(multi_hot, kernels, 1.05, seed)
    yield multi_hot, bucketize(multi_hot, kernels, seed)
    for precision in WIRE_DTYPES:
        for operation in packing(one_hot, kernels, precision, seed):
            yield one_hot, operation
    for operation in regrouping(one_hot, kernels, seed):
        yield one_hot, operation


def ids_of(shape: DeviceShape, exponent: float | None, seed: int, device: torch.device) -> Tensor:
    """As many ids as a batch has, all of the largest table."""
    rows, count, drawn = max(shape.rows), shape.num_ids, np.random.default_rng(seed)
    ranks = drawn.integers(0, rows, count) if exponent is None else zipf_ranks(drawn, exponent, rows, count)
    return torch.from_numpy(scatter(ranks, rows)).to(device)


def dedup(shape: DeviceShape, kernels: ExchangeKernels, exponent: float | None, seed: int) -> Operation:
    """Distinct ids of a batch's in the largest table, and which of them each id is."""
    rows, count, ids = max(shape.rows), shape.num_ids, ids_of(shape, exponent, seed, kernels.device)
    found, (want, inverse) = kernels.dedup(ids, rows), torch.unique(ids, return_inverse=True)
    if not torch.equal(found.trimmed(), want) or not torch.equal(found.slots.long(), inverse):
        raise CheckFailed(f"dedup of {count} ids finds {int(found.count)} distinct ones, torch.unique {len(want)}, or in another order")
    name = "dedup, uniform ids" if exponent is None else "dedup, skewed ids"
    return Operation(name, ids.nbytes + found.slots.nbytes + want.nbytes, always(lambda: kernels.dedup(ids, rows)),
                     always(lambda: torch.unique(ids, return_inverse=True)))


def bucketize(shape: DeviceShape, kernels: ExchangeKernels, seed: int) -> Operation:
    """A batch's ids, all of the largest table and in bags of the shape's, by the ranks that have its rows."""
    owners, length = RowOwners(max(shape.rows), NUM_OWNERS), shape.pooling[0]
    ids = ids_of(shape, None, seed, kernels.device)
    offsets = torch.arange(0, len(ids) + 1, length, device=kernels.device)
    found, want = kernels.bucketize(ids, offsets, owners), torch_buckets(ids, offsets, owners)
    for name, theirs in zip(("rows", "sources", "places", "lengths"), want, strict=True):
        if not torch.equal(getattr(found, name).long(), theirs):
            raise CheckFailed(f"bucketize of {len(ids)} ids for {NUM_OWNERS} owners: {name} are not those of a stable sort by owner")
    outputs = (found.rows, found.sources, found.places, found.lengths)
    return Operation("bucketize", ids.nbytes + offsets.nbytes + sum(output.nbytes for output in outputs),
                     always(lambda: kernels.bucketize(ids, offsets, owners)), always(lambda: torch_buckets(ids, offsets, owners)))


def torch_buckets(ids: Tensor, offsets: Tensor, owners: RowOwners) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, sources, places and lengths, of ids that are rows."""
    owner, bags = owners.owner_of(ids), len(offsets) - 1
    sources = torch.argsort(owner, stable=True)
    places = torch.empty_like(sources)
    places[sources] = torch.arange(len(ids), device=ids.device)
    bag = torch.repeat_interleave(torch.arange(bags, device=ids.device), offsets.diff(), output_size=len(ids))
    lengths = torch.bincount(owner * bags + bag, minlength=owners.count * bags)
    return owners.row_of(ids)[sources], sources, places, lengths.view(owners.count, bags)


def regrouping(shape: DeviceShape, kernels: ExchangeKernels, seed: int) -> Iterator[Operation]:
    """Every second feature's pooled rows (B, D) of one matrix, and the others', side by side; and the gradients back."""
    size, dim, count = shape.batch_size, shape.dim, shape.num_tables
    spec = RegroupSpec(((dim,) * count,), (tuple(range(0, count, 2)), tuple(range(1, count, 2))))
    pooled = torch.randn(size, count * dim, generator=torch.Generator(kernels.device).manual_seed(seed), device=kernels.device)
    outputs, back = [pooled.new_empty(size, width) for width in spec.group_widths], torch.empty_like(pooled)
    wanted = [torch.empty_like(output) for output in outputs]
    columns, grads = pooled.split(dim, 1), [output.split(dim, 1) for output in outputs]
    there = [[columns[feature] for feature in group] for group in spec.groups]
    again = [grads[feature % 2][feature // 2] for feature in range(count)]

    def torch_regroup() -> None:
        for group, want in zip(there, wanted, strict=True):
            torch.cat(group, 1, out=want)

    kernels.regroup(spec, [pooled], outputs)
    kernels.regroup_backward(spec, outputs, [back])
    torch_regroup()
    if not all(map(torch.equal, outputs, wanted)) or not torch.equal(back, pooled):
        raise CheckFailed(f"{count} features of {dim} columns, regrouped or brought back, are not torch.cat of their columns")
    taken = torch.empty_like(pooled)
    yield Operation("regroup", 2 * pooled.nbytes, always(lambda: kernels.regroup(spec, [pooled], outputs)), always(torch_regroup))
    yield Operation("regroup, backward", 2 * pooled.nbytes, always(lambda: kernels.regroup_backward(spec, outputs, [back])),
                    always(lambda: torch.cat(again, 1, out=taken)))


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
