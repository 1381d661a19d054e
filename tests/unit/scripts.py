"""Scripts outside the package, as modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS, EXAMPLES = ROOT / "benchmarks", ROOT / "examples"
SHARED_BENCH = ROOT / ".." / "shared" / "bench"


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """The modules of these folders can be imported, and are forgotten afterwards: the next test sees none of what this one changed."""
    path, before, places = list(sys.path), set(sys.modules), {folder.resolve() for folder in folders}
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).resolve().parent in places:
                del sys.modules[name]
