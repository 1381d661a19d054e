"""The dot interaction of a concat of lookups, in one kernel where torch runs five operations.

The concat's result, its view as vectors and their transpose are what they are natively, of a Tensor subclass that knows them. At the
product of the vectors the kernel runs: its output is what the forward will have joined two steps later, dense vector and triangle of
products side by side. Until then the products are a tensor without memory. The triangle is a part of the output, and its concat with the
dense vector is the output itself.

Every step is checked. Any other use of the products multiplies them in torch, any other use of the triangle copies it, and anything that
watches gradients on the way leaves everything to torch. So no value and no gradient ever depends on what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map_only

from sparselift.functional.interaction import Interactor, is_lowered
from sparselift.kernels.base import KernelBackend
from sparselift.kernels.interaction import InteractionSpec
from sparselift.lift.products import MULTIPLICATIONS, TRANSPOSES, VIEWS, flips, name_pairs, picked_pairs, stacks
from sparselift.ops import nobody_watches
from sparselift.runtime._hot import version_of
from sparselift.runtime.tensors import PlainCopies

_CATS = {torch.cat, torch.concat, torch.concatenate}
_FACTS = {getattr(Tensor, name).__get__ for name in ("device", "dtype", "layout", "ndim", "shape")} | {
    Tensor.dim, Tensor.numel, Tensor.size, Tensor.is_floating_point, Tensor.__len__}
_VIEW_FACTS = {getattr(Tensor, name).__get__ for name in ("_version", "is_cpu", "is_leaf", "requires_grad")} | {
    Tensor.stride, Tensor.is_contiguous, Tensor.data_ptr}
_WATCHES = {Tensor.register_hook, Tensor.retain_grad, getattr(Tensor, "grad_fn").__get__,      # noqa: B009  # a descriptor to us alone
            torch.autograd.grad, torch.autograd.backward}
_REMEDY = "tune with deny=('fuse_interaction',)"


class Crossing:
    """The interaction of one group of lookups: what all its forwards share.

    Attributes
    ----------
    name    of the ir.Interaction
    spec    what it computes
    calls   outputs handed out
    report  called with (name, why) for a forward that went another way
    """

    def __init__(self, name: str, spec: InteractionSpec, backend: str | KernelBackend) -> None:
        self.name, self.spec = name, spec
        self.interactor = Interactor(spec, backend)
        self.calls = 0
        self.report: Callable[[str, str], None] | None = None
        self._open = False                                   # a concat was handed out, and neither an output nor a report came of it
        self._pairs = spec.pairs()

    def __str__(self) -> str:
        return (f"{self.name}: products of {self.spec.num_vectors} vectors in one kernel, straight into the next layer's input: "
                f"{self.calls} times")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": False}

    def start(self, whole: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The result of the concat of `parts`, followed from now on."""
        self._open = True
        return _follow_from(whole, _Whole(self, parts[self.spec.passed or 0], version_of(whole)))

    def finish(self) -> None:
        """The forward is over."""
        self.aside("the forward did not go on to the recorded interaction")

    def aside(self, why: str) -> None:
        if self._open:
            self._open = False
            if self.report is not None:
                self.report(self.name, why)

    def served(self) -> None:
        self._open, self.calls = False, self.calls + 1

    def names_pairs(self, rows: Tensor, columns: Tensor) -> bool:
        """Whether an index picks the recorded pairs. Compared anew in every forward: it costs less than to know that nobody wrote to it."""
        return name_pairs(self._pairs, rows, columns)


