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


@pytest.mark.parametrize("coalesce", ["none", "dense"])
def test_other_ways_to_coalesce_are_refused(simt: Simt, coalesce: str) -> None:
    with pytest.raises(ValueError, match=f"table 't': coalesce must be one of chain, sort on CUDA, .*; got '{coalesce}'"):
        simt.backend().compile([TableSpec("t", 5, 4, knobs=TableKnobs(coalesce=coalesce))], [])


def test_variants_name_the_shape(simt: Simt) -> None:
    assert simt.backend().variant() == "cuda"
    assert simt.backend(KernelShape(block_threads=128, chunk_lookups=64)).variant() == "cuda-block_threads=128-chunk_lookups=64"
    assert simt.module.default_shape() == {"vector_bytes": 16, "block_threads": 256, "bags_per_group": 0, "loads_in_flight": 4,
                                           "chunk_lookups": 256}


def test_copies_keep_the_shape(simt: Simt) -> None:
    program = simt.backend(KernelShape(chunk_lookups=64)).compile([TableSpec("t", 5, 4)], [FeatureSpec("f", 0)])
    for other in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert other.backend.shape == KernelShape(chunk_lookups=64) and other.tables == program.tables


def test_by_address_from_numpy(simt: Simt) -> None:
    """No torch: a forward of two bags over memory that numpy owns."""
    status = np.zeros(simt.module.STATUS_BYTES, np.uint8)
    program = simt.module.Program([(6, 3, 0)], [(0, 0, False, False, -1)], {}, status.ctypes.data, 0)
    table, ids, starts = np.arange(18, dtype=np.float32).reshape(6, 3), np.array([0, 5, 2], np.int32), np.array([0, 2], np.int64)
    inputs = [(ids.ctypes.data, 3, 1, False, starts.ctypes.data, 2, 1, True, 0, 0, 0)]
    memory = np.empty(program.batch_bytes(inputs), np.uint8)
    batch = program.prepare(inputs, memory.ctypes.data, 0)
    out, space = np.empty((2, 3), np.float32), np.empty(program.forward_workspace_bytes(batch), np.uint8)
    program.forward([table.ctypes.data], batch, [(out.ctypes.data, 3)], space.ctypes.data, space.nbytes, 0)
    assert out.tolist() == [(table[0] + table[5]).tolist(), table[2].tolist()]


@pytest.mark.parametrize("num_tables", [1, 26])
def test_a_step_copies_nothing_and_waits_for_nothing(simt: Simt, num_tables: int) -> None:
    """Its launches, the sort's own apart: structs and kernel for prepare and update, keys before the update, and a kernel for forward."""
    tables = [TableSpec(f"t{t}", 40, 8) for t in range(num_tables)]
    program = simt.backend().compile(tables, [FeatureSpec(f"f{t}", t, column=8 * t) for t in range(num_tables)])
    weights, states = [torch.zeros(40, 8) for _ in tables], [torch.zeros(40) for _ in tables]
    ids, grad, out = [torch.arange(9)] * num_tables, torch.ones(9, 8 * num_tables), torch.empty(9, 8 * num_tables)
    simt.take_counts()
    batch = program.prepare(ids, [1] * num_tables)
    program.forward(weights, batch, out)
    program.update(weights, states, [UpdateRule("rowwise_adagrad", 0.1, 1e-8)] * num_tables, [Segment(batch, grad)])
    counts = simt.take_counts()
    assert counts.copies == counts.synchronizations == 0
    puts = {1: 2, 26: 3}[num_tables]          # 4 KiB of structs a launch; those of forward are its arguments
    assert counts.launches == puts + 4 + (1 if 9 * num_tables > 256 else 0)
