"""The built-in DLRM workload: on Criteo's shape, or on a Criteo log."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.datasets.criteo import read_criteo
from sparselift.datasets.synthetic import SHAPES, click_batches
from sparselift.datasets.tabular import Batch
from sparselift.dtypes import torch_dtype
from sparselift.kernels.base import WEIGHT_DTYPES
from sparselift.models.dlrm import DLRM
from sparselift.optim import RowWiseAdagrad
from sparselift.workload import Optimizers, Workload

DEFAULT_LR = {"sgd": 0.1, "adagrad": 0.01, "rowwise_adagrad": 0.01, "sparse_adam": 0.001}


def dlrm(data: str | os.PathLike[str] | None = None, *, shape: str = "criteo_kaggle", batch_size: int = 2048, num_batches: int = 32,
         dim: int = 16, max_rows: int | None = 1_000_000, min_count: int = 1, bottom: Sequence[int] = (512, 256, 64),
         top: Sequence[int] = (512, 256, 1), optimizer: str = "sgd", lr: float | None = None, sparse: bool = True, mode: str = "sum",
         dtype: str = "float32", seed: int = 0) -> Workload:
    """DLRM with the layers of the official script for Criteo Kaggle (13-512-256-64-16, 512-256-1).

    Parameters
    ----------
    data         a Criteo log, plain or gzip; None: seeded synthetic clicks of `shape`
    shape        of the synthetic clicks: "criteo_kaggle" (one id a bag) or "mlperf_dcnv2" (multi-hot)
    batch_size   rows of a batch
    num_batches  batches to make, or to read at most
    dim          columns of every table
    max_rows     cap of the tables' rows; None: as many as there are distinct ids
    min_count    in a log, an id seen fewer times shares the row of missing ids
    bottom, top  widths of the MLPs; the bottom one ends in a layer of width `dim` besides
    optimizer    "sgd" or "adagrad" for everything, or "rowwise_adagrad" or "sparse_adam" for the tables beside SGD for the rest
    lr           learning rate of the tables and, in "sgd" and "adagrad", of everything; None: a usual one
    sparse       tables get torch.sparse_coo gradients
    mode         pooling: "sum" or "mean"
    dtype        of the tables: "float32", "float16" or "bfloat16"; halves are rounded by chance in "rowwise_adagrad"
    seed         of the weights and of the synthetic clicks

    Raises
    ------
    ValueError   an argument that is none of the above
    DataError    the log does not hold what its format says
    """
    if optimizer not in DEFAULT_LR:
        raise ValueError(f"optimizer must be one of {sorted(DEFAULT_LR)}; got {optimizer!r}")
    if optimizer == "sparse_adam" and not sparse:
        raise ValueError("optimizer 'sparse_adam' needs sparse=True; got sparse=False")
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {list(WEIGHT_DTYPES)}; got {dtype!r}")
    if data is None:
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {sorted(SHAPES)}; got {shape!r}")
        rows = SHAPES[shape].capped(max_rows)
        batches = click_batches(SHAPES[shape], batch_size, num_batches, seed=seed, max_rows=max_rows)
    else:
        rows, batches = _read(data, batch_size, num_batches, min_count, max_rows)
    model = DLRM(rows, dim, bottom, top, sparse=sparse, mode=mode, num_dense=batches[0].dense.shape[1], dtype=torch_dtype(dtype),
                 generator=torch.Generator().manual_seed(seed))
    rate = DEFAULT_LR[optimizer] if lr is None else lr
    return Workload("dlrm", model, OPTIMIZERS[optimizer](model, rate), click_loss, batches, uses=frozenset(),
                    inputs=click_inputs)


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """0-d binary cross-entropy of a batch's clicks."""
    logits = model(*click_inputs(batch))
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


def click_inputs(batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What DLRM's forward gets of a batch."""
    return batch.dense, batch.offsets, batch.indices


def _read(data: str | os.PathLike[str], batch_size: int, num_batches: int, min_count: int,
          max_rows: int | None) -> tuple[tuple[int, ...], list[Batch]]:
    """Table sizes, and full batches only, unless the log has less than one."""
    for name, value in (("batch_size", batch_size), ("num_batches", num_batches)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    clicks = read_criteo(data, limit=batch_size * num_batches, min_count=min_count, max_rows=max_rows)
    return clicks.rows, clicks.batches(batch_size, drop_last=len(clicks) >= batch_size)


def _everything(kind: Any) -> Callable[[DLRM, float], Optimizers]:
    return lambda model, lr: kind(model.parameters(), lr=lr)


def _tables(kind: Any) -> Callable[[DLRM, float], Optimizers]:
    def build(model: DLRM, lr: float) -> Optimizers:
        dense = [*model.bot_l.parameters(), *model.top_l.parameters()]
        return [torch.optim.SGD(dense, lr=DEFAULT_LR["sgd"]), kind(list(model.emb_l.parameters()), lr=lr)]
    return build


def _rowwise(tables: list[nn.Parameter], lr: float) -> RowWiseAdagrad:
    return RowWiseAdagrad(tables, lr=lr, rounding_seed=None if tables[0].dtype == torch.float32 else 0)


OPTIMIZERS: dict[str, Callable[[DLRM, float], Optimizers]] = {
    "sgd": _everything(torch.optim.SGD),
    "adagrad": _everything(torch.optim.Adagrad),
    "rowwise_adagrad": _tables(_rowwise),
    "sparse_adam": _tables(torch.optim.SparseAdam),
}
