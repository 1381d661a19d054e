"""Measures this machine's memory: how fast it streams, and how fast it reads and updates scattered rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from sparselift.errors import KernelError

_BUFFER_BYTES = 256 << 20          # beyond a core's share of cache, and small enough to map in a tenth of a second
_ROW_FLOATS = 64                   # 256 bytes, a usual embedding row
_ROWS_A_RUN = 1 << 16
_RUNS = 4                          # the first is not timed


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes moved a second, in 1e9, with torch's own operators and threads. For predictions; measured steps decide."""

    stream_gbps: float             # copy: bytes read + bytes written
    random_read_gbps: float        # rows of 256 bytes gathered: bytes of the rows
    random_update_gbps: float      # rows of 256 bytes read, changed and written back: twice the bytes of the rows


def probe() -> Bandwidth:
    """The bandwidth with the current number of torch threads; measured once a process and thread count, in under a second."""
    return _measure(torch.get_num_threads())


@cache
def _measure(threads: int) -> Bandwidth:
    generator = torch.Generator().manual_seed(0)               # leaves the user's random state alone
    with torch.no_grad():
        table = torch.zeros(_BUFFER_BYTES // (4 * _ROW_FLOATS), _ROW_FLOATS)
        low, high = table.chunk(2)
        # Other rows in every run: those of the last one may still be in a cache.
        rows = torch.randint(0, len(table), (_RUNS, _ROWS_A_RUN), generator=generator)
        values = torch.zeros(_ROWS_A_RUN, _ROW_FLOATS)
        return Bandwidth(
            stream_gbps=_BUFFER_BYTES / _fastest_s(lambda run: high.copy_(low)) / 1e9,
            random_read_gbps=values.nbytes / _fastest_s(lambda run: torch.index_select(table, 0, rows[run], out=values)) / 1e9,
            random_update_gbps=2 * values.nbytes / _fastest_s(lambda run: table.index_add_(0, rows[run], values)) / 1e9)


def _fastest_s(work: Callable[[int], object]) -> float:
    seconds = []
    for run in range(_RUNS):
        start = time.perf_counter()
        work(run)
        seconds.append(time.perf_counter() - start)
    return max(min(seconds[1:]), 1e-9)


def visit_rows(table: Tensor, ids: Tensor, update: bool = False, ahead: int = 32) -> None:
    """Read the rows `ids` of a table and do nothing with them, or add 1 to them: the least that a lookup or an update can do.

    Runs on torch's threads.

    Parameters
    ----------
    table   (R, D) float32, contiguous, at a 64-byte boundary, D a multiple of 16: rows are whole cache lines
    ids     (K,) int32, contiguous; for an update no id twice, since several threads may write
    ahead   rows before its use that a row is prefetched; 0: never

    Raises
    ------
    ValueError    another layout
    IndexError    an id that is no row
    KernelError   the extension is not built
    """
    _extension().visit_rows(table, ids, ahead, update, torch.get_num_threads())


def _extension() -> ModuleType:
    try:
        return import_module("sparselift._probe")
    except ImportError as error:
        raise KernelError(f"the compiled extension sparselift._probe is missing ({error}); "
                          "build it with: pip install -e . --no-build-isolation") from error
