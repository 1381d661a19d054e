"""One torch thread unless a test asks for more: on two cores, spinning OpenMP threads of parallel test runs starve each other. And one
default plan whatever the processor: tests that hold it to native's bits are not about matrix libraries.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparselift.hardware import hardware
from sparselift.rewrites import linear

FOLDER = Path(__file__).parent

# A shell starts background jobs with Ctrl-C ignored, which is inherited. Tests that send it need it to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs over the emulator takes a build of it first."""
    for item in items:
        if {"cuda", "simt"} & set(item.path.relative_to(FOLDER).parts):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Ten thousand collected tests are many objects, and what is measured collects garbage before it takes the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _same_default_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "hardware", lambda: replace(hardware(), cpu="a processor of the tests"))
