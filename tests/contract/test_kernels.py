"""What every kernel backend must do, run over each of them: the reference, the CPU kernels of every instruction set, the CUDA kernels.

Updates are in test_updates.py.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from sparselift.kernels.base import STORES, BagProgram, IndexBatch, Segment
from tests.contract.cases import CASES, DIMS, SGD, check_update, with_knobs
from tests.contract.naive import Case, lookup_grads, pooled, random_case, random_grads, row_sums, updated


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return random_case(1, **CASES[request.param])


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

    def test_tables_that_fit(self, backend):
        case = random_case(1)
        program = case.compile(backend)
        first, second = case.weights
        assert program.fits(case.weights) and program.fits([first.requires_grad_(), second])
        for other in (second.double(), second[1:], second.t().contiguous().t(), torch.cat([second, second], 1)[:, ::2]):
            assert not program.fits([first, other])

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
