"""Arrays, streams and memory of other libraries in the backend: of cupy and torch where there is a device, of stand-ins on the emulator."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

import sparselift.kernels
from sparselift.errors import MissingExtraError
from sparselift.kernels import available_backends, get_backend
from sparselift.kernels.base import FeatureSpec, Segment, TableSpec, UpdateRule
from sparselift.kernels.cuda import CudaBackend
from sparselift.kernels.exchange import PackedLayout, PackedPart
from sparselift.kernels.exchange_compiled import CudaExchange
from tests.cuda.host_cupy import Exported, Stream
from tests.simt import module as simt

ON_DEVICE = ["torch", *(["cupy"] if importlib.util.find_spec("cupy") else [])] if "cuda" in available_backends() else []
LIBRARIES = ON_DEVICE if os.environ.get("SPARSELIFT_CONTRACT_BACKEND") == "cuda" else ["emulated", *ON_DEVICE]
PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"


@dataclass(frozen=True, slots=True)
class Library:
    """What makes arrays, and a stream that is not the default one."""

    backend: Callable[[str], CudaBackend]    # with a pool of memory
    array: Callable[[np.ndarray], Any]
    values: Callable[[Any], np.ndarray]
    stream: Any
    handle: int
    allocations: list[tuple[int, int]] | None = None    # of the emulator's cupy

    def pooled(self, pool: str) -> CudaBackend:
        if pool == "cupy" and self.allocations is None and "cupy" not in ON_DEVICE:
            pytest.skip("cupy is not installed")
        return self.backend(pool)


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    if request.param == "emulated":
        emulator = request.getfixturevalue("emulator")
        emulator.set_schedule("forward")
        stream = Stream(64)
        return Library(lambda pool: CudaBackend("cpu", module=simt.NAME, memory=pool), lambda values: Exported(values.copy()),
                       lambda array: array.array, stream, stream.ptr, request.getfixturevalue("allocations"))
    device = get_backend("cuda").device                        # and an error that says why, where there should be one
    if request.param == "torch":
        side = torch.cuda.Stream(device)
        return Library(lambda pool: CudaBackend(device, memory=pool), lambda values: torch.from_numpy(values.copy()).to(device),
                       lambda tensor: tensor.cpu().numpy(), side, side.cuda_stream)
    import cupy
    other = cupy.cuda.Stream(non_blocking=True)
    return Library(lambda pool: CudaBackend(device, memory=pool), cupy.asarray, cupy.asnumpy, other, other.ptr)


@pytest.mark.parametrize("pool", ["torch", "cupy"])
def test_a_step_over_arrays_of_others_on_their_stream(library: Library, pool: str) -> None:
    """Read and written where they are: weights, state, ids, offsets, outputs and gradients. Batches and workspaces come from the pool."""
    backend = library.pooled(pool)
    program = pickle.loads(pickle.dumps(backend)).compile([TableSpec("t", 6, 3)], [FeatureSpec("f", 0)])
    table, ids, starts = np.arange(18, dtype=np.float32).reshape(6, 3), np.array([0, 5, 2]), np.array([0, 2])
    weight, sums, out, grad = (library.array(np.float32(values)) for values in (table, np.zeros(6), np.zeros((2, 5)), np.ones((2, 3))))
    if backend.device.type == "cuda":
        torch.cuda.synchronize()                               # what made the arrays is done
    with program.backend.on_stream(library.stream):
        assert program.stream() == library.handle
        batch = program.prepare([library.array(ids)], [library.array(starts)])
        program.forward([weight], batch, out)
        program.update([weight], [sums], [UpdateRule("rowwise_adagrad", 1.0, 1.0)], [Segment(batch, grad)])
        program.synchronize()
    assert library.values(out)[:, :3].tolist() == [(table[0] + table[5]).tolist(), table[2].tolist()]
    assert library.values(sums).tolist() == [1, 0, 1, 0, 0, 1]
    assert np.array_equal(library.values(weight), table - 0.5 * np.isin(np.arange(6), ids)[:, None])
    if library.allocations is not None:                        # the program's status; a batch, and the workspace of an update
        assert [stream for _, stream in library.allocations] == ([] if pool == "torch" else [0, 64, 64])


@pytest.mark.parametrize("pool", ["torch", "cupy"])
def test_an_exchange_is_on_the_stream_and_in_the_pool_of_its_backend(library: Library, pool: str) -> None:
    """Results, status and workspaces; ids, matrices and outputs are arrays of others."""
    exchange = pickle.loads(pickle.dumps(CudaExchange(library.pooled(pool))))
    ids, row, out = (library.array(values) for values in (np.array([4, 1, 4]), np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)))
    layout, allocations = PackedLayout((PackedPart(1, 4),)), [] if library.allocations is None else library.allocations
    if exchange.device.type == "cuda":
        torch.cuda.synchronize()                               # what made the arrays is done
    before = len(allocations)
    with exchange.backend.on_stream(library.stream):
        found = exchange.dedup(ids, 5)
        exchange.unpack(layout, exchange.pack(layout, [row]), [out])
        exchange.synchronize()
    assert found.trimmed().tolist() == [1, 4] and found.slots.tolist() == [1, 0, 1] and library.values(out).tolist() == [[1] * 4]
    if library.allocations is not None:                        # ids, slots, their number; a buffer; three workspaces
        assert [stream for _, stream in allocations[before:]] == ([] if pool == "torch" else [64] * 7)


def test_what_an_exchange_writes_must_not_be_read_only(library: Library) -> None:
    exchange, layout = CudaExchange(library.backend("torch")), PackedLayout((PackedPart(1, 4),))
    with pytest.raises(TypeError, match="ids must be a tensor; got list"):
        exchange.dedup([4, 1], 5)
    if library.allocations is not None:
        out = np.zeros((1, 4), np.float32)
        out.flags.writeable = False
        with pytest.raises(ValueError, match=r"outputs.0. is read-only and is to be written"):
            exchange.unpack(layout, exchange.pack(layout, [library.array(np.ones((1, 4), np.float32))]), [Exported(out)])


@pytest.mark.parametrize("pool", ["torch", "cupy"])
def test_pinned_buffers_are_filled_on_the_host_and_read_by_the_device(library: Library, pool: str) -> None:
    backend = library.pooled(pool)
    buffer = backend.pinned((2, 3), torch.int64)
    buffer.copy_(torch.arange(6).view(2, 3))
    assert buffer.is_contiguous() and buffer.device.type == "cpu" and buffer.is_pinned() == (backend.device.type == "cuda")
    assert buffer.to(backend.device, non_blocking=True).cpu().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert backend.pinned((0, 3), torch.int64).shape == (0, 3)


def test_a_fault_is_raised_when_the_device_is_waited_for(library: Library) -> None:
    program = library.backend("torch").compile([TableSpec("t", 6, 3)], [FeatureSpec("f", 0)])
    with pytest.raises(IndexError, match="feature 'f': id 6 at position 1 is out of range for table 't' of 6 rows"):
        program.prepare([library.array(np.array([0, 6]))], [library.array(np.array([0]))])
        program.synchronize()
    program.prepare([library.array(np.array([0, 5]))], [library.array(np.array([0]))])
    program.synchronize()


def test_what_cannot_be_written_or_is_no_array(library: Library) -> None:
    program = library.backend("torch").compile([TableSpec("t", 6, 3)], [FeatureSpec("f", 0)])
    ids, starts = library.array(np.array([0])), library.array(np.array([0]))
    with pytest.raises(TypeError, match="feature 'f': indices must be a tensor; got list"):
        program.prepare([[0]], [starts])
    with pytest.raises(TypeError, match="feature 'f': indices must be int32 or int64; got float32"):
        program.prepare([library.array(np.zeros(1, np.float32))], [starts])
    with pytest.raises(ValueError, match=r"tables must have one entry a table .1.; got 2"):
        program.forward([ids, ids], program.prepare([ids], [starts]), library.array(np.zeros((1, 3), np.float32)))


@pytest.mark.skipif("emulated" not in LIBRARIES, reason="the emulator is left out")
class TestOnTheEmulator:
    def test_a_read_only_output_is_refused(self, emulator: simt.Simt) -> None:
        program = emulator.backend().compile([TableSpec("t", 6, 3)], [FeatureSpec("f", 0)])
        table, out = np.zeros((6, 3), np.float32), np.zeros((1, 3), np.float32)
        for array in (table, out):
            array.flags.writeable = False
        batch = program.prepare([torch.tensor([0])], [torch.tensor([0])])
        program.forward([Exported(table)], batch, torch.zeros(1, 3))
        with pytest.raises(ValueError, match="the output is read-only and is to be written"):
            program.forward([Exported(table)], batch, Exported(out))
        with pytest.raises(ValueError, match="weight of table 0 is read-only"):
            program.update([Exported(table)], [None], [UpdateRule("sgd", 1.0)], [Segment(batch, torch.zeros(1, 3))])

    def test_a_stream_is_current_in_its_thread_alone_and_until_the_block_ends(self, emulator: simt.Simt) -> None:
        backend, seen = emulator.backend(), []
        with pytest.raises(KeyError), backend.on_stream(7):
            with backend.on_stream(Stream(9)):
                other = Thread(target=lambda: seen.append(backend.current_stream()))
                other.start()
                other.join()
                seen.append(backend.current_stream())
            seen.append(backend.current_stream())
            raise KeyError
        assert [*seen, backend.current_stream()] == [0, 9, 7, 0]

    def test_every_call_goes_to_the_current_stream(self, emulator: simt.Simt) -> None:
        program, streams = emulator.backend().compile([TableSpec("t", 6, 3)], [FeatureSpec("f", 0)]), {}
        raw = program.raw

        class Spy:
            def __getattr__(self, name: str) -> Any:
                def call(*arguments: Any) -> Any:
                    streams[name] = arguments[-1] if arguments else None
                    return getattr(raw, name)(*arguments)
                return call

        program.raw = Spy()
        with program.backend.on_stream(11):
            batch = program.prepare([torch.tensor([0])], [torch.tensor([0])])
            program.forward([torch.zeros(6, 3)], batch, torch.zeros(1, 3))
            program.update([torch.zeros(6, 3)], [None], [UpdateRule("sgd", 1.0)], [Segment(batch, torch.zeros(1, 3))])
            program.weight_grad([torch.zeros(6, 3)], batch, 0, torch.zeros(1, 3))
            program.coalesced_grad(0, [Segment(batch, torch.zeros(1, 3))])
            batch.indices(0)
        queueing = ("prepare", "forward", "update", "weight_grad", "gradient", "read_indices")
        assert {name: streams[name] for name in queueing} == dict.fromkeys(queueing, 11)

    def test_the_example_of_the_page_runs_without_torch(self, emulator: simt.Simt, allocations: object,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
        [example] = [code for code in PAGE.read_text().split("```python\n")[1:] if "_cuda" in code]
        monkeypatch.setitem(sys.modules, "sparselift.kernels._cuda", emulator.module)
        monkeypatch.setattr(sparselift.kernels, "_cuda", emulator.module, raising=False)
        names: dict[str, Any] = {}
        exec(compile(example.split("```")[0], str(PAGE), "exec"), names)
        assert "torch" not in names and names["pooled"].get().tolist() == [[15, 17, 19], [6, 7, 8]]


def test_cupys_pools_need_cupy(monkeypatch: pytest.MonkeyPatch, emulator: simt.Simt) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=r"memory 'cupy' needs cupy .*; install it with: pip install 'sparselift\[cuda\]'"):
        CudaBackend("cpu", module=simt.NAME, memory="cupy")
    with pytest.raises(ValueError, match="memory must be one of torch, cupy; got 'rmm'"):
        CudaBackend("cpu", module=simt.NAME, memory="rmm")
