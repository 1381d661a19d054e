"""What surrounds an exchange of rows between ranks: distinct ids, ids by owner, rows of many matrices in one buffer, and pooled columns by
consumer. The contract of every backend; `exchange_reference` is the same in plain torch.

Letters in shapes: K ids, B bags, W owners (ranks), N parts of a packed buffer.

Every backend has the same bits, at any number of threads, but for NaNs: those of float32 may differ in their payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparselift.errors import ExchangeError

from .checks import INDEX_DTYPES, check_count, check_instance, check_kind, check_lookup_count, check_rows, check_whole
from .overlap import check_apart
from .packed import ALIGNMENT, WIRE_DTYPES, PackedLayout, PackedPart
from .regroup import RegroupSpec

__all__ = ["LAYOUTS", "WIRE_DTYPES", "Buckets", "Distinct", "ExchangeKernels", "PackedLayout", "PackedPart", "RegroupSpec", "RowOwners"]

LAYOUTS = ("block", "modulo")
MAX_OWNERS = 65_535                        # blocks of one dimension of a CUDA grid


@dataclass(frozen=True, slots=True)
class Distinct:
    """The distinct ids among K."""

    ids: Tensor                # (K,) int64: the first `count` are the distinct ids, ascending; what follows means nothing
    slots: Tensor              # (K,) int32: which of them each id is; -1 for an id that is no row
    count: Tensor              # () int64, on the device: to read it there waits for it

    def trimmed(self) -> Tensor:
        """The distinct ids alone. Waits for a device."""
        return self.ids[:int(self.count)]


@dataclass(frozen=True, slots=True)
class RowOwners:
    """Which of `count` ranks owns each row of a table that is sharded by rows.

    Attributes
    ----------
    rows     R of the table, below 2^63
    count    W, 1 to 65,535
    layout   "block": owner r has rows [r * n, (r + 1) * n) with n = ceil(R / W), as row-wise sharding has them. "modulo": row i is row
             i // W of owner i % W

    Raises ValueError for anything else, and TypeError for numbers that are not whole.
    """

    rows: int
    count: int
    layout: str = "block"

    def __post_init__(self) -> None:
        check_whole("the number of rows", self.rows)
        check_whole("the number of owners", self.count)
        if not 0 <= self.rows < 2**63 or not 1 <= self.count <= MAX_OWNERS:
            raise ValueError(f"owners must be 1 to {MAX_OWNERS}, of 0 to 2**63 - 1 rows; got {self.count} of {self.rows}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {self.layout!r}")

    @property
    def rows_per_owner(self) -> int:
        """The most that one of them has; at least 1."""
        return max(-(-self.rows // self.count), 1)

    def owner_of(self, ids: Tensor) -> Tensor:
        """W where the id is no row."""
        owners = ids % self.count if self.layout == "modulo" else ids // self.rows_per_owner
        return torch.where((ids >= 0) & (ids < self.rows), owners, self.count)

    def row_of(self, ids: Tensor) -> Tensor:
        """Among the rows of its owner; -1 where the id is no row."""
        rows = ids // self.count if self.layout == "modulo" else ids % self.rows_per_owner
        return torch.where((ids >= 0) & (ids < self.rows), rows, -1)


@dataclass(frozen=True, slots=True)
class Buckets:
    """K ids by owner, bag and position. Ids that are no row come last, and no owner has them."""

    rows: Tensor               # (K,) int64: each id as a row of its owner; -1 for what is no row
    sources: Tensor            # (K,) int32: its position among the given ids: x[sources] goes with `rows`, such as per-sample weights
    places: Tensor             # (K,) int32: where each given id has gone: y[places] takes rows that came back to the given order
    lengths: Tensor            # (W, B) int32: how many ids each owner has of each bag


class ExchangeKernels(ABC):
    """The operations on tensors of one device. Keeps nothing of its arguments; any thread may call it.

    Work on a CUDA device goes to the current stream of its backend, and nothing waits for it but where that is said.
    Arguments raise ValueError, TypeError and DtypeError as `checks` does: wrong shapes, dtypes, devices, counts. What is written must be
    apart in memory from all else that a call is given (ValueError), and counts as written to: autograd notices.
    """

    name: str
    device: torch.device

    def dedup(self, ids: Tensor, rows: int) -> Distinct:
        """The distinct ids among (K,) int32 or int64 ids of a table of `rows` rows, such as those of all its features, one after the other.

        Ids outside of [0, rows) are left out. K is at most 2^31 - 1; rows may be more than int32 holds.
        """
        ids = self._ids(ids)
        check_whole("rows", rows)
        if not 0 <= rows < 2**63:
            raise ValueError(f"rows must be in 0..2**63 - 1; got {rows}")
        found = Distinct(self._empty(len(ids), torch.int64), self._empty(len(ids), torch.int32), self._empty((), torch.int64))
        self._dedup(ids, rows, found)
        return found

    def bucketize(self, ids: Tensor, offsets: Tensor, owners: RowOwners) -> Buckets:
        """The ids (K,) of B bags by owner. `offsets` (B + 1,) int32 or int64: bag b has ids [offsets[b], offsets[b + 1]).

        Offsets must begin at 0, not decrease, and end at K: ValueError. On a CUDA device, which nothing waits for, that is the caller's to
        answer for: `lengths` then mean nothing, and nothing worse happens.
        """
        ids = self._ids(ids)
        check_instance("owners", owners, RowOwners)
        check_kind("offsets", offsets, INDEX_DTYPES, device=self.device)
        if offsets.dim() != 1 or not len(offsets):
            raise ValueError(f"offsets must have one dimension, and one more entry than there are bags; got shape {tuple(offsets.shape)}")
        found = Buckets(self._empty(len(ids), torch.int64), self._empty(len(ids), torch.int32), self._empty(len(ids), torch.int32),
                        self._empty((owners.count, len(offsets) - 1), torch.int32))
        self._bucketize(ids, offsets.contiguous(), owners, found)
        return found

    def pack(self, layout: PackedLayout, matrices: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """The rows of N float32 matrices in one buffer (nbytes,) uint8, header included. All of its bytes are written.

        `out`: a contiguous uint8 tensor of at least `layout.nbytes`, at a multiple of 16 bytes; the buffer is its beginning.
        """
        self._check_matrices("matrices", layout, matrices)
        rows = [_with_unit_columns(matrix.detach()) for matrix in matrices]
        out = self._empty(layout.nbytes, torch.uint8) if out is None else out
        self._check_buffer(out)
        if out.numel() < layout.nbytes:
            raise ValueError(f"the buffer must have at least {layout.nbytes} bytes; got {out.numel()}")
        check_apart([("the buffer", out[:layout.nbytes])], _named("matrices", rows))
        self._pack(layout, rows, out)
        return out[:layout.nbytes]

    def unpack(self, layout: PackedLayout, buffer: Tensor, outputs: Sequence[Tensor]) -> None:
        """The rows of a buffer into N float32 matrices with last stride 1, such as columns of whatever reads them.

        Raises
        ------
        ExchangeError   the buffer is shorter than the layout, or its header is not the layout's; says which field. Nothing is written. On a
                        CUDA device, which nothing waits for, a wrong header raises when the host gets to know of it, by the next call
                        that unpacks or by `synchronize`; parts whose own entry is right may have been written
        """
        self._check_matrices("outputs", layout, outputs)
        for place, output in enumerate(outputs):
            _check_unit_columns(f"outputs[{place}]", output)
        self._check_buffer(buffer)
        if buffer.numel() < layout.nbytes:
            raise ExchangeError(f"a buffer of these parts has {layout.nbytes} bytes; got {buffer.numel()}")
        check_apart(_named("outputs", outputs), [("the buffer", buffer[:layout.nbytes])])
        self._unpack(layout, buffer, [output.detach() for output in outputs])

    def synchronize(self) -> None:                              # noqa: B027 -- where nothing is left to wait for, nothing is done
        """Waits for the device, and raises what an `unpack` before found wrong."""

    def regroup(self, spec: RegroupSpec, sources: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Fill float32 `outputs` (B, width of the group), last strides 1, with columns of `sources` (B, width of the source)."""
        check_instance("spec", spec, RegroupSpec)
        batch = _batch_of((*sources, *outputs))
        self._check_groups("sources", spec.source_widths, sources, batch)
        self._check_groups("outputs", spec.group_widths, outputs, batch, written=True)
        given = [_with_unit_columns(source.detach()) for source in sources]
        check_apart(_named("outputs", outputs), _named("sources", given))
        self._regroup(spec, False, batch, given, [out.detach() for out in outputs])

    def regroup_backward(self, spec: RegroupSpec, grads: Sequence[Tensor | None], source_grads: Sequence[Tensor | None]) -> None:
        """Fill the gradients of the sources from those of the outputs: of every feature the sum over its uses, by group and position, with
        one float32 rounding an addition; zeros for one without a use. None among `grads`: zeros, not added; among `source_grads`: not
        wanted."""
        check_instance("spec", spec, RegroupSpec)
        batch = _batch_of((*grads, *source_grads))
        self._check_groups("grads", spec.group_widths, grads, batch, optional=True)
        self._check_groups("source_grads", spec.source_widths, source_grads, batch, written=True, optional=True)
        given = [None if grad is None else _with_unit_columns(grad.detach()) for grad in grads]
        check_apart(_named("source_grads", source_grads), _named("grads", given))
        self._regroup(spec, True, batch, given, [None if grad is None else grad.detach() for grad in source_grads])

    # ------------------------------------------------------------------------------------------------ what a backend writes

    @abstractmethod
    def _dedup(self, ids: Tensor, rows: int, found: Distinct) -> None: ...

    @abstractmethod
    def _bucketize(self, ids: Tensor, offsets: Tensor, owners: RowOwners, found: Buckets) -> None: ...

    @abstractmethod
    def _pack(self, layout: PackedLayout, matrices: Sequence[Tensor], out: Tensor) -> None: ...

    @abstractmethod
    def _unpack(self, layout: PackedLayout, buffer: Tensor, outputs: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def _regroup(self, spec: RegroupSpec, backward: bool, batch: int, given: Sequence[Tensor | None],
                 results: Sequence[Tensor | None]) -> None: ...

    # ------------------------------------------------------------------------------------------------ checks

    def _empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _ids(self, ids: Tensor) -> Tensor:
        check_kind("ids", ids, INDEX_DTYPES, device=self.device)
        if ids.dim() != 1:
            raise ValueError(f"ids must have one dimension; got shape {tuple(ids.shape)}")
        check_lookup_count("ids", len(ids))
        return ids.contiguous()

    def _check_matrices(self, what: str, layout: PackedLayout, matrices: Sequence[Tensor]) -> None:
        check_instance("layout", layout, PackedLayout)
        check_count(what, "part", len(matrices), len(layout.parts))
        for place, (part, matrix) in enumerate(zip(layout.parts, matrices)):
            check_rows(f"{what}[{place}]", matrix, (part.rows, part.dim), device=self.device)

    def _check_buffer(self, buffer: Tensor) -> None:
        check_kind("the buffer", buffer, (torch.uint8,), device=self.device)
        if buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"the buffer must have one dimension and be contiguous; got shape {tuple(buffer.shape)} and strides "
                             f"{buffer.stride()}")
        if buffer.data_ptr() % ALIGNMENT:
            raise ValueError(f"the buffer must begin at a multiple of {ALIGNMENT} bytes; its address is {buffer.data_ptr():#x}")

    def _check_groups(self, what: str, widths: Sequence[int], matrices: Sequence[Tensor | None], batch: int, written: bool = False,
                      optional: bool = False) -> None:
        check_count(what, "matrix", len(matrices), len(widths))
        for place, (width, matrix) in enumerate(zip(widths, matrices)):
            if matrix is None:
                if optional:
                    continue
                raise TypeError(f"{what}[{place}] must be a tensor; got NoneType")
            check_rows(f"{what}[{place}]", matrix, (batch, width), device=self.device)
            if written:
                _check_unit_columns(f"{what}[{place}]", matrix)


def _batch_of(matrices: Sequence[Tensor | None]) -> int:
    """B of the first that is there."""
    return next((matrix.shape[0] for matrix in matrices if isinstance(matrix, Tensor) and matrix.dim()), 0)


def _named(what: str, matrices: Sequence[Tensor | None]) -> list[tuple[str, Tensor | None]]:
    return [(f"{what}[{place}]", matrix) for place, matrix in enumerate(matrices)]


def _with_unit_columns(matrix: Tensor) -> Tensor:
    """Itself, or a copy whose last stride is 1."""
    return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


def _check_unit_columns(what: str, matrix: Tensor) -> None:
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        raise ValueError(f"{what} must have last stride 1; got strides {matrix.stride()}")
