"""What every kernel backend must do, run over each of them: the reference, and the CPU kernels of every instruction set."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import signal
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from sparselift.kernels.base import BagProgram, FeatureSpec, IndexBatch, Segment, TableKnobs, TableSpec, UpdateRule
from tests.contract.naive import Case, integers, lookup_grads, pooled, random_case, random_grads, row_sums, updated

SGD = UpdateRule("sgd", lr=0.5)
RULES = [SGD, UpdateRule("sgd", lr=0.25, maximize=True), UpdateRule("adagrad", lr=0.5, eps=0.25),
         UpdateRule("rowwise_adagrad", lr=0.5, eps=0.25), UpdateRule("rowwise_adagrad", lr=0.5, eps=0.25, weight_decay=0.5, maximize=True)]
DIMS = [1, 3, 4, 17, 64, 128, 1000]
CASES = {
    "sum": {},
    "mean": {"pooling": ["mean"]},
    "none": {"pooling": ["none"]},
    "mixed": {"pooling": ["sum", "mean", "none"], "dims": (4, 17, 64), "shared": True},
    "padding": {"pooling": ["sum", "mean", "none"], "dims": (4, 8, 16), "padding": True},
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


def fresh_state(case: Case, table: int, rule: UpdateRule) -> Tensor | None:
    spec = case.tables[table]
    shape = {"sgd": None, "adagrad": (spec.rows, spec.dim), "rowwise_adagrad": (spec.rows,)}[rule.kind]
    return None if shape is None else integers(np.random.default_rng(9), shape).abs_()


def check_update(case: Case, program: BagProgram, rule: UpdateRule, segments: list[Segment], parts: list[list]) -> None:
    """`parts` a table: (ids, gradients) of every lookup. SGD is exact, the others round at the square root and the division."""
    states = [fresh_state(case, t, rule) for t in range(len(case.tables))]
    expected = [updated(w, s, rule, row_sums(p)) for w, s, p in zip(case.weights, states, parts)]
    program.update(case.weights, states, [rule] * len(states), segments)
    for weight, state, (want_weight, want_state) in zip(case.weights, states, expected):
        if rule.kind == "sgd":
            assert np.array_equal(weight.numpy(), want_weight)
        else:
            assert np.allclose(weight.numpy(), want_weight, rtol=1e-6, atol=1e-6)
            assert np.allclose(state.numpy(), want_state, rtol=2e-7, atol=0)


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
                      {"dedup": True, "prefetch": 0}):
            program = with_knobs(case, **knobs).compile(backend)
            batch = case.prepare(program)
            outputs = case.outputs(batch)
            program.forward(case.weights, batch, outputs)
            program.forward(case.weights, batch, outputs)
            results.append(outputs)
            assert all(torch.equal(a, b) for a, b in zip(results[0], outputs)), knobs

    @pytest.mark.parametrize("dim", DIMS)
    def test_forward_of_any_dim(self, backend, dim):
        case = random_case(dim, (dim,) * 3, pooling=["sum", "mean", "none"])
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

    @pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.kind}{'-max' * r.maximize}")
    def test_update(self, backend, case, rule):
        program = case.compile(backend)
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

    @pytest.mark.parametrize("rule", RULES[:1] + RULES[2:4], ids=lambda r: r.kind)
    @pytest.mark.parametrize("dim", DIMS)
    def test_update_of_any_dim(self, backend, dim, rule):
        case = random_case(dim, (dim,), batch=30)
        program = case.compile(backend)
        batch = case.prepare(program)
        grads = random_grads(case, batch, 5)
        check_update(case, program, rule, [Segment(batch, grads)], [[lookup_grads(case, 0, grads)]])

    def test_sgd_lookup_by_lookup(self, backend, case):
        program = with_knobs(case, coalesce="none").compile(backend)
        batch = case.prepare(program)
        grads = random_grads(case, batch, 5)
        check_update(case, program, SGD, [Segment(batch, grads)], [[lookup_grads(case, t, grads)] for t in range(len(case.tables))])

    @pytest.mark.parametrize("coalesce", ["chain", "none"])
    def test_several_segments_with_scales(self, backend, case, coalesce):
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

    @pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "lookup by lookup"])
    def test_the_same_bits_at_any_thread_count(self, backend, kind):
        """Large enough for a parallel region; one table outweighs the others, so that its rows are split among the threads."""
        rule = UpdateRule("sgd" if " " in kind else kind, lr=0.1, eps=1e-3)
        knobs = TableKnobs(coalesce="none" if " " in kind else "chain")
        generator = torch.Generator().manual_seed(7)
        tables = [TableSpec("large", 700, 32, knobs=knobs), TableSpec("small", 40, 3, knobs=dataclasses.replace(knobs, dedup=True)),
                  TableSpec("other", 90, 20, knobs=dataclasses.replace(knobs, partition="table"))]
        features = [FeatureSpec("sum", 0, "sum", 0, padding_idx=5), FeatureSpec("mean", 1, "mean", 32),
                    FeatureSpec("weighted", 2, "sum", 35, weighted=True), FeatureSpec("again", 0, "sum", 55)]
        ids = [torch.randint(0, tables[f.table].rows, (4000,), generator=generator) for f in features]
        starts = torch.randint(0, 4001, (599,), generator=generator).sort().values
        offsets = [torch.cat([torch.zeros(1, dtype=torch.int64), starts])] * 4
        weights = [None, None, torch.randn(4000, generator=generator), None]
        values = [torch.randn(t.rows, t.dim, generator=generator) for t in tables]
        grad = torch.randn(600, 87, generator=generator)
        results = []
        for threads in (1, 2, 4, 3):
            torch.set_num_threads(threads)
            program = backend.compile(tables, features)
            batch = program.prepare(ids, offsets, weights)
            mine, out = [v.clone() for v in values], torch.empty(600, 87)
            states = [None if kind == "sgd" or " " in kind else torch.ones(v.shape if kind == "adagrad" else v.shape[:1]) for v in values]
            program.forward(mine, batch, out)
            slope = program.weight_grad(mine, batch, 2, grad[:, 35:55])
            program.update(mine, states, [rule] * 3, [Segment(batch, grad), Segment(batch, grad, [0.3, 0.5, 0.7])])
            results.append([out, slope, *mine, *(s for s in states if s is not None)])
            assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1])), threads
        assert not torch.equal(results[0][2], values[0])

    def test_in_a_forked_child(self, backend):
        """The threads of the parent's pool do not exist in a child: kernels must not wait for them."""
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
        """The last row of a table of more than 2**31 elements, in a file with a hole where the rest would be."""
        rows, dim = 2**31 // 64 + 11, 64
        files = [torch.from_numpy(np.memmap(tmp_path / name, np.float32, "w+", shape=(rows, dim))) for name in ("table", "state")]
        table, state = files
        table[-1], table[0], state[-1] = torch.arange(64.0), 7.0, 0.0
        program = backend.compile([TableSpec("t", rows, dim)], [FeatureSpec("f", 0)])
        batch = program.prepare([torch.tensor([rows - 1, 0, rows - 1])], [torch.tensor([0])])
        out, grad = torch.empty(1, dim), torch.full((1, dim), 2.0)
        program.forward([table], batch, out)
        assert torch.equal(out[0], 2 * torch.arange(64.0) + 7)
        program.update([table], [state if kind == "adagrad" else None], [UpdateRule(kind, 0.5, eps=4.0)], [Segment(batch, grad)])
        step = 0.5 * 4 / (4 + 4 if kind == "adagrad" else 1)
        assert torch.equal(table[-1], torch.arange(64.0) - step) and table[1:3].abs().max() == 0
        assert state[-1, 0] == (16 if kind == "adagrad" else 0)

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

    @pytest.mark.parametrize("pooling", ["sum", "mean"])
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

    @pytest.mark.parametrize("wrong", [-1, 11, 2**31 - 1, 2**31, 2**32 + 1, -2**31, -2**63, 2**63 - 1])
    @pytest.mark.parametrize("position", [0, 36])
    def test_ids_out_of_range(self, backend, wrong, position):
        case = random_case(1, (4, 8))
        case.indices[1] = torch.arange(37) % 11
        case.indices[1][position] = wrong
        case.offsets[1] = torch.tensor([0])
        program = case.compile(backend)
        with pytest.raises(IndexError, match=rf"feature 'f1': id {wrong} at position {position} .*'t1' of 11 rows"):
            case.prepare(program)

    @pytest.mark.parametrize("wrong", [-1, 11, 2**31 - 1, -2**31])
    def test_int32_ids_out_of_range(self, backend, wrong):
        case = random_case(1, (4,), index_dtypes=[torch.int32])
        case.indices[0][3] = wrong
        with pytest.raises(IndexError, match=rf"id {wrong} at position 3 "):
            case.prepare(case.compile(backend))

    def test_the_first_of_several_faults_is_named(self, backend):
        case = random_case(1, (4, 8))
        for ids in case.indices:
            ids[5], ids[2] = 99, -7
        with pytest.raises(IndexError, match="feature 'f0': id -7 at position 2"):
            case.prepare(case.compile(backend))

    @pytest.mark.parametrize(("include_last", "offsets", "message"), [
        (False, [1, 2], "must start at 0; got 1"),
        (False, [-1, 2], "must start at 0; got -1"),
        (False, [0, 3, 2], "must not decrease; got 2 after 3 at position 2"),
        (False, [0, 7], "offset 7 at position 1 passes the 6 ids"),
        (False, [0, 2**40, 3], r"offset 1099511627776 at position 1 passes the 6 ids"),
        (False, [], "no offsets for 6 ids"),
        (True, [], "no offsets for 6 ids"),
        (True, [0, 2, 5], r"last offset must equal the number of ids \(6\); got 5"),
        (True, [0, 2, 7], "offset 7 at position 2 passes the 6 ids"),
        (True, [0], r"last offset must equal the number of ids \(6\); got 0"),
        (False, 0, "bag length must be at least 1; got 0"),
        (False, 4, "6 ids do not make bags of 4"),
    ])
    @pytest.mark.parametrize("pooling", ["sum", "mean"])
    def test_wrong_offsets(self, backend, include_last, offsets, message, pooling):
        program = backend.compile([TableSpec("t", 11, 4)], [FeatureSpec("f", 0, pooling, include_last_offset=include_last)])
        given = offsets if isinstance(offsets, int) else torch.tensor(offsets, dtype=torch.int64)
        with pytest.raises(ValueError, match=f"feature 'f': .*{message}"):
            program.prepare([torch.arange(6)], [given])

    def test_wrong_inputs(self, backend):
        program = backend.compile([TableSpec("t", 11, 4)], [FeatureSpec("f", 0)])
        weighted = backend.compile([TableSpec("t", 11, 4)], [FeatureSpec("f", 0, weighted=True)])
        unpooled = backend.compile([TableSpec("t", 11, 4)], [FeatureSpec("f", 0, "none")])
        ids, starts = torch.arange(6), torch.tensor([0, 3])
        for error, text, call in [
            (ValueError, "indices must have one entry a feature .1.; got 2", lambda: program.prepare([ids, ids], [starts])),
            (ValueError, "offsets must have one entry a feature .1.; got 0", lambda: program.prepare([ids], [])),
            (ValueError, "weights must have one entry a feature .1.; got 2", lambda: program.prepare([ids], [starts], [None, None])),
            (TypeError, "indices must be int32 or int64; got float32", lambda: program.prepare([ids.float()], [starts])),
            (TypeError, "indices must be int32 or int64; got bool", lambda: program.prepare([ids.bool()], [starts])),
            (TypeError, "indices must be a tensor; got list", lambda: program.prepare([[1, 2]], [starts])),
            (TypeError, "offsets must be int32 or int64; got int16", lambda: program.prepare([ids], [starts.short()])),
            (TypeError, "offsets must be a tensor; got float", lambda: program.prepare([ids], [1.0])),
            (TypeError, "indices must be on the CPU; got meta", lambda: program.prepare([ids.to("meta")], [starts])),
            (ValueError, "indices must have one dimension", lambda: program.prepare([ids.view(2, 3)], [starts])),
            (ValueError, "offsets must have one dimension", lambda: program.prepare([ids], [torch.tensor(0)])),
            (ValueError, "per-sample weights are required", lambda: weighted.prepare([ids], [starts])),
            (ValueError, "per-sample weights are required", lambda: weighted.prepare([ids], [starts], [None])),
            (ValueError, "per-sample weights are not expected", lambda: program.prepare([ids], [starts], [torch.ones(6)])),
            (ValueError, "5 per-sample weights for 6 ids", lambda: weighted.prepare([ids], [starts], [torch.ones(5)])),
            (TypeError, "per-sample weights must be float32; got float64",
             lambda: weighted.prepare([ids], [starts], [torch.ones(6).double()])),
            (ValueError, "pooling 'none' has bags of 1; got 2", lambda: unpooled.prepare([ids], [2])),
            (ValueError, "pooling 'none' takes 1 as offsets", lambda: unpooled.prepare([ids], [torch.arange(6)])),
        ]:
            with pytest.raises(error, match=text):
                call()

    def test_wrong_tables_outputs_and_rules(self, backend):
        table = TableSpec("t", 11, 4)
        program = backend.compile([table], [FeatureSpec("f", 0)])
        single = backend.compile([TableSpec("t", 11, 4, knobs=TableKnobs(coalesce="none"))], [FeatureSpec("f", 0)])
        ids, starts, weight = torch.arange(6), torch.tensor([0, 3]), torch.zeros(11, 4)
        batch, out, grad = program.prepare([ids], [starts]), torch.zeros(2, 4), torch.zeros(2, 4)
        foreign = single.prepare([ids], [starts])
        adagrad = UpdateRule("adagrad", 1.0)
        for error, text, call in [
            (ValueError, r"weight of table 't' must have shape \(11, 4\); got \(10, 4\)",
             lambda: program.forward([weight[1:]], batch, out)),
            (ValueError, "weight of table 't' must be contiguous", lambda: program.forward([weight.t().contiguous().t()], batch, out)),
            (TypeError, "weight of table 't' must be float32; got float16", lambda: program.forward([weight.half()], batch, out)),
            (TypeError, "weight of table 't' must be on the CPU; got meta", lambda: program.forward([weight.to("meta")], batch, out)),
            (ValueError, "tables must have one entry a table .1.; got 0", lambda: program.forward([], batch, out)),
            (ValueError, "output must have at least 4 columns; got 3", lambda: program.forward([weight], batch, out[:, 1:])),
            (ValueError, r"output must be \(B, width\)", lambda: program.forward([weight], batch, torch.zeros(3, 4))),
            (ValueError, "outputs must have one entry a feature", lambda: program.forward([weight], batch, [])),
            (ValueError, r"output of feature 'f' must have shape \(2, 4\)", lambda: program.forward([weight], batch, [torch.zeros(2, 5)])),
            (ValueError, "output of feature 'f' must have last stride 1",
             lambda: program.forward([weight], batch, [torch.zeros(4, 2).t()])),
            (TypeError, "output of feature 'f' must be float32", lambda: program.forward([weight], batch, [out.double()])),
            (ValueError, "not prepared by this program", lambda: program.forward([weight], foreign, out)),
            (ValueError, "not prepared by this program", lambda: program.update([weight], [None], [SGD], [Segment(foreign, grad)])),
            (ValueError, r"adagrad needs a state of shape \(11, 4\)", lambda: program.update([weight], [None], [adagrad], [])),
            (ValueError, r"state of table 't' must have shape \(11, 4\); got \(11,\)",
             lambda: program.update([weight], [torch.zeros(11)], [adagrad], [])),
            (ValueError, "coalesce='none' allows sgd alone; got adagrad", lambda: single.update([weight], [weight], [adagrad], [])),
            (ValueError, "the update rule must be one of sgd, adagrad, rowwise_adagrad; got 'adam'",
             lambda: program.update([weight], [None], [UpdateRule("adam", 1.0)], [])),
            (ValueError, "weight decay is defined for rowwise_adagrad alone",
             lambda: program.update([weight], [None], [UpdateRule("sgd", 1.0, weight_decay=0.1)], [])),
            (ValueError, "rules and states must have one entry a table", lambda: program.update([weight], [None], [], [])),
            (ValueError, "gradients must have one entry a feature", lambda: program.update([weight], [None], [SGD], [Segment(batch, [])])),
            (ValueError, "scales must have one entry a table",
             lambda: program.update([weight], [None], [SGD], [Segment(batch, grad, [1, 2])])),
            (ValueError, "gradient of feature 'f' must have shape",
             lambda: program.update([weight], [None], [SGD], [Segment(batch, [grad[1:]])])),
            (TypeError, "gradient of feature 'f' must be float32",
             lambda: program.update([weight], [None], [SGD], [Segment(batch, [grad.double()])])),
        ]:
            with pytest.raises(error, match=text):
                call()

    @pytest.mark.parametrize(("table", "feature", "message"), [
        ({"rows": 0}, {}, "table 't': rows must be in"),
        ({"rows": 2**31}, {}, "table 't': rows must be in"),
        ({"dim": 0}, {}, "table 't': dim must be at least 1; got 0"),
        ({"dtype": "float16"}, {}, "table 't': weights must be float32; got float16"),
        ({"knobs": TableKnobs(coalesce="sort")}, {}, "table 't': coalesce must be one of chain, none; got 'sort'"),
        ({"knobs": TableKnobs(partition="row")}, {}, "table 't': partition must be one of bag, table; got 'row'"),
        ({"knobs": TableKnobs(prefetch=-1)}, {}, "table 't': prefetch must not be negative; got -1"),
        ({}, {"table": 1}, "feature 'f': table must be a position among the 1 tables; got 1"),
        ({}, {"pooling": "max"}, "feature 'f': pooling must be one of sum, mean, none; got 'max'"),
        ({}, {"column": -1}, "feature 'f': column must not be negative"),
        ({}, {"padding_idx": 11}, "feature 'f': padding_idx must be in 0..10; got 11"),
        ({}, {"padding_idx": -1}, "feature 'f': padding_idx must be in 0..10; got -1"),
        ({}, {"pooling": "mean", "weighted": True}, "feature 'f': per-sample weights need pooling 'sum'; got 'mean'"),
    ])
    def test_wrong_specs(self, backend, table, feature, message):
        with pytest.raises(ValueError, match=message):
            backend.compile([TableSpec(**{"name": "t", "rows": 11, "dim": 4} | table)],
                            [FeatureSpec(**{"name": "f", "table": 0} | feature)])

    def test_overlapping_columns_need_separate_outputs(self, backend):
        case = random_case(1, (4, 8))
        case.features = [dataclasses.replace(f, column=0) for f in case.features]
        program = case.compile(backend)
        batch = case.prepare(program)
        with pytest.raises(ValueError, match="column 0 lies in another feature's columns"):
            program.forward(case.weights, batch, torch.empty(7, 12))
        program.forward(case.weights, batch, case.outputs(batch))

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


