"""What surrounds an exchange, run over the reference, the CPU's instruction sets, and the CUDA kernels on the emulator or a device."""

from __future__ import annotations

import pickle
from array import array
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from sparselift.errors import DtypeError, ExchangeError
from sparselift.kernels import available_backends, get_exchange
from sparselift.kernels.exchange import (
    WIRE_DTYPES,
    Buckets,
    ExchangeKernels,
    PackedLayout,
    PackedPart,
    RegroupSpec,
    RowOwners,
)
from tests.contract.conftest import emulates
from tests.simt.module import Simt

SHAPES = [(7, 64), (0, 8), (1, 1), (33, 3), (3, 130), (4, 0), (2, 16)]
# Where float16 and bfloat16 round, end, and begin; and NaNs of both signs, quiet and signalling.
SPECIAL_BITS = [0, 1, 0x33000000, 0x33000001, 0x387FFFFF, 0x38800000, 0x3F800800, 0x3F801000, 0x3F801800, 0x3F808000, 0x3F818000,
                0x477FEFFF, 0x477FF000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7F812345, 0x7FC00000, 0x7FFFFFFF]


@pytest.fixture
def exchange(request: pytest.FixtureRequest, backend_name: str) -> ExchangeKernels:
    if not emulates(backend_name):
        return get_exchange(backend_name)
    emulator: Simt = request.getfixturevalue("emulator")
    return emulator.exchange()


def on(exchange: ExchangeKernels, tensor: Tensor) -> Tensor:
    return tensor.to(exchange.device)


