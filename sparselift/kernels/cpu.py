"""The CPU backend: fused bags in C, one build of the kernels an instruction set, chosen at run time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType

from sparselift.errors import KernelError

from .base import BagProgram, FeatureSpec, IndexBatch, KernelBackend, KernelShape, TableSpec

ISAS = ("portable", "avx2", "avx512")      # by their numbers in csrc/api/sparselift_cpu.h
ISA_VARIABLE = "SPARSELIFT_ISA"


def extension() -> ModuleType:
    """The module of compiled kernels. Raises KernelError where it is not built."""
    try:
        from . import _cpu
    except ImportError as error:
        raise KernelError("the CPU kernels are not built (sparselift.kernels._cpu cannot be imported: "
                          f"{error}); build them with: pip install -e . --no-build-isolation") from error
    BagProgram.register(_cpu.Program)
    IndexBatch.register(_cpu.Batch)
    return _cpu


def runnable_isas() -> tuple[str, ...]:
    """Instruction sets that this machine has, slowest first; empty where the kernels are not built."""
    try:
        return extension().runnable_isas()
    except KernelError:
        return ()


class CpuBackend(KernelBackend):
    """Fused bags on the CPU, on torch's own threads (`torch.set_num_threads`).

    Parameters
    ----------
    isa   "portable", "avx2" or "avx512". None: what the environment variable SPARSELIFT_ISA names, else the fastest that runs here

    Raises
    ------
    KernelError   the kernels are not built, or the instruction set is missing here
    """

    name = "cpu"

    def __init__(self, isa: str | None = None) -> None:
        self._extension = extension()
        runnable = self._extension.runnable_isas()
        self.isa = isa or os.environ.get(ISA_VARIABLE) or runnable[-1]
        if self.isa not in runnable:
            raise KernelError(f"the instruction set must be one that runs here ({', '.join(runnable)}); got {self.isa!r}")

    def compile(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], shape: KernelShape | None = None) -> BagProgram:
        return self._extension.Program(tables, features, self.isa)

    def variant(self) -> str:
        return self.isa

    def openmp_runtime(self) -> str:
        """The file of the OpenMP runtime shared with torch; "" where none is loaded and kernels run on one thread."""
        return self._extension.openmp_runtime()
