from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparselift.cli import main
from sparselift.measure import compare

TINY = str(Path(__file__).parent / "tiny.py")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Ran:
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        return Ran(code, *capsys.readouterr())
    return call


@pytest.fixture(autouse=True, scope="session")
def short_blocks() -> Iterator[None]:
    """Searches measure shorter blocks of steps: these tests look at what is done with times, not at the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparselift.tuning.search.compare", partial(compare, block_s=0.001))
        yield


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory, short_blocks: None) -> Path:
    """The plan of a short search on the tiny workload, with its study beside it."""
    folder = tmp_path_factory.mktemp("tuned")
    assert main(["tune", f"{TINY}:work", "--trials", "4", "--out", str(folder / "plan.json")]) == 0
    return folder / "plan.json"
