"""The dot interaction of DLRM as one differentiable operation, in the kernels or in torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparselift.errors import KernelError
from sparselift.kernels import get_backend
from sparselift.kernels.base import KernelBackend
from sparselift.kernels.interaction import InteractionSpec, apart, compile_interaction, interact, interact_backward, stacked
from sparselift.ops import nobody_watches

IDLE_BYTES = 64 << 20              # that one shape of interaction keeps in buffers that came back


def dot_interaction(dense: Tensor, lookups: Tensor | Sequence[Tensor], order: str = "lower", diagonal: bool = False) -> Tensor:
    """The dense vector of every sample, and the dot products of all pairs among it and the lookups. What
    `torch.cat([dense, torch.bmm(v, v.transpose(1, 2))[:, i, j]], 1)` gives for `v = torch.stack([dense, *lookups], 1)`, in one call.

    Parameters
    ----------
    dense     (B, D); vector 0
    lookups   T vectors (B, D), or all of them side by side, (B, T * D)
    order     the pairs row by row, "lower": below the diagonal of the (T + 1, T + 1) products; "upper": above it
    diagonal  whether the product of a vector with itself is among them

    Returns
    -------
    (B, D + P), P = T * (T + 1) / 2, and T + 1 more with the diagonal. Sums are in float32; their order is not torch's

    Raises
    ------
    ValueError   for another order, or shapes that do not fit
    TypeError    for anything but tensors
    """
    vectors = _checked(dense, lookups)
    count = sum(vector.shape[1] for vector in vectors) // dense.shape[1]
    spec = InteractionSpec(count, dense.shape[1], order, diagonal)
    if is_compiling() or not all(map(is_plain, vectors)) or is_lowered() or not nobody_watches() or (found := _interactor(spec)) is None:
        return interact(stacked(vectors, spec), spec)
    return found(*vectors)


def _checked(dense: Any, lookups: Any) -> list[Tensor]:
    vectors = [dense, lookups] if isinstance(lookups, Tensor) else [dense, *lookups]
    for vector in vectors:
        if not isinstance(vector, Tensor):
            raise TypeError(f"dense and lookups must be tensors; got {type(vector).__name__}")
    shapes = [tuple(vector.shape) for vector in vectors]
    dim = dense.shape[1] if dense.dim() == 2 else 0
    fit = all(len(shape) == 2 and shape[0] == shapes[0][0] and (shape[1] % dim == 0 if isinstance(lookups, Tensor) else shape[1] == dim)
              for shape in shapes) if dim else False
    if not fit:
        raise ValueError(f"dense must be (B, D) with columns, and lookups (B, T * D) or T times (B, D); got {shapes[0]} and "
                         f"{shapes[1] if isinstance(lookups, Tensor) else shapes[1:]}")
    return vectors


def is_plain(tensor: Tensor) -> bool:
    """Whether kernels can read a tensor's values where they are."""
    return (tensor.dtype == torch.float32 and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg()
            and type(tensor) in (Tensor, torch.nn.Parameter))


def is_lowered() -> bool:
    """Whether autocast would multiply in a smaller dtype."""
    return torch.is_autocast_enabled("cpu")


@lru_cache(maxsize=16)
def _interactor(spec: InteractionSpec) -> Interactor | None:
    try:
        return Interactor(spec)
    except KernelError:            # not built: torch's operations are as right
        return None


class Interactor:
    """A compiled interaction as a differentiable function. Any thread may call it.

    Raises KernelError for a backend that is not built.
    """

    def __init__(self, spec: InteractionSpec, backend: str | KernelBackend = "cpu") -> None:
        self.spec, self.backend = spec, backend
        self.kernel = compile_interaction(spec, backend)
        self.outputs = get_backend(backend).outputs(IDLE_BYTES)

    def __reduce__(self) -> tuple[type[Interactor], tuple[InteractionSpec, str | KernelBackend]]:
        return Interactor, (self.spec, self.backend)

    def __call__(self, *vectors: Tensor) -> Tensor:
        """(B, width) of plain tensors with one or more vectors side by side, V in all."""
        given = [vector if vector.stride(1) == 1 else vector.contiguous() for vector in vectors]
        return _Interact.apply(self, *given)

    def run(self, vectors: Sequence[Tensor]) -> Tensor:
        """The values alone."""
        out = self.outputs.take((len(vectors[0]), self.spec.width))
        self.kernel.forward(vectors, out)
        return out

    def differentiate(self, vectors: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the wanted vectors."""
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        found = [self.outputs.take(tuple(vector.shape)) if want else None for vector, want in zip(vectors, wanted)]
        self.kernel.backward(vectors, grad, found)
        return found


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, interactor: Interactor, *vectors: Tensor) -> Tensor:
        ctx.interactor = interactor
        ctx.save_for_backward(*vectors)
        return interactor.run(vectors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        vectors, interactor, wanted = ctx.saved_tensors, ctx.interactor, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():                 # to be differentiated again
            found = interact_backward(stacked(vectors, interactor.spec), grad, interactor.spec)
            return None, *apart(found, vectors)
        return None, *interactor.differentiate(vectors, grad, wanted)

