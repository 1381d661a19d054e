from __future__ import annotations

import pytest

from tests.simt import module
from tests.simt.module import Simt


@pytest.fixture(scope="session")
def emulator() -> Simt:
    """Of the session, so that a build that fails fails once."""
    return module.load()


@pytest.fixture(params=module.SCHEDULES)
def simt(request: pytest.FixtureRequest, emulator: Simt) -> Simt:
    """The CUDA kernels under each schedule of the emulator."""
    emulator.set_schedule(request.param)
    return emulator
