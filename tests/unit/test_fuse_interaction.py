"""The fused interaction in a user's forward: what lift finds, what runs, copies, and the certificate."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sparselift as sl
from sparselift.apply import ATTRIBUTE
from sparselift.errors import EquivalenceError
from sparselift.ir import Interaction
from sparselift.models import DLRM
from sparselift.plan import default_plan
from sparselift.runtime.interaction import Crossing, Followed, Products
from sparselift.schedule import build_schedule
from tests.unit.interaction_models import (
    ALONE,
    DIM,
    NUM,
    ROWS,
    Interact,
    Model,
    assert_alike,
    batch,
    behind_another,
    buffered,
    crossing_of,
    dense_last,
    of_another,
    other_pairs,
    pair,
    plan_of,
    read_twice,
    scaled,
    workload,
)


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

FORMS = {"listed": (listed, "lower", False, 0), "with-itself": (with_itself, "lower", True, 0), "buffered": (buffered, "lower", False, 0),
         "dense-last": (dense_last, "upper", False, 3)}


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


def now_and_then(model: Any, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
    model.seen.append(0)
    return (buffered if len(model.seen) % 2 else scaled)(model, x, ly)


@pytest.mark.parametrize("interact", [other_pairs, read_twice, scaled, of_another, behind_another, now_and_then])
def test_nothing_else_is_taken_for_one(interact: Interact) -> None:
    graph = sl.lift(workload(Model(interact)))
    assert graph.structure.concats and not graph.structure.interactions
    assert default_plan(graph, ALONE).config.policy["interaction"] is False


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