class TestRealValues:
    """Real values: forward and lookup-by-lookup SGD have torch's bits, whatever order cannot fix is bounded."""

    @pytest.mark.parametrize("kind", ["sum", "mean", "weighted", "padding", "mean_padding", "weighted_padding"])
    def test_bits_of_torch(self, backend, kind):
        for dim in (1, 3, 4, 16, 17, 64, 96, 128, 256, 300):
            self.check_bits_of_torch(backend, kind, dim)

    def check_bits_of_torch(self, backend, kind, dim):
        generator = torch.Generator().manual_seed(dim)
        mode, padding = ("mean" if "mean" in kind else "sum"), (3 if "padding" in kind else None)
        bag = torch.nn.EmbeddingBag(50, dim, mode=mode, sparse=True, padding_idx=padding)
        with torch.no_grad():
            bag.weight.normal_(generator=generator)
        ids, starts = torch.randint(0, 50, (200,), generator=generator), torch.arange(0, 200, 7)
        weights = torch.randn(200, generator=generator) if "weighted" in kind else None
        feature = FeatureSpec("f", 0, mode, padding_idx=padding, weighted=weights is not None)
        program = backend.compile([TableSpec("t", 50, dim, knobs=TableKnobs(coalesce="none"))], [feature])
        batch = program.prepare([ids], [starts], [weights])
        out, mine = torch.empty(len(starts), dim), bag.weight.detach().clone()
        program.forward([mine], batch, out)
        expected = bag(ids, starts, weights)
        assert torch.equal(out, expected)
        grad = torch.randn(expected.shape, generator=generator)
        expected.backward(grad)
        torch.optim.SGD(bag.parameters(), lr=0.037).step()
        program.update([mine], [None], [UpdateRule("sgd", 0.037)], [Segment(batch, grad)])
        assert torch.equal(mine, bag.weight)

    def test_torch_adagrad_without_duplicates(self, backend):
        """The sums have torch's bits. Its square root is the vector library's, not always the nearest float32: weights agree to 4 ulp."""
        generator = torch.Generator().manual_seed(5)
        bag = torch.nn.EmbeddingBag(50, 17, mode="mean", sparse=True)
        with torch.no_grad():
            bag.weight.normal_(generator=generator)
        mine, state = bag.weight.detach().clone(), torch.zeros(50, 17)
        program = backend.compile([TableSpec("t", 50, 17)], [FeatureSpec("f", 0, "mean")])
        optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.037, eps=1e-6)
        for _ in range(3):
            ids, starts = torch.randperm(50, generator=generator)[:40], torch.arange(0, 40, 7)
            before = mine.clone()
            expected = bag(ids, starts)
            grad = torch.randn(expected.shape, generator=generator)
            optimizer.zero_grad()
            expected.backward(grad)
            optimizer.step()
            program.update([mine], [state], [UpdateRule("adagrad", 0.037, eps=1e-6)], [Segment(program.prepare([ids], [starts]), grad)])
            assert torch.equal(state, optimizer.state[bag.weight]["sum"])
            largest = torch.maximum(before.abs(), mine.abs())
            assert ((mine - bag.weight).abs() <= 4 * 2.0**-23 * largest).all()
            mine.copy_(bag.weight.detach())

    @pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
    @pytest.mark.parametrize("dim", [17, 64, 300])
    def test_error_of_a_coalesced_update(self, backend, kind, dim):
        """n float32 additions err by at most n ulp of the sum of absolute terms; the formula adds a few roundings."""
        generator = torch.Generator().manual_seed(0)
        ids, starts = torch.randint(0, 20, (400,), generator=generator), torch.arange(0, 400, 3)
        grad = torch.randn(len(starts), dim, generator=generator).abs_() + 0.5
        weight = torch.randn(20, dim, generator=generator)
        rule = UpdateRule(kind, 0.037, eps=1e-3)
        program = backend.compile([TableSpec("t", 20, dim)], [FeatureSpec("f", 0)])
        state = {"sgd": None, "adagrad": torch.ones(20, dim), "rowwise_adagrad": torch.ones(20)}[kind]
        case = Case([TableSpec("t", 20, dim)], [FeatureSpec("f", 0)], [weight.clone()], [ids], [starts])
        sums = row_sums([lookup_grads(case, 0, [grad])])
        want, _ = updated(weight, state, rule, sums)
        program.update([weight], [state], [rule], [Segment(program.prepare([ids], [starts]), grad)])
        largest = 400 * 2.0**-24 * max(np.abs(s).max() for s in sums.values())      # of a gradient sum
        slack = rule.lr * (largest if kind == "sgd" else 1e-4) + 4 * 2.0**-24 * np.abs(want).max()
        assert np.abs(weight.numpy() - want).max() <= slack
