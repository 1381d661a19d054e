"""What is said about the machine."""

import json
import os
from dataclasses import replace

import pytest
import torch

from sparselift import hardware as module
from sparselift.hardware import hardware
from sparselift.probe import probe, visit_rows


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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_probe_visits_the_rows_that_it_is_given(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        table, ids = _aligned(50, 48), torch.randperm(50)[:33].int()
        visit_rows(table, ids)
        assert not table.any()
        visit_rows(table, ids, update=True)
        assert torch.equal(table, torch.zeros(50, 48).index_fill_(0, ids.long(), 1))
        visit_rows(table, ids[:0], update=True, ahead=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("ids", "table", "error", "says"), [
    (torch.tensor([50]).int(), (50, 16), IndexError, "rows of a table of 50; got 50 to 50"),
    (torch.tensor([-1]).int(), (50, 16), IndexError, "got -1 to -1"),
    (torch.tensor([0]), (50, 16), ValueError, "contiguous int32 vector on the CPU; got torch.int64"),
    (torch.tensor([0]).int(), (50, 8), ValueError, r"whole cache lines .* got torch.float32 \(50, 8\)"),
])
def test_a_probe_touches_nothing_else(ids: torch.Tensor, table: tuple[int, int], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        visit_rows(_aligned(*table), ids, update=True)


def _aligned(rows: int, columns: int) -> torch.Tensor:
    memory = torch.zeros(rows * columns + 16)
    start = -memory.data_ptr() % 64 // 4
    return memory[start:start + rows * columns].view(rows, columns)
