from __future__ import annotations

import sys

import pytest

from tests.cuda import host_cupy
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


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of a cupy of the host: bytes and stream of what its pool handed out."""
    handed_out: list[tuple[int, int]] = []
    monkeypatch.setitem(sys.modules, "cupy", host_cupy.module(handed_out))
    return handed_out
