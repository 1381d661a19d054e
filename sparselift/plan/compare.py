"""Does a plan still fit? Field by field, graded by what a difference means. And how two plans differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any

from sparselift.errors import PlanMismatchError
from sparselift.ir import Concat, Feature, Interaction, Linear, Structure, Table
from sparselift.plan.document import Plan
from sparselift.rewrites import same
from sparselift.stats import Sketch

GRADES = ("refuse", "re-check", "note")

_SHOWN = 5                         # differences that a message spells out


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs.

    `grade` is "refuse" (the plan would compute something else, or nothing), "re-check" (right, but perhaps no longer fast: tune
    or verify again) or "note". Between two plans it is "choice", "signature" or "evidence".
    """

    field: str
    saved: Any                     # None: absent
    current: Any
    grade: str

    def __str__(self) -> str:
        return f"{self.grade}: {self.field}: saved {_text(self.saved)}, current {_text(self.current)}"


def compare(plan: Plan, structure: Structure | None = None, batch_size: int | None = None, sketches: Mapping[str, Sketch] | None = None,
            hardware: Mapping[str, Any] | None = None) -> tuple[Difference, ...]:
    """What differs between a plan and what is at hand, the gravest first. What is None is not compared.

    Tables, lookups, consumers, optimizers and world size are refused; another batch size, drift of the data, another machine or
    another use of the loop is to be re-checked; library versions and a file edited by hand are noted.
    """
    found: list[Difference] = []
    if structure is not None:
        found += _structure_differences(plan.structure, structure)
    if batch_size is not None and batch_size != plan.batch_size:
        found.append(Difference("batch_size", plan.batch_size, batch_size, "re-check"))
    if sketches is not None:
        found += _drift(plan.sketches, sketches)
    if hardware is not None:
        found += _hardware_differences(plan.hardware, hardware)
    if plan.edited:
        found.append(Difference("checksum", "of the file as it was saved", "another: the file was edited by hand", "note"))
    return tuple(sorted(found, key=lambda difference: GRADES.index(difference.grade)))


def check_fits(plan: Plan, structure: Structure | None = None, batch_size: int | None = None,
               sketches: Mapping[str, Sketch] | None = None, hardware: Mapping[str, Any] | None = None,
               present: Sequence[str] = ()) -> tuple[Difference, ...]:
    """The differences that do not stand in the way. `present` names the model's own tables, for the message.

    Raises PlanMismatchError that says what kind of difference it is, and names the first that stand in the way, with both values.
    """
    found = compare(plan, structure, batch_size, sketches, hardware)
    refused = [difference for difference in found if difference.grade == "refuse"]
    if refused:
        assert structure is not None, "nothing else is refused"
        raise PlanMismatchError(f"the plan for {plan.workload!r} does not fit: {_mismatch(plan.structure, structure, refused, present)}",
                                tuple((d.field, d.saved, d.current) for d in refused))
    return found


def _mismatch(saved: Structure, current: Structure, refused: Sequence[Difference], present: Sequence[str]) -> str:
    """What differs in a sentence, and a few fields where they say more."""
    tables = [table.name for table in saved.tables]
    kinds = ", ".join(saved.optimizers), ", ".join(current.optimizers)
    if not {table.name for table in current.tables} & set(tables):
        here = [table.name for table in current.tables] or list(present)
        lines = [f"it is made for another model: {_family(tables)}; this one has {_family(here)}"]
        refused = [difference for difference in refused if difference.field == "optimizers"]
    elif _in_another_order(saved, current, refused):
        return f"the optimizers come in another order: saved {kinds[0]}, current {kinds[1]}"
    else:
        lines = []
    lines += [f"{d.field}: saved {_text(d.saved)}, current {_text(d.current)}" for d in refused[:_SHOWN]]
    more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
    return "; ".join(lines) + more


def _in_another_order(saved: Structure, current: Structure, refused: Sequence[Difference]) -> bool:
    """Whether nothing differs but where the optimizers stand in their sequence."""
    held = [(d.saved, d.current) for d in refused if d.field.endswith(".optimizer")]
    return (sorted(saved.optimizers) == sorted(current.optimizers)
            and len(held) == sum(d.field != "optimizers" for d in refused)
            and all(a is not None and b is not None and a[1:] == b[1:] for a, b in held))


def _family(names: Sequence[str]) -> str:
    """ "26: emb_l.*" for tables that lie side by side."""
    if not names:
        return "no tables"
    paths = [name.split(".")[:-1] or [name] for name in names]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    where = ".".join(shared) + ".*" if shared else ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} table{'s' * (len(names) != 1)}: {names[0] if len(names) == 1 else where}"


