"""Every kernel that ships, with every choice of its template arguments, has run over the emulator."""

from __future__ import annotations

import csv
from itertools import product

import torch

from sparselift.kernels.base import WEIGHT_DTYPES, FeatureSpec, Segment, TableKnobs, TableSpec, UpdateRule
from sparselift.kernels.cuda import KernelShape
from sparselift.kernels.exchange import WIRE_DTYPES, PackedLayout, PackedPart, RegroupSpec, RowOwners
from sparselift.kernels.interaction import CudaInteraction, InteractionSpec
from tests.simt.emulator import ROOT
from tests.simt.module import Simt

LONG = 40          # more than a chunk


def run_bags(simt: Simt, dtype: str, coalesce: str, loads: int) -> None:
    """Sums and maxima of long bags, an update of rows that are used often, weights' gradients, and gradients handed out."""
    backend = simt.backend(KernelShape(chunk_lookups=32, loads_in_flight=loads))
    table = TableSpec("t", 3, 16, dtype, TableKnobs(coalesce))
    program = backend.compile([table], [FeatureSpec("f", 0, weighted=True), FeatureSpec("g", 0, "max")])
    weight, ids = torch.ones(3, 16, dtype=getattr(torch, dtype)), torch.zeros(LONG, dtype=torch.int64)
    batch = program.prepare([ids, ids], [LONG, LONG], [torch.ones(LONG), None])
    outputs = [torch.empty(1, 16), torch.empty(1, 16)]
    program.forward([weight], batch, outputs)
    assert outputs[0].unique().tolist() == [LONG] and outputs[1].unique().tolist() == [1]
    assert program.weight_grad([weight], batch, 0, torch.ones(1, 16)).unique().tolist() == [16]
    segments = [Segment(batch, [torch.ones(1, 16), None])]
    program.update([weight], [None], [UpdateRule("sgd", 0.5)], segments)
    assert weight[0].unique().tolist() == [1 - LONG / 2]
    if dtype != "float32":
        program.update([weight], [None], [UpdateRule("sgd", 0.5, noise_key=7)], segments)
        assert weight[0].unique().tolist() == [1 - LONG]       # which is a number of the dtype, and has no chance
    assert program.coalesced_grad(0, segments)[1].unique().tolist() == [LONG]
    assert program.expanded_grad(0, segments)[1].shape == (LONG, 16)
    assert batch.indices(0).equal(ids)


def run_interaction(simt: Simt) -> None:
    kernel, vectors, found = CudaInteraction(InteractionSpec(3, 4), simt.backend()), torch.ones(2, 12), torch.empty(2, 12)
    grad = torch.empty(2, 7)
    kernel.forward([vectors], grad)
    kernel.backward([vectors], grad, [found])
    assert grad.tolist() == [[1] * 4 + [4] * 3] * 2


def run_exchange(simt: Simt) -> None:
    exchange, ids = simt.exchange(), torch.tensor([4, 1, 4])
    assert exchange.dedup(ids, 5).trimmed().tolist() == [1, 4]
    buckets = exchange.bucketize(ids, torch.tensor([0, 2, 3]), RowOwners(5, 2))
    assert buckets.rows.tolist() == [1, 1, 1] and buckets.lengths.tolist() == [[1, 0], [1, 1]]
    layout = PackedLayout(tuple(PackedPart(2, 4, dtype) for dtype in WIRE_DTYPES))
    given, taken, joined = [torch.ones(2, 4) for _ in WIRE_DTYPES], [torch.empty(2, 4) for _ in WIRE_DTYPES], torch.empty(2, 16)
    exchange.unpack(layout, exchange.pack(layout, given), taken)
    exchange.regroup(RegroupSpec(((4,),) * 4, ((3, 1, 0, 2),)), taken, [joined])
    exchange.synchronize()
    assert joined.unique().tolist() == [1]


def run_many_features(simt: Simt) -> None:
    """More structs than the smaller put holds."""
    count = 40
    program = simt.backend().compile([TableSpec("t", 3, 4)], [FeatureSpec(f"f{f}", 0) for f in range(count)])
    assert program.prepare([torch.tensor([2])] * count, [1] * count).num_bags == (1,) * count


def test_every_instantiation_has_run(emulator: Simt) -> None:
    emulator.set_schedule("forward")
    emulator.take_launches()
    for dtype, (coalesce, loads) in product(WEIGHT_DTYPES, [("sort", 4), ("dense", 8)]):
        run_bags(emulator, dtype, coalesce, loads)
    run_interaction(emulator)
    run_exchange(emulator)
    run_many_features(emulator)
    with (ROOT / "csrc/cuda/budget.csv").open(newline="") as file:
        shipped = {row["name"] for row in csv.DictReader(file)}
    assert emulator.take_launches().keys() == shipped
