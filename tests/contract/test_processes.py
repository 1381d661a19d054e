"""Threads, forked children and tables beyond 2**31 elements: every kernel backend at sizes that take its parallel path."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from itertools import product

import numpy as np
import pytest
import torch

from sparselift.kernels.base import UPDATE_RULES, FeatureSpec, KernelBackend, Segment, TableKnobs, TableSpec, UpdateRule
from tests.contract.naive import fresh_state, parts_of

SGD = UpdateRule("sgd", lr=0.5)


def device_of(backend: KernelBackend) -> torch.device:
    """Where its tensors are."""
    return getattr(backend, "device", torch.device("cpu"))


class TestProcesses:
    @pytest.mark.parametrize(("kind", "coalesce"),
                             [*product(UPDATE_RULES, ("chain", "dense")), ("rowwise_adagrad", "sort"), ("sgd", "none")])
    def test_the_same_bits_at_any_thread_count(self, backend, kind, coalesce):
        """Large enough for a parallel region; one table outweighs the others, so that its rows are split among the threads."""
        if coalesce not in backend.coalesce_methods:
            return
        rule = UpdateRule(kind, lr=0.1, eps=1e-3, betas=(0.9, 0.99))
        knobs = TableKnobs(coalesce)
        generator = torch.Generator().manual_seed(7)
        tables = [TableSpec("large", 700, 32, knobs=knobs), TableSpec("small", 40, 3, knobs=dataclasses.replace(knobs, dedup=True)),
                  TableSpec("other", 90, 20, knobs=dataclasses.replace(knobs, partition="table"))]
        features = [FeatureSpec("sum", 0, "sum", 0, padding_idx=5), FeatureSpec("mean", 1, "mean", 32),
                    FeatureSpec("weighted", 2, "sum", 35, weighted=True), FeatureSpec("again", 0, "sum", 55)]
        count = 400 if backend.name == "cuda" else 4000        # a device has no parallel region to fill, and the emulator takes its time
        ids = [torch.randint(0, tables[f.table].rows, (count,), generator=generator) for f in features]
        starts = torch.randint(0, count + 1, (599,), generator=generator).sort().values
        offsets = [torch.cat([torch.zeros(1, dtype=torch.int64), starts])] * 4
        weights = [None, None, torch.randn(count, generator=generator), None]
        values = [torch.randn(t.rows, t.dim, generator=generator) for t in tables]
        grad = torch.randn(600, 87, generator=generator)
        results = []
        for threads in (1, 2) if backend.name == "cuda" else (1, 2, 4, 3):
            torch.set_num_threads(threads)
            program = backend.compile(tables, features)
            batch = program.prepare(ids, offsets, weights)
            mine, out = [v.clone() for v in values], torch.empty(600, 87)
            states = [fresh_state(table, rule) for table in tables]
            program.forward(mine, batch, out)
            slope = program.weight_grad(mine, batch, 2, grad[:, 35:55])
            program.update(mine, states, [rule] * 3, [Segment(batch, grad), Segment(batch, grad, [0.3, 0.5, 0.7])])
            results.append([out, slope, *mine, *(part for state in states for part in parts_of(state))])
            assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1])), threads
        assert not torch.equal(results[0][2], values[0])

    def test_in_a_forked_child(self, backend):
        """The threads of the parent's pool do not exist in a child: kernels must not wait for them."""
        if device_of(backend).type == "cuda":
            pytest.skip("a forked child cannot use its parent's device")
        torch.set_num_threads(2)
        spec, ids, starts = TableSpec("t", 500, 32), torch.arange(6000) % 500, torch.arange(0, 6000, 5)
        program = backend.compile([spec], [FeatureSpec("f", 0)])
        table, grad = torch.ones(500, 32), torch.ones(1200, 32)

        def step() -> float:
            batch = program.prepare([ids], [starts])
            out = torch.empty(1200, 32)
            program.forward([table], batch, out)
            program.update([table], [None], [SGD], [Segment(batch, grad)])
            return out[0, 0].item() + table[0, 0].item()

        assert step() == 5 + 1 - 0.5 * 12
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1 if backend.name == "reference" else 2)
            os._exit(0 if step() == 5 * -5 - 5 - 0.5 * 12 else 1)
        deadline = time.monotonic() + 30
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0), "the child hung" if ended[0] == 0 else "the child computed something else"

    @pytest.mark.parametrize("kind", ["sgd", "adagrad"])
    def test_beyond_two_to_the_31_elements(self, backend, kind, tmp_path):
        """The last row of a table of more than 2**31 elements: on the host in a file with a hole where the rest would be."""
        rows, dim, device = 2**31 // 64 + 11, 64, device_of(backend)
        table, state = (torch.from_numpy(np.memmap(tmp_path / name, np.float32, "w+", shape=(rows, dim))) if device.type == "cpu"
                        else torch.zeros(rows, dim, device=device) for name in ("table", "state"))
        table[-1], table[0], state[-1] = torch.arange(64.0), 7.0, 0.0
        program = backend.compile([TableSpec("t", rows, dim)], [FeatureSpec("f", 0)])
        batch = program.prepare([torch.tensor([rows - 1, 0, rows - 1])], [torch.tensor([0])])
        out, grad = torch.empty(1, dim), torch.full((1, dim), 2.0)
        program.forward([table], batch, out)
        assert torch.equal(out[0], 2 * torch.arange(64.0) + 7)
        program.update([table], [state if kind == "adagrad" else None], [UpdateRule(kind, 0.5, eps=4.0)], [Segment(batch, grad)])
        step = 0.5 * 4 / (4 + 4 if kind == "adagrad" else 1)
        assert torch.equal(table[-1].cpu(), torch.arange(64.0) - step) and table[1:3].abs().max() == 0
        assert state[-1, 0] == (16 if kind == "adagrad" else 0)
