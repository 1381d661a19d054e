"""Bits of torch, and bounds where the order of a sum is free: every kernel backend on real values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparselift.kernels.base import FeatureSpec, Segment, TableKnobs, TableSpec, UpdateRule
from tests.contract.naive import Case, lookup_grads, row_sums, updated


class TestRealValues:
    """Real values: forward and lookup-by-lookup SGD have torch's bits, whatever order cannot fix is bounded."""

    @pytest.mark.parametrize("kind", ["sum", "mean", "weighted", "padding", "mean_padding", "weighted_padding", "max", "max_padding"])
    def test_bits_of_torch(self, backend, kind):
        for dim in (1, 3, 4, 16, 17, 64, 96, 128, 256, 300):
            self.check_bits_of_torch(backend, kind, dim)

    def check_bits_of_torch(self, backend, kind, dim):
        generator = torch.Generator().manual_seed(dim)
        mode, padding = next((m for m in ("mean", "max") if m in kind), "sum"), (3 if "padding" in kind else None)
        bag = torch.nn.EmbeddingBag(50, dim, mode=mode, sparse=mode != "max", padding_idx=padding)
        with torch.no_grad():
            bag.weight.normal_(generator=generator)
            bag.weight[7, ::2] = torch.nan if mode == "max" else 0          # kept where it comes first in its bag
            bag.weight[9] = bag.weight[11]                                  # which have equal maxima
        ids, starts = torch.randint(0, 50, (200,), generator=generator), torch.arange(0, 200, 7)
        weights = torch.randn(200, generator=generator) if "weighted" in kind else None
        feature = FeatureSpec("f", 0, mode, padding_idx=padding, weighted=weights is not None)
        by_lookup = "none" in backend.coalesce_methods
        program = backend.compile([TableSpec("t", 50, dim, knobs=TableKnobs(coalesce="none" if by_lookup else "sort"))], [feature])
        batch = program.prepare([ids], [starts], [weights])
        out, mine = torch.empty(len(starts), dim), bag.weight.detach().clone()
        program.forward([mine], batch, out)
        expected = bag(ids, starts, weights)
        assert torch.equal(out.nan_to_num(), expected.nan_to_num()) and torch.equal(out.isnan(), expected.isnan())
        grad = torch.randn(expected.shape, generator=generator)
        expected.backward(grad)
        if mode == "max":                     # whose gradient is dense: added up before SGD sees it
            rows, grads = program.coalesced_grad(0, [Segment(batch, grad)])
            assert torch.equal(grads, bag.weight.grad[rows]) and not bag.weight.grad.index_fill(0, rows, 0).any()
            return
        if not by_lookup:
            return
        torch.optim.SGD(bag.parameters(), lr=0.037).step()
        program.update([mine], [None], [UpdateRule("sgd", 0.037)], [Segment(batch, grad)])
        assert torch.equal(mine, bag.weight)

    def step_of_torch(self, bag, optimizer, generator):
        """Ids, none of which repeats, offsets and gradients of a step that torch has done."""
        ids, starts = torch.randperm(50, generator=generator)[:40], torch.arange(0, 40, 7)
        expected = bag(ids, starts)
        grad = torch.randn(expected.shape, generator=generator)
        optimizer.zero_grad()
        expected.backward(grad)
        optimizer.step()
        return ids, starts, grad

    def agree_and_go_on(self, before, mine, bag):
        """To 4 ulp of weights or updates; the next step begins with torch's weights."""
        largest = torch.maximum(before.abs(), mine.abs())
        assert ((mine - bag.weight).abs() <= 4 * 2.0**-23 * largest).all()
        mine.copy_(bag.weight.detach())

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
            before, (ids, starts, grad) = mine.clone(), self.step_of_torch(bag, optimizer, generator)
            program.update([mine], [state], [UpdateRule("adagrad", 0.037, eps=1e-6)], [Segment(program.prepare([ids], [starts]), grad)])
            assert torch.equal(state, optimizer.state[bag.weight]["sum"])
            self.agree_and_go_on(before, mine, bag)

    def test_torch_sparse_adam_without_duplicates(self, backend):
        """As Adagrad: the moments have torch's bits, weights agree to 4 ulp. The first of three steps starts from nothing."""
        generator = torch.Generator().manual_seed(6)
        bag = torch.nn.EmbeddingBag(50, 17, mode="mean", sparse=True)
        with torch.no_grad():
            bag.weight.normal_(generator=generator)
        mine, state = bag.weight.detach().clone(), (torch.zeros(50, 17), torch.zeros(50, 17))
        program = backend.compile([TableSpec("t", 50, 17)], [FeatureSpec("f", 0, "mean")])
        optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.037, betas=(0.8, 0.97), eps=1e-6)
        for step in range(1, 4):
            before, (ids, starts, grad) = mine.clone(), self.step_of_torch(bag, optimizer, generator)
            rule = UpdateRule("adam", 0.037 * (1 - 0.97**step) ** 0.5 / (1 - 0.8**step), eps=1e-6, betas=(0.8, 0.97))
            program.update([mine], [state], [rule], [Segment(program.prepare([ids], [starts]), grad)])
            for part, key in zip(state, ("exp_avg", "exp_avg_sq")):
                assert torch.equal(part, optimizer.state[bag.weight][key])
            self.agree_and_go_on(before, mine, bag)

    @pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
    @pytest.mark.parametrize("dim", [17, 64, 300])
    def test_error_of_a_coalesced_update(self, backend, kind, dim):
        """n float32 additions err by at most n ulp of the sum of absolute terms; the formula adds a few roundings."""
        generator = torch.Generator().manual_seed(0)
        ids, starts = torch.randint(0, 20, (400,), generator=generator), torch.arange(0, 400, 3)
        grad = torch.randn(len(starts), dim, generator=generator).abs_() + 0.5
        weight = torch.randn(20, dim, generator=generator)
        rule = UpdateRule(kind, 0.037, eps=1e-3, betas=(0.9, 0.99))
        program = backend.compile([TableSpec("t", 20, dim)], [FeatureSpec("f", 0)])
        state = {"sgd": None, "adagrad": torch.ones(20, dim), "rowwise_adagrad": torch.ones(20),
                 "adam": (torch.ones(20, dim), torch.ones(20, dim))}[kind]
        case = Case([TableSpec("t", 20, dim)], [FeatureSpec("f", 0)], [weight.clone()], [ids], [starts])
        sums = row_sums([lookup_grads(case, 0, [grad])])
        want, _ = updated(weight, state, rule, sums)
        program.update([weight], [state], [rule], [Segment(program.prepare([ids], [starts]), grad)])
        largest = 400 * 2.0**-24 * max(np.abs(s).max() for s in sums.values())      # of a gradient sum
        slack = rule.lr * (largest if kind == "sgd" else 1e-4) + 4 * 2.0**-24 * np.abs(want).max()
        assert np.abs(weight.numpy() - want).max() <= slack
