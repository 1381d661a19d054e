"""A schedule: what the runtime is to do, with nothing left to decide. Built from a structure and a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparselift.ir import Structure, Table
from sparselift.kernels.base import AUTO_SHAPE, KernelShape
from sparselift.rewrites.base import SizeClass, Value
from sparselift.rewrites.group_tables import lookup_groups
from sparselift.rewrites.huge_pages import wants_huge_pages
from sparselift.rewrites.interaction import eligible_interactions
from sparselift.rewrites.kernel_shape import AUTO
from sparselift.space import Config, config_problems


@dataclass(frozen=True, slots=True)
class TableSchedule:
    """How one table is looked up and updated."""

    update: str                    # "fused" (our kernel in optimizer.step()); or torch's optimizer gets an ordinary gradient: "coalesced"
                                   # by our kernel, or "native", as torch's backward leaves it
    coalesce: str                  # one of kernels.base.COALESCE_METHODS
    prefetch: int
    partition: str                 # "bag" or "table"
    dedup: bool
    huge_pages: bool
    stores: str                    # "cached" or "streamed"
    vector_bytes: int = 0          # these two as in kernels.base.KernelShape
    bags_per_group: int = 0


@dataclass(frozen=True, slots=True)
class GroupSchedule:
    """Lookups that run in one fused call.

    A group with `concat` writes straight into the buffer of that `ir.Concat`, and then holds its features in the concat's
    order. With `interaction`, an `ir.Interaction` of that concat, a kernel multiplies its parts. `prelude` says that the call is made
    before the root forward, from its arguments; otherwise the group has one feature, which runs where its module stands.
    """

    features: tuple[str, ...]
    prelude: bool
    concat: str | None = None
    interaction: str | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run the sparse path of a step. Native means that torch runs everything."""

    path: str                      # "native" or "planned"
    groups: tuple[GroupSchedule, ...] = ()
    tables: dict[str, TableSchedule] | None = None
    linear: str = "native"         # or another choice of rewrites.linear: what runs the dense part's linear layers
    compile: str = "eager"         # or "inductor": what runs the modules without lookups; "inductor_graph": the whole forward
    shape: KernelShape = AUTO_SHAPE  # of all calls; tables have their own bags_per_group and vector_bytes
    prefetch_batches: int = 0      # batches ahead, whose index work a thread beside the step does

    @property
    def changes_dense(self) -> bool:
        """Whether something behind the lookups is rounded in another order than torch's."""
        return self.without_dense() != self

    def without_dense(self) -> Schedule:
        """The same lookups and updates, with everything behind the lookups as torch runs it."""
        return replace(self, groups=tuple(replace(group, interaction=None) for group in self.groups), linear="native",
                       compile="eager")


def build_schedule(structure: Structure, config: Config) -> Schedule:
    """The schedule of a config. Every feature is in exactly one group, and every table has its knobs.

    Raises ValueError for a config that cannot run on this structure, with every reason.
    """
    if problems := config_problems(structure, config):
        raise ValueError("the config cannot run: " + "; ".join(problems))
    if config.path == "native":
        return Schedule("native")
    tables = {}
    for each in config.classes:
        for name in each.tables:
            tables[name] = _table_schedule(structure.table(name), each.knobs)
    classes = [SizeClass(each.name, each.tables) for each in config.classes]
    groups = lookup_groups(structure, classes, str(config.policy["group_by"]), bool(config.policy["concat"]))
    products = {each.concat: each.name for each in eligible_interactions(structure)} if config.policy["interaction"] else {}
    return Schedule("planned", tuple(GroupSchedule(*group, products.get(str(group.concat))) for group in groups), tables,
                    str(config.policy["linear"]), str(config.policy["compile"]),
                    KernelShape(**{name: _number(config.policy[name]) for name in ("block_threads", "loads_in_flight", "chunk_lookups")}),
                    int(config.policy["prefetch_batches"]))


def _table_schedule(table: Table, knobs: Mapping[str, Value]) -> TableSchedule:
    return TableSchedule(
        update=str(knobs["update"]), coalesce=str(knobs["coalesce"]), prefetch=int(knobs["prefetch"]), partition=str(knobs["partition"]),
        dedup=bool(knobs["dedup"]), huge_pages=knobs["huge_pages"] == "madvise" and wants_huge_pages(table),
        stores=str(knobs["stores"]), vector_bytes=_number(knobs["vector_bytes"]), bags_per_group=_number(knobs["bags_per_group"]),
    )


def _number(choice: Value) -> int:
    """Of a kernel shape; 0 leaves it to the heuristic."""
    return 0 if choice == AUTO else int(choice)
