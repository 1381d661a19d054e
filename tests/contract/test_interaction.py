"""What every kernel of the dot interaction must do, run over the reference and each instruction set."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from sparselift.errors import KernelError
from sparselift.kernels import available_backends, get_backend
from sparselift.kernels.interaction import ORDERS, CudaInteraction, InteractionKernel, InteractionSpec, compile_interaction, interact
from tests.contract.conftest import emulates
from tests.contract.on_device import OnDevice

SHAPES = [(1, 1), (2, 1), (3, 3), (4, 16), (5, 17), (8, 4), (9, 64), (16, 15), (17, 130), (27, 64), (33, 8), (40, 1000), (96, 5)]


VARIANTS = [(order, diagonal, passed) for order in ORDERS for diagonal in (False, True) for passed in (None, 0, -1)]

Compile = Callable[[InteractionSpec], InteractionKernel]


@pytest.fixture
def compiled(request: pytest.FixtureRequest, backend_name: str) -> Compile:
    if emulates(backend_name):
        emulated = request.getfixturevalue("emulator").backend()
        return lambda spec: CudaInteraction(spec, emulated)
    if backend_name == "cuda":
        device = get_backend("cuda").device
        return lambda spec: OnDevice(compile_interaction(spec, backend_name), device)
    return lambda spec: compile_interaction(spec, backend_name)


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Small ones: their products and sums are exact in any order."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32))


def looped(vectors: Tensor, spec: InteractionSpec) -> Tensor:
    """The output by plain loops, in float64."""
    values = vectors.double().numpy()
    columns = [] if spec.passed is None else [values[:, spec.passed]]
    for i in range(spec.num_vectors):
        for j in range(spec.num_vectors):
            if (j < i if spec.order == "lower" else j > i) or (i == j and spec.diagonal):
                columns.append((values[:, i] * values[:, j]).sum(1, keepdims=True))
    return torch.from_numpy(np.concatenate(columns, axis=1)) if columns else torch.zeros(len(values), 0, dtype=torch.float64)


def run(kernel: InteractionKernel, vectors: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient, both written over what no product is."""
    joined = vectors.flatten(1)
    out, found = torch.full((len(vectors), kernel.spec.width), 7e7), torch.full(joined.shape, 7e7)
    kernel.forward([joined], out)
    kernel.backward([joined], grad, [found])
    return out, found.view(vectors.shape)


def double_gradient(vectors: Tensor, grad: Tensor, spec: InteractionSpec) -> Tensor:
    exact = vectors.double().requires_grad_()
    return torch.autograd.grad(interact(exact, spec), exact, grad.double())[0]


