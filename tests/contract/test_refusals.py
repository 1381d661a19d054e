"""What every kernel backend refuses, in which words."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparselift.kernels.base import FeatureSpec, Segment, TableKnobs, TableSpec, UpdateRule
from tests.contract.naive import random_case

SGD = UpdateRule("sgd", lr=0.5)


class TestRefusals:
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
            (TypeError, "indices must be on .*; got meta", lambda: program.prepare([ids.to("meta")], [starts])),
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
        other = backend.compile([table], [FeatureSpec("f", 0)])
        ids, starts, weight = torch.arange(6), torch.tensor([0, 3]), torch.zeros(11, 4)
        batch, out, grad = program.prepare([ids], [starts]), torch.zeros(2, 4), torch.zeros(2, 4)
        foreign = other.prepare([ids], [starts])
        adagrad = UpdateRule("adagrad", 1.0)
        for error, text, call in [
            (ValueError, r"weight of table 't' must have shape \(11, 4\); got \(10, 4\)",
             lambda: program.forward([weight[1:]], batch, out)),
            (ValueError, "weight of table 't' must be contiguous", lambda: program.forward([weight.t().contiguous().t()], batch, out)),
            (TypeError, "weight of table 't' must be float32; got float16", lambda: program.forward([weight.half()], batch, out)),
            (TypeError, "weight of table 't' must be on .*; got meta", lambda: program.forward([weight.to("meta")], batch, out)),
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
            (ValueError, "the update rule must be one of sgd, adagrad, rowwise_adagrad, adam; got 'lamb'",
             lambda: program.update([weight], [None], [UpdateRule("lamb", 1.0)], [])),
            (ValueError, r"adam needs states of shapes \(11, 4\) and \(11, 4\); got 1",
             lambda: program.update([weight], [torch.zeros(11, 4)], [UpdateRule("adam", 1.0)], [])),
            (ValueError, r"state of table 't' must have shape \(11, 4\); got \(11,\)",
             lambda: program.update([weight], [(torch.zeros(11, 4), torch.zeros(11))], [UpdateRule("adam", 1.0)], [])),
            (ValueError, r"betas must be at least 0 and below 1; got \(0.9, 1.0\)",
             lambda: program.update([weight], [(weight, weight)], [UpdateRule("adam", 1.0, betas=(0.9, 1.0))], [])),
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

    def test_lookup_by_lookup_there_is_sgd_alone(self, backend):
        if "none" not in backend.coalesce_methods:
            return
        program = backend.compile([TableSpec("t", 11, 4, knobs=TableKnobs(coalesce="none"))], [FeatureSpec("f", 0)])
        weight = torch.zeros(11, 4)
        with pytest.raises(ValueError, match="coalesce='none' allows sgd alone; got adagrad"):
            program.update([weight], [weight], [UpdateRule("adagrad", 1.0)], [])

    @pytest.mark.parametrize(("table", "feature", "message"), [
        ({"rows": 0}, {}, "table 't': rows must be in"),
        ({"rows": 2**31}, {}, "table 't': rows must be in"),
        ({"dim": 0}, {}, "table 't': dim must be at least 1; got 0"),
        ({"dtype": "float64"}, {}, "table 't': weights must be one of float32, float16, bfloat16; got 'float64'"),
        ({"knobs": TableKnobs(coalesce="hash")}, {}, "table 't': coalesce must be one of chain, none, sort, dense; got 'hash'"),
        ({"knobs": TableKnobs(partition="row")}, {}, "table 't': partition must be one of bag, table; got 'row'"),
        ({"knobs": TableKnobs(stores="nt")}, {}, "table 't': stores must be one of auto, cached, streamed; got 'nt'"),
        ({"knobs": TableKnobs(prefetch=-1)}, {}, "table 't': prefetch must not be negative; got -1"),
        ({}, {"table": 1}, "feature 'f': table must be a position among the 1 tables; got 1"),
        ({}, {"pooling": "min"}, "feature 'f': pooling must be one of sum, mean, none, max; got 'min'"),
        ({}, {"pooling": "max", "weighted": True}, "feature 'f': per-sample weights need pooling 'sum'; got 'max'"),
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
