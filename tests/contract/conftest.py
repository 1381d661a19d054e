"""The backends that a contract test runs over. SPARSELIFT_CONTRACT_BACKEND=cuda: that one alone, and it must be there."""

from __future__ import annotations

import os
from itertools import compress
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
        is_other = [item.path.is_relative_to(FOLDER) and not runs_over(item, ALONE) for item in items]
        config.hook.pytest_deselected(items=list(compress(items, is_other)))
        items[:] = [item for item, is_left_out in zip(items, is_other) if not is_left_out]


@pytest.fixture(scope="session")
def emulator() -> Simt:
    """Of the session, so that a build that fails fails once."""
    return simt.load()


def runs_over(item: pytest.Item, backend: str) -> bool:
    """Whether one of the test's parameters is this backend."""
    return hasattr(item, "callspec") and any(isinstance(value, str) and value == backend for value in item.callspec.params.values())


@pytest.fixture(params=PARAMS)
def backend_name(request: pytest.FixtureRequest) -> str:
    """The reference, the CPU kernels of each instruction set, and the CUDA kernels, on a device and under each schedule of the emulator,
    which is then set."""
    name = str(request.param)
    if emulates(name):
        request.getfixturevalue("emulator").set_schedule(name.removeprefix("simt-"))
    elif name not in available_backends() and not ALONE:
        pytest.skip(f"{name}: not built, or its instruction set is missing here")
    return name


def emulates(backend_name: str) -> bool:
    return backend_name.startswith("simt-")


@pytest.fixture
def backend(request: pytest.FixtureRequest, backend_name: str) -> KernelBackend:
    if emulates(backend_name):
        emulator: Simt = request.getfixturevalue("emulator")
        return emulator.backend()
    found = get_backend(backend_name)
    return OnDevice(found, found.device) if backend_name == "cuda" else found
