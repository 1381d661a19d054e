"""The interaction layer of DLRM."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from sparselift.functional.interaction import dot_interaction
from sparselift.kernels.interaction import ORDERS


class DotInteraction(nn.Module):
    """The dense vector of every sample beside the dot products of all pairs among it and the lookups: DLRM's `interact_features`.

    Float32 on the CPU runs in one kernel call, forward and backward; anything else in torch's operations.

    Parameters
    ----------
    order     the pairs row by row: "lower", below the diagonal (facebookresearch/dlrm); "upper", above it (TorchRec, this package's DLRM)
    diagonal  whether a vector's product with itself is among them (`arch_interaction_itself`)

    Raises ValueError for another order.
    """

    def __init__(self, order: str = "lower", diagonal: bool = False) -> None:
        super().__init__()
        if order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}; got {order!r}")
        self.order, self.diagonal = order, diagonal

    def forward(self, dense: Tensor, lookups: Tensor | Sequence[Tensor]) -> Tensor:
        """(B, D + P) of dense (B, D) and T lookups (B, D) or (B, T * D); raises as `sparselift.functional.dot_interaction`."""
        return dot_interaction(dense, lookups, self.order, self.diagonal)

    def extra_repr(self) -> str:
        return f"order={self.order!r}, diagonal={self.diagonal}"
