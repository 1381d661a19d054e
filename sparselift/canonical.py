"""Canonical JSON: one text for one value, so that files can be compared and hashed, and files that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_DIGITS = 9                        # significant: more than any measurement holds, fewer than float noise needs


def rounded(value: Any) -> Any:
    """`value` in plain JSON types: floats to 9 significant digits, tuples as lists, keys as strings, sorted.

    Raises ValueError for NaN and infinities, TypeError for what JSON cannot hold.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"JSON holds finite numbers only; got {value}")
        return float(f"{value:.{_DIGITS}g}")
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in sorted((_key(key), item) for key, item in value.items())}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    raise TypeError(f"JSON cannot hold a {type(value).__name__}: {value!r}")


def dumps(value: Any) -> str:
    """Canonical JSON text: rounded floats, sorted keys, 2 spaces a level, a newline at the end. Raises as `rounded` does."""
    return json.dumps(rounded(value), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def digest(value: Any, length: int = 16) -> str:
    """The first `length` hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()[:length]


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file so that readers, and we after a crash, see either the old content or all of the new.

    A symbolic link keeps pointing where it does. Raises OSError naming `path`, and then leaves the old content.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from error


def _sync_folder(folder: Path) -> None:
    """Without it a power cut can forget the rename. Not every file system and platform lets a folder be synced."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"JSON keys are strings; got {key!r}")
    return key
