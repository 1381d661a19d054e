"""Lifted tables under what autograd can do: inputs of a backward, hooks, checkpoints, kept graphs, traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparselift.errors import LiftRefused
from tests.unit.gradient_pairs import TABLE, assert_same_grad
from tests.unit.runtime_models import DIM, ROWS, Bags, assert_same, attach, bags_structure, batch, schedule
from tests.unit.test_runtime import Pair, backward, step, train


@pytest.fixture(params=[True, False], ids=["sparse", "dense"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(sparse=request.param)


def test_inputs_of_backward(pair: Pair) -> None:
    for wanted in ([TABLE], [0, 2], [], [0, 1, 2]):
        for others in (True, False):
            if not wanted and not others:
                continue
            for model in (pair.native, pair.lifted):
                model.zero_grad()
                inputs = [model.emb[t].weight for t in wanted] + list(model.top.parameters()) * others
                for seed in range(2):
                    model(*batch(seed)).pow(2).mean().backward(inputs=inputs)
            for native, lifted in zip(pair.native.parameters(), pair.lifted.parameters()):
                assert (native.grad is None) == (lifted.grad is None)
                if native.grad is not None:
                    assert_same_grad(native.grad, lifted.grad, exact=False)
            pair.both(lambda _, optimizer: optimizer.step())
    pair.check()
    train(pair, range(2))
    pair.check()


def test_grad_of_tables(pair: Pair) -> None:
    found = []
    for model in (pair.native, pair.lifted):
        model.emb[0].weight.grad = torch.ones(ROWS[0], DIM)
        loss = model(*batch(0)).pow(2).mean() + model(*batch(1)).pow(2).mean()
        inputs = [model.emb[TABLE].weight, model.top.weight, model.emb[2].weight]
        found.append([*torch.autograd.grad(loss, inputs, retain_graph=True), *torch.autograd.grad(loss, model.emb[0].weight)])
        assert model.emb[TABLE].weight.grad is None and model.emb[0].weight.grad.eq(1).all()
        unrelated = nn.Parameter(torch.ones(ROWS[TABLE], DIM))
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(model(*batch(0)).sum(), [unrelated])
        grads = torch.autograd.grad(model(*batch(0)).sum(), [unrelated, model.emb[TABLE].weight], allow_unused=True)
        assert grads[0] is None
        found[-1].append(grads[1])
        zeros, _ = torch.autograd.grad(model(*batch(0)).sum(), [unrelated, model.top.weight], allow_unused=True, materialize_grads=True)
        assert not zeros.any()
    for native, lifted in zip(*found):
        assert_same_grad(native, lifted, exact=False)
    with pytest.raises(LiftRefused, match="create_graph"):
        torch.autograd.grad(pair.lifted(*batch(0)).sum(), [pair.lifted.emb[0].weight], create_graph=True)
    train(pair, range(2))
    pair.check()


def test_many_gradients_of_a_table_at_once_are_refused() -> None:
    pair = Pair(sparse=False)
    for model in (pair.native, pair.lifted):
        out = model(*batch(0))
        many = torch.eye(len(out))[:, :, None]

        def grads(weight: Tensor, out: Tensor = out, many: Tensor = many) -> Any:
            return torch.autograd.grad(out, [weight], grad_outputs=many, is_grads_batched=True, retain_graph=True)

        assert grads(model.top.weight)[0].shape[0] == len(out)
        if model is pair.lifted:
            with pytest.raises(LiftRefused, match="is_grads_batched"):
                grads(model.emb[0].weight)


def test_gradient_of_sample_weights_alone_leaves_tables_alone() -> None:
    pair = Pair(weighted=True, concat=False)
    found = []
    for model in (pair.native, pair.lifted):
        dense, offsets, indices = batch(0)
        sample_weights = [torch.rand(len(i), generator=torch.Generator().manual_seed(0)).requires_grad_() for i in indices]
        out = model(dense, offsets, indices, sample_weights).pow(2).mean()
        found.append(torch.autograd.grad(out, sample_weights, retain_graph=True))
        assert all(each.weight.grad is None for each in model.emb)
        out.backward(inputs=[sample_weights[1]], retain_graph=True)
        assert all(each.weight.grad is None for each in model.emb) and sample_weights[0].grad is None
        out.backward(inputs=[sample_weights[0], model.emb[0].weight])
        assert model.emb[1].weight.grad is None
        found[-1] += (sample_weights[1].grad, sample_weights[0].grad, model.emb[0].weight.grad.to_dense())
    for native, lifted in zip(*found):
        torch.testing.assert_close(native, lifted)


def test_table_written_to_before_the_gradient_of_sample_weights_raises_as_natively() -> None:
    pair = Pair(weighted=True)
    for model in (pair.native, pair.lifted):
        dense, offsets, indices = batch(0)
        sample_weights = [torch.ones(len(i), requires_grad=True) for i in indices]
        out = model(dense, offsets, indices, sample_weights).sum()
        with torch.no_grad():
            model.emb[TABLE].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
            out.backward()


def test_a_backward_inside_a_backward_with_inputs_is_its_own(pair: Pair) -> None:
    for model in (pair.native, pair.lifted):
        out = model(*batch(0))

        def another_backward(grad: Tensor, model: nn.Module = model) -> None:
            with torch.enable_grad():
                model(*batch(1)).pow(2).mean().backward()

        out.register_hook(another_backward)
        torch.autograd.grad(out.sum(), [model.emb[0].weight])
    for native, lifted in zip(pair.native.emb, pair.lifted.emb):
        assert_same_grad(native.weight.grad, lifted.weight.grad, exact=False)


@pytest.mark.parametrize("moment", ["before the forward", "before the backward"])
def test_hooks_of_weights(pair: Pair, moment: str) -> None:
    seen: list[list[Tensor]] = [[], []]

    def watch(model: nn.Module, log: list[Tensor]) -> list[Any]:
        weight = model.emb[TABLE].weight
        return [weight.register_hook(lambda grad: grad * 2),
                weight.register_hook(lambda grad: log.append(grad.to_dense().clone())),
                weight.register_post_accumulate_grad_hook(lambda w: log.append(w.grad.to_dense().clone()))]

    for model, optimizer, log in ((pair.native, pair.native_opt, seen[0]), (pair.lifted, pair.lifted_opt, seen[1])):
        for seed in range(2):                    # accumulated
            hooks = watch(model, log) if moment == "before the forward" else []
            loss = model(*batch(seed)).pow(2).mean()
            hooks += watch(model, log) if moment == "before the backward" else []
            loss.backward()
            for hook in hooks:
                hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer, 3)
    assert len(seen[0]) == 4
    for native, lifted in zip(*seen, strict=True):
        torch.testing.assert_close(native, lifted)
    pair.check()


class Checkpointed(Bags):
    """Bags whose lookups, or whose dense parts, are computed again in backward."""

    reentrant = False
    where = "lookups"

    def forward(self, dense: Tensor, offsets: Any, indices: Any, weights: Any = None) -> Tensor:
        def look_up(dense: Tensor) -> Tensor:
            return torch.cat([self.bottom(dense).relu(), *(e(i, o) for e, i, o in zip(self.emb, indices, offsets))], dim=1)

        def all_of_it(dense: Tensor) -> Tensor:
            return self.top(look_up(dense).sigmoid() * 2)

        if self.where == "lookups":
            return self.top(checkpoint(look_up, dense, use_reentrant=self.reentrant).sigmoid() * 2)
        if self.where == "all":
            return checkpoint(all_of_it, dense, use_reentrant=self.reentrant)
        return self.top(checkpoint(torch.sigmoid, look_up(dense), use_reentrant=self.reentrant) * 2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["lookups", "all", "after", "model"])
@pytest.mark.parametrize("plan", [{"concat": True}, {"concat": False}, {"concat": False, "prelude": False}],
                         ids=["concat", "group", "alone"])
def test_activation_checkpointing(plan: dict[str, bool], where: str, reentrant: bool) -> None:
    models = []
    for lifts in (False, True):
        model = Checkpointed()
        model.reentrant, model.where = reentrant, where
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if lifts:
            structure = bags_structure(model, [optimizer])
            attach(structure, schedule(structure, coalesce="none", **plan), model, [optimizer], "reference")
        for seed in range(3):
            dense, offsets, indices = batch(seed)
            dense.requires_grad_()               # without which a reentrant checkpoint gives no gradients at all
            whole = checkpoint(model, dense, offsets, indices, use_reentrant=reentrant) if where == "model" else None
            out = model(dense, offsets, indices) if whole is None else whole
            out.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_same(*models)


def test_functional_call_with_other_parameters(pair: Pair) -> None:
    """A second set of weights, trained beside the first through the same modules."""
    others = []
    for model in (pair.native, pair.lifted):
        torch.manual_seed(5)
        others.append({name: nn.Parameter(torch.randn_like(p) * 0.1) for name, p in model.named_parameters()})

    for model, other in zip((pair.native, pair.lifted), others):
        optimizer = pair.native_opt if model is pair.native else pair.lifted_opt
        own = torch.optim.SGD(other.values(), lr=0.1)
        for seed in range(3):
            backward(model, seed)
            torch.func.functional_call(model, other, batch(seed)).pow(2).mean().backward()
            optimizer.step()
            own.step()
            backward(model, seed + 5)            # accumulates in the one, not in the other
            own.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    pair.check()
    for native, lifted in zip(others[0].values(), others[1].values()):
        torch.testing.assert_close(native, lifted)


def test_a_table_that_is_used_beside_its_lookups(pair: Pair) -> None:
    """As an output layer tied to it, say: torch's gradient and ours meet in .grad, in either order."""
    for first in (True, False):
        def loop(model: nn.Module, optimizer: torch.optim.Optimizer, first: bool = first) -> None:
            for seed in range(2):
                direct = model.emb[TABLE].weight.pow(2).sum() * 0.01
                losses = [model(*batch(seed)).pow(2).mean(), direct]
                for loss in losses if first else losses[::-1]:
                    loss.backward()
                (model(*batch(seed)).pow(2).mean() + model.emb[TABLE].weight.sum() * 0.01).backward()
                optimizer.step()
                optimizer.zero_grad()
        pair.both(loop)
        pair.check()


def test_a_graph_that_is_kept_gives_its_gradient_again(pair: Pair) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = model(*batch(0)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    pair.both(loop)
    pair.check()


def test_traced_models_look_up_anew() -> None:
    pair = Pair(concat=False)
    for model in (pair.native, pair.lifted):
        traced = torch.jit.trace(model, batch(0), check_trace=False)
        assert torch.equal(traced(*batch(1)), model(*batch(1)))
