"""What surrounds an exchange between ranks: distinct ids, ids by owner, rows of many matrices in one buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.simt.module import Simt

FLOAT32, FLOAT16, BFLOAT16, INT8 = range(4)


def dedup(simt: Simt, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The distinct ids, and which of them each id is."""
    distinct, slots, count = torch.full((len(ids),), -7), torch.full((len(ids),), -7, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    space = torch.empty(simt.module.dedup_workspace_bytes(len(ids)), dtype=torch.uint8)
    simt.module.dedup(ids.data_ptr(), len(ids), ids.dtype == torch.int64, rows, distinct.data_ptr(), slots.data_ptr(), count.data_ptr(),
                      space.data_ptr(), space.nbytes, 0)
    return distinct[:int(count)], slots


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("count", "rows"), [(0, 5), (1, 1), (31, 7), (256, 1000), (257, 3), (1500, 2**31 - 1)])
def test_distinct_ids(simt: Simt, count: int, rows: int, dtype: torch.dtype) -> None:
    ids = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(count)).to(dtype)
    distinct, slots = dedup(simt, ids, rows)
    want, inverse = torch.unique(ids.long(), return_inverse=True)
    assert torch.equal(distinct, want) and torch.equal(slots.long(), inverse)


def test_ids_that_are_no_row_are_left_out(simt: Simt) -> None:
    distinct, slots = dedup(simt, torch.tensor([5, -1, 3, 9, 5, 10, -2**40]), 10)
    assert distinct.tolist() == [3, 5, 9] and slots.tolist() == [1, -1, 0, 2, 1, -1, -1]