class _Whole:
    """The concat of a forward, (B, V * D)."""

    def __init__(self, crossing: Crossing, dense: Tensor, version: int) -> None:
        self.crossing, self.dense, self.version = crossing, dense, version
        self.dense_version, self.dense_has_grad = version_of(dense), dense.requires_grad
        self.grad_mode = torch.is_grad_enabled()
        self.spoiled = ""                                    # why the interaction is torch's
        self.crossed = self.picked = self.joined = False     # how far the kernel's output has come

    @property
    def is_passed_by(self) -> bool:
        """Whether the gradient goes past this tensor."""
        return self.crossed

    def step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in VIEWS:
            return self.other(func, args, kwargs)
        whole, result = args[0], func(*args, **kwargs)
        spec = self.crossing.spec
        if type(whole) is Followed and stacks(result, spec.num_vectors * spec.dim, spec.dim):
            return _follow_from(result, _Vectors(self, whole))
        return result

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any use that is no step of the interaction. Values are torch's own; only who watches gradients must find torch's graph."""
        self.watch(func)
        return func(*args, **kwargs)

    def watch(self, func: Any) -> None:
        """Leave the interaction to torch, because of this use. Raises RuntimeError for one that comes too late."""
        if func in _FACTS or func in _VIEW_FACTS:
            return
        if self.crossed:
            refuse_late(func)
        self.spoiled = self.spoiled or f"its input was used by {_name(func)} as well"

    def obstacle(self) -> str:
        """Why the kernel may not run now; empty: it may."""
        if self.spoiled:
            return self.spoiled
        if self.grad_mode != torch.is_grad_enabled():
            return "gradients were switched on or off between its steps"
        if is_lowered():
            return "autocast multiplies in a smaller dtype"
        if not nobody_watches():
            return "torch's own operations are being watched"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "hooks for saved tensors (checkpointing, offloading) are active"
        return ""


class _Vectors:
    """Its view, (B, V, D)."""

    def __init__(self, root: _Whole, whole: Tensor) -> None:
        self.root, self.whole = root, whole

    @property
    def is_passed_by(self) -> bool:
        return self.root.crossed

    def step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in MULTIPLICATIONS and len(args) == 2 and not kwargs:
            return self._multiply(func, *args)
        if func in TRANSPOSES and type(args[0]) is Followed:
            result = func(*args, **kwargs)
            return _follow_from(result, _Flipped(self, args[0])) if flips(result, args[0]) else result
        return self.root.other(func, args, kwargs)

    def _multiply(self, func: Any, left: Any, right: Any) -> Any:
        root = self.root
        flipped = right._place if type(right) is Followed else None
        if type(left) is not Followed or left._place is not self or not isinstance(flipped, _Flipped) or flipped.vectors is not left:
            return root.other(func, (left, right), {})
        if root.crossed:
            return func(left, right)
        why = root.obstacle() or ("" if version_of(self.whole) == root.version else "its input was modified in place")
        if why:
            root.crossing.aside(why)
            return func(left, right)
        root.crossed = True
        return Products.of(root, left, right, root.crossing.interactor(self.whole))


class _Flipped:
    """The same, (B, D, V)."""

    def __init__(self, owner: _Vectors, vectors: Tensor) -> None:
        self.owner, self.vectors = owner, vectors

    @property
    def is_passed_by(self) -> bool:
        return self.owner.root.crossed

    def step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.owner.root.other(func, args, kwargs)


class _Triangle:
    """The picked products, (B, P): the columns of the output behind the dense vector."""

    def __init__(self, root: _Whole, output: Tensor) -> None:
        self.root, self.output, self.version = root, output, version_of(output)
        self.own: Tensor | None = None                       # what is used instead for anything but the concat

    @property
    def is_passed_by(self) -> bool:
        return self.root.joined

    def step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _FACTS:
            return func(*args, **kwargs)
        root = self.root
        if self.own is None and func in _CATS and _dim(args, kwargs) in (1, -1) and self._joins(args[0]):
            root.joined = True
            root.crossing.served()
            return self.output
        if root.joined:
            refuse_late(func)
        root.crossing.aside(f"its products were used by {_name(func)}")
        args, kwargs = tree_map_only(Followed, lambda tensor: tensor._place.apart(tensor) if type(tensor._place) is _Triangle else tensor,
                                     (args, kwargs))
        return func(*args, **kwargs)

    def _joins(self, parts: Any) -> bool:
        """Whether these are the dense vector, as it was when the concat of the lookups took it, and this triangle."""
        root = self.root
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or parts[0] is not root.dense:
            return False
        if type(parts[1]) is not Followed or parts[1]._place is not self or root.joined:
            return False
        return (version_of(root.dense) == root.dense_version and root.dense.requires_grad == root.dense_has_grad
                and torch.is_grad_enabled() == root.grad_mode and version_of(self.output) == self.version and nobody_watches())

    def apart(self, tensor: Tensor) -> Tensor:
        """A tensor of its own, as torch's index gives one."""
        if self.own is None:
            if version_of(self.output) != self.version:
                raise RuntimeError("the products of an interaction were used after the torch.cat that took them was modified in place; "
                                   + _REMEDY)
            with torch.set_grad_enabled(self.root.grad_mode):
                self.own = tensor.clone(memory_format=torch.contiguous_format)
        return self.own


class Followed(PlainCopies):
    """A tensor with memory and values of its own, on the way to an interaction."""

    _place: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kwargs = kwargs or {}
            if is_dynamo_compiling():
                return func(*args, **kwargs)
            followed = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is Followed]
            # A triangle first: it alone is not what it natively is.
            first = next((each for each in followed if type(each._place) is _Triangle), followed[0] if followed else None)
            return func(*args, **kwargs) if first is None else first._place.step(func, args, kwargs)


