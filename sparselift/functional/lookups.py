"""One lookup, for the functional forms and for the modules: validated, then run the way that its route says."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from .fallback import DTYPES, LookupOptions
from .routes import Routes, check, unreadable

EXACT_DTYPES = (torch.float32, torch.float64)
NAMES = ("weight",)

# Why torch looks rows up that the kernels could.
SPARSE, SMALL = "a sparse gradient without pooling", "a small lookup"

# Elements of the result from which a dense gradient is summed faster by the kernels than by torch, autograd in Python included.
FUSED_ELEMENTS = 2**14

# Of all functional calls of a program together.
_routes = Routes("functional", limit=256)


def last_path() -> str:
    """What the last functional call ran: "fused bag", or "torch: " and the reason."""
    return _routes.last_path


def embedding_bag(input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
                  scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
                  include_last_offset: bool = False, padding_idx: int | None = None) -> Tensor:
    """torch.nn.functional.embedding_bag in one fused kernel call, with its signature; see sparselift.nn.EmbeddingBag.

    Parameters
    ----------
    input               (K,) ids with `offsets`, or (B, L) without; int32 or int64
    weight              (R, D); max_norm scales its rows in place
    offsets             (B,), or (B + 1,) with include_last_offset; int32 or int64
    per_sample_weights  of input's shape, for mode "sum"

    Returns
    -------
    (B, D) pooled rows

    Raises
    ------
    IndexError   for an id out of range: names position, id and table size
    ValueError   for offsets that do not start at 0, decrease, pass the number of ids or leave ids in no bag
    TypeError    for ids or offsets that are not int32 or int64
    """
    if weight.dtype == torch.int64 and input.is_floating_point():
        warnings.warn("Argument order of nn.functional.embedding_bag was changed. Usage `embedding_bag(weight, input, ...)` is "
                      "deprecated, and should now be `embedding_bag(input, weight, ...)`.", stacklevel=2)
        weight, input = input, weight
    options = LookupOptions(mode, sparse, padding_idx, include_last_offset, max_norm, norm_type, scale_grad_by_freq)
    return look_up_bags(None if is_compiling() else _routes, input, weight, offsets, per_sample_weights, options)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
              scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    """torch.nn.functional.embedding with its signature, and kernels where they gain; see sparselift.nn.Embedding.

    Parameters
    ----------
    input   (*) ids, int32 or int64
    weight  (R, D); max_norm scales its rows in place

    Returns
    -------
    (*, D) rows

    Raises
    ------
    IndexError       for an id out of range: names position, id and table size
    AssertionError   for a padding_idx out of range, as torch does
    """
    options = LookupOptions("none", sparse, padding_idx, False, max_norm, norm_type, scale_grad_by_freq)
    return look_up_rows(None if is_compiling() else _routes, input, weight, options)


def look_up_bags(routes: Routes | None, input: Tensor, weight: Tensor, offsets: Tensor | None, sample_weights: Tensor | None,
                 options: LookupOptions, names: tuple[str, ...] = NAMES) -> Tensor:
    """Pooled rows (B, D). `routes` holds what was planned before; None: a graph is being compiled or exported."""
    if routes is None:
        if _is_bags(input, weight, offsets, sample_weights, options) and _has_kernels(weight):
            return _in_graph((weight,), input, offsets, sample_weights, options, names)
        return _torch_bags(input, weight, offsets, sample_weights, options)
    reason = unreadable(weight, input, offsets, sample_weights)
    if reason or not _is_bags(input, weight, offsets, sample_weights, options):
        routes.report(reason or "its own checks")
        return _torch_bags(input, weight, offsets, sample_weights, options)
    ids, factors = input, sample_weights
    bags: Tensor | int
    if offsets is not None:
        bags = offsets
    else:
        options = options._replace(include_last_offset=False)
        ids, bags = flat_bags(input)
        factors = None if sample_weights is None else sample_weights.reshape(-1)
    route = routes.find((weight,), names, options, factors is not None)
    if route.lookup is None:
        routes.report(route.reason)
        return _torch_bags(input, weight, offsets, sample_weights, options)
    return routes.run(route, (weight,), (ids,), (bags,), factors)


def look_up_rows(routes: Routes | None, input: Tensor, weight: Tensor, options: LookupOptions, names: tuple[str, ...] = NAMES) -> Tensor:
    """Rows (*, D). `routes` holds what was planned before; None: a graph is being compiled or exported."""
    if routes is None:
        if weight.dim() == 2 and not input.is_nested and _has_kernels(weight):
            return _in_graph((weight,), input, None, None, options, names)
        return _torch_rows(input, weight, options)
    if type(input) is not Tensor or input.is_nested:
        routes.report(f"an argument is a {type(input).__name__}")
        return _torch_rows(input, weight, options)
    # Torch's backward fails for a 0-d id with padding and a sparse gradient.
    plain = weight.dtype in EXACT_DTYPES and options.max_norm is None and not options.scale_grad_by_freq and input.dim()
    # Torch reads rows of ids that have no values, those on the meta device, from memory that it has not written.
    plain = plain and weight.dim() == 2 and input.is_meta is weight.is_meta
    if plain and (options.sparse or input.numel() * weight.shape[1] < FUSED_ELEMENTS):
        routes.report(SPARSE if options.sparse else SMALL)
        padding, rows = -1, weight.shape[0]
        if options.padding_idx is not None:
            padding = options.padding_idx + rows if options.padding_idx < 0 else options.padding_idx
            if not 0 <= padding < rows:
                return _torch_rows(input, weight, options)
        try:
            return torch.embedding(weight, input, padding, False, options.sparse)
        except (IndexError, RuntimeError):
            _name_wrong_id(routes, input, weight, options, names)
            raise
    reason = unreadable(weight, input)
    if not reason:
        route = routes.find((weight,), names, options, False)
        reason = route.reason if route.lookup is None else ""
    if reason:
        routes.report(reason)
        return _torch_rows(input, weight, options)
    return routes.run(route, (weight,), (input.reshape(-1),), (1,), None, (*input.shape, weight.shape[1]))


def look_up_tables(routes: Routes | None, input: Tensor, weights: Sequence[Tensor], offsets: Tensor, sample_weights: Tensor | None,
                   options: LookupOptions, names: tuple[str, ...]) -> Tensor:
    """Pooled rows of T tables side by side, (B, sum of D). `offsets` is (T * B + 1,). See TableBatchedEmbeddingBags."""
    if sample_weights is not None:
        if options.mode != "sum":
            raise ValueError(f"per_sample_weights need mode='sum'; got mode={options.mode!r}")
        if sample_weights.shape != input.shape:
            raise ValueError(f"per_sample_weights must have the shape of indices {tuple(input.shape)}; got {tuple(sample_weights.shape)}")
    if routes is None and all(map(_has_kernels, weights)):
        return _in_graph(weights, input, offsets, sample_weights, options._replace(include_last_offset=True), names)
    reason = unreadable(input, offsets, sample_weights, *weights) if routes is not None else "a graph is compiled for another device"
    if routes is None or reason:
        raise RuntimeError(f"TableBatchedEmbeddingBags splits a batch by the values of its offsets, which cannot be read: {reason}")
    parts, bags = split_tables(input, offsets, names)
    return routes.run(routes.find(weights, names, options, sample_weights is not None), weights, parts, bags, sample_weights)


def flat_bags(input: Tensor) -> tuple[Tensor, Tensor | int]:
    """The ids (B * L,) of bags (B, L), and the length of all bags; or, where it is 0 and tells nothing, their offsets (B,)."""
    count, length = input.shape
    return input.reshape(-1), length or input.new_zeros(count)


def split_tables(indices: Tensor, offsets: Tensor, names: Sequence[str]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The ids of every table, and the (B,) starts of its bags among them."""
    if indices.dim() != 1 or offsets.dim() != 1:
        raise ValueError(f"indices and offsets must have one dimension; got shapes {tuple(indices.shape)} and {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must be int32 or int64; got {offsets.dtype}")
    batch_size, rest = divmod(len(offsets) - 1, len(names))
    if rest or not len(offsets):
        raise ValueError(f"offsets must be T * B + 1 with T = {len(names)} tables; got {len(offsets)}")
    firsts = offsets[:-1].reshape(len(names), batch_size)
    bounds = [*firsts[:, 0].tolist(), int(offsets[-1])] if batch_size else [int(offsets[0])] * (len(names) + 1)
    if bounds[0] != 0 or bounds[-1] != len(indices):
        raise ValueError(f"offsets must go from 0 to the number of indices ({len(indices)}); got {bounds[0]} to {bounds[-1]}")
    lengths = [end - begin for begin, end in zip(bounds, bounds[1:])]
    for name, length, begin in zip(names, lengths, bounds):
        if length < 0:
            raise ValueError(f"feature {name!r}: offsets must not decrease; its ids begin at {begin} and end at {begin + length}")
    return indices.split(lengths), (firsts - firsts[:, :1]).unbind()


