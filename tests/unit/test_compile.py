"""Lookups as nodes of compiled and exported graphs: the operators' registration, values, gradients and errors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import sparselift.functional as functional
from sparselift.nn import Embedding, EmbeddingBag, TableBatchedEmbeddingBags

ROWS, DIM = 7, 5
LOOKUP = torch.ops.sparselift.lookup.default
BACKWARD = torch.ops.sparselift.lookup_backward.default
RENORM = torch.ops.sparselift.renorm_.default


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def ids(*shape: int, rows: int = ROWS, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ------------------------------------------------------------------------------------------------------- the operators

def cases() -> Iterator[Any]:
    """(weights, indices, offsets, per_sample_weights, mode, padding_idx, include_last_offset, by_freq), a name each."""
    starts = torch.tensor([0, 2, 2, 5])
    for mode, dtype in itertools.product(("sum", "mean", "max"), (torch.float32, torch.float64, torch.bfloat16)):
        table = integers(ROWS, DIM).to(dtype)
        yield f"{mode}-{dtype}", ([table], ids(6), starts, None, mode, None, False, False)
    table = integers(ROWS, DIM)
    yield "matrix", ([table], ids(4, 3, dtype=torch.int32), None, None, "mean", None, False, False)
    yield "empty bags", ([table], ids(4, 0), None, None, "sum", None, False, False)
    yield "padding", ([table], ids(6), starts, None, "mean", 2, False, False)
    yield "padding, max", ([table], ids(6), starts, None, "max", 2, False, False)
    yield "last offset", ([table], ids(6), torch.tensor([0, 2, 6]), None, "sum", None, True, False)
    yield "weighted", ([table], ids(6), starts, integers(6), "sum", None, False, False)
    yield "weighted matrix, padding", ([table], ids(4, 3), None, integers(4, 3), "sum", 1, False, False)
    yield "weighted half", ([table.half()], ids(6), starts, integers(6).half(), "sum", None, False, False)
    yield "by frequency", ([table], ids(6), starts, None, "sum", None, False, True)
    yield "rows", ([table], ids(2, 3), None, None, "none", None, False, False)
    yield "rows, padding", ([table], ids(2, 3), None, None, "none", 0, False, False)
    yield "rows, one id", ([table], ids(), None, None, "none", None, False, False)
    yield "rows by frequency", ([table], ids(2, 3), None, None, "none", None, False, True)
    tables = [integers(7, 5), integers(3, 1), integers(9, 8)]
    bounds = torch.tensor([0, 1, 3, 3, 4, 6, 7])
    yield "tables", (tables, ids(7, rows=3), bounds, None, "sum", None, True, False)
    yield "weighted tables", (tables, ids(7, rows=3), bounds, integers(7), "sum", None, True, False)
    yield "tables of two dtypes", ([tables[0], tables[1].double(), tables[2]], ids(7, rows=3), bounds, None, "mean", None, True, False)


CASES = dict(cases())
SPARSE = ("sum-torch.float32", "padding", "weighted matrix, padding", "weighted half", "by frequency", "rows", "rows, padding",
          "weighted tables", "tables of two dtypes")
KINDS = [*((name, False) for name in CASES), *((name, True) for name in SPARSE)]     # (case, whether the gradient is sparse)


def arguments(name: str, sparse: bool = False) -> tuple[Any, ...]:
    """Of the forward operator, with gradients wanted."""
    weights, indices, offsets, factors, mode, padding_idx, last, by_freq = CASES[name]
    weights = [weight.clone().requires_grad_() for weight in weights]
    factors = None if factors is None else factors.clone().requires_grad_()
    return weights, indices, offsets, factors, mode, sparse, padding_idx, last, by_freq, [f"table {t}" for t in range(len(weights))]


@pytest.mark.parametrize("name, sparse", KINDS)
def test_forward_operators_are_registered_well(name: str, sparse: bool) -> None:
    torch.library.opcheck(LOOKUP, arguments(name, sparse))


@pytest.mark.slow
@pytest.mark.parametrize("name, sparse", KINDS)
def test_backward_operators_are_registered_well(name: str, sparse: bool) -> None:
    weights, indices, offsets, factors, *options = arguments(name, sparse)
    grad = integers(*LOOKUP(weights, indices, offsets, factors, *options).shape, seed=1).to(weights[0].dtype)
    shapes = [weight.shape[0] for weight in weights], [weight.shape[1] for weight in weights]
    tables = [weight.detach() for weight in weights]
    for wanted in [[True] * len(weights)] + ([[t == 0 for t in range(len(weights))]] if len(weights) > 1 else []):
        for by_factors in (False, True) if factors is not None else (False,):
            torch.library.opcheck(BACKWARD, (grad, tables, *shapes, wanted, by_factors, indices, offsets,
                                             None if factors is None else factors.detach(), *options))


@pytest.mark.parametrize("mode", ["sum", "none"])
def test_renorm_is_registered_well(mode: str) -> None:
    torch.library.opcheck(RENORM, (3 * integers(ROWS, DIM), ids(4, 2), None, None, mode, False, 1.0, 2.0, ["weight"]))


@pytest.mark.parametrize("name, sparse", KINDS)
def test_operators_have_the_eager_gradients(name: str, sparse: bool) -> None:
    """The operator's formula against autograd through the eager lookup."""
    weights, indices, offsets, factors, mode, sparse, padding_idx, last, by_freq, names = arguments(name, sparse)
    results = []
    for eager in (False, True):
        given = [weight.detach().clone().requires_grad_() for weight in weights]
        weighted = None if factors is None else factors.detach().clone().requires_grad_()
        if not eager:
            out = LOOKUP(given, indices, offsets, weighted, mode, sparse, padding_idx, last, by_freq, names)
        elif mode == "none":
            out = functional.embedding(indices, given[0], padding_idx, scale_grad_by_freq=by_freq, sparse=sparse)
        else:
            parts = []
            count = (len(offsets) - 1) // len(given) if len(given) > 1 else 0
            for t, table in enumerate(given):
                each, starts, factor = indices, offsets, weighted
                if len(given) > 1:
                    bounds = offsets[t * count:(t + 1) * count + 1]
                    each, starts = indices[bounds[0]:bounds[-1]], bounds - bounds[0]
                    factor = None if weighted is None else weighted[bounds[0]:bounds[-1]]
                parts.append(functional.embedding_bag(each, table, starts, mode=mode, scale_grad_by_freq=by_freq, per_sample_weights=factor,
                                                      include_last_offset=last, padding_idx=padding_idx, sparse=sparse))
            out = torch.cat(parts, 1)
        out.backward(integers(*out.shape, seed=1).to(out.dtype))
        results.append((out.detach(), *(weight.grad for weight in given), *(() if weighted is None else (weighted.grad,))))
    for ours, want in zip(*results, strict=True):
        assert ours.layout == want.layout
        torch.testing.assert_close(ours.to_dense(), want.to_dense())


