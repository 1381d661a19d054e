"""What a packed buffer holds and looks like: rows of many matrices behind one header. csrc/api/packed_header.h is the same in C++."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparselift.errors import ExchangeError

from .checks import CPU, check_instance, check_kind, check_whole

WIRE_DTYPES = ("float32", "float16", "bfloat16", "int8")
ALIGNMENT = 16                             # of a buffer, and of every part in it

_MAGIC, _VERSION, _MAX_BYTES = 0x4B504C53, 1, 2**48
_PROLOGUE, _ENTRY = struct.Struct("<IIqqII"), struct.Struct("<qqqii")


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows of one matrix (rows, dim) inside a packed buffer, in `dtype`, one of WIRE_DTYPES.

    float16 and bfloat16 have the bits of `Tensor.to`: rounding to nearest, ties to even, infinity beyond the largest number, NaN for NaN.

    int8 is lossy. A row of range r = max - min is 255 steps of r / 255 above its minimum, as unsigned bytes; x becomes
    round((x - min) * (255 / r)), ties to even, and comes back as min + (r / 255) * q, float32 throughout. It comes back within
    r / 510 * (1 + 2^-12) + 2^-21 * max |x| + 2^-118, and the minimum as it was, a zero positive. A row that has a NaN or an infinity, or
    whose range is beyond float32, comes back as NaN all over: what is broken stays visible.
    """

    rows: int
    dim: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_whole("a packed matrix's number of rows", self.rows)
        check_whole("a packed matrix's number of columns", self.dim)
        if self.dtype not in WIRE_DTYPES:
            raise ValueError(f"a packed dtype must be one of {', '.join(WIRE_DTYPES)}; got {self.dtype!r}")
        if self.rows < 0 or not 0 <= self.dim < 2**31:
            raise ValueError(f"a packed matrix must have at least 0 rows and 0 to 2**31 - 1 columns; got ({self.rows}, {self.dim})")

    @property
    def scale_bytes(self) -> int:
        """Of int8: a scale and a bias a row, float32, before all elements."""
        return _aligned(8 * self.rows) if self.dtype == "int8" else 0

    @property
    def nbytes(self) -> int:
        """Without what fills it up to a multiple of 16."""
        return self.scale_bytes + self.rows * self.dim * {"float32": 4, "int8": 1}.get(self.dtype, 2)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """What one packed buffer holds: a header of 32 bytes and 32 a part, then the parts, each at a multiple of 16 bytes, zeros in between.

    Both sides of an exchange know it, from the sizes that they exchanged before; the header is what a receiver holds a buffer against, so
    that a buffer that is late, cut off or somebody else's is an error and not rows.

    Raises ValueError where the buffer would pass 2^48 bytes, and TypeError for anything but a sequence of PackedParts.
    """

    parts: tuple[PackedPart, ...]
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)      # where each part begins, in bytes
    nbytes: int = field(init=False, repr=False, compare=False)                   # of the whole buffer; a multiple of 16

    def __post_init__(self) -> None:
        check_instance("parts", self.parts, Sequence)
        object.__setattr__(self, "parts", tuple(self.parts))
        for place, part in enumerate(self.parts):
            check_instance(f"parts[{place}]", part, PackedPart)
        offsets, end = [], _PROLOGUE.size + _ENTRY.size * len(self.parts)
        for part in self.parts:
            offsets.append(end)
            end += _aligned(part.nbytes)
        if end > _MAX_BYTES:
            raise ValueError(f"a packed buffer has at most 2**48 bytes; these parts take {end}")
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "nbytes", end)

    def header(self) -> bytes:
        """The bytes that the buffer begins with."""
        entries = b"".join(_ENTRY.pack(part.rows, offset, part.nbytes, part.dim, WIRE_DTYPES.index(part.dtype))
                           for part, offset in zip(self.parts, self.offsets))
        known = _MAGIC, _VERSION, len(self.parts), self.nbytes
        return _PROLOGUE.pack(*known, zlib.crc32(_PROLOGUE.pack(*known, 0, 0) + entries), 0) + entries

    @classmethod
    def read(cls, buffer: Tensor) -> PackedLayout:
        """What a packed buffer, (bytes,) uint8, says that it holds. Waits for a device.

        Raises
        ------
        ExchangeError   it is no packed buffer, or not a whole one; says what is wrong
        TypeError       it is no tensor of bytes; ValueError: it has more than one dimension
        """
        check_kind("the buffer", buffer, (torch.uint8,), device=buffer.device if isinstance(buffer, Tensor) else CPU)
        if buffer.is_meta:
            raise TypeError("the buffer must have values; got a meta tensor")
        if buffer.dim() != 1:
            raise ValueError(f"the buffer must have one dimension; got shape {tuple(buffer.shape)}")
        size = buffer.numel()
        if size < _PROLOGUE.size:
            raise ExchangeError(f"a packed buffer has at least {_PROLOGUE.size} bytes; got {size}")
        first = _bytes(buffer[:_PROLOGUE.size])
        magic, version, count, nbytes, checksum, _ = _PROLOGUE.unpack(first)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ExchangeError(f"a packed buffer begins with {_MAGIC:#x} and version {_VERSION}; got {magic:#x} and {version}")
        end = _PROLOGUE.size + _ENTRY.size * count
        if count < 0 or end > size:
            raise ExchangeError(f"the header says {count} parts, which {size} bytes cannot hold")
        header = first + _bytes(buffer[_PROLOGUE.size:end])
        if checksum != zlib.crc32(_PROLOGUE.pack(magic, version, count, nbytes, 0, 0) + header[_PROLOGUE.size:]):
            raise ExchangeError(f"the header's checksum {checksum:#x} is not that of its {count} parts")
        try:
            layout = cls(tuple(PackedPart(rows, dim, WIRE_DTYPES[wire] if 0 <= wire < len(WIRE_DTYPES) else f"number {wire}")
                               for rows, _, _, dim, wire in _ENTRY.iter_unpack(header[_PROLOGUE.size:])))
        except ValueError as error:
            raise ExchangeError(f"the header is no header: {error}") from None
        if layout.header() != header:
            raise ExchangeError(f"the header says {nbytes} bytes and offsets that its {count} parts do not have")
        if nbytes > size:
            raise ExchangeError(f"the header says {nbytes} bytes; got {size}")
        return layout


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _bytes(part: Tensor) -> bytes:
    return part.cpu().numpy().tobytes()
