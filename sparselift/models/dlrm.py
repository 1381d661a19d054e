"""DLRM (Naumov et al., 2019), in the structure of facebookresearch/dlrm: `emb_l`, `bot_l`, `top_l`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

INTERACTIONS = ("dot", "cat")


class DLRM(nn.Module):
    """Bottom MLP on the dense features, one embedding bag a table, their interaction, top MLP.

    Parameters
    ----------
    rows              (T,) table sizes
    dim               D, of every table
    bottom            widths of the bottom MLP; one more layer, of width D, is added
    top               widths of the top MLP; the last one must be 1. No activation follows it: the output is a logit
    sparse            tables get torch.sparse_coo gradients
    mode              pooling of the bags: "sum" or "mean"
    arch_interaction  "dot": the dot products of all pairs of vectors, pairs column by column below the diagonal, beside the dense
                      vector; "cat": all vectors side by side
    num_dense         F, dense features
    dtype             of the tables. The MLPs are float32, and so is what their lookups are concatenated to
    generator         of the initial weights; None: torch's global one

    Raises ValueError for sizes below 1, another mode or interaction, or a top MLP that does not end in 1.
    """

    pair_lines: Tensor
    pair_columns: Tensor

    def __init__(self, rows: Sequence[int], dim: int, bottom: Sequence[int] = (512, 256), top: Sequence[int] = (512, 256, 1), *,
                 sparse: bool = True, mode: str = "sum", arch_interaction: str = "dot", num_dense: int = 13,
                 dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None) -> None:
        super().__init__()
        _check_sizes(rows=rows, dim=[dim], bottom=bottom, top=top, num_dense=[num_dense])
        if not top or top[-1] != 1:
            raise ValueError(f"top must end in 1, the logit; got {tuple(top)}")
        if arch_interaction not in INTERACTIONS:
            raise ValueError(f"arch_interaction must be one of {INTERACTIONS}; got {arch_interaction!r}")
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode must be 'sum' or 'mean'; got {mode!r}")
        self.dim, self.arch_interaction = dim, arch_interaction
        vectors = len(rows) + 1
        width = vectors * dim if arch_interaction == "cat" else dim + vectors * (vectors - 1) // 2
        self.emb_l = nn.ModuleList(_table(count, dim, mode, sparse, dtype, generator) for count in rows)
        self.bot_l = _mlp((num_dense, *bottom, dim), generator)
        self.top_l = _mlp((width, *top), generator)[:-1]
        columns, lines = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pair_lines", lines, persistent=False)
        self.register_buffer("pair_columns", columns, persistent=False)

    def forward(self, dense: Tensor, offsets: Tensor | Sequence[Tensor], indices: Tensor | Sequence[Tensor]) -> Tensor:
        """(B, 1) logits of dense (B, F), and T bag starts (B,) and ids (K_t,), as sequences or stacked."""
        x = self.bot_l(dense)                                                        # (B, D)
        ly = self.apply_emb(offsets, indices)
        return self.top_l(self.interact_features(x, ly))

    def apply_emb(self, offsets: Tensor | Sequence[Tensor], indices: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """T pooled lookups (B, D)."""
        ly = []
        for k, bag in enumerate(self.emb_l):
            ly.append(bag(indices[k], offsets[k]))
        return ly

    def interact_features(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        """(B, D + T * (T + 1) / 2), or (B, (T + 1) * D) with "cat", of the dense vector x (B, D) and the lookups."""
        together = torch.cat([x] + ly, dim=1)                                        # (B, (T + 1) * D)
        if self.arch_interaction == "cat":
            return together
        vectors = together.view(len(x), -1, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2))                       # (B, T + 1, T + 1)
        return torch.cat([x, products[:, self.pair_lines, self.pair_columns]], dim=1)


def _check_sizes(**sizes: Sequence[int]) -> None:
    for name, values in sizes.items():
        if any(value < 1 for value in values):
            raise ValueError(f"{name} must be at least 1; got {values[0] if len(values) == 1 else tuple(values)}")


def _table(rows: int, dim: int, mode: str, sparse: bool, dtype: torch.dtype, generator: torch.Generator | None) -> nn.EmbeddingBag:
    limit = 1 / math.sqrt(rows)
    weight = torch.empty(rows, dim).uniform_(-limit, limit, generator=generator)
    return nn.EmbeddingBag(rows, dim, mode=mode, sparse=sparse, _weight=weight.to(dtype))


def _mlp(widths: Sequence[int], generator: torch.Generator | None) -> nn.Sequential:
    """Linear layers, a ReLU after each. Weights and biases are normal, with DLRM's variances 2 / (in + out) and 1 / out."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:], strict=False):
        linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)
        with torch.no_grad():
            linear.weight.normal_(0, math.sqrt(2 / (fan_in + fan_out)), generator=generator)
            linear.bias.normal_(0, math.sqrt(1 / fan_out), generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)
