"""What machine and software this is, as far as it matters to plans."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparselift.canonical import digest

# Instruction sets that kernels, or torch's matrix products, choose between.
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16",
          "asimd", "sve", "bf16")

# Virtual machines report the last-level cache of the whole socket, whoever uses it. A core's fair share is rarely more than this.
_L3_SHARE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine and its software. Fields that only a library's version changes end in `_version`.

    Sizes are 0 and texts empty where the system does not tell.
    """

    cpu: str                       # model name
    architecture: str              # "x86_64", "aarch64"
    cores: int                     # logical, that this process may use
    isa: tuple[str, ...]           # instruction sets that matter
    memory_bytes: int              # that this process may use
    l1d_bytes: int                 # a core
    l2_bytes: int                  # a core
    l3_bytes: int                  # of the socket, as reported
    huge_pages: str                # transparent huge pages: "always", "madvise", "never"
    torch_threads: int
    python_version: str
    torch_version: str
    numpy_version: str
    sparselift_version: str

    @property
    def cache_bytes(self) -> int:
        """Cache that this process can count on: its cores' L2 and their share of L3."""
        return self.cores * (self.l2_bytes + min(self.l3_bytes, _L3_SHARE_BYTES))

    @property
    def fingerprint(self) -> str:
        """16 hex digits: the same machine with the same thread count, whatever the library versions."""
        return digest({name: value for name, value in self.to_dict().items() if not name.endswith("_version")})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "isa": list(self.isa)}


def hardware() -> Hardware:
    """The machine that this runs on, as it is now: the thread count and huge pages may change while a process runs."""
    cpuinfo = _cpuinfo()
    flags = f"{cpuinfo.get('flags', '')} {cpuinfo.get('features', '')}".lower().split()
    caches = _cache_sizes()
    return Hardware(
        cpu=cpuinfo.get("model name") or platform.processor() or platform.machine(),
        architecture=platform.machine(), cores=_cores(), isa=tuple(flag for flag in _FLAGS if flag in flags),
        memory_bytes=_memory_bytes(), l1d_bytes=caches.get(1, 0), l2_bytes=caches.get(2, 0), l3_bytes=caches.get(3, 0),
        huge_pages=_huge_pages(), torch_threads=torch.get_num_threads(),
        python_version=platform.python_version(), torch_version=str(torch.__version__), numpy_version=np.__version__,
        sparselift_version=_own_version())


def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo, by lower-case name."""
    text = _read("/proc/cpuinfo").partition("\n\n")[0]
    return {name.strip().lower(): value.strip() for name, found, value in (line.partition(":") for line in text.splitlines()) if found}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    """Physical memory, or a container's limit if that is lower."""
    names = getattr(os, "sysconf_names", {})
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in names else 0
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(physical, int(limit)) if limit.isdigit() else physical


def _cache_sizes() -> dict[int, int]:
    """Level -> bytes of the first core's data or unified cache."""
    sizes: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        size = _read(folder / "size")
        if _read(folder / "type") in ("Data", "Unified") and size[:-1].isdigit():
            sizes[int(_read(folder / "level"))] = int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
    return sizes


def _huge_pages() -> str:
    """The setting in brackets, of "always [madvise] never"."""
    return _read("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]


def _own_version() -> str:
    try:
        return metadata.version("sparselift")
    except metadata.PackageNotFoundError:
        return ""                  # run from a source tree


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