class TestInteraction:
    @pytest.mark.parametrize(("count", "dim"), SHAPES)
    def test_on_integers_it_is_exact(self, backend_name: str, compiled: Compile, count: int, dim: int) -> None:
        """In every order; the emulator, which takes its time, has two of the twelve for each shape."""
        first = SHAPES.index((count, dim))
        for order, diagonal, passed in VARIANTS[first % 6::6] if emulates(backend_name) else VARIANTS:
            spec = InteractionSpec(count, dim, order, diagonal, count - 1 if passed == -1 else passed)
            vectors, grad = integers((3, count, dim), 1), integers((3, spec.width), 2)
            out, found = run(compiled(spec), vectors, grad)
            assert torch.equal(out.double(), looped(vectors, spec)), spec
            assert torch.equal(found.double(), double_gradient(vectors, grad, spec)), spec

    @pytest.mark.parametrize(("count", "dim"), [(27, 64), (5, 17), (3, 300)])
    def test_real_values_are_within_the_rounding_bound(self, compiled: Compile, count: int, dim: int) -> None:
        spec = InteractionSpec(count, dim)
        generator = torch.Generator().manual_seed(0)
        vectors, grad = (torch.randn(shape, generator=generator) for shape in ((4, count, dim), (4, spec.width)))
        out, found = run(compiled(spec), vectors, grad)
        unit = 2.0 ** -24
        bound = (dim + 2) * unit * looped(vectors.abs(), spec)
        assert ((out.double() - looped(vectors, spec)).abs() <= bound).all()
        bound = (count + 3) * unit * double_gradient(vectors.abs(), grad.abs(), spec)
        assert ((found.double() - double_gradient(vectors, grad, spec)).abs() <= bound).all()

    def test_vectors_may_be_apart_and_their_rows_too(self, compiled: Compile) -> None:
        spec = InteractionSpec(4, 9, passed=2)
        vectors, grad = integers((6, 4, 9), 3), integers((6, spec.width), 4)
        kernel = compiled(spec)
        want_out, want = run(kernel, vectors, grad)
        apart = [torch.cat([vectors[:, v], torch.full((6, v), torch.nan)], 1)[:, :9] for v in range(4)]
        room = torch.full((6, spec.width + 3), 5.0)
        kernel.forward(apart, room[:, 1:-2])
        assert torch.equal(room[:, 1:-2], want_out) and (room[:, [0, -2, -1]] == 5).all()
        wide_grad = torch.cat([grad, torch.full((6, 5), torch.nan)], 1)[:, :spec.width]
        found = [torch.full((6, 11), 5.0) for _ in range(4)]
        kernel.backward(apart, wide_grad, [found[0][:, :9], None, found[2][:, 2:], found[3][:, 1:10]])
        pairs = [torch.full((6, 18), 5.0), None]
        kernel.backward([torch.cat(apart[:2], 1), torch.cat(apart[2:], 1)], grad, pairs)
        assert torch.equal(pairs[0].view(6, 2, 9), want[:, :2])
        for v, columns in ((0, slice(0, 9)), (2, slice(2, 11)), (3, slice(1, 10))):
            assert torch.equal(found[v][:, columns], want[:, v])
            found[v][:, columns] = 5
            assert (found[v] == 5).all()

    @pytest.mark.parametrize("batch", [0, 1, 2, 257])
    def test_any_batch_size_at_any_number_of_threads(self, backend_name: str, compiled: Compile, batch: int) -> None:
        spec, batch = InteractionSpec(27, 64), min(batch, 9) if emulates(backend_name) else batch
        vectors = torch.randn(batch, 27, 64, generator=torch.Generator().manual_seed(1))
        grad = torch.randn(batch, spec.width, generator=torch.Generator().manual_seed(2))
        kernel, threads, results = compiled(spec), torch.get_num_threads(), []
        try:
            for count in (1,) if emulates(backend_name) else (1, 2, 5):
                torch.set_num_threads(count)
                results.append(run(kernel, vectors, grad))
        finally:
            torch.set_num_threads(threads)
        if backend_name != "reference":             # torch's products differ with its threads
            assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
        assert results[0][0].shape == (batch, spec.width)

    def test_infinities_stay_with_the_products_that_have_them(self, compiled: Compile) -> None:
        spec = InteractionSpec(3, 4, diagonal=True)
        vectors = integers((2, 3, 4), 5)
        vectors[1, 2, 0] = torch.inf
        out = torch.empty(2, spec.width)
        compiled(spec).forward([vectors.view(2, 12)], out)
        assert torch.equal(out.double().nan_to_num(nan=1e9), looped(vectors, spec).nan_to_num(nan=1e9))

    def test_it_can_be_pickled(self, compiled: Compile) -> None:
        spec = InteractionSpec(3, 5, "upper", True, None)
        kernel = pickle.loads(pickle.dumps(compiled(spec)))
        vectors, grad = integers((2, 3, 5), 6), integers((2, spec.width), 7)
        assert kernel.spec == spec and torch.equal(run(kernel, vectors, grad)[0].double(), looped(vectors, spec))


@pytest.mark.parametrize(("change", "message"), [
    ({"num_vectors": 0}, "got 0 of 4"), ({"dim": 0}, "got 3 of 0"), ({"order": "both"}, "order must be one of .* got 'both'"),
    ({"passed": 3}, "one of the 3 vectors; got 3"), ({"passed": -1}, "one of the 3 vectors; got -1")])
def test_specs_are_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InteractionSpec(**{"num_vectors": 3, "dim": 4, **change})


@pytest.mark.skipif("cpu" not in available_backends(), reason="the CPU kernels are not built")
@pytest.mark.parametrize(("vectors", "out", "error", "message"), [
    ([torch.zeros(2, 11)], torch.zeros(2, 7), ValueError, r"vectors\[0\] must have 2 rows, and columns of vectors of 4; .* \(2, 11\)"),
    ([torch.zeros(2, 12)], torch.zeros(2, 8), ValueError, r"out must have shape \(2, 7\); got \(2, 8\)"),
    ([torch.zeros(2, 12)], torch.zeros(3, 7), ValueError, r"out must have shape \(2, 7\); got \(3, 7\)"),
    ([torch.zeros(2, 12)], torch.zeros(7), ValueError, r"out must have two dimensions; got shape \(7,\)"),
    ([torch.zeros(12, 2).T], torch.zeros(2, 7), ValueError, "last stride of 1"),
    ([torch.zeros(2, 12).double()], torch.zeros(2, 7), TypeError, r"float32 tensor on the CPU; got torch\.float64"),
    ([torch.zeros(2, 4)] * 2, torch.zeros(2, 7), ValueError, "must hold 3 vectors; got 2"),
    ([torch.zeros(2, 8)] * 2, torch.zeros(2, 7), ValueError, "must hold 3 vectors; got 4"),
    ([torch.zeros(2, 4), torch.zeros(1, 8)], torch.zeros(2, 7), ValueError, r"vectors\[1\] must have 2 rows"),
    (None, torch.zeros(2, 7), TypeError, "NoneType"), ([1, 2, 3], torch.zeros(2, 7), TypeError, r"vectors\[0\] must be a torch.Tensor")])
def test_wrong_tensors_are_named(vectors: object, out: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compile_interaction(InteractionSpec(3, 4)).forward(vectors, out)


def test_an_instruction_set_that_is_missing_is_named() -> None:
    with pytest.raises((ValueError, KernelError), match="sse"):
        compile_interaction(InteractionSpec(3, 4), "cpu-sse")
