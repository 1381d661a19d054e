"""Which way a lookup runs: in the kernels, or in torch and why."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from sparselift import ops
from sparselift.dtypes import dtype_name
from sparselift.errors import KernelError
from sparselift.kernels.base import WEIGHT_DTYPES, FeatureSpec, TableSpec
from sparselift.kernels.checks import INDEX_DTYPES, id_error
from sparselift.ops import BagLookup, hidden_values, split_sample_weights, watched_operations
from sparselift.rules import Rule, first

from . import fallback
from .fallback import LookupOptions

logger = logging.getLogger("sparselift.functional")

FUSED = "fused bag"


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


class Routes:
    """Routes that were planned, by structure, and which way the last lookup took.

    A program keeps workspaces as long as its table. So the oldest routes go when there are more than `limit`: a table that grows
    step by step is not to leave one behind a step. Any number of threads may use one object.
    """

    __slots__ = ("_by_key", "_lock", "limit", "owner", "reason")

    def __init__(self, owner: str, limit: int) -> None:
        self.owner, self.limit = owner, limit
        self.reason: str | None = None         # why torch ran the last lookup; empty: the kernels did
        self._by_key: dict[Hashable, Route] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, weights: Sequence[Tensor], names: Sequence[str], options: LookupOptions, weighted: bool) -> Route:
        """The route of lookups with one feature a table."""
        if len(weights) == 1:
            weight = weights[0]
            key: Hashable = (weight.shape, weight.dtype, weight.device, weight.is_contiguous(), options, weighted, names)
        else:
            key = (options, weighted, names, *((w.shape, w.dtype, w.device, w.is_contiguous()) for w in weights))
        return self._by_key.get(key) or self._plan(key, weights, names, options, weighted)

    def _plan(self, key: Hashable, weights: Sequence[Tensor], names: Sequence[str], options: LookupOptions, weighted: bool) -> Route:
        route = plan_route(weights, names, options, weighted)
        with self._lock:
            while len(self._by_key) >= self.limit:
                del self._by_key[next(iter(self._by_key))]
            return self._by_key.setdefault(key, route)

    @property
    def last_path(self) -> str:
        """What the last lookup ran: "fused bag", or "torch: " and the reason."""
        if self.reason is None:
            return "no call yet"
        return f"torch: {self.reason}" if self.reason else FUSED

    def report(self, reason: str) -> None:
        """Note that a lookup runs in torch for this reason; or, where it is empty, in the kernels."""
        if reason != self.reason:
            self.reason = reason
            if reason:
                logger.info("%s runs in %s", self.owner, self.last_path)

    def run(self, route: Route, weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
            sample_weights: Tensor | None, shape: Sequence[int] | None = None) -> Tensor:
        """Look up a batch, one feature a table. `sample_weights` are all features' in one tensor; `shape` is that of the result."""
        lookup, options = route.lookup, route.options
        reason = route.reason or watched_operations()
        self.report(reason)
        if lookup is not None and not reason:
            out = lookup(weights, indices, offsets, options.sparse, sample_weights)
            return out if shape is None else out.view(shape)
        parts = split_sample_weights(sample_weights, indices)
        if lookup is not None:
            check(lookup, [weight.shape[0] for weight in weights], indices, offsets, None if route.reason else parts)
        outputs = [fallback.lookup(*each, options) for each in zip(weights, indices, offsets, parts or [None] * len(indices))]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return out if shape is None else out.reshape(shape)


def plan_route(weights: Sequence[Tensor], names: Sequence[str], options: LookupOptions, weighted: bool) -> Route:
    """The route of lookups with one feature a table."""
    if reason := _about_tables(FOREIGN_TABLES, weights, names):
        return Route(None, options, reason)
    if options.padding_idx is not None and options.padding_idx < 0:
        options = options._replace(padding_idx=options.padding_idx + weights[0].shape[0])
    shapes = [tuple(weight.shape) for weight in weights]
    reason = unfused_option(options) or _about_tables(UNFUSED_TABLES, weights, names)
    if not reason:
        try:
            return Route(compile_lookup(shapes, names, options, weighted, [dtype_name(weight.dtype) for weight in weights]), options)
        except (KernelError, ValueError) as error:
            reason = str(error)
    return Route(compile_check(shapes, names, options), options, reason)