def bucketize(simt: Simt, ids: Tensor, offsets: Tensor, rows: int, rows_per_owner: int, owners: int) -> tuple[Tensor, Tensor, Tensor]:
    owned, sources = torch.full((len(ids),), -7), torch.full((len(ids),), -7, dtype=torch.int32)
    lengths = torch.full((owners, len(offsets) - 1), -7, dtype=torch.int32)
    space = torch.empty(simt.module.bucketize_workspace_bytes(len(ids)), dtype=torch.uint8)
    simt.module.bucketize(ids.data_ptr(), len(ids), ids.dtype == torch.int64, rows, offsets.data_ptr(), len(offsets) - 1, rows_per_owner,
                          owners, owned.data_ptr(), sources.data_ptr(), lengths.data_ptr(), space.data_ptr(), space.nbytes, 0)
    return owned, sources, lengths


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("owners", [1, 2, 5])
@pytest.mark.parametrize("bounds", [[0], [0, 0], [0, 4, 4, 11, 300], [0, 1, 2, 3]])
def test_ids_by_owner(simt: Simt, bounds: list[int], owners: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(len(bounds))
    ids, each = torch.from_numpy(rng.integers(0, 23, bounds[-1])).to(dtype), -(-23 // owners)
    owned, sources, lengths = bucketize(simt, ids, torch.tensor(bounds, dtype=torch.int32), 23, each, owners)
    want_rows, want_sources, want_lengths = [], [], np.zeros((owners, len(bounds) - 1))
    for owner in range(owners):
        for bag, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            mine = [k for k in range(begin, end) if int(ids[k]) // each == owner]
            want_rows += [int(ids[k]) - owner * each for k in mine]
            want_sources += mine
            want_lengths[owner, bag] = len(mine)
    assert owned.tolist() == want_rows and sources.tolist() == want_sources and np.array_equal(lengths.numpy(), want_lengths)


def test_no_owner_has_what_is_no_row(simt: Simt) -> None:
    owned, sources, lengths = bucketize(simt, torch.tensor([7, -1, 2, 8, 0]), torch.tensor([0, 3, 5], dtype=torch.int32), 8, 4, 2)
    assert owned.tolist() == [2, 0, 3, -1, -1] and sources.tolist() == [2, 4, 0, 1, 3] and lengths.tolist() == [[1, 1], [1, 0]]


def test_owners_must_own_all_rows(simt: Simt) -> None:
    with pytest.raises(ValueError, match="2 owners of 4 rows each do not own 9 rows"):
        bucketize(simt, torch.tensor([1]), torch.tensor([0, 1], dtype=torch.int32), 9, 4, 2)


def exchange(simt: Simt, matrices: list[Tensor], dtypes: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The buffer that holds all matrices, 0xaa where nothing was written, and what comes out of it again."""
    outputs = [torch.full_like(matrix, torch.nan) for matrix in matrices]
    places, offset = [], 32
    for matrix, dtype in zip(matrices, dtypes):
        places.append((len(matrix), offset, matrix.shape[1], dtype))
        offset += len(matrix) * simt.module.packed_row_bytes(matrix.shape[1], dtype) + 16
    storage = torch.full((offset + 64,), 0xaa, dtype=torch.uint8)
    buffer = storage[-storage.data_ptr() % 16:]
    space = torch.empty(simt.module.pack_workspace_bytes(len(matrices)) + 256, dtype=torch.uint8)
    for given, unpacks in ((matrices, False), (outputs, True)):
        parts = [(m.data_ptr(), m.stride(0), *place) for m, place in zip(given, places)]
        simt.module.pack(parts, buffer.data_ptr(), unpacks, space.data_ptr() + -space.data_ptr() % 16, space.nbytes - 16, 0)
    return buffer, outputs


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16])
def test_packed_rows_have_the_bits_of_a_conversion(simt: Simt, dtype: int) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(40, 100, generator=generator)
    matrices = [torch.randn(rows, dim, generator=generator) for rows, dim in ((7, 64), (0, 8), (1, 1), (33, 3), (5, 130))]
    matrices += [wide[:, 3:20], wide[:9, 4:36]]      # rows that are not aligned, and that are not side by side
    _, outputs = exchange(simt, matrices, [dtype] * len(matrices))
    kind = {FLOAT32: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}[dtype]
    assert all(torch.equal(out, matrix.to(kind).float()) for out, matrix in zip(outputs, matrices))


def test_int8_rows_are_within_half_a_step(simt: Simt) -> None:
    generator = torch.Generator().manual_seed(1)
    matrices = [torch.randn(rows, dim, generator=generator) * 3 - 1 for rows, dim in ((9, 64), (4, 1), (6, 37))]
    matrices.append(torch.full((3, 12), 2.5))
    _, outputs = exchange(simt, matrices, [INT8] * 4)
    for out, matrix in zip(outputs, matrices):
        low, high = matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True)
        step = (high - low) / 255
        assert ((out - matrix).abs() <= step * 0.5001 + 2.0**-22 * matrix.abs()).all()
        assert torch.equal(out.amin(1, keepdim=True), low)
    assert torch.equal(outputs[3], matrices[3])


def test_parts_of_several_kinds_share_a_buffer_and_nothing_lies_between_them(simt: Simt) -> None:
    matrices = [torch.arange(4.0 * dim).view(4, dim) for dim in (5, 8, 2)]
    buffer, outputs = exchange(simt, matrices, [FLOAT16, FLOAT32, BFLOAT16])
    assert all(torch.equal(out, matrix) for out, matrix in zip(outputs, matrices))
    row_bytes = [simt.module.packed_row_bytes(m.shape[1], kind) for m, kind in zip(matrices, (FLOAT16, FLOAT32, BFLOAT16))]
    assert row_bytes == [16, 32, 16]
    assert (buffer[:32] == 0xaa).all() and (buffer[32 + 4 * 16:][:16] == 0xaa).all()


def test_a_part_must_begin_at_a_multiple_of_16_bytes(simt: Simt) -> None:
    rows, buffer, space = torch.zeros(1, 4), torch.zeros(64, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(ValueError, match="part 0 must begin at a multiple of 16 bytes; its offset is 8"):
        simt.module.pack([(rows.data_ptr(), 4, 1, 8, 4, FLOAT32)], buffer.data_ptr(), False, space.data_ptr(), space.nbytes, 0)
