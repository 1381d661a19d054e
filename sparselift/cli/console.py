"""What commands give back, and how it reaches a person or a program."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class UsageError(Exception):
    """The command line asks for something that cannot be: an unknown option, a path that does not exist or cannot be written."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one command."""

    text: str                      # for a person
    data: dict[str, Any] = field(default_factory=dict)  # for --json: plain JSON types
    status: str = "done"           # "failed": a check did not hold; "interrupted": stopped by Ctrl-C, with what was measured so far

class Console:
    """Where a command speaks. Results go to stdout; with --json stdout holds one object only and the rest goes to stderr."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def say(self, text: str = "") -> None:
        """Show `text` at once."""
        print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Rows of cells as aligned text: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = ((row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))) for row in rows)
    return "\n".join((indent + "  ".join(line)).rstrip() for line in lines)


def labelled(pairs: Sequence[tuple[str, str]]) -> str:
    """(label, text) pairs, one a line, the texts aligned."""
    width = max(len(label) for label, _ in pairs)
    return "\n".join(f"{label.ljust(width)}  {text}" for label, text in pairs)


def size_bytes(text: str) -> int:
    """Bytes from "4GiB", "500 MB" or "1024": powers of 1000, with an i powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"a size is a number with an optional unit, such as 4GiB or 500MB; got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def check_writable(path: Path) -> Path:
    """`path`, if a file can be written there. Raises UsageError before any work is lost for want of a place to put it."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with path.open("r+b"):
                pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


def existing_file(text: str) -> Path:
    """The path, if it names a file. Raises UsageError."""
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"{path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")
    return path
