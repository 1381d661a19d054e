"""The `.grad` of a lifted table: what loops read and write."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparselift.grad import PendingGrad
from tests.unit.gradient_pairs import SHAPE, TABLE, assert_same_grad, fresh, written
from tests.unit.runtime_models import assert_same
from tests.unit.test_runtime import Pair, backward, step, train


@pytest.fixture(params=[True, False], ids=["sparse", "dense"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(sparse=request.param)

READS: dict[str, Callable[[Tensor], Any]] = {
    "dense": lambda g: g.to_dense(),
    "clone": lambda g: g.clone(),
    "data": lambda g: g.data.clone(),
    "detach": lambda g: g.detach().clone(),
    "product": lambda g: g * 2 + g,
    "coalesced": lambda g: g.coalesce() if g.is_sparse else g,
    "values": lambda g: g._values() if g.is_sparse else g,
    "indices": lambda g: g._indices() if g.is_sparse else g,
    "norm": lambda g: g.norm(),
    "max norm": lambda g: g.to_dense().norm(float("inf")),
    "sum": lambda g: g.sum(),
    "finite": lambda g: torch.isfinite(g.to_dense()).all(),
    "copy": lambda g: pickle.loads(pickle.dumps(g)),
    "facts": lambda g: (g.layout, g.shape, g.dtype, g.device, g.is_sparse, g.dim(), g.numel(), len(g)),
    "autograd facts": lambda g: (g.requires_grad, g.is_leaf, g.grad_fn),
    "sparse facts": lambda g: (g._nnz(), g.sparse_dim(), g.dense_dim(), g.is_coalesced()) if g.is_sparse else g.stride(),
    "text": repr,
    "array": lambda g: None if g.is_sparse else g.numpy().copy(),
    "lists": lambda g: None if g.is_sparse else (g.tolist(), np.asarray(g).tolist(), [row.tolist() for row in g]),
    "dlpack": lambda g: None if g.is_sparse else torch.from_dlpack(g).clone(),
    "storage": lambda g: None if g.is_sparse else list(g.untyped_storage()),
}


@pytest.mark.parametrize("read", READS)
def test_reading_gives_what_torch_gives(pair: Pair, read: str) -> None:
    native, lifted = (READS[read](grad) for grad in fresh(pair))
    if isinstance(native, Tensor):
        assert type(lifted) in (Tensor, PendingGrad)
        assert_same_grad(native, lifted, exact=False)
    else:
        assert np.array_equal(native, lifted) if isinstance(native, np.ndarray) else native == lifted
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad()))
    train(pair, range(2))
    pair.check()


def own_update(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.data.add_(parameter.grad, alpha=-0.05)
            parameter.grad = None


def masters(model: nn.Module, optimizer: Any) -> None:
    """Gradients handed to other parameters, which keep them over the next backward."""
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for p, master in zip(model.parameters(), copies):
        master.grad, p.grad = p.grad, None
    backward(model, 7)
    other = torch.optim.SGD(copies, lr=0.1)
    other.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), copies):
            p.copy_(master)
    optimizer.step()


def twins(model: nn.Module, optimizer: Any) -> None:
    """One gradient for two parameters of one optimizer."""
    twin = nn.Parameter(torch.ones(SHAPE))
    optimizer.add_param_group({"params": [twin]})
    optimizer.param_groups[0]["params"].append(twin)
    del optimizer.param_groups[1]
    twin.grad = model.emb[TABLE].weight.grad
    optimizer.step()
    with torch.no_grad():
        model.emb[TABLE].weight += twin


def buffers(model: nn.Module, optimizer: Any) -> None:
    """Gradients that accumulate in memory of the loop's."""
    flats = []
    for p in model.parameters():
        flats.append(torch.ones(p.numel()))
        p.grad = flats[-1].view_as(p)
    backward(model, 3)
    with torch.no_grad():
        for p, flat in zip(model.parameters(), flats):
            p -= 0.1 * flat.view_as(p)
    optimizer.step()


def held(model: nn.Module, optimizer: Any) -> None:
    """A gradient that somebody keeps is theirs."""
    old = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    backward(model, 5)
    with torch.no_grad():
        for p, grad in zip(model.parameters(), old):
            p.add_(grad, alpha=-0.1)
    optimizer.step()
    for p, grad in zip(model.parameters(), old):
        p.grad = grad
    backward(model, 6)
    optimizer.step()


def view_after_zero(model: nn.Module, optimizer: Any) -> None:
    grad = model.emb[TABLE].weight.grad
    view = None if grad.is_sparse else grad.view(-1)
    optimizer.zero_grad(set_to_none=False)
    if view is not None:
        view += 1
    backward(model, 5)
    optimizer.step()


def first_row(grad: Tensor) -> None:
    (grad._values() if grad.is_sparse else grad)[0] = 7


