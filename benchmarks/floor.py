"""What memory alone needs for a sparse step on the machine that runs it.

Ids are streamed once, outputs are written and their gradients read once; every distinct row is gathered once in forward, and read and
written once in the update with its optimizer state; all further lookups of it, and of its bag's gradient, come from a cache. Each access
at the bandwidth that `sparselift.probe` measures for its kind.
"""

from __future__ import annotations

from cases import STATE_FLOATS, Case

from sparselift.probe import probe, probe_rows


def floor_seconds(case: Case) -> float:
    """Mean of the batches, with the current number of torch threads; of the sparse path alone."""
    shape = case.shape
    row, state = 4 * shape.dim, 4 * STATE_FLOATS[case.optimizer](shape.dim)
    rows, states = probe_rows(row), probe_rows(state) if state else None
    outputs = shape.batch_size * shape.num_tables * row
    total = 0.0
    for batch in case.batches:
        lookups, unique = len(batch.indices), len(batch.row_ids.unique())
        streamed = batch.indices.nbytes + 2 * outputs
        again = (lookups - unique) * row + max(lookups - shape.batch_size * shape.num_tables, 0) * row
        total += streamed / probe().stream_gbps + unique * row / rows.read_gbps + 2 * unique * row / rows.update_gbps
        total += again / rows.cached_gbps
        if states is not None:
            total += 2 * unique * _whole_lines(state) / states.update_gbps
    return total / len(case.batches) / 1e9


def _whole_lines(count: int) -> int:
    return -(-count // 64) * 64
