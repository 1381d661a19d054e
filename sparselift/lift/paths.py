"""Where the tensors of a lookup are found among the arguments of the root forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.ir import InputPath

_MAX_DEPTH = 5
_MAX_TENSORS = 100_000

Keys = tuple[str | int, ...]
Inputs = dict[Any, list[tuple[Keys, Tensor]]]      # by storage


def index_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """Every tensor among the arguments, by the address of its storage."""
    found: Inputs = {}
    for count, (keys, tensor) in enumerate((*walk(args, ("args",)), *walk(kwargs, ("kwargs",)))):
        if count == _MAX_TENSORS:
            break
        found.setdefault(_storage(tensor), []).append((keys, tensor))
    return found


def walk(value: Any, keys: Keys) -> Iterator[tuple[Keys, Tensor]]:
    """(keys, tensor) for every tensor in nested lists, tuples, mappings, dataclasses and objects with attributes."""
    if isinstance(value, Tensor):
        yield keys, value
    elif len(keys) <= _MAX_DEPTH:
        for key, item in _items(value):
            yield from walk(item, (*keys, key))


def _items(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        yield from ((key, item) for key, item in value.items() if type(key) in (str, int))
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in fields(value))
    elif not isinstance(value, (nn.Module, type)) and not callable(value):
        yield from getattr(value, "__dict__", {}).items()


def find(tensor: Tensor, inputs: Inputs) -> list[InputPath]:
    """Every path that gives this tensor: the tensor itself first, then the same view of its memory, then a row or column of an input."""
    candidates = inputs.get(_storage(tensor), [])
    whole = [keys for keys, other in candidates if other is tensor]
    whole += [keys for keys, other in candidates if other is not tensor and same_tensor(other, tensor)]
    paths = [InputPath(keys) for keys in whole]
    for keys, other in candidates:
        paths.extend(InputPath(keys, select) for select in _selects(other, tensor))
    return paths


def holds(path: InputPath, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
    """Whether a path gives this tensor here too."""
    try:
        return same_tensor(path.fetch(args, kwargs), tensor)
    except (LookupError, AttributeError, TypeError, RuntimeError):
        return False


def same_tensor(a: Any, b: Any) -> bool:
    """Whether two tensors are the same view of the same memory."""
    if a is b:
        return True
    return (isinstance(a, Tensor) and isinstance(b, Tensor) and a.layout is b.layout is torch.strided and a.data_ptr() == b.data_ptr()
            and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device)


def _storage(tensor: Tensor) -> Any:
    return (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else id(tensor)


def _selects(whole: Tensor, part: Tensor) -> Iterator[tuple[int, int]]:
    """(dim, index) with whole.select(dim, index) the same view as `part`."""
    if whole.dim() != part.dim() + 1 or whole.dtype != part.dtype or whole.layout is not torch.strided:
        return
    distance = int(part.storage_offset()) - int(whole.storage_offset())
    sizes, strides = tuple(whole.shape), whole.stride()
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if sizes[:dim] + sizes[dim + 1:] == part.shape and strides[:dim] + strides[dim + 1:] == part.stride():
            index, rest = divmod(distance, stride) if stride else (0, distance)
            if not rest and 0 <= index < size:
                yield dim, index
