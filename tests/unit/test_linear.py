"""Linear layers with bias and ReLU in one pass, or in oneDNN: torch's values and gradients, and torch for every call that is not taken."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import sparselift as sl
from sparselift.apply import ATTRIBUTE, Applied
from sparselift.errors import EquivalenceError
from sparselift.hardware import hardware
from sparselift.ir import Linear
from sparselift.kernels.epilogue import CpuEpilogue
from sparselift.plan import compare, default_plan
from sparselift.rewrites import linear as rewrite
from sparselift.runtime import linear as runtime
from sparselift.runtime.linear import ChainForward, DenseLayers, LinearForward
from sparselift.schedule import build_schedule
from sparselift.verify.linears import check_linears_real
from tests.unit.dense_models import assert_alike, batch, gradients, planned, planned_copy, workload

CHOICES = ["fused", *(["onednn_forward", "onednn"] if runtime.is_available() else [])]
needs_onednn = pytest.mark.skipif(not runtime.is_available(), reason="this torch has no oneDNN operator for linear layers")


class Model(nn.Module):
    """A lookup, a chain with and without ReLUs, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        self.mlp = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 16, bias=False), nn.ReLU(inplace=True), nn.Dropout(0.0),
                                 nn.Linear(16, 5), nn.Sigmoid(), nn.Linear(5, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
        return self.head(F.relu(self.mlp(torch.cat([dense, self.emb(indices, offsets)], dim=1))))


PIN = {"linear": CHOICES[-1]}


def pair(choice: str = CHOICES[-1]) -> tuple[Model, Model]:
    """A native and a planned model."""
    native = Model()
    return native, planned_copy(native, {"linear": choice})


def dense_of(model: nn.Module) -> DenseLayers:
    dense = model.__dict__[ATTRIBUTE].runtime.dense
    assert dense is not None
    return dense


# What lift finds


def test_layers_are_found_with_their_relu() -> None:
    assert sl.lift(workload(Model())).structure.linears == (
        Linear("mlp.0", 7, 33, True), Linear("mlp.2", 33, 16, True), Linear("mlp.5", 16, 5, False), Linear("mlp.7", 5, 6, False),
        Linear("head", 6, 1, False))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def replaced(layer: nn.Linear) -> nn.Linear:
    layer.forward = Scaled.forward.__get__(layer)
    return layer


@pytest.mark.parametrize(("head", "reason"), [
    (lambda: Scaled(6, 1), "head is a subclass"), (lambda: parametrizations.weight_norm(nn.Linear(6, 1)), "is parametrized"),
    (lambda: nn.Linear(6, 1).requires_grad_(False), ""), (lambda: replaced(Scaled(6, 1)), "subclass")])
def test_others_stay_with_torch_for_a_reason(head: Callable[[], nn.Module], reason: str) -> None:
    model = Model()
    model.head = head()
    graph = sl.lift(workload(model))
    assert ("head" in [each.name for each in graph.structure.linears]) == (not reason)
    if reason:
        assert re.search(f"^head: stays with torch's matrix product: .*({reason})", graph.explain(), re.MULTILINE)


def test_a_model_without_layers_has_no_choice() -> None:
    model = nn.EmbeddingBag(5, 4, mode="sum", sparse=True)
    work = sl.Workload("w", model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, given: m(given).sum(), [torch.tensor([[1, 2]])])
    graph = sl.lift(work)
    assert "no torch.nn.Linear" in (rewrite.LinearLibrary().legal(graph.structure, None, {"linear": "onednn"}) or "")
    assert default_plan(graph).config.policy["linear"] == "native"


@pytest.mark.parametrize(("cpu", "choice"), [("AMD EPYC 9654 96-Core Processor", "onednn"), ("Intel(R) Xeon(R) Processor", "native")])
def test_the_default_is_a_rule_of_thumb_about_the_processor(monkeypatch: pytest.MonkeyPatch, cpu: str, choice: str) -> None:
    monkeypatch.setattr(rewrite, "hardware", lambda: replace(hardware(), cpu=cpu, architecture="x86_64"))
    plan = default_plan(sl.lift(workload(Model())))
    assert plan.config.policy["linear"] == choice
    assert plan.equivalence == ("reassociated" if choice == "onednn" else "bitwise")


# What runs


@pytest.mark.parametrize("choice", CHOICES)
def test_training_is_the_same(choice: str) -> None:
    native, model = pair(choice)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (native, model)]
    for seed in range(4):
        assert_alike(gradients(model, batch(seed, seed + 1)), gradients(native, batch(seed, seed + 1)))
        for optimizer in optimizers:
            optimizer.step()
    assert dense_of(model).calls == 4 * 5 and "nothing fell back" in sl.explain(model)
    assert f"5 linear layers, 2 with their ReLU, {runtime._WAYS[choice]}: 20 calls" in sl.explain(model)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch()), native(*batch()))
    with torch.inference_mode():
        torch.testing.assert_close(model(*batch()), native(*batch()))


