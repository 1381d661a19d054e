"""Arrays and streams of torch and of other libraries, taken as they are: where elements lie in memory, which stream is meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .dtypes import ITEMSIZES, dtype_name, torch_dtype

# Handles that CUDA gives a meaning of its own.
LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM = 1, 2


@dataclass(frozen=True, slots=True)
class Array:
    """Plain memory: element [i, j, ...] is at pointer + itemsize * (i * strides[0] + j * strides[1] + ...)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]   # in elements
    dtype: str
    device: str                # "cpu", "cuda:0" ...


def as_array(source: Any) -> Array:
    """The memory of a torch tensor, or of anything that speaks DLPack (numpy, cupy ...), without a copy.

    The caller keeps `source` alive for as long as the pointer is used.

    Raises
    ------
    TypeError   `source` is neither, or has no plain memory: sparse, meta or fake tensors, lazy conjugates and negatives
    """
    if not isinstance(source, Tensor):
        if not hasattr(source, "__dlpack__"):
            raise TypeError(f"a torch tensor or an object with __dlpack__ is needed; got {type(source).__name__}")
        source = torch.from_dlpack(source)
    plain = source.layout is torch.strided and source.device.type != "meta" and not source.is_neg() and not source.is_conj()
    if not plain:
        raise TypeError(f"a {source.layout} tensor on {source.device} has no plain memory")
    return Array(source.data_ptr(), tuple(source.shape), tuple(source.stride()), dtype_name(source.dtype), str(source.device))


def device_tensor(what: str, source: Any, device: torch.device, *, written: bool = False) -> Any:
    """`source` as a torch tensor over the same memory, where it is an array of a device. Anything else is given back, for others to refuse.

    Parameters
    ----------
    what     names it in errors
    source   a torch tensor; or what speaks DLPack (cupy, numpy ...), which sees to the order of streams itself; or what has a
             `__cuda_array_interface__` of version 2 or 3 (cupy, numba ...): torch's current stream then waits for the array's
    device   where memory of a `__cuda_array_interface__` lies, which does not say
    written  whether it will be written to

    Raises
    ------
    TypeError    an interface with a mask, elements that torch has not, or a layout that tensors cannot have
    ValueError   an interface of another version or of stream 0, which is ambiguous; a read-only array that is to be written
    """
    if isinstance(source, Tensor):
        return source
    if hasattr(source, "__dlpack__"):
        return torch.from_dlpack(source)
    interface = getattr(source, "__cuda_array_interface__", None)
    return source if interface is None else _over(what, source, interface, device, written)


class _Exported:
    """An interface that is known to be a tensor's. Keeps the array that it is of, and is kept by the tensor."""

    def __init__(self, source: Any, interface: Mapping[str, Any]) -> None:
        self.source, self.interface = source, dict(interface)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.interface                # the same fields, for memory of the host


def _over(what: str, source: Any, interface: Mapping[str, Any], device: torch.device, written: bool) -> Tensor:
    if interface.get("version") not in (2, 3):
        raise ValueError(f"{what}: a __cuda_array_interface__ must be of version 2 or 3; got {interface.get('version')}")
    if interface.get("mask") is not None:
        raise TypeError(f"{what}: an array with a mask is no tensor")
    dtype = _dtype(what, interface["typestr"])
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    pointer, read_only = interface["data"]
    if strides is not None and any(stride < 0 or stride % dtype.itemsize for stride in strides):
        raise TypeError(f"{what}: strides must be multiples of the {dtype.itemsize} bytes of an element, and not negative; got {strides}")
    if written and read_only:
        raise ValueError(f"{what} is read-only and is to be written")
    _wait_for(what, interface.get("stream"), device)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)            # whose pointer may be anything
    if pointer % dtype.itemsize:
        raise TypeError(f"{what}: must begin at a multiple of the {dtype.itemsize} bytes of an element; got address {pointer:#x}")
    # What is not written may be read-only, for which torch has no word.
    exported = _Exported(source, {"shape": shape, "typestr": interface["typestr"], "data": (pointer, False), "strides": strides,
                                  "version": interface["version"]})
    return torch.from_numpy(np.asarray(exported)) if device.type == "cpu" else torch.as_tensor(exported, device=device)


def _dtype(what: str, typestr: str) -> torch.dtype:
    numpy_dtype = np.dtype(typestr)
    if not numpy_dtype.isnative or numpy_dtype.name not in ITEMSIZES:
        raise TypeError(f"{what}: elements must be one of {', '.join(ITEMSIZES)}, in this machine's byte order; got {typestr!r}")
    return torch_dtype(numpy_dtype.name)


def _wait_for(what: str, stream: int | None, device: torch.device) -> None:
    """Work of torch's current stream comes after what is queued on the array's; None: the array is ready."""
    if stream is None:
        return
    if stream == 0:
        raise ValueError(f"{what}: the stream of a __cuda_array_interface__ must not be 0, which may be either default stream")
    if device.type != "cuda":
        return                               # where work is done when its call returns
    if stream == PER_THREAD_DEFAULT_STREAM:
        torch.cuda.synchronize(device)       # torch has no name for it
    else:
        torch.cuda.current_stream(device).wait_stream(torch_stream(stream, device))


def stream_handle(stream: Any) -> int:
    """The handle of a stream: of torch, of cupy, of anything with CUDA's `__cuda_stream__`, or an integer, which it is already.

    Raises
    ------
    TypeError    it is none of them
    ValueError   a negative integer, or another version of the protocol than 0
    """
    handle: int | None
    if isinstance(stream, int) and not isinstance(stream, bool):
        handle = stream
    elif hasattr(stream, "__cuda_stream__"):
        version, handle = stream.__cuda_stream__()
        if version != 0:
            raise ValueError(f"a stream of version 0 of __cuda_stream__ is needed; got version {version}")
    else:
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))      # torch's, cupy's
        if handle is None:
            raise TypeError("a stream of torch or cupy, an object with __cuda_stream__ or an integer is needed; "
                            f"got {type(stream).__name__}")
    if handle < 0:
        raise ValueError(f"the handle of a stream must not be negative; got {handle}")
    return int(handle)


def torch_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of a handle, for torch. Raises ValueError for the per-thread default stream, which torch does not have."""
    if handle == PER_THREAD_DEFAULT_STREAM:
        raise ValueError("torch cannot work on the per-thread default stream (handle 2)")
    if handle in (0, LEGACY_DEFAULT_STREAM):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)
