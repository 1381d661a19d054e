"""Large tables move to memory that the kernel may back with huge pages."""

from __future__ import annotations

from collections.abc import Mapping

from sparselift.ir import Graph, Node, Structure, Table
from sparselift.rewrites.base import Knob, Rewrite, Site, Value, nodes_at, tables_at

PAGE_BYTES = 2 << 20
MIN_TABLE_BYTES = 4 << 20          # below it, a table has fewer pages of 4 KiB than a second-level TLB has entries
_PREFER_TABLE_BYTES = 32 << 20


class HugePages(Rewrite):
    """A random row of a large table misses the TLB as well as the cache; 2 MiB pages make the first miss rare."""

    name = "huge_pages"
    summary = "move large tables, and optimizer state as large, to memory with huge pages"
    scope = "class"
    equivalence_note = "bitwise"
    devices = ("cpu",)
    knobs = (Knob("huge_pages", ("off", "madvise"), "off", "madvise: ask for huge pages under the class's tables of at least 4 MiB"),)

    def obstacle(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str | None:
        if knobs["huge_pages"] == "off" or any(map(wants_huge_pages, tables_at(structure, site))):
            return None
        largest = max((table.nbytes for table in tables_at(structure, site)), default=0)
        return f"the largest table has {largest:,} bytes, and below {MIN_TABLE_BYTES:,} ordinary pages stay in the TLB"

    def prefer(self, graph: Graph, site: Site) -> dict[str, Value]:
        large = any(table.nbytes >= _PREFER_TABLE_BYTES for table in tables_at(graph.structure, site))
        return {"huge_pages": "madvise" if large else "off"}

    def match(self, graph: Graph, site: Site) -> tuple[Node, ...]:
        return tuple(node for node in nodes_at(graph, site, "lookup", "update")
                     if any(wants_huge_pages(graph.structure.table(name)) for name in node.tables))

    def memory_bytes(self, graph: Graph, site: Site, knobs: Mapping[str, Value]) -> int:
        """What rounding up to whole pages adds."""
        if not self.applied(knobs):
            return 0
        return sum(-table.nbytes % PAGE_BYTES for table in tables_at(graph.structure, site) if wants_huge_pages(table))


def wants_huge_pages(table: Table) -> bool:
    """Whether huge pages can help this table."""
    return table.nbytes >= MIN_TABLE_BYTES
