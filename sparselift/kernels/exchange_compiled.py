"""What surrounds an exchange, compiled: one face of the C ABIs of the CPU and of CUDA, which take addresses alone."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparselift.arrays import as_array, device_tensor
from sparselift.errors import ExchangeError, KernelError

from .cpu import ISAS, CpuBackend
from .cuda import CudaBackend
from .exchange import Buckets, Distinct, ExchangeKernels, RowOwners
from .packed import WIRE_DTYPES, PackedLayout
from .regroup import RegroupSpec

CPU_MODULE = "sparselift.kernels._exchange"


class CompiledExchange(ExchangeKernels):
    """Tensors to addresses. Structs of the ABI whose fields are all of 64 bits are arrays of integers here."""

    @abstractmethod
    def _call(self, name: str, sizes: tuple[int, ...], *args: object) -> None:
        """One function of the ABI; `sizes` are what its workspace depends on."""

    def _dedup(self, ids: Tensor, rows: int, found: Distinct) -> None:
        self._call("dedup", (len(ids),), *_ids(ids, rows), found.ids.data_ptr(), found.slots.data_ptr(), found.count.data_ptr())

    def _bucketize(self, ids: Tensor, offsets: Tensor, owners: RowOwners, found: Buckets) -> None:
        self._call("bucketize", (len(ids),), *_ids(ids, owners.rows),
                   as_array(offsets).pointer, len(offsets) - 1, offsets.dtype == torch.int64,
                   owners.count, owners.rows_per_owner, owners.layout == "modulo",
                   *(out.data_ptr() for out in (found.rows, found.sources, found.places, found.lengths)))

    def _pack(self, layout: PackedLayout, matrices: Sequence[Tensor], out: Tensor) -> None:
        parts = _parts(layout, matrices)
        self._call("pack", (len(matrices),), _address(parts), len(matrices), out.data_ptr(), out.numel())
        _count_write([out])

    def _unpack(self, layout: PackedLayout, buffer: Tensor, outputs: Sequence[Tensor]) -> None:
        parts = _parts(layout, outputs)
        self._call("unpack", (len(outputs),), _address(parts), len(outputs), buffer.data_ptr(), buffer.numel())
        _count_write(outputs)

    def _regroup(self, spec: RegroupSpec, backward: bool, batch: int, given: Sequence[Tensor | None],
                 results: Sequence[Tensor | None]) -> None:
        ranges, terms = _ranges(spec, backward)
        sources, targets = _matrices(given), _matrices(results)
        num_ranges, num_terms = len(ranges) // 5, len(terms) // 2
        self._call("regroup", (num_ranges, num_terms), _address(ranges), num_ranges, _address(terms), num_terms, _address(sources),
                   _address(targets), batch)
        _count_write(results)


class CpuExchange(CompiledExchange):
    """On the CPU, on torch's own threads.

    Parameters
    ----------
    isa   as of CpuBackend, and raises as that does
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, isa: str | None = None) -> None:
        self.isa = CpuBackend(isa).isa
        try:
            self._raw = import_module(CPU_MODULE)
        except ImportError as error:
            raise KernelError(f"the compiled extension {CPU_MODULE} is missing ({error}); "
                              "build it with: pip install -e . --no-build-isolation") from error
        self._number = ISAS.index(self.isa)

    def __reduce__(self) -> tuple[Any, ...]:
        return CpuExchange, (self.isa,)

    def _call(self, name: str, sizes: tuple[int, ...], *args: object) -> None:
        getattr(self._raw, name)(*args, self._number, torch.get_num_threads())