def random_matrix(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layout_of(matrices: list[Tensor], dtypes: list[str]) -> PackedLayout:
    return PackedLayout(tuple(PackedPart(*matrix.shape, dtype) for matrix, dtype in zip(matrices, dtypes, strict=True)))


def round_trip(exchange: ExchangeKernels, matrices: list[Tensor], dtypes: list[str]) -> tuple[Tensor, list[Tensor]]:
    """The buffer, over bytes that are not zero, and what comes out of it."""
    layout = layout_of(matrices, dtypes)
    room = on(exchange, torch.full((layout.nbytes + 48,), 0xAA, dtype=torch.uint8))
    buffer = exchange.pack(layout, [on(exchange, matrix) for matrix in matrices], room)
    outputs = [on(exchange, torch.full(matrix.shape, 7e7)) for matrix in matrices]
    exchange.unpack(layout, buffer, outputs)
    exchange.synchronize()
    assert (room[layout.nbytes:] == 0xAA).all()
    return buffer.cpu(), [output.cpu() for output in outputs]


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def looped_buckets(ids: list[int], bounds: list[int], owners: RowOwners) -> tuple[list[int], list[int], list[list[int]]]:
    """Rows, sources and lengths by plain loops."""
    def owner(row: int) -> int:
        if not 0 <= row < owners.rows:
            return owners.count
        return row % owners.count if owners.layout == "modulo" else row // owners.rows_per_owner

    sources = sorted(range(len(ids)), key=lambda k: owner(ids[k]))
    own = [row // owners.count if owners.layout == "modulo" else row % owners.rows_per_owner for row in ids]
    lengths = [[sum(owner(ids[k]) == rank for k in range(*bag)) for bag in pairwise(bounds)] for rank in range(owners.count)]
    return [-1 if owner(ids[k]) == owners.count else own[k] for k in sources], sources, lengths


def check_buckets(found: Buckets, ids: list[int], bounds: list[int], owners: RowOwners) -> None:
    rows, sources, lengths = looped_buckets(ids, bounds, owners)
    assert found.rows.tolist() == rows and found.sources.tolist() == sources
    assert found.lengths.shape == (owners.count, len(bounds) - 1) and found.lengths.tolist() == lengths
    assert found.places[found.sources.long()].tolist() == list(range(len(ids)))


class TestDedup:
    @pytest.mark.parametrize(("count", "rows"), [(0, 5), (1, 1), (31, 7), (256, 1000), (1500, 3), (700, 2**31 - 1), (300, 2**62),
                                                 (40, 2**32)])
    def test_distinct_ids_ascend(self, exchange: ExchangeKernels, count: int, rows: int) -> None:
        ids = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(count))
        want, inverse = torch.unique(ids, return_inverse=True)
        for dtype in (torch.int64, torch.int32) if rows < 2**31 else (torch.int64,):
            found = exchange.dedup(on(exchange, ids.to(dtype)), rows)
            assert torch.equal(found.trimmed().cpu(), want) and torch.equal(found.slots.long().cpu(), inverse)
            assert int(found.count) == len(want) and found.slots.dtype == torch.int32

    def test_ids_that_are_no_row_are_left_out(self, exchange: ExchangeKernels) -> None:
        found = exchange.dedup(on(exchange, torch.tensor([5, -1, 3, 9, 5, 10, -2**40, 2**62])), 10)
        assert found.trimmed().tolist() == [3, 5, 9] and found.slots.tolist() == [1, -1, 0, 2, 1, -1, -1, -1]
        far = exchange.dedup(on(exchange, torch.tensor([0, 2**31 - 1], dtype=torch.int32)), 2**40)
        assert far.slots.tolist() == [0, 1] and far.trimmed().tolist() == [0, 2**31 - 1]
        nobody = exchange.dedup(on(exchange, torch.tensor([0, -1], dtype=torch.int32)), 0)
        assert int(nobody.count) == 0 and nobody.slots.tolist() == [-1, -1]

    def test_ids_may_lie_apart(self, exchange: ExchangeKernels) -> None:
        found = exchange.dedup(on(exchange, torch.tensor([4, 99, 1, 99, 4, 99]))[::2], 5)
        assert found.trimmed().tolist() == [1, 4] and found.slots.tolist() == [1, 0, 1]


class TestBucketize:
    @pytest.mark.parametrize("layout", ["block", "modulo"])
    @pytest.mark.parametrize(("rows", "count"), [(23, 1), (23, 2), (23, 5), (3, 7), (2**40, 3)])
    def test_ids_by_owner(self, exchange: ExchangeKernels, rows: int, count: int, layout: str) -> None:
        owners = RowOwners(rows, count, layout)
        for seed, bounds in enumerate([[0], [0, 0], [0, 4, 4, 11, 120], [0, 1, 2, 3]]):
            ids = np.random.default_rng(seed).integers(-1, min(rows, 2**40) + 1, bounds[-1]).tolist()
            for id_type, offset_type in ((torch.int64, torch.int32), (torch.int32, torch.int64)):
                if id_type == torch.int64 or rows < 2**31:
                    found = exchange.bucketize(on(exchange, torch.tensor(ids, dtype=id_type)),
                                               on(exchange, torch.tensor(bounds, dtype=offset_type)), owners)
                    check_buckets(found, ids, bounds, owners)

    def test_what_comes_back_is_put_back(self, exchange: ExchangeKernels) -> None:
        """Rows that owners look up, in the order that ids went out in."""
        table, ids, owners = random_matrix((23, 4)), torch.tensor([7, 0, 22, 7, 12, 3]), RowOwners(23, 4, "modulo")
        found = exchange.bucketize(on(exchange, ids), on(exchange, torch.tensor([0, 6])), owners)
        shards = [table[rank::4] for rank in range(4)]
        sent = found.lengths.sum(1).tolist()
        answers = torch.cat([shard[rows] for shard, rows in zip(shards, found.rows.cpu().split(sent))])
        assert torch.equal(answers[found.places.long().cpu()], table[ids])

    @pytest.mark.parametrize(("bounds", "message"), [
        ([1, 3], "start at 0; got 1"), ([0, 2, 1, 3], "must not decrease; got 1 after 2 at position 2"),
        ([0, 2], r"number of ids \(3\); got 2"), ([0, 4], "offset 4 at position 1 passes the 3 ids"),
        ([0, -1, 3], "got -1 after 0 at position 1"), ([0, 2**32, 3], "offset 4294967296 at position 1 passes the 3 ids"),
        ([3], "start at 0; got 3"), ([0], r"number of ids \(3\); got 0")])
    def test_wrong_offsets_are_named(self, exchange: ExchangeKernels, bounds: list[int], message: str) -> None:
        ids, offsets = on(exchange, torch.tensor([0, 1, 2])), on(exchange, torch.tensor(bounds))
        if exchange.name == "cuda":                            # nothing waits to look at them: lengths mean nothing, the rest is right
            found = exchange.bucketize(ids, offsets, RowOwners(3, 2))
            assert found.rows.tolist() == [0, 1, 0] and found.sources.tolist() == found.places.tolist() == [0, 1, 2]
            return
        with pytest.raises(ValueError, match=message):
            exchange.bucketize(ids, offsets, RowOwners(3, 2))


class TestPack:
    @pytest.mark.parametrize("dtype", WIRE_DTYPES)
    def test_every_backend_has_the_reference_buffer(self, exchange: ExchangeKernels, dtype: str) -> None:
        """Bit for bit, header and gaps included, from rows that lie apart, at any address."""
        wide = random_matrix((40, 100), 1)
        matrices = [random_matrix(shape, seed) for seed, shape in enumerate(SHAPES)] + [wide[:, 3:20], wide[:9, 4:36], wide[:6].T]
        buffer, outputs = round_trip(exchange, matrices, [dtype] * len(matrices))
        layout = layout_of(matrices, [dtype] * len(matrices))
        reference = get_exchange("reference")
        assert torch.equal(buffer, reference.pack(layout, matrices))
        assert bytes(buffer[:len(layout.header())].tolist()) == layout.header() and PackedLayout.read(buffer) == layout
        wants = [torch.empty(matrix.shape) for matrix in matrices]
        reference.unpack(layout, buffer, wants)
        assert all(map(torch.equal, outputs, wants))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_conversions_have_torchs_bits(self, exchange: ExchangeKernels, dtype: str) -> None:
        magnitudes = np.array(SPECIAL_BITS, dtype=np.uint32)
        numbers = torch.from_numpy(np.concatenate([magnitudes, magnitudes | np.uint32(1 << 31)]).view(np.float32).copy())
        layout = PackedLayout((PackedPart(1, len(numbers), dtype),))
        buffer = exchange.pack(layout, [on(exchange, numbers[None])]).cpu()
        half = numbers.to(getattr(torch, dtype))
        assert bits(buffer[layout.offsets[0]:][:2 * len(numbers)]) == bits(half)
        back = on(exchange, torch.empty(1, len(numbers)))
        exchange.unpack(layout, on(exchange, buffer), [back])
        assert torch.equal(back[0].cpu().nan_to_num(nan=7.5e7), half.float().nan_to_num(nan=7.5e7))

    def test_int8_is_within_its_bound(self, exchange: ExchangeKernels) -> None:
        matrices = [random_matrix(shape, 3) * 3 - 1 for shape in ((9, 64), (4, 1), (6, 37), (2, 16))]
        matrices += [torch.full((3, 12), 2.5), random_matrix((4, 20), 4) * 1e-41, random_matrix((4, 20), 5) * 1e37]
        matrices += [1e6 + random_matrix((3, 9), 6), torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), torch.tensor([[-1.7e38, 1.7e38, 0.0]])]
        _, outputs = round_trip(exchange, matrices, ["int8"] * len(matrices))
        for out, matrix in zip(outputs, matrices):
            exact, low, high = matrix.double(), matrix.double().amin(1, keepdim=True), matrix.double().amax(1, keepdim=True)
            bound = (high - low) / 510 * (1 + 2**-12) + 2**-21 * exact.abs().amax(1, keepdim=True) + 2**-118
            assert ((out.double() - exact).abs() <= bound).all()
            assert torch.equal(out.amin(1, keepdim=True).double(), low)
        assert torch.equal(outputs[4], matrices[4])

    def test_int8_rows_that_are_not_finite_are_nan(self, exchange: ExchangeKernels) -> None:
        """They alone, wherever the culprit is."""
        matrix = random_matrix((12, 37), 7)
        wrong = {1: (0, torch.nan), 4: (36, torch.inf), 6: (17, -torch.inf), 9: (33, torch.nan), 10: (5, 3.4e38)}
        matrix[10, 6] = -3.4e38
        for row, (column, value) in wrong.items():
            matrix[row, column] = value
        buffer, [out] = round_trip(exchange, [matrix], ["int8"])
        assert torch.equal(out.isnan().all(1), out.isnan().any(1))
        assert torch.nonzero(out.isnan().any(1)).flatten().tolist() == sorted(wrong)
        assert torch.equal(buffer, get_exchange("reference").pack(layout_of([matrix], ["int8"]), [matrix]))

    def test_rows_come_out_as_columns_of_whoever_reads_them(self, exchange: ExchangeKernels) -> None:
        matrices = [torch.arange(4.0 * dim).view(4, dim) for dim in (5, 8, 2)]
        layout = layout_of(matrices, ["float16", "float32", "bfloat16"])
        consumer = on(exchange, torch.full((4, 18), 5.0))
        exchange.unpack(layout, exchange.pack(layout, [on(exchange, matrix) for matrix in matrices]),
                        [consumer[:, 1:6], consumer[:, 8:16], consumer[:, 6:8]])
        gap = torch.full((4, 1), 5.0)
        assert torch.equal(consumer.cpu(), torch.cat([gap, matrices[0], matrices[2], matrices[1], gap, gap], 1))

    def test_a_buffer_without_parts_is_a_header(self, exchange: ExchangeKernels) -> None:
        layout = PackedLayout(())
        buffer = exchange.pack(layout, [])
        exchange.unpack(layout, buffer, [])
        assert bytes(buffer.tolist()) == layout.header() and PackedLayout.read(buffer) == layout
        buffer[4] += 1
        with pytest.raises(ExchangeError):
            exchange.unpack(layout, buffer, [])
            exchange.synchronize()


