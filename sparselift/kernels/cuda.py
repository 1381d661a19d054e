"""The CUDA backend: fused bags on a device, by the kernels of csrc/cuda.

Tables, states, ids, gradients and outputs are torch's tensors, or arrays that `arrays.device_tensor` takes, such as cupy's. Work goes to
torch's current stream, or to that of `CudaBackend.on_stream`, and nothing waits for it, but for `coalesced_grad` and `expanded_grad`,
whose results have as many rows as the device says. Ids and boundaries are checked on the device: a fault raises when the host gets to know
of it, in the same call where kernels run at once and by the next step otherwise, or in `CudaProgram.synchronize`. From the fault on, and
until it raised, updates change nothing.

Of a table's knobs `coalesce`, `vector_bytes` and `bags_per_group` alone mean anything here. The lookups of a row are found by a sort, or,
in small tables ("dense"), by the row itself. "chain" is whichever suits the update: no sort where all its tables are small. The bits are
the same. Many warps hide what prefetching would.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, local
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparselift.arrays import as_array, device_tensor, stream_handle, torch_stream
from sparselift.errors import KernelError

from . import checks
from .base import (
    AUTO_SHAPE,
    COALESCE_METHODS,
    POOLINGS,
    UPDATE_RULES,
    WEIGHT_DTYPES,
    BagProgram,
    DeviceFault,
    FeatureSpec,
    IndexBatch,
    KernelBackend,
    KernelShape,
    OutputMemory,
    Segment,
    State,
    TableSpec,
    UpdateRule,
)
from .device_memory import DeviceOutputs, device_memory

CUDA_MODULE = "sparselift.kernels._cuda"
MOST_DENSE_ROWS, MOST_DENSE_COLUMNS = 2048, 2048       # of a table with coalesce="dense", as in csrc/api/sparselift_cuda.h


def extension(module: str = CUDA_MODULE) -> ModuleType:
    """The module of compiled kernels. Raises KernelError where it is not built, or where no kernel can run."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise KernelError(f"the CUDA kernels are not built ({module} cannot be imported: {error}); install nvcc and build them with: "
                          "SPARSELIFT_CUDA=1 pip install -e . --no-build-isolation") from error
    try:
        found.check_device()
    except KernelError as error:
        raise KernelError(f"the CUDA kernels cannot run here: {error}") from None
    return found


def takes_dense(rows: int, dim: int) -> bool:
    """Whether coalesce="dense" takes a table of this size."""
    return rows <= MOST_DENSE_ROWS and dim <= MOST_DENSE_COLUMNS


def is_runnable() -> bool:
    """Whether the kernels are built, and a device is there for them and for torch."""
    try:
        extension()
    except KernelError:
        return False
    return torch.cuda.is_available()


class DeviceIndexError(DeviceFault, IndexError):
    """An id that is no row."""


class DeviceValueError(DeviceFault, ValueError):
    """A wrong bag boundary."""


class CudaBatch(IndexBatch):
    """Ids of one batch in device memory."""

    def __init__(self, program: CudaProgram, raw: Any, memory: Tensor) -> None:
        self.program, self.raw, self.memory = program, raw, memory
        features = range(len(program.features))
        self.num_bags = tuple(raw.num_bags(f) for f in features)
        self.num_lookups = tuple(raw.num_lookups(f) for f in features)

    def indices(self, feature: int) -> Tensor:
        return self.program.read("indices", self, feature, (self.num_lookups[feature],))

    def offsets(self, feature: int) -> Tensor:
        return self.program.read("offsets", self, feature, (self.num_bags[feature] + 1,))

    def maxima(self, feature: int) -> Tensor:
        spec = self.program.features[feature]
        checks.check_max(spec)
        return self.program.read("maxima", self, feature, (self.num_bags[feature], self.program.tables[spec.table].dim))

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


