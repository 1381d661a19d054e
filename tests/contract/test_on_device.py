"""That tests of a device test it: its copies have the layout of what was given, and what happens to them comes back."""

from __future__ import annotations

import pytest
import torch

from sparselift.kernels.base import Segment
from tests.contract.cases import CASES, RULES
from tests.contract.naive import random_case
from tests.contract.on_device import OnDevice, Storages
from tests.contract.test_kernels import TestKernels as Kernels
from tests.contract.test_refusals import TestRefusals as Refusals
from tests.contract.test_updates import TestUpdates as Updates

HOST = torch.device("cpu")             # in the place of a device, with memory of its own


def test_views_keep_their_layout_and_what_they_share() -> None:
    block = torch.arange(24.0).view(4, 6)
    views = [block[:, 1:3], block[1:, ::2], block.t(), torch.zeros(0, 3), torch.arange(5, dtype=torch.int32)[2:]]
    storages = Storages(HOST)
    there = storages.moved(views)
    for here, other in zip(views, there):
        assert torch.equal(here, other) and here.stride() == other.stride() and here.storage_offset() == other.storage_offset()
        assert len(here) == 0 or here.data_ptr() != other.data_ptr()
    assert there[0].untyped_storage().data_ptr() == there[1].untyped_storage().data_ptr()
    there[0].fill_(torch.nan)
    there[2][5, 3] = -1.0                  # outside of the first view, as a stray write is
    assert not block.isnan().any()
    storages.bring_back()
    assert block[:, 1:3].isnan().all() and block[3, 5] == -1 and block.isnan().sum() == 8


def test_what_has_no_memory_on_the_host_is_left_alone() -> None:
    for given in (torch.zeros(3, device="meta"), torch.eye(2).to_sparse(), None, 3, "sum"):
        assert Storages(HOST).moved(given) is given
    segment = Segment(None, [torch.ones(2), None], [0.5])
    moved = Storages(HOST).moved(segment)
    assert moved.scales == [0.5] and moved.grad[1] is None and moved.grad[0] is not segment.grad[0]


def test_a_fault_is_raised_by_the_call_that_made_it() -> None:
    class Program:
        def prepare(self) -> str:
            return "batch"

        def synchronize(self) -> None:
            raise IndexError("what the device found")

    with pytest.raises(IndexError, match="what the device found"):
        OnDevice(Program(), HOST).prepare()


@pytest.mark.slow
def test_the_contract_runs_on_copies(emulator: object) -> None:
    emulator.set_schedule("forward")
    moved = OnDevice(emulator.backend(), HOST)
    kernels, updates = Kernels(), Updates()
    kernels.test_the_registered_classes(moved)
    kernels.test_a_program_can_be_copied(moved)
    kernels.test_parameters_that_require_grad(moved)
    kernels.test_a_batch_owns_its_ids_and_weights(moved)
    for layout in ("shared", "transposed", "unaligned"):
        updates.test_gradients_in_any_layout(moved, layout)
    for name in ("mixed", "weighted_padding"):
        kernels.test_forward_into_one_buffer_leaves_other_columns_alone(moved, random_case(1, **CASES[name]))
        updates.test_coalesced_and_expanded_gradients(moved, random_case(1, **CASES[name]))
        updates.test_update(moved, random_case(1, **CASES[name]), RULES[3], "sort")
    Refusals().test_ids_out_of_range(moved, 11, 36)
    Refusals().test_wrong_inputs(moved)
