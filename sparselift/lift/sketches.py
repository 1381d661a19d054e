"""Sketches of the ids that recorded lookups were given."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sparselift.errors import WorkloadError
from sparselift.ir import Feature
from sparselift.lift.record import Key, Lookup, Recording
from sparselift.stats import Sketch, sketch


def sketch_lookups(recording: Recording, features: Mapping[Key, Feature], rows: Mapping[str, int], steps: int) -> dict[str, Sketch]:
    """Feature name -> sketch over the first recorded steps. Raises WorkloadError for offsets that make no bags."""
    sketches: dict[str, Sketch] = {}
    for key, feature in features.items():
        total = Sketch.empty()
        for lookup in (lookup for scope, lookup in recording.seen(key) if scope.step < steps):
            ids, lengths = bags(feature, lookup)
            try:
                total = total.merge(sketch(ids, lengths, rows[feature.table], feature.padding_idx))
            except ValueError as error:
                raise WorkloadError(f"lookup {feature.name}: {error}") from error
        sketches[feature.name] = total
    return sketches


def bags(feature: Feature, lookup: Lookup) -> tuple[np.ndarray, np.ndarray]:
    """(K,) ids and (B,) bag lengths of one call."""
    ids = lookup.ids.detach().numpy()
    if feature.form == "ids":
        return ids.ravel(), np.ones(ids.size, dtype=np.int64)
    if feature.form == "matrix":
        return ids.ravel(), np.full(ids.shape[0], ids.shape[1], dtype=np.int64)
    offsets = lookup.offsets.detach().numpy() if lookup.offsets is not None else np.zeros(0, dtype=np.int64)
    if not feature.include_last_offset:
        return ids, np.diff(offsets, append=ids.size)
    # torch does not read ids behind the last offset.
    return ids[:offsets[-1] if offsets.size else 0], np.diff(offsets)
