"""Lookups that share the memory of their concat: whatever else a model does with them, it means what it means natively."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.unit.runtime_models import Bags, assert_same, attach, bags_structure, batch, schedule

Join = Callable[[], Tensor]
Use = Callable[[nn.Module, Tensor, list[Tensor], Join], Tensor]


class Used(Bags):
    """Bags whose forward does with its lookups what it is told to."""

    def __init__(self, use: Use, with_dense: bool) -> None:
        super().__init__()
        self.use, self.with_dense = use, with_dense
        self.top = nn.Linear(8 * (len(self.emb) + with_dense), 1)
        self.seen: list[Tensor] = []

    def forward(self, dense: Tensor, offsets: Any, indices: Any, weights: Any = None) -> Tensor:
        pooled = [e(i, o) for e, i, o in zip(self.emb, indices, offsets)]
        first = [self.bottom(dense)] if self.with_dense else []
        return self.use(self, dense, pooled, lambda: torch.cat([*first, *pooled], dim=1))


@pytest.fixture(params=[True, False], ids=["with-dense", "lookups-alone"])
def with_dense(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def lifted(use: Use, with_dense: bool, make: Callable[[Any], torch.optim.Optimizer] = sgd, coalesce: str = "none") -> tuple[
        Used, torch.optim.Optimizer]:
    model = Used(use, with_dense)
    optimizer = make(model.parameters())
    structure = bags_structure(model, [optimizer])
    if not with_dense:
        (concat,) = structure.concats
        structure = replace(structure, concats=(replace(concat, parts=concat.parts[1:]),))
    attach(structure, schedule(structure, coalesce=coalesce), model, [optimizer], "reference")
    return model, optimizer


def train(model: Used, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(3):
        model(*batch(seed)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def other_orders(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    straight, reverse = join(), torch.cat(pooled[::-1], dim=1)
    return model.top(straight) + reverse.sum(1, keepdim=True) + pooled[0].sum() + model.top(join() * 2)


def saved_before(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    product = pooled[0] * pooled[1]
    return model.top(join().relu_()) + product.sum(1, keepdim=True)


def saved_after(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    whole = join()
    product = pooled[0] * pooled[1]
    return model.top(whole.relu_()) + product.sum(1, keepdim=True)


def modified_before(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    pooled[1].mul_(2).relu_()
    torch.add(pooled[0].detach(), 1, out=torch.empty(0))
    return model.top(join())


def hooked(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    pooled[0].register_hook(lambda grad: model.seen.append(grad.clone()))
    pooled[1].register_hook(lambda grad: grad * 3)
    pooled[2].retain_grad()
    model.kept = pooled[2]
    return model.top(join())


def asked_for_facts(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    assert all(part.dim() == 2 and part.shape[1] == part.size(1) == 8 and part.requires_grad for part in pooled)
    whole = join()
    model.seen.append(whole.detach())
    return model.top(whole)


def viewed_before(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    product = pooled[2].view(-1, 2, 4).sum(1).sum(1, keepdim=True)
    pooled[0].view(-1).mul_(2)                   # a view of it, so its values too
    with torch.no_grad():
        pooled[1].view_as(pooled[0]).mul_(3)
    return model.top(join()) + product


def viewed_after(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    return model.top(join()) + pooled[0].view(-1, 2, 4).sum(1).sum(1, keepdim=True)


def gradients_of_parts(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    edge = torch.autograd.graph.get_gradient_edge(pooled[0])
    out = model.top(join())
    model.seen += torch.autograd.grad(out.sum(), [edge, pooled[1]], retain_graph=True)
    torch.autograd.backward([out.sum()], inputs=pooled[2:], retain_graph=True)
    return out


@pytest.mark.parametrize("use", [
    viewed_before, viewed_after, gradients_of_parts, other_orders, saved_before, saved_after, modified_before, hooked, asked_for_facts])
def test_other_uses_of_a_lookup_are_native(use: Use, with_dense: bool) -> None:
    native = Used(use, with_dense)
    optimizer = torch.optim.SGD(native.parameters(), lr=0.05)
    planned, planned_optimizer = lifted(use, with_dense)
    train(native, optimizer)
    train(planned, planned_optimizer)
    assert_same(native, planned, exact=use not in (other_orders, viewed_after))
    assert len(native.seen) == len(planned.seen)
    for a, b in zip(native.seen, planned.seen):
        assert torch.equal(a, b)
    if use is hooked:
        assert torch.equal(native.kept.grad, planned.kept.grad)


def used_after_modification(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    whole = join()
    whole.mul_(2)
    return model.top(whole) + pooled[0].sum()


def modified_after(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    whole = join()
    pooled[0].mul_(2)
    return model.top(whole)


def output_after(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    whole = join()
    with torch.no_grad():
        torch.add(pooled[1], 1, out=pooled[0])
    return model.top(whole)


def hooked_after(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    whole = join()
    pooled[0].register_hook(print)
    return model.top(whole)


def asked_after(ask: Callable[[Tensor, list[Tensor]], Any]) -> Use:
    def use(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
        out = model.top(join())
        with warnings.catch_warnings(action="ignore"):                   # that a part is no leaf
            ask(out.sum(), pooled)
        return out
    return use


def set_data(out: Tensor, pooled: list[Tensor]) -> None:
    pooled[0].data = torch.zeros(6, 8)


@pytest.mark.parametrize(("use", "says"), [
    (asked_after(lambda out, pooled: torch.autograd.grad(out, pooled[0], retain_graph=True)), "asking for the gradient"),
    (asked_after(lambda out, pooled: torch.autograd.grad(out, pooled, retain_graph=True, allow_unused=True)), "asking for the gradient"),
    (asked_after(lambda out, pooled: out.backward(inputs=[pooled[1]], retain_graph=True)), "asking for the gradient"),
    (asked_after(lambda out, pooled: torch.autograd.backward([out], inputs=pooled, retain_graph=True)), "asking for the gradient"),
    (asked_after(lambda out, pooled: pooled[1].sum().backward(inputs=[pooled[1]], retain_graph=True)), "asking for the gradient"),
    (asked_after(lambda out, pooled: torch.autograd.graph.get_gradient_edge(pooled[0])), "grad_fn on a lookup's output came after"),
    (asked_after(set_data), "data on a lookup's output came after"),
    (used_after_modification, "used after the torch.cat that consumed it was modified in place"),
    (modified_after, "modified in place after the torch.cat that consumed it"),
    (output_after, "modified in place after the torch.cat that consumed it"),
    (hooked_after, "register_hook on a lookup's output came after the torch.cat that consumed it"),
])
def test_what_shared_memory_cannot_give_raises(use: Use, says: str, with_dense: bool) -> None:
    model, _ = lifted(use, with_dense)
    with pytest.raises(RuntimeError, match=f"{says}.*deny=..concat"):
        model(*batch(0))


def test_the_concat_is_the_buffer_itself(with_dense: bool) -> None:
    pointers: list[Sequence[int]] = []

    def look(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
        whole = join()
        with torch._C.DisableTorchFunctionSubclass():
            pointers.append([whole.data_ptr() + 4 * 8 * with_dense, pooled[0].data_ptr()])
        return model.top(whole)

    model, _ = lifted(look, with_dense)
    model(*batch(0))
    assert pointers[0][0] == pointers[0][1]


def alternating(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    """One lookup a step, then all of them."""
    model.steps = getattr(model, "steps", 0) + 1
    return pooled[model.steps % 3].sum(1, keepdim=True) if model.steps % 4 else model.top(join())


def one_detached(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    return pooled[0].sum(1, keepdim=True) + pooled[1].detach().sum(1, keepdim=True)


def one_in_no_grad(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    with torch.no_grad():
        factor = pooled[2].sum(1, keepdim=True)
    pooled[0].mul_(2)
    return pooled[0].sum(1, keepdim=True) * factor


@pytest.mark.parametrize("use", [alternating, one_detached, one_in_no_grad])
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
                                  lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.5)], ids=["momentum", "adagrad"])
def test_a_lookup_that_the_loss_does_not_use_gives_its_table_no_gradient(
        use: Use, make: Callable[[Any], torch.optim.Optimizer], with_dense: bool) -> None:
    """Not one of zeros, with which momentum would go on and steps would count."""
    native = Used(use, with_dense)
    optimizer = make(native.parameters())
    planned, planned_optimizer = lifted(use, with_dense, make, "chain")
    for seed in range(8):
        for model in (native, planned):
            model(*batch(seed)).pow(2).mean().backward()
        for a, b in zip(native.parameters(), planned.parameters()):
            assert (a.grad is None) == (b.grad is None)
        for each in (optimizer, planned_optimizer):
            each.step()
            each.zero_grad()
    assert_same(native, planned, exact=False)


def test_gradients_beside_those_of_lookups_may_be_written_to() -> None:
    held: list[Tensor] = []

    def use(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
        own = torch.ones(len(dense), 8, requires_grad=True)
        own.register_hook(held.append)
        return model.top(torch.cat([own, *pooled], dim=1))

    native = Used(use, True)
    planned, optimizer = lifted(use, True)
    for model, each in ((native, sgd(native.parameters())), (planned, optimizer)):
        model(*batch(0)).pow(2).mean().backward()
        held.pop().zero_()
        each.step()
    assert_same(native, planned)


def aliased_after(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
    whole = join()
    with torch.no_grad():
        pooled[0].detach().mul_(2)               # of what is used from here on
    return model.top(whole) + pooled[0].sum(1, keepdim=True)


@pytest.mark.parametrize("use", [saved_before, saved_after, modified_before, aliased_after, used_after_modification])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_native(use: Use, with_dense: bool, mode: Any) -> None:
    native = Used(use, with_dense)
    planned, _ = lifted(use, with_dense)
    with mode():
        if use is used_after_modification and mode is torch.no_grad:          # in inference mode the ids are, whose modules look up alone
            with pytest.raises(RuntimeError, match="modified in place"):
                planned(*batch(0))
        else:
            assert torch.equal(native(*batch(0)), planned(*batch(0)))


def test_a_use_after_the_concat_can_be_differentiated_whatever_came_before(with_dense: bool) -> None:
    def use(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
        whole = join()
        with torch.inference_mode():
            pooled[0].sum()
        return model.top(whole) + pooled[0].sum(1, keepdim=True)

    native, (planned, optimizer) = Used(use, with_dense), lifted(use, with_dense)
    train(native, sgd(native.parameters()))
    train(planned, optimizer)
    assert_same(native, planned, exact=False)


def vmapped(model: Any, f: Callable[[Tensor], Tensor], dense: Tensor) -> Tensor:
    return torch.vmap(f)(torch.stack([dense, 2 * dense])).sum(0)


def with_tangent(model: Any, f: Callable[[Tensor], Tensor], dense: Tensor) -> Tensor:
    primal, tangent = torch.func.jvp(f, (dense,), (dense,))
    return primal + tangent


def with_gradient(model: Any, f: Callable[[Tensor], Tensor], dense: Tensor) -> Tensor:
    return torch.func.grad(lambda dense: f(dense).tanh().sum())(dense).sum(1, keepdim=True)


def dual(model: Any, f: Callable[[Tensor], Tensor], dense: Tensor) -> Tensor:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(dense, dense)))
        return primal + tangent


@pytest.mark.parametrize("transform", [vmapped, with_tangent, with_gradient, dual])
def test_transforms_over_the_concat_are_native(transform: Callable[..., Tensor]) -> None:
    def use(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
        return transform(model, lambda dense: model.top(torch.cat([model.bottom(dense), *pooled], 1)), dense)

    native, (planned, optimizer) = Used(use, True), lifted(use, True)
    train(native, sgd(native.parameters()))
    train(planned, optimizer)
    assert_same(native, planned, exact=False)


@pytest.mark.parametrize("after", [False, True])
def test_compiled_functions_of_lookups_are_native(with_dense: bool, after: bool) -> None:
    product = torch.compile(lambda a, b: (a * b).sum(1, keepdim=True), backend="eager")

    def use(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
        if after:
            return model.top(join()) + product(pooled[0], pooled[1])
        return product(pooled[0], pooled[1]) + model.top(join())

    native, (planned, optimizer) = Used(use, with_dense), lifted(use, with_dense)
    train(native, sgd(native.parameters()))
    train(planned, optimizer)
    assert_same(native, planned, exact=False)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_files_and_copies_hold_plain_tensors(with_dense: bool, after: bool, grad: bool) -> None:
    seen: list[Tensor] = []

    def use(model: Any, dense: Tensor, pooled: list[Tensor], join: Join) -> Tensor:
        whole = join() if after else None
        file = io.BytesIO()
        torch.save(pooled[0], file)
        file.seek(0)
        seen.extend([torch.load(file, weights_only=True), pickle.loads(pickle.dumps(pooled[0])), copy.copy(pooled[0])])
        if grad:
            with pytest.raises(RuntimeError, match="deepcopy"):
                copy.deepcopy(pooled[0])
        else:
            seen.append(copy.deepcopy(pooled[0]))
        assert all(torch.equal(each, pooled[0]) for each in seen)
        return model.top(join() if whole is None else whole)

    model, _ = lifted(use, with_dense)
    with torch.set_grad_enabled(grad):
        model(*batch(0))
    for each in seen:
        assert type(each) is Tensor and each.requires_grad is grad and each.untyped_storage().nbytes() == 4 * each.numel()
