"""The catalog of rewrites. Adding one means writing its file and naming it here; see docs/rewrites.md."""

from __future__ import annotations

from sparselift.rewrites.bag_shape import ShapeBags
from sparselift.rewrites.base import EQUIVALENCES, Knob, Rewrite, Site, SizeClass, Value, same, weakest
from sparselift.rewrites.compile_dense import CompileDense
from sparselift.rewrites.concat import FuseConcat
from sparselift.rewrites.dedup import Dedup
from sparselift.rewrites.fuse_update import FuseUpdate
from sparselift.rewrites.group_tables import GroupTables
from sparselift.rewrites.huge_pages import HugePages
from sparselift.rewrites.interaction import FuseInteraction
from sparselift.rewrites.kernel_shape import ShapeKernels
from sparselift.rewrites.linear import LinearLibrary
from sparselift.rewrites.partition import Partition
from sparselift.rewrites.prefetch import Prefetch
from sparselift.rewrites.prefetch_batches import PrefetchBatches
from sparselift.rewrites.stores import Stores

__all__ = ["CATALOG", "EQUIVALENCES", "Knob", "Rewrite", "Site", "SizeClass", "Value", "catalog_table", "same", "weakest"]

# In the order in which their transforms are applied: what changes one table's nodes first, then what joins them into calls.
CATALOG: tuple[Rewrite, ...] = (FuseUpdate(), Dedup(), Prefetch(), Partition(), Stores(), HugePages(), ShapeBags(), GroupTables(),
                               FuseConcat(), FuseInteraction(), ShapeKernels(), LinearLibrary(), CompileDense(), PrefetchBatches())


def catalog_table() -> str:
    """The catalog as a Markdown table, one line a rewrite."""
    lines = ["| rewrite | what it does | scope | tables on | knobs | equivalence |", "|---|---|---|---|---|---|"]
    for rewrite in CATALOG:
        knobs = "; ".join(f"`{knob.name}`: " + ", ".join(f"`{choice}`" for choice in knob.choices) for knob in rewrite.knobs)
        lines.append(f"| `{rewrite.name}` | {rewrite.summary} | {rewrite.scope} | {', '.join(rewrite.devices)} | {knobs} | "
                     f"{rewrite.equivalence_note} |")
    return "\n".join(lines) + "\n"