@needs_onednn
def test_the_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair()
    products: list[bool] = []
    original = runtime._product

    def counted(left: Tensor, right: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
        products.append(relu)
        return original(left, right, bias, relu)

    monkeypatch.setattr(runtime, "_product", counted)
    gradients(model, batch())
    assert len(products) == 15 and sum(products) == 2


def test_bias_and_relu_are_one_pass_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("fused")
    epilogue = dense_of(model).epilogue
    passes: list[tuple[str, bool]] = []
    finish, begin = epilogue.finish, epilogue.begin
    monkeypatch.setattr(epilogue, "finish", lambda out, bias, relu: (passes.append(("finish", relu)), finish(out, bias, relu))[1])
    monkeypatch.setattr(epilogue, "begin", lambda grad, out, needs: (passes.append(("begin", out is not None)), begin(grad, out, needs))[1])
    gradients(model, batch())
    relus = [True, True, False, False, False]
    assert passes == [*(("finish", relu) for relu in relus), *(("begin", relu) for relu in reversed(relus))]


def test_only_the_chain_itself_skips_the_relu() -> None:
    native, model = pair()
    given = torch.randn(8, 7)
    torch.testing.assert_close(model.mlp[0](given), native.mlp[0](given))
    assert (model.mlp[0](given) < 0).any() and (model.mlp[:2](given) >= 0).all()


@pytest.mark.parametrize("place", [0, 1], ids=["layer", "relu"])
def test_hooks_of_layers_and_relus_run_on_what_they_natively_see(place: int) -> None:
    native, model = pair()
    seen: list[Tensor] = []
    for each in (native, model):
        each.mlp[place].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
        each.mlp[place].register_full_backward_hook(lambda module, grads, _: seen.append(grads[0].clone()))
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    torch.testing.assert_close(seen[2:], seen[:2])
    assert "its ReLU ran by itself" in sl.explain(model)


def test_hooks_on_every_module_are_heard() -> None:
    native, model = pair()
    heard: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: heard.append(type(module).__name__))
    try:
        native(*batch())
        count = len(heard)
        model(*batch())
    finally:
        handle.remove()
    assert heard[count:] == heard[:count]


def three_dimensions(model: Any) -> Tensor:
    return model.mlp(torch.linspace(-1, 1, 42).view(2, 3, 7))


def one_dimension(model: Any) -> Tensor:
    return model.mlp(torch.linspace(-1, 1, 7))


def no_rows(model: Any) -> Tensor:
    return model.mlp(torch.empty(0, 7))


def lowered(model: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.mlp(torch.linspace(-1, 1, 14).view(2, 7))


def transformed(model: Any) -> Tensor:
    return torch.func.vmap(model.mlp)(torch.linspace(-1, 1, 14).view(2, 1, 7))


def forward_mode(model: Any) -> Tensor:
    given = torch.linspace(-1, 1, 14).view(2, 7)
    return torch.func.jvp(model.mlp, (given,), (given,))[1]


def in_double(model: Any) -> Tensor:
    return model.double().mlp(torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7))


def pruned(model: Any) -> Tensor:
    prune.l1_unstructured(model.mlp[0], "weight", amount=0.5)
    return model.mlp(torch.linspace(-1, 1, 14).view(2, 7))


