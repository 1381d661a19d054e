"""What surrounds an exchange, in plain torch: the oracle of every other backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparselift.dtypes import torch_dtype
from sparselift.errors import ExchangeError

from .checks import check_bounds
from .exchange import Buckets, Distinct, ExchangeKernels, RowOwners
from .packed import PackedLayout, PackedPart
from .regroup import RegroupSpec

_STEPS, _LEAST_RANGE = 255.0, 2.0**-118


class ReferenceExchange(ExchangeKernels):
    """On any device that torch has."""

    name = "reference"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def _dedup(self, ids: Tensor, rows: int, found: Distinct) -> None:
        ids = ids.long()                                        # `rows` may be more than int32 holds
        is_row = (ids >= 0) & (ids < rows)
        distinct, slots = torch.unique(ids[is_row], return_inverse=True)
        found.ids[:len(distinct)] = distinct
        found.slots.fill_(-1)[is_row] = slots.int()
        found.count.fill_(len(distinct))

    def _bucketize(self, ids: Tensor, offsets: Tensor, owners: RowOwners, found: Buckets) -> None:
        bounds, ids = offsets.long(), ids.long()
        check_bounds(None, bounds, len(ids))
        owner, bags = owners.owner_of(ids), found.lengths.shape[1]
        sources = torch.argsort(owner, stable=True)
        found.rows.copy_(owners.row_of(ids)[sources])
        found.sources.copy_(sources)
        found.places[sources] = torch.arange(len(ids), dtype=torch.int32, device=self.device)
        bag = torch.repeat_interleave(torch.arange(bags, device=self.device), bounds.diff())
        lengths = torch.bincount(owner * bags + bag, minlength=(owners.count + 1) * bags)
        found.lengths.copy_(lengths[:owners.count * bags].view(owners.count, bags))

    def _pack(self, layout: PackedLayout, matrices: Sequence[Tensor], out: Tensor) -> None:
        out[:layout.nbytes] = 0
        out[:len(layout.header())] = torch.frombuffer(bytearray(layout.header()), dtype=torch.uint8)
        for part, offset, matrix in zip(layout.parts, layout.offsets, matrices):
            if part.dtype == "int8":
                scales, elements = quantized(matrix)
                out[offset:offset + 8 * part.rows] = scales.view(torch.uint8).flatten()
            else:
                # torch converts rows that lie apart one element at a time, and then NaNs have other bits.
                elements = matrix.contiguous().to(torch_dtype(part.dtype)).view(torch.uint8)
            out[offset + part.scale_bytes:offset + part.nbytes] = elements.flatten()

    def _unpack(self, layout: PackedLayout, buffer: Tensor, outputs: Sequence[Tensor]) -> None:
        found = PackedLayout.read(buffer)
        if found != layout:
            raise ExchangeError(_difference(found, layout))
        for part, offset, output in zip(layout.parts, layout.offsets, outputs):
            elements = buffer[offset + part.scale_bytes:offset + part.nbytes].clone()
            if part.dtype == "int8":
                scales = buffer[offset:offset + 8 * part.rows].clone().view(torch.float32).view(part.rows, 2)
                output.copy_(scales[:, 1:] + scales[:, :1] * elements.view(part.rows, part.dim).float())
            else:
                output.copy_(elements.view(torch_dtype(part.dtype)).view(part.rows, part.dim))

    def _regroup(self, spec: RegroupSpec, backward: bool, batch: int, given: Sequence[Tensor | None],
                 results: Sequence[Tensor | None]) -> None:
        regroup_in_torch(spec, backward, given, results)


def regroup_in_torch(spec: RegroupSpec, backward: bool, given: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
    """Fill `results`, of any dtype, as ExchangeKernels.regroup and regroup_backward do."""
    for part in spec.backward_ranges() if backward else spec.forward_ranges():
        result = results[part.matrix]
        if result is None:
            continue
        total = None
        for matrix, column in part.terms:
            term = given[matrix]
            if term is not None:
                columns = term[:, column:column + part.width]
                total = columns if total is None else total + columns
        result[:, part.column:part.column + part.width] = 0.0 if total is None else total


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, 2) float32 scales and biases, and (rows, dim) uint8 elements: see PackedPart. Divisions by tensors: torch's by numbers may be
    products with a reciprocal."""
    if matrix.shape[1] == 0:
        return matrix.new_zeros(len(matrix), 2), matrix.new_zeros(matrix.shape, dtype=torch.uint8)
    low, high = matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True)
    span = high - low
    finite = span.isfinite() & matrix.isfinite().all(1, keepdim=True)
    flat = ~(finite & (span >= _LEAST_RANGE))
    steps = torch.full_like(span, _STEPS)
    scale = torch.where(finite, torch.where(flat, torch.zeros_like(span), span / steps), torch.nan)
    bias = torch.where(finite, low + 0.0, torch.nan)
    elements = torch.where(flat, torch.zeros_like(matrix), ((matrix - low) * (steps / span)).round())
    return torch.cat([scale, bias], 1), elements.to(torch.uint8)


def _difference(found: PackedLayout, expected: PackedLayout) -> str:
    """The first one, in words."""
    if len(found.parts) != len(expected.parts):
        return f"the header says number of parts {len(found.parts)}; expected {len(expected.parts)}"
    for number, (got, wanted) in enumerate(zip(found.parts, expected.parts)):
        if got != wanted:
            return f"the header of part {number} says {_words(got)}; expected {_words(wanted)}"
    raise AssertionError("the layouts are equal")


def _words(part: PackedPart) -> str:
    return f"({part.rows}, {part.dim}) {part.dtype}"
