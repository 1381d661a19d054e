from __future__ import annotations

import pytest

from sparselift.kernels import BACKENDS, available_backends, get_backend
from sparselift.kernels.base import KernelBackend
from tests.simt import module as simt
from tests.simt.module import Simt

CPU_BACKENDS = [name for name in BACKENDS if name not in ("cpu", "cuda")]


@pytest.fixture(scope="session")
def emulator() -> Simt:
    """Of the session, so that a build that fails fails once."""
    return simt.load()


@pytest.fixture(params=[*CPU_BACKENDS, *(pytest.param(f"simt-{schedule}", marks=pytest.mark.slow) for schedule in simt.SCHEDULES)])
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    """The reference, the CPU kernels of each instruction set, and the CUDA kernels under each schedule of the emulator."""
    kind, _, schedule = request.param.partition("-")
    if kind == "simt":
        emulator: Simt = request.getfixturevalue("emulator")
        emulator.set_schedule(schedule)
        return emulator.backend()
    if request.param not in available_backends():
        pytest.skip(f"{request.param}: not built, or its instruction set is missing here")
    return get_backend(request.param)
