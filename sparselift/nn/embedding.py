"""torch's embedding modules over the fused kernels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.compiler import is_compiling

from sparselift.functional.fallback import LookupOptions
from sparselift.functional.lookups import look_up_bags, look_up_rows

from .routed import RoutedModule


class EmbeddingBag(RoutedModule, nn.EmbeddingBag):
    """torch.nn.EmbeddingBag, with its signature, attributes and state_dict, in one fused kernel call.

    Float32 tables on the CPU with mode "sum" or "mean" run in the kernels; an unweighted sum has torch's bits. What else
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
        if weight is None:
            weight = self.weight               # parametrized
        options = LookupOptions(self.mode, self.sparse, self.padding_idx, self.include_last_offset, self.max_norm, self.norm_type,
                                self.scale_grad_by_freq)
        return look_up_bags(None if is_compiling() else self._routes, input, weight, offsets, per_sample_weights, options)


class Embedding(RoutedModule, nn.Embedding):
    """torch.nn.Embedding, with its signature, attributes and state_dict, and kernels where they gain.

    Without pooling there is little to fuse: torch's own operation runs lookups that have sparse gradients or are small.
    Large ones into float32 tables on the CPU with dense gradients run in the kernels; `last_path` says which it was. Gradients
    with scale_grad_by_freq and of half-precision tables are summed in float32. torch.compile and torch.export hold the lookup as
    one node.

    Raises
    ------
    IndexError   in forward, for an id out of range: names position, id and table size
    """

    def forward(self, input: Tensor) -> Tensor:
        """Rows (*, embedding_dim) of ids (*), as torch.nn.Embedding gives them."""
        weight: Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self.weight               # parametrized
        options = LookupOptions("none", self.sparse, self.padding_idx, False, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        return look_up_rows(None if is_compiling() else self._routes, input, weight, options)
