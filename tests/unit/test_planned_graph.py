"""Planned lookups as nodes of graphs that torch.compile makes: one graph, native's numbers, and torch itself for what no node can be."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import sparselift as sl
from sparselift.errors import LiftRefused
from sparselift.grad import PendingGrad
from sparselift.runtime.merging import merge_lookups
from tests.unit.runtime_models import assert_same

ROWS, DIM = 20, 4


class Net(nn.Module):
    """A lookup of each form, and a layer."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=mode != "max")
        self.weighted = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, padding_idx=3)
        self.rows = nn.Embedding(ROWS, DIM, sparse=True)
        self.top = nn.Linear(3 * DIM, 2)

    def forward(self, offsets: Tensor, indices: Tensor, matrix: Tensor, factors: Tensor) -> Tensor:
        found = [self.bags(indices, offsets), self.weighted(matrix, per_sample_weights=factors), self.rows(matrix).sum(1)]
        return self.top(torch.cat(found, dim=1))


def batch(seed: int = 0, bags: int = 5) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randint(ROWS, (bags, 3), generator=generator)
    return (torch.arange(0, 2 * bags, 2), torch.randint(ROWS, (2 * bags + 7,), generator=generator), matrix,
            torch.rand(bags, 3, generator=generator))


class Side:
    """A model, its optimizer, and the model as compiled."""

    def __init__(self, model: nn.Module, backend: Any, kind: type[torch.optim.Optimizer] = torch.optim.Adagrad) -> None:
        self.model, self.optimizer = model, kind(model.parameters(), lr=0.1)
        self.compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)

    def backward(self, seed: int = 0, bags: int = 5, compiled: bool = True) -> Tensor:
        loss = (self.compiled if compiled else self.model)(*batch(seed, bags)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plan(side: Side) -> None:
    work = sl.Workload("w", side.model, side.optimizer, lambda m, given: m(*given).square().mean(), [batch(seed) for seed in range(3)])
    sl.apply(sl.Plan.default(work), side.model, side.optimizer)


def sides(loop: Callable[[Side], Any], backend: Any = "aot_eager", model: nn.Module | None = None, **options: Any) -> Side:
    """Run a loop natively, uncompiled, and planned and compiled; the same parameters must come of it, and no update of torch's."""
    torch._dynamo.reset()
    native, planned = (Side(copy.deepcopy(model or Net()), backend, **options) for _ in range(2))
    native.compiled = native.model
    plan(planned)
    loop(native)
    loop(planned)
    assert_same(native.model, planned.model, exact=False)
    return planned


class Graphs:
    """A backend of torch.compile that keeps the graphs."""

    def __init__(self) -> None:
        self.found: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.found.append(graph)
        return graph.forward

    def lookups(self) -> list[Any]:
        return [node.target for graph in self.found for node in graph.graph.nodes
                if any(word in str(node.target) for word in ("lookup", "embedding"))]


def train(side: Side) -> None:
    for seed in range(3):
        side.backward(seed, 5 + seed)
        side.step()


def test_every_lookup_is_a_node_of_the_one_graph() -> None:
    graphs = Graphs()
    planned = sides(lambda side: [train(side), train(side)], graphs)
    assert len(graphs.found) == 1
    assert graphs.lookups() == [torch.ops.sparselift.planned_lookup] * 3
    said = sl.explain(planned.model)
    assert "in compiled graphs: 1 lookups over 1 tables in one node (rows): 6 times" in said and "nothing fell back" in said


def planned_nodes(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.target is torch.ops.sparselift.planned_lookup]


class Merged(Graphs):
    """One that merges lookups first."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        merge_lookups(graph)
        return super().__call__(graph, inputs)


class Shared(nn.Module):
    """A table that is read three times, once through a view that is made late; a frozen one; one that is read by a lookup's values; and one
    that no gradient arrives at.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.frozen, self.left = (nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(5))
        self.frozen.weight.requires_grad_(False)
        self.b.weight = self.a.weight

    def forward(self, offsets: Tensor, indices: Tensor, matrix: Tensor, factors: Tensor) -> Tensor:
        a = self.a(indices, offsets)
        b = self.b(matrix[:, 1:])
        frozen = self.frozen(matrix)
        c = self.c((a.detach().abs().sum(1, keepdim=True) * 5).long().remainder(ROWS))
        return torch.cat([a, b, c, frozen, self.left(matrix).detach()], dim=1) + self.a(matrix).sum(1, keepdim=True)


@pytest.mark.parametrize(("model", "nodes"), [(Net, [2, 1]), (Shared, [3, 1, 1, 1])])
def test_grouped_lookups_are_merged(model: Callable[[], nn.Module], nodes: list[int]) -> None:
    graphs = Merged()

    def loop(side: Side) -> None:
        side.backward(9, compiled=False)
        side.step()                                    # tables that were written to
        train(side)
        side.backward()
        assert "left" not in side.model._modules or side.model.left.weight.grad is None

    sides(loop, graphs, model())
    graph, = graphs.found
    assert [len(node.args[0]) for node in planned_nodes(graph)] == nodes


class Writing(nn.Module):
    """Changes a table between two lookups, some time after it was lifted."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(2))

    def forward(self, offsets: Tensor, indices: Tensor, matrix: Tensor, factors: Tensor) -> Tensor:
        a = self.a(matrix)
        if self.writes:
            with torch.no_grad():
                self.b.weight.mul_(0.5)
        return torch.cat([a, self.b(matrix)], dim=1)


@pytest.mark.slow
def test_a_lookup_of_what_is_written_to_stays_where_it_is() -> None:
    graphs = Merged()

    def loop(side: Side) -> None:
        for writes in (False, True):
            side.model.writes = writes
            train(side)

    sides(loop, graphs, Writing())
    assert [len(graph) for graph in map(planned_nodes, graphs.found)] == [1, 2]


def mixed(side: Side) -> None:
    side.backward(0)
    side.backward(1, 7)                                # into one gradient
    assert side.compiled is side.model or type(side.model.rows.weight.grad) is PendingGrad
    torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
    side.step()
    losses = [side.compiled(*batch(seed)).square().mean() for seed in range(2)]
    for loss in losses:                                # both forwards before the backwards
        loss.backward()
    side.step()
    side.model.eval()
    with torch.no_grad():
        side.compiled(*batch(5))
    with torch.inference_mode():
        side.compiled(*batch(6))
    side.model.train()
    side.backward(2, compiled=False)
    side.backward(3)
    side.step()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_accumulation_evaluation_and_eager_steps_in_between(backend: str) -> None:
    planned = sides(mixed, backend)
    assert re.findall(r"update of .*: (\d+) times", sl.explain(planned.model)) == ["1"] * 3     # whose gradients came from both


def asked(side: Side) -> None:
    model = side.model
    side.compiled(*batch(0)).square().mean().backward(inputs=[model.top.weight])
    assert model.bags.weight.grad is None and model.top.bias.grad is None
    side.compiled(*batch(1)).square().mean().backward(inputs=[model.bags.weight])
    assert model.rows.weight.grad is None
    found = torch.autograd.grad(side.compiled(*batch(2)).square().mean(), [model.rows.weight, model.top.bias])
    assert model.rows.weight.grad is None
    model.rows.weight.grad, model.top.bias.grad = found
    side.step()
    model.rows.weight.requires_grad_(False)
    side.backward(3)
    assert model.rows.weight.grad is None
    side.step()
    model.rows.weight.requires_grad_(True)
    side.backward(3)
    side.step()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_only_what_is_asked_for_gets_a_gradient(backend: str) -> None:
    sides(asked, backend)


@pytest.mark.slow
def test_trainable_per_sample_weights() -> None:
    found = []

    def loop(side: Side) -> None:
        factors = batch()[3].requires_grad_()
        side.compiled(*batch()[:3], factors).square().mean().backward()
        found.append(factors.grad)
        side.step()

    sides(loop)
    torch.testing.assert_close(*found)


class Twice(nn.Module):
    """Two lookups of the same ids, whose gradients are the same; one that no loss needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.unused = (nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(2))

    def forward(self, offsets: Tensor, indices: Tensor, matrix: Tensor, factors: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.unused(matrix).sum() * 0 + 1
        return (self.bags(indices, offsets) + self.bags(indices, offsets)) * scale


@pytest.mark.slow
def test_equal_nodes_count_as_often_as_they_are() -> None:
    def loop(side: Side) -> None:
        side.backward()
        assert side.model.unused.weight.grad is None
        side.step()

    sides(loop, model=Twice())


class Tied(nn.Module):
    """Its table is the output layer, too, some time after it was lifted."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.EmbeddingBag(ROWS, DIM, mode="sum")

    def forward(self, offsets: Tensor, indices: Tensor, matrix: Tensor, factors: Tensor) -> Tensor:
        pooled: Tensor = self.bags(indices, offsets)
        return pooled @ self.bags.weight.t() if self.tied else pooled


@pytest.mark.slow
def test_gradients_of_a_table_from_elsewhere_are_added() -> None:
    def loop(side: Side) -> None:
        side.model.tied = True
        train(side)

    planned = sides(loop, model=Tied())
    assert "in compiled graphs: 1 lookups" in sl.explain(planned.model)


@pytest.mark.slow
def test_bad_ids_are_named_and_end_nothing() -> None:
    def loop(side: Side) -> None:
        side.backward(0)
        if side.compiled is not side.model:
            bad = batch(1)
            bad[1][4] = ROWS
            with pytest.raises(IndexError, match=f"bags.*{ROWS}"):
                side.compiled(*bad)
        side.backward(2)
        side.step()

    sides(loop)


@pytest.mark.slow
def test_what_a_graph_cannot_do_is_refused() -> None:
    def loop(side: Side) -> None:
        if side.compiled is not side.model:          # (other backends refuse it themselves)
            with pytest.raises(LiftRefused, match="create_graph=True"):
                torch.autograd.grad(side.compiled(*batch()).square().mean(), [side.model.bags.weight], create_graph=True)
            loss = side.compiled(*batch()).square().mean()
            side.model.rows.weight = nn.Parameter(side.model.rows.weight.detach().clone())
            side.compiled(*batch())
            with pytest.raises(LiftRefused, match=r"rows\.weight was replaced between"):
                loss.backward()
            handle = side.model.rows.weight.register_hook(lambda grad: grad)
            with pytest.raises(LiftRefused, match="register hooks before"):
                side.compiled(*batch())
            handle.remove()
        side.model.zero_grad()

    sides(loop, "eager")
    with pytest.raises(LiftRefused, match="'another plan', which this process does not have"):
        torch.ops.sparselift.planned_lookup([torch.ones(2, 2)], [torch.zeros(1, 1).long()], [], [], ["a"], ["matrix"], [False],
                                            "another plan")


def test_the_operators_are_registered_as_torch_wants_them() -> None:
    side = Side(Net(), "eager")
    plan(side)
    offsets, indices, matrix, factors = batch()
    weights = [side.model.bags.weight, side.model.weighted.weight]
    constants = (["bags", "weighted"], ["offsets", "matrix"], [False, True], side.model._sparselift.runtime.graphs.name)
    torch.library.opcheck(torch.ops.sparselift.planned_lookup.default, (weights, [indices, matrix], [offsets], [factors], *constants),
                          test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    grads = [torch.ones(len(matrix), DIM)] * 2
    torch.library.opcheck(torch.ops.sparselift.planned_lookup_backward.default, (
        grads, weights[1:], [True, True], [False, False], [False, True], [indices, matrix], [offsets], [factors], *constants),
        test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_copies_have_their_own_and_unapply_gives_torchs_back() -> None:
    planned = sides(train, "eager")                    # torch's own lookups with padding compile with no other backend
    twin = copy.deepcopy(planned.model)
    before = copy.deepcopy(planned.model.state_dict())
    other = Side(twin, "eager")
    train(other)
    assert all(torch.equal(before[name], value) for name, value in planned.model.state_dict().items())
    assert not all(torch.equal(before[name], value) for name, value in twin.state_dict().items())
    native, calls = Side(Net(), "eager"), planned.model._sparselift.runtime.graphs.lines()
    runtime = planned.model._sparselift.runtime
    sl.unapply(planned.model, planned.optimizer)
    native.model.load_state_dict(planned.model.state_dict())
    for side in (native, planned):
        side.backward(4)
    assert not isinstance(planned.model.rows.weight.grad, PendingGrad) and runtime.graphs.lines() == calls
    for mine, other_one in zip(planned.model.parameters(), native.model.parameters()):
        torch.testing.assert_close(mine.grad.to_dense(), other_one.grad.to_dense())


def change_mode(side: Side) -> None:
    side.model.bags.mode = "mean"


def watch(side: Side) -> None:
    side.model.bags.weight.register_hook(lambda grad: grad * 2)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "why"), [(change_mode, "an option of the module"), (watch, "or has hooks")])
def test_what_changed_before_compiling_has_torchs_own_lookup(change: Callable[[Side], None], why: str) -> None:
    def loop(side: Side) -> None:
        change(side)
        side.backward()
        side.step()

    assert re.search(f"bags: a compiled graph has torch's own lookup: .*{why}.*: 1 times", sl.explain(sides(loop, "eager").model))


@pytest.mark.slow
def test_maxima_and_other_parameters_have_torchs_own_lookup() -> None:
    planned = sides(train, model=Net("max"))
    assert "the backward of maxima" in sl.explain(planned.model)
    given = {name: each.detach().clone().requires_grad_() for name, each in Net().named_parameters()}
    planned = sides(lambda side: None)
    torch.compile(lambda *args: functional_call(planned.model, given, args), backend="eager")(*batch()).sum().backward()
    assert given["rows.weight"].grad is not None and planned.model.rows.weight.grad is None


class Passing(nn.Module):
    """The gradient of a lookup goes on to a pointwise operation, which the compiler has write over it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.top = nn.Linear(3, DIM), nn.Linear(DIM, 2)
        self.bags = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)

    def forward(self, offsets: Tensor, indices: Tensor, matrix: Tensor, factors: Tensor) -> Tensor:
        below = self.bottom(factors)
        return self.top(torch.sin(below) + self.bags(indices, offsets))


@pytest.mark.slow
def test_the_compiler_may_use_a_gradients_memory_again() -> None:
    planned = sides(train, "inductor", Passing(), kind=torch.optim.SGD)
    assert "nothing fell back" in sl.explain(planned.model)