def told_by_blocks(layout: PackedLayout, buffer: Tensor) -> set[str]:
    """What the CUDA kernel may say is wrong with a header: it says what one of its blocks finds first, and a block looks at the number of
    parts, at its own part, and at the totals."""
    wanted, found = np.frombuffer(layout.header(), np.int64).tolist(), buffer.cpu().numpy().view(np.int64).tolist()
    fields = [f"the header says {name}" for name in ("magic and version", "number of parts", "bytes", "checksum")]
    for part in range(len(layout.parts)):
        fields += [f"the header of part {part} says {name}" for name in ("rows", "offset", "bytes", "columns and wire")]
    told = set()
    for part in range(len(layout.parts)):
        own = 4 * (1 + part)
        word = next(word for word in (0, 1, *range(own, own + 4), 2, 3) if wanted[word] != found[word])
        told.add(f"{fields[word]} {found[word]}; expected {wanted[word]}")
    return told


class TestHeaders:
    def packed(self, exchange: ExchangeKernels) -> tuple[PackedLayout, Tensor, list[Tensor]]:
        matrices = [random_matrix((3, 4)), random_matrix((2, 7))]
        layout = layout_of(matrices, ["float32", "int8"])
        outputs = [on(exchange, torch.full(matrix.shape, 5.0)) for matrix in matrices]
        return layout, exchange.pack(layout, [on(exchange, matrix) for matrix in matrices]), outputs

    def refused(self, exchange: ExchangeKernels, layout: PackedLayout, buffer: Tensor, outputs: list[Tensor]) -> str:
        with pytest.raises(ExchangeError) as raised:
            exchange.unpack(layout, buffer, outputs)
            exchange.synchronize()
        if exchange.name != "cuda":
            assert all((output == 5).all() for output in outputs)
        return str(raised.value)

    def test_a_truncated_buffer_is_an_error(self, exchange: ExchangeKernels) -> None:
        layout, buffer, outputs = self.packed(exchange)
        for size in (layout.nbytes - 1, 96, 31, 0):
            message = self.refused(exchange, layout, buffer[:size], outputs)
            assert message == f"a buffer of these parts has {layout.nbytes} bytes; got {size}"
            with pytest.raises(ExchangeError):
                PackedLayout.read(buffer[:size])

    def test_every_word_of_a_header_counts(self, exchange: ExchangeKernels) -> None:
        layout, buffer, outputs = self.packed(exchange)
        for word in range(12):
            wrong = buffer.clone()
            wrong[8 * word + word % 8] ^= 1 << word % 7
            self.refused(exchange, layout, wrong, outputs)
            with pytest.raises(ExchangeError):
                PackedLayout.read(wrong)
        exchange.unpack(layout, buffer, outputs)               # what was wrong before is forgotten
        exchange.synchronize()
        assert all((output != 5).any() for output in outputs)

    @pytest.mark.parametrize(("parts", "message"), [
        ([(3, 4, "float32")], "number of parts 1; expected 2"), ([(3, 4, "float32"), (2, 7, "float16")], "part 1"),
        ([(4, 3, "float32"), (2, 7, "int8")], "part 0")])
    def test_another_buffer_is_named(self, exchange: ExchangeKernels, parts: list[tuple[int, int, str]], message: str) -> None:
        """A whole one, of other parts, as a rank that is a step ahead would send."""
        layout, _, outputs = self.packed(exchange)
        other = PackedLayout(tuple(PackedPart(*part) for part in parts))
        sent = exchange.pack(other, [on(exchange, torch.zeros(part.rows, part.dim)) for part in other.parts])
        sent = torch.cat([sent, sent.new_zeros(max(0, layout.nbytes - len(sent)))])
        found = self.refused(exchange, layout, sent, outputs)
        if exchange.name == "cuda":
            assert found in told_by_blocks(layout, sent)
        else:
            assert "header" in found and message in found

    def test_random_bytes_are_refused(self, exchange: ExchangeKernels) -> None:
        layout, buffer, outputs = self.packed(exchange)
        for seed in range(5):
            noise = torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
            noise[:8 * seed] = buffer[:8 * seed].cpu()
            self.refused(exchange, layout, on(exchange, noise), outputs)
            with pytest.raises(ExchangeError):
                PackedLayout.read(noise)


