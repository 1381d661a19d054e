"""The dot interaction: dot products of pairs of vectors, sample by sample. What it is, in plain torch, and compiled.

Letters in shapes: B samples, V vectors of a sample, D columns of a vector, P pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from sparselift.errors import KernelError

from . import get_backend
from .base import KernelBackend
from .checks import check_kind
from .cpu import CpuBackend
from .cuda import CudaBackend

ORDERS = ("lower", "upper")


@dataclass(frozen=True, slots=True)
class InteractionSpec:
    """Which products, and in which order.

    Attributes
    ----------
    num_vectors  V, at least 1
    dim          D, at least 1
    order        the pairs (i, j) row by row: "lower", below the diagonal of the (V, V) products, j < i; "upper", above it, j > i
    diagonal     whether a vector's product with itself is among them
    passed       a vector that is the first D columns of the output, before the P products; None: there is none

    Raises ValueError for anything else.
    """

    num_vectors: int
    dim: int
    order: str = "lower"
    diagonal: bool = False
    passed: int | None = 0

    def __post_init__(self) -> None:
        if self.num_vectors < 1 or self.dim < 1:
            raise ValueError(f"an interaction needs vectors with columns; got {self.num_vectors} of {self.dim}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}; got {self.order!r}")
        if self.passed is not None and not 0 <= self.passed < self.num_vectors:
            raise ValueError(f"passed must be None or one of the {self.num_vectors} vectors; got {self.passed}")

    @property
    def num_pairs(self) -> int:
        """P."""
        return self.num_vectors * (self.num_vectors - 1) // 2 + self.diagonal * self.num_vectors

    @property
    def width(self) -> int:
        """Columns of the output: P, and D where a vector is passed on."""
        return self.num_pairs + (0 if self.passed is None else self.dim)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(i, first j, number of j) of every row that has pairs."""
        for row in range(self.num_vectors):
            first = 0 if self.order == "lower" else row + (not self.diagonal)
            last = row + self.diagonal if self.order == "lower" else self.num_vectors
            if first < last:
                yield row, first, last - first

    def pairs(self) -> Tensor:
        """(2, P) int64: i and j of every pair."""
        count, shift = self.num_vectors, 0 if self.diagonal else 1
        if self.order == "lower":
            return torch.tril_indices(count, count, -shift, device="cpu")
        return torch.triu_indices(count, count, shift, device="cpu")


