"""Whether the memory of one call's arguments overlaps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows of `width` bytes, each `stride` bytes after the one before; they end at `end`."""

    name: str
    written: bool
    begin: int
    end: int
    width: int
    stride: int
    rows: int

    def meets(self, before: _Span) -> bool:
        """Whether any byte is in both, of spans the first of which reaches the second. Rows that lie apart differently count as one."""
        strides = {span.stride for span in (self, before) if span.rows > 1}
        if len(strides) != 1:
            return True
        stride = strides.pop()
        offset = (self.begin - before.begin) % stride
        return offset < before.width or offset + self.width > stride


def check_apart(written: Iterable[tuple[str, Tensor | None]], read: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raises ValueError where memory that a call writes is in another argument, too, or twice in one.

    Every argument is a vector or a matrix whose last stride is 1. Columns of one buffer are apart; rows that lie in one another's range
    with other strides are not.
    """
    spans = [_span(name, tensor, True) for name, tensor in written if tensor is not None and tensor.numel()]
    for span in spans:
        if span.rows > 1 and span.stride < span.width:
            raise ValueError(f"the rows of {span.name} must be apart in memory; got rows of {span.width} bytes, {span.stride} bytes apart")
    spans += [_span(name, tensor, False) for name, tensor in read if tensor is not None and tensor.numel()]
    reaching: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        reaching = [before for before in reaching if before.end > span.begin]
        for before in reaching:
            if (span.written or before.written) and span.meets(before):
                raise ValueError(f"what a call writes must be apart in memory from its other arguments; {before.name} has bytes "
                                 f"{before.begin:#x} to {before.end:#x}, and {span.name} {span.begin:#x} to {span.end:#x}")
        reaching.append(span)


def _span(name: str, tensor: Tensor, written: bool) -> _Span:
    size, begin = tensor.element_size(), tensor.data_ptr()
    rows, width = (1, tensor.numel()) if tensor.dim() == 1 else tensor.shape
    stride = tensor.stride(0) * size if rows > 1 else width * size
    return _Span(name, written, begin, begin + (rows - 1) * stride + width * size, width * size, stride, rows)