@pytest.mark.parametrize("use", [three_dimensions, one_dimension, no_rows, lowered, transformed, forward_mode, in_double, pruned])
def test_what_the_library_does_not_take_is_torchs(use: Callable[[Any], Tensor]) -> None:
    native, model = pair()
    torch.testing.assert_close(use(model), use(native))
    assert "stepped aside: mlp.0: " in sl.explain(model)


def sliced(given: Tensor) -> Tensor:
    return torch.cat([given, given], 1)[:, 3:10]


def expanded(given: Tensor) -> Tensor:
    return given[:1].expand(4, -1)


def strided(given: Tensor) -> Tensor:
    return given.t().contiguous().t()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("arrange", [sliced, expanded, strided])
@pytest.mark.parametrize("scale", [lambda out: out.sum(), lambda out: out[:, ::2].square().sum(),
                                   lambda out: out.t().contiguous().cos().sum()])
def test_strides_do_not_matter(arrange: Callable[[Tensor], Tensor], scale: Callable[[Tensor], Tensor], choice: str) -> None:
    native, model = pair(choice)
    found = []
    for each in (model, native):
        given = torch.linspace(-2, 2, 28).view(4, 7).requires_grad_()
        found.append(list(torch.autograd.grad(scale(each.mlp(arrange(given))), [given, *each.mlp.parameters()])))
    assert_alike(*found)
    assert dense_of(model).calls == 4


@pytest.mark.parametrize("choice", CHOICES)
def test_frozen_parameters_and_inputs_get_no_gradient(choice: str) -> None:
    native, model = pair(choice)
    for each in (native, model):
        each.mlp[0].weight.requires_grad_(False)
        each.mlp[5].requires_grad_(False)
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    assert model.mlp[0].weight.grad is None and model.mlp[5].bias.grad is None


@pytest.mark.parametrize("choice", CHOICES)
def test_it_can_be_differentiated_twice(choice: str) -> None:
    native, model = pair(choice)
    found = []
    for each in (model, native):
        given = torch.linspace(-2, 2, 28).view(4, 7).requires_grad_()
        (first,) = torch.autograd.grad(each.mlp(given).square().sum(), given, create_graph=True)
        found.append(list(torch.autograd.grad(first.square().sum(), [given, each.mlp[0].weight])))
    assert_alike(*found)


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_of_several_losses_at_once_are_torchs(choice: str) -> None:
    native, model = pair(choice)
    found = []
    for each in (model, native):
        given = torch.linspace(-2, 2, 28).view(4, 7).requires_grad_()
        (grads,) = torch.autograd.grad(each.mlp(given).sum(0), given, torch.eye(6), is_grads_batched=True)
        found.append([grads])
    assert_alike(*found)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_weight_that_changes_before_the_backward_raises_as_in_torch(choice: str) -> None:
    _, model = pair(choice)
    out = model.mlp(torch.randn(4, 7, requires_grad=True))
    with torch.no_grad():
        model.mlp[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpointing_runs_it_again() -> None:
    native, model = pair()
    given = torch.randn(4, 7, requires_grad=True)
    found = [torch.autograd.grad(checkpoint(each.mlp, given, use_reentrant=False).sum(), [given, *each.mlp.parameters()])
             for each in (model, native)]
    assert_alike(*map(list, found))


def test_compiled_graphs_hold_torchs_own() -> None:
    native, model = pair()
    compiled = torch.compile(model.mlp, backend="aot_eager", fullgraph=True)
    given = torch.randn(4, 7)
    torch.testing.assert_close(compiled(given), native.mlp(given))
    assert dense_of(model).calls == 0


# Around it


def test_copies_and_pickles_run_their_own_and_unapply_ends_it() -> None:
    native, model = pair()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.mlp[0].weight.mul_(2)
        other.mlp(torch.randn(4, 7))
        assert dense_of(other).calls == 4 and dense_of(model).calls == 0
        roads = dense_of(other).forwards
        assert roads["mlp"].module is other.mlp and roads["mlp.0"].owner is dense_of(other)
        assert all(layer in set(other.modules()) for layer in roads["mlp"].fused)
    assert isinstance(model.mlp.forward.__self__, ChainForward) and isinstance(model.head.forward.__self__, LinearForward)
    sl.unapply(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    assert torch.equal(model(*batch()), native(*batch()))


def test_a_plan_runs_in_a_model_whose_layers_changed() -> None:
    plan, _ = planned(Model(), PIN)
    model = Model()
    model.head, model.mlp[5] = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1)), Scaled(16, 5)
    native = copy.deepcopy(model)
    current = sl.lift(workload(copy.deepcopy(model))).structure
    assert [each.grade for each in compare(plan, current)] == ["re-check", "re-check"]      # layers, and modules to compile
    sl.apply(plan, model, torch.optim.SGD(model.parameters(), lr=0.05))
    assert_alike(gradients(model, batch()), gradients(native, batch()))
    assert dense_of(model).calls == 3


