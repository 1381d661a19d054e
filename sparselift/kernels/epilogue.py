"""What a linear layer does around its matrix products: bias and ReLU after the first, their gradients before the others.

torch runs them as calls of their own: the bias is copied into the output before the product, the ReLU reads it and writes another one, and
its gradient and the bias's read the gradient twice. Here each direction is one pass. Letters in shapes: B rows, O columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparselift.errors import KernelError

from .checks import check_kind
from .cpu import ISAS, CpuBackend

_NO_MATRIX = (0, 0)


class Epilogue(ABC):
    """Any thread may call it; it keeps nothing of its arguments. Matrices are float32 with a last stride of 1."""

    @abstractmethod
    def finish(self, out: Tensor, bias: Tensor | None, relu: bool) -> None:
        """Add `bias` (O,) to every row of `out` (B, O), then take its ReLU, in place. A NaN stays one.

        Raises TypeError and ValueError for tensors that are not as said.
        """

    @abstractmethod
    def begin(self, grad: Tensor, out: Tensor | None, needs_bias: bool) -> tuple[Tensor, Tensor | None]:
        """Gradients before bias and ReLU: (B, O), and (O,) of the bias if that is needed.

        `out` is what the ReLU gave, None where there was none; then the first is `grad` itself. Raises as `finish`.
        """


class ReferenceEpilogue(Epilogue):
    """In plain torch."""

    def finish(self, out: Tensor, bias: Tensor | None, relu: bool) -> None:
        if bias is not None:
            out += bias
        if relu:
            out.relu_()

    def begin(self, grad: Tensor, out: Tensor | None, needs_bias: bool) -> tuple[Tensor, Tensor | None]:
        masked = grad if out is None else torch.ops.aten.threshold_backward(grad, out, 0)
        return masked, masked.sum(0) if needs_bias else None


class CpuEpilogue(Epilogue):
    """Compiled. The bias's gradient is the same at any number of threads.

    Parameters
    ----------
    isa   as of CpuBackend, and raises as that does
    """

    def __init__(self, isa: str | None = None) -> None:
        self.isa = CpuBackend(isa).isa
        self._number = ISAS.index(self.isa)
        try:
            self._raw = import_module("sparselift.kernels._epilogue")
        except ImportError as error:
            raise KernelError(f"the compiled extension sparselift.kernels._epilogue is missing ({error}); "
                              "build it with: pip install -e . --no-build-isolation") from error

    def __reduce__(self) -> tuple[type[CpuEpilogue], tuple[str]]:
        return CpuEpilogue, (self.isa,)

    def finish(self, out: Tensor, bias: Tensor | None, relu: bool) -> None:
        rows, columns = _shape("out", out)
        if bias is not None:
            check_kind("bias", bias, (torch.float32,))
            if bias.shape != (columns,) or not bias.is_contiguous():
                raise ValueError(f"bias must be contiguous and have shape ({columns},); got {tuple(bias.shape)}, strides {bias.stride()}")
        self._raw.forward(_matrix(out), rows, columns, 0 if bias is None else bias.data_ptr(), relu, self._number, torch.get_num_threads())
        increment_version(out)

    def begin(self, grad: Tensor, out: Tensor | None, needs_bias: bool) -> tuple[Tensor, Tensor | None]:
        rows, columns = _shape("grad", grad)
        masked = grad
        if out is not None:
            if _shape("out", out) != (rows, columns):
                raise ValueError(f"out must have the shape of grad, ({rows}, {columns}); got {tuple(out.shape)}")
            masked = grad.new_empty(rows, columns)
        sums = grad.new_empty(max(-(-rows // self._raw.CHUNK_ROWS), 1), columns) if needs_bias else None
        if out is not None or sums is not None:
            self._raw.backward(_matrix(grad), _NO_MATRIX if out is None else _matrix(out), _NO_MATRIX if out is None else _matrix(masked),
                               0 if sums is None else sums.data_ptr(), rows, columns, self._number, torch.get_num_threads())
        return masked, None if sums is None else sums[0].clone()


def _matrix(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.stride(0)


def _shape(what: str, tensor: Tensor) -> tuple[int, int]:
    """(B, O) of a float32 matrix on the CPU whose last stride is 1."""
    check_kind(what, tensor, (torch.float32,))
    if tensor.dim() != 2:
        raise ValueError(f"{what} must have two dimensions; got shape {tuple(tensor.shape)}")
    if tensor.shape[1] > 1 and len(tensor) and tensor.stride(1) != 1:
        raise ValueError(f"{what} must have a last stride of 1; got strides {tensor.stride()}")
    return tensor.shape[0], tensor.shape[1]


def get_epilogue(backend: str = "cpu") -> Epilogue:
    """By the names of `kernels.get_backend`, but for "cuda". Raises as that does."""
    return ReferenceEpilogue() if backend == "reference" else CpuEpilogue(backend.partition("-")[2] or None)
