"""Names of element types, as plans and specs write them."""

from __future__ import annotations

import torch

ITEMSIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1}


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """torch.float32 for "float32". Raises ValueError for a name that is none."""
    if name not in ITEMSIZES:
        raise ValueError(f"a dtype must be one of {', '.join(ITEMSIZES)}; got {name!r}")
    return getattr(torch, name)


def itemsize(name: str) -> int:
    """Bytes of one element. Raises ValueError for a name that is none."""
    return torch_dtype(name).itemsize
