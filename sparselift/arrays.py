"""Where the elements of a tensor lie in memory, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Array:
    """Plain memory: element [i, j, ...] is at pointer + itemsize * (i * strides[0] + j * strides[1] + ...)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]   # in elements
    dtype: str
    device: str                # "cpu", "cuda:0" ...


def as_array(source: Any) -> Array:
    """The memory of a torch tensor, or of anything that speaks DLPack (numpy, cupy ...), without a copy.

    The caller keeps `source` alive for as long as the pointer is used.

    Raises
    ------
    TypeError   `source` is neither, or has no plain memory: sparse, meta or fake tensors, lazy conjugates and negatives
    """
    if not isinstance(source, torch.Tensor):
        if not hasattr(source, "__dlpack__"):
            raise TypeError(f"a torch tensor or an object with __dlpack__ is needed; got {type(source).__name__}")
        source = torch.from_dlpack(source)
    plain = source.layout is torch.strided and source.device.type != "meta" and not source.is_neg() and not source.is_conj()
    if not plain:
        raise TypeError(f"a {source.layout} tensor on {source.device} has no plain memory")
    return Array(source.data_ptr(), tuple(source.shape), tuple(source.stride()), dtype_name(source.dtype), str(source.device))