def diff(a: Plan, b: Plan) -> tuple[Difference, ...]:
    """How two plans differ: in what they choose, in what they are made for, in evidence. Empty for equal plans."""
    found = [Difference(field, saved, current, "choice") for field, saved, current in _choices(a, b)]
    found += [Difference(f"constraints.{each.name}", getattr(a.constraints, each.name), getattr(b.constraints, each.name), "choice")
              for each in fields(a.constraints) if getattr(a.constraints, each.name) != getattr(b.constraints, each.name)]
    signature = [*_structure_differences(a.structure, b.structure), *_drift(a.sketches, b.sketches),
                 *_hardware_differences(a.hardware, b.hardware)]
    found += [Difference(d.field, d.saved, d.current, "signature") for d in signature]
    found += [Difference(name, getattr(a, name), getattr(b, name), "signature") for name in ("workload", "batch_size")
              if getattr(a, name) != getattr(b, name)]
    for name in ("status", "native", "planned", "default", "speedup", "note", "study"):
        saved, current = getattr(a.evidence, name), getattr(b.evidence, name)
        if saved != current:
            found.append(Difference(f"evidence.{name}", saved, current, "evidence"))
    if len(a.evidence.trials) != len(b.evidence.trials):
        found.append(Difference("evidence.trials", len(a.evidence.trials), len(b.evidence.trials), "evidence"))
    return tuple(found)


def _choices(a: Plan, b: Plan) -> Iterator[tuple[str, Any, Any]]:
    """Differing choices: by class where both plans have the same classes, else by table."""
    if a.config.path != b.config.path:
        yield "path", a.config.path, b.config.path
    yield from _mapping_differences("policy", a.config.policy, b.config.policy)
    if a.equivalence != b.equivalence:
        yield "equivalence", a.equivalence, b.equivalence
    same_classes = [(c.name, c.tables) for c in a.config.classes] == [(c.name, c.tables) for c in b.config.classes]
    knobs = []
    for plan in (a, b):
        knobs.append({c.name: c.knobs for c in plan.config.classes} if same_classes
                     else {table: c.knobs for c in plan.config.classes for table in c.tables})
    for name in dict.fromkeys([*knobs[0], *knobs[1]]):
        yield from _mapping_differences(name, knobs[0].get(name, {}), knobs[1].get(name, {}))


def _structure_differences(saved: Structure, current: Structure) -> Iterator[Difference]:
    for name in ("world_size", "device", "optimizers"):
        if getattr(saved, name) != getattr(current, name):
            yield Difference(name, getattr(saved, name), getattr(current, name), "refuse")
    for kind in ("tables", "features", "concats", "interactions"):
        here = {each.name: each for each in getattr(saved, kind)}
        there = {each.name: each for each in getattr(current, kind)}
        for name in dict.fromkeys([*here, *there]):
            yield from _entity_differences(f"{kind}.{name}", here.get(name), there.get(name))
    for kind in ("linears", "dense_modules"):                      # what is not there any more runs natively
        if getattr(saved, kind) != getattr(current, kind):
            yield Difference(kind, getattr(saved, kind), getattr(current, kind), "re-check")
    for name in ("uses", "in_batch"):
        if getattr(saved, name) != getattr(current, name):
            yield Difference(name, getattr(saved, name), getattr(current, name), "re-check")


def _entity_differences(where: str, saved: Any, current: Any) -> Iterator[Difference]:
    if saved is None or current is None:
        yield Difference(where, saved, current, "refuse")
        return
    for each in fields(saved):
        a, b = getattr(saved, each.name), getattr(current, each.name)
        if each.name == "optimizer" and a is not None and b is not None:
            a, b = (a.index, a.kind, a.fused_rule), (b.index, b.kind, b.fused_rule)       # the reason is for people
        if a != b:
            yield Difference(f"{where}.{each.name}", a, b, "refuse")


def _drift(saved: Mapping[str, Sketch], current: Mapping[str, Sketch]) -> Iterator[Difference]:
    for name in sorted(set(saved) & set(current)):
        for what, (here, there) in saved[name].drift(current[name]).items():
            yield Difference(f"sketches.{name}.{what}", here, there, "re-check")


def _hardware_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Difference]:
    for field, here, there in _mapping_differences("hardware", saved, current):
        yield Difference(field, here, there, "note" if field.endswith("_version") else "re-check")


def _mapping_differences(where: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*saved, *current]):
        if not same(saved.get(name), current.get(name)):
            yield f"{where}.{name}", saved.get(name), current.get(name)


def _text(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Table):
        return f"a table of {value.rows:,} x {value.dim}"
    if isinstance(value, Feature):
        return f"a lookup into {value.table}"
    if isinstance(value, Concat):
        return f"a concatenation of {len(value.parts)}"
    if isinstance(value, Linear):
        return f"{value.name} ({value.in_features} to {value.out_features}{', ReLU' if value.relu else ''})"
    if isinstance(value, Interaction):
        return f"products of the parts of {value.concat}"
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
