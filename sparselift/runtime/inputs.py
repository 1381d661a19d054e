"""Fetches the tensors that lookups read from the arguments of the root module's forward, by their recorded paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparselift.ir import Feature, InputPath

Fetched = tuple[list[Any], list[Any], list[Any]]     # ids, offsets, per-sample weights, one each a feature
Fetch = Callable[[tuple[Any, ...], dict[str, Any]], Fetched]


def lookup(container: Any, key: str | int) -> Any:
    """One step of a path: an item of a sequence or mapping, else an attribute."""
    if isinstance(key, str) and not isinstance(container, Mapping):
        return getattr(container, key)
    return container[key]


def resolve(path: InputPath, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The object at a path. Raises LookupError, AttributeError or TypeError where there is none."""
    value: Any = args if path.keys[0] == "args" else kwargs
    for key in path.keys[1:]:
        value = lookup(value, key)
    return value.select(*path.select) if path.select else value


def compile_fetch(features: Sequence[Feature]) -> Fetch:
    """A function that fetches all inputs of the features at once.

    Walking a path step by step costs 0.3 us a tensor, three times what the rest of the prelude may take; so the walk is
    written out as one expression a tensor and compiled. Keys come from a plan file and enter the source as literals only.
    """
    columns = [[_expression(getattr(f, kind)) for f in features] for kind in ("indices", "offsets", "weights")]
    body = ", ".join(f"[{', '.join(column)}]" for column in columns)
    namespace: dict[str, Any] = {"lookup": lookup}
    exec(f"def fetch(args, kwargs):\n    return {body}\n", namespace)
    return namespace["fetch"]


def _expression(path: InputPath | None) -> str:
    if path is None:
        return "None"
    root, *keys = path.keys
    if root not in ("args", "kwargs"):
        raise ValueError(f"an input path starts with 'args' or 'kwargs'; got {root!r}")
    text = str(root)
    for key in keys:
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise ValueError(f"an input path holds names and positions; got {key!r}")
        # A string may name a mapping's item or an attribute: only the object tells.
        text = f"{text}[{key}]" if isinstance(key, int) else f"lookup({text}, {key!r})" if text != "kwargs" else f"{text}[{key!r}]"
    if path.select:
        dim, index = (int(number) for number in path.select)
        text = f"{text}.select({dim}, {index})"
    return text