def unfused_option(options: LookupOptions) -> str:
    """Which option the kernels do not implement, if any."""
    rule = first(UNFUSED_OPTIONS, options)
    return "" if rule is None else rule.reason.format(options=options)


UNFUSED_OPTIONS = (
    Rule("`max_norm`", lambda options: options.max_norm is not None, "max_norm={options.max_norm}"),
    Rule("`scale_grad_by_freq`", lambda options: options.scale_grad_by_freq, "scale_grad_by_freq=True"),
)

# Batches for these tables are checked by torch alone.
FOREIGN_TABLES = (
    Rule("a table on another device", lambda weight: weight.device.type != "cpu", "{name} is on {weight.device}"),
    Rule("a table of another layout", lambda weight: weight.layout != torch.strided, "{name} is {weight.layout}"),
    Rule("a weight that is no matrix", lambda weight: weight.dim() != 2, "{name} has shape {shape}"),
)

UNFUSED_TABLES = (
    Rule(f"a table of another dtype than {', '.join(WEIGHT_DTYPES[:-1])} and {WEIGHT_DTYPES[-1]}",
         lambda weight: dtype_name(weight.dtype) not in WEIGHT_DTYPES, "{name} is {weight.dtype}"),
    Rule("a table with other strides", lambda weight: not weight.is_contiguous(), "{name} has strides {strides}"),
    Rule("a table without elements", lambda weight: not weight.numel(), "{name} has shape {shape}"),
)


def _about_tables(rules: Sequence[Rule], weights: Sequence[Tensor], names: Sequence[str]) -> str:
    for name, weight in zip(names, weights):
        rule = first(rules, weight)
        if rule is not None:
            strides = weight.stride() if weight.layout == torch.strided else None
            return rule.reason.format(name=name, weight=weight, shape=tuple(weight.shape), strides=strides)
    return ""


def compile_lookup(shapes: Sequence[tuple[int, ...]], names: Sequence[str], options: LookupOptions, weighted: bool,
                   dtypes: Sequence[str] | None = None, backend: str | None = None) -> BagLookup:
    """One feature a table, side by side; float32 unless `dtypes` names others, one a table. Raises ValueError for what no backend takes,
    KernelError where the backend is not built.
    """
    tables, features, column = [], [], 0
    for position, (name, shape, dtype) in enumerate(zip(names, shapes, dtypes or ["float32"] * len(shapes))):
        # A table without elements is only ever checked against, for which one with an element is as good.
        rows, dim = (max(size, 1) for size in shape)
        tables.append(TableSpec(name, rows, dim, dtype))
        features.append(FeatureSpec(name, position, options.mode, column, options.padding_idx, options.include_last_offset, weighted))
        column += dim
    return BagLookup(tables, features, backend)


def compile_check(shapes: Sequence[tuple[int, ...]], names: Sequence[str], options: LookupOptions) -> BagLookup | None:
    """A lookup to validate batches with, for tables of any dtype. None for more rows than any backend takes, or a padding_idx
    that torch refuses, too.
    """
    for backend in (ops.BACKEND, "reference"):
        try:
            return compile_lookup(shapes, names, options._replace(mode="none" if options.mode == "none" else "sum"), False, backend=backend)
        except KernelError:
            continue
        except ValueError:
            break
    return None


def unreadable(*tensors: Tensor | None) -> str:
    """Why the values of the tensors cannot be read now; empty if they can."""
    for tensor in tensors:
        if tensor is not None and type(tensor) is not Tensor and type(tensor) is not Parameter:
            return f"an argument is a {type(tensor).__name__}"
    return hidden_values()


def check(lookup: BagLookup, rows: Sequence[int], indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
          sample_weights: Sequence[Tensor | None] | None = None) -> None:
    """Raise what the lookups would raise for this batch, unseen by whoever watches torch's operations to replay or to trace them.

    `rows` of every table are the lookup's, unless there are none, of which it knows one.
    """
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        for spec, table, count, ids in zip(lookup.program.features, lookup.program.tables, rows, indices):
            if not count and ids.numel() and ids.dtype in INDEX_DTYPES and not ids.is_meta:
                raise id_error(spec, replace(table, rows=0), 0, int(ids[0]))
        lookup.prepare(indices, offsets, sample_weights)
