"""What the device does with a batch that has a fault, before the host knows of it."""

from __future__ import annotations

import pytest
import torch

from sparselift.kernels.base import FeatureSpec, Segment, TableSpec, UpdateRule
from sparselift.kernels.cuda import CudaProgram
from tests.simt.module import Simt

TABLE = torch.arange(1.0, 12.0)[:, None].repeat(1, 4)      # row r holds r + 1
SGD = [(1, False, 1.0, 0.0, 0.0, 0.0, 0.0, False, 0)]
GOOD = torch.tensor([0, 1, 2, 3, 4, 5])


class Device:
    """A program driven by address, as from outside torch: nothing raises before it is asked for."""

    def __init__(self, simt: Simt, include_last: bool = False) -> None:
        self.program: CudaProgram = simt.backend().compile([TableSpec("t", 11, 4)], [FeatureSpec("f", 0, include_last_offset=include_last)])
        self.raw = self.program.raw
        self.kept: list[torch.Tensor] = []

    def prepare(self, ids: torch.Tensor, offsets: torch.Tensor):
        inputs = [(ids.data_ptr(), len(ids), 1, True, offsets.data_ptr(), len(offsets), 1, True, 0, 0, 0)]
        memory = torch.empty(self.raw.batch_bytes(inputs), dtype=torch.uint8)
        self.kept += [ids, offsets, memory]
        return self.raw.prepare(inputs, memory.data_ptr(), 0)

    def forward(self, batch) -> list[float]:
        out = torch.full((batch.num_bags(0), 4), torch.nan)
        space = torch.empty(self.raw.forward_workspace_bytes(batch), dtype=torch.uint8)
        self.raw.forward([TABLE.data_ptr()], batch, [(out.data_ptr(), 4)], space.data_ptr(), space.nbytes, 0)
        assert (out == out[:, :1]).all()
        return out[:, 0].tolist()

    def update(self, batch) -> bool:
        """Whether an update with this batch changes the table."""
        table, grad = TABLE.clone(), torch.ones(batch.num_bags(0), 4)
        segments = [(batch, [(grad.data_ptr(), 4)], None)]
        space = torch.empty(self.raw.update_workspace_bytes(SGD, segments), dtype=torch.uint8)
        self.raw.update([table.data_ptr()], [(0, 0)], SGD, segments, space.data_ptr(), space.nbytes, 0)
        return not torch.equal(table, TABLE)


def test_bad_ids_are_skipped_and_nothing_is_updated(simt: Simt) -> None:
    device = Device(simt)
    good = device.prepare(GOOD, torch.tensor([0, 3]))
    assert device.raw.fault() is None and device.forward(good) == [6.0, 15.0] and device.update(good)
    bad = device.prepare(torch.tensor([0, 11, 2, -1, 4, 5]), torch.tensor([0, 3]))
    assert device.raw.fault() == (True, 0, 1, 11, 0, 6)
    assert device.forward(bad) == [4.0, 11.0]
    assert not device.update(bad)
    assert not device.update(good), "updates stop until the host has dealt with the fault"
    device.raw.clear_fault(0)
    assert device.raw.fault() is None and device.update(good)
    assert not device.update(bad), "a batch with a fault is never used for an update"


@pytest.mark.parametrize(("offsets", "include_last", "position", "pooled"), [
    ([0, 4, 2, 5], False, 2, [10.0, 0.0, 12.0, 6.0]),       # the bag that ends before it begins is empty
    ([0, 9, 3], False, 1, [0.0, 0.0, 15.0]),
    ([2, 3], False, 0, [3.0, 15.0]),
    ([0, 3, 5], True, 2, [6.0, 9.0]),
    ([0, -2, 3, 6], True, 1, [0.0, 0.0, 15.0]),
])
def test_bags_with_wrong_boundaries_are_empty(simt: Simt, offsets: list[int], include_last: bool, position: int,
                                              pooled: list[float]) -> None:
    device = Device(simt, include_last)
    bad = device.prepare(GOOD, torch.tensor(offsets))
    is_id, feature, at, value, previous, count = device.raw.fault()
    assert (is_id, feature, at, value, count) == (False, 0, position, offsets[position], 6)
    assert previous == (offsets[position - 1] if position else 0)
    assert device.forward(bad) == pooled
    assert not device.update(bad)


def test_the_first_faulty_batch_is_the_one_that_is_reported(simt: Simt) -> None:
    device = Device(simt)
    device.prepare(torch.tensor([0, 1, 2, 3, 4, 77]), torch.tensor([0]))
    device.prepare(torch.tensor([99, 1, 2, 3, 4, 5]), torch.tensor([0]))
    assert device.raw.fault()[2:4] == (5, 77)