class InteractionKernel(ABC):
    """An interaction ready to run. Any thread may call it; it keeps nothing of its arguments."""

    spec: InteractionSpec

    @abstractmethod
    def forward(self, vectors: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` (B, width) from float32 matrices that hold one or more vectors side by side, (B, n * D), V in all.

        Rows may lie apart; the last stride must be 1. Raises TypeError and ValueError for tensors that are not as said.
        """

    @abstractmethod
    def backward(self, vectors: Sequence[Tensor], grad: Tensor, vector_grads: Sequence[Tensor | None]) -> None:
        """Fill gradients of the shapes of `vectors` from that of the output, `grad` (B, width). None: not wanted. Raises as `forward`."""


def interact(vectors: Tensor, spec: InteractionSpec) -> Tensor:
    """The definition, differentiable: (B, width) of (B, V, D), of any dtype."""
    rows, columns = spec.pairs().to(vectors.device)
    products = torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]
    return products if spec.passed is None else torch.cat([vectors[:, spec.passed], products], dim=1)


def interact_backward(vectors: Tensor, grad: Tensor, spec: InteractionSpec) -> Tensor:
    """The gradient (B, V, D) of `interact` from that of its output (B, width), itself differentiable."""
    rows, columns = spec.pairs().to(vectors.device)
    start = 0 if spec.passed is None else spec.dim
    square = grad.new_zeros(len(vectors), spec.num_vectors, spec.num_vectors).index_put(
        (torch.arange(len(vectors), device=grad.device)[:, None], rows, columns), grad[:, start:])
    found = torch.bmm(square + square.transpose(1, 2), vectors)
    if spec.passed is None:
        return found
    return torch.stack([each + grad[:, :start] if place == spec.passed else each for place, each in enumerate(found.unbind(1))], dim=1)


def stacked(vectors: Sequence[Tensor], spec: InteractionSpec) -> Tensor:
    """(B, V, D) of matrices that hold vectors side by side."""
    joined = torch.cat(tuple(vectors), dim=1)
    return joined.view(len(joined), spec.num_vectors, spec.dim)


def apart(found: Tensor, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(B, V, D) as matrices of the shapes of `vectors`: the inverse of `stacked`."""
    return found.flatten(1).split([vector.shape[1] for vector in vectors], 1)


class ReferenceInteraction(InteractionKernel):
    """In plain torch."""

    def __init__(self, spec: InteractionSpec) -> None:
        self.spec = spec

    def forward(self, vectors: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(interact(stacked(vectors, self.spec), self.spec))

    def backward(self, vectors: Sequence[Tensor], grad: Tensor, vector_grads: Sequence[Tensor | None]) -> None:
        found = interact_backward(stacked(vectors, self.spec), grad, self.spec)
        for into, each in zip(vector_grads, apart(found, vectors)):
            if into is not None:
                into.copy_(each)


class CudaInteraction(InteractionKernel):
    """On a CUDA device, on the stream of its backend. Fused multiply-adds: columns ascending in products, vectors in gradients."""

    def __init__(self, spec: InteractionSpec, backend: CudaBackend) -> None:
        self.spec, self.backend = spec, backend
        column, runs = 0 if spec.passed is None else spec.dim, []
        for row, first, count in spec.runs():
            runs.append((row, first, count, column))
            column += count
        self._raw = backend.extension.Interaction(spec.num_vectors, spec.dim, -1 if spec.passed is None else spec.passed, runs)

    def __reduce__(self) -> tuple[type[CudaInteraction], tuple[InteractionSpec, CudaBackend]]:
        return CudaInteraction, (self.spec, self.backend)

    def forward(self, vectors: Sequence[Tensor], out: Tensor) -> None:
        self._run(vectors, "out", out, None)

    def backward(self, vectors: Sequence[Tensor], grad: Tensor, vector_grads: Sequence[Tensor | None]) -> None:
        self._run(vectors, "grad", grad, vector_grads)

    def _run(self, vectors: Sequence[Tensor], what: str, output: Tensor, vector_grads: Sequence[Tensor | None] | None) -> None:
        self._check_matrix(what, output)
        batch = len(output)
        if output.shape[1] != self.spec.width:
            raise ValueError(f"{what} must have shape ({batch}, {self.spec.width}); got {tuple(output.shape)}")
        read = self._read("vectors", vectors, vectors, batch)
        grads = None if vector_grads is None else self._read("vector_grads", vector_grads, vectors, batch)
        with self.backend.current_device():
            space = self.backend.memory.empty((self._raw.workspace_bytes(),), torch.uint8, self.backend.current_stream())
            self._raw.run(batch, read, (output.data_ptr(), output.stride(0)), grads, space.data_ptr(), space.nbytes,
                          self.backend.current_stream())

    def _check_matrix(self, what: str, tensor: Tensor) -> None:
        check_kind(what, tensor, (torch.float32,), device=self.backend.device)
        if tensor.dim() != 2:
            raise ValueError(f"{what} must have two dimensions; got shape {tuple(tensor.shape)}")
        if tensor.shape[1] > 1 and len(tensor) and tensor.stride(1) != 1:
            raise ValueError(f"{what} must have a last stride of 1; got strides {tensor.stride()}")

    def _read(self, what: str, given: Sequence[Tensor | None], vectors: Sequence[Tensor], batch: int) -> list[tuple[int, int] | None]:
        """(address, row stride) of each of the V vectors; None where a gradient is not wanted."""
        read: list[tuple[int, int] | None] = []
        for place, (tensor, vector) in enumerate(zip(given, vectors, strict=True)):
            name = f"{what}[{place}]"
            self._check_matrix(f"vectors[{place}]", vector)
            count = vector.shape[1] // self.spec.dim
            if tensor is None:
                read += [None] * count
                continue
            self._check_matrix(name, tensor)
            if len(tensor) != batch or tensor.shape[1] % self.spec.dim or tensor.shape != vector.shape:
                raise ValueError(f"{name} must have {batch} rows, and columns of vectors of {self.spec.dim}; "
                                 f"got shape {tuple(tensor.shape)}")
            read += [(tensor.data_ptr() + 4 * self.spec.dim * v, tensor.stride(0)) for v in range(count)]
        if len(read) != self.spec.num_vectors:
            raise ValueError(f"{what} must hold {self.spec.num_vectors} vectors; got {len(read)}")
        return read


def compile_interaction(spec: InteractionSpec, backend: str | KernelBackend = "cpu") -> InteractionKernel:
    """The kernel of a backend, which `kernels.get_backend` gives. Raises as that does."""
    kernels = get_backend(backend)
    if isinstance(kernels, CudaBackend):
        return CudaInteraction(spec, kernels)
    if not isinstance(kernels, CpuBackend):
        return ReferenceInteraction(spec)
    try:
        extension = import_module("sparselift.kernels._interaction")
    except ImportError as error:
        raise KernelError(f"the compiled extension sparselift.kernels._interaction is missing ({error}); "
                          "build it with: pip install -e . --no-build-isolation") from error
    InteractionKernel.register(extension.Interaction)
    return extension.Interaction(spec, kernels.isa)
