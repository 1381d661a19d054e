"""Lookups that are written straight into the buffer of the `torch.cat` that consumes them.

The prelude writes all lookups of a concat into one buffer. What the modules hand out are slices of it, of a Tensor
subclass that knows its buffer: `torch.cat` of exactly these slices, in order, is the buffer itself. A slice that was used
for anything else before makes it an ordinary `torch.cat`; one that is used afterwards is copied first. So no value, no
hook and no saved tensor ever depends on memory that something else may write to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map_only

from sparselift.runtime._hot import are_labelled, label, version_of
from sparselift.runtime.interaction import Crossing
from sparselift.runtime.tensors import PlainCopies

_CATS = {torch.cat, torch.concat, torch.concatenate}
_FACTS = {getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_leaf", "layout", "ndim", "requires_grad", "shape")} | {
    Tensor.dim, Tensor.numel, Tensor.size, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.__len__}
_WATCHES = {Tensor.register_hook, Tensor.retain_grad, getattr(Tensor, "grad_fn").__get__}      # noqa: B009  # a descriptor to us alone
_VIEWS = {Tensor.view, Tensor.view_as}      # of a contiguous tensor, which every lookup's output natively is
_INPUTS = {torch.autograd.grad: 1, torch.autograd.backward: 5, Tensor.backward: 4}      # where they take what gradients are asked for


class ConcatLayout:
    """Where the parts of a concat lie in its buffer.

    Attributes
    ----------
    widths     (parts,) columns of each
    is_lookup  (parts,) whether it is one of the fused lookups
    dtype      of the result; lookups may be narrower
    lookups    (lookups,) their places
    others     (place, first column, width) of each part that is none
    """

    __slots__ = ("dtype", "is_lookup", "lookups", "others", "widths")

    def __init__(self, widths: Sequence[int], is_lookup: Sequence[bool], dtype: torch.dtype) -> None:
        self.widths, self.is_lookup, self.dtype = tuple(widths), tuple(is_lookup), dtype
        self.lookups = tuple(place for place, is_one in enumerate(is_lookup) if is_one)
        starts = (0, *accumulate(widths))
        self.others = tuple((place, starts[place], width) for place, width in enumerate(widths) if not is_lookup[place])


class Uses:
    """What became of the slices of one buffer.

    Attributes
    ----------
    apart    whether a slice was used by something that is no concat, so that this concat copies, and some slices may get no gradient
    reached  of these, places that a gradient arrived at
    """

    __slots__ = ("apart", "reached")

    def __init__(self) -> None:
        self.apart = False
        self.reached: set[int] = set()

    def watch(self, part: Tensor, place: int) -> None:
        """Notice a gradient of a slice. Its columns of the whole's gradient are zero either way."""
        self.apart = True
        if part.requires_grad:
            part.register_hook(partial(self._arrived, place))

    def _arrived(self, place: int, grad: Tensor | None) -> None:
        if grad is not None:
            self.reached.add(place)


class ConcatBuffer:
    """The (B, width) output of one fused call, laid out for a concat.

    The slices refer to their buffer, never the other way round: a cycle would keep the memory until the next garbage
    collection.
    """

    __slots__ = ("crossing", "layout", "raw", "result", "uses", "version", "watched", "whole", "wide")

    def __init__(self, whole: Tensor, raw: Tensor, wide: Tensor | None, layout: ConcatLayout, uses: Uses,
                 crossing: Crossing | None = None) -> None:
        """`whole` carries the autograd edge, `raw` is the same memory without; both (B, sum of widths). `wide`: memory for the result,
        where lookups are narrower. `crossing`: where it goes.
        """
        self.whole, self.raw, self.wide, self.layout, self.uses, self.crossing = whole, raw, wide, layout, uses, crossing
        self.result: Tensor | None = None
        self.version = 0                    # of the result, when it was handed out
        self.watched: set[int] = set()      # slices whose gradients are

    def slices(self) -> list[Tensor]:
        """One (B, n) tensor a lookup."""
        # No views for autograd: a module's output may be modified in place, which torch forbids for the views that `split` makes.
        pieces = self.whole.unsafe_split_with_sizes(self.layout.widths, 1)
        return label(pieces, self.layout.is_lookup, PooledSlice, self)

    def joined(self, parts: Sequence[Any]) -> Tensor | None:
        """The concat of `parts`, if it is the one that this buffer was laid out for and nobody has it or its slices yet."""
        if self.uses.apart or self.result is not None or not are_labelled(parts, self.layout.is_lookup, PooledSlice, self):
            return None
        if not self.layout.others:
            self.result, self.version = self.whole, version_of(self.whole)
            return self.result
        others = [parts[place] for place, _, _ in self.layout.others]
        for part, (_, _, width) in zip(others, self.layout.others):
            if type(part) is not Tensor or part.dtype != self.layout.dtype or not part.is_cpu or part.shape != (len(self.raw), width):
                return None
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:      # which ask for more than values
            return None
        self.result = FillConcat.apply(self.raw, self.wide, self.layout, self.whole, *others)
        self.version = version_of(self.result)
        return self.result if self.crossing is None else self.crossing.start(self.result, parts)

    def watch(self, part: PooledSlice) -> None:
        """Notice a use that is no concat, and the gradient that comes from it."""
        place = part._part[1]
        if place not in self.watched:
            self.watched.add(place)
            self.uses.watch(part, place)

    def lend(self, part: PooledSlice, copies: dict[int, tuple[Tensor, int]]) -> Tensor:
        """The slice for a use that is no concat: itself before the concat, one and the same copy after it."""
        own = part.__dict__.get("_own")
        if self.result is None:
            self.watch(part)
            return part if own is None else own
        if own is None:
            if version_of(self.result) != self.version:
                raise RuntimeError("a lookup's output was used after the torch.cat that consumed it was modified in place; " + _SHARED)
            own = part.leave()
        copies[id(part)] = own, own._version
        return own


