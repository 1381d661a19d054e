"""A short run of the fuzzer."""

from __future__ import annotations

from tests.fuzz.fuzz_lookups import FAULTS, fuzz


def test_random_calls_are_right_or_refused() -> None:
    seen = fuzz(seed=0, calls=2000)
    assert set(seen) >= {"tables", "valid sum", "valid mean", "valid max", "valid none", *(fault.__name__ for fault in FAULTS)}
