from collections.abc import Sequence

from torch import Tensor

from sparselift.kernels.interaction import InteractionKernel, InteractionSpec

class Interaction(InteractionKernel):
    isa: str
    def __init__(self, spec: InteractionSpec, isa: str) -> None: ...
    def forward(self, vectors: Sequence[Tensor], out: Tensor) -> None: ...
    def backward(self, vectors: Sequence[Tensor], grad: Tensor, vector_grads: Sequence[Tensor | None]) -> None: ...
