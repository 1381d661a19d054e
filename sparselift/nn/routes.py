"""Which way a lookup runs: in the kernels, or in torch and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from sparselift.errors import KernelError
from sparselift.kernels.base import FeatureSpec, TableSpec
from sparselift.ops import BagLookup, hidden_values, watched_operations

from . import fallback
from .fallback import LookupOptions

logger = logging.getLogger("sparselift.nn")

FUSED = "fused bag"

# A program keeps workspaces as long as its table; a table that grows step by step is not to leave one behind a step.
MAX_ROUTES = 8


@dataclass(frozen=True, slots=True)
class Route:
    """How lookups of one structure run.

    lookup   compiled: to run, or, where there is a reason, to check batches before torch runs them; None: torch checks, too
    options  for torch
    reason   why torch runs the lookups; empty: the kernels do
    """

    lookup: BagLookup | None
    options: LookupOptions
    reason: str = ""


def plan_route(weights: Sequence[Tensor], names: Sequence[str], options: LookupOptions, weighted: bool) -> Route:
    """The route of lookups with one feature a table."""
    for name, weight in zip(names, weights):
        if weight.device.type != "cpu":
            return Route(None, options, f"{name} is on {weight.device}")
        if weight.dtype not in fallback.DTYPES:
            return Route(None, options, f"{name} is {weight.dtype}")
    reason = _unfused(weights, names, options)
    if not reason:
        try:
            return Route(_compile(weights, names, options, weighted), options)
        except (KernelError, ValueError) as error:
            reason = str(error)
    try:
        return Route(_compile(weights, names, options, False, "reference"), options, reason)
    except ValueError:
        return Route(None, options, reason)    # more rows than any backend takes, or a padding_idx that torch refuses, too


def _unfused(weights: Sequence[Tensor], names: Sequence[str], options: LookupOptions) -> str:
    if options.mode not in ("sum", "mean", "none"):
        return f"mode={options.mode!r}"
    if options.max_norm is not None:
        return f"max_norm={options.max_norm}"
    if options.scale_grad_by_freq:
        return "scale_grad_by_freq=True"
    for name, weight in zip(names, weights):
        if weight.dtype != torch.float32:
            return f"{name} is {weight.dtype}"
        if not weight.is_contiguous():
            return f"{name} has strides {weight.stride()}"
        if not weight.numel():
            return f"{name} has shape {tuple(weight.shape)}"
    return ""


def _compile(weights: Sequence[Tensor], names: Sequence[str], options: LookupOptions, weighted: bool,
             backend: str | None = None) -> BagLookup:
    tables, features, column = [], [], 0
    for position, (name, weight) in enumerate(zip(names, weights)):
        # A table without elements is only ever checked against, for which one with an element is as good.
        rows, dim = (max(size, 1) for size in weight.shape)
        pooling = options.mode if options.mode in ("mean", "none") else "sum"
        tables.append(TableSpec(name, rows, dim))
        features.append(FeatureSpec(name, position, pooling, column, options.padding_idx, options.include_last_offset, weighted))
        column += dim
    return BagLookup(tables, features, backend)


def unreadable(*tensors: Tensor | None) -> str:
    """Why the values of the tensors cannot be read now; empty if they can."""
    for tensor in tensors:
        if tensor is not None and type(tensor) is not Tensor and type(tensor) is not Parameter:
            return f"an argument is a {type(tensor).__name__}"
    return hidden_values()


def check(lookup: BagLookup, indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
          sample_weights: Sequence[Tensor | None] | None = None) -> None:
    """Raise what the lookups would raise for this batch, unseen by whoever watches torch's operations to replay or to trace them."""
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        lookup.prepare(indices, offsets, sample_weights)


class RoutedModule(nn.Module):
    """A module whose lookups are compiled on first use. They stay out of copies, pickles and the state_dict.

    `last_path` says what the last forward ran: "fused bag", or "torch: " and the reason.
    """

    last_path: str = "no call yet"

    @property
    def _routes(self) -> dict[Any, Route]:
        # Straight into __dict__: nn.Module's own __setattr__ costs more than looking up a few ids.
        return self.__dict__.setdefault("_compiled_routes", {})

    def _plan(self, key: Any, weights: Sequence[Tensor], names: Sequence[str], options: LookupOptions, weighted: bool) -> Route:
        """The route of lookups with this key, which nothing was planned for yet."""
        routes = self._routes
        if len(routes) >= MAX_ROUTES:
            routes.clear()
        route = routes[key] = plan_route(weights, names, options, weighted)
        return route

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_compiled_routes", None)
        state.pop("last_path", None)
        return state

    def _report(self, reason: str) -> None:
        path = f"torch: {reason}" if reason else FUSED
        if path != self.last_path:
            self.__dict__["last_path"] = path
            if reason:
                logger.info("%s runs in %s", type(self).__name__, path)

    def _run(self, route: Route, weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
             sample_weights: Tensor | None, shape: Sequence[int] | None = None) -> Tensor:
        """Look up a batch, one feature a table. `sample_weights` are all features' in one tensor; `shape` is that of the result."""
        lookup, options = route.lookup, route.options
        parts: Sequence[Tensor | None] = [None] * len(weights)
        if sample_weights is not None:
            parts = (sample_weights,) if len(weights) == 1 else sample_weights.split([len(ids) for ids in indices])
        reason = route.reason or watched_operations()
        self._report(reason)
        if lookup is None or reason:
            if lookup is not None:
                check(lookup, indices, offsets, None if route.reason else parts)
            outputs = [fallback.lookup(*each, options) for each in zip(weights, indices, offsets, parts)]
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
            return out if shape is None else out.reshape(shape)
        batch = lookup.prepare(indices, offsets, parts)
        return lookup(weights, batch, shape or (batch.num_bags[0], lookup.width), options.sparse, sample_weights)
