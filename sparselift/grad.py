"""The gradient of a lifted table: a tensor that stands for lookups whose gradient rows have not been summed yet.

A lifted table's `.grad` is a `PendingGrad`. It has the layout that torch's own gradient would have and answers every
operation as that gradient would, by computing it when asked (`materialise`). What a training loop asks often is answered
without that: norm, scaling, zeroing. The fused update in `optimizer.step()` reads the pending list itself.

No write is ever lost: an operation that writes to the gradient, or hands out an alias of it, computes the real gradient
once and keeps it; from then on the pending gradient is that tensor. What would change its shape raises: the shape is the handle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparselift.kernels.base import BagProgram, Segment

aten = torch.ops.aten


class Arrival:
    """The gradient of one backward of a program, for all its tables.

    `place` is each table's position by name. `owners` are the modules that hold the tables of the whole model, by table: one mapping a
    model, so that it also tells whose gradient this is. `task` tells the runs of torch's engine apart.
    """

    __slots__ = ("program", "segment", "place", "owners", "task")

    def __init__(self, program: BagProgram, segment: Segment, place: Mapping[str, int], owners: Mapping[str, nn.Module],
                 task: int) -> None:
        self.program, self.segment, self.place, self.owners, self.task = program, segment, place, owners, task

    def scaled(self, table: int, scale: float) -> Segment:
        """The segment as kernels take it, one table's gradient times `scale`. Raises RuntimeError if it was written to since."""
        self.segment.check_unchanged()
        if scale == 1.0:
            return self.segment
        scales = [1.0] * len(self.program.tables)
        scales[table] = scale
        return Segment(self.segment.batch, self.segment.grad, scales)


class GradState:
    """What a pending gradient stands for, in the table's dtype; shared by the aliases of a dense one that `detach` hands out.

    Either `value` is None and the gradient is the sum of what arrived, each times its scale (1 if `scales` is None), or `value`
    is the gradient and `arrived` is empty. Tables that got their gradients from the same backwards share one tuple. `origin` is what a
    sparse one was detached from.
    """

    __slots__ = ("table", "shape", "sparse", "dtype", "arrived", "scales", "value", "origin", "__weakref__")

    def __init__(self, table: str, shape: tuple[int, int], sparse: bool, dtype: torch.dtype) -> None:
        self.table, self.shape, self.sparse, self.dtype = table, shape, sparse, dtype
        self.arrived: tuple[Arrival, ...] = ()
        self.scales: tuple[float, ...] | None = None
        self.value: Tensor | None = None
        self.origin: GradState | None = None

    def detached(self) -> GradState:
        """What torch's `detach` gives: for a dense gradient the same memory; a sparse one shares values until either is written to."""
        if not self.sparse:
            return self
        other = GradState(self.table, self.shape, True, self.dtype)
        other.arrived, other.scales, other.origin = self.arrived, self.scales, self
        other.value = None if self.value is None else self.value.detach()
        return other

    def clear(self) -> None:
        self.arrived, self.scales, self.value = (), None, None

    def replace(self, value: Tensor) -> None:
        """Be this tensor from now on."""
        self.arrived, self.scales, self.value = (), None, value

    def add(self, arrival: Arrival) -> None:
        """Accumulate one backward's gradient, as AccumulateGrad does."""
        if self.value is None:
            self.arrived = (*self.arrived, arrival)
            self.scales = self.scales and (*self.scales, 1.0)
        else:
            self.value = accumulated(self.value, self._native((arrival,), None))

    def tensor(self) -> Tensor:
        """The gradient as torch would hold it; not kept."""
        return self._native(self.arrived, self.scales) if self.value is None else self.value

    def keep(self) -> Tensor:
        """The gradient as torch would hold it; what is written to it is the gradient from now on."""
        if self.value is None:
            origin = self.origin
            if origin is not None and origin.value is None and (origin.arrived, origin.scales) == (self.arrived, self.scales):
                self.replace(origin.keep().detach())
            else:
                self.replace(self.tensor())
        assert self.value is not None
        return self.value

    def scale(self, factor: float) -> bool:
        """Multiply by `factor` without computing anything. False if that would differ from what torch gives."""
        if self.value is not None:
            return False
        if factor == 1.0:                                     # a gradient that needed no clipping
            return True
        if self.scales is not None or not (self.sparse or math.isfinite(factor)):
            return False                                      # it would round once less; an untouched row of a dense gradient becomes NaN
        self.scales = (factor,) * len(self.arrived)
        return True

    def clamp(self, low: float, high: float) -> bool:
        """Clamp a sparse gradient as torch clamps the dense one. False if that is not sparse, or if torch clamps it itself."""
        if not self.sparse or not low <= 0 <= high:
            return False
        grad = self.coalesced_tensor().coalesce()
        grad.values().clamp_(low, high)
        self.replace(grad)
        return True

    def coalesced_tensor(self) -> Tensor:
        """The gradient with every row once, as torch's `coalesce` gives it but for the order of the sums. For sparse tables."""
        if self.value is not None:
            return self.value
        rows, values = self._coalesced(self.arrived, self.scales)
        return torch.sparse_coo_tensor(rows[None], values, self.shape, check_invariants=False, is_coalesced=True)

    def coalesced_values(self) -> Tensor:
        """(U, D) gradient rows, each row of the table at most once; or the whole dense gradient."""
        if self.value is not None:
            return self.value.coalesce().values() if self.value.is_sparse else self.value
        return self._coalesced(self.arrived, self.scales)[1]

    def _segments(self, arrived: Sequence[Arrival], scales: Sequence[float] | None) -> list[Segment]:
        return [a.scaled(a.place[self.table], scale) for a, scale in zip(arrived, scales or (1.0,) * len(arrived))]

    def _coalesced(self, arrived: Sequence[Arrival], scales: Sequence[float] | None) -> tuple[Tensor, Tensor]:
        """(U,) int64 rows, ascending, and (U, D) sums, made in float32 and then rounded to the table's dtype."""
        if not arrived:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.shape[1], dtype=self.dtype)
        program = arrived[0].program
        if all(a.program is program for a in arrived):
            rows, sums = program.coalesced_grad(arrived[0].place[self.table], self._segments(arrived, scales))
            return rows, self._rounded(sums)
        grad = self._expanded(arrived, scales).coalesce()
        return grad.indices()[0], self._rounded(grad.values())

    def _expanded(self, arrived: Sequence[Arrival], scales: Sequence[float] | None) -> Tensor:
        """COO, uncoalesced, a row a lookup. Several backwards are added as torch adds them, which sums some rows and not others.

        In float32, whatever the table's dtype: torch cannot add sparse float16 tensors.
        """
        total: Tensor | None = None                # of the engine's runs before
        run: Tensor | None = None                  # of this one
        for place, (arrival, segment) in enumerate(zip(arrived, self._segments(arrived, scales))):
            rows, values = arrival.program.expanded_grad(arrival.place[self.table], [segment])
            part = torch.sparse_coo_tensor(rows[None], values, self.shape, check_invariants=False)
            run = part if run is None else part + run
            if place + 1 == len(arrived) or arrived[place + 1].task != arrival.task:
                total, run = run if total is None else accumulated(total, run), None
        if total is not None:
            return total
        return torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, self.shape[1], dtype=torch.float32), self.shape,
                                       check_invariants=False)

    def _native(self, arrived: Sequence[Arrival], scales: Sequence[float] | None) -> Tensor:
        """The gradient that torch's autograd would have accumulated: COO if sparse, else (R, D)."""
        if self.sparse:
            return self._rounded(self._expanded(arrived, scales))
        rows, values = self._coalesced(arrived, scales)
        dense = torch.zeros(self.shape, dtype=self.dtype)
        dense[rows] = values
        return dense

    def _rounded(self, sums: Tensor) -> Tensor:
        """Float32 sums in the table's dtype. torch takes as long to find that there is nothing to do as for a few rows."""
        return sums if self.dtype is torch.float32 else sums.to(self.dtype)


