"""Interactions of lookups in one kernel: found in a user's forward as it is, and torch's own in every forward that does something else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparselift as sl
from sparselift.apply import ATTRIBUTE
from sparselift.errors import EquivalenceError
from sparselift.ir import Interaction
from sparselift.models import DLRM
from sparselift.plan import default_plan
from sparselift.runtime.interaction import Crossing, Followed, Products
from sparselift.schedule import build_schedule

ROWS, DIM, NUM = (7, 11, 5), 8, 4
Interact = Callable[[Any, Tensor, Sequence[Tensor]], Tensor]


def batch(seed: int = 0, bags: int = 6) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    indices = [torch.randint(rows, (2 * bags,), generator=generator) for rows in ROWS]
    return torch.randn(bags, 3, generator=generator), [torch.arange(0, 2 * bags, 2)] * len(ROWS), indices


class Model(nn.Module):
    """A DLRM whose forward interacts as it is told to."""

    def __init__(self, interact: Interact, width: int = DIM + NUM * (NUM - 1) // 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.interact = interact
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for rows in ROWS)
        self.bot_l = nn.Sequential(nn.Linear(3, DIM), nn.ReLU())
        self.top_l = nn.Linear(width, 1)
        self.seen: list[Any] = []
        self.pairs = tuple(torch.tril_indices(NUM, NUM, -1))

    def forward(self, dense: Tensor, offsets: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
        x = self.bot_l(dense)
        return self.top_l(self.interact(self, x, [bag(ids, starts) for bag, ids, starts in zip(self.emb_l, indices, offsets)]))


def listed(model: Any, x: Tensor, ly: Sequence[Tensor], itself: bool = False) -> Tensor:
    """Indices made anew in every forward, from lists: facebookresearch/dlrm's way."""
    stacked = torch.cat([x, *ly], dim=1).view((x.size(0), -1, x.size(1)))
    products = torch.bmm(stacked, torch.transpose(stacked, 1, 2))
    _, ni, nj = products.shape
    offset = 1 if itself else 0
    li = torch.tensor([i for i in range(ni) for j in range(i + offset)])
    lj = torch.tensor([j for i in range(nj) for j in range(i + offset)])
    return torch.cat([x, products[:, li, lj]], dim=1)


def with_itself(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    return listed(model, x, ly, True)


def buffered(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).reshape(len(x), NUM, DIM)
    products = vectors @ vectors.mT
    return torch.cat((x, products[:, model.pairs[0], model.pairs[1]]), -1)


def dense_last(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.concat([*ly, x], 1).unflatten(1, (NUM, DIM))
    upper = torch.triu_indices(NUM, NUM, 1)
    return torch.cat([x, vectors.matmul(vectors.permute(0, 2, 1))[:, upper[0], upper[1]]], dim=1)


FORMS = {"listed": (listed, "lower", False, 0), "with-itself": (with_itself, "lower", True, 0), "buffered": (buffered, "lower", False, 0),
         "dense-last": (dense_last, "upper", False, 3)}


def loss_of(model: nn.Module, given: Any) -> Tensor:
    return model(*given).square().mean()


def workload(model: nn.Module, **options: Any) -> sl.Workload:
    batches = [batch(seed) for seed in range(3)]
    return sl.Workload("w", model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of, batches, uses=frozenset(), **options)


ALONE = sl.Constraints(pin={"linear": "native"})       # on every processor


def plan_of(work: sl.Workload) -> sl.Plan:
    return default_plan(sl.lift(work), ALONE)


def pair(interact: Interact, width: int = DIM + NUM * (NUM - 1) // 2) -> tuple[Model, Model, Crossing]:
    """A native and a planned model. The plan is made from a forward that interacts in the recorded way."""
    native = Model(buffered, width)
    planned = copy.deepcopy(native)
    work = workload(planned)
    sl.apply(plan_of(work), planned, work.optimizer)
    native.interact = planned.interact = interact
    return native, planned, crossing_of(planned)


def crossing_of(model: nn.Module) -> Crossing:
    (prelude,) = model.__dict__[ATTRIBUTE].runtime.preludes
    assert prelude.group.crossing is not None
    return prelude.group.crossing


def gradients(model: nn.Module, given: Any) -> list[Tensor]:
    model.zero_grad()
    out = model(*given)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.to_dense() for p in model.parameters() if p.grad is not None)]


def assert_alike(native: nn.Module, planned: nn.Module, given: Any) -> None:
    mine, theirs = gradients(planned, given), gradients(native, given)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs):
        assert (a - b).norm() <= 1e-5 * b.norm()


