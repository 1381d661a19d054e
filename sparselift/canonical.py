"""Canonical JSON: one text for one value, so that files can be compared and hashed; back into dataclasses; files whole or not there."""

from __future__ import annotations

import hashlib
import json
import math
import os
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

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
        return {key: rounded(value[key]) for key in sorted(map(_key, value))}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    raise TypeError(f"JSON cannot hold a {type(value).__name__}: {value!r}")


def dumps(value: Any) -> str:
    """Canonical JSON text: rounded floats, sorted keys, 2 spaces a level, a newline at the end. Raises as `rounded` does."""
    return json.dumps(rounded(value), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def digest(value: Any, length: int = 16) -> str:
    """The first `length` hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()[:length]


def plain(value: Any) -> Any:
    """A dataclass and what it holds as JSON types, floats rounded: what `decode` reads. Raises as `rounded` does."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return rounded(value)


def decode(kind: Any, document: Any, where: str) -> Any:
    """A value of type `kind` from plain JSON: a dataclass, tuple, mapping, union or plain type. Inverse of `plain`.

    Raises ValueError naming each missing and unknown field, or the field of another type and what it holds.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        types_by_name = _field_types(kind)
        check_names(document, list(types_by_name), where)
        return kind(**{name: decode(each, document[name], f"{where}.{name}") for name, each in types_by_name.items()})
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(document, list):
        if parts[-1] is Ellipsis:
            return tuple(decode(parts[0], item, f"{where}[{i}]") for i, item in enumerate(document))
        if len(parts) == len(document):
            return tuple(decode(part, item, f"{where}[{i}]") for i, (part, item) in enumerate(zip(parts, document, strict=True)))
    if origin is Mapping and isinstance(document, dict):
        return {key: decode(parts[1], item, f"{where}.{key}") for key, item in document.items()}
    if origin in (Union, types.UnionType):
        return _decode_union(kind, parts, document, where)
    if kind is Any or (kind is types.NoneType and document is None) or (isinstance(kind, type) and type(document) is kind):
        return document
    if kind is float and type(document) is int:
        return float(document)
    raise ValueError(f"{where} must be {_type_name(kind)}; got {document!r}")


def check_names(document: Any, names: list[str], where: str) -> None:
    """Raises ValueError unless `document` is an object with exactly these fields."""
    if not isinstance(document, dict):
        raise ValueError(f"{where} must be an object with the fields {names}; got {document!r}")
    problems = [f"lacks the field {name!r}" for name in names if name not in document]
    problems += [f"has the unknown field {name!r}" for name in document if name not in names]
    if problems:
        raise ValueError(f"{where} " + ", ".join(problems))


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


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _decode_union(kind: Any, parts: tuple[Any, ...], document: Any, where: str) -> Any:
    """A null is the None of a union; an object is its dataclass; of plain types, the one that the value has."""
    if document is None and types.NoneType in parts:
        return None
    parts = tuple(part for part in parts if part is not types.NoneType)
    if len(parts) == 1 and (is_dataclass(parts[0]) or get_origin(parts[0])):
        return decode(parts[0], document, where)                               # so that the message names a field inside
    for part in parts:
        with suppress(ValueError):
            return decode(part, document, where)
    raise ValueError(f"{where} must be {_type_name(kind)}; got {document!r}")


def _type_name(kind: Any) -> str:
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "null", dict: "an object"}
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type_name, parts))
    if origin is tuple:
        return "a list" if parts[-1] is Ellipsis else f"a list of {len(parts)}"
    return "an object" if origin is Mapping else names.get(kind, str(kind))
