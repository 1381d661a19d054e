"""What every kernel backend must do, run over each of them: the reference, the CPU kernels of every instruction set, the CUDA kernels."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from sparselift.kernels.base import (
    COALESCE_METHODS,
    STORES,
    BagProgram,
    FeatureSpec,
    IndexBatch,
    KernelBackend,
    Segment,
    TableKnobs,
    TableSpec,
    UpdateRule,
)
from tests.contract.naive import Case, fresh_state, lookup_grads, parts_of, pooled, random_case, random_grads, row_sums, updated

SGD = UpdateRule("sgd", lr=0.5)
RULES = [SGD, UpdateRule("sgd", lr=0.25, maximize=True), UpdateRule("adagrad", lr=0.5, eps=0.25),
         UpdateRule("rowwise_adagrad", lr=0.5, eps=0.25), UpdateRule("rowwise_adagrad", lr=0.5, eps=0.25, weight_decay=0.5, maximize=True),
         UpdateRule("adam", lr=0.5, eps=0.25, betas=(0.75, 0.5)), UpdateRule("adam", lr=0.5, eps=0.25, betas=(0.5, 0.75), maximize=True)]
DIMS = [1, 3, 4, 17, 64, 128, 1000]
SUMMING = [method for method in COALESCE_METHODS if method != "none"]
CASES = {
    "sum": {},
    "mean": {"pooling": ["mean"]},
    "none": {"pooling": ["none"]},
    "max": {"pooling": ["max"]},
    "mixed": {"pooling": ["sum", "mean", "none", "max"], "dims": (4, 17, 64), "shared": True},
    "padding": {"pooling": ["sum", "mean", "none", "max"], "dims": (4, 8, 16, 5), "padding": True},
    "weighted": {"weighted": True},
    "weighted_padding": {"weighted": True, "padding": True, "pooling": ["sum", "mean"]},
    "include_last": {"include_last": True, "pooling": ["sum", "mean"]},
    "int32": {"index_dtypes": [torch.int32]},
    "mixed_ints": {"index_dtypes": [torch.int32, torch.int64, torch.int64], "dims": (4, 8, 3)},
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return random_case(1, **CASES[request.param])


def with_knobs(case: Case, **knobs) -> Case:
    case.tables = [dataclasses.replace(table, knobs=TableKnobs(**knobs)) for table in case.tables]
    return case


def is_refused(case: Case, backend: KernelBackend, coalesce: str) -> bool:
    """Whether the backend says that it lacks this way of summing, and then refuses it by name."""
    if coalesce in backend.coalesce_methods:
        return False
    with pytest.raises(ValueError, match=f"table 't0': coalesce must be one of .*; got '{coalesce}'"):
        with_knobs(case, coalesce=coalesce).compile(backend)
    return True


def check_update(case: Case, program: BagProgram, rule: UpdateRule, segments: list[Segment], parts: list[list]) -> None:
    """`parts` a table: (ids, gradients) of every lookup. SGD is exact, the others round at the square root and the division."""
    states = [fresh_state(table, rule) for table in case.tables]
    expected = [updated(w, s, rule, row_sums(p)) for w, s, p in zip(case.weights, states, parts)]
    program.update(case.weights, states, [rule] * len(states), segments)
    for weight, state, (want_weight, want_parts) in zip(case.weights, states, expected):
        if rule.kind == "sgd":
            assert np.array_equal(weight.numpy(), want_weight)
        else:
            assert np.allclose(weight.numpy(), want_weight, rtol=1e-6, atol=1e-6)
        for part, want in zip(parts_of(state), want_parts, strict=True):
            assert np.allclose(part.numpy(), want, rtol=2e-7, atol=0)


class TestKernels:
    def test_the_registered_classes(self, backend):
        program = backend.compile([], [])
        assert isinstance(program, BagProgram) and isinstance(program.prepare([], []), IndexBatch)
        assert isinstance(backend.variant(), str) and backend.variant()

    def test_forward_into_one_tensor_a_feature(self, backend, case):
        program = case.compile(backend)
        batch = case.prepare(program)
        outputs = case.outputs(batch)
        program.forward(case.weights, batch, outputs)
        for feature, output in enumerate(outputs):
            assert np.array_equal(output.numpy(), pooled(case, feature))

    def test_forward_into_one_buffer_leaves_other_columns_alone(self, backend, case):
        case.features = [dataclasses.replace(f, column=f.column + 3) for f in case.features]
        program = case.compile(backend)
        batch = case.prepare(program)
        dims = [case.tables[f.table].dim for f in case.features]
        buffer = torch.full((batch.num_bags[0], sum(dims) + 8), 77.0)[:, 1:]
        if len(set(batch.num_bags)) > 1:
            pytest.skip("features of different batch sizes have no common buffer")
        program.forward(case.weights, batch, buffer)
        for feature, (spec, dim) in enumerate(zip(case.features, dims)):
            assert np.array_equal(buffer[:, spec.column:spec.column + dim].numpy(), pooled(case, feature))
        assert (buffer[:, :3] == 77).all() and (buffer[:, 3 + sum(dims):] == 77).all()

    def test_no_forward_knob_changes_a_bit(self, backend, case):
        case.weights = [torch.randn(w.shape, generator=torch.Generator().manual_seed(3)) for w in case.weights]
        results = []
        for knobs in ({}, {"prefetch": 0}, {"prefetch": 3}, {"prefetch": 1000}, {"partition": "table"}, {"dedup": True},
                      {"dedup": True, "prefetch": 0}, {"stores": "cached"}, {"stores": "streamed"}, {"stores": "streamed", "dedup": True}):
            program = with_knobs(case, **knobs).compile(backend)
            batch = case.prepare(program)
            outputs = case.outputs(batch)
            program.forward(case.weights, batch, outputs)
            program.forward(case.weights, batch, outputs)
            results.append(outputs)
            assert all(torch.equal(a, b) for a, b in zip(results[0], outputs)), knobs

    @pytest.mark.parametrize("stores", STORES)
    @pytest.mark.parametrize("dim", [8, 16, 64, 80, 512])
    @pytest.mark.parametrize("shift", [0, 1, 16])
    def test_every_way_to_store_whole_lines(self, backend, stores, dim, shift):
        """Rows of whole cache lines and others, on aligned memory and beside it, into columns of a wider buffer."""
        case = with_knobs(random_case(2, (dim,) * 2, pooling=["sum", "max"]), stores=stores)
        program = case.compile(backend)
        batch = case.prepare(program)
        width = 2 * dim + 16
        block = torch.full((7 * width + 32,), 77.0)
        start = (-block.data_ptr() // 4) % 16 + shift
        buffer = block[start:start + 7 * width].view(7, width)
        program.forward(case.weights, batch, buffer)
        for feature, spec in enumerate(case.features):
            assert np.array_equal(buffer[:, spec.column:spec.column + dim].numpy(), pooled(case, feature))
        assert (buffer[:, 2 * dim:] == 77).all() and (block[:start] == 77).all() and (block[start + 7 * width:] == 77).all()

    @pytest.mark.parametrize("dim", DIMS)
    def test_forward_of_any_dim(self, backend, dim):
        case = random_case(dim, (dim,) * 4, pooling=["sum", "mean", "none", "max"])
        program = case.compile(backend)
        batch = case.prepare(program)
        outputs = case.outputs(batch)
        program.forward(case.weights, batch, outputs)
        assert all(np.array_equal(output.numpy(), pooled(case, feature)) for feature, output in enumerate(outputs))

    @pytest.mark.parametrize("length", [1, 3])
    @pytest.mark.parametrize("pooling", ["sum", "mean"])
    def test_bags_of_one_length_need_no_offsets(self, backend, length, pooling):
        case = random_case(3, (8,), pooling=[pooling])
        case.indices = [torch.randint(0, 11, (6 * length,))]
        case.offsets = [length]
        if pooling == "mean":
            case.weights = [w * length for w in case.weights]
        program = case.compile(backend)
        batch = case.prepare(program)
        assert batch.num_bags == (6,) and batch.num_lookups == (6 * length,)
        outputs = case.outputs(batch)
        program.forward(case.weights, batch, outputs)
        assert np.array_equal(outputs[0].numpy(), pooled(case, 0))
        grads = [g * length for g in random_grads(case, batch, 5)]
        check_update(case, program, SGD, [Segment(batch, grads)], [[lookup_grads(case, 0, grads)]])

    def test_offsets_that_give_every_bag_one_id(self, backend):
        case = random_case(3, (8,))
        case.indices, case.offsets = [torch.randint(0, 11, (9,))], [torch.arange(9)]
        program = case.compile(backend)
        batch = case.prepare(program)
        outputs = case.outputs(batch)
        program.forward(case.weights, batch, outputs)
        assert torch.equal(outputs[0], case.weights[0][case.indices[0]])

    @pytest.mark.parametrize("coalesce", SUMMING)
    @pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.kind}{'-max' * r.maximize}")
    def test_update(self, backend, case, rule, coalesce):
        if is_refused(case, backend, coalesce):
            return
        program = with_knobs(case, coalesce=coalesce).compile(backend)
        batch = case.prepare(program)
        grads = random_grads(case, batch, 5)
        parts = [[lookup_grads(case, t, grads)] for t in range(len(case.tables))]
        check_update(case, program, rule, [Segment(batch, grads)], parts)

    @pytest.mark.parametrize("prefetch", [0, 1000])
    def test_update_twice_with_any_prefetch(self, backend, case, prefetch):
        program = with_knobs(case, prefetch=prefetch).compile(backend)
        batch = case.prepare(program)
        for seed in (5, 6):
            grads = random_grads(case, batch, seed)
            check_update(case, program, SGD, [Segment(batch, grads)], [[lookup_grads(case, t, grads)] for t in range(len(case.tables))])

    @pytest.mark.parametrize("rule", RULES[:1] + RULES[2:4] + RULES[5:6], ids=lambda r: r.kind)
    @pytest.mark.parametrize("coalesce", SUMMING)
    @pytest.mark.parametrize("dim", DIMS)
    def test_update_of_any_dim(self, backend, dim, coalesce, rule):
        case = random_case(dim, (dim,), batch=30)
        if is_refused(case, backend, coalesce):
            return
        program = with_knobs(case, coalesce=coalesce).compile(backend)
        batch = case.prepare(program)
        grads = random_grads(case, batch, 5)
        check_update(case, program, rule, [Segment(batch, grads)], [[lookup_grads(case, 0, grads)]])

    def test_sgd_lookup_by_lookup(self, backend, case):
        if is_refused(case, backend, "none"):
            return
        program = with_knobs(case, coalesce="none").compile(backend)
        batch = case.prepare(program)
        grads = random_grads(case, batch, 5)
        check_update(case, program, SGD, [Segment(batch, grads)], [[lookup_grads(case, t, grads)] for t in range(len(case.tables))])

    @pytest.mark.parametrize("rows", [1, 2, 3000, 3_000_000, 5_000_000], ids=lambda rows: f"{rows}-rows")
    def test_every_way_to_sum_gives_the_same_bits(self, backend, rows):
        """However many digits a row has, and for any number of threads."""
        generator = torch.Generator().manual_seed(rows)
        ids = torch.randint(0, rows, (4000,), generator=generator)
        ids[:3000] = ids[torch.randint(0, 300, (3000,), generator=generator)]
        ids[:2] = torch.tensor([0, rows - 1])
        grad, start = torch.randn(1000, 1, generator=generator), torch.randn(rows, 1, generator=generator)
        results = []
        for coalesce in (method for method in SUMMING if method in backend.coalesce_methods):
            spec = TableSpec("t", rows, 1, knobs=TableKnobs(coalesce))
            if coalesce == "dense" and not backend.takes_dense(spec):
                continue
            program = backend.compile([spec], [FeatureSpec("f", 0)])
            weight, sums = start.clone(), torch.zeros(rows)
            batch = program.prepare([ids], [torch.arange(0, 4000, 4)])
            for _ in range(2):
                program.update([weight], [sums], [UpdateRule("rowwise_adagrad", 0.1, 1e-8)], [Segment(batch, grad)])
            results.append((weight, sums))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other))
        assert torch.equal((results[0][1] != 0).nonzero()[:, 0], ids.unique())

    @pytest.mark.parametrize("coalesce", COALESCE_METHODS)
    def test_several_segments_with_scales(self, backend, case, coalesce):
        if is_refused(case, backend, coalesce):
            return
        program = with_knobs(case, coalesce=coalesce).compile(backend)
        other = random_case(2, [t.dim for t in case.tables], pooling=[f.pooling for f in case.features],
                            shared=len(case.features) > len(case.tables), padding=case.features[0].padding_idx is not None,
                            weighted=any(f.weighted for f in case.features), include_last=any(f.include_last_offset for f in case.features))
        scales = [0.5 ** t for t in range(len(case.tables))]
        segments, parts = [], [[] for _ in case.tables]
        for ids, scale in ((case, None), (other, scales), (case, scales)):
            batch = ids.prepare(program)
            grads = random_grads(ids, batch, len(segments))
            segments.append(Segment(batch, grads, scale))
            for t, part in enumerate(parts):
                rows, values = lookup_grads(ids, t, grads)
                part.append((rows, values * (scale[t] if scale else 1)))
        check_update(case, program, SGD, segments, parts)

    def test_a_table_without_a_rule_and_a_feature_without_a_gradient(self, backend):
        case = random_case(1, (4, 8, 3))
        program = case.compile(backend)
        batch = case.prepare(program)
        grads: list[Tensor | None] = list(random_grads(case, batch, 5))
        grads[2] = None
        before = [w.clone() for w in case.weights]
        program.update(case.weights, [None] * 3, [SGD, None, SGD], [Segment(batch, grads)])
        want, _ = updated(before[0], None, SGD, row_sums([lookup_grads(case, 0, grads)]))
        assert np.array_equal(case.weights[0].numpy(), want) and not torch.equal(case.weights[0], before[0])
        assert torch.equal(case.weights[1], before[1]) and torch.equal(case.weights[2], before[2])

    @pytest.mark.parametrize("layout", ["shared", "transposed", "unaligned"])
    def test_gradients_in_any_layout(self, backend, layout):
        case = random_case(4, (4, 17), batch=9, shared=True)
        program = case.compile(backend)
        batch = case.prepare(program)
        grads = random_grads(case, batch, 5)
        if layout == "shared":
            given: Tensor | list[Tensor] = torch.cat([torch.cat(grads, 1), torch.zeros(9, 5)], 1)
        elif layout == "transposed":
            given = [g.t().contiguous().t() for g in grads]
        else:
            given = [torch.cat([torch.zeros(9, 1), g], 1)[:, 1:] for g in grads]
        check_update(case, program, SGD, [Segment(batch, given)], [[lookup_grads(case, t, grads)] for t in range(2)])

    def test_coalesced_and_expanded_gradients(self, backend, case):
        program = case.compile(backend)
        batch = case.prepare(program)
        first, second = random_grads(case, batch, 5), random_grads(case, batch, 6)
        scales = [0.5] * len(case.tables)
        segments = [Segment(batch, first), Segment(batch, second, scales)]
        for table, spec in enumerate(case.tables):
            ids, values = lookup_grads(case, table, first)
            more_ids, more = lookup_grads(case, table, second)
            rows, grads = program.expanded_grad(table, segments)
            assert rows.dtype == torch.int64 and rows.tolist() == ids + more_ids
            assert np.array_equal(grads.numpy(), np.concatenate([values, more * 0.5]))
            unique, sums = program.coalesced_grad(table, segments)
            expected = row_sums([(ids, values), (more_ids, more * 0.5)])
            assert unique.dtype == torch.int64 and unique.tolist() == list(expected)
            assert sums.shape == (len(expected), spec.dim)
            assert np.array_equal(sums.numpy(), np.array(list(expected.values())).reshape(-1, spec.dim))
            again, _ = program.coalesced_grad(table, segments)
            assert torch.equal(again, unique)

    def test_a_look_up_is_a_prepare_and_a_forward(self, backend, case):
        program = case.compile(backend)
        bags = case.prepare(program).num_bags
        call = case.weights, case.indices, case.offsets, case.sample_weights
        if len(set(bags)) > 1:
            with pytest.raises(ValueError, match="with the B of every feature"):
                program.look_up(*call)
            return
        batch, out = program.look_up(*call)
        assert np.array_equal(out.numpy(), np.concatenate([pooled(case, f) for f in range(len(case.features))], 1))
        grads = random_grads(case, batch, 5)
        for table in range(len(case.tables)):
            ids, values = program.lookup_grads(table, batch, torch.cat(grads, 1))
            want_ids, want = lookup_grads(case, table, grads)
            assert ids.dtype == torch.int64 and ids.tolist() == [want_ids]
            assert np.array_equal(values.numpy(), want)

    @pytest.mark.parametrize("options", [{}, {"padding": True, "pooling": ["mean", "sum"]}, {"pooling": ["none"]}, {"weighted": True}])
    def test_expanded_gradients_are_the_same_at_any_thread_count(self, backend, options):
        """Of enough lookups that several threads write them, by several features of one table."""
        case = random_case(3, (17,), batch=1000, length=9, rows=50, shared=True, **options)
        program, results = case.compile(backend), []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            batch = case.prepare(program)
            results.append(program.expanded_grad(0, [Segment(batch, random_grads(case, batch, 5))]))
        want_ids, want = lookup_grads(case, 0, random_grads(case, batch, 5))
        for ids, grads in results:
            assert ids.tolist() == want_ids
            assert np.array_equal(grads.numpy(), want)

    def test_a_batch_that_was_prepared_ahead_gives_the_same_bits(self, backend, case):
        """Forward, gradients, updates of one segment, of two, and with a feature that got no gradient."""
        for number, coalesce in enumerate(COALESCE_METHODS):
            if is_refused(case, backend, coalesce):
                continue
            results = []
            for ahead in (False, True):
                program = with_knobs(case, coalesce=coalesce, dedup=number % 2 == 1).compile(backend)
                call = case.indices, case.offsets, case.sample_weights
                batch, other = (program.prepare_ahead if ahead else program.prepare)(*call), program.prepare(*call)
                outputs = case.outputs(batch)
                program.forward(case.weights, batch, outputs)
                program.forward(case.weights, other, case.outputs(other))
                grads = random_grads(case, batch, 5)
                weights = [weight.clone() for weight in case.weights]
                gradients = [part for table in range(len(weights)) for part in program.coalesced_grad(table, [Segment(batch, grads)])]
                for segments in ([Segment(batch, grads, [0.5] * len(weights))], [Segment(batch, grads), Segment(other, grads)],
                                 [Segment(batch, [None, *grads[1:]])]):
                    program.update(weights, [None] * len(weights), [SGD] * len(weights), segments)
                results.append([*outputs, *gradients, *weights])
            assert all(map(torch.equal, *results))

    @pytest.mark.parametrize("threads", [1, 3])
    def test_rows_that_were_found_ahead_are_divided_among_threads(self, backend, threads):
        case = random_case(3, (17,), batch=1500, length=9, rows=700, shared=True, padding=True)
        torch.set_num_threads(threads)
        results = []
        for prepare in ("prepare", "prepare_ahead"):
            program = with_knobs(case, coalesce="sort").compile(backend)
            batch = getattr(program, prepare)(case.indices, case.offsets, case.sample_weights)
            weight, sums = case.weights[0].clone(), torch.zeros(700)
            program.update([weight], [sums], [UpdateRule("rowwise_adagrad", 0.1, 1e-8)], [Segment(batch, random_grads(case, batch, 5))])
            results.append((weight, sums))
        assert all(map(torch.equal, *results)) and not torch.equal(results[0][0], case.weights[0])

    def test_where_maxima_came_from(self, backend):
        """Of equal ones the first; of duplicates of a row, one; nowhere in empty bags, in bags of padding, and before a forward."""
        weight = torch.tensor([[1.0, 5, 2], [1, 4, 2], [9, 9, 9], [3, -1, -2]])
        ids, starts = torch.tensor([0, 1, 0, 3, 1, 2, 2]), torch.tensor([0, 3, 3, 5])       # rows 0 1 0 | none | 3 1 | padding twice
        program = backend.compile([TableSpec("t", 4, 3)], [FeatureSpec("f", 0, "max", padding_idx=2), FeatureSpec("g", 0)])
        batch, outputs = program.prepare([ids, ids], [starts, starts]), [torch.full((4, 3), torch.nan) for _ in range(2)]
        before = weight.clone()
        program.update([before], [None], [SGD], [Segment(batch, [torch.ones(4, 3), None])])
        assert (batch.maxima(0) == -1).all() and torch.equal(before, weight)
        program.forward([weight], batch, outputs)
        assert outputs[0].tolist() == [[1, 5, 2], [0, 0, 0], [3, 4, 2], [0, 0, 0]]
        assert batch.maxima(0).tolist() == [[0, 0, 0], [-1, -1, -1], [3, 4, 4], [-1, -1, -1]] and batch.maxima(0).dtype == torch.int64
        with pytest.raises(ValueError, match="feature 'g': pooling 'sum' has no maxima"):
            batch.maxima(1)
        rows, grads = program.coalesced_grad(0, [Segment(batch, [torch.ones(4, 3), None])])
        assert rows.tolist() == [0, 1, 3] and grads.tolist() == [[1, 1, 1], [0, 1, 1], [1, 0, 0]]

    def test_tables_that_fit(self, backend):
        case = random_case(1)
        program = case.compile(backend)
        first, second = case.weights
        assert program.fits(case.weights) and program.fits([first.requires_grad_(), second])
        for other in (second.double(), second[1:], second.t().contiguous().t(), torch.cat([second, second], 1)[:, ::2]):
            assert not program.fits([first, other])

    @pytest.mark.parametrize("dim", [3, 64, 1000])
    @pytest.mark.parametrize("padding", [False, True])
    def test_gradient_of_sample_weights(self, backend, dim, padding):
        case = random_case(8, (dim,), weighted=True, padding=padding)
        program = case.compile(backend)
        batch = case.prepare(program)
        grad = random_grads(case, batch, 3)[0]
        got = program.weight_grad(case.weights, batch, 0, grad)
        expected = np.zeros(len(case.indices[0]))
        for bag, members in case.bags(0):
            for k, row, _ in members:
                expected[k] = grad[bag].double().numpy() @ case.weights[0][row].double().numpy()
        assert np.array_equal(got.numpy(), expected)

    def test_reading_a_batch_back(self, backend, case):
        program = case.compile(backend)
        batch = case.prepare(program)
        kept = [ids.clone() for ids in case.indices]
        bounds = [case.bounds(f) for f in range(len(case.features))]
        for given in (*case.indices, *(o for o in case.offsets if isinstance(o, Tensor))):
            given.fill_(0)
        assert batch.nbytes > 0
        for feature, ids in enumerate(kept):
            assert torch.equal(batch.indices(feature), ids.long()) and batch.indices(feature).dtype == torch.int64
            assert batch.offsets(feature).tolist() == bounds[feature] and batch.offsets(feature).dtype == torch.int64

    def test_a_batch_owns_its_ids_and_weights(self, backend):
        case = random_case(5, (4,), weighted=True)
        program = case.compile(backend)
        batch = case.prepare(program)
        expected = pooled(case, 0)
        case.indices[0].fill_(0)
        case.sample_weights[0].fill_(0)
        outputs = case.outputs(batch)
        program.forward(case.weights, batch, outputs)
        assert np.array_equal(outputs[0].numpy(), expected)

    def test_many_batches_alive_at_once(self, backend):
        cases = [random_case(seed, (4, 8)) for seed in range(6)]
        program = cases[0].compile(backend)
        batches = [c.prepare(program) for c in cases]
        for case, batch in zip(cases, batches):
            outputs = case.outputs(batch)
            program.forward(case.weights, batch, outputs)
            assert all(np.array_equal(o.numpy(), pooled(case, f)) for f, o in enumerate(outputs))

    @pytest.mark.parametrize("step", [2, -1])
    def test_strided_and_unaligned_inputs(self, backend, step):
        case = random_case(6, (4, 8), weighted=True, index_dtypes=[torch.int64, torch.int32])
        expected = [pooled(case, f) for f in range(2)]

        def spread(tensor: Tensor) -> Tensor:
            if step == -1:      # a negative stride does not exist in torch: take an odd column of a wide matrix
                return torch.stack([tensor - 1, tensor, tensor + 1], 1)[:, 1]
            return torch.stack([tensor, tensor - 1], 1).view(-1)[::2]

        case.indices, case.offsets = [spread(i) for i in case.indices], [spread(o) for o in case.offsets]
        case.sample_weights = [spread(w) for w in case.sample_weights]
        shift = [torch.cat([torch.zeros(1), w.view(-1)])[1:].view_as(w) for w in case.weights]
        program = case.compile(backend)
        batch = case.prepare(program)
        outputs = case.outputs(batch)
        program.forward(shift, batch, outputs)
        assert all(np.array_equal(o.numpy(), e) for o, e in zip(outputs, expected))

    def test_a_program_can_be_copied(self, backend):
        case = random_case(1, (4, 8))
        for program in (copy.deepcopy(case.compile(backend)), pickle.loads(pickle.dumps(case.compile(backend)))):
            batch = case.prepare(program)
            outputs = case.outputs(batch)
            program.forward(case.weights, batch, outputs)
            assert np.array_equal(outputs[1].numpy(), pooled(case, 1))

    def test_no_tables(self, backend):
        program = backend.compile([], [])
        batch = program.prepare([], [])
        assert batch.num_bags == () and batch.num_lookups == ()
        program.forward([], batch, [])
        program.forward([], batch, torch.empty(3, 0))
        program.update([], [], [], [Segment(batch, [])])

    @pytest.mark.parametrize("include_last", [False, True])
    def test_no_bags(self, backend, include_last):
        case = random_case(1, (4, 8), batch=0, include_last=include_last, pooling=["sum", "mean"])
        program = case.compile(backend)
        batch = case.prepare(program)
        assert batch.num_bags == (0, 0) and batch.num_lookups == (0, 0)
        program.forward(case.weights, batch, torch.empty(0, 12))
        before = [w.clone() for w in case.weights]
        program.update(case.weights, [None] * 2, [SGD] * 2, [Segment(batch, torch.empty(0, 12)), *[Segment(batch, [None, None])]])
        program.update(case.weights, [None] * 2, [SGD] * 2, [])
        assert all(torch.equal(a, b) for a, b in zip(case.weights, before))
        rows, grads = program.coalesced_grad(1, [Segment(batch, torch.empty(0, 12))])
        assert rows.shape == (0,) and grads.shape == (0, 8)
        assert program.expanded_grad(1, [])[1].shape == (0, 8)

    @pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
    def test_empty_bags_alone(self, backend, pooling):
        case = random_case(1, (17,), pooling=[pooling])
        case.indices, case.offsets = [torch.empty(0, dtype=torch.int64)], [torch.zeros(5, dtype=torch.int64)]
        program = case.compile(backend)
        batch = case.prepare(program)
        assert batch.num_bags == (5,)
        outputs = case.outputs(batch)
        program.forward(case.weights, batch, outputs)
        assert (outputs[0] == 0).all()

    def test_the_first_and_the_last_row(self, backend):
        case = random_case(1, (4,))
        case.indices, case.offsets = [torch.tensor([0, 10, 10, 0])], [torch.tensor([0, 2, 2])]
        program = case.compile(backend)
        batch = case.prepare(program)
        outputs = case.outputs(batch)
        program.forward(case.weights, batch, outputs)
        assert np.array_equal(outputs[0].numpy(), pooled(case, 0))

    def test_parameters_that_require_grad(self, backend):
        case = random_case(1, (4, 8))
        program = case.compile(backend)
        batch = case.prepare(program)
        outputs = case.outputs(batch)
        grads = random_grads(case, batch, 2)
        parameters = [torch.nn.Parameter(w.clone()) for w in case.weights]
        program.forward(parameters, batch, outputs)
        assert all(np.array_equal(o.numpy(), pooled(case, f)) for f, o in enumerate(outputs))
        program.update(parameters, [None, None], [SGD, SGD], [Segment(batch, [g.requires_grad_() for g in grads])])
        for table, parameter in enumerate(parameters):
            want, _ = updated(case.weights[table], None, SGD, row_sums([lookup_grads(case, table, [g.detach() for g in grads])]))
            assert np.array_equal(parameter.detach().numpy(), want)
