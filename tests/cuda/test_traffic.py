"""Warps use the sectors of global memory that they touch, whatever the elements of a table are."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sparselift.kernels.base import FeatureSpec, Segment, TableKnobs, TableSpec, UpdateRule
from sparselift.kernels.interaction import CudaInteraction, InteractionSpec
from tests.simt.module import Simt

LEAST = 0.95
ROWS, LOOKUPS, BAGS = 50, 120, 23


def make_bags(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and offsets: bags of any length, an empty one among them."""
    generator = torch.Generator().manual_seed(dim)
    inner = torch.randint(0, LOOKUPS + 1, (BAGS - 2,), generator=generator).sort().values
    return torch.randint(0, ROWS, (LOOKUPS,), generator=generator), torch.cat([torch.zeros(2, dtype=torch.int64), inner])


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [32, 64, 128, 256, 512])
def test_forward(simt: Simt, dim: int, name: str) -> None:
    table, (ids, offsets) = torch.randn(ROWS, dim).to(getattr(torch, name)), make_bags(dim)
    program = simt.backend().compile([TableSpec("t", ROWS, dim, name)], [FeatureSpec("f", 0)])
    traffic = simt.traffic(lambda: program.look_up([table], [ids], [offsets]))
    assert traffic.load_bytes > 0 and traffic.store_bytes == BAGS * dim * 4
    assert traffic.load_efficiency >= LEAST
    assert traffic.store_efficiency >= LEAST


def test_a_table_may_be_read_an_element_at_a_time(simt: Simt) -> None:
    """As its own knobs say, beside a table that is read in vectors: no access of the two is one more than those of the other alone."""
    vectors, elements = TableKnobs("sort"), TableKnobs("sort", vector_bytes=4, bags_per_group=3)
    start, (ids, offsets), grad = torch.randn(ROWS, 32), make_bags(32), torch.randn(BAGS, 32)
    traffic = []
    for knobs in ((vectors,), (vectors, elements)):
        count = len(knobs)
        program = simt.backend().compile([TableSpec(f"t{t}", ROWS, 32, knobs=each) for t, each in enumerate(knobs)],
                                         [FeatureSpec(f"f{t}", t) for t in range(count)])
        tables, outputs = [start.clone() for _ in knobs], [torch.empty(BAGS, 32) for _ in knobs]
        batch = program.prepare([ids] * count, [offsets] * count)
        forward = simt.traffic(partial(program.forward, tables, batch, outputs))
        rules, segments = [UpdateRule("sgd", 0.1)] * count, [Segment(batch, [grad] * count)]
        update = simt.traffic(partial(program.update, tables, [None] * count, rules, segments))
        traffic.append((forward.load_bytes, update.store_bytes))
    assert traffic[0] == traffic[1] and all(traffic[0])
    assert torch.equal(*outputs) and torch.equal(*tables)


@pytest.mark.parametrize("name", ["float32", "float16"])
@pytest.mark.parametrize("coalesce", ["sort", "dense"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_update(simt: Simt, dim: int, kind: str, coalesce: str, name: str) -> None:
    table, (ids, offsets) = torch.randn(ROWS, dim).to(getattr(torch, name)), make_bags(dim)
    state = {"sgd": None, "adagrad": torch.ones(ROWS, dim), "rowwise_adagrad": torch.ones(ROWS)}[kind]
    program = simt.backend().compile([TableSpec("t", ROWS, dim, name, TableKnobs(coalesce))], [FeatureSpec("f", 0)])
    segments = [Segment(program.prepare([ids], [offsets]), torch.randn(BAGS, dim))]
    traffic = simt.traffic(lambda: program.update([table], [state], [UpdateRule(kind, 0.1, 1e-3)], segments))
    touched = len(ids.unique()) * dim
    assert traffic.store_bytes == touched * (table.element_size() + (4 if kind == "adagrad" else 0))
    assert traffic.load_bytes >= traffic.store_bytes
    assert traffic.load_efficiency >= LEAST
    assert traffic.store_efficiency >= LEAST


def test_interaction(simt: Simt) -> None:
    """Vectors and their gradients; the products, a column a lane, are no vector accesses."""
    spec = InteractionSpec(27, 64)
    vectors, grad = torch.randn(5, 27 * 64), torch.randn(5, spec.width)
    kernel, found = CudaInteraction(spec, simt.backend()), torch.empty(5, 27 * 64)
    forward = simt.traffic(lambda: kernel.forward([vectors], grad))
    backward = simt.traffic(lambda: kernel.backward([vectors], grad, [found]))
    assert forward.load_bytes == backward.load_bytes == backward.store_bytes == vectors.nbytes
    assert forward.load_efficiency == backward.load_efficiency == backward.store_efficiency == 1
