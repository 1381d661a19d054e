"""As much of cupy as is used of it, over memory of the host, for the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np


class Exported:
    """An array as libraries show it: its `__cuda_array_interface__`, with some fields changed."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array, self.changes = array, changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        contiguous = self.array.flags.c_contiguous
        return {"shape": self.array.shape, "typestr": self.array.dtype.str, "strides": None if contiguous else self.array.strides,
                "data": (self.array.ctypes.data, not self.array.flags.writeable), "version": 3, **self.changes}

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.array.ctypes.data)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def get(self) -> np.ndarray:
        return self.array


class Stream:
    """A stream by its handle, current inside of `with`."""

    entered: ClassVar[list[int]] = [0]

    def __init__(self, handle: int) -> None:
        self.ptr = handle

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        return cls(stream.__cuda_stream__()[1])

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __enter__(self) -> None:
        self.entered.append(self.ptr)

    def __exit__(self, *_: object) -> None:
        self.entered.pop()

    def synchronize(self) -> None:
        pass


def module(allocations: list[tuple[int, int]]) -> ModuleType:
    """Notes (bytes, stream) of what its pool hands out."""
    def alloc(nbytes: int) -> np.ndarray:
        allocations.append((nbytes, Stream.entered[-1]))
        return np.full(nbytes, 0xaa, np.uint8)

    @contextmanager
    def device(index: int | None) -> Iterator[None]:
        yield

    made = ModuleType("cupy")
    made.__dict__.update(
        uint8=np.uint8, float32=np.float32, int32=np.int32, int64=np.int64,
        ndarray=lambda shape, dtype, memory: Exported(memory.view(dtype).reshape(shape)),
        asarray=lambda values, dtype=None: Exported(np.array(values, dtype)), asnumpy=lambda array: array.array,
        arange=lambda count, dtype: Exported(np.arange(count, dtype=dtype)), zeros=lambda shape, dtype: Exported(np.zeros(shape, dtype)),
        empty=lambda shape, dtype: Exported(np.empty(shape, dtype)),
        cuda=SimpleNamespace(Stream=Stream, Device=device, alloc=alloc, alloc_pinned_memory=lambda nbytes: bytearray(nbytes + 64),
                             get_current_stream=lambda: Stream(0)))
    return made
