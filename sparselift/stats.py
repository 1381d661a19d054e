"""Sketches of real batches."""
from __future__ import annotations
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sketch:
    """Placeholder until the sketch lands."""