def _has_kernels(weight: Tensor) -> bool:
    """Whether the operators of `library` take the table."""
    return weight.device.type == "cpu" and weight.dtype in DTYPES


def _in_graph(weights: Sequence[Tensor], input: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, options: LookupOptions,
              names: tuple[str, ...]) -> Tensor:
    """The lookup as one node of a graph."""
    mode, sparse, padding_idx, last, max_norm, norm_type, by_freq = options
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weights[0].shape[0]
    if max_norm is not None:
        with torch.no_grad():
            torch.ops.sparselift.renorm_(weights[0], input, offsets, sample_weights, mode, last, max_norm, norm_type, names)
    return torch.ops.sparselift.lookup(weights, input, offsets, sample_weights, mode, sparse, padding_idx, last, by_freq, names)


def _is_bags(input: Tensor, weight: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, options: LookupOptions) -> bool:
    """Whether the arguments have the shapes and the mode that torch's function takes; it refuses others in its own words."""
    if offsets is None:
        shaped = input.dim() == 2 and not input.is_nested
    else:
        shaped = input.dim() == 1 and offsets.dim() == 1
    if not shaped or weight.dim() != 2 or options.mode not in ("sum", "mean", "max"):
        return False
    if options.mode == "max" and (options.sparse or options.scale_grad_by_freq):
        return False
    return sample_weights is None or (options.mode == "sum" and sample_weights.shape == input.shape)