_SHARED = "this concat shares its memory: tune with deny=('concat',)"


class PooledSlice(PlainCopies):
    """One lookup's (B, D) columns of a concat buffer."""

    _part: tuple[ConcatBuffer, int]    # the buffer, and the place in its concat
    _own: Tensor                       # what is used instead after the concat

    def leave(self) -> Tensor:
        """A contiguous copy that is used instead from now on."""
        # Another use may want its gradient, and be checked for writes.
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
            self._own = self.clone(memory_format=torch.contiguous_format)
        return self._own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _CATS and args and isinstance(args[0], (list, tuple)) and _dim(args, kwargs) in (1, -1):
                first = next((part for part in args[0] if type(part) is PooledSlice), None)
                joined = None if first is None else first._part[0].joined(args[0])
                if joined is not None:
                    return joined
            return func(*args, **(kwargs or {})) if func in _FACTS else _use(func, args, kwargs or {})


def _use(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on slices as if they were tensors of their own. Raises RuntimeError where they no longer can be."""
    copies: dict[int, tuple[Tensor, int]] = {}
    if func in _VIEWS and type(args[0]) is PooledSlice:
        buffer = args[0]._part[0]
        if buffer.result is None and "_own" not in args[0].__dict__:
            buffer.watch(args[0])
            args[0].leave()
    if func in _INPUTS:
        use_as_inputs(args[_INPUTS[func]] if len(args) > _INPUTS[func] else kwargs.get("inputs"))
    args, kwargs = tree_map_only(PooledSlice, lambda part: part._part[0].lend(part, copies), (args, kwargs))
    if copies and (func in _WATCHES or getattr(func, "__name__", "") == "__set__"):
        raise _late(func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__)
    result = func(*args, **kwargs)
    if any(copy._version != before for copy, before in copies.values()):
        raise RuntimeError("a lookup's output was modified in place after the torch.cat that consumed it; " + _SHARED)
    return result


def use_as_inputs(inputs: Any) -> None:
    """Notice slices whose gradients are asked for. Raises RuntimeError after their concat, which took the gradient's way past them."""
    for part in tree_leaves(inputs):
        if type(part) is PooledSlice:
            buffer = part._part[0]
            if buffer.result is not None:
                raise _late("asking for the gradient")
            buffer.watch(part)


def _late(what: str) -> RuntimeError:
    return RuntimeError(f"{what} on a lookup's output came after the torch.cat that consumed it; {_SHARED}")


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The dimension of a call of torch.cat; None for a call that has other arguments as well."""
    if not kwargs:
        return args[1] if len(args) == 2 else 0
    return kwargs.get("dim", kwargs.get("axis")) if len(args) == len(kwargs) == 1 else None


class FillConcat(torch.autograd.Function):
    """Copies the parts of a concat that are no lookups into their columns of the buffer; of a wider one, the lookups as well."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, wide: Tensor | None, layout: ConcatLayout, whole: Tensor, *others: Tensor) -> Tensor:
        ctx.layout = layout
        if wide is not None:
            raw = wide.copy_(raw)
        for part, (_, start, width) in zip(others, layout.others):
            raw[:, start:start + width] = part
        return raw.data                         # no view of `whole`: torch.cat's output may be modified in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The lookups never read these columns: who writes there does not modify their gradient. Narrower lookups get it in their dtype:
        # autograd converts gradients to that of what they are for.
        columns = grad if torch.is_grad_enabled() else grad.data
        return None, None, None, grad, *(columns[:, start:start + width] for _, start, width in ctx.layout.others)