def test_a_plan_that_is_made_while_another_runs_has_its_layers() -> None:
    plan, work = planned(Model(), PIN)
    schedule = build_schedule(plan.structure, plan.config)
    sl.apply(plan, work.model, work.optimizer)
    other = Applied(plan.structure, schedule, work.model)
    assert set(other.runtime.dense.forwards) == set(dense_of(work.model).forwards)


@needs_onednn
def test_a_torch_without_the_operator_runs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, work = planned(Model(), PIN)
    native = copy.deepcopy(work.model)
    monkeypatch.setattr(runtime, "_SCHEMA", "another")
    assert not runtime.is_available()
    sl.apply(plan, work.model, work.optimizer)
    assert torch.equal(work.model(*batch()), native(*batch()))
    assert "stepped aside: linear layers: this torch has no oneDNN operator for them" in sl.explain(work.model)


# The certificate


def test_a_right_one_is_certified() -> None:
    for choice in CHOICES:
        certificate = sl.verify(*planned(Model(), {"linear": choice}))
        assert certificate.exact["linear"] and certificate.exact["linear gradient"]
        assert 0 < certificate.real["linear layers"] < 1 and 0 < certificate.real["gradients of a step"] < 0.1


@needs_onednn
@pytest.mark.parametrize("fault", ["no bias", "no ReLU", "a small error", "a wrong gradient"])
def test_faults_fail_the_certificate(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plan, work = planned(Model(), PIN)
    original = runtime._product

    def faulty(left: Tensor, right: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
        forward = bias is not None or relu
        if fault == "a small error" or (fault == "a wrong gradient" and not forward):
            return original(left, right, bias, relu) * (1 + 1e-5)
        return original(left, right, None if fault == "no bias" else bias, relu and fault != "no ReLU")

    monkeypatch.setattr(runtime, "_product", faulty)
    with pytest.raises(EquivalenceError, match="linear"):
        sl.verify(plan, work)
    schedule = build_schedule(plan.structure, plan.config)
    with pytest.raises(EquivalenceError, match=r"of (mlp\.|head).*: planned differs from float64"):
        check_linears_real(plan.structure, schedule, work, batch())


@pytest.mark.parametrize("fault", ["no bias", "no ReLU", "a row that is not finished", "no mask", "a wrong bias gradient"])
def test_faults_around_the_products_fail_the_certificate(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plan, work = planned(Model(), {"linear": "fused"})
    finish, begin = CpuEpilogue.finish, CpuEpilogue.begin

    def finished(self: CpuEpilogue, out: Tensor, bias: Tensor | None, relu: bool) -> None:
        part = out[1:] if fault == "a row that is not finished" else out
        finish(self, part, None if fault == "no bias" else bias, relu and fault != "no ReLU")

    def begun(self: CpuEpilogue, grad: Tensor, out: Tensor | None, needs_bias: bool) -> tuple[Tensor, Tensor | None]:
        masked, bias_grad = begin(self, grad, None if fault == "no mask" else out, needs_bias)
        return masked, bias_grad * (1 + 1e-5) if bias_grad is not None and fault == "a wrong bias gradient" else bias_grad

    monkeypatch.setattr(CpuEpilogue, "finish", finished)
    monkeypatch.setattr(CpuEpilogue, "begin", begun)
    with pytest.raises(EquivalenceError, match="linear"):
        sl.verify(plan, work)
