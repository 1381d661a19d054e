"""Text files of one record a line, plain, gzip or zip, as blocks of whole lines. What is not such a file is a DataError that says where.

Memory is bounded by a block, so the first lines of a large file cost what they hold.
"""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from sparselift.errors import DataError

BLOCK_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 20
SHOWN_CHARACTERS = 40
GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"


def bad_field(path: str | os.PathLike[str], line: int, field: str, rule: str, value: str) -> DataError:
    """The error of one field. `line` counts from 1."""
    shown = value if len(value) <= SHOWN_CHARACTERS else value[:SHOWN_CHARACTERS] + "..."
    return DataError(f"{os.fspath(path)}, line {line}, field {field}: {rule}; got {shown!r}")


def bad_line(path: str | os.PathLike[str], line: int, problem: str) -> DataError:
    """The error of a whole line. `line` counts from 1."""
    return DataError(f"{os.fspath(path)}, line {line}: {problem}")


def line_blocks(path: str | os.PathLike[str], block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, block) for the blocks of a file, in order.

    A block holds whole lines, each closed by one newline, also where the file has CRLF, or none after its last line.
    Gzip, and zip with one file in it, are known by their first bytes, not by the name.

    Raises
    ------
    DataError   no such file, a directory, an unreadable or empty file; a byte that is not ASCII text; a line beyond 1 MiB;
                a gzip stream that is damaged or ends early
    """
    line, rest = 1, b""
    for piece in _pieces(Path(path), block_bytes):
        whole, newline, rest_of_piece = (rest + piece).rpartition(b"\n")
        rest = rest_of_piece
        if newline:
            block = _checked(path, line, whole + newline)
            yield line, block
            line += block.count(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise bad_line(path, line, f"a line must be at most {MAX_LINE_BYTES} bytes long; this is no text file of records")
    if rest:
        yield line, _checked(path, line, rest + b"\n")
    elif line == 1:
        raise DataError(f"{os.fspath(path)}: the file is empty")


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    if path.is_dir():
        raise DataError(f"{path}: is a directory, not a file")
    try:
        with path.open("rb") as file, _decompressed(path, file) as stream:
            while piece := stream.read(size):
                yield piece
    except EOFError:
        raise DataError(f"{path}: the compressed stream ends early; the file was cut") from None
    except (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: the compressed stream is damaged or cut: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def _decompressed(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    magic = file.read(len(ZIP_MAGIC))
    file.seek(0)
    if magic.startswith(GZIP_MAGIC):
        with gzip.GzipFile(fileobj=file) as stream:
            yield cast(IO[bytes], stream)
    elif magic == ZIP_MAGIC:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if len(names) != 1:
                raise DataError(f"{path}: a zip file must hold one file; got {len(names)}")
            with archive.open(names[0]) as member:
                yield member
    else:
        yield file


def _checked(path: str | os.PathLike[str], first_line: int, block: bytes) -> bytes:
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    content = np.frombuffer(block, np.uint8)
    strange = (content >= 0x80) | (content == 0)
    if strange.any():
        place = int(strange.argmax())
        line = first_line + block.count(b"\n", 0, place)
        raise bad_line(path, line, f"the file must be ASCII text; got byte 0x{block[place]:02x}")
    return block
