"""EmbeddingBag and Embedding under repeated and second backwards, transforms, tracers, checkpoints and the compiler."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparselift import ops
from sparselift.functional import lookups
from sparselift.nn import Embedding, EmbeddingBag
from tests.unit.lookup_loops import dense_grad, filled, pool, use_backend
from tests.unit.module_pairs import BAGS, DIM, IDS, ROWS, STARTS, integers, pair


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(request.param, monkeypatch)


def test_backward_may_be_repeated_where_the_graph_is_kept() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    loss = module(IDS, STARTS).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    np.testing.assert_array_equal(dense_grad(module.weight), 2 * pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)
    with pytest.raises(RuntimeError, match=r"a second time.*retain_graph=True"):
        loss.backward()


def test_a_backward_frees_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the loss, and with it the graph, is still there."""
    batches, run = [], ops.BagLookup.run

    def remember(self: ops.BagLookup, *args: Any) -> Any:
        batch, out = run(self, *args)
        batches.append(batch)
        return batch, out

    monkeypatch.setattr(ops.BagLookup, "run", remember)
    loss = EmbeddingBag(ROWS, DIM, mode="sum")(IDS, STARTS).sum()
    counts = [sys.getrefcount(batches[0])]
    for retain_graph in (True, False):
        loss.backward(retain_graph=retain_graph)
        counts.append(sys.getrefcount(batches[0]))
    assert counts == [counts[0], counts[0], counts[0] - 1]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives(mode: str, padding_idx: int | None, weighted: bool) -> None:
    """Against the same bags written as a matrix product, which torch differentiates twice."""
    if weighted and mode == "mean":
        return
    module = filled(EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx), torch.rand(ROWS, DIM))
    factors = torch.rand(len(IDS))
    results = []
    for fused in (True, False):
        weight, given = module.weight, factors.clone().requires_grad_()
        weight.grad = None
        if fused:
            out = module(IDS, STARTS, given if weighted else None)
        else:
            kept = (padding_idx != IDS).float() if padding_idx is not None else torch.ones(len(IDS))
            member = torch.zeros(len(BAGS), len(IDS))
            for bag, (begin, ids) in enumerate(zip(STARTS.tolist(), BAGS)):
                member[bag, begin:begin + len(ids)] = kept[begin:begin + len(ids)]
            if mode == "mean":
                member = member / member.sum(1, keepdim=True).clamp(min=1)
            out = (member * given if weighted else member) @ weight[IDS]
        wanted = (weight, given) if weighted else (weight,)
        grads = torch.autograd.grad(out.pow(3).sum(), wanted, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        results.append([out.detach(), *(grad.detach() for grad in grads), weight.grad.clone(), *([given.grad] if weighted else [])])
    for ours, want in zip(*results):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_can_be_differentiated_twice(sparse: bool) -> None:
    ours, theirs = pair(Embedding, ROWS, DIM, sparse=sparse, padding_idx=2)
    results = []
    for module in (ours, theirs):
        x = torch.ones(DIM, requires_grad=True)
        grad, = torch.autograd.grad((module(IDS) * x).sum(), module.weight, create_graph=True)
        results.append((grad.to_dense(), *torch.autograd.grad(grad.to_dense().square().sum(), x)))
    assert all(map(torch.equal, *results))


def test_batched_gradients() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    out, arrived = module(IDS, STARTS), integers(3, 5, DIM)
    batched, = torch.autograd.grad(out, module.weight, arrived, is_grads_batched=True, retain_graph=True)
    for each, want in zip(arrived, batched):
        assert torch.equal(torch.autograd.grad(out, module.weight, each, retain_graph=True)[0], want)


def test_torch_func_sees_torchs_operations() -> None:
    ours, theirs = pair(EmbeddingBag, ROWS, DIM, mode="sum")
    grads = []
    for module in (ours, theirs):
        def loss(parameters: dict[str, Tensor], ids: Tensor, module: nn.Module = module) -> Tensor:
            return torch.func.functional_call(module, parameters, (ids[None],)).square().sum()

        parameters = {"weight": module.weight.detach()}
        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, IDS[:8].reshape(4, 2))
        grads.append(per_sample["weight"])
    assert torch.equal(*grads)
    assert ours.last_path == "torch: a torch.func transform is active"


def test_functional_call_replaces_the_weight() -> None:
    module, other = EmbeddingBag(ROWS, DIM, mode="sum"), integers(ROWS, DIM).requires_grad_()
    out = torch.func.functional_call(module, {"weight": other}, (IDS, STARTS))
    out.sum().backward()
    np.testing.assert_array_equal(out.detach().numpy(), pool(other.detach().numpy(), BAGS, "sum").out)
    np.testing.assert_array_equal(dense_grad(other), pool(other.detach().numpy(), BAGS, "sum").weight_grad)
    assert module.last_path == "fused bag"


@pytest.mark.parametrize("elements", [0, lookups.FUSED_ELEMENTS])
def test_forward_mode_derivatives_of_rows(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "FUSED_ELEMENTS", elements)
    module, tangent = Embedding(ROWS, DIM), integers(ROWS, DIM, seed=3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(module.weight.detach(), tangent)
        out = torch.func.functional_call(module, {"weight": dual}, (IDS,))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(out).tangent, tangent[IDS])


@pytest.mark.parametrize("options", [{"mode": "sum"}, {"mode": "max"}])
def test_traces_hold_torchs_operations_and_replay_on_other_ids(options: dict[str, Any]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = EmbeddingBag(ROWS, DIM, **options)
    traced = make_fx(lambda ids, starts: module(ids, starts))(IDS, STARTS)
    assert any("embedding_bag" in str(node.target) for node in traced.graph.nodes)
    assert torch.equal(traced(IDS.flip(0), STARTS), module(IDS.flip(0), STARTS))
    assert torch.equal(torch.fx.symbolic_trace(module)(IDS, STARTS), module(IDS, STARTS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "error::torch.jit.TracerWarning")
def test_jit_traces_hold_torchs_operations() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    traced = torch.jit.trace(module, (IDS, STARTS))
    assert torch.equal(traced(IDS.flip(0), STARTS), module(IDS.flip(0), STARTS))


def test_a_watched_batch_is_checked_all_the_same() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = EmbeddingBag(ROWS, DIM, mode="sum")
    with FlopCounterMode(display=False), pytest.raises(IndexError, match="id 7 at position 0"):
        module(torch.tensor([7]), torch.tensor([0]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    factors = torch.ones(len(IDS), requires_grad=True)
    checkpoint(module, IDS, STARTS, factors, use_reentrant=reentrant).sum().backward()
    np.testing.assert_array_equal(dense_grad(module.weight), pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)
    torch.testing.assert_close(factors.grad, module.weight.detach()[IDS].sum(1))


@pytest.mark.parametrize("kind", [EmbeddingBag, Embedding])
def test_compiled_models_compute_the_same(kind: type) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = filled(kind(ROWS, DIM, sparse=True), integers(ROWS, DIM))
            self.dense = nn.Linear(DIM, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.dense(self.table(ids) * 2).sum()

    model = Model()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=kind is Embedding)
    for ids in (IDS[:8].reshape(4, 2), IDS[:6].reshape(2, 3)):
        losses = [each(ids) for each in (model, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(model.table.weight.grad.to_dense(), compiled.table.weight.grad.to_dense())
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.full((4, 2), ROWS))
