from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparselift import arrays
from sparselift.arrays import as_array, device_tensor, stream_handle, torch_stream
from sparselift.dtypes import ITEMSIZES, dtype_name, itemsize, torch_dtype
from tests.cuda.host_cupy import Exported


@pytest.mark.parametrize("tensor", [
    torch.zeros(3, 4), torch.zeros(3, 4).t(), torch.arange(10)[3::2], torch.nn.Parameter(torch.zeros(5)), torch.zeros(0, 4),
    torch.tensor(1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.bfloat16),
])
def test_a_torch_tensor(tensor):
    array = as_array(tensor)
    assert array.pointer == tensor.data_ptr() and array.shape == tuple(tensor.shape) and array.strides == tensor.stride()
    assert array.dtype == dtype_name(tensor.dtype) and array.device == "cpu"


def test_what_speaks_dlpack():
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = as_array(numbers)
    assert array.pointer == numbers.ctypes.data and array.shape == (3, 4) and array.strides == (4, 1) and array.dtype == "float32"


@pytest.mark.parametrize("source", [
    [1, 2], torch.zeros(3, device="meta"), torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.complex64).conj(),
    torch.zeros(3, dtype=torch.complex64).conj().imag,
])
def test_what_has_no_plain_memory(source):
    with pytest.raises(TypeError, match=r"needed; got list|has no plain memory"):
        as_array(source)


@pytest.mark.parametrize("name", ITEMSIZES)
def test_names_of_dtypes(name):
    assert dtype_name(torch_dtype(name)) == name
    assert itemsize(name) == ITEMSIZES[name] == torch.empty(1, dtype=torch_dtype(name)).element_size()


def test_an_unknown_dtype():
    with pytest.raises(ValueError, match=r"must be one of float32, .*; got 'float31'"):
        torch_dtype("float31")


HOST = torch.device("cpu")


def test_a_cuda_array_interface_is_a_tensor_over_the_same_memory():
    numbers = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (numbers, numbers.T, numbers[1:, ::2], numbers[2], numbers[:, 5:], np.array(3.0)):
        exported = Exported(view)
        tensor = device_tensor("x", exported, HOST)
        assert tensor.data_ptr() == view.ctypes.data and np.array_equal(tensor.numpy(), view)
        assert tensor.stride() == tuple(stride // view.itemsize for stride in view.strides)
    tensor = device_tensor("x", Exported(numbers), HOST, written=True)
    tensor[0, 0] = 77
    assert numbers[0, 0] == 77


def test_a_tensor_keeps_the_array_that_it_is_over():
    exported = Exported(np.zeros(3, np.float32))
    alive = weakref.ref(exported)
    tensor = device_tensor("x", exported, HOST)
    del exported
    assert alive() is not None and tensor[1:].sum() == 0
    del tensor
    assert alive() is None


@pytest.mark.parametrize("dtype", [name for name in ITEMSIZES if name != "bfloat16"])   # which has no typestr: DLPack carries it
def test_elements_of_a_cuda_array_interface(dtype):
    assert device_tensor("x", Exported(np.zeros(2, dtype)), HOST).dtype is torch_dtype(dtype)


def test_arrays_without_elements_may_point_anywhere():
    for pointer in (0, 1, 2**40 + 3):
        tensor = device_tensor("x", Exported(np.zeros((3, 0), np.int64), data=(pointer, False)), HOST)
        assert tensor.shape == (3, 0) and tensor.dtype is torch.int64


def test_a_read_only_array_is_read():
    numbers = np.arange(3.0)
    numbers.flags.writeable = False
    assert device_tensor("x", Exported(numbers), HOST).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"^x is read-only and is to be written"):
        device_tensor("x", Exported(numbers), HOST, written=True)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"version": 1}, ValueError, "must be of version 2 or 3; got 1"),
    ({"mask": np.ones(4)}, TypeError, "an array with a mask is no tensor"),
    ({"typestr": ">f4"}, TypeError, "in this machine's byte order; got '>f4'"),
    ({"typestr": "<c8"}, TypeError, "elements must be one of float32, .*; got '<c8'"),
    ({"typestr": "|V2"}, TypeError, r"got '\|V2'"),
    ({"strides": (6,)}, TypeError, r"strides must be multiples of the 4 bytes of an element, and not negative; got \(6,\)"),
    ({"strides": (-4,)}, TypeError, r"not negative; got \(-4,\)"),
    ({"stream": 0}, ValueError, "the stream of a __cuda_array_interface__ must not be 0"),
], ids=str)
def test_what_is_no_tensor(changes, error, message):
    with pytest.raises(error, match=f"^x: .*{message}"):
        device_tensor("x", Exported(np.zeros(4, np.float32), **changes), HOST)


