"""The CPU backend: fused bags in C, one build of the kernels an instruction set, chosen at run time."""

from __future__ import annotations


def runnable_isas() -> tuple[str, ...]:
    """Instruction sets that were built and that this machine has, slowest first; empty where the extension is not built."""
    try:
        from . import _cpu
    except ImportError:
        return ()
    return _cpu.runnable_isas()