class Products(Tensor):
    """Products (B, V, V) that nobody has made: torch makes them for whoever wants to see one that is not among the recorded pairs."""

    _root: _Whole
    _factors: tuple[Tensor, Tensor]
    _output: Tensor
    _made: Tensor | None

    @staticmethod
    def of(root: _Whole, vectors: Tensor, flipped: Tensor, output: Tensor) -> Products:
        products: Products = _Unmade.apply(vectors, flipped)
        products._root, products._factors, products._output, products._made = root, (vectors, flipped), output, None
        return products

    def made(self) -> Tensor:
        """By torch, as at the time of the product, and from then on."""
        if self._made is None:
            with torch.set_grad_enabled(self._root.grad_mode):
                self._made = self.multiplied()
        return self._made

    def multiplied(self) -> Tensor:
        """By torch, now."""
        if version_of(self._factors[0]) != self._root.version:
            raise RuntimeError(f"the products of an interaction were used after its input was modified in place; {_REMEDY}")
        return torch.bmm(*self._factors)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kwargs = kwargs or {}
            if func in _FACTS:
                return func(*args, **kwargs)
            if func is Tensor.__getitem__ and type(args[0]) is Products and args[0]._made is None:
                triangle = args[0]._picked(args[1])
                if triangle is not None:
                    return triangle
            if any(leaf._root.picked for leaf in tree_leaves((args, kwargs)) if type(leaf) is Products):
                refuse_late(func)
            args, kwargs = _replaced(Products.made, args, kwargs, func)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (),  # type: ignore[override]
                           kwargs: dict[str, Any] | None = None) -> Any:
        # Below autograd: what is made here has no graph, and is not kept for those who need one.
        args, kwargs = _replaced(Products.multiplied, args, kwargs or {}, func)
        return func(*args, **kwargs)

    def _picked(self, index: Any) -> Tensor | None:
        root, pairs = self._root, picked_pairs(index)
        if pairs is None or not root.crossing.names_pairs(*pairs) or torch.is_grad_enabled() != root.grad_mode or not nobody_watches():
            return None
        root.picked = True
        return _follow_from(self._output[:, root.crossing.spec.dim:], _Triangle(root, self._output))


def _replaced(make: Callable[[Products], Tensor], args: Any, kwargs: Any, user: Any) -> Any:
    def replace(products: Products) -> Tensor:
        products._root.crossing.aside(f"its products were used by {_name(user)}")
        return make(products)

    return tree_map_only(Products, replace, (args, kwargs))


class _Unmade(torch.autograd.Function):
    """Products without memory, with the gradient of torch.bmm for code that takes them past `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, flipped: Tensor) -> Products:
        ctx.save_for_backward(vectors, flipped)
        batch, count, _ = vectors.shape
        return torch.Tensor._make_wrapper_subclass(Products, (batch, count, count), dtype=vectors.dtype, device=vectors.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        vectors, flipped = ctx.saved_tensors
        return torch.bmm(grad, flipped.transpose(1, 2)), torch.bmm(vectors.transpose(1, 2), grad)


def use_as_inputs(inputs: Any) -> None:
    """Notice tensors of interactions whose gradients are asked for. Raises RuntimeError where those went past them."""
    for tensor in tree_leaves(inputs):
        if type(tensor) is Products or (type(tensor) is Followed and tensor._place.is_passed_by):
            raise _late("asking for the gradient")


def refuse_late(func: Any) -> None:
    """Raises RuntimeError for a use that would need gradients which do not come by any more."""
    if func in _WATCHES or getattr(func, "__name__", "") == "__set__":
        raise _late(_name(func))


def _late(what: str) -> RuntimeError:
    return RuntimeError(f"{what} on a tensor between a concat of lookups and their interaction came after one kernel had made both; "
                        + _REMEDY)


def _follow_from(tensor: Any, place: Any) -> Tensor:
    tensor.__class__ = Followed
    tensor._place = place
    return tensor


def _name(func: Any) -> str:
    """A torch function's name for people; a property's getter or setter is a method of the property's descriptor."""
    name = getattr(func, "__name__", str(func))
    return f"Tensor.{func.__self__.__name__}" if name == "__get__" else name


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dimension of a call of torch.cat; None for a call that has other arguments as well."""
    if not kwargs:
        return args[1] if len(args) == 2 else 0
    return kwargs.get("dim", kwargs.get("axis")) if len(args) == len(kwargs) == 1 else None