def accumulated(grad: Tensor, new: Tensor) -> Tensor:
    """What torch's AccumulateGrad makes of a gradient that is there and one that arrives: in place, unless the layout forbids it."""
    return new + grad if grad.is_sparse and not new.is_sparse else grad.add_(new)


class PendingGrad(Tensor):
    """The `.grad` of a lifted table. See the module's page; everything that torch's gradient answers, it answers."""

    _state: GradState

    @staticmethod
    def __new__(cls, state: GradState) -> PendingGrad:
        layout = torch.sparse_coo if state.sparse else torch.strided
        self = torch.Tensor._make_wrapper_subclass(cls, state.shape, dtype=state.dtype,
                                                         device=torch.device("cpu"), layout=layout)
        self._state = state
        return self

    def __init__(self, state: GradState) -> None:
        super().__init__()

    @property
    def state(self) -> GradState:
        return self._state

    @property
    def data(self) -> Tensor:
        return PendingGrad(self._state.detached())

    @data.setter
    def data(self, new: Tensor) -> None:
        if isinstance(new, PendingGrad):
            if new._state is not self._state:
                self._state.replace(new._state.keep().detach())
        else:
            Tensor.data.__set__(self, new)                    # type: ignore[attr-defined]  # dtype, say; refuses another layout
            self._state.replace(new.detach())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._state.tensor())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._state.tensor().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._state.tensor().clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (),  # type: ignore[override]
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        handler = LAZY_OPERATIONS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _run_on_real(func, args, kwargs)


def _memory_method(name: str) -> Callable[..., Any]:
    def method(grad: PendingGrad, *args: Any, **kwargs: Any) -> Any:
        return getattr(grad._state.keep(), name)(*args, **kwargs)
    return method