def as_array(grad: Tensor) -> None:
    (grad._values() if grad.is_sparse else grad).numpy()[:2] = 3

USES: dict[str, Callable[[nn.Module, Any], None]] = {
    "own update": own_update, "masters": masters, "buffers": buffers, "held": held, "view after zero": view_after_zero,
    "row": written(first_row), "array": written(as_array), "data": written(lambda g: g.data.mul_(0.5)),
    "scaled twice": written(lambda g: g.mul_(0.5).mul_(3)), "divided": written(lambda g: g.div_(3)),
    "values": written(lambda g: g._values().mul_(2) if g.is_sparse else g.clamp_(-0.01, 0.01)),
    "detached": written(lambda g: g.detach().mul_(2)), "added": written(lambda g: g.add_(g.clone())),
    "copied": written(lambda g: g.copy_(g * 2)), "data set": written(lambda g: setattr(g, "data", g.clone() * 2)),
    "data kept": written(lambda g: setattr(g, "data", g)), "detached values": written(lambda g: first_row(g.detach())),
    "detached and zeroed": written(lambda g: g.detach().zero_()), "zeroed": written(lambda g: g.zero_()), "twins": twins,
}


@pytest.mark.parametrize("use", USES)
def test_what_loops_do_with_gradients(pair: Pair, use: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, 0)
        USES[use](model, optimizer)
        optimizer.zero_grad()
        step(model, optimizer, 1)

    pair.both(loop)
    pair.check()


def test_an_optimizer_that_writes_to_gradients() -> None:
    class Decayed(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:       # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(0.5)
                p.add_(p.grad, alpha=-0.1)

    pair = Pair()
    pair.both(lambda model, _: backward(model, 0))
    for model in (pair.native, pair.lifted):
        optimizer = Decayed(model.parameters(), {})
        if model is pair.lifted:                            # known to the plan
            pair.applied.detach(model)
            pair.applied.attach(model, [optimizer])
            backward(model, 0)
            model.zero_grad()
            backward(model, 0)
        for _ in range(2):
            optimizer.step()
    pair.check()


@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_values_equals_the_dense_native_result(foreach: bool | None) -> None:
    dense, sparse = Pair(sparse=False), Pair()
    for model, optimizer in ((dense.native, dense.native_opt), (dense.lifted, dense.lifted_opt), (sparse.lifted, sparse.lifted_opt)):
        for seed in range(3):
            backward(model, seed)
            nn.utils.clip_grad_value_(model.parameters(), 0.02, foreach=foreach)
            assert max(p.grad.to_dense().abs().max() for p in model.parameters()) <= 0.02
            optimizer.step()
            optimizer.zero_grad()
    assert_same(dense.native, dense.lifted, exact=False)
    assert_same(dense.native, sparse.lifted, exact=False)


def test_bounds_that_would_move_untouched_rows_raise_as_natively() -> None:
    for grad in fresh(Pair()):
        with pytest.raises(NotImplementedError):
            grad.clamp_(0.1, 0.2)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_equal_the_dense_native_ones(norm_type: float) -> None:
    dense, sparse = Pair(sparse=False), Pair()
    norms = []
    for model in (dense.native, dense.lifted, sparse.lifted):
        backward(model, 0)
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type))
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(norms[2], norms[0])


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 0.0])
def test_clipping_infinities_is_native(factor: float) -> None:
    pair = Pair(sparse=False)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, 0, factor)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    pair.both(loop)
    for native, lifted in zip(pair.native.parameters(), pair.lifted.parameters()):
        assert torch.equal(native.isnan(), lifted.isnan())
    for model in (pair.native, pair.lifted):
        backward(model, 0, factor)
        if factor:
            with pytest.raises(RuntimeError, match="non-finite"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)


def test_a_clip_that_leaves_gradients_as_they_are_keeps_the_usual_step() -> None:
    pair = Pair(coalesce="none")
    for model, optimizer in ((pair.native, pair.native_opt), (pair.lifted, pair.lifted_opt)):
        backward(model, 0)
        if model is pair.lifted:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            assert model.emb[0].weight.grad.state.scales is None
        optimizer.step()
    pair.check(exact=True)


def test_shapes_and_storage_of_the_handle_cannot_be_changed() -> None:
    pair = Pair(sparse=False)
    changes: list[Callable[[Tensor], Any]] = [
        lambda g: g.t_(), lambda g: g.resize_(3), lambda g: g.set_(torch.ones(3)), lambda g: g.unsqueeze_(0),
        lambda g: torch.add(torch.ones(2, 2), 1, out=g)]
    for change in changes:
        _, lifted = fresh(pair)
        with pytest.raises(RuntimeError, match=r"of (a|the) lifted table"):
            change(lifted)
    _, lifted = fresh(pair)
    torch.add(torch.ones(SHAPE), 1, out=lifted)
    assert (pair.lifted.emb[TABLE].weight.grad == 2).all()