def test_an_address_between_elements():
    block = np.zeros(20, np.uint8)
    start = -block.ctypes.data % 4
    assert device_tensor("x", Exported(np.zeros(4, np.float32), data=(block.ctypes.data + start, False)), HOST).tolist() == [0] * 4
    with pytest.raises(TypeError, match="x: must begin at a multiple of the 4 bytes of an element; got address 0x"):
        device_tensor("x", Exported(np.zeros(4, np.float32), data=(block.ctypes.data + start + 2, False)), HOST)


@pytest.mark.parametrize("stream", [None, 1, 2, 4096])
def test_an_array_that_work_is_queued_for(stream):
    """On the host nothing is queued. Older interfaces say nothing of streams."""
    assert device_tensor("x", Exported(np.ones(4, np.float32), stream=stream), HOST).sum() == 4
    assert device_tensor("x", Exported(np.ones(4, np.float32), version=2), HOST).sum() == 4


@pytest.mark.parametrize(("stream", "event"), [(1, "wait for default"), (4096, "wait for 4096"), (2, "synchronize")])
def test_torchs_stream_waits_for_the_arrays(monkeypatch, stream, event):
    device, events = torch.device("cuda:0"), []
    current = SimpleNamespace(wait_stream=lambda other: events.append(f"wait for {other}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda given: current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda given: "default")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda given: events.append("synchronize"))
    arrays._wait_for("x", stream, device)
    assert events == [event]


def test_what_is_no_array_is_left_for_others_to_refuse():
    for given in ([1, 2], None, 3, "text"):
        assert device_tensor("x", given, HOST) is given
    tensor = torch.zeros(3)
    assert device_tensor("x", tensor, HOST) is tensor


class Spoken:
    def __init__(self, version, handle):
        self.spoken = version, handle

    def __str__(self):
        return f"spoken {self.spoken}"            # a test's name, which must be the same in every process

    def __cuda_stream__(self):
        return self.spoken


@pytest.mark.parametrize(("stream", "handle"), [
    (0, 0), (1, 1), (4096, 4096), (Spoken(0, 64), 64), (SimpleNamespace(cuda_stream=72), 72), (SimpleNamespace(ptr=80), 80),
], ids=str)
def test_handles_of_streams(stream, handle):
    assert stream_handle(stream) == handle


@pytest.mark.parametrize(("stream", "error", "message"), [
    ("fast", TypeError, "is needed; got str"), (True, TypeError, "is needed; got bool"), (None, TypeError, "is needed; got NoneType"),
    (-1, ValueError, "must not be negative; got -1"), (Spoken(1, 64), ValueError, "version 0 of __cuda_stream__ is needed; got version 1"),
], ids=str)
def test_what_is_no_stream(stream, error, message):
    with pytest.raises(error, match=message):
        stream_handle(stream)


def test_torch_has_no_per_thread_default_stream():
    with pytest.raises(ValueError, match="per-thread default stream"):
        torch_stream(2, torch.device("cuda:0"))


def test_cupys_streams_have_handles_without_a_device():
    cupy = pytest.importorskip("cupy")
    assert stream_handle(cupy.cuda.Stream.null) == 0
    assert stream_handle(cupy.cuda.Stream.from_external(Spoken(0, 4096))) == 4096
