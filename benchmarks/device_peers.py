"""FBGEMM's and TorchRec's embedding bags on a device, in the shape that `peer_sides` takes: of both, what runs their fused kernels.

Where the device is the processor, for a try without a GPU, FBGEMM's kernels for it run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cases import EPS, LR
from torch import Tensor

OPTIMIZERS = {"sgd": "EXACT_SGD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}


@dataclass
class SharedWeights:
    """The tables that a peer starts from. It puts its own there, which have the same values."""

    flat: Tensor
    matrix: Tensor
    tables: list[Tensor]


class FusedUpdate:
    """A peer that updates its tables in backward."""

    module: Any

    def backward(self, output: Tensor, grad: Tensor) -> None:
        output.backward(grad)

    def step(self) -> None:
        pass


class FbgemmPeer(FusedUpdate):
    """FBGEMM's table-batched embedding with the fused optimizer, bounds check off: its fastest setting."""

    def __init__(self, shape: Any, weights: SharedWeights, optimizer: str) -> None:
        import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation

        if optimizer not in OPTIMIZERS:
            raise NotImplementedError(f"no {optimizer} of FBGEMM is timed on devices")
        on_device = weights.matrix.is_cuda
        place = ((EmbeddingLocation.DEVICE, tbe.ComputeDevice.CUDA) if on_device else (EmbeddingLocation.HOST, tbe.ComputeDevice.CPU))
        self.module = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, shape.dim, *place) for rows in shape.rows], optimizer=EmbOptimType[OPTIMIZERS[optimizer]], learning_rate=LR, eps=EPS,
            bounds_check_mode=BoundsCheckMode.NONE, device=weights.matrix.device)
        _take(weights, self.module.split_embedding_weights())

    def forward(self, batch: Any) -> Tensor:
        return self.module(batch.indices, batch.offsets)


class TorchRecPeer(FusedUpdate):
    """TorchRec's EmbeddingBagCollection with the optimizer fused, on one device: no sharding, no exchange."""

    def __init__(self, shape: Any, weights: SharedWeights, optimizer: str) -> None:
        import torchrec
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        if optimizer not in OPTIMIZERS:
            raise NotImplementedError(f"no {optimizer} of TorchRec is timed on devices")
        kind, options = (torch.optim.SGD, {"lr": LR}) if optimizer == "sgd" else (RowWiseAdagrad, {"lr": LR, "eps": EPS})
        self.keys, self._jagged = [f"f{t}" for t in range(shape.num_tables)], torchrec.KeyedJaggedTensor
        self.module = FusedEmbeddingBagCollection(
            tables=[torchrec.EmbeddingBagConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=shape.dim, feature_names=[key])
                    for t, (rows, key) in enumerate(zip(shape.rows, self.keys))],
            optimizer_type=kind, optimizer_kwargs=options, device=weights.matrix.device)
        state = self.module.state_dict()
        _take(weights, [state[f"embedding_bags.t{t}.weight"] for t in range(shape.num_tables)])

    def forward(self, batch: Any) -> Tensor:
        return self.module(self._jagged(self.keys, batch.indices, offsets=batch.offsets)).values()


@torch.no_grad()
def _take(weights: SharedWeights, own: list[Tensor]) -> None:
    """The peer's own tables in the place of those that it starts from."""
    for table, given in zip(own, weights.tables, strict=True):
        table.copy_(given)
    weights.tables[:] = [table.detach() for table in own]
