"""Full DLRM steps on a device: W6. Torch's model, and the same dense part around the kernels of the lookups and of the dot interaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cases import LR, CheckFailed, Side
from gpu_cases import DeviceBatch, DeviceCase, DeviceShape, Kernels, TorchTimed
from gpu_exchange import Operation, always
from torch import Tensor, nn

from sparselift.kernels.base import IndexBatch, Segment
from sparselift.kernels.cuda import CudaBackend
from sparselift.kernels.interaction import CudaInteraction, InteractionSpec, interact, interact_backward, stacked
from sparselift.models import DLRM

NUM_DENSE = 13
TOLERANCE = 1e-4                   # of the largest value: torch's products are summed in an order of their own


def spec_of(shape: DeviceShape) -> InteractionSpec:
    """Its products in the order of the model's."""
    return InteractionSpec(shape.num_tables + 1, shape.dim, "upper")


@dataclass(frozen=True, slots=True)
class DlrmBatch(DeviceBatch):
    """With what the dense part reads."""

    dense: Tensor                  # (B, NUM_DENSE)
    labels: Tensor                 # (B, 1), 0 or 1


class DlrmCase(DeviceCase):
    """A shape with one optimizer for its tables, in a full step; SGD on the dense part."""

    def __init__(self, shape: DeviceShape, optimizer: str, seed: int, device: torch.device) -> None:
        super().__init__(shape, optimizer, seed, device)
        self.spec = spec_of(shape)

    def _batch(self, rng: np.random.Generator, generator: torch.Generator) -> DlrmBatch:
        lookups = super()._batch(rng, generator)
        size = self.shape.batch_size
        dense = torch.rand(size, NUM_DENSE, generator=generator, device=self.device)
        labels = torch.randint(2, (size, 1), generator=generator, device=self.device).float()
        return DlrmBatch(lookups.table_indices, lookups.table_offsets, lookups.indices, lookups.offsets, lookups.row_ids, dense, labels)

    def side(self, planned: bool = False) -> Side:
        """The dense part is made on the host, the tables on the device."""
        model = DLRM((1,) * self.shape.num_tables, self.shape.dim, generator=torch.Generator().manual_seed(self.seed)).to(self.device)
        model.emb_l = super().side().model.emb_l
        dense = [*model.bot_l.parameters(), *model.top_l.parameters()]
        return Side(self, model, [self._table_optimizer([bag.weight for bag in model.emb_l], planned=True), torch.optim.SGD(dense, lr=LR)])

    @property
    def interaction_bytes(self) -> int:
        """What its forward reads and writes; its backward writes the vectors' gradients, too."""
        return 4 * self.shape.batch_size * (self.spec.num_vectors * self.spec.dim + self.spec.width)

    def forward_bytes(self) -> int:
        return super().forward_bytes() + self.interaction_bytes

    def update_bytes(self) -> int:
        return super().update_bytes() + self.interaction_bytes + 4 * self.shape.batch_size * self.spec.num_vectors * self.spec.dim


class DlrmTorch(TorchTimed):
    """Torch's model: a lookup a table, a concatenation, a batched matrix product."""

    def begin(self, number: int) -> Tensor:
        return self.trainer.loss(self.trainer.model, self.trainer.case.batches[number])

    def finish(self, given: Tensor) -> None:
        given.backward()
        self.apply()


@dataclass(frozen=True, slots=True)
class DlrmForward:
    """What backward goes on from."""

    lookups: IndexBatch
    dense: Tensor                  # (B, D), of the bottom MLP
    crossed: Tensor                # (B, width of the interaction), a leaf
    loss: Tensor


class DlrmKernels(Kernels):
    """One program of all tables, whose pooled rows the interaction's kernel reads where they are."""

    def __init__(self, case: DlrmCase, backend: CudaBackend) -> None:
        super().__init__(case, backend)
        self.interaction = CudaInteraction(case.spec, backend)
        self.grad = torch.empty_like(self.out)
        self.dense_optimizer = self.side.optimizers[1]

    def forward(self, number: int) -> object:
        with torch.no_grad():
            return self.begin(number)

    def begin(self, number: int) -> DlrmForward:
        batch: Any = self.case.batches[number]
        lookups, dense = super().begin(number), self.model.bot_l(batch.dense)
        crossed = dense.new_empty(len(dense), self.interaction.spec.width)
        self.interaction.forward([dense.detach(), self.out], crossed.detach())
        loss = nn.functional.binary_cross_entropy_with_logits(self.model.top_l(crossed.requires_grad_()), batch.labels)
        return DlrmForward(lookups, dense, crossed, loss)

    def finish(self, given: DlrmForward, scale: float = 1.0) -> None:
        given.loss.backward(torch.tensor(scale, device=given.loss.device))
        dense_grad = torch.empty_like(given.dense)
        self.interaction.backward([given.dense.detach(), self.out], given.crossed.grad, [dense_grad, self.grad])
        given.dense.backward(dense_grad)
        self.program.update(self.weights, self.states, self.rules, [Segment(given.lookups, self.grad)])
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad()

    def step(self, number: int, scale: float = 1.0) -> Tensor:
        """As Side.step: the loss."""
        given = self.begin(number)
        self.finish(given, scale)
        return given.loss


def interactions(shapes: Sequence[DeviceShape], backend: CudaBackend, seed: int) -> Iterator[tuple[DeviceShape, Operation]]:
    """The dot interaction by itself, forward and backward, of each shape. Checked before they are yielded; raises CheckFailed."""
    for shape in shapes:
        for operation in interaction(shape, backend, seed):
            yield shape, operation


def interaction(shape: DeviceShape, backend: CudaBackend, seed: int) -> Iterator[Operation]:
    spec, device = spec_of(shape), backend.device
    kernel, generator = CudaInteraction(spec, backend), torch.Generator(device).manual_seed(seed)
    vectors = torch.randn(shape.batch_size, spec.num_vectors * spec.dim, generator=generator, device=device)
    grad = torch.randn(shape.batch_size, spec.width, generator=generator, device=device)
    crossed, found = torch.empty_like(grad), torch.empty_like(vectors)
    apart = stacked([vectors], spec)
    kernel.forward([vectors], crossed)
    kernel.backward([vectors], grad, [found])
    wanted = interact(apart, spec), interact_backward(apart, grad, spec).flatten(1)
    for what, got, want in zip(("products", "gradients"), (crossed, found), wanted, strict=True):
        error = float((got - want).abs().max() / want.abs().max())
        if not error <= TOLERANCE:                             # also for NaN
            raise CheckFailed(f"{what} of the interaction are off by {error:.1e}; allowed {TOLERANCE:.0e}")
    nbytes = vectors.nbytes + grad.nbytes
    yield Operation(f"{shape.name} interaction", nbytes, always(lambda: kernel.forward([vectors], crossed)),
                    always(lambda: interact(apart, spec)))
    yield Operation(f"{shape.name} interaction, backward", nbytes + vectors.nbytes,
                    always(lambda: kernel.backward([vectors], grad, [found])), always(lambda: interact_backward(apart, grad, spec)))
