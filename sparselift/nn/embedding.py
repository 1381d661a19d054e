"""torch's embedding modules over the fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter

from sparselift.functional import lookups
from sparselift.functional.fallback import LookupOptions
from sparselift.functional.lookups import NAMES, SMALL, SPARSE, look_up_bags, look_up_rows
from sparselift.ops import nobody_watches

from .routed import RoutedModule


class EmbeddingBag(RoutedModule, nn.EmbeddingBag):
    """torch.nn.EmbeddingBag, with its signature, attributes and state_dict, in one fused kernel call.

    Float32, float16 and bfloat16 tables on the CPU run in the kernels; unweighted sums and maxima of float32 have torch's bits. What else
    torch's module takes runs in torch, and `last_path` says why. Batches are checked either way. Where torch 2.13 is wrong
    this is not: gradients with scale_grad_by_freq and of half-precision tables, and 2-D inputs of empty bags.
    A backward with create_graph=True can be differentiated again. torch.compile and torch.export hold the lookup as one node.

    Raises
    ------
    IndexError   in forward, for an id out of range: names position, id and table size
    ValueError   in forward, for offsets that do not start at 0, decrease, pass the number of ids or leave ids in no bag
    TypeError    in forward, for ids or offsets that are not int32 or int64
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows (B, embedding_dim) of `input`, (K,) with `offsets` or (B, L) without, as torch.nn.EmbeddingBag gives them."""
        weight: Tensor | None = self._parameters.get("weight")
        if is_compiling():
            routes = None
        else:
            quick = self._quick
            if quick is not None and quick[0] is weight:
                found = _look_up_again(quick, input, offsets, per_sample_weights)
                if found is not None:
                    return found
            routes = self._routes
        if weight is None:
            weight = self.weight               # parametrized
        options = LookupOptions(self.mode, self.sparse, self.padding_idx, self.include_last_offset, self.max_norm, self.norm_type,
                                self.scale_grad_by_freq)
        out = look_up_bags(routes, input, weight, offsets, per_sample_weights, options)
        if routes is not None:
            # Another weight than a parameter may hold a graph, which is not to be kept.
            again = type(weight) is Parameter and not routes.reason
            self.__dict__["_quick"] = self._like_this(weight, offsets, per_sample_weights, options) if again else None
        return out

    def _like_this(self, weight: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, options: LookupOptions) -> Any:
        """For `_look_up_again`: weight, compiled lookup, sparse, whether ids are a matrix, whether there are per-sample weights."""
        if offsets is None:
            options = options._replace(include_last_offset=False)
        lookup = self._routes.find((weight,), NAMES, options, sample_weights is not None).lookup
        return weight, lookup, self.sparse, offsets is None, sample_weights is not None


def _look_up_again(like: Any, input: Tensor, offsets: Tensor | None, sample_weights: Tensor | None) -> Tensor | None:
    """What `look_up_bags` gives for a call like the one before; None for one that is not, or that only `look_up_bags` explains."""
    weight, lookup, sparse, matrix, weighted = like
    if type(input) is not Tensor or not nobody_watches() or not lookup.program.fits((weight,)):
        return None
    if sample_weights is None:
        if weighted:
            return None
    elif not weighted or type(sample_weights) not in (Tensor, Parameter) or sample_weights.shape != input.shape:
        return None
    bags: Tensor | int
    if offsets is None:
        if not matrix or input.dim() != 2 or input.is_nested or not (bags := input.shape[1]):
            return None
        input = input.reshape(-1)
        if sample_weights is not None:
            sample_weights = sample_weights.reshape(-1)
    elif matrix or type(offsets) is not Tensor or offsets.dim() != 1 or input.dim() != 1:
        return None
    else:
        bags = offsets
    return lookup((weight,), (input,), (bags,), sparse, sample_weights)


class Embedding(RoutedModule, nn.Embedding):
    """torch.nn.Embedding, with its signature, attributes and state_dict, and kernels where they gain.

    Without pooling there is little to fuse: torch's own operation runs lookups that have sparse gradients or are small.
    Large ones into float32 tables on the CPU with dense gradients, and all into float16 and bfloat16 ones, run in the kernels; `last_path`
    says which it was. Gradients with scale_grad_by_freq and of half-precision tables are summed in float32. torch.compile and torch.export
    hold the lookup as one node.

    Raises
    ------
    IndexError   in forward, for an id out of range: names position, id and table size
    """

    def forward(self, input: Tensor) -> Tensor:
        """Rows (*, embedding_dim) of ids (*), as torch.nn.Embedding gives them."""
        weight: Tensor | None = self._parameters.get("weight")
        if is_compiling():
            routes = None
        else:
            quick = self._quick
            if quick is not None and quick[0] is weight and type(input) is Tensor:
                _, dtype, padding_idx, sparse, limit = quick
                if weight.dtype is dtype and input.is_meta is weight.is_meta and (sparse or input.numel() < limit) and input.dim():
                    try:
                        return torch.embedding(weight, input, padding_idx, False, sparse)
                    except (IndexError, RuntimeError):
                        pass                   # whose words are not enough
            routes = self._routes
        if weight is None:
            weight = self.weight               # parametrized
        options = LookupOptions("none", self.sparse, self.padding_idx, False, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        out = look_up_rows(routes, input, weight, options)
        if routes is not None:
            again = type(weight) is Parameter and routes.reason in (SMALL, SPARSE)
            self.__dict__["_quick"] = self._like_this(weight) if again else None
        return out

    def _like_this(self, weight: Tensor) -> Any:
        """What a small lookup needs again: weight, its dtype, padding_idx as torch.embedding takes it, sparse, fewer ids than this."""
        padding_idx = -1 if self.padding_idx is None else self.padding_idx
        if self.padding_idx is not None and padding_idx < 0:
            return None
        return weight, weight.dtype, padding_idx, self.sparse, -(-lookups.FUSED_ELEMENTS // max(weight.shape[1], 1))
