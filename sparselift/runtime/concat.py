"""Lookups that are written straight into the buffer of the `torch.cat` that consumes them.

The prelude writes all lookups of a concat into one buffer. What the modules hand out are slices of it, of a Tensor
subclass that knows its buffer: `torch.cat` of exactly these slices, in order, is the buffer itself. Any other use of
a slice is an ordinary use of an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_CATS = {torch.cat, torch.concat, torch.concatenate}


class ConcatBuffer:
    """The (B, width) output of one fused call, and how it was laid out for a concat.

    The slices refer to their buffer, never the other way round: a cycle would keep the memory until the next garbage
    collection.
    """

    __slots__ = ("is_lookup", "raw", "result", "whole", "widths")

    def __init__(self, whole: Tensor, raw: Tensor, is_lookup: Sequence[bool], widths: Sequence[int]) -> None:
        """`whole` carries the autograd edge, `raw` is the same memory without; both (B, sum of widths)."""
        self.whole, self.raw, self.is_lookup, self.widths = whole, raw, is_lookup, widths
        self.result: Tensor | None = None

    def slices(self) -> list[Tensor]:
        """One (B, n) tensor a part. Those of lookups are PooledSlices."""
        pieces = self.whole.split(self.widths, 1)
        for place, piece in enumerate(pieces):
            if self.is_lookup[place]:
                piece.__class__ = PooledSlice
                piece._part = self, place
        return list(pieces)

    def joined(self, parts: Sequence[Any]) -> Tensor | None:
        """The concat of `parts`, if it is the one that this buffer was laid out for and nobody has it yet."""
        if self.result is not None or len(parts) != len(self.widths):
            return None
        others: list[Tensor] = []
        for place, part in enumerate(parts):
            if self.is_lookup[place]:
                if type(part) is not PooledSlice or part._part[0] is not self or part._part[1] != place:
                    return None
            elif (type(part) is not Tensor or part.dtype != torch.float32 or not part.is_cpu
                  or part.shape != (len(self.raw), self.widths[place])):
                return None
            else:
                others.append(part)
        self.result = FillConcat.apply(self.raw, self.is_lookup, self.widths, self.whole, *others) if others else self.whole
        return self.result

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the concat was modified in place: a slice would then show the change, where torch's would not."""
        if self.result is not None and self.result._version:
            raise RuntimeError("a lookup's output was used after the torch.cat that consumed it was modified in place; this concat "
                               "shares their memory: tune with deny=('concat',)")


class PooledSlice(Tensor):
    """One lookup's (B, D) columns of a concat buffer."""

    _part: tuple[ConcatBuffer, int]    # the buffer, and the place in its concat

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            parts = args[0] if args else None
            if func in _CATS and isinstance(parts, (list, tuple)) and _dim(args, kwargs) in (1, -1):
                first = next(p for p in parts if type(p) is PooledSlice)
                joined = first._part[0].joined(parts)
                if joined is not None:
                    return joined
            for part in parts if isinstance(parts, (list, tuple)) else args:
                if type(part) is PooledSlice:
                    part._part[0].check_unchanged()
            return func(*args, **(kwargs or {}))


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The dimension of a call of torch.cat; None for a call that has other arguments as well."""
    if not kwargs:
        return args[1] if len(args) == 2 else 0
    return kwargs.get("dim", kwargs.get("axis")) if len(args) == len(kwargs) == 1 else None


class FillConcat(torch.autograd.Function):
    """Copies the parts of a concat that are no lookups into their columns of the buffer."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, is_lookup: Sequence[bool], widths: Sequence[int], whole: Tensor,
                *others: Tensor) -> Tensor:
        ctx.spans, start, remaining = [], 0, iter(others)
        for lookup, width in zip(is_lookup, widths):
            if not lookup:
                raw[:, start:start + width] = next(remaining)
                ctx.spans.append((start, start + width))
            start += width
        return raw.data                         # no view of `whole`: torch.cat's output may be modified in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, grad, *(grad[:, start:stop] for start, stop in ctx.spans)