class CudaExchange(CompiledExchange):
    """On a CUDA device, by the kernels of csrc/cuda: on the stream, and in the memory, of a backend. Tensors may be arrays that
    `arrays.device_tensor` takes, such as cupy's.

    Parameters
    ----------
    backend   None: CudaBackend(), and raises as that does
    """

    name = "cuda"

    def __init__(self, backend: CudaBackend | None = None) -> None:
        self.backend = CudaBackend() if backend is None else backend
        self.device, self._raw = self.backend.device, self.backend.extension
        self._status = self._empty(self._raw.STATUS_BYTES, torch.uint8)
        with self.backend.current_device():
            self._fault = self._raw.BufferFault(self._status.data_ptr(), self.backend.current_stream())

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaExchange, (self.backend,)

    def dedup(self, ids: Any, rows: int) -> Distinct:
        return super().dedup(self._tensor("ids", ids), rows)

    def bucketize(self, ids: Any, offsets: Any, owners: RowOwners) -> Buckets:
        return super().bucketize(self._tensor("ids", ids), self._tensor("offsets", offsets), owners)

    def pack(self, layout: PackedLayout, matrices: Sequence[Any], out: Any = None) -> Tensor:
        return super().pack(layout, self._tensors("matrices", matrices), self._tensor("the buffer", out, written=True))

    def unpack(self, layout: PackedLayout, buffer: Any, outputs: Sequence[Any]) -> None:
        super().unpack(layout, self._tensor("the buffer", buffer), self._tensors("outputs", outputs, written=True))

    def regroup(self, spec: RegroupSpec, sources: Sequence[Any], outputs: Sequence[Any]) -> None:
        super().regroup(spec, self._tensors("sources", sources), self._tensors("outputs", outputs, written=True))

    def regroup_backward(self, spec: RegroupSpec, grads: Sequence[Any], source_grads: Sequence[Any]) -> None:
        super().regroup_backward(spec, self._tensors("grads", grads), self._tensors("source_grads", source_grads, written=True))

    def _tensor(self, what: str, given: Any, *, written: bool = False) -> Any:
        return device_tensor(what, given, self.device, written=written)

    def _tensors(self, what: str, given: Sequence[Any], *, written: bool = False) -> list[Any]:
        return [self._tensor(f"{what}[{place}]", array, written=written) for place, array in enumerate(given)]

    def _empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.backend.memory.empty((shape,) if isinstance(shape, int) else shape, dtype, self.backend.current_stream())

    def _call(self, name: str, sizes: tuple[int, ...], *args: object) -> None:
        with self.backend.current_device():
            space = self._empty(getattr(self._raw, f"{name}_workspace_bytes")(*sizes), torch.uint8)
            getattr(self._raw, name)(*args, space.data_ptr(), space.nbytes, self.backend.current_stream())

    def _unpack(self, layout: PackedLayout, buffer: Tensor, outputs: Sequence[Tensor]) -> None:
        self._raise_fault()
        parts = _parts(layout, outputs)
        self._call("unpack", (len(outputs),), _address(parts), len(outputs), buffer.data_ptr(), buffer.numel(), self._fault)
        _count_write(outputs)
        self._raise_fault()

    def synchronize(self) -> None:
        self.backend.synchronize()
        self._raise_fault()

    def _raise_fault(self) -> None:
        """Raises ExchangeError for a header that the device has told of."""
        with self.backend.current_device():
            text = self._fault.take(self.backend.current_stream())
        if text is not None:
            raise ExchangeError(text)


def _count_write(tensors: Sequence[Tensor | None]) -> None:
    """Let torch know of writes that it has not seen. Inference tensors count none."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None and not tensor.is_inference()])


def _ids(ids: Tensor, rows: int) -> tuple[int, int, bool, int]:
    return as_array(ids).pointer, len(ids), ids.dtype == torch.int64, rows


def _parts(layout: PackedLayout, matrices: Sequence[Tensor]) -> array[int]:
    """sl_part of every matrix."""
    flat = array("q")
    for part, matrix in zip(layout.parts, matrices):
        place = as_array(matrix)
        flat.extend((place.pointer, place.strides[0], part.rows, part.dim, WIRE_DTYPES.index(part.dtype)))
    return flat


def _matrices(given: Sequence[Tensor | None]) -> array[int]:
    """sl_matrix of every one."""
    flat = array("q")
    for matrix in given:
        place = None if matrix is None else as_array(matrix)
        flat.extend((0, 0) if place is None else (place.pointer, place.strides[0]))
    return flat


@lru_cache(maxsize=256)
def _ranges(spec: RegroupSpec, backward: bool) -> tuple[array[int], array[int]]:
    """sl_range of every range, and sl_term of every term."""
    ranges, terms = array("q"), array("q")
    for part in spec.backward_ranges() if backward else spec.forward_ranges():
        ranges.extend((part.matrix, part.column, part.width, len(terms) // 2, len(part.terms)))
        for term in part.terms:
            terms.extend(term)
    return ranges, terms


def _address(flat: array[int]) -> int:
    return flat.buffer_info()[0]