SPECS = {
    "permuted": RegroupSpec(((2, 16), (5,), (33, 1)), ((3, 0), (1, 4, 2))),
    "shared and unused": RegroupSpec(((4, 8), (12,)), ((0, 2), (2, 0, 0), (2,))),
    "whole sources": RegroupSpec(((4, 8), (12, 4)), ((0, 1, 2, 3),)),
    "zero width": RegroupSpec(((0, 3), (0,)), ((2, 1), (0,), ())),
    "none": RegroupSpec((), ()),
}


class TestRegroup:
    @pytest.mark.parametrize("batch", [0, 1, 37])
    @pytest.mark.parametrize("name", SPECS)
    def test_columns_go_where_they_are_wanted_and_gradients_back(self, exchange: ExchangeKernels, name: str, batch: int) -> None:
        spec = SPECS[name]
        sources = [random_matrix((batch, width), seed).requires_grad_() for seed, width in enumerate(spec.source_widths)]
        features = [columns for source, widths in zip(sources, spec.sources) for columns in source.split(widths, 1)]
        want = [torch.cat([features[f] for f in group], 1) if group else torch.empty(batch, 0) for group in spec.groups]
        outputs = [on(exchange, torch.full(out.shape, 7e7)) for out in want]
        exchange.regroup(spec, [on(exchange, source) for source in sources], outputs)
        assert all(map(torch.equal, [out.cpu() for out in outputs], want))
        grads = [torch.randint(-9, 10, out.shape, generator=torch.Generator().manual_seed(9)).float() for out in want]
        found = [on(exchange, torch.full(source.shape, 7e7)) for source in sources]
        exchange.regroup_backward(spec, [on(exchange, grad) for grad in grads], found)
        made = [(out, grad) for out, grad in zip(want, grads) if out.requires_grad]
        exact = torch.autograd.grad([out for out, _ in made], sources, [grad for _, grad in made], allow_unused=True) if made else []
        for mine, source, theirs in zip(found, sources, exact):
            assert torch.equal(mine.cpu(), torch.zeros_like(source) if theirs is None else theirs)

    def test_nothing_but_gradients_may_be_missing(self, exchange: ExchangeKernels) -> None:
        spec, matrix = RegroupSpec(((5,),), ((0,),)), on(exchange, torch.ones(6, 5))
        for sources, outputs in (([None], [matrix]), ([matrix], [None])):
            with pytest.raises(TypeError, match="must be a tensor; got NoneType"):
                exchange.regroup(spec, sources, outputs)

    def test_gradients_are_added_in_the_order_of_the_groups(self, exchange: ExchangeKernels) -> None:
        spec = RegroupSpec(((5,),), ((0,), (0, 0), (0,)))
        grads = [random_matrix((6, 5), 1) * 1e4, random_matrix((6, 10), 2), random_matrix((6, 5), 3) * 1e-4]
        found = on(exchange, torch.empty(6, 5))
        exchange.regroup_backward(spec, [on(exchange, grad) for grad in grads], [found])
        assert torch.equal(found.cpu(), ((grads[0] + grads[1][:, :5]) + grads[1][:, 5:]) + grads[2])

    def test_what_is_not_there_is_not_added_and_what_is_not_wanted_not_written(self, exchange: ExchangeKernels) -> None:
        spec = RegroupSpec(((4, 3), (8,)), ((0, 2), (2, 1), (2,)))
        grads = [random_matrix((3, width), seed) for seed, width in enumerate(spec.group_widths)]
        wide = on(exchange, torch.full((3, 11), 5.0))
        exchange.regroup_backward(spec, [on(exchange, grads[0]), None, on(exchange, grads[2])], [wide[:, 2:9], None])
        assert torch.equal(wide.cpu(), torch.cat([torch.full((3, 2), 5.0), grads[0][:, :4], torch.zeros(3, 3), torch.full((3, 2), 5.0)], 1))
        second = on(exchange, torch.empty(3, 8))
        exchange.regroup_backward(spec, [None, None, on(exchange, grads[2])], [None, second])
        assert torch.equal(second.cpu(), grads[2])

    def test_rows_may_lie_apart(self, exchange: ExchangeKernels) -> None:
        spec = RegroupSpec(((8, 4), (3,)), ((2, 1), (0,)))
        given = [random_matrix((6, 20), 1)[:, 3:15], random_matrix((3, 6), 2).T]
        room = on(exchange, torch.full((6, 17), 5.0))
        exchange.regroup(spec, [on(exchange, matrix) for matrix in given], [room[:, 1:8], room[:, 8:16]])
        five = torch.full((6, 1), 5.0)
        assert torch.equal(room.cpu(), torch.cat([five, given[1], given[0][:, 8:], given[0][:, :8], five], 1))


