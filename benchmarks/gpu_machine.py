"""What runs the steps and tells how long they took: a GPU; or, to try the script without one, an emulator and a made-up clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gpu_cases import DeviceShape, Phase

from sparselift.kernels import ExchangeKernels, get_backend, get_exchange
from sparselift.kernels.cuda import CudaBackend

COPY_BYTES = 4 << 30               # of the buffers that the bandwidth is measured with, or an eighth of what is free
COPY_REPS = 15
CACHES_A_FLUSH = 4                 # caches that are overwritten before a step: an eviction policy may keep some of one
LEAST_FLUSH_BYTES = 2 << 30        # half a millisecond of writes, in which the host queues the step behind them


@dataclass(frozen=True, slots=True)
class Counts:
    """What the host asked of the device in one step. None: the profiler did not tell."""

    launches: int | None
    synchronizations: int | None


@dataclass(frozen=True, slots=True)
class SeenCounts:
    """The same of a profile, in which the profiler's own are."""

    launches: int
    synchronizations: int

    @classmethod
    def of(cls, events: Iterable[tuple[str, bool]]) -> SeenCounts:
        """Of names and whether each ran on the device: kernels there, calls of CUDA's runtime here."""
        launches = waits = 0
        for name, ran_there in events:
            launches += ran_there and not name.startswith(("Memcpy", "Memset"))
            waits += not ran_there and name.startswith("cu") and ("Synchronize" in name or name == "cudaMemcpy")
        return cls(launches, waits)


class Machine(Protocol):
    name: str
    device: torch.device
    backend: CudaBackend
    exchange: ExchangeKernels

    def fitting(self, shape: DeviceShape, fewer: int) -> DeviceShape:
        """The shape as far as it fits into the free memory divided by `fewer`."""

    def seconds(self, phase: Phase, number: int) -> float:
        """Of the phase on a batch, with cold caches, from the first to the last of what the device does."""

    def copy_seconds(self) -> tuple[int, list[float]]:
        """Bytes read and written, and seconds, of copies inside the device's memory."""

    def counts(self, step: Callable[[], object]) -> Counts:
        """Of a step that has run before."""

    def release(self) -> None:
        """Give memory back that nothing uses."""


class Gpu:
    """Torch's current device. Its clocks are taken as they are."""

    def __init__(self) -> None:
        self.backend, self.exchange = get_backend("cuda"), get_exchange("cuda")
        self.device = self.backend.device
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self._flushed = torch.empty(max(CACHES_A_FLUSH * properties.L2_cache_size, min(LEAST_FLUSH_BYTES, self._free_bytes() // 16)),
                                    dtype=torch.uint8, device=self.device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def fitting(self, shape: DeviceShape, fewer: int) -> DeviceShape:
        return shape.fitting(self._free_bytes() // fewer)

    def seconds(self, phase: Phase, number: int) -> float:
        given = phase.before(number)
        self._flushed.zero_()
        self._begin.record()
        phase.run(given)
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e-3

    def copy_seconds(self) -> tuple[int, list[float]]:
        nbytes = min(COPY_BYTES, self._free_bytes() // 8)
        source, target = (torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        copy = Phase(lambda number: number, lambda number: target.copy_(source))
        return 2 * nbytes, [self.seconds(copy, 0) for _ in range(COPY_REPS)][2:]

    def counts(self, step: Callable[[], object]) -> Counts:
        """By torch's profiler. What it does itself at its end is taken off."""
        try:
            nothing, seen = self._events(lambda: None), self._events(step)
        except RuntimeError as error:                          # another profiler, or no right to one
            print(f"note: launches are not counted: {error}", flush=True)
            return Counts(None, None)
        if seen.launches <= nothing.launches:                  # a step launches something: the profiler saw nothing
            return Counts(None, None)
        return Counts(seen.launches - nothing.launches, seen.synchronizations - nothing.synchronizations)

    def _events(self, step: Callable[[], object]) -> SeenCounts:
        torch.cuda.synchronize(self.device)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            step()
            torch.cuda.synchronize(self.device)
        return SeenCounts.of((event.name, event.device_type == torch.autograd.DeviceType.CUDA) for event in profile.events())

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class DryRun:
    """The emulator of the tests in the place of a GPU, tiny shapes, and NO MEASUREMENT: every time and bandwidth is made up."""

    MADE_UP_S, MADE_UP_COPY_GBPS = 1e-3, 1.0

    def __init__(self) -> None:
        from tests.simt import module

        self._emulator = module.load()
        self.backend, self.exchange = self._emulator.backend(), self._emulator.exchange()
        self.device, self.name = self.backend.device, "dry run: an emulator and made-up times"
        self._random = np.random.default_rng(0)

    def fitting(self, shape: DeviceShape, fewer: int) -> DeviceShape:
        return shape.tiny()

    def seconds(self, phase: Phase, number: int) -> float:
        phase.run(phase.before(number))
        return float(self.MADE_UP_S * self._random.uniform(0.9, 1.1))

    def copy_seconds(self) -> tuple[int, list[float]]:
        return int(self.MADE_UP_S * self.MADE_UP_COPY_GBPS * 1e9), [self.MADE_UP_S] * COPY_REPS

    def counts(self, step: Callable[[], object]) -> Counts:
        self._emulator.take_counts()
        step()
        counted: Any = self._emulator.take_counts()
        return Counts(counted.launches, counted.synchronizations)

    def release(self) -> None:
        gc.collect()
