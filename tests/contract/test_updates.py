"""What every kernel backend must do with gradients, run over each of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparselift.kernels.base import COALESCE_METHODS, FeatureSpec, Segment, TableKnobs, TableSpec, UpdateRule
from tests.contract.cases import CASES, DIMS, RULES, SGD, SUMMING, check_update, is_refused, with_knobs
from tests.contract.naive import Case, lookup_grads, random_case, random_grads, row_sums, updated


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return random_case(1, **CASES[request.param])


class TestUpdates:
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
