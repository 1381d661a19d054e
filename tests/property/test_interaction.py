"""The interaction's kernels on whatever Hypothesis thinks of, and laws that need no reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparselift.kernels import available_backends
from sparselift.kernels.interaction import InteractionSpec, compile_interaction

BACKENDS = [name for name in available_backends() if name.startswith("cpu-")]
pytestmark = pytest.mark.skipif(not BACKENDS, reason="the CPU kernels are not built")


@st.composite
def specs(draw: st.DrawFn) -> InteractionSpec:
    count = draw(st.integers(1, 40))
    return InteractionSpec(count, draw(st.sampled_from([1, 2, 3, 7, 16, 31, 64, 65, 129])), draw(st.sampled_from(["lower", "upper"])),
                           draw(st.booleans()), draw(st.none() | st.integers(0, count - 1)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[InteractionSpec, str, Tensor, Tensor]:
    """Small integers, so that every sum is exact."""
    spec, batch = draw(specs()), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    widths = spec.num_vectors * spec.dim, spec.width
    vectors, grad = (torch.randint(-4, 5, (batch, width), generator=generator).float() for width in widths)
    return spec, draw(st.sampled_from(BACKENDS)), vectors, grad


def run(spec: InteractionSpec, backend: str, vectors: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    kernel = compile_interaction(spec, backend)
    out, found = torch.full((len(vectors), spec.width), torch.nan), torch.full(vectors.shape, torch.nan)
    kernel.forward([vectors], out)
    kernel.backward([vectors], grad, [found])
    return out, found


@settings(max_examples=120, deadline=None)
@given(cases())
def test_the_kernels_are_the_reference(case: tuple[InteractionSpec, str, Tensor, Tensor]) -> None:
    spec, backend, vectors, grad = case
    for got, want in zip(run(spec, backend, vectors, grad), run(spec, "reference", vectors, grad)):
        assert torch.equal(got, want)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_products_are_of_second_degree(case: tuple[InteractionSpec, str, Tensor, Tensor]) -> None:
    """By Euler: <gradient, vectors> is twice what products add to <output, grad>, and once what the vector that is passed on adds."""
    spec, backend, vectors, grad = case
    out, found = run(spec, backend, vectors, grad)
    parts = (out * grad).double()
    start = 0 if spec.passed is None else spec.dim
    assert (found * vectors).double().sum() == 2 * parts[:, start:].sum() + parts[:, :start].sum()


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms())
def test_samples_are_alone(case: tuple[InteractionSpec, str, Tensor, Tensor], random: object) -> None:
    spec, backend, vectors, grad = case
    order = list(range(len(vectors)))
    random.shuffle(order)                                                        # type: ignore[attr-defined]
    for got, want in zip(run(spec, backend, vectors[order], grad[order]), run(spec, backend, vectors, grad)):
        assert torch.equal(got, want[order])


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_orders_are_one_triangle(case: tuple[InteractionSpec, str, Tensor, Tensor]) -> None:
    spec, backend, vectors, _ = case
    squares = []
    for order in ("lower", "upper"):
        each = InteractionSpec(spec.num_vectors, spec.dim, order, spec.diagonal, None)
        out = torch.empty(len(vectors), each.width)
        compile_interaction(each, backend).forward([vectors], out)
        square = torch.zeros(len(vectors), spec.num_vectors, spec.num_vectors)
        square[:, each.pairs()[0], each.pairs()[1]] = out
        squares.append(square)
    assert torch.equal(squares[0], squares[1].transpose(1, 2))