class TestArguments:
    def test_wrong_ones_are_named(self, exchange: ExchangeKernels) -> None:
        layout, owners, spec = PackedLayout((PackedPart(2, 4),)), RowOwners(9, 2), RegroupSpec(((4,),), ((0,),))
        ids, rows = on(exchange, torch.tensor([1])), on(exchange, torch.zeros(2, 4))
        buffer = on(exchange, torch.zeros(200, dtype=torch.uint8))
        for error, message, call in (
            (DtypeError, "ids must be int32 or int64; got float32", lambda: exchange.dedup(ids.float(), 3)),
            (ValueError, r"ids must have one dimension; got shape \(1, 1\)", lambda: exchange.dedup(ids[None], 3)),
            (ValueError, r"rows must be in 0..2\*\*63 - 1; got -1", lambda: exchange.dedup(ids, -1)),
            (ValueError, r"offsets must have one dimension, .* got shape \(0,\)", lambda: exchange.bucketize(ids, ids[:0], owners)),
            (ValueError, r"matrices must have one entry a part \(1\); got 0", lambda: exchange.pack(layout, [])),
            (ValueError, r"matrices\[0\] must have shape \(2, 4\); got \(1, 4\)", lambda: exchange.pack(layout, [rows[:1]])),
            (DtypeError, r"matrices\[0\] must be float32; got float64", lambda: exchange.pack(layout, [rows.double()])),
            (ValueError, "must have at least 96 bytes; got 95", lambda: exchange.pack(layout, [rows], buffer[:95])),
            (ValueError, "multiple of 16 bytes", lambda: exchange.pack(layout, [rows], buffer[4:])),
            (ValueError, r"contiguous; got shape \(100,\) and strides \(2,\)", lambda: exchange.unpack(layout, buffer[::2], [rows])),
            (ValueError, r"outputs\[0\] must have last stride 1", lambda: exchange.unpack(layout, buffer, [rows.new_zeros(4, 2).T])),
            (ValueError, r"sources must have one entry a matrix \(1\); got 2", lambda: exchange.regroup(spec, [rows, rows], [rows])),
            (ValueError, r"outputs\[0\] must have shape \(2, 4\); got \(2, 3\)", lambda: exchange.regroup(spec, [rows], [rows[:, :3]])),
            (ValueError, r"source_grads\[0\] must have last stride 1",
             lambda: exchange.regroup_backward(spec, [rows], [rows.new_zeros(4, 2).T])),
            (TypeError, r"grads\[0\] must be a tensor; got list", lambda: exchange.regroup_backward(spec, [[1.0]], [rows]))):
            with pytest.raises(error, match=message):
                call()

    def test_specs_of_another_kind_are_named(self, exchange: ExchangeKernels) -> None:
        ids, rows = on(exchange, torch.tensor([1])), on(exchange, torch.zeros(2, 4))
        for message, call in (
            ("rows must be a whole number; got 2.5", lambda: exchange.dedup(ids, 2.5)),
            ("owners must be a RowOwners; got int", lambda: exchange.bucketize(ids, ids, 3)),
            ("layout must be a PackedLayout; got list", lambda: exchange.pack([PackedPart(2, 4)], [rows])),
            ("spec must be a RegroupSpec; got tuple", lambda: exchange.regroup((((4,),), ((0,),)), [rows], [rows])),
            ("spec must be a RegroupSpec; got tuple", lambda: exchange.regroup_backward((((4,),), ((0,),)), [rows], [rows]))):
            with pytest.raises(TypeError, match=message):
                call()

    def test_what_is_written_lies_apart(self, exchange: ExchangeKernels) -> None:
        """Columns of one buffer do; anything else that shares a byte with what is written is named."""
        layout, spec = PackedLayout((PackedPart(4, 4), PackedPart(4, 3))), RegroupSpec(((4,), (3,)), ((1,), (0,)))
        room = on(exchange, torch.arange(64.0)).view(4, 16)
        columns = [room[:, begin:begin + width] for begin, width in ((0, 4), (4, 3), (7, 3), (10, 4))]
        before = room.clone()
        exchange.regroup(spec, columns[:2], columns[2:])
        assert torch.equal(torch.cat([columns[2], columns[3]], 1), before[:, [4, 5, 6, 0, 1, 2, 3]])
        exchange.regroup_backward(spec, columns[2:], columns[:2])
        assert torch.equal(room[:, :7], before[:, :7])
        rows = on(exchange, torch.zeros(208, dtype=torch.uint8))
        inside = rows[96:160].view(torch.float32).view(4, 4)
        for message, call in (
            (r"sources\[1\] has .*, and outputs\[0\]",
             lambda: exchange.regroup(spec, columns[:2], [room[:, 6:9], columns[3]])),
            (r"outputs\[1\] has .*, and outputs\[0\]", lambda: exchange.regroup(spec, columns[:2], [columns[3][:, 1:], columns[3]])),
            (r"grads\[1\] has .*, and source_grads\[0\]|source_grads\[0\] has .*, and grads\[1\]",
             lambda: exchange.regroup_backward(spec, columns[2:], [columns[3], None])),
            (r"rows of outputs\[0\] must be apart in memory; got rows of 16 bytes, 0 bytes apart",
             lambda: exchange.unpack(layout, rows, [room[:1, :4].expand(4, 4), columns[1]])),
            (r"the buffer has .*, and outputs\[0\]", lambda: exchange.unpack(layout, rows, [inside, columns[1]])),
            (r"the buffer has .*, and matrices\[0\]", lambda: exchange.pack(layout, [inside, columns[1]], rows))):
            with pytest.raises(ValueError, match=message):
                call()

    def test_writes_are_counted(self, exchange: ExchangeKernels) -> None:
        """So that autograd notices a tensor that it has saved before."""
        layout, spec = PackedLayout((PackedPart(2, 4),)), RegroupSpec(((4,),), ((0,),))
        matrix, out, buffer = (on(exchange, torch.ones(2, 4)) for _ in range(3))
        buffer = exchange.pack(layout, [matrix])
        for write in (lambda: exchange.pack(layout, [matrix], buffer), lambda: exchange.unpack(layout, buffer, [out]),
                      lambda: exchange.regroup(spec, [matrix], [out]), lambda: exchange.regroup_backward(spec, [matrix], [out])):
            counts = out._version + buffer._version, matrix._version
            write()
            assert out._version + buffer._version > counts[0] and matrix._version == counts[1]

    def test_it_can_be_pickled(self, exchange: ExchangeKernels) -> None:
        again = pickle.loads(pickle.dumps(exchange))
        assert again.dedup(on(exchange, torch.tensor([2, 2, 1])), 3).trimmed().tolist() == [1, 2]


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_results_do_not_depend_on_the_number_of_threads(isa: str) -> None:
    if f"cpu-{isa}" not in available_backends():
        pytest.skip(f"{isa}: not built, or missing here")
    exchange, before, results = get_exchange(f"cpu-{isa}"), torch.get_num_threads(), []
    ids = torch.randint(-5, 5000, (70_001,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.randint(0, len(ids), (3000,)).sort().values, torch.tensor([len(ids)])])
    offsets[0] = 0
    matrices = [random_matrix((rows, dim), rows) for rows, dim in ((3000, 40), (0, 3), (1, 9), (5000, 3), (800, 130))]
    layout, spec = layout_of(matrices, ["int8", "float32", "float16", "bfloat16", "float32"]), RegroupSpec(((20, 20),), ((1,), (1, 0)))
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            distinct, wide = exchange.dedup(ids, 4990), exchange.dedup(ids, 2**40)
            buckets = exchange.bucketize(ids, offsets, RowOwners(4990, 7))
            outputs, grouped = [torch.empty_like(matrix) for matrix in matrices], [torch.empty(3000, 20), torch.empty(3000, 40)]
            buffer = exchange.pack(layout, matrices)
            exchange.unpack(layout, buffer, outputs)
            exchange.regroup(spec, matrices[:1], grouped)
            back = torch.empty(3000, 40)
            exchange.regroup_backward(spec, grouped, [back])
            results.append([distinct.trimmed(), distinct.slots, wide.trimmed(), wide.slots, buckets.rows, buckets.sources, buckets.places,
                            buckets.lengths, buffer, *outputs, *grouped, back])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    reference = get_exchange("reference")
    want, buckets = reference.dedup(ids, 4990), reference.bucketize(ids, offsets, RowOwners(4990, 7))
    wants = [want.trimmed(), want.slots, buckets.rows, buckets.sources, buckets.places, buckets.lengths, reference.pack(layout, matrices)]
    assert all(map(torch.equal, [*results[0][:2], *results[0][4:9]], wants))


