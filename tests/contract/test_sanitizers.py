"""The build with sanitizers, and no other, has them, and they stop a kernel that leaves its arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparselift

SANITIZED = os.environ.get("SPARSELIFT_SANITIZE") == "1"

# A table that says it has one row more than there is memory for, and an id of that row.
FAULTY = """
import numpy as np, torch
from numpy.lib.stride_tricks import as_strided
from sparselift.kernels import get_backend
from sparselift.kernels.base import FeatureSpec, TableSpec

rows, dim = 5, 16
table = torch.from_numpy(as_strided(np.ones((rows - 1, dim), dtype=np.float32), (rows, dim)))
program = get_backend("cpu").compile([TableSpec("t", rows, dim)], [FeatureSpec("f", 0)])
batch = program.prepare([torch.tensor([{id}])], [torch.tensor([0])])
program.forward([table], batch, torch.empty(1, dim))
print("done")
"""


def run(id: int) -> subprocess.CompletedProcess[str]:
    """Without the working folder on the path: the checkout there may have a build of its own."""
    return subprocess.run([sys.executable, "-P", "-c", FAULTY.format(id=id)], capture_output=True, text=True)


@pytest.mark.skipif(not SANITIZED, reason="not under SPARSELIFT_SANITIZE=1")
def test_a_read_past_the_end_of_a_table_is_stopped() -> None:
    inside, outside = run(3), run(4)
    assert (inside.returncode, inside.stdout) == (0, "done\n"), inside.stderr
    assert outside.returncode != 0 and outside.stdout == ""
    assert "AddressSanitizer: heap-buffer-overflow" in outside.stderr and "forward_block" in outside.stderr


def test_extensions_are_sanitized_where_that_was_asked_for() -> None:
    """A build that took the other's objects for its own shows here."""
    compiled = {path.name: path.read_bytes() for path in Path(sparselift.__file__).parent.rglob("*.so")}
    assert compiled
    for name, content in compiled.items():
        assert {symbol in content for symbol in (b"__asan_init", b"__ubsan_handle")} == {SANITIZED}, name
