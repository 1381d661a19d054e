"""Regrouped columns as a differentiable function: torch's split and cat, eager and compiled, once and twice differentiated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparselift.errors import DtypeError
from sparselift.functional import RegroupSpec, regroup
from sparselift.functional.regroup import _flat
from sparselift.kernels import exchange_compiled

SPEC = RegroupSpec(((2, 3), (4,), (5,)), ((2, 0), (0, 1, 2, 0), ()))             # the last source is in no group, and the last group empty
BATCH = 6
REGROUP, BACKWARD = torch.ops.sparselift.regroup, torch.ops.sparselift.regroup_backward


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def sources(dtype: torch.dtype = torch.float32, spec: RegroupSpec = SPEC) -> list[Tensor]:
    return [integers(BATCH, width, seed=place).to(dtype).requires_grad_() for place, width in enumerate(spec.source_widths)]


def in_torch(given: list[Tensor], spec: RegroupSpec = SPEC) -> list[Tensor]:
    columns = [each for source, widths in zip(given, spec.sources) for each in source.split(widths, 1)]
    return [torch.cat([columns[f] for f in group], 1) if group else given[0].new_empty(len(given[0]), 0) for group in spec.groups]


def filled(groups: Any) -> tuple[Tensor, ...]:
    """Those with columns: torch's checks of gradients take no others."""
    return tuple(group for group in groups if group.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_and_gradients_are_those_of_split_and_cat(dtype: torch.dtype) -> None:
    ours, theirs = sources(dtype), sources(dtype)
    got, want = regroup(ours, SPEC), in_torch(theirs)
    assert all(map(torch.equal, got, want)) and [out.dtype for out in got] == [dtype] * 3
    for groups in (got, want):
        (groups[0] * groups[0]).sum().backward(retain_graph=True)               # one group alone
        (groups[0].sum() * 3 + groups[1].square().sum()).backward()
    for mine, other in zip(ours[:2], theirs[:2]):
        assert mine.grad is not None and torch.equal(mine.grad, other.grad)
    assert torch.equal(ours[2].grad, torch.zeros(BATCH, 5))


def test_float32_runs_in_the_kernels_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    inner = exchange_compiled.CpuExchange._regroup
    monkeypatch.setattr(exchange_compiled.CpuExchange, "_regroup",
                        lambda self, spec, backward, *others: (seen.append(backward), inner(self, spec, backward, *others)))
    regroup(sources(), SPEC)[1].sum().backward()
    assert seen == [False, True]
    regroup(sources(torch.float64), SPEC)
    assert seen == [False, True]


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_gradients(dtype: torch.dtype) -> None:
    """float32 by differences of eighths of small integers, which are exact."""
    options = {"eps": 0.125, "atol": 0.0, "rtol": 0.0} if dtype == torch.float32 else {}
    given = [source.detach()[:2].requires_grad_() for source in sources(dtype)]
    assert torch.autograd.gradcheck(lambda *each: filled(regroup(each, SPEC)), given, **options)
    grads = [integers(2, width, seed=9).to(dtype).requires_grad_() for width in SPEC.group_widths if width]
    assert torch.autograd.gradgradcheck(lambda *each: filled(regroup(each, SPEC)), given, grads, **options)


def test_what_nobody_wants_is_not_computed() -> None:
    given = sources()
    given[0] = given[0].detach()
    first, second, _ = regroup(given, SPEC)
    (gradient,) = torch.autograd.grad(first.sum(), [given[1]])
    assert torch.equal(gradient, torch.ones(BATCH, 4)) and second.requires_grad
    assert not regroup([source.detach() for source in given], SPEC)[0].requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(first.sum(), [given[0]])


def test_rows_may_lie_apart_and_there_may_be_none() -> None:
    wide = integers(BATCH, 20)
    given = [wide[:, 3:8], integers(4, BATCH).T, wide[:, 8:13]]
    assert all(map(torch.equal, regroup(given, SPEC), in_torch(given)))
    assert [tuple(out.shape) for out in regroup([source[:0] for source in given], SPEC)] == [(0, 6), (0, 11), (0, 0)]


@pytest.mark.slow
def test_operators_are_registered_well() -> None:
    torch.library.opcheck(REGROUP, (sources(), *_flat(SPEC)))
    grads = [integers(BATCH, 6).requires_grad_(), integers(BATCH, 11)]
    torch.library.opcheck(BACKWARD, (grads, [True, True, False], [True, False, True], *_flat(SPEC)))


def test_it_is_one_node_of_a_compiled_graph() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(*each: Tensor) -> Tensor:
        groups = regroup([each[0] * 2, *each[1:]], SPEC)
        return groups[0].square().sum() + groups[1].sum()

    torch.compile(run, fullgraph=True, dynamic=True, backend=keep)(*sources())
    assert [node.target for node in graphs[0].graph.nodes if "sparselift" in str(node.target)] == [REGROUP.default]
    ours, theirs = sources(), sources()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for given, function in ((ours, compiled), (theirs, run)):
        function(*given).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs))
    assert torch.equal(compiled(*(source[:3] for source in ours)), run(*(source[:3] for source in ours)))


@pytest.mark.parametrize(("given", "error", "message"), [
    (lambda: (sources(), ((2,),)), TypeError, "spec must be a RegroupSpec; got tuple"),
    (lambda: (sources()[:2], SPEC), ValueError, r"sources must have one entry a source of the spec \(3\); got 2"),
    (lambda: ([], RegroupSpec((), ())), ValueError, "sources must hold at least one matrix"),
    (lambda: ([*sources()[:2], None], SPEC), TypeError, r"sources\[2\] must be a Tensor; got NoneType"),
    (lambda: ([*sources()[:2], torch.zeros(BATCH, 4)], SPEC), ValueError, r"sources\[2\] must have shape \(B, 5\), .*; got \(6, 4\)"),
    (lambda: ([*sources()[:2], torch.zeros(5, 5)], SPEC), ValueError, r"got \(5, 5\) beside \(6, 5\)"),
    (lambda: ([*sources()[:2], torch.zeros(BATCH, 5).double()], SPEC), DtypeError, "one dtype; got torch.float32 and torch.float64"),
    (lambda: ([*sources()[:2], torch.zeros(BATCH, 5, device="meta")], SPEC), TypeError, "one device; got cpu and meta")])
def test_what_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        regroup(*given())
