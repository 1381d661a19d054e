"""What is said about the machine."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sparselift import hardware as module
from sparselift import probe as probing
from sparselift._probe import visit_rows
from sparselift.hardware import hardware
from sparselift.probe import probe, probe_rows


def test_this_machine():
    here = hardware()
    assert here.cpu and here.architecture and 1 <= here.cores <= os.cpu_count()
    assert here.torch_version == torch.__version__ and here.torch_threads == torch.get_num_threads()
    assert type(here.torch_version) is str, "a TorchVersion is no plain value, and equals none from a file"
    assert json.loads(json.dumps(here.to_dict())) == here.to_dict()
    assert here.cache_bytes <= here.cores * (here.l2_bytes + (4 << 20))


def test_the_fingerprint_is_of_the_machine_and_not_of_libraries():
    here = hardware()
    assert here.fingerprint == replace(here, torch_version="9.9", numpy_version="9", python_version="4", sparselift_version="7").fingerprint
    for change in ({"cpu": "other"}, {"isa": ()}, {"torch_threads": here.torch_threads + 1}, {"memory_bytes": 1}, {"huge_pages": "x"}):
        assert here.fingerprint != replace(here, **change).fingerprint


def test_what_linux_says_is_read(monkeypatch, tmp_path):
    files = {
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast CPU: the second\nflags\t\t: fpu avx2 fma avx512f\n\nprocessor\t: 1\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never", "/sys/fs/cgroup/memory.max": "1048576",
    }
    monkeypatch.setattr(module, "_read", lambda path: files.get(str(path), ""))
    here = hardware()
    assert (here.cpu, here.isa) == ("Fast CPU: the second", ("avx2", "fma", "avx512f"))
    assert (here.huge_pages, here.memory_bytes) == ("madvise", 1 << 20)
    assert (here.l1d_bytes, here.l2_bytes, here.l3_bytes) == (0, 0, 0)


def test_a_system_that_tells_nothing(monkeypatch):
    monkeypatch.setattr(module, "_read", lambda path: "")
    monkeypatch.setattr(module.platform, "processor", lambda: "")
    here = hardware()
    assert here.cpu == here.architecture and here.isa == () and here.cache_bytes == 0


def test_bandwidth_is_measured_once_and_leaves_random_state_alone():
    state = torch.get_rng_state()
    first = probe()
    assert min(first.stream_gbps, first.random_read_gbps, first.random_update_gbps) > 0
    assert probe() is first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megabytes instead of gigabytes: what is measured then is a cache."""
    monkeypatch.setattr(probing, "_SCATTERED_BYTES", 1 << 22)
    monkeypatch.setattr(probing, "_VISITED_BYTES", 1 << 18)
    probing._measure_rows.cache_clear()
    yield
    probing._measure_rows.cache_clear()


@pytest.mark.usefixtures("small_probe")
def test_rows_are_probed_by_whole_cache_lines() -> None:
    found = probe_rows(100)
    assert min(found.read_gbps, found.update_gbps, found.cached_gbps) > 0
    assert probe_rows(128) is found and probe_rows(4) is probe_rows(64) is not found
    with pytest.raises(ValueError, match="row_bytes must be at least 1; got 0"):
        probe_rows(0)


@pytest.mark.usefixtures("small_probe")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_probe_visits_the_rows_that_it_is_given(threads: int) -> None:
    table, ids = _aligned(50, 48), torch.randperm(50)[:33].int()
    visit_rows(table, ids, 8, False, threads)
    assert not table.any()
    visit_rows(table, ids, 8, True, threads)
    assert torch.equal(table, torch.zeros(50, 48).index_fill_(0, ids.long(), 1))


@pytest.mark.parametrize(("ids", "table", "error", "says"), [
    ([50], (50, 16), IndexError, "rows of a table of 50; got 50 to 50"), ([-1], (50, 16), IndexError, "got -1 to -1"),
    ([0], (50, 8), ValueError, "whole cache lines"),
])
def test_a_probe_touches_nothing_else(ids: list[int], table: tuple[int, int], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        visit_rows(_aligned(*table), torch.tensor(ids, dtype=torch.int32), 8, True, 1)


def _aligned(rows: int, columns: int) -> torch.Tensor:
    memory = torch.zeros(rows * columns + 16)
    start = -memory.data_ptr() % 64 // 4
    return memory[start:start + rows * columns].view(rows, columns)
