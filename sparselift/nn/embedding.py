"""torch's embedding modules over the fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .fallback import LookupOptions
from .routes import Route, RoutedModule, check, unreadable

EXACT_DTYPES = (torch.float32, torch.float64)

# Elements of the result from which a dense gradient is summed faster by the kernels than by torch, autograd in Python included.
FUSED_ELEMENTS = 2**14


class EmbeddingBag(RoutedModule, nn.EmbeddingBag):
    """torch.nn.EmbeddingBag, with its signature, attributes and state_dict, in one fused kernel call.

    Float32 tables on the CPU with mode "sum" or "mean" run in the kernels; an unweighted sum has torch's bits. What else
    torch's module takes runs in torch, and `last_path` says why. Batches are checked either way. Where torch 2.13 is wrong
    this is not: gradients with scale_grad_by_freq and of half-precision tables, and 2-D inputs of empty bags.
    A backward with create_graph=True can be differentiated again.

    Raises
    ------
    IndexError   in forward, for an id out of range: names position, id and table size
    ValueError   in forward, for offsets that do not start at 0, decrease, pass the number of ids or leave ids in no bag
    TypeError    in forward, for ids or offsets that are not int32 or int64
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows (B, embedding_dim) of `input`, (K,) with `offsets` or (B, L) without, as torch.nn.EmbeddingBag gives them."""
        if is_compiling():
            return _bag_outside_the_graph(self, input, offsets, per_sample_weights)
        return self._look_up(input, offsets, per_sample_weights)

    def _look_up(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor:
        weight: Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self.weight               # parametrized
        reason = unreadable(weight, input, offsets, per_sample_weights)
        if reason or not self._well_formed(input, offsets, per_sample_weights):
            self._report(reason or "its own checks")
            return super().forward(input, offsets, per_sample_weights)
        flat, flat_weights = input, per_sample_weights
        bags: Tensor | int
        if offsets is None:
            count, length = input.shape
            # Bags without ids have no length that would tell how many they are.
            bags = length or input.new_zeros(count)
            flat, flat_weights = input.reshape(-1), None if per_sample_weights is None else per_sample_weights.reshape(-1)
        else:
            bags = offsets
        route = self._route(weight, offsets is not None and self.include_last_offset, per_sample_weights is not None)
        if route.lookup is None:
            self._report(route.reason)
            return super().forward(input, offsets, per_sample_weights)
        return self._run(route, (weight,), (flat,), (bags,), flat_weights)

    def _well_formed(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> bool:
        """Whether the arguments have the shapes that torch's module takes; it refuses others in its own words."""
        if offsets is None:
            shaped = input.dim() == 2 and not input.is_nested
        else:
            shaped = input.dim() == 1 and offsets.dim() == 1
        return shaped and (per_sample_weights is None or (self.mode == "sum" and per_sample_weights.shape == input.shape))

    def _route(self, weight: Tensor, include_last_offset: bool, weighted: bool) -> Route:
        key = (weight.shape, weight.dtype, weight.device, weight.is_contiguous(), self.mode, self.sparse, self.padding_idx,
               include_last_offset, self.max_norm, self.norm_type, self.scale_grad_by_freq, weighted)
        if route := self._routes.get(key):
            return route
        options = LookupOptions(self.mode, self.sparse, self.padding_idx, include_last_offset, self.max_norm, self.norm_type,
                                self.scale_grad_by_freq)
        return self._plan(key, (weight,), ("weight",), options, weighted)


class Embedding(RoutedModule, nn.Embedding):
    """torch.nn.Embedding, with its signature, attributes and state_dict, and kernels where they gain.

    Without pooling there is little to fuse: torch's own operation runs lookups that have sparse gradients, are small or compiled.
    Large ones into float32 tables on the CPU with dense gradients run in the kernels; `last_path` says which it was. Gradients
    with scale_grad_by_freq and of half-precision tables are summed in float32.

    Raises
    ------
    IndexError   in forward, for an id out of range: names position, id and table size
    """

    def forward(self, input: Tensor) -> Tensor:
        """Rows (*, embedding_dim) of ids (*), as torch.nn.Embedding gives them."""
        if type(input) is not Tensor:
            return super().forward(input)
        weight: Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self.weight               # parametrized
        # Torch's backward fails for a 0-d id with padding and a sparse gradient.
        if weight.dtype in EXACT_DTYPES and self.max_norm is None and not self.scale_grad_by_freq and input.dim():
            if is_compiling():
                return self._look_up_in_torch(weight, input)
            if self.sparse or input.numel() * weight.shape[1] < FUSED_ELEMENTS:
                self._report("a sparse gradient without pooling" if self.sparse else "a small lookup")
                try:
                    return self._look_up_in_torch(weight, input)
                except IndexError:
                    self._name_wrong_id(weight, input)
                    raise
        return _rows_outside_the_graph(self, weight, input) if is_compiling() else self._look_up(weight, input)

    def _look_up_in_torch(self, weight: Tensor, input: Tensor) -> Tensor:
        return torch.embedding(weight, input, -1 if self.padding_idx is None else self.padding_idx, False, self.sparse)

    def _look_up(self, weight: Tensor, input: Tensor) -> Tensor:
        reason = unreadable(weight, input)
        if not reason:
            route = self._route(weight)
            reason = route.reason if route.lookup is None else ""
        if reason or input.is_nested:
            self._report(reason or "a nested tensor")
            return super().forward(input)
        return self._run(route, (weight,), (input.reshape(-1),), (1,), None, (*input.shape, weight.shape[1]))

    def _name_wrong_id(self, weight: Tensor, input: Tensor) -> None:
        """Raises the IndexError that the kernels would have raised, where the ids can be read."""
        if not unreadable(weight, input) and (lookup := self._route(weight).lookup) is not None:
            check(lookup, (input.reshape(-1),), (1,))

    def _route(self, weight: Tensor) -> Route:
        key = (weight.shape, weight.dtype, weight.device, weight.is_contiguous(), self.sparse, self.padding_idx, self.max_norm,
               self.norm_type, self.scale_grad_by_freq)
        if route := self._routes.get(key):
            return route
        options = LookupOptions("none", self.sparse, self.padding_idx, False, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        return self._plan(key, (weight,), ("weight",), options, False)


@torch._disable_dynamo
def _bag_outside_the_graph(module: EmbeddingBag, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor:
    return module._look_up(input, offsets, per_sample_weights)


@torch._disable_dynamo
def _rows_outside_the_graph(module: Embedding, weight: Tensor, input: Tensor) -> Tensor:
    return module._look_up(weight, input)