# What lift finds


@pytest.mark.parametrize("form", FORMS)
def test_it_is_found_in_a_users_forward(form: str) -> None:
    interact, order, diagonal, passed = FORMS[form]
    graph = sl.lift(workload(Model(interact, DIM + NUM * (NUM - 1) // 2 + NUM * diagonal)))
    assert graph.structure.interactions == (Interaction("interaction", "concat", passed, order, diagonal),)
    names = {node.name: node for node in graph.nodes}
    assert names["interaction"].inputs == ("concat",) and names["dense"].inputs == ("interaction",)
    assert names["expand:emb_l.0.weight"].inputs == ("interaction_backward",)
    assert all(each.resources.time_s and each.resources.flops for each in (names["interaction"], names["interaction_backward"]))


def test_it_is_found_in_the_packages_own_dlrm() -> None:
    graph = sl.lift(workload(DLRM(ROWS, DIM, (4,), (4, 1), num_dense=3)))
    assert [each.order for each in graph.structure.interactions] == ["upper"]
    assert not sl.lift(workload(DLRM(ROWS, DIM, (4,), (4, 1), num_dense=3, arch_interaction="cat"))).structure.interactions


def other_pairs(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    return torch.cat([x, torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0].flip(0), model.pairs[1]]], 1)


def read_twice(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1) + products.sum()


def scaled(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]
    return torch.cat([x, products * 0.5], 1)


def of_another(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    return torch.cat([x, torch.bmm(vectors * 2, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]], 1)


def behind_another(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    return torch.cat([x * 1, torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]], 1)


def now_and_then(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    model.seen.append(0)
    return (buffered if len(model.seen) % 2 else scaled)(model, x, ly)


@pytest.mark.parametrize("interact", [other_pairs, read_twice, scaled, of_another, behind_another, now_and_then])
def test_nothing_else_is_taken_for_one(interact: Interact) -> None:
    graph = sl.lift(workload(Model(interact)))
    assert graph.structure.concats and not graph.structure.interactions
    assert default_plan(graph, ALONE).config.policy["interaction"] is False


# What runs


@pytest.mark.parametrize("form", FORMS)
def test_training_is_the_same(form: str) -> None:
    interact, _, diagonal, _ = FORMS[form]
    native = Model(interact, DIM + NUM * (NUM - 1) // 2 + NUM * diagonal)
    planned = copy.deepcopy(native)
    work = workload(planned)
    sl.apply(plan_of(work), planned, work.optimizer)
    optimizer = torch.optim.SGD(native.parameters(), lr=0.05)
    for seed in range(6):
        given = batch(seed, bags=0 if seed == 3 and interact is not listed and interact is not with_itself else seed + 1)
        for model, stepping in ((native, optimizer), (planned, work.optimizer)):
            (0.01 * model(*given).square().sum()).backward()
            stepping.step()
            stepping.zero_grad()
    for (name, a), (_, b) in zip(native.named_parameters(), planned.named_parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
    assert crossing_of(planned).calls == 6 and "nothing fell back" in sl.explain(planned)
    assert "interaction: products of 4 vectors in one kernel, straight into the next layer's input: 6 times" in sl.explain(planned)


def test_the_kernel_makes_the_output_and_no_products_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    native, planned, crossing = pair(buffered)
    want = native(*batch())
    monkeypatch.setattr(Products, "made", lambda self: pytest.fail("torch multiplied"))
    torch.testing.assert_close(planned(*batch()), want)
    with torch.no_grad():
        torch.testing.assert_close(planned(*batch()), want)
    given = batch()
    with torch.inference_mode():
        torch.testing.assert_close(planned(*given), want)
    assert crossing.calls == 3


def test_the_output_is_an_ordinary_tensor() -> None:
    kept: list[Tensor] = []

    def keep(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
        kept.append(buffered(model, x, ly))
        return kept[-1].relu_()

    native, planned, crossing = pair(keep)
    assert_alike(native, planned, batch())
    assert crossing.calls == 1 and all(type(out) is Tensor and out.is_contiguous() and not out._is_view() for out in kept)


def test_no_tensor_outlives_its_forward() -> None:
    import gc
    import weakref

    _, planned, _ = pair(buffered)
    alive: list[Any] = []

    def watched(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
        out = buffered(model, x, ly)
        alive.append(weakref.ref(x))
        return out

    planned.interact = watched
    gc.collect()
    gc.disable()
    try:
        planned(*batch()).sum().backward()
        assert alive[0]() is None
    finally:
        gc.enable()


# Whatever else a forward does


def whole_too(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([x, *ly], 1)
    vectors = whole.view(len(x), NUM, DIM)
    return torch.cat([x, torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]], 1) + whole.sum(1, keepdim=True)


def whole_alone(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    return torch.cat([x, *ly], 1)[:, :DIM + 6] * 2


def products_too(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    out = torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1)
    return out * products.mean() + (products * products).sum((1, 2))[:, None]


def products_first(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    products.mul_(2)
    return torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1)


def triangle_too(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    triangle = torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]
    assert triangle.shape == (len(x), 6)
    return torch.cat([x, triangle], 1) * triangle.sum()


def triangle_changed(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    triangle = torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]
    assert triangle.is_contiguous()
    triangle.mul_(2)
    triangle.view(-1)[::2] = 3
    return torch.cat([x, triangle], 1)


def dense_changed(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    x = x * 1
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    triangle = torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]
    return torch.cat([x.mul_(2), triangle], 1)


def vectors_changed(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).mul_(2).view(len(x), NUM, DIM)
    vectors[:, 0].mul_(3)
    return torch.cat([x, torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]], 1)


def twice(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = [torch.bmm(vectors, vectors.transpose(1, 2)) for _ in range(2)]
    outs = [torch.cat([x, each[:, model.pairs[0], model.pairs[1]]], 1) for each in products for _ in range(2)]
    return sum(place * out for place, out in enumerate(outs, 1))


def in_another_order(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    triangle = torch.bmm(vectors.transpose(1, 2).transpose(1, 2), vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]
    return torch.cat([triangle, x], 1)


def detached(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    with torch.no_grad():
        products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1)


def picked_without_gradient(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    with torch.no_grad():
        triangle = products[:, model.pairs[0], model.pairs[1]]
    return torch.cat([x, triangle], 1) + products.detach().mean()


def hooked(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([x, *ly], 1)
    vectors = whole.view(len(x), NUM, DIM)
    vectors.register_hook(lambda grad: grad * 2)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    products.register_hook(lambda grad: grad * 3)
    triangle = products[:, model.pairs[0], model.pairs[1]]
    triangle.register_hook(lambda grad: grad * 4)
    return torch.cat([x, triangle], 1)


def hooked_products(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    products.register_hook(lambda grad: grad * 3)
    return torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1)


def hooked_triangle(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    triangle = torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]]
    triangle.register_hook(lambda grad: grad * 3)
    return torch.cat([x, triangle], 1)


def hooked_dense(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    x.register_hook(lambda grad: grad * 3)
    return buffered(model, x, ly)


class Square(torch.autograd.Function):
    """A function of the user's own, which takes its arguments past `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def into_own_functions(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = Square.apply(torch.cat([x, *ly], 1).view(len(x), NUM, DIM)) + torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1)


def products_into_own_functions(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = Square.apply(torch.bmm(vectors, vectors.transpose(1, 2)))
    return torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1)


def products_past_python(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    with torch._C.DisableTorchFunctionSubclass():
        scale = products.mean()
    return torch.cat([x, products[:, model.pairs[0], model.pairs[1]]], 1) * scale + products.sum()


def triangle_into_own_functions(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    return torch.cat([x, Square.apply(torch.bmm(vectors, vectors.transpose(1, 2))[:, model.pairs[0], model.pairs[1]])], 1)


def in_smaller_dtype(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return buffered(model, x, ly).float()


def in_checkpoint(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    return checkpoint(lambda *given: buffered(model, given[0], given[1:]), x, *ly, use_reentrant=False)


def in_reentrant_checkpoint(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    return checkpoint(lambda *given: buffered(model, given[0], given[1:]), x, *ly, use_reentrant=True)


def copied(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    triangle = products[:, model.pairs[0], model.pairs[1]]
    for each in (vectors, products, triangle):
        loaded = pickle.loads(pickle.dumps(each.detach()))
        file = io.BytesIO()
        torch.save(each, file)
        file.seek(0)
        assert torch.equal(torch.load(file), loaded) and type(loaded) is Tensor and torch.equal(loaded, each)
    return torch.cat([x, triangle], 1)


DEVIATIONS = [whole_too, whole_alone, products_too, products_first, triangle_too, triangle_changed, dense_changed, twice, in_another_order,
              detached, picked_without_gradient, hooked, hooked_products, hooked_triangle, hooked_dense, into_own_functions,
              products_into_own_functions, products_past_python, triangle_into_own_functions, in_smaller_dtype, in_checkpoint,
              in_reentrant_checkpoint, copied,
              other_pairs, read_twice, scaled, of_another, behind_another, dense_last, vectors_changed]


@pytest.mark.parametrize("interact", DEVIATIONS)
def test_any_other_forward_means_what_it_means_natively(interact: Interact) -> None:
    native, planned, crossing = pair(interact)
    for seed in range(2):
        assert_alike(native, planned, batch(seed))
    # Some interact in the recorded way before they do something else; and what never joins the lookups is no step aside of this one.
    stays = interact in (hooked_dense, twice, products_too, triangle_too, whole_too, read_twice, in_reentrant_checkpoint,
                         products_past_python)
    assert crossing.calls == (2 if stays else 0)
    assert stays or interact is dense_last or "stepped aside: interaction" in sl.explain(planned)
    if "hooked" not in interact.__name__:
        with torch.no_grad():
            torch.testing.assert_close(planned(*batch(5)), native(*batch(5)), rtol=1e-5, atol=1e-4)


def late(use: Callable[[Tensor, Tensor, Tensor], object]) -> Interact:
    def interact(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
        vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        triangle = products[:, model.pairs[0], model.pairs[1]]
        out = torch.cat([x, triangle], 1)
        use(vectors, products, triangle)
        return out
    return interact


@pytest.mark.parametrize("place", [0, 1, 2], ids=["vectors", "products", "triangle"])
@pytest.mark.parametrize("use", [lambda t: t.register_hook(print), lambda t: t.retain_grad(), lambda t: t.grad_fn,
                                 lambda t: torch.autograd.grad(t.sum(), t)], ids=["hook", "retain", "grad_fn", "autograd.grad"])
def test_a_watch_on_gradients_that_do_not_come_by_any_more_is_refused(use: Callable[[Tensor], object], place: int) -> None:
    _, planned, _ = pair(late(lambda *tensors: use(tensors[place])))
    with pytest.raises(RuntimeError, match=r"came after one kernel had made both; tune with deny=\('fuse_interaction',\)"):
        planned(*batch())


def test_values_may_be_used_late() -> None:
    native, planned, crossing = pair(late(lambda vectors, products, triangle: None))
    seen: list[list[Tensor]] = []
    for model in (native, planned):
        model.interact = late(lambda *tensors: seen.append([tensor.detach().clone() for tensor in tensors]))
        model(*batch())
    for mine, theirs in zip(*seen):
        torch.testing.assert_close(mine, theirs)
    assert crossing.calls == 1


def test_products_of_values_that_are_gone_are_refused() -> None:
    def overwritten(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
        vectors = torch.cat([x, *ly], 1).view(len(x), NUM, DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        vectors.zero_()
        return products.sum((1, 2))[:, None].expand(-1, DIM + 6)

    native, planned, _ = pair(overwritten)
    with torch.no_grad():
        native(*batch())
        with pytest.raises(RuntimeError, match="were used after its input was modified in place; tune with deny"):
            planned(*batch())


# Around it


def test_copies_and_pickles_run_it_and_unapply_ends_it() -> None:
    native, planned, crossing = pair(buffered)
    planned(*batch())
    for other in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        assert_alike(native, other, batch(1))
        assert crossing_of(other).calls == 2 and crossing_of(other) is not crossing
        assert crossing_of(other).report.__self__ is other.__dict__[ATTRIBUTE].runtime
    assert crossing.calls == 1
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
    sl.unapply(planned, optimizer)
    assert torch.equal(planned(*batch()), native(*batch())) and crossing.calls == 1


def test_accumulated_gradients_are_summed() -> None:
    native, planned, _ = pair(buffered)
    for model in (native, planned):
        model.zero_grad()
        for seed in range(3):
            model(*batch(seed)).sum().backward()
    for mine, theirs in zip(planned.parameters(), native.parameters()):
        torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense(), rtol=1e-5, atol=1e-5)


def test_compiled_parts_of_a_forward_take_its_tensors() -> None:
    def ending(whole: Tensor, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        vectors = whole.view(len(x), NUM, DIM)
        return torch.cat([x, torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]], 1)

    compiled = torch.compile(ending, backend="eager")
    native, planned, crossing = pair(buffered)
    planned.interact = lambda model, x, ly: compiled(torch.cat([x, *ly], 1), x, *model.pairs)
    assert_alike(native, planned, batch())
    native, planned, crossing = pair(buffered)
    planned.top_l = torch.compile(planned.top_l, backend="aot_eager")
    assert_alike(native, planned, batch())
    assert crossing.calls == 1


def test_denied_or_bitwise_plans_leave_it_to_torch() -> None:
    for constraints in (sl.Constraints(deny=("fuse_interaction", "linear_library")), sl.Constraints(equivalence="bitwise")):
        model = Model(buffered)
        native, work = copy.deepcopy(model), workload(model)
        plan = default_plan(sl.lift(work), constraints)
        assert plan.config.policy["interaction"] is False and plan.equivalence == "bitwise"
        sl.apply(plan, model, work.optimizer)
        assert torch.equal(model(*batch()), native(*batch()))


# The certificate


def planted(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    original = {"run": sl.functional.interaction.Interactor.run, "differentiate": sl.functional.interaction.Interactor.differentiate}

    def run(self: Any, vectors: Any) -> Tensor:
        out = original["run"](self, vectors)
        if fault == "a wrong product":
            out[:, -1] += 1
        elif fault == "another order":
            out[:, DIM:] = out[:, DIM:].flip(1)
        elif fault == "another vector":
            out[:, :DIM] = vectors[0][:, DIM:2 * DIM]
        elif fault == "a small error":
            out[:, DIM:] *= 1 + 1e-4
        return out

    def differentiate(self: Any, vectors: Any, grad: Tensor, wanted: Any) -> Any:
        found = original["differentiate"](self, vectors, grad, wanted)
        if fault == "a gradient without the dense vector's":
            found[0][:, :DIM] -= grad[:, :DIM]
        elif fault == "half a gradient":
            found[0] *= 0.5
        return found

    monkeypatch.setattr(sl.functional.interaction.Interactor, "run", run)
    monkeypatch.setattr(sl.functional.interaction.Interactor, "differentiate", differentiate)


def test_a_right_one_is_certified() -> None:
    work = workload(Model(buffered))
    plan = plan_of(work)
    certificate = sl.verify(plan, work)
    assert certificate.exact["interaction"] and certificate.exact["interaction gradient"]
    assert 0 < certificate.real["interactions"] < 1 and 0 < certificate.real["gradients of a step"] < 0.1


@pytest.mark.parametrize("fault", ["a wrong product", "another order", "another vector", "a small error",
                                   "a gradient without the dense vector's", "half a gradient"])
def test_faults_fail_the_certificate(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    work = workload(Model(buffered))
    plan = plan_of(work)
    planted(monkeypatch, fault)
    with pytest.raises(EquivalenceError, match="interaction"):
        sl.verify(plan, work)


def test_a_whole_step_with_wrong_gradients_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparselift.verify.dense import check_gradients
    work = workload(Model(buffered))
    plan = plan_of(work)
    schedule = build_schedule(plan.structure, plan.config)
    assert check_gradients(plan.structure, schedule, work, batch(), "cpu")["gradients of a step"] < 0.1
    planted(monkeypatch, "half a gradient")
    with pytest.raises(EquivalenceError, match=r"gradient of .*: planned differs from native by"):
        check_gradients(plan.structure, schedule, work, batch(), "cpu")


def test_followed_tensors_are_plain_ones_for_everybody() -> None:
    crossing = Crossing("interaction", sl.kernels.interaction.InteractionSpec(2, 3), "cpu")
    parts = [torch.ones(4, 3), torch.ones(4, 3)]
    whole = crossing.start(torch.cat(parts, 1), parts)
    assert type(whole) is Followed and type(whole + 1) is Tensor and type(copy.deepcopy(whole)) is Tensor
    assert isinstance(whole, Tensor) and torch.equal(whole, torch.ones(4, 6))
