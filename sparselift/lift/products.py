"""The dot interaction in a recorded forward: which torch functions make it of a concat of lookups, one after the other.

    whole = torch.cat(parts, dim=1)                     (B, V * D)
    vectors = whole.view(B, V, D)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    triangle = products[:, rows, columns]               (B, P)
    torch.cat([one of the parts, triangle], dim=1)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparselift.kernels.interaction import ORDERS, InteractionSpec

VIEWS = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten})
TRANSPOSES = frozenset({Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, torch.swapdims, Tensor.permute,
                        torch.permute, Tensor.mT.__get__})                    # type: ignore[attr-defined]
MULTIPLICATIONS = frozenset({torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__})

# Reads of each step's result in an interaction: the next step alone, and vectors by the transpose and the product.
_READS = {"whole": 1, "vectors": 2, "flipped": 1, "products": 1, "triangle": 1}


class Found(NamedTuple):
    """An interaction of the concat that `cat` numbers; the rest as in ir.Interaction."""

    cat: int
    passed: int
    order: str
    diagonal: bool


def stacks(result: Any, width: int, dim: int) -> bool:
    """Whether a view of a (B, width) concat is its vectors, (B, V, D)."""
    return isinstance(result, Tensor) and result.dim() == 3 and result.shape[1] * result.shape[2] == width and result.shape[2] == dim


def flips(result: Any, vectors: Tensor) -> bool:
    """Whether a tensor is vectors (B, V, D) with the last dimensions exchanged, in the same memory."""
    batch, count, dim = vectors.shape
    first, second, third = vectors.stride()
    return (isinstance(result, Tensor) and result.shape == (batch, dim, count) and result.stride() == (first, third, second)
            and result.data_ptr() == vectors.data_ptr())


def picked_pairs(index: Any) -> tuple[Tensor, Tensor] | None:
    """(rows, columns) of an index [:, rows, columns] by two (P,) int64 tensors on the CPU; None for another."""
    if not isinstance(index, tuple) or len(index) != 3 or index[0] not in (slice(None), ...):
        return None
    rows, columns = index[1:]
    for each in (rows, columns):
        if not isinstance(each, Tensor) or each.dim() != 1 or each.dtype != torch.int64 or not each.is_cpu:
            return None
    return rows, columns


def name_pairs(pairs: Tensor, rows: Tensor, columns: Tensor) -> bool:
    """Whether an index picks these pairs (2, P), in their order; (i, j) and (j, i) have one product."""
    first, second = pairs
    return any(torch.equal(rows, i) and torch.equal(columns, j) for i, j in ((first, second), (second, first)))


@dataclass(slots=True)
class _Step:
    kind: str
    cat: int
    tensor: Tensor                 # kept alive, so that an id stays its tensor's
    before: tuple[Tensor, ...] = ()
    order: str = ""
    diagonal: bool = False


class Products:
    """Follows the functions of one step of the workload."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}            # by id() of the result
        self._reads: Counter[int] = Counter()
        self._parts: dict[int, Sequence[Tensor]] = {}  # of a concat, by its number
        self._found: list[tuple[Found, list[int]]] = []

    @property
    def tensors(self) -> dict[int, _Step]:
        """The results so far by id(), whose readers are to be counted by `read`."""
        return self._steps

    def read(self, tensor: Tensor) -> None:
        self._reads[id(tensor)] += 1

    def start(self, cat: int, parts: Sequence[Tensor], result: Tensor) -> None:
        """A concat of lookups, (B, n) parts."""
        if len({part.shape[1] for part in parts}) == 1 and parts[0].shape[1]:
            self._parts[cat] = tuple(parts)
            self._steps[id(result)] = _Step("whole", cat, result)

    def follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """A torch function that took tensors of the steps so far, perhaps."""
        given = [self._steps.get(id(arg)) for arg in args[:2]]
        first = given[0] if given else None
        if first is None:
            return
        made: _Step | None = None
        if first.kind == "whole" and func in VIEWS and stacks(result, first.tensor.shape[1], self._parts[first.cat][0].shape[1]):
            made = _Step("vectors", first.cat, result, (first.tensor,))
        elif first.kind == "vectors" and func in TRANSPOSES and flips(result, first.tensor):
            made = _Step("flipped", first.cat, result, (*first.before, first.tensor))
        elif func in MULTIPLICATIONS and len(given) == 2 and (second := given[1]) is not None:
            if first.kind == "vectors" and second.kind == "flipped" and second.before[-1] is first.tensor:
                made = _Step("products", first.cat, result, (*second.before, second.tensor))
        elif first.kind == "products" and func is Tensor.__getitem__:
            made = self._picked(first, args[1], result)
        if made is not None:
            self._steps[id(result)] = made

    def _picked(self, products: _Step, index: Any, result: Tensor) -> _Step | None:
        pairs = picked_pairs(index)
        if pairs is None:
            return None
        count, dim = products.before[1].shape[1:]
        for order in ORDERS:
            for diagonal in (False, True):
                if name_pairs(InteractionSpec(count, dim, order, diagonal).pairs(), *pairs):
                    return _Step("triangle", products.cat, result, (*products.before, products.tensor), order, diagonal)
        return None

    def join(self, tensors: Any) -> None:
        """A torch.cat(dim=1)."""
        if not isinstance(tensors, (list, tuple)) or len(tensors) != 2:
            return
        triangle = self._steps.get(id(tensors[1]))
        if triangle is not None and triangle.kind == "triangle":
            for place, part in enumerate(self._parts[triangle.cat]):
                if part is tensors[0]:
                    steps = [id(each) for each in (*triangle.before, triangle.tensor)]
                    self._found.append((Found(triangle.cat, place, triangle.order, triangle.diagonal), steps))
                    return

    def close(self) -> list[Found]:
        """Those whose steps nothing else read."""
        return [found for found, steps in self._found if all(self._reads[each] == _READS[self._steps[each].kind] for each in steps)]
