"""The backends that a contract test runs over. SPARSELIFT_CONTRACT_BACKEND=cuda: that one alone, and it must be there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparselift.kernels import BACKENDS, available_backends, get_backend
from sparselift.kernels.base import KernelBackend
from tests.contract.on_device import OnDevice
from tests.simt import module as simt
from tests.simt.module import Simt

FOLDER = Path(__file__).parent
CPU_BACKENDS = [name for name in BACKENDS if name not in ("cpu", "cuda")]
ALONE = os.environ.get("SPARSELIFT_CONTRACT_BACKEND")
EMULATED = [pytest.param(f"simt-{schedule}", marks=pytest.mark.slow) for schedule in simt.SCHEDULES]
# Where there is no device, a line for every test that does not run on one would be noise.
PARAMS = [ALONE] if ALONE else [*CPU_BACKENDS, *EMULATED, *(["cuda"] if "cuda" in available_backends() else [])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of one backend alone, no test of this folder that is not about backends."""
    if ALONE:
        others = [item for item in items if item.path.is_relative_to(FOLDER) and not runs_over(item, ALONE)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def emulator() -> Simt:
    """Of the session, so that a build that fails fails once."""
    return simt.load()


def runs_over(item: pytest.Item, backend: str) -> bool:
    """Whether one of the test's parameters is this backend."""
    return hasattr(item, "callspec") and any(isinstance(value, str) and value == backend for value in item.callspec.params.values())


@pytest.fixture(params=PARAMS)
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    """The reference, the CPU kernels of each instruction set, and the CUDA kernels, under each schedule of the emulator and on a device."""
    kind, _, schedule = request.param.partition("-")
    if kind == "simt":
        emulator: Simt = request.getfixturevalue("emulator")
        emulator.set_schedule(schedule)
        return emulator.backend()
    if request.param == "cuda":
        on_device = get_backend("cuda")
        return OnDevice(on_device, on_device.device)
    if request.param not in available_backends() and not ALONE:
        pytest.skip(f"{request.param}: not built, or its instruction set is missing here")
    return get_backend(request.param)
