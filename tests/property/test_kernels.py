"""Kernels against the reference backend on whatever Hypothesis thinks of, and laws that need no reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselift.dtypes import torch_dtype
from sparselift.kernels import available_backends, get_backend
from sparselift.kernels.base import (
    COALESCE_METHODS,
    POOLINGS,
    STORES,
    UPDATE_RULES,
    WEIGHT_DTYPES,
    FeatureSpec,
    Segment,
    TableKnobs,
    TableSpec,
    UpdateRule,
)
from tests.contract.naive import Case, fresh_state, parts_of, random_case, random_grads

BACKENDS = [name for name in available_backends() if name.startswith("cpu-")]
pytestmark = pytest.mark.skipif(not BACKENDS, reason="the CPU kernels are not built")
REFERENCE = get_backend("reference")
knobs = st.builds(TableKnobs, coalesce=st.sampled_from(COALESCE_METHODS), prefetch=st.integers(0, 40),
                  partition=st.sampled_from(["bag", "table"]), dedup=st.booleans(), stores=st.sampled_from(STORES))


@st.composite
def cases(draw) -> Case:
    """Real weights, so that an order of summation that differs shows."""
    dims = draw(st.lists(st.sampled_from([1, 2, 5, 8, 16, 31, 48, 80, 130, 257]), min_size=1, max_size=3))
    case = random_case(
        draw(st.integers(0, 2**16)), dims, batch=draw(st.integers(0, 12)), length=draw(st.integers(0, 9)), rows=draw(st.integers(2, 40)),
        pooling=draw(st.permutations(POOLINGS)), padding=draw(st.booleans()), weighted=draw(st.booleans()),
        include_last=draw(st.booleans()), shared=draw(st.booleans()),
        index_dtypes=draw(st.sampled_from([[torch.int64], [torch.int32, torch.int64, torch.int64]])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    case.sample_weights = [None if w is None else torch.randn(w.shape, generator=generator) for w in case.sample_weights]
    case.tables = [draw(any_kind_of(table)) for table in case.tables]
    case.weights = [torch.randn(w.shape, generator=generator).to(torch_dtype(t.dtype)) for w, t in zip(case.weights, case.tables)]
    return case


def any_kind_of(table: TableSpec) -> st.SearchStrategy[TableSpec]:
    """Of every dtype, and with every knob that it takes."""
    taken = st.tuples(st.sampled_from(WEIGHT_DTYPES), knobs).filter(lambda pair: pair[0] == "float32" or pair[1].coalesce != "none")
    return taken.map(lambda pair: dataclasses.replace(table, dtype=pair[0], knobs=pair[1]))


def backends() -> st.SearchStrategy[str]:
    return st.sampled_from(BACKENDS)


def forward(backend, case: Case) -> list[torch.Tensor]:
    program = case.compile(backend)
    batch = case.prepare(program)
    outputs = case.outputs(batch)
    program.forward(case.weights, batch, outputs)
    return outputs


def arrived(case: Case, batch, shared: bool) -> torch.Tensor | list[torch.Tensor]:
    """Real gradients, a tensor a feature or in one buffer (features of one batch size alone have one)."""
    grads = [g * 0.37 for g in random_grads(case, batch, 1)]
    return torch.cat(grads, 1) if shared and len(set(batch.num_bags)) == 1 else grads


class TestAgainstTheReference:
    @settings(max_examples=60, deadline=None)
    @given(cases(), backends())
    def test_forward_has_its_bits(self, case, name):
        assert all(torch.equal(mine, other) for mine, other in zip(forward(get_backend(name), case), forward(REFERENCE, case)))

    @settings(max_examples=60, deadline=None)
    @given(cases(), backends(), st.sampled_from(UPDATE_RULES), st.booleans(),
           st.lists(st.sampled_from([None, 0.3, 1.0]), min_size=1, max_size=3), st.booleans())
    def test_update_has_its_bits(self, case, name, kind, maximize, scales, shared):
        """But for the row-wise rule, whose mean of squares may be summed in any order."""
        single = [table.knobs.coalesce == "none" for table in case.tables]
        rules = [UpdateRule("sgd" if one else kind, 0.1, eps=1e-2, maximize=maximize, betas=(0.9, 0.99)) for one in single]
        results = []
        for backend in (REFERENCE, get_backend(name)):
            program = case.compile(backend)
            batch = case.prepare(program)
            grads = arrived(case, batch, shared)
            weights, states = [w.clone() for w in case.weights], [fresh_state(table, rule) for rule, table in zip(rules, case.tables)]
            segments = [Segment(batch, grads, None if scale is None else [scale] * len(case.tables)) for scale in scales]
            program.update(weights, states, rules, segments)
            results.append((weights, states))
        for rule, *pair in zip(rules, *(zip(weights, states) for weights, states in results)):
            for mine, other in zip(*((weight, *parts_of(state)) for weight, state in pair)):
                if rule.kind == "rowwise_adagrad":
                    relative = max(1e-5, torch.finfo(mine.dtype).eps)
                    assert torch.allclose(mine, other, rtol=relative, atol=1e-5)
                else:
                    assert torch.equal(mine, other)

    @settings(max_examples=40, deadline=None)
    @given(cases(), backends(), st.booleans())
    def test_gradients_have_its_bits(self, case, name, shared):
        results = []
        for backend in (REFERENCE, get_backend(name)):
            program = case.compile(backend)
            batch = case.prepare(program)
            grads = arrived(case, batch, shared)
            segments = [Segment(batch, grads), Segment(batch, grads, [0.3] * len(case.tables))]
            results.append([part for table in range(len(case.tables))
                            for part in (*program.expanded_grad(table, segments), *program.coalesced_grad(table, segments))])
        assert all(torch.equal(mine, other) for mine, other in zip(*results))


class TestLaws:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**16), backends(), st.data())
    def test_permuting_bags_permutes_outputs(self, seed, name, data):
        case = random_case(seed, (19,), batch=6)
        order = data.draw(st.permutations(range(6)))
        bounds = case.bounds(0)
        pieces = [case.indices[0][bounds[bag]:bounds[bag + 1]] for bag in order]
        shuffled = dataclasses.replace(case, indices=[torch.cat(pieces)],
                                       offsets=[torch.tensor([0, *np.cumsum([len(piece) for piece in pieces])[:-1]])])
        backend = get_backend(name)
        assert torch.equal(forward(backend, shuffled)[0], forward(backend, case)[0][list(order)])

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**16), backends(), st.integers(1, 69))
    def test_column_shards_concatenate(self, seed, name, cut):
        case = random_case(seed, (70,), batch=6)
        case.weights = [torch.randn(case.weights[0].shape, generator=torch.Generator().manual_seed(seed))]
        backend = get_backend(name)
        shards = []
        for part in (case.weights[0][:, :cut], case.weights[0][:, cut:]):
            table = TableSpec("t", case.tables[0].rows, part.shape[1])
            shards.append(dataclasses.replace(case, tables=[table], weights=[part.contiguous()]))
        parts = [forward(backend, shard)[0] for shard in shards]
        assert torch.equal(torch.cat(parts, 1), forward(backend, case)[0])

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**16), backends())
    def test_an_update_with_the_expanded_gradient_is_the_update(self, seed, name):
        case = random_case(seed, (12,), batch=9, pooling=["mean"], padding=True)
        backend = get_backend(name)
        program = case.compile(backend)
        batch = case.prepare(program)
        segment = Segment(batch, random_grads(case, batch, seed))
        ids, values = program.expanded_grad(0, [segment])
        flat = backend.compile(case.tables, [FeatureSpec("flat", 0, "none")])
        mine, other = case.weights[0].clone(), case.weights[0].clone()
        rule = [UpdateRule("sgd", 0.3)]
        program.update([mine], [None], rule, [segment])
        flat.update([other], [None], rule, [Segment(flat.prepare([ids], [1]), [values])])
        assert torch.equal(mine, other)