class CudaProgram(BagProgram):
    """Fused bags over tables on one device.

    Calls take turns. What a call reads must stay unchanged until the device has run it, as for any operation of torch.
    """

    def __init__(self, backend: CudaBackend, tables: Sequence[TableSpec], features: Sequence[FeatureSpec],
                 shape: KernelShape | None = None) -> None:
        self.backend, self.tables, self.features, self._shape = backend, tuple(tables), tuple(features), shape
        self._busy = Lock()
        self._workspaces: dict[int, Tensor] = {}               # one a stream
        self._status = self.empty((backend.extension.STATUS_BYTES,), torch.uint8)
        with self._current_device():
            self.raw = backend.extension.Program(
                [(table.rows, table.dim, WEIGHT_DTYPES.index(table.dtype), COALESCE_METHODS.index(table.knobs.coalesce),
                  table.knobs.vector_bytes, table.knobs.bags_per_group) for table in tables],
                [(f.table, POOLINGS.index(f.pooling), f.weighted, f.include_last_offset, -1 if f.padding_idx is None else f.padding_idx)
                 for f in features],
                dataclasses.asdict(shape or backend.shape), self._status.data_ptr(), self.stream())

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaProgram, (self.backend, self.tables, self.features, self._shape)

    @property
    def device(self) -> torch.device:
        return self.backend.device

    def stream(self) -> int:
        """The handle of the stream that calls go to."""
        return self.backend.current_stream()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.backend.memory.empty(shape, dtype, self.stream())

    def synchronize(self) -> None:
        """Wait for what was queued on the current stream. Raises IndexError or ValueError for a fault that the device found."""
        self.backend.synchronize()
        with self._turn():
            pass

    def _tensors(self, what: str, given: Sequence[Any], *, written: bool = False) -> list[Any]:
        """Arrays of others as tensors; what is none is left for the checks."""
        return [source if isinstance(source, Tensor) else device_tensor(f"{what} {position}", source, self.device, written=written)
                for position, source in enumerate(given)]

    def _matrices(self, what: str, given: Any, *, written: bool = False) -> Any:
        """Likewise: one buffer, or one matrix a feature."""
        if isinstance(given, Sequence):
            return self._tensors(f"{what} of feature", given, written=written)
        return device_tensor(f"the {what}", given, self.device, written=written)

    def _space(self, nbytes: int) -> tuple[int, int]:
        """Address and size of the workspace, grown to `nbytes`. Calls of one stream use it one after the other."""
        space = self._workspaces.get(self.stream())
        if space is None or space.nbytes < nbytes:
            space = self._workspaces[self.stream()] = self.empty((nbytes,), torch.uint8)
        return space.data_ptr(), space.nbytes

    def _current_device(self) -> AbstractContextManager[Any]:
        return self.backend.current_device()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time, after what earlier ones found wrong was raised."""
        with self._busy, self._current_device():
            self._raise_fault()
            yield

    def _raise_fault(self) -> None:
        """Raises DeviceIndexError or DeviceValueError for a fault that the device has told of."""
        fault = self.raw.fault()
        if fault is None:
            return
        self.raw.clear_fault(self.stream())
        is_id, feature, position, value, previous, count = fault
        spec = self.features[feature]
        if is_id:
            raise DeviceIndexError(str(checks.id_error(spec, self.tables[spec.table], position, value)))
        raise DeviceValueError(str(checks.offset_error(spec, position, value, previous, count)))

    def read(self, what: str, batch: CudaBatch, feature: int, shape: tuple[int, ...]) -> Tensor:
        """The "indices", "offsets" or "maxima" of a feature, an int64 copy."""
        out = self.empty(shape, torch.int64)
        with self._busy, self._current_device():
            getattr(self.raw, f"read_{what}")(batch.raw, feature, out.data_ptr(), self.stream())
        return out

    def _check_batch(self, batch: IndexBatch) -> CudaBatch:
        if not isinstance(batch, CudaBatch) or batch.program is not self:
            raise ValueError("the batch was not prepared by this program")
        return batch

    # ------------------------------------------------------------------------------------------------ prepare

    def prepare(self, indices: Sequence[Tensor], offsets: Sequence[Tensor | int],
                weights: Sequence[Tensor | None] | None = None) -> CudaBatch:
        weights = [None] * len(self.features) if weights is None else weights
        for what, given in (("indices", indices), ("offsets", offsets), ("weights", weights)):
            checks.check_count(what, "feature", len(given), len(self.features))
        kept: list[Tensor] = []
        inputs = [self._read_feature(*parts, kept) for parts in zip(
            self.features, self._tensors("indices of feature", indices), self._tensors("offsets of feature", offsets),
            self._tensors("weights of feature", weights))]
        with self._turn():
            memory = self.empty((self.raw.batch_bytes(inputs),), torch.uint8)
            batch = self.raw.prepare(inputs, memory.data_ptr(), self.stream())
            self._raise_fault()
        return CudaBatch(self, batch, memory)

    def _read_feature(self, spec: FeatureSpec, indices: Tensor, offsets: Tensor | int, weights: Tensor | None,
                      kept: list[Tensor]) -> tuple[int, ...]:
        """The fields of sl_index_input."""
        checks.check_vector(spec.name, "indices", indices, checks.INDEX_DTYPES, device=self.device)
        checks.check_lookup_count(f"feature {spec.name!r}", len(indices))
        checks.check_weights(spec, weights, len(indices), device=self.device)
        ids = as_array(indices.detach())
        bounds, length = (0, 0, 0, 0), 0
        if isinstance(offsets, int):
            checks.check_bag_length(spec, offsets, len(indices))
            length = offsets
        else:
            checks.check_vector(spec.name, "offsets", offsets, checks.INDEX_DTYPES, device=self.device)
            checks.check_offset_count(spec, len(offsets), len(indices))
            given = as_array(offsets.detach())
            bounds = given.pointer, given.shape[0], given.strides[0], given.dtype == "int64"
        factors = (0, 0)
        if weights is not None:
            kept.append(weights.detach().resolve_neg())
            factors = kept[-1].data_ptr(), kept[-1].stride(0)
        return (ids.pointer, ids.shape[0], ids.strides[0], ids.dtype == "int64", *bounds, length, *factors)

    # ------------------------------------------------------------------------------------------------ forward

    def forward(self, tables: Sequence[Tensor], batch: IndexBatch, out: Tensor | Sequence[Tensor]) -> None:
        tables, out = self._tensors("weight of table", tables), self._matrices("output", out, written=True)
        checks.check_tables(self, tables, device=self.device)
        prepared = self._check_batch(batch)
        outputs = [(output.data_ptr(), output.stride(0)) for output in checks.feature_outputs(self, batch, out, device=self.device)]
        with self._turn():
            space = self._space(self.raw.forward_workspace_bytes(prepared.raw))
            self.raw.forward([as_array(table.detach()).pointer for table in tables], prepared.raw, outputs, *space, self.stream())

    def weight_grad(self, tables: Sequence[Tensor], batch: IndexBatch, feature: int, grad: Tensor) -> Tensor:
        tables, grad = self._tensors("weight of table", tables), device_tensor("the gradient", grad, self.device)
        checks.check_tables(self, tables, device=self.device)
        prepared, spec = self._check_batch(batch), self.features[feature]
        shape = batch.num_bags[feature], self.tables[spec.table].dim
        checks.check_rows(f"gradient of feature {spec.name!r}", grad, shape, device=self.device)
        kept: list[Tensor] = []
        matrix = _matrix(grad, kept)
        out = self.empty((batch.num_lookups[feature],), torch.float32)
        with self._turn():
            self.raw.weight_grad(tables[spec.table].data_ptr(), prepared.raw, feature, matrix, out.data_ptr(), self.stream())
        return out

    # ------------------------------------------------------------------------------------------------ update

    def update(self, tables: Sequence[Tensor | None], states: Sequence[State],
               rules: Sequence[UpdateRule | None], segments: Sequence[Segment]) -> None:
        tables = self._tensors("weight of table", tables, written=True)
        states = [tuple(self._tensors("state", state, written=True)) if isinstance(state, tuple)
                  else device_tensor("the state", state, self.device, written=True) for state in states]
        checks.check_rules(self, states, rules, device=self.device)
        checks.check_tables(self, tables, rules, device=self.device)
        kept: list[Tensor] = []
        read = self._read_segments(segments, kept)
        given = [None if rule is None else (1 + UPDATE_RULES.index(rule.kind), rule.maximize, rule.lr, rule.eps, rule.weight_decay,
                                            *(1 - beta for beta in rule.betas), rule.noise_key is not None, rule.noise_key or 0)
                 for rule in rules]
        weights = [0 if tensor is None or rule is None else tensor.data_ptr() for tensor, rule in zip(tables, rules)]
        with self._turn():
            space = self._space(self.raw.update_workspace_bytes(given, read))
            self.raw.update(weights, [_addresses(state, rule) for state, rule in zip(states, rules)], given, read, *space, self.stream())

    def _read_segments(self, segments: Sequence[Segment], kept: list[Tensor]) -> list[tuple[Any, ...]]:
        read = []
        for segment in segments:
            batch = self._check_batch(segment.batch)
            if not isinstance(segment.grad, Tensor):
                segment = dataclasses.replace(segment, grad=self._matrices("gradient", segment.grad))
            grads = [None if grad is None else _matrix(grad, kept) for grad in checks.feature_grads(self, segment, device=self.device)]
            read.append((batch.raw, grads, segment.scales))
        return read

    def coalesced_grad(self, table: int, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        return self._gradient(table, segments, True)

    def expanded_grad(self, table: int, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        return self._gradient(table, segments, False)

    def _gradient(self, table: int, segments: Sequence[Segment], coalesced: bool) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        read = self._read_segments(segments, kept)
        with self._turn():
            most = self.raw.count_lookups(table, read)
            if coalesced:
                most = min(most, self.tables[table].rows)
            ids, values = self.empty((most,), torch.int64), self.empty((most, self.tables[table].dim), torch.float32)
            total = self.empty((1,), torch.int64)
            space = self._space(self.raw.gradient_workspace_bytes(table, read))
            self.raw.gradient(table, read, coalesced, ids.data_ptr(), values.data_ptr(), total.data_ptr(), *space, self.stream())
        count = int(total)
        return ids[:count], values[:count]


class CudaBackend(KernelBackend):
    """Fused bags on a CUDA device.

    Parameters
    ----------
    device   where tables, ids and gradients are: "cuda" is torch's current device
    shape    how kernels are laid out
    module   the extension: another one runs the same kernels elsewhere, as the tests' emulator does
    memory   whose pools batches, workspaces, results and `pinned` buffers come from: "torch" or "cupy"

    Raises
    ------
    KernelError         the kernels are not built, or no driver or device is there; says which
    MissingExtraError   memory "cupy", and cupy is not installed
    """

    name = "cuda"
    coalesce_methods = ("chain", "sort", "dense")

    def __init__(self, device: str | torch.device = "cuda", shape: KernelShape = AUTO_SHAPE, module: str = CUDA_MODULE,
                 memory: str = "torch") -> None:
        self.shape, self._module, self._pool = shape, module, memory
        self.extension = extension(module)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise KernelError(f"torch {torch.__version__} finds no CUDA device, so there are no tensors for the CUDA kernels")
            self.device = torch.device("cuda", torch.cuda.current_device() if self.device.index is None else self.device.index)
        self.memory = device_memory(memory, self.device)
        self._calling = local()

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaBackend, (self.device, self.shape, self._module, self._pool)

    def current_stream(self) -> int:
        """The handle of the stream that calls of this thread go to."""
        if self.device.type == "cuda":
            return torch.cuda.current_stream(self.device).cuda_stream
        return getattr(self._calling, "stream", 0)

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Calls of this thread inside go to a stream of torch, cupy, or another library with `__cuda_stream__`, or to that of a handle.

        Torch's own operations go there too. The caller keeps the stream for as long as work is on it, and sees to it that what was queued
        on other streams comes before. Raises TypeError or ValueError for what is no stream, or the per-thread default stream.
        """
        handle = stream_handle(stream)
        if self.device.type == "cuda":
            with torch.cuda.stream(torch_stream(handle, self.device)):
                yield
            return
        before, self._calling.stream = self.current_stream(), handle
        try:
            yield
        finally:
            self._calling.stream = before

    def synchronize(self) -> None:
        """Wait for what was queued on the stream that calls of this thread go to."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A host buffer that a device copies from by itself, for ids on their way to it. Stays unchanged until the copy is done."""
        return self.memory.pinned(shape, dtype)

    def compile(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], shape: KernelShape | None = None) -> CudaProgram:
        """`shape` lays out this program's kernels, in place of the backend's. Raises ValueError for one that kernels do not have, too."""
        checks.check_specs(tables, features)
        for table in tables:
            where = f"table {table.name!r}"
            if table.knobs.coalesce not in self.coalesce_methods:
                raise ValueError(f"{where}: coalesce must be one of {', '.join(self.coalesce_methods)} on CUDA, where lookups of one row "
                                 f"run at the same time; got {table.knobs.coalesce!r}")
            if table.knobs.coalesce == "dense" and not self.takes_dense(table):
                raise ValueError(f"{where}: coalesce='dense' takes up to {MOST_DENSE_ROWS} rows of {MOST_DENSE_COLUMNS} columns on CUDA; "
                                 f"got {table.rows} of {table.dim}")
        return CudaProgram(self, tables, features, shape)

    def outputs(self, max_idle_bytes: int = 0) -> OutputMemory:
        """From the backend's pool, which keeps what it likes of what is not used."""
        return DeviceOutputs(self.memory, self.current_stream)

    def current_device(self) -> AbstractContextManager[Any]:
        """Launches inside go to the backend's device, whichever is current."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def takes_dense(self, table: TableSpec) -> bool:
        return takes_dense(table.rows, table.dim)

    def variant(self) -> str:
        """"cuda" and the choices of the shape that differ from the default."""
        chosen = [f"{name}={value}" for name, value in dataclasses.asdict(self.shape).items() if value]
        return "-".join(["cuda", *chosen])


def _matrix(grad: Tensor, kept: list[Tensor]) -> tuple[int, int]:
    """Address and row stride of a (B, D) matrix, copied where its last stride is not 1; `kept` then holds the copy."""
    grad = grad.detach().resolve_neg()
    if grad.shape[1] > 1 and grad.stride(1) != 1:
        grad = grad.contiguous()
    kept.append(grad)
    return grad.data_ptr(), grad.stride(0)


def _addresses(state: State, rule: UpdateRule | None) -> tuple[int, int]:
    """Of the tensors that a rule keeps, 0 for those that it does not."""
    if rule is None or rule.kind == "sgd" or state is None:
        return 0, 0
    first, second = state if isinstance(state, tuple) else (state, None)
    return first.data_ptr(), 0 if second is None else second.data_ptr()
