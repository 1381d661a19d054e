"""Kernel backends by name."""

from __future__ import annotations

from .base import KernelBackend
from .cpu import ISAS
from .exchange import ExchangeKernels

__all__ = ["BACKENDS", "available_backends", "get_backend", "get_exchange"]

BACKENDS = ("reference", "cpu", *(f"cpu-{isa}" for isa in ISAS), "cuda")


def get_backend(name: str | KernelBackend = "cpu") -> KernelBackend:
    """The backend called `name`: "reference", "cpu" (the best instruction set that runs here), "cpu-portable", "cpu-avx2",
    "cpu-avx512", or "cuda" (torch's current device). A backend itself is given back.

    Raises
    ------
    ValueError    a name that is none of these
    KernelError   the backend is not built, or its instruction set, driver or device is missing here; says which
    """
    if isinstance(name, KernelBackend):
        return name
    if name == "reference":
        from .reference import ReferenceBackend
        return ReferenceBackend()
    if name not in BACKENDS:
        raise ValueError(f"the backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    if name == "cuda":
        from .cuda import CudaBackend
        return CudaBackend()
    from .cpu import CpuBackend
    return CpuBackend(name.partition("-")[2] or None)


def get_exchange(name: str = "cpu") -> ExchangeKernels:
    """What surrounds an exchange between ranks, by the names of `get_backend`. Raises as that does."""
    if name == "reference":
        from .exchange_reference import ReferenceExchange
        return ReferenceExchange()
    if name not in BACKENDS:
        raise ValueError(f"the backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    from .exchange_compiled import CpuExchange, CudaExchange
    return CudaExchange() if name == "cuda" else CpuExchange(name.partition("-")[2] or None)


def available_backends() -> tuple[str, ...]:
    """Names that `get_backend` takes on this machine."""
    from .cpu import runnable_isas
    from .cuda import is_runnable
    runnable = runnable_isas()
    return ("reference", *(("cpu",) if runnable else ()), *(f"cpu-{isa}" for isa in runnable), *(("cuda",) if is_runnable() else ()))