def test_a_gradient_that_is_differentiated_again_is_refused() -> None:
    args = arguments("sum-torch.float32")
    grad, = torch.autograd.grad(LOOKUP(*args).square().sum(), args[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        grad.sum().backward()


# --------------------------------------------------------------------------------------------------------- torch.compile

class Bags(nn.Module):
    """A pooled lookup and what a model does around it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = EmbeddingBag(ROWS, DIM, **options)
        self.dense = nn.Linear(DIM, 3)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.dense(self.table(*batch) * 2).square()


class Rows(Bags):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = Embedding(ROWS, DIM, **options)


class Tables(Bags):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = TableBatchedEmbeddingBags([(ROWS, 2), (ROWS, DIM - 2)], **options)


def matrix(size: int) -> tuple[Tensor, ...]:
    return (ids(size, 3, seed=size),)


def bags(size: int) -> tuple[Tensor, ...]:
    return ids(2 * size, seed=size), torch.arange(0, 2 * size, 2)


def weighted(size: int) -> tuple[Tensor, ...]:
    return *bags(size), torch.rand(2 * size, generator=torch.Generator().manual_seed(size))


def tables(size: int) -> tuple[Tensor, ...]:
    return ids(4 * size, seed=size), torch.arange(0, 4 * size + 1, 2)


def weighted_tables(size: int) -> tuple[Tensor, ...]:
    return *tables(size), torch.rand(4 * size, generator=torch.Generator().manual_seed(size))


MODELS = [
    (Bags, {"mode": "sum"}, bags), (Bags, {"mode": "mean", "padding_idx": 1}, matrix), (Bags, {"mode": "max"}, bags),
    (Bags, {"mode": "sum"}, weighted), (Bags, {"mode": "mean", "scale_grad_by_freq": True}, bags),
    (Bags, {"mode": "sum", "max_norm": 1.0}, bags), (Rows, {}, matrix), (Rows, {"padding_idx": 2, "max_norm": 0.5}, matrix),
    (Tables, {"sparse": False}, tables), (Tables, {"sparse": False}, weighted_tables),
    (Bags, {"mode": "sum", "sparse": True}, bags), (Bags, {"mode": "mean", "sparse": True, "padding_idx": 1}, matrix),
    (Rows, {"sparse": True, "padding_idx": 2}, matrix), (Tables, {"sparse": True}, weighted_tables),
]


def assert_trains_alike(model: nn.Module, compiled: nn.Module, batches: list[tuple[Tensor, ...]], rtol: float = 1.3e-6) -> None:
    """Forward, backward and a step on each batch."""
    sides = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, compiled)]
    for batch in batches:
        results = []
        for side, optimizer in sides:
            given = [each.clone().requires_grad_() if each.is_floating_point() else each for each in batch]
            out = side(*given)
            out.sum().backward()
            results.append([out.detach(), *(each.grad for each in given if each.is_floating_point()),
                            *(weight.grad.to_dense() for weight in side.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        for ours, want in zip(*results, strict=True):
            torch.testing.assert_close(ours, want, rtol=rtol, atol=1e-5)
    for mine, other in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind, options, batch", MODELS)
def test_one_graph_serves_every_batch_size(kind: type, options: dict[str, Any], batch: Any) -> None:
    model = kind(**options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(model), backend=counter, fullgraph=True, dynamic=True)
    assert_trains_alike(model, compiled, [batch(size) for size in (4, 6, 3)])
    assert sum("sparselift.lookup" in graph.code for graph in counter.graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind, options, batch", [MODELS[0], MODELS[3], MODELS[6], MODELS[8]])
def test_inductor_computes_the_same(kind: type, options: dict[str, Any], batch: Any) -> None:
    model = kind(**options)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=True)
    # The compiler sums the dense layer, and multiplies and adds, in an order of its own.
    assert_trains_alike(model, compiled, [batch(size) for size in (4, 6)], rtol=1e-4)


def test_functional_forms_compile() -> None:
    def rows(input: Tensor, weight: Tensor) -> Tensor:
        return functional.embedding(input, weight, padding_idx=-1) + functional.embedding_bag(input, weight, mode="sum")[:, None]

    compiled = torch.compile(rows, backend="aot_eager", fullgraph=True)
    grads = []
    for each in (rows, compiled):
        weight = integers(ROWS, DIM).requires_grad_()
        out = each(ids(4, 2), weight)
        out.sum().backward()
        grads.append((out, weight.grad))
    assert all(map(torch.equal, *grads))


def test_frozen_tables_have_no_gradient_in_graphs() -> None:
    model = Tables(sparse=False)
    model.table.weights[0].requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(*tables(3)).sum().backward()
    assert [weight.grad is None for weight in model.table.weights] == [True, False]
    model.requires_grad_(False)
    assert not compiled(*tables(3)).requires_grad


def test_tables_may_change_between_a_compiled_sum_and_its_backward() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    out = torch.compile(module, backend="aot_eager", fullgraph=True)(*bags(3))
    with torch.no_grad():
        module.weight.add_(1)
    out.sum().backward()
    assert module.weight.grad.sum() == 6 * DIM


@pytest.mark.parametrize("module, batch, error, message", [
    (EmbeddingBag(ROWS, DIM, mode="sum"), (torch.tensor([[0, 1], [2, 7]]),), IndexError, "'weight': id 7 at position 3 .* 7 rows"),
    (EmbeddingBag(ROWS, DIM, mode="max"), (torch.tensor([[0, 1], [2, -1]]),), IndexError, "'weight': id -1 at position 3 .* 7 rows"),
    (EmbeddingBag(ROWS, DIM, max_norm=0.1), (torch.tensor([0, 1, 9]), torch.tensor([0, 1])), IndexError, "id 9 at position 2"),
    (EmbeddingBag(ROWS, DIM, max_norm=0.1), (torch.tensor([0, 1]), torch.tensor([1, 1])), ValueError, "must start at 0; got 1"),
    (EmbeddingBag(ROWS, DIM), (torch.tensor([0, 1]), torch.tensor([0, 5])), ValueError, "offset 5 at position 1 passes the 2 ids"),
    (Embedding(ROWS, DIM), (torch.tensor([0, 1, 7]),), IndexError, "'weight': id 7 at position 2 .* 7 rows"),
    (TableBatchedEmbeddingBags([(5, 2), (3, 2)]), (torch.tensor([0, 4, 3]), torch.tensor([0, 2, 3])), IndexError,
     "'weights.1': id 3 at position 0 .* 3 rows"),
    (TableBatchedEmbeddingBags([(5, 2), (3, 2)]), (torch.tensor([0, 4, 3]), torch.tensor([0, 2, 1])), ValueError, "number of indices"),
])
def test_compiled_lookups_raise_what_eager_ones_do(module: nn.Module, batch: tuple[Tensor, ...], error: type, message: str) -> None:
    before = [weight.detach().clone() for weight in module.parameters()]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for each in (module, compiled):
        with pytest.raises(error, match=message):
            each(*batch)
    assert all(map(torch.equal, before, module.parameters()))


# ---------------------------------------------------------------------------------------------------------- torch.export

@pytest.mark.slow
@pytest.mark.parametrize("kind, options, batch", [model for model in MODELS if not model[1].get("sparse")])
def test_exported_programs_keep_their_values_at_any_batch_size(kind: type, options: dict[str, Any], batch: Any) -> None:
    if "max_norm" in options:
        options = {**options, "max_norm": 100.0}
    model = kind(**options).eval().requires_grad_(False)
    example = batch(4)
    size = torch.export.Dim.AUTO
    program = torch.export.export(model, example, dynamic_shapes={"batch": tuple({0: size} for _ in example)})
    assert [str(node.target) for node in program.graph.nodes].count("sparselift.lookup.default") == 1
    for each in (program.module(), program.run_decompositions().module()):
        for count in (4, 7):
            assert torch.equal(each(*batch(count)), model(*batch(count)))


def test_exported_programs_check_their_ids() -> None:
    program = torch.export.export(EmbeddingBag(ROWS, DIM), matrix(4)).module()
    with pytest.raises(IndexError, match="id 7 at position 11"):
        program(torch.tensor([[0, 0, 0]] * 3 + [[0, 0, 7]]))
