"""Warps use the sectors of global memory that they touch, whatever the elements of a table are, where its rows are whole sectors.

Under one schedule: which lanes come to an access together does not depend on who is first.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sparselift.kernels.base import FeatureSpec, Segment, TableKnobs, TableSpec, UpdateRule
from sparselift.kernels.interaction import CudaInteraction, InteractionSpec
from tests.simt.module import Simt, Traffic

LEAST = 0.95
ROWS, LOOKUPS, BAGS = 50, 120, 23
DIMS = (32, 48, 96, 128, 256, 272, 512, 1024)      # one pass of a warp over a row, several, and a last one that is not whole
DTYPES = ("float32", "float16", "bfloat16")
UPDATES = {
    "sgd": UpdateRule("sgd", 0.1), "adagrad": UpdateRule("adagrad", 0.1, 1e-3), "adam": UpdateRule("adam", 0.1, 1e-3, betas=(0.9, 0.99)),
    "rowwise_adagrad": UpdateRule("rowwise_adagrad", 0.1, 1e-3), "decaying": UpdateRule("rowwise_adagrad", 0.1, 1e-3, weight_decay=0.5),
    "by chance": UpdateRule("adagrad", 0.1, 1e-3, noise_key=7),
}
STATES = {"sgd": lambda dim: None, "adagrad": lambda dim: torch.ones(ROWS, dim), "rowwise_adagrad": lambda dim: torch.ones(ROWS),
          "adam": lambda dim: (torch.ones(ROWS, dim), torch.ones(ROWS, dim))}


@pytest.fixture
def simt(emulator: Simt) -> Simt:
    emulator.set_schedule("forward")
    return emulator


def make_bags(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and offsets: bags of any length, an empty one among them."""
    generator = torch.Generator().manual_seed(dim)
    inner = torch.randint(0, LOOKUPS + 1, (BAGS - 2,), generator=generator).sort().values
    return torch.randint(0, ROWS, (LOOKUPS,), generator=generator), torch.cat([torch.zeros(2, dtype=torch.int64), inner])


def check_efficiency(traffic: Traffic) -> None:
    assert traffic.load_efficiency >= LEAST
    assert traffic.store_efficiency >= LEAST


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("pooling", ["sum", "mean", "max", "none"])
def test_forward(simt: Simt, pooling: str, name: str) -> None:
    """Every row, each used once, is read, and every output written, in accesses of 16 bytes; maxima write a position beside each."""
    for dim in DIMS:
        table, ids, (_, offsets) = torch.randn(LOOKUPS, dim).to(getattr(torch, name)), torch.arange(LOOKUPS).flip(0), make_bags(dim)
        program = simt.backend().compile([TableSpec("t", LOOKUPS, dim, name)], [FeatureSpec("f", 0, pooling)])
        bags = 1 if pooling == "none" else offsets
        traffic = simt.traffic(partial(program.look_up, [table], [ids], [bags]))
        assert traffic.load_bytes == LOOKUPS * dim * table.element_size()
        outputs = LOOKUPS if pooling == "none" else BAGS
        assert traffic.store_bytes == outputs * dim * (8 if pooling == "max" else 4)
        check_efficiency(traffic)


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


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in UPDATES for name in DTYPES
                                            if name != "float32" or UPDATES[kind].noise_key is None])
@pytest.mark.parametrize("coalesce", ["sort", "dense"])
def test_update(simt: Simt, kind: str, coalesce: str, name: str) -> None:
    """Touched rows and their state are written once."""
    rule = UPDATES[kind]
    for dim in DIMS:
        table, (ids, offsets) = torch.randn(ROWS, dim).to(getattr(torch, name)), make_bags(dim)
        program = simt.backend().compile([TableSpec("t", ROWS, dim, name, TableKnobs(coalesce))], [FeatureSpec("f", 0)])
        segments = [Segment(program.prepare([ids], [offsets]), torch.randn(BAGS, dim))]
        traffic = simt.traffic(partial(program.update, [table], [STATES[rule.kind](dim)], [rule], segments))
        state_floats = {"adagrad": 1, "adam": 2}.get(rule.kind, 0)
        assert traffic.store_bytes == len(ids.unique()) * dim * (table.element_size() + 4 * state_floats)
        assert traffic.load_bytes >= traffic.store_bytes
        check_efficiency(traffic)


@pytest.mark.parametrize("name", DTYPES)
def test_update_of_maxima(simt: Simt, name: str) -> None:
    """Gradients are read with the positions that they are of: of bags of one id each, and each another one."""
    for dim in DIMS:
        table, ids = torch.randn(LOOKUPS, dim).to(getattr(torch, name)), torch.arange(LOOKUPS).flip(0)
        program = simt.backend().compile([TableSpec("t", LOOKUPS, dim, name, TableKnobs("sort"))], [FeatureSpec("f", 0, "max")])
        batch = program.prepare([ids], [1])
        program.forward([table], batch, torch.empty(LOOKUPS, dim))
        segments = [Segment(batch, torch.randn(LOOKUPS, dim))]
        traffic = simt.traffic(partial(program.update, [table], [None], [UpdateRule("sgd", 0.1)], segments))
        assert traffic.load_bytes == LOOKUPS * dim * (4 + 4 + table.element_size())
        check_efficiency(traffic)


@pytest.mark.parametrize(("name", "dim", "efficiency"), [("float32", 36, 144 / 160), ("float32", 100, 400 / 416), ("float16", 40, 80 / 96),
                                                         ("bfloat16", 72, 144 / 160)])
def test_rows_that_begin_inside_sectors(simt: Simt, name: str, dim: int, efficiency: float) -> None:
    """What there is to reach then: see docs/kernels.md. No neighbours are read together here, which would share sectors."""
    table, ids = torch.randn(LOOKUPS, dim).to(getattr(torch, name)), torch.arange(LOOKUPS) * 37 % LOOKUPS
    program = simt.backend().compile([TableSpec("t", LOOKUPS, dim, name)], [FeatureSpec("f", 0)])
    traffic = simt.traffic(lambda: program.look_up([table], [ids], [make_bags(dim)[1]]))
    assert traffic.load_bytes == LOOKUPS * dim * table.element_size()
    assert traffic.load_efficiency == pytest.approx(efficiency, rel=0.01)


def test_interaction(simt: Simt) -> None:
    """Vectors and their gradients; the products, a column a lane, are no vector accesses."""
    spec = InteractionSpec(27, 64)
    vectors, grad = torch.randn(5, 27 * 64), torch.randn(5, spec.width)
    kernel, found = CudaInteraction(spec, simt.backend()), torch.empty(5, 27 * 64)
    forward = simt.traffic(lambda: kernel.forward([vectors], grad))
    backward = simt.traffic(lambda: kernel.backward([vectors], grad, [found]))
    assert forward.load_bytes == backward.load_bytes == backward.store_bytes == vectors.nbytes
    assert forward.load_efficiency == backward.load_efficiency == backward.store_efficiency == 1
