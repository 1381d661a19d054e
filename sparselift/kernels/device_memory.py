"""Who gives the CUDA backend its device memory and its pinned host buffers: torch, or the pools of cupy."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparselift.arrays import device_tensor
from sparselift.errors import MissingExtraError

POOLS = ("torch", "cupy")


class DeviceMemory(ABC):
    """Memory of one device. What is handed out goes back to its pool with the last tensor over it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int) -> Tensor:
        """On the device, contiguous, for use on the stream of this handle."""

    @abstractmethod
    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On the host, contiguous, in pages that a device copies from and to by itself. Kept until its copies are done by the caller."""


class TorchMemory(DeviceMemory):
    """Torch's caching allocators."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")


class CupyMemory(DeviceMemory):
    """Cupy's pools, for programs whose arrays are cupy's: two pools in a process each keep what the other one could use."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise MissingExtraError(f"memory 'cupy' needs cupy ({error}); install it with: pip install 'sparselift[cuda]'") from error

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        with self._current(stream):
            memory = self._cupy.cuda.alloc(nbytes)
        array = self._cupy.ndarray((nbytes,), self._cupy.uint8, memory)
        return device_tensor("memory of cupy", array, self.device).view(dtype).view(shape)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        return torch.from_numpy(np.frombuffer(memory, np.uint8, nbytes)).view(dtype).view(shape)

    @contextmanager
    def _current(self, stream: int) -> Iterator[None]:
        """Cupy's pool hands memory that was freed on a stream out on that stream alone, and takes the current one for the one of use."""
        cuda = self._cupy.cuda
        with cuda.Device(self.device.index), cuda.Stream.from_external(_Stream(stream)):
            yield


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """Outputs of kernels, from a pool. `stream` says which one they are for."""

    memory: DeviceMemory
    stream: Callable[[], int]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self.memory.empty(shape, dtype, self.stream())


@dataclass(frozen=True, slots=True)
class _Stream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def device_memory(pool: str, device: torch.device) -> DeviceMemory:
    """Raises ValueError for a pool that is none of POOLS, MissingExtraError where cupy is not installed."""
    if pool not in POOLS:
        raise ValueError(f"memory must be one of {', '.join(POOLS)}; got {pool!r}")
    return TorchMemory(device) if pool == "torch" else CupyMemory(device)
