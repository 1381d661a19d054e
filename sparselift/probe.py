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
from sparselift.memory import set_huge_pages

_BUFFER_BYTES = 256 << 20          # beyond a core's share of cache, and small enough to map in a tenth of a second
_ROW_FLOATS = 64                   # 256 bytes, a usual embedding row
_ROWS_A_RUN = 1 << 16
_RUNS = 4                          # the first is not timed
_LINE_BYTES = 64
_SCATTERED_BYTES = 1 << 30         # of a table whose rows no cache holds, even on a socket with hundreds of megabytes of it
_CACHED_BYTES = 256 << 10          # of one whose rows a core's own caches hold
_VISITED_BYTES = 16 << 20          # a run
_AHEAD = (8, 16, 32, 64, 128)      # prefetch distances; the best one counts


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


@dataclass(frozen=True, slots=True)
class RowBandwidth:
    """Bytes of rows a second, in 1e9, at the best prefetch distance, in huge pages where the system gives them. What no kernel can beat."""

    read_gbps: float               # scattered rows that no cache holds: bytes of the rows
    update_gbps: float             # the same read, changed and written back: twice the bytes of the rows
    cached_gbps: float             # rows that a core's own caches hold: bytes of the rows


def probe_rows(row_bytes: int) -> RowBandwidth:
    """The bandwidth of rows of this width with the current number of torch threads; measured once a process, in some seconds.

    Rows narrower than a cache line, or no multiple of one, cost whole lines: the width is rounded up. Takes 1 GiB of memory while it runs.

    Raises
    ------
    ValueError    a width below 1
    KernelError   the extension is not built
    """
    if row_bytes < 1:
        raise ValueError(f"row_bytes must be at least 1; got {row_bytes}")
    return _measure_rows(-(-row_bytes // _LINE_BYTES) * _LINE_BYTES, torch.get_num_threads())


@cache
def _measure_rows(row_bytes: int, threads: int) -> RowBandwidth:
    generator = torch.Generator().manual_seed(0)
    memory = torch.empty(_SCATTERED_BYTES // 4 + _LINE_BYTES, dtype=torch.float32)
    set_huge_pages(memory, True)
    memory.zero_()
    start = -memory.data_ptr() % _LINE_BYTES // 4
    rows = _SCATTERED_BYTES // row_bytes
    table = memory[start:start + rows * row_bytes // 4].view(rows, -1)
    visits = max(_VISITED_BYTES // row_bytes, 1)
    scattered = torch.randperm(rows, generator=generator)[:_RUNS * visits].int().view(_RUNS, -1)   # no row twice: threads update them
    cached = torch.randint(max(_CACHED_BYTES // row_bytes, 1), (_RUNS, visits), generator=generator, dtype=torch.int32)
    gbps = visits * row_bytes / 1e9
    return RowBandwidth(
        read_gbps=gbps / _fastest_visit_s(table, scattered, False, threads),
        update_gbps=2 * gbps / _fastest_visit_s(table, scattered, True, threads),
        cached_gbps=gbps / _fastest_visit_s(table, cached, False, threads))


def _fastest_visit_s(table: Tensor, ids: Tensor, update: bool, threads: int) -> float:
    visit = _extension().visit_rows
    return min(_fastest_s(lambda run, ahead=ahead: visit(table, ids[run], ahead, update, threads)) for ahead in _AHEAD)


def _extension() -> ModuleType:
    try:
        return import_module("sparselift._probe")
    except ImportError as error:
        raise KernelError(f"the compiled extension sparselift._probe is missing ({error}); "
                          "build it with: pip install -e . --no-build-isolation") from error
