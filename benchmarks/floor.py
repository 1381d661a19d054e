"""The memory floor of a sparse step: the accesses that no implementation can leave out, made by loops that do nothing else.

Ids are streamed once, outputs are written and their gradients read once; every distinct row is read once in forward, and read and
written once in the update with its optimizer state; all further lookups of it, and of its bag's gradient, come from a core's own
caches. Rows and state lie in huge pages and are prefetched; distinct rows come in no order.
"""

from __future__ import annotations

import torch
from cases import STATE_FLOATS, Case
from torch import Tensor

from sparselift.memory import set_huge_pages
from sparselift.probe import visit_rows

LINE_FLOATS = 16
CACHED_FLOATS = 64 << 10           # of the rows that further lookups read: half of a small L2


class FloorSide:
    """Steps of a case that move what must be moved, in memory of their own."""

    def __init__(self, case: Case) -> None:
        shape, generator = case.shape, torch.Generator().manual_seed(case.seed)
        dim, state_floats = _whole_lines(shape.dim), STATE_FLOATS[case.optimizer](shape.dim)
        rows = sum(shape.rows)
        self.rows, self.cached = _in_huge_pages(rows, dim), _in_huge_pages(max(CACHED_FLOATS // dim, 1), dim)
        self.output, self.grad = torch.zeros(2, shape.batch_size * shape.num_tables * shape.dim)
        a_line = max(LINE_FLOATS // state_floats, 1) if state_floats else 1     # rows whose states share a cache line
        self.states = _in_huge_pages(-(-rows // a_line), _whole_lines(state_floats)) if state_floats else None
        self.visits = []
        for batch in case.batches:
            unique = batch.row_ids.unique()
            again = len(batch.indices) - len(unique) + max(len(batch.indices) - shape.batch_size * shape.num_tables, 0)
            self.visits.append((batch.indices, _shuffled(unique, generator),
                                torch.randint(len(self.cached), (again,), generator=generator, dtype=torch.int32),
                                _shuffled((unique // a_line).unique(), generator)))

    def step(self, number: int) -> None:
        """As Side.step, without a result."""
        indices, unique, further, touched = self.visits[number]
        indices.sum()
        visit_rows(self.rows, unique)
        visit_rows(self.cached, further)
        self.output.copy_(self.grad)
        visit_rows(self.rows, unique, update=True)
        if self.states is not None:
            visit_rows(self.states, touched, update=True)


def _shuffled(ids: Tensor, generator: torch.Generator) -> Tensor:
    return ids[torch.randperm(len(ids), generator=generator)].int()


def _whole_lines(floats: int) -> int:
    return -(-floats // LINE_FLOATS) * LINE_FLOATS


def _in_huge_pages(rows: int, columns: int) -> Tensor:
    """(rows, columns) of zeros at a cache line."""
    memory = torch.empty(rows * columns + LINE_FLOATS)
    set_huge_pages(memory, True)
    start = -memory.data_ptr() % (4 * LINE_FLOATS) // 4
    return memory.zero_()[start:start + rows * columns].view(rows, columns)
