"""Memory that lookups write to and read from: reused output buffers, and huge pages under tables."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .errors import KernelError

HUGE_PAGE_BYTES = 2 << 20
IDLE_BYTES = 256 << 20             # of buffers that nobody uses, that a ring keeps
SMAPS = Path("/proc/self/smaps")


def extension() -> ModuleType:
    """The compiled part. Raises KernelError where it is not built."""
    try:
        return import_module("sparselift._memory")
    except ImportError as error:
        raise KernelError(f"the compiled extension sparselift._memory is missing ({error}); "
                          "build it with: pip install -e . --no-build-isolation") from error


class OutputRing:
    """Buffers for outputs, each handed out again when no torch object, view or array owns its storage any more.

    A fresh buffer of 40 MB costs 10 ms of page faults, a reused one none. Buffers are 64-byte aligned; from 2 MiB on they lie in
    huge pages where the system has them. Any thread may take, and any thread may drop the last reference.

    Parameters
    ----------
    max_idle_bytes   most that the ring keeps in buffers that came back; those idle longest go first

    Raises
    ------
    KernelError   the extension is not built
    """

    def __init__(self, max_idle_bytes: int = IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._ring = extension().Ring(max_idle_bytes)

    def __reduce__(self) -> tuple[type[OutputRing], tuple[int]]:
        return OutputRing, (self._max_idle_bytes,)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A C-contiguous tensor of float32, or of a dtype of 16 bits, whose contents are undefined. Raises MemoryError."""
        if dtype is torch.float32:
            return self._ring.take(shape)
        count = prod(shape)
        return self._ring.take((-(-count // 2),)).view(dtype)[:count].view(shape)

    @property
    def idle_bytes(self) -> int:
        """Bytes in buffers that nobody holds."""
        return self._ring.bytes()[0]

    @property
    def total_bytes(self) -> int:
        """Bytes in all buffers of the ring, in use and idle."""
        return self._ring.bytes()[1]


@dataclass(frozen=True, slots=True)
class HugePages:
    """What was asked of the kernel for one tensor, and what it gave."""

    requested_bytes: int       # of the tensor that whole huge pages can cover
    huge_bytes: int            # of these, in huge pages now

    @property
    def prevail(self) -> bool:
        """Whether at least half of it is in huge pages."""
        return 2 * self.huge_bytes >= self.requested_bytes


def set_huge_pages(tensor: Tensor, on: bool) -> HugePages:
    """Put a CPU tensor's existing memory into huge pages, or back into small ones. Pointers and values stay.

    Only whole, aligned huge pages inside the tensor are touched. A kernel that refuses (no MADV_COLLAPSE before Linux 6.1, huge pages
    disabled, memory too fragmented) is no error: the result tells. Takes about as long as copying the tensor.
    """
    begin, end = _interior(tensor)
    if begin == end:
        return HugePages(0, 0)
    memory = extension()
    if on:
        memory.collapse(begin, end)
    else:
        memory.split(begin, end)
    return HugePages(end - begin, _huge_bytes(begin, end))


def huge_pages(tensor: Tensor) -> HugePages:
    """How much of a CPU tensor lies in huge pages now."""
    begin, end = _interior(tensor)
    return HugePages(end - begin, _huge_bytes(begin, end) if begin < end else 0)


class HugePageSet:
    """Tensors that lie in huge pages on somebody's behalf. Those that lay there before are not moved back.

    Tensors are referred to weakly. A copy, and what comes out of a pickle, holds none.
    """

    def __init__(self) -> None:
        self.found: dict[str, HugePages] = {}                # what the kernel gave to each
        self._moved: dict[int, weakref.ref[Tensor]] = {}      # by address

    def __reduce__(self) -> tuple[type[HugePageSet], tuple[()]]:
        return HugePageSet, ()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Move tensors into huge pages, by the names under which `found` is to list them. Values and addresses stay."""
        for name, tensor in tensors.items():
            if not huge_pages(tensor).prevail:
                self._moved[tensor.data_ptr()] = weakref.ref(tensor)
            self.found[name] = set_huge_pages(tensor, True)

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """`add` these, and move back what was moved here before and is not among them, if its memory is still the same."""
        wanted = {tensor.data_ptr() for tensor in tensors.values()}
        for address, reference in self._moved.items():
            tensor = reference()
            if tensor is not None and tensor.data_ptr() == address and address not in wanted:
                set_huge_pages(tensor, False)
        self._moved = {address: reference for address, reference in self._moved.items() if address in wanted}
        self.found = {}
        self.add(tensors)


def _interior(tensor: Tensor) -> tuple[int, int]:
    """First and last address of the whole huge pages that hold nothing but the tensor."""
    if tensor.device.type != "cpu":
        raise TypeError(f"huge pages are for CPU tensors; got one on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"huge pages are for contiguous tensors; got strides {tensor.stride()}")
    first = tensor.data_ptr()
    begin = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (first + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return (begin, end) if begin < end else (0, 0)


def _huge_bytes(begin: int, end: int) -> int:
    found = extension().huge_bytes(begin, end)
    return found if found >= 0 else _huge_bytes_of_mappings(begin, end, SMAPS.read_text())


def _huge_bytes_of_mappings(begin: int, end: int, smaps: str) -> int:
    """From the text of /proc/self/smaps, at most what each mapping has in common with [begin, end): a mapping may be larger."""
    total = shared = 0
    for line in smaps.splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(address, 16) for address in match.groups())
            shared = max(0, min(last, end) - max(first, begin))
        elif line.startswith("AnonHugePages:"):
            total += min(shared, int(line.split()[1]) * 1024)
    return total
