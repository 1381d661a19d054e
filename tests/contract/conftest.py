from __future__ import annotations

import pytest

from sparselift.kernels import BACKENDS, available_backends, get_backend
from sparselift.kernels.base import KernelBackend


@pytest.fixture(params=[name for name in BACKENDS if name != "cpu"], scope="session")
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    if request.param not in available_backends():
        pytest.skip(f"{request.param}: not built, or its instruction set is missing here")
    return get_backend(request.param)
