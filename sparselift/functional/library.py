"""Lookups as operators of torch.library, for graphs that are compiled or exported. Eager code takes the cheaper autograd.Function.

`sparselift::lookup` is one node, however many tables it reads; its gradient is `sparselift::lookup_backward`. Both validate
their ids and offsets when they run, and raise what the eager lookups raise. `sparselift::renorm_` applies max_norm.

Letters in shapes: T tables, B bags, D columns of a table, K ids of all tables, R rows of a table.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparselift.dtypes import dtype_name
from sparselift.kernels.base import WEIGHT_DTYPES
from sparselift.ops import BagLookup, split_sample_weights

from . import fallback, lookups
from .fallback import LookupOptions
from .routes import Routes, check, compile_check, compile_lookup, unfused_option

_OPTIONS = "str pooling, bool sparse, int? padding_idx, bool include_last_offset, bool scale_grad_by_freq, str[] names"

# Of all graphs of a program together.
_routes = Routes("compiled", limit=256)


# --------------------------------------------------------------------------------------------------------------- forward

@torch.library.custom_op("sparselift::lookup", mutates_args=(), schema=(
    f"(Tensor[] weights, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, {_OPTIONS}) -> Tensor"))
def lookup(weights: Sequence[Tensor], indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, pooling: str,
           sparse: bool, padding_idx: int | None, include_last_offset: bool, scale_grad_by_freq: bool, names: Sequence[str]) -> Tensor:
    """Rows of all tables, side by side.

    Parameters
    ----------
    weights             T tables (R, D)
    indices             (K,) with offsets, (B, L) without; any shape (*) for mode "none"
    offsets             (B,), or (B + 1,) with include_last_offset; T > 1: (T * B + 1,), table by table
    per_sample_weights  of the shape of indices, for mode "sum"
    pooling             "sum", "mean", "max" (of one table), "none" (a row an id, one table)
    sparse              the tables' gradients are sparse
    names               of the tables, for errors

    Returns
    -------
    (B, sum of D), or (*, D) for mode "none"
    """
    options = LookupOptions(pooling, sparse, padding_idx, include_last_offset, scale_grad_by_freq=scale_grad_by_freq)
    with torch.no_grad():
        if pooling == "none":
            return lookups.look_up_rows(_routes, indices, weights[0], options, tuple(names))
        if len(weights) == 1:
            return lookups.look_up_bags(_routes, indices, weights[0], offsets, per_sample_weights, options, tuple(names))
        assert offsets is not None
        options = options._replace(include_last_offset=False)
        return lookups.look_up_tables(_routes, indices, weights, offsets, per_sample_weights, options, tuple(names))


@lookup.register_fake
def _(weights: Sequence[Tensor], indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, pooling: str, sparse: bool,
      padding_idx: int | None, include_last_offset: bool, scale_grad_by_freq: bool, names: Sequence[str]) -> Tensor:
    width = sum(weight.shape[1] for weight in weights)
    dtype = weights[0].dtype
    for weight in weights[1:]:
        dtype = torch.promote_types(dtype, weight.dtype)
    shape = (*indices.shape, width) if pooling == "none" else (_num_bags(indices, offsets, include_last_offset, len(weights)), width)
    return weights[0].new_empty(shape, dtype=dtype)


def _num_bags(indices: Tensor, offsets: Tensor | None, include_last_offset: bool, tables: int) -> int:
    if offsets is None:
        return indices.shape[0]
    bags = offsets.shape[0] - include_last_offset
    return bags if tables == 1 else bags // tables


# -------------------------------------------------------------------------------------------------------------- backward

@torch.library.custom_op("sparselift::lookup_backward", mutates_args=(), schema=(
    "(Tensor grad, Tensor[] weights, SymInt[] rows, SymInt[] dims, bool[] wanted, bool by_sample_weights, Tensor indices, "
    f"Tensor? offsets, Tensor? per_sample_weights, {_OPTIONS}) -> Tensor[]"))
def lookup_backward(grad: Tensor, weights: Sequence[Tensor], rows: Sequence[int], dims: Sequence[int], wanted: Sequence[bool],
                    by_sample_weights: bool, indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, pooling: str,
                    sparse: bool, padding_idx: int | None, include_last_offset: bool, scale_grad_by_freq: bool,
                    names: Sequence[str]) -> list[Tensor]:
    """The gradients of `lookup`.

    Parameters
    ----------
    grad               what arrived, of the shape of the result
    weights            the tables where their values matter (mode "max", by_sample_weights), else none
    rows, dims         of every table
    wanted             whether every table's gradient is wanted
    by_sample_weights  whether the gradient of the per-sample weights is wanted

    Returns
    -------
    The gradients of the wanted tables, then that of the per-sample weights, of the shape of indices. A table's gradient is (R, D);
    or, where it is sparse, two tensors: the rows (1, L) int64 of the L lookups that count, and their gradients (L, D)
    """
    options = LookupOptions(pooling, sparse, padding_idx, include_last_offset, scale_grad_by_freq=scale_grad_by_freq)
    flat_grad = grad.reshape(-1, sum(dims))
    with torch.no_grad():
        parts, bags, options = _arrange(indices, offsets, options, names)
        factors = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        shapes = list(zip(rows, dims))
        fused = _fused(grad, weights, shapes, options)
        compiled = _compiled(shapes, options, grad.dtype if fused else None, factors is not None, tuple(names))
        if compiled is None or not fused:
            if compiled is not None:
                check(compiled, rows, parts, bags)
            grads, by_factors = _grads_in_torch(flat_grad, weights, shapes, wanted, by_sample_weights, parts, bags, factors, options)
        else:
            if flat_grad.stride(-1) != 1:
                flat_grad = flat_grad.clone(memory_format=torch.contiguous_format)
            if pooling == "max":                      # whose forward notes where the maxima came from
                batch, _ = compiled.run(weights, parts, bags)
            else:
                batch = compiled.prepare(parts, bags, split_sample_weights(factors, parts))
            grads = [each for each in compiled.table_grads(batch, flat_grad, wanted, sparse) if each is not None] if any(wanted) else []
            by_factors = compiled.sample_weight_grad(weights, batch, flat_grad) if by_sample_weights else None
    if sparse:
        grads = [part for each in grads for part in (each._indices(), each._values())]
    return grads if by_factors is None else [*grads, by_factors.reshape(indices.shape)]


def _grads_in_torch(grad: Tensor, weights: Sequence[Tensor], shapes: Sequence[tuple[int, int]], wanted: Sequence[bool],
                    by_sample_weights: bool, parts: Sequence[Tensor], bags: Sequence[Tensor | int], factors: Tensor | None,
                    options: LookupOptions) -> tuple[list[Tensor], Tensor | None]:
    grads, by_factors = [], []
    blocks = grad.split([dim for _, dim in shapes], 1)
    by_table = split_sample_weights(factors, parts) or [None] * len(parts)
    for table, (block, ids, starts, each) in enumerate(zip(blocks, parts, bags, by_table)):
        found, by_factor = fallback.gradients(shapes[table], weights[table] if weights else None, ids, starts, each, block, options)
        if wanted[table]:
            grads.append(found)
        if by_sample_weights and by_factor is not None:
            by_factors.append(by_factor)
    return grads, torch.cat(by_factors) if by_sample_weights else None


def _arrange(indices: Tensor, offsets: Tensor | None, options: LookupOptions,
             names: Sequence[str]) -> tuple[Sequence[Tensor], Sequence[Tensor | int], LookupOptions]:
    """The ids and bags of every table."""
    if options.mode == "none":
        return (indices.reshape(-1),), (1,), options
    if offsets is None:
        ids, bags = lookups.flat_bags(indices)
        return (ids,), (bags,), options._replace(include_last_offset=False)
    if len(names) == 1:
        return (indices,), (offsets,), options
    return *lookups.split_tables(indices, offsets, names), options._replace(include_last_offset=False)


def _fused(grad: Tensor, weights: Sequence[Tensor], shapes: Sequence[tuple[int, int]], options: LookupOptions) -> bool:
    if dtype_name(grad.dtype) not in WEIGHT_DTYPES or unfused_option(options) or any(0 in shape for shape in shapes):
        return False
    if options.sparse and grad.dtype != torch.float32:         # whose rows the kernels sum before they round them, so that they are fewer
        return False
    return all(weight.dtype == grad.dtype and weight.is_contiguous() for weight in weights)


_backwards: dict[Hashable, BagLookup | None] = {}
_lock = threading.Lock()


def _compiled(shapes: Sequence[tuple[int, int]], options: LookupOptions, dtype: torch.dtype | None, weighted: bool,
              names: tuple[str, ...]) -> BagLookup | None:
    """The lookup whose gradient is wanted, in tables of a dtype; where it is not fused (None), one that checks batches. Kept."""
    key = (tuple(shapes), options, dtype, weighted, names)
    if (found := _backwards.get(key)) is None:
        if dtype is None:
            found = compile_check(shapes, names, options)
        else:
            found = compile_lookup(shapes, names, options, weighted, [dtype_name(dtype)] * len(shapes))
        with _lock:
            while len(_backwards) >= _routes.limit:
                del _backwards[next(iter(_backwards))]
            _backwards[key] = found
    return found


@lookup_backward.register_fake
def _(grad: Tensor, weights: Sequence[Tensor], rows: Sequence[int], dims: Sequence[int], wanted: Sequence[bool], by_sample_weights: bool,
      indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, pooling: str, sparse: bool, padding_idx: int | None,
      include_last_offset: bool, scale_grad_by_freq: bool, names: Sequence[str]) -> list[Tensor]:
    grads: list[Tensor] = []
    for count, dim, want in zip(rows, dims, wanted):
        if want and not sparse:
            grads.append(grad.new_empty((count, dim)))
        elif want:
            # Lookups of padding are left out, and a batch of many tables is split by its values.
            known = padding_idx is None and len(rows) == 1
            length = indices.numel() if known else torch.library.get_ctx().new_dynamic_size()
            grads += [indices.new_empty((1, length), dtype=torch.int64), grad.new_empty((length, dim))]
    return [*grads, grad.new_empty(indices.shape)] if by_sample_weights else grads


# -------------------------------------------------------------------------------------------------------------- autograd

def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, indices, offsets, per_sample_weights, *options = inputs
    ctx.shapes = [[weight.shape[0] for weight in weights], [weight.shape[1] for weight in weights]]
    ctx.options, ctx.sparse, ctx.wanted = options, options[1], [weight.requires_grad for weight in weights]
    ctx.by_sample_weights = per_sample_weights is not None and per_sample_weights.requires_grad
    # A sum's gradient does not depend on the tables: they may change before the backward.
    needed = weights if ctx.by_sample_weights or options[0] == "max" else []
    ctx.save_for_backward(indices, offsets, per_sample_weights, *needed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indices, offsets, per_sample_weights, *weights = ctx.saved_tensors
    rows, dims = ctx.shapes
    found = iter(torch.ops.sparselift.lookup_backward(grad, weights, rows, dims, ctx.wanted, ctx.by_sample_weights, indices, offsets,
                                                      per_sample_weights, *ctx.options))
    by_table: list[Tensor | None] = []
    for shape, want in zip(zip(rows, dims), ctx.wanted):
        if want and ctx.sparse:
            by_table.append(torch.sparse_coo_tensor(next(found), next(found), shape, check_invariants=False, is_coalesced=False))
        else:
            by_table.append(next(found) if want else None)
    by_factor = next(found) if ctx.by_sample_weights else None
    return by_table, None, None, by_factor, *(None for _ in ctx.options)


lookup.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("a compiled lookup cannot be differentiated twice; call the module outside torch.compile")


lookup_backward.register_autograd(_refuse)


# -------------------------------------------------------------------------------------------------------------- max_norm

@torch.library.custom_op("sparselift::renorm_", mutates_args=("weight",), schema=(
    "(Tensor(a!) weight, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, str pooling, bool include_last_offset, "
    "float max_norm, float norm_type, str[] names) -> ()"))
def renorm_(weight: Tensor, indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, pooling: str,
            include_last_offset: bool, max_norm: float, norm_type: float, names: Sequence[str]) -> None:
    """Scale the rows of `indices` in `weight` whose norm is over max_norm down to it, after a check of the whole batch."""
    options = LookupOptions(pooling, False, None, include_last_offset, max_norm, norm_type)
    parts, bags, options = _arrange(indices, offsets, options, names)
    compiled = _compiled([(weight.shape[0], weight.shape[1])], options, None, False, tuple(names))
    if compiled is not None:
        check(compiled, weight.shape[:1], parts, bags)
    fallback.check_sample_weights(weight, per_sample_weights)
    fallback.renorm(weight, parts[0], options)


@renorm_.register_fake
def _(weight: Tensor, indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, pooling: str, include_last_offset: bool,
      max_norm: float, norm_type: float, names: Sequence[str]) -> None:
    return None
