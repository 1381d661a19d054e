"""What surrounds an exchange against the reference on whatever Hypothesis thinks of, laws that need no reference, and hostile buffers."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparselift.errors import ExchangeError
from sparselift.kernels import available_backends, get_exchange
from sparselift.kernels.exchange import LAYOUTS, WIRE_DTYPES, ExchangeKernels, PackedLayout, PackedPart, RegroupSpec, RowOwners

BACKENDS = [get_exchange(name) for name in available_backends() if name.startswith("cpu-")]
pytestmark = pytest.mark.skipif(not BACKENDS, reason="the CPU kernels are not built")
REFERENCE = get_exchange("reference")
kernels = st.sampled_from(BACKENDS) if BACKENDS else st.nothing()


def ids_of(draw: st.DrawFn, rows: int) -> Tensor:
    """Duplicates, and some that are no row."""
    near = st.integers(0, min(rows, 12)) | st.integers(max(rows - 3, 0), rows + 2) | st.integers(-(2**63), 2**63 - 1)
    ids = torch.tensor(draw(st.lists(near, max_size=60)), dtype=torch.int64)
    return ids.int() if draw(st.booleans()) and rows < 2**31 - 3 and not ids.abs().gt(2**31 - 1).any() else ids


rows_of_table = st.sampled_from([0, 1, 5, 1000, 2**31, 2**33, 2**62])


@st.composite
def lookups(draw: st.DrawFn) -> tuple[Tensor, Tensor, RowOwners]:
    owners = RowOwners(draw(rows_of_table), draw(st.sampled_from([1, 2, 3, 7, 64])), draw(st.sampled_from(LAYOUTS)))
    ids = ids_of(draw, owners.rows)
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    offsets = torch.tensor([0, *cuts, len(ids)], dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    return ids, offsets, owners


@st.composite
def packed(draw: st.DrawFn) -> tuple[PackedLayout, list[Tensor]]:
    """Any float32 bits, a matrix of normal numbers now and then, rows that may lie apart."""
    parts = draw(st.lists(st.builds(PackedPart, st.integers(0, 5), st.sampled_from([0, 1, 3, 8, 15, 16, 17, 33, 64]),
                                    st.sampled_from(WIRE_DTYPES)), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    matrices = []
    for part in parts:
        shape, skipped = (part.rows, part.dim + draw(st.integers(0, 3))), draw(st.integers(0, 1))
        random = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int().view(torch.float32)
        normal = torch.randn(shape, generator=generator)
        matrix = normal if draw(st.booleans()) else random
        matrices.append(matrix[:, shape[1] - part.dim:] if skipped else matrix[:, :part.dim])
    return PackedLayout(tuple(parts)), matrices


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[RegroupSpec, list[Tensor], list[Tensor]]:
    sources = draw(st.lists(st.lists(st.sampled_from([0, 1, 4, 7, 16, 40]), max_size=4).map(tuple), max_size=3).map(tuple))
    count = sum(map(len, sources))
    groups = draw(st.lists(st.lists(st.integers(0, count - 1), max_size=5).map(tuple), max_size=3).map(tuple)) if count else ()
    spec, batch = RegroupSpec(sources, groups), draw(st.integers(0, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    given, grads = ([torch.randn(batch, width, generator=generator) for width in widths]
                    for widths in (spec.source_widths, spec.group_widths))
    return spec, given, grads


def empty_like(matrices: list[Tensor]) -> list[Tensor]:
    return [torch.full(matrix.shape, 7e7) for matrix in matrices]


@settings(max_examples=50, deadline=None)
@given(kernels, lookups())
def test_dedup_and_bucketize_are_the_reference(exchange: ExchangeKernels, case: tuple[Tensor, Tensor, RowOwners]) -> None:
    ids, offsets, owners = case
    found, want = exchange.dedup(ids, owners.rows), REFERENCE.dedup(ids, owners.rows)
    assert torch.equal(found.trimmed(), want.trimmed()) and torch.equal(found.slots, want.slots)
    is_row = found.slots >= 0
    assert torch.equal(found.trimmed()[found.slots[is_row].long()], ids[is_row].long())
    buckets, wants = exchange.bucketize(ids, offsets, owners), REFERENCE.bucketize(ids, offsets, owners)
    for name in ("rows", "sources", "places", "lengths"):
        assert torch.equal(getattr(buckets, name), getattr(wants, name)), name
    assert int(buckets.lengths.sum()) == int(is_row.sum())


@settings(max_examples=50, deadline=None)
@given(kernels, packed())
def test_packed_buffers_are_the_reference(exchange: ExchangeKernels, case: tuple[PackedLayout, list[Tensor]]) -> None:
    layout, matrices = case
    buffer = exchange.pack(layout, matrices)
    assert torch.equal(buffer, REFERENCE.pack(layout, matrices)) and PackedLayout.read(buffer) == layout
    outputs, wants = empty_like(matrices), empty_like(matrices)
    exchange.unpack(layout, buffer, outputs)
    REFERENCE.unpack(layout, buffer, wants)
    for part, out, want, matrix in zip(layout.parts, outputs, wants, matrices):
        assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(7e7), want.nan_to_num(7e7))
        if part.dtype == "float32":
            assert torch.equal(out.view(torch.int32), matrix.contiguous().view(torch.int32))


@settings(max_examples=40, deadline=None)
@given(kernels, regrouped())
def test_regrouped_columns_are_the_reference(exchange: ExchangeKernels, case: tuple[RegroupSpec, list[Tensor], list[Tensor]]) -> None:
    spec, sources, grads = case
    for forward, given_, results in ((True, sources, grads), (False, grads, sources)):
        found, want = empty_like(results), empty_like(results)
        for backend, into in ((exchange, found), (REFERENCE, want)):
            (backend.regroup if forward else backend.regroup_backward)(spec, given_, into)
        assert all(map(torch.equal, found, want))


@settings(max_examples=30, deadline=None)
@given(kernels, packed(), st.data())
def test_no_flipped_bit_of_a_header_passes(exchange: ExchangeKernels, case: tuple[PackedLayout, list[Tensor]], data: st.DataObject) -> None:
    layout, matrices = case
    buffer, outputs = exchange.pack(layout, matrices), empty_like(matrices)
    bit = data.draw(st.integers(0, 8 * len(layout.header()) - 1))
    buffer[bit // 8] ^= 1 << bit % 8
    refused(exchange, layout, buffer, outputs)


@settings(max_examples=30, deadline=None)
@given(kernels, packed(), st.data())
def test_hostile_buffers_are_one_error(exchange: ExchangeKernels, case: tuple[PackedLayout, list[Tensor]], data: st.DataObject) -> None:
    """Noise of any length, behind as much of a right header as it pleases."""
    layout, matrices = case
    right, kept = exchange.pack(layout, matrices), data.draw(st.integers(0, len(layout.header()) - 1))
    size = data.draw(st.integers(kept, len(right) + 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    noise[:kept] = right[:kept]
    if size >= len(layout.header()) and bytes(noise[:len(layout.header())].tolist()) == layout.header():
        return
    refused(exchange, layout, noise, empty_like(matrices))


def refused(exchange: ExchangeKernels, layout: PackedLayout, buffer: Tensor, outputs: list[Tensor]) -> None:
    with pytest.raises(ExchangeError):
        exchange.unpack(layout, buffer, outputs)
    with pytest.raises(ExchangeError):
        PackedLayout.read(buffer)
    assert all((output == 7e7).all() for output in outputs)


@settings(max_examples=30, deadline=None)
@given(kernels, packed())
def test_parts_are_alone(exchange: ExchangeKernels, case: tuple[PackedLayout, list[Tensor]]) -> None:
    """A part has the bytes that it has in a buffer of its own."""
    layout, matrices = case
    buffer = exchange.pack(layout, matrices)
    for part, offset, matrix in zip(layout.parts, layout.offsets, matrices):
        alone = PackedLayout((part,))
        assert torch.equal(buffer[offset:offset + part.nbytes], exchange.pack(alone, [matrix])[alone.offsets[0]:][:part.nbytes])
    ends = accumulate((-(-part.nbytes // 16) * 16 for part in layout.parts), initial=32 + 32 * len(layout.parts))
    assert (*layout.offsets, layout.nbytes) == tuple(ends)