def test_sizes_pass_32_bits() -> None:
    """By arithmetic: the C side knows how large a buffer of terabytes would be."""
    if "cpu" not in available_backends():
        pytest.skip("the CPU kernels are not built")
    parts = (PackedPart(2**33, 65, "float16"), PackedPart(2**31 - 1, 2**14, "int8"))
    given = array("q", [number for part in parts for number in (0, 0, part.rows, part.dim, WIRE_DTYPES.index(part.dtype))])
    with pytest.raises(ExchangeError, match=f"of these parts has {PackedLayout(parts).nbytes} bytes; got 64"):
        import_module("sparselift.kernels._exchange").unpack(given.buffer_info()[0], len(parts), 0, 64, 0, 1)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: PackedPart(1, 2, "float64"), "one of float32, float16, bfloat16, int8; got 'float64'"),
    (lambda: PackedPart(-1, 2), r"got \(-1, 2\)"), (lambda: PackedPart(1, 2**31), r"got \(1, 2147483648\)"),
    (lambda: PackedLayout((PackedPart(2**40, 2**20),)), r"at most 2\*\*48 bytes"),
    (lambda: RowOwners(3, 0), "got 0 of 3"), (lambda: RowOwners(3, 1, "cyclic"), "one of block, modulo; got 'cyclic'"),
    (lambda: RegroupSpec(((1, -2),), ()), "at least 0; got -2"),
    (lambda: RegroupSpec(((1,),), ((1,),)), "one of the 1 of the sources; got 1"),
    (lambda: RegroupSpec.of_keys([["a"], ["a"]], [[1], [1]], []), "'a' is in two places"),
    (lambda: RegroupSpec.of_keys([["a"]], [[1]], [["b"]]), "no source has the feature 'b'; they have a"),
    (lambda: RegroupSpec.of_keys([["a"]], [[1, 2]], []), "one width a key"),
    (lambda: get_exchange("tpu"), "must be one of reference, .*; got 'tpu'")])