def test_a_program_goes_on_after_a_fault_was_raised(simt: Simt) -> None:
    program = Device(simt).program
    with pytest.raises(IndexError, match="feature 'f': id 11 at position 2 is out of range for table 't' of 11 rows"):
        program.prepare([torch.tensor([0, 1, 11])], [torch.tensor([0])])
    batch = program.prepare([GOOD], [torch.tensor([0, 3])])
    out = torch.empty(2, 4)
    program.forward([TABLE], batch, out)
    assert out[:, 0].tolist() == [6.0, 15.0]


@pytest.mark.parametrize(("bad_alloc", "error", "text"), [(True, MemoryError, "out of memory"),
                                                          (False, RuntimeError, "internal error: thrown by a test")])
def test_what_goes_wrong_inside_is_no_wrong_argument(simt: Simt, bad_alloc: bool, error: type[Exception], text: str) -> None:
    device = Device(simt)
    simt.throw_at_launch(bad_alloc)
    with pytest.raises(Exception, match=text) as raised:
        device.prepare(GOOD, torch.tensor([0, 3]))
    assert type(raised.value) is error
    assert device.forward(device.prepare(GOOD, torch.tensor([0, 3]))) == [6.0, 15.0]


@pytest.mark.parametrize(("num_vectors", "dim", "runs", "message"), [
    (2, 2**31 - 32, [(1, 0, 1, 0)], r"1 to 512 vectors of 1 to 2147483615 columns; got 2 of 2147483616"),
    (513, 4, [(1, 0, 1, 0)], "1 to 512 vectors of .* got 513 of 4"),
    (2, 4, [(1, 0, 1, 2**31 - 33)], "up to 2147483615 columns; run 0 has 1 from 2147483615 on"),
    (2, 4, [(1, 0, 1, -1)], "run 0 has 1 from -1 on"),
    (2, 4, [(1, 1, 2**63 - 1, 0)], "run 0 names pairs outside of 2 vectors"),
])
def test_an_interaction_that_kernels_cannot_count_has_no_workspace(simt: Simt, num_vectors: int, dim: int,
                                                                   runs: list[tuple[int, ...]], message: str) -> None:
    interaction = simt.module.Interaction(num_vectors, dim, -1, runs)
    with pytest.raises(ValueError, match=message):
        interaction.workspace_bytes()
    with pytest.raises(ValueError, match=message):
        interaction.run(1, [None] * num_vectors, None, None, 0, 0, 0)


def test_a_workspace_that_is_too_small_is_refused(simt: Simt) -> None:
    device = Device(simt)
    batch, grad = device.prepare(GOOD, torch.tensor([0, 3])), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"a workspace of \d+ bytes is needed; got 16"):
        device.raw.update([TABLE.data_ptr()], [(0, 0)], SGD, [(batch, [(grad.data_ptr(), 4)], None)], grad.data_ptr(), 16, 0)


def test_more_lookups_than_positions_are_refused(emulator: Simt) -> None:
    """The same backward again and again: nothing is launched."""
    program = emulator.backend().compile([TableSpec("t", 11, 4)], [FeatureSpec("f", 0)])
    segments = [Segment(program.prepare([GOOD.repeat(1 << 14)], [6 << 14]), torch.ones(1, 4))] * 22_000
    with pytest.raises(ValueError, match=r"more than 2\*\*31 - 1 lookups in one update"):
        program.update([TABLE.clone()], [None], [UpdateRule("sgd", 1.0)], segments)


def test_memory_that_is_not_aligned_is_refused(simt: Simt) -> None:
    """Kernels read 16 bytes of it at a time."""
    device = Device(simt)
    batch, space = device.prepare(GOOD, torch.tensor([0, 3])), torch.empty(1 << 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"a workspace must begin at a multiple of 16 bytes; its address is 0x[0-9a-f]+4"):
        device.raw.update([TABLE.data_ptr()], [(0, 0)], SGD, [(batch, [(TABLE.data_ptr(), 4)], None)], space.data_ptr() + 4, 1 << 15, 0)
    with pytest.raises(ValueError, match="the memory of a batch must begin at a multiple of 16 bytes"):
        device.raw.prepare([(GOOD.data_ptr(), 6, 1, True, 0, 0, 0, False, 3, 0, 0)], space.data_ptr() + 8, 0)
