"""Sketches: exact counts, merging, drift, JSON."""

import json
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparselift.stats import Sketch, sketch


def test_one_batch_is_counted_exactly():
    ids = torch.tensor([3, 3, 5, 0, 3, 9, 0, 5])
    seen = sketch(ids, torch.tensor([3, 0, 4, 1]), rows=10, padding_idx=0)
    assert (seen.batches, seen.bags, seen.lookups, seen.empty_bags, seen.padding) == (1, 4, 8, 1, 2)
    assert (seen.id_min, seen.id_max, seen.max_length, seen.rows) == (0, 9, 4, 10)
    assert seen.unique == 3                                     # 3, 5, 9; padding is no row that is read
    assert seen.duplicate_ratio == 1 - 3 / 6
    assert seen.unique_curve == ((1, 1), (1, 1), (2, 1))         # of 3 3 5 3 9 5: the first 1, 2, 4
    assert seen.hot == (3,)                                     # row 3 takes three lookups; 8 rows take all
    assert seen.coverage(1) == 0.5 and seen.coverage(7) == 0.5 and seen.coverage(8) == 1.0 and seen.coverage(0) == 0.0
    assert seen.lengths == ((0, 1), (1, 1), (3, 1), (4, 1))
    assert seen.pooling == 2.0 and seen.empty_share == 0.25 and seen.padding_share == 0.25


@given(st.lists(st.integers(0, 30), max_size=60))
def test_small_and_large_tables_are_counted_alike(ids):
    small, large = (sketch(np.array(ids, dtype=np.int64), [len(ids)], rows) for rows in (31, 10**6))
    assert replace(small, rows=10**6) == large
    assert large.unique == len(set(ids))
    assert large.unique_curve == tuple((len(set(ids[:1 << k])), 1) for k in range(len(ids).bit_length()))


def test_quantiles_of_bag_lengths():
    lengths = np.array([1] * 50 + [7] * 40 + [1000] * 10)
    seen = sketch(np.zeros(lengths.sum(), dtype=np.int64), lengths, rows=1)
    assert [seen.length_quantile(q) for q in (0, 0.5, 0.51, 0.9)] == [1, 1, 7, 7]
    assert seen.length_quantile(1.0) == 1000                    # the longest is kept exactly
    assert dict(seen.lengths) == {1: 50, 7: 40, 992: 10}
    with pytest.raises(ValueError, match=r"between 0 and 1; got 1\.5"):
        seen.length_quantile(1.5)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 4095, 10**6])
def test_long_bags_are_binned_within_three_percent(length):
    (low, count), = sketch(np.zeros(length, dtype=np.int32), [length], rows=1).lengths
    assert count == 1 and low <= length and (length < 64) <= (low == length) and length - low <= length / 32


batches = st.lists(st.lists(st.integers(0, 40), max_size=20), min_size=1, max_size=6)


def build(bags):
    return sketch(np.array([i for bag in bags for i in bag], dtype=np.int64), np.array([len(bag) for bag in bags]), rows=41, padding_idx=7)


@given(st.lists(batches, min_size=1, max_size=3))
def test_merging_is_exact_in_any_order(data):
    parts = [build(bags) for bags in data]
    merged = []
    for order in permutations(parts):
        total = Sketch.empty()
        for part in order:
            total = total.merge(part)
        merged.append(total)
    assert all(other == merged[0] for other in merged)
    total = merged[0]
    assert total.merge(Sketch.empty()) == total
    assert total.lookups == sum(len(bag) for bags in data for bag in bags)
    named = [[i for bag in bags for i in bag if i != 7] for bags in data]
    assert total.unique == sum(len(set(ids)) for ids in named)
    hottest = sum(max((ids.count(i) for i in ids), default=0) for ids in named)
    assert total.coverage(1) == (hottest / sum(map(len, named)) if any(named) else 0.0)


@given(batches)
def test_json_round_trip(bags):
    seen = build(bags)
    text = json.dumps(seen.to_dict())
    assert Sketch.from_dict(json.loads(text)) == seen


def test_a_sketch_stays_small():
    rng = np.random.default_rng(0)
    total = Sketch.empty()
    for _ in range(20):
        lengths = rng.integers(0, 3000, 300)
        total = total.merge(sketch(rng.zipf(1.3, lengths.sum()) % 10**7, lengths, rows=10**7))
    assert len(json.dumps(total.to_dict())) < 8192


def test_the_unique_curve_is_an_average_over_batches_that_are_long_enough():
    total = sketch(np.arange(8), [8], rows=9).merge(sketch(np.zeros(4, dtype=np.int64), [4], rows=9))
    assert [total.unique_at(n) for n in (0, 1, 2, 4, 7, 8, 100)] == [0.0, 1.0, 1.5, 2.5, 2.5, 8.0, 8.0]


@pytest.mark.parametrize(("ids", "lengths", "message"), [
    ([0, 1], [1], r"must add up to the number of ids \(2\); got 1"),
    ([0, 5], [2], r"must be in \[0, 5\); got 5"),
    ([0, 1], [3, -1], r"must not be negative .* got -1"),
    ([-1, 0], [2], r"must be in \[0, 5\); got -1"),
])
def test_impossible_batches_are_refused(ids, lengths, message):
    with pytest.raises(ValueError, match=message):
        sketch(np.array(ids), np.array(lengths), rows=5)


def test_sketches_of_other_tables_do_not_merge():
    with pytest.raises(ValueError, match="5 and 6 rows"):
        sketch(np.array([0]), [1], rows=5).merge(sketch(np.array([0]), [1], rows=6))


@pytest.mark.parametrize(("change", "message"), [
    ({"rows": "5"}, "'rows' must hold integers; got '5'"),
    ({"rows": True}, "'rows' must hold integers; got True"),
    ({"lengths": [[1]]}, r"'lengths' must hold a list of pairs of integers; got \[\[1\]\]"),
    ({"hot": 3}, "'hot' must hold a list of integers; got 3"),
    ({"unique_curve": 3}, "'unique_curve' must hold a list of pairs"),
    ({"colour": 1}, r"unknown \['colour'\]"),
])
def test_ill_typed_documents_are_refused_by_field(change, message):
    document = sketch(np.array([0, 1]), [2], rows=5).to_dict()
    with pytest.raises(ValueError, match=message):
        Sketch.from_dict({**document, **change})


def test_missing_fields_are_named():
    with pytest.raises(ValueError, match=r"missing \['bags', 'batches'"):
        Sketch.from_dict({"rows": 1})


def test_drift_is_quiet_between_batches_of_one_source_and_names_what_changed():
    rng = np.random.default_rng(1)

    def draw(exponent, mean_length, bags=256, padding=0.0):
        lengths = rng.poisson(mean_length, bags)
        ids = rng.zipf(exponent, lengths.sum()) % 1000
        ids[rng.random(ids.size) < padding] = 0
        return sketch(ids, lengths, rows=1000, padding_idx=0)

    usual = draw(1.5, 5)
    assert usual.drift(draw(1.5, 5)) == {}
    assert usual.drift(draw(1.5, 5, bags=2048)) == {}            # a longer batch repeats more, and that is no drift
    assert set(usual.drift(draw(1.5, 20))) == {"pooling"}
    assert {"duplicate_ratio"} <= set(usual.drift(draw(3.0, 5)))
    assert "padding_share" in usual.drift(draw(1.5, 5, padding=0.5))
    assert usual.drift(Sketch.empty()) == {}
