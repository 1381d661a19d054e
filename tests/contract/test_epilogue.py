"""What every kernel around a linear layer's products must do, run over the reference and each instruction set."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from sparselift.kernels import available_backends
from sparselift.kernels.epilogue import CpuEpilogue, Epilogue, ReferenceEpilogue, get_epilogue
from tests.contract.conftest import CPU_BACKENDS

SHAPES = [(0, 5), (1, 1), (3, 7), (64, 16), (65, 17), (130, 100), (7, 0), (2000, 3)]


@pytest.fixture(params=["cpu", *CPU_BACKENDS])
def epilogue(request: pytest.FixtureRequest) -> Epilogue:
    if request.param not in available_backends():
        pytest.skip(f"{request.param}: not built, or its instruction set is missing here")
    return get_epilogue(request.param)


def apart(rows: int, columns: int, seed: int) -> Tensor:
    """A matrix in a wider one, with a NaN, both zeros and infinities."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, columns + 3, generator=generator)
    part = whole[:, 1:columns + 1]
    flat = torch.tensor([float("nan"), 0.0, -0.0, float("inf"), float("-inf")])
    if part.numel() > 9:
        part[0, :1], part[1 % rows, :1], part[-1, -1:] = flat[0], flat[4], flat[3]
        part[rows // 2, columns // 2] = 0.0
    return part


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bias_and_relu(epilogue: Epilogue, shape: tuple[int, int], relu: bool, with_bias: bool) -> None:
    out = apart(*shape, seed=0)
    bias = torch.linspace(-1, 1, shape[1]) if with_bias else None
    want = out + bias if bias is not None else out.clone()
    want = want.relu() if relu else want
    around, version = out._base.clone(), out._version
    epilogue.finish(out, bias, relu)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
    assert out._version > version or not (relu or with_bias)
    for column in (0, -1, -2):                                      # what lies beside it
        torch.testing.assert_close(out._base[:, column], around[:, column], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("needs_bias", [False, True])
def test_gradients(epilogue: Epilogue, shape: tuple[int, int], relu: bool, needs_bias: bool) -> None:
    grad, out = torch.randn(shape[0], shape[1] + 2)[:, :shape[1]], apart(*shape, seed=1).relu()
    masked, bias_grad = epilogue.begin(grad, out if relu else None, needs_bias)
    want = torch.ops.aten.threshold_backward(grad, out, 0) if relu else grad
    assert torch.equal(masked, want)
    assert masked is grad or relu
    assert (bias_grad is not None) == needs_bias
    if bias_grad is not None:
        exact, bound = want.double().sum(0), want.double().abs().sum(0)
        assert bias_grad.shape == exact.shape and ((bias_grad - exact).abs() <= 1e-6 * bound).all()


def test_a_gradient_of_one_row_for_all_is_read_as_it_is(epilogue: Epilogue) -> None:
    grad, out = torch.randn(1, 9).expand(5, 9), torch.randn(5, 9)
    masked, bias_grad = epilogue.begin(grad, out, True)
    assert torch.equal(masked, torch.where(out > 0, grad, 0.0))
    assert bias_grad is not None
    torch.testing.assert_close(bias_grad, masked.sum(0))


def test_sums_are_the_same_at_any_number_of_threads(epilogue: Epilogue) -> None:
    grad, out = torch.randn(3000, 130), torch.randn(3000, 130)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(epilogue.begin(grad, out, True))
    finally:
        torch.set_num_threads(before)
    if isinstance(epilogue, CpuEpilogue):
        assert all(torch.equal(mine, first) for each in found[1:] for mine, first in zip(each, found[0]))
    assert all(torch.equal(each[0], found[0][0]) for each in found)


@pytest.mark.parametrize(("out", "bias", "error", "match"), [
    (torch.zeros(2, 3, dtype=torch.float64), None, TypeError, "out must be float32; got float64"),
    (torch.zeros(6), None, ValueError, r"out must have two dimensions; got shape \(6,\)"),
    (torch.zeros(3, 2).t(), None, ValueError, r"out must have a last stride of 1; got strides \(1, 2\)"),
    (torch.zeros(2, 3), torch.zeros(2), ValueError, r"bias must be contiguous and have shape \(3,\); got \(2,\)"),
    (torch.zeros(2, 3), torch.zeros(6)[::2], ValueError, r"bias must be contiguous .* strides \(2,\)"),
    (torch.zeros(2, 3), torch.zeros(3, dtype=torch.float16), TypeError, "bias must be float32"),
    ([[1.0]], None, TypeError, "out must be a tensor; got list")])
def test_what_does_not_fit_is_named(out: Tensor, bias: Tensor | None, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        CpuEpilogue().finish(out, bias, True)


def test_another_shape_of_the_output_is_named() -> None:
    with pytest.raises(ValueError, match=r"out must have the shape of grad, \(2, 3\); got \(3, 3\)"):
        CpuEpilogue().begin(torch.zeros(2, 3), torch.zeros(3, 3), True)


def test_pickles_keep_the_instruction_set() -> None:
    copy = pickle.loads(pickle.dumps(CpuEpilogue("portable")))
    assert copy.isa == "portable"
    assert isinstance(get_epilogue("reference"), ReferenceEpilogue)
