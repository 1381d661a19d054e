"""The CUDA kernels as a Python module that runs on the CPU: the source of sparselift.kernels._cuda over the emulator, for tests alone.

Built under sanitizers with SPARSELIFT_SANITIZE=1, as the CPU kernels are.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from sparselift.kernels.cuda import CudaBackend, KernelShape
from sparselift.kernels.exchange_compiled import CudaExchange

from .emulator import ROOT, SANITIZER_FLAGS

NAME = "_simt"
SCHEDULES = ("forward", "reverse", "random:7")
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas",
           "-DSPARSELIFT_SIMT", "-Icsrc")
SOURCES = (*sorted(ROOT.glob("csrc/simt/*.cpp")), *sorted(ROOT.glob("csrc/cuda/*.cu")),
           ROOT / "csrc/api/status.cpp", ROOT / "tests/simt/control.cpp")
CYTHON = tuple(ROOT / "sparselift/kernels" / name
               for name in ("_cuda.pyx", "_cuda_abi.pxd", "_cpu.pxd", "_exchange.pxd", "_interaction.pxd", "_status.pxd"))


@dataclass(frozen=True, slots=True)
class Counts:
    """What host code asked of the device."""

    launches: int
    copies: int
    synchronizations: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Vector accesses of global memory: bytes that warps asked for, and 32-byte sectors that they touched."""

    load_bytes: int
    load_sectors: int
    store_bytes: int
    store_sectors: int

    @property
    def load_efficiency(self) -> float:
        return self.load_bytes / (32 * self.load_sectors)

    @property
    def store_efficiency(self) -> float:
        return self.store_bytes / (32 * self.store_sectors)


@dataclass(frozen=True, slots=True)
class Simt:
    """The module and the emulator below it."""

    module: ModuleType
    library: ctypes.CDLL

    def set_schedule(self, schedule: str) -> None:
        assert self.library.simt_set_schedule(schedule.encode()) == 0, schedule

    def take_counts(self) -> Counts:
        """Since the last call."""
        numbers = [ctypes.c_int64() for _ in range(3)]
        self.library.simt_take_counts(*map(ctypes.byref, numbers))
        return Counts(*(number.value for number in numbers))

    def take_launches(self) -> dict[str, int]:
        """How often each kernel was launched since the last call, by its name with template arguments, as in csrc/cuda/budget.csv."""
        self.library.simt_take_launches.restype = ctypes.c_char_p
        lines = self.library.simt_take_launches().decode().splitlines()
        return {name: int(count) for name, _, count in (line.rpartition(" ") for line in lines)}

    def throw_at_launch(self, bad_alloc: bool) -> None:
        """The next launch does: std::bad_alloc, or another exception."""
        self.library.simt_throw_at_launch(int(bad_alloc))

    def traffic(self, call: Callable[[], object]) -> Traffic:
        """Of the launches that `call` makes."""
        numbers = [ctypes.c_int64() for _ in range(4)]
        self.library.simt_take_traffic(*map(ctypes.byref, numbers))
        self.library.simt_count_traffic(1)
        try:
            call()
        finally:
            self.library.simt_count_traffic(0)
        self.library.simt_take_traffic(*map(ctypes.byref, numbers))
        return Traffic(*(number.value for number in numbers))

    def backend(self, shape: KernelShape | None = None) -> CudaBackend:
        return CudaBackend("cpu", shape or KernelShape(), NAME)

    def exchange(self) -> CudaExchange:
        return CudaExchange(self.backend())


@cache
def load() -> Simt:
    """Builds the module, unless these sources have been built before, and imports it."""
    flags = SANITIZER_FLAGS if bool(int(os.environ.get("SPARSELIFT_SANITIZE", "0"))) else ()
    path = ROOT / "build" / "simt" / _fingerprint(flags) / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                       # of test processes that start together one builds, and the others wait
        if not path.exists():
            _build(path, flags)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return Simt(module, ctypes.CDLL(str(path)))


def _fingerprint(flags: Sequence[str]) -> str:
    parts = [*sorted(ROOT.glob("csrc/**/*.h")), *sorted(ROOT.glob("csrc/**/*.cuh")), *SOURCES, *CYTHON, Path(__file__)]
    text = b"".join(path.read_bytes() for path in parts) + repr((sys.version, flags)).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _build(path: Path, flags: Sequence[str]) -> None:
    """Built beside `path` and moved there when it is whole: a build that is killed leaves none."""
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        folder = Path(made)

        def compile_one(source: Path) -> Path:
            made = folder / f"{source.name}.o"
            subprocess.run(["g++", "-x", "c++", *OPTIONS, *flags, "-c", source, "-o", made], cwd=ROOT, check=True)
            return made

        shutil.copy(CYTHON[0], folder / f"{NAME}.pyx")
        subprocess.run([sys.executable, "-m", "cython", "-3", f"-I{ROOT}", folder / f"{NAME}.pyx"], cwd=folder, check=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, SOURCES))
        include = sysconfig.get_path("include")
        subprocess.run(["gcc", "-O1", "-fPIC", "-Icsrc", f"-I{include}", *flags, "-c", folder / f"{NAME}.c", "-o", folder / "module.o"],
                       cwd=ROOT, check=True)
        subprocess.run(["g++", "-shared", *flags, *objects, folder / "module.o", "-o", folder / path.name], check=True)
        (folder / path.name).replace(path)
