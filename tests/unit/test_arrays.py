from __future__ import annotations

import numpy as np
import pytest
import torch

from sparselift.arrays import as_array
from sparselift.dtypes import ITEMSIZES, dtype_name, itemsize, torch_dtype


@pytest.mark.parametrize("tensor", [
    torch.zeros(3, 4), torch.zeros(3, 4).t(), torch.arange(10)[3::2], torch.nn.Parameter(torch.zeros(5)), torch.zeros(0, 4),
    torch.tensor(1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.bfloat16),
])
def test_a_torch_tensor(tensor):
    array = as_array(tensor)
    assert array.pointer == tensor.data_ptr() and array.shape == tuple(tensor.shape) and array.strides == tensor.stride()
    assert array.dtype == dtype_name(tensor.dtype) and array.device == "cpu"


def test_what_speaks_dlpack():
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = as_array(numbers)
    assert array.pointer == numbers.ctypes.data and array.shape == (3, 4) and array.strides == (4, 1) and array.dtype == "float32"


@pytest.mark.parametrize("source", [
    [1, 2], torch.zeros(3, device="meta"), torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.complex64).conj(),
    torch.zeros(3, dtype=torch.complex64).conj().imag,
])
def test_what_has_no_plain_memory(source):
    with pytest.raises(TypeError, match=r"needed; got list|has no plain memory"):
        as_array(source)


@pytest.mark.parametrize("name", ITEMSIZES)
def test_names_of_dtypes(name):
    assert dtype_name(torch_dtype(name)) == name
    assert itemsize(name) == ITEMSIZES[name] == torch.empty(1, dtype=torch_dtype(name)).element_size()


def test_an_unknown_dtype():
    with pytest.raises(ValueError, match=r"must be one of float32, .*; got 'float31'"):
        torch_dtype("float31")
