"""Pooled columns, permuted into groups: KeyedTensor.regroup as one differentiable operator, `sparselift::regroup`, eager and compiled.

It is linear, so that the gradient of its gradient, `sparselift::regroup_backward`, is the operator itself. Specs cross torch.library as
flat lists of integers. Letters in shapes: B bags, S sources, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from sparselift.errors import DtypeError, KernelError
from sparselift.kernels import get_exchange
from sparselift.kernels.checks import check_count, check_instance
from sparselift.kernels.exchange import ExchangeKernels, RegroupSpec
from sparselift.kernels.exchange_reference import regroup_in_torch

from .interaction import is_plain

_SPEC = "int[] widths, int[] source_sizes, int[] features, int[] group_sizes"


def regroup(sources: Sequence[Tensor], spec: RegroupSpec) -> list[Tensor]:
    """The columns of pooled features, permuted and concatenated into groups, in one call. What
    `[torch.cat([columns[f] for f in group], 1) for group in spec.groups]` gives for the columns of all features of all sources.

    A feature may be in several groups: its gradient is then their sum, by group and position. One in no group gets zeros. Gradients can be
    differentiated again.

    Parameters
    ----------
    sources   S matrices (B, width of the source), such as the outputs of lookups; float32 on the CPU run in a kernel, others in torch
    spec      `RegroupSpec.of_keys(keys, widths, groups)`: what the sources hold, by name, and which features each group has

    Returns
    -------
    G new matrices (B, width of the group)

    Raises
    ------
    ValueError   another number of sources, none, or shapes that are not the spec's
    TypeError    anything but tensors and a RegroupSpec; DtypeError, a TypeError: several dtypes
    """
    check_instance("spec", spec, RegroupSpec)
    check_count("sources", "source of the spec", len(sources), len(spec.sources))
    if not sources:
        raise ValueError("sources must hold at least one matrix, whose rows are the batch; got none")
    for place, (source, width) in enumerate(zip(sources, spec.source_widths)):
        check_instance(f"sources[{place}]", source, Tensor)
        if source.dim() != 2 or source.shape[1] != width or source.shape[0] != sources[0].shape[0]:
            raise ValueError(f"sources[{place}] must have shape (B, {width}), with the B of all; got {tuple(source.shape)} beside "
                             f"{tuple(sources[0].shape)}")
        if source.dtype != sources[0].dtype:
            raise DtypeError(f"sources must have one dtype; got {sources[0].dtype} and {source.dtype}")
        if source.device != sources[0].device:
            raise TypeError(f"sources must be on one device; got {sources[0].device} and {source.device}")
    return regroup_op(list(sources), *_flat(spec))


def _flat(spec: RegroupSpec) -> tuple[list[int], list[int], list[int], list[int]]:
    return (list(spec.widths), [len(source) for source in spec.sources], list(chain.from_iterable(spec.groups)),
            [len(group) for group in spec.groups])


@lru_cache(maxsize=256)
def _spec(widths: tuple[int, ...], source_sizes: tuple[int, ...], features: tuple[int, ...], group_sizes: tuple[int, ...]) -> RegroupSpec:
    """Inverse of `_flat`."""
    return RegroupSpec(*(tuple(flat[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0)))
                         for flat, sizes in ((widths, source_sizes), (features, group_sizes))))


@lru_cache(maxsize=1)
def _kernels() -> ExchangeKernels | None:
    try:
        return get_exchange("cpu")
    except KernelError:                # not built: torch's operations are as right
        return None


@torch.library.custom_op("sparselift::regroup", mutates_args=(), schema=f"(Tensor[] sources, {_SPEC}) -> Tensor[]")
def regroup_op(sources: Sequence[Tensor], *flat: Sequence[int]) -> list[Tensor]:
    """See `regroup`."""
    spec = _spec(*map(tuple, flat))
    outputs = [sources[0].new_empty((len(sources[0]), width)) for width in spec.group_widths]
    kernels = _kernels()
    if kernels is not None and all(map(is_plain, sources)):
        kernels.regroup(spec, sources, outputs)
    else:
        regroup_in_torch(spec, False, sources, outputs)
    return outputs


@regroup_op.register_fake
def _(sources: Sequence[Tensor], *flat: Sequence[int]) -> list[Tensor]:
    return [sources[0].new_empty((sources[0].shape[0], width)) for width in _spec(*map(tuple, flat)).group_widths]


@torch.library.custom_op("sparselift::regroup_backward", mutates_args=(), schema=(
    f"(Tensor[] grads, bool[] present, bool[] wanted, {_SPEC}) -> Tensor[]"))
def regroup_backward_op(grads: Sequence[Tensor], present: Sequence[bool], wanted: Sequence[bool], *flat: Sequence[int]) -> list[Tensor]:
    """The gradients of the wanted sources, from those of the groups that have one."""
    spec = _spec(*map(tuple, flat))
    given = spread(grads, present)
    results = [grads[0].new_empty((len(grads[0]), width)) if want else None for width, want in zip(spec.source_widths, wanted)]
    kernels = _kernels()
    if kernels is not None and all(map(is_plain, grads)):
        kernels.regroup_backward(spec, given, results)
    else:
        regroup_in_torch(spec, True, given, results)
    return [result for result in results if result is not None]


@regroup_backward_op.register_fake
def _(grads: Sequence[Tensor], present: Sequence[bool], wanted: Sequence[bool], *flat: Sequence[int]) -> list[Tensor]:
    return [grads[0].new_empty((grads[0].shape[0], width))
            for width, want in zip(_spec(*map(tuple, flat)).source_widths, wanted) if want]


def spread(tensors: Sequence[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    """One entry a flag: the next of the tensors, or None."""
    left = iter(tensors)
    return [next(left) if here else None for here in present]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    sources, *ctx.flat = inputs
    ctx.wanted = [source.requires_grad for source in sources]


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    given = [grad for grad in grads if grad is not None]
    found: list[Tensor | None] = [None] * len(ctx.wanted)
    if given:
        found = spread(regroup_backward_op(given, [grad is not None for grad in grads], ctx.wanted, *ctx.flat), ctx.wanted)
    return found, *(None for _ in ctx.flat)


def _remember_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.present, ctx.wanted, *ctx.flat = inputs


def _differentiate_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    given = next((grad for grad in grads if grad is not None), None)
    if given is None:
        return [None] * sum(ctx.present), None, None, *(None for _ in ctx.flat)
    widths = _spec(*map(tuple, ctx.flat)).source_widths
    left = iter(grads)
    sources = [next(left) if want else None for want in ctx.wanted]
    full = [given.new_zeros((given.shape[0], width)) if source is None else source for source, width in zip(sources, widths)]
    outputs = regroup_op(full, *ctx.flat)
    return [output for output, here in zip(outputs, ctx.present) if here], None, None, *(None for _ in ctx.flat)


regroup_op.register_autograd(_differentiate, setup_context=_remember)
regroup_backward_op.register_autograd(_differentiate_backward, setup_context=_remember_backward)
