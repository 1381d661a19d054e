"""The backend's edges: where it cannot run, from outside torch, and what a step asks of the device."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from sparselift.errors import KernelError
from sparselift.kernels import available_backends, get_backend
from sparselift.kernels.base import FeatureSpec, Segment, TableKnobs, TableSpec, UpdateRule
from sparselift.kernels.cuda import CudaBackend, KernelShape
from tests.simt.module import Simt


@pytest.mark.skipif("cuda" in available_backends(), reason="the CUDA kernels run here")
def test_what_is_missing_is_named() -> None:
    with pytest.raises(KernelError, match=r"are not built|cannot run here: (cuda\w+: |no CUDA device)|finds no CUDA device"):
        get_backend("cuda")


def test_a_module_that_is_not_built() -> None:
    with pytest.raises(KernelError, match=r"CUDA kernels are not built \(sparselift.kernels._nowhere cannot be imported: .*nvcc"):
        CudaBackend("cpu", module="sparselift.kernels._nowhere")


def test_other_ways_to_coalesce_are_refused(simt: Simt) -> None:
    with pytest.raises(ValueError, match=r"table 't': coalesce must be one of chain, sort, dense on CUDA, .*; got 'none'"):
        simt.backend().compile([TableSpec("t", 5, 4, knobs=TableKnobs(coalesce="none"))], [])
    for rows, dim in ((2049, 4), (5, 2049)):
        with pytest.raises(ValueError, match=f"table 't': coalesce='dense' takes up to 2048 rows of 2048 columns .* got {rows} of {dim}"):
            simt.backend().compile([TableSpec("t", rows, dim, knobs=TableKnobs(coalesce="dense"))], [])
    status = np.zeros(simt.module.STATUS_BYTES, np.uint8)
    for table, message in (((2049, 4, 0, 3, 0, 0), "table 0: dense sums take up to 2048 rows"),
                           ((5, 4, 0, 1, 0, 0), "table 0: .* are summed"),
                           ((5, 4, 0, 0, 8, 0), "table 0: vector_bytes must be 4 or 16; got 8"),
                           ((5, 4, 0, 0, 0, -1), "table 0: bags_per_group must be at least 1; got -1")):
        with pytest.raises(ValueError, match=message):
            simt.module.Program([table], [], {}, status.ctypes.data, 0)


def test_variants_name_the_shape(simt: Simt) -> None:
    assert simt.backend().variant() == "cuda"
    assert simt.backend(KernelShape(block_threads=128, chunk_lookups=64)).variant() == "cuda-block_threads=128-chunk_lookups=64"
    assert simt.module.default_shape() == {"vector_bytes": 16, "block_threads": 256, "bags_per_group": 0, "loads_in_flight": 4,
                                           "chunk_lookups": 256}


def test_copies_keep_the_shape(simt: Simt) -> None:
    program = simt.backend(KernelShape(chunk_lookups=64)).compile([TableSpec("t", 5, 4)], [FeatureSpec("f", 0)])
    for other in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert other.backend.shape == KernelShape(chunk_lookups=64) and other.tables == program.tables


def test_a_program_may_have_a_shape_of_its_own(simt: Simt) -> None:
    backend = simt.backend(KernelShape(block_threads=128))
    program = backend.compile([TableSpec("t", 5, 4)], [FeatureSpec("f", 0)], KernelShape(loads_in_flight=8))
    assert program.backend is backend and backend.variant() == "cuda-block_threads=128"
    for each in (program, pickle.loads(pickle.dumps(program))):
        simt.take_launches()
        each.look_up([torch.ones(5, 4)], [torch.tensor([1, 2])], [torch.tensor([0])])
        assert "bag_forward_kernel<float, 8>" in simt.take_launches()
    with pytest.raises(ValueError, match="loads_in_flight must be 4 or 8; got 5"):
        backend.compile([], [], KernelShape(loads_in_flight=5))


def test_by_address_from_numpy(simt: Simt) -> None:
    """No torch: a forward of two bags over memory that numpy owns."""
    status = np.zeros(simt.module.STATUS_BYTES, np.uint8)
    program = simt.module.Program([(6, 3, 0, 0, 0, 0)], [(0, 0, False, False, -1)], {}, status.ctypes.data, 0)
    table, ids, starts = np.arange(18, dtype=np.float32).reshape(6, 3), np.array([0, 5, 2], np.int32), np.array([0, 2], np.int64)
    inputs = [(ids.ctypes.data, 3, 1, False, starts.ctypes.data, 2, 1, True, 0, 0, 0)]
    memory = np.empty(program.batch_bytes(inputs), np.uint8)
    batch = program.prepare(inputs, memory.ctypes.data, 0)
    out, space = np.empty((2, 3), np.float32), np.empty(program.forward_workspace_bytes(batch), np.uint8)
    program.forward([table.ctypes.data], batch, [(out.ctypes.data, 3)], space.ctypes.data, space.nbytes, 0)
    assert out.tolist() == [(table[0] + table[5]).tolist(), table[2].tolist()]


def step(simt: Simt, tables: list[TableSpec], ids: torch.Tensor, length: int) -> dict[str, int]:
    """What a forward and an update launch, by kernel, with bags of `length` that have offsets. They copy nothing, and wait for nothing."""
    program = simt.backend().compile(tables, [FeatureSpec(f"f{t}", t, column=8 * t) for t in range(len(tables))])
    weights, states = [torch.zeros(t.rows, 8) for t in tables], [torch.zeros(t.rows) for t in tables]
    offsets = torch.arange(0, len(ids), length)
    grad, out = torch.ones(len(offsets), 8 * len(tables)), torch.empty(len(offsets), 8 * len(tables))
    simt.take_counts()
    simt.take_launches()
    batch = program.prepare([ids] * len(tables), [offsets] * len(tables))
    program.forward(weights, batch, out)
    program.update(weights, states, [UpdateRule("rowwise_adagrad", 0.1, 1e-8)] * len(tables), [Segment(batch, grad)])
    counts = simt.take_counts()
    assert counts.copies == counts.synchronizations == 0
    launches = simt.take_launches()
    assert sum(launches.values()) == counts.launches
    return launches


def test_a_step_of_many_tables_takes_twelve_launches_at_most(simt: Simt) -> None:
    """Keys of four digits, and lookups enough for bags, and rows, that have more than a chunk of them."""
    tables = [TableSpec(f"t{t}", 1 << (20 if t == 0 else 5), 8, knobs=TableKnobs(coalesce="sort")) for t in range(26)]
    launches = step(simt, tables, torch.arange(300) % 32, 25)
    assert launches == {"put_kernel<960>": 1, "put_kernel<8000>": 1, "prepare_kernel": 1,
                        "bag_forward_kernel<float, 4>": 1, "long_bags_kernel<float>": 1, "lookup_keys_kernel": 1, "radix_pass_kernel": 4,
                        "coalesced_kernel<float, ApplyRule>": 1, "long_runs_kernel<float, ApplyRule>": 1}
    assert sum(launches.values()) <= 12


def test_a_step_of_small_tables_takes_five(simt: Simt) -> None:
    launches = step(simt, [TableSpec(f"t{t}", 40, 8) for t in range(3)], torch.arange(9), 2)
    assert launches == {"put_kernel<960>": 2, "prepare_kernel": 1, "bag_forward_kernel<float, 4>": 1,
                        "dense_rows_kernel<float, ApplyRule>": 1}


@pytest.mark.parametrize(("key_bits", "passes"), [(1, 1), (8, 1), (9, 2), (29, 4), (32, 4)])
def test_a_digit_of_eight_bits_is_one_launch(simt: Simt, key_bits: int, passes: int) -> None:
    """What a sort by itself takes: zeroed counts, counted digits, and a pass a digit."""
    ids, distinct, slots, count = np.array([5, 0, 5], np.int64), np.zeros(3, np.int64), np.zeros(3, np.int32), np.zeros(1, np.int64)
    space = np.empty(simt.module.dedup_workspace_bytes(3), np.uint8)
    simt.take_launches()
    simt.module.dedup(ids.ctypes.data, 3, True, (1 << key_bits) - 1, distinct.ctypes.data, slots.ctypes.data, count.ctypes.data,
                      space.ctypes.data, space.nbytes, 0)
    launches = simt.take_launches()
    assert (launches["put_kernel<960>"], launches["count_digits_kernel"], launches["radix_pass_kernel"]) == (1, 1, passes)