def test_specs_are_checked(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()                                                                   # type: ignore[operator]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: PackedPart(2.0, 3), "number of rows must be a whole number; got 2.0"),
    (lambda: PackedPart(2, True), "number of columns must be a whole number; got True"),
    (lambda: PackedLayout([(2, 3)]), r"parts\[0\] must be a PackedPart; got tuple"),
    (lambda: PackedLayout(PackedPart(2, 3)), "parts must be a Sequence; got PackedPart"),
    (lambda: RowOwners(3.5, 2), "number of rows must be a whole number; got 3.5"),
    (lambda: RowOwners(3, 2.0), "number of owners must be a whole number; got 2.0"),
    (lambda: RegroupSpec(((1, 2.5),), ()), "a feature's width must be a whole number; got 2.5"),
    (lambda: RegroupSpec(((1,),), (("0",),)), "a group's feature must be a whole number; got '0'"),
    (lambda: RegroupSpec((1,), ()), "sources must be a sequence of sequences of whole numbers; got 1"),
    (lambda: RegroupSpec(((1,),), 0), "groups must be a sequence of sequences of whole numbers; got 0"),
    (lambda: PackedLayout.read(b"KPLS"), "the buffer must be a tensor; got bytes"),
    (lambda: PackedLayout.read(torch.zeros(64, dtype=torch.uint8, device="meta")), "must have values; got a meta tensor")])
def test_specs_of_other_things_are_refused(make: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()                                                                   # type: ignore[operator]


def test_sequences_are_kept_as_tuples() -> None:
    assert RegroupSpec([[2, 3], [4]], [[2, 0], [1]]) == RegroupSpec(((2, 3), (4,)), ((2, 0), (1,)))
    assert hash(PackedLayout([PackedPart(1, 2)])) == hash(PackedLayout((PackedPart(1, 2),)))
    with pytest.raises(ValueError, match=r"the buffer must have one dimension; got shape \(2, 48\)"):
        PackedLayout.read(torch.zeros(2, 48, dtype=torch.uint8))


def test_features_have_names() -> None:
    assert RegroupSpec.of_keys([["a", "b"], ["c"]], [[2, 3], [4]], [["c", "a"], ["b"]]) == RegroupSpec(((2, 3), (4,)), ((2, 0), (1,)))


def test_neighbours_move_together() -> None:
    """Features that lie side by side before and after are one range of columns."""
    assert [part.width for part in SPECS["whole sources"].forward_ranges()] == [12, 16]
    assert [part.width for part in SPECS["whole sources"].backward_ranges()] == [12, 16]
    assert [part.width for part in SPECS["shared and unused"].backward_ranges()] == [4, 8, 12]