# These reach for memory past __torch_dispatch__; what is written there is the gradient's.
for _name in ("numpy", "__array__", "tolist", "data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__"):
    setattr(PendingGrad, _name, _memory_method(_name))


def _run_on_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the real gradients; keep those that it writes to or aliases."""
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(f"{func} on the gradient of a lifted table: its shape and strides are fixed; assign the result to .grad")
    touched: dict[int, PendingGrad] = {}
    real_args, real_kwargs = list(args), dict(kwargs)
    for position, argument in enumerate(func._schema.arguments):
        holder: Any = real_args if position < len(args) else real_kwargs
        place: Any = position if position < len(args) else argument.name
        if position < len(args) or argument.name in kwargs:
            convert = partial(_real, kept=argument.alias_info is not None, touched=touched)
            holder[place] = tree_map_only(PendingGrad, convert, holder[place])
    result = func(*real_args, **real_kwargs)
    if not any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        return result
    for grad in touched.values():
        if grad._state.value is not None and grad._state.value.shape != grad.shape:
            raise RuntimeError(f"{func} gave the gradient of the lifted table {grad._state.table}, {tuple(grad.shape)}, the shape "
                               f"{tuple(grad._state.value.shape)}; assign a new tensor to .grad instead")
    # A mutating operation returns its argument: give back the gradient that stands for it.
    return tree_map_only(Tensor, lambda tensor: touched.get(id(tensor), tensor), result)


def _real(grad: PendingGrad, kept: bool, touched: dict[int, PendingGrad]) -> Tensor:
    tensor = grad._state.keep() if kept else grad._state.tensor()
    touched[id(tensor)] = grad
    return tensor


def _each(func: Any) -> Callable[..., Any]:
    """A foreach operation as one call a tensor: torch's own has no kernel for sparse gradients, and ours need none."""
    def run(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(argument, Tensor) and argument.dim() for argument in args):
            return NotImplemented                             # one number for all is what it takes
        results = [func(tensor, *args, **kwargs) for tensor in tensors]
        return None if func._schema.is_mutable else results
    return run


def _vector_norm(grad: PendingGrad, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    # An untouched row adds nothing to a norm of positive order, so the distinct rows' gradients have the gradient's norm.
    if not isinstance(grad, PendingGrad) or dim is not None or keepdim or ord <= 0:
        return NotImplemented
    values = grad._state.coalesced_values()
    if not values.numel() and math.isinf(ord):
        return torch.zeros((), dtype=dtype or values.dtype)
    return torch.linalg.vector_norm(values, ord, dtype=dtype)


def _norm(grad: PendingGrad, p: float = 2) -> Any:
    return _vector_norm(grad, 2 if p is None else p)


def _scale(grad: PendingGrad, factor: Any) -> Any:
    if not isinstance(grad, PendingGrad):
        return NotImplemented
    if isinstance(factor, Tensor):
        if factor.dim() or factor.dtype not in (torch.float32, grad._state.dtype):
            return NotImplemented
        factor = factor.item()
    if not isinstance(factor, (int, float)):
        return NotImplemented
    return grad if grad._state.scale(float(factor)) else NotImplemented


def _clamp(grad: PendingGrad, min: Any = None, max: Any = None) -> Any:
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    if not isinstance(grad, PendingGrad) or (min is None and max is None) or not isinstance(low, (int, float)) \
            or not isinstance(high, (int, float)):
        return NotImplemented
    return grad if grad._state.clamp(low, high) else NotImplemented


def _clamp_max(grad: PendingGrad, max: Any) -> Any:
    return _clamp(grad, None, max)


def _zero(grad: PendingGrad) -> PendingGrad:
    state = grad._state
    if state.value is None or state.value.is_sparse:
        state.clear()
    else:
        state.value.zero_()                                   # somebody may hold a view
    return grad


def _detach(grad: PendingGrad) -> PendingGrad:
    return PendingGrad(grad._state.detached())


def _itself(grad: PendingGrad) -> PendingGrad:
    return grad


# What is answered without computing the gradient. A handler that gives NotImplemented leaves the case to the gradient itself.
LAZY_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten._foreach_norm.Scalar: _each(aten.linalg_vector_norm.default),
    aten.clamp_.default: _clamp,
    aten.clamp_min_.default: _clamp,
    aten.clamp_max_.default: _clamp_max,
    aten._foreach_mul_.Tensor: _each(aten.mul_.Tensor),
    aten._foreach_mul_.Scalar: _each(aten.mul_.Scalar),
    aten._foreach_clamp_min_.Scalar: _each(aten.clamp_min_.default),
    aten._foreach_clamp_max_.Scalar: _each(aten.clamp_max_.default),
    aten._foreach_zero_.default: _each(aten.zero_.default),
    aten.zero_.default: _zero,
    aten.detach.default: _detach,
    aten.detach_.default: _itself,
}