def _torch_bags(input: Tensor, weight: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, options: LookupOptions) -> Tensor:
    mode, sparse, padding_idx, last, max_norm, norm_type, by_freq = options
    if (offsets is None and input.dim() == 2 and not input.is_nested and not input.shape[1]
            and (sample_weights is None or sample_weights.shape == input.shape)):
        # Torch fails to make offsets for bags without ids.
        offsets, last = input.new_zeros(input.shape[0], dtype=torch.int64), False
        input, sample_weights = input.reshape(-1), None if sample_weights is None else sample_weights.reshape(-1)
    return functional.embedding_bag(input, weight, offsets, max_norm, norm_type, by_freq, mode, sparse, sample_weights, last, padding_idx)


def _torch_rows(input: Tensor, weight: Tensor, options: LookupOptions) -> Tensor:
    _, sparse, padding_idx, _, max_norm, norm_type, by_freq = options
    return functional.embedding(input, weight, padding_idx, max_norm, norm_type, by_freq, sparse)


def _name_wrong_id(routes: Routes, input: Tensor, weight: Tensor, options: LookupOptions, names: tuple[str, ...]) -> None:
    """Raises the error that the kernels would have raised, where the ids can be read."""
    if not unreadable(weight, input) and (lookup := routes.find((weight,), names, options, False).lookup) is not None:
        check(lookup, weight.shape[:1], (input.reshape(-1),), (1,))
