"""Where the tensors of a lookup are found among the arguments of the root forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.ir import InputPath

_MAX_DEPTH = 5
_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})

Keys = tuple[str | int, ...]


class Inputs:
    """The tensors among the arguments of one forward."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._views: dict[Any, list[tuple[Keys, Tensor]]] = {}       # by memory and layout
        self._matrices: dict[Any, list[tuple[Keys, Tensor]]] = {}    # of more than one dimension, by storage
        for keys, tensor in chain(_walk(args, ("args",)), _walk(kwargs, ("kwargs",))):
            self._views.setdefault(_view(tensor), []).append((keys, tensor))
            if tensor.dim() > 1 and tensor.layout is torch.strided:
                self._matrices.setdefault(_storage(tensor), []).append((keys, tensor))

    def find(self, tensor: Tensor) -> Iterator[InputPath]:
        """Every path that gives this tensor: itself first, then the same view of its memory, then a row or column of an input."""
        views = self._views.get(_view(tensor), [])
        for itself in (True, False):
            yield from (InputPath(keys) for keys, other in views if (other is tensor) is itself)
        for keys, matrix in self._matrices.get(_storage(tensor), []) if tensor.layout is torch.strided else ():
            yield from (InputPath(keys, select) for select in _selects(matrix, tensor))


def _walk(value: Any, keys: Keys) -> Iterator[tuple[Keys, Tensor]]:
    """(keys, tensor) for every tensor in nested lists, tuples, mappings, dataclasses and objects with attributes."""
    if isinstance(value, Tensor):
        yield keys, value
    elif len(keys) <= _MAX_DEPTH:
        for key, item in _items(value):
            if type(item) not in _SCALARS:
                yield from _walk(item, (*keys, key))


def _items(value: Any) -> Iterable[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return [(key, item) for key, item in value.items() if type(key) in (str, int)]
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    if isinstance(value, (nn.Module, type)) or callable(value):
        return ()
    return list(getattr(value, "__dict__", {}).items())


def holds(path: InputPath, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
    """Whether a path gives this tensor here too."""
    try:
        return same_tensor(path.fetch(args, kwargs), tensor)
    except (LookupError, AttributeError, TypeError, RuntimeError):
        return False


def same_tensor(a: Any, b: Any) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and _view(a) == _view(b))


def _view(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _storage(tensor: Tensor) -> Any:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _selects(whole: Tensor, part: Tensor) -> Iterator[tuple[int, int]]:
    """(dim, index) with whole.select(dim, index) the same view as `part`."""
    if whole.dim() != part.dim() + 1 or whole.dtype != part.dtype:
        return
    distance = int(part.storage_offset()) - int(whole.storage_offset())
    sizes, strides = tuple(whole.shape), whole.stride()
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if sizes[:dim] + sizes[dim + 1:] == part.shape and strides[:dim] + strides[dim + 1:] == part.stride():
            index, rest = divmod(distance, stride) if stride else (0, distance)
            if not rest and 0 <= index < size:
                yield dim, index
