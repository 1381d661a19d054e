"""A schedule: what the runtime is to do, with nothing left to decide. Built from a structure and a config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableSchedule:
    """How one table is looked up and updated."""

    update: str                    # "fused" (our kernel in optimizer.step()) or "native" (torch's optimizer gets a sparse gradient)
    coalesce: str                  # "chain" or "none" (kernels.base.TableKnobs)
    prefetch: int
    partition: str                 # "bag" or "table"
    dedup: bool
    huge_pages: bool


@dataclass(frozen=True, slots=True)
class GroupSchedule:
    """Lookups that run in one fused call.

    A group with `concat` writes straight into the buffer of that `ir.Concat`, and then holds its features in the concat's
    order. `prelude` says that the call is made before the root forward, from its arguments; otherwise the group has one feature,
    which runs where its module stands.
    """

    features: tuple[str, ...]
    prelude: bool
    concat: str | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run the sparse path of a step. Native means that torch runs everything."""

    path: str                      # "native" or "planned"
    groups: tuple[GroupSchedule, ...] = ()
    tables: dict[str, TableSchedule] | None = None
