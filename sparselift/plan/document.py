"""A plan: what was chosen for one training step, why, and what must hold for it to fit. A JSON file that people read and edit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparselift import canonical
from sparselift.errors import PlanError
from sparselift.hardware import hardware
from sparselift.ir import POOLINGS, Graph, Structure
from sparselift.lift import lift
from sparselift.plan.evidence import Evidence
from sparselift.plan.show import show
from sparselift.space import Config, Constraints, SearchSpace, config_problems, constraint_problems, equivalence_of
from sparselift.stats import Sketch
from sparselift.workload import Workload

SCHEMA = 1

_FIELDS = ("schema", "workload", "structure", "batch_size", "config", "equivalence", "certificate", "evidence", "sketches", "hardware",
           "constraints", "checksum")


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run the sparse path of one training step.

    Two plans that choose the same thing for the same model, data and machine differ in evidence only.

    Attributes
    ----------
    workload     name of the workload that it was made for
    structure    signature: tables, lookups, what consumes them, optimizers
    batch_size   bags of the batch that was lifted
    config       the choice
    sketches     of the batches, by feature
    hardware     machine and library versions
    constraints  under which the config was chosen
    certificate  the last equivalence check of this config, or None
    evidence     what was measured
    edited       whether it comes from a file that was changed after it was saved

    Raises
    ------
    PlanError   a config that cannot run on the structure, or that breaks the constraints
    """

    workload: str
    structure: Structure
    batch_size: int
    config: Config
    sketches: Mapping[str, Sketch]
    hardware: Mapping[str, Any] = field(default_factory=dict)
    constraints: Constraints = field(default_factory=Constraints)
    certificate: Mapping[str, Any] | None = None
    evidence: Evidence = field(default_factory=Evidence)
    edited: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", canonical.rounded(self.hardware))
        object.__setattr__(self, "certificate", canonical.rounded(self.certificate))
        problems = config_problems(self.structure, self.config) or constraint_problems(self.structure, self.config, self.constraints)
        if problems:
            raise PlanError("the plan's config is refused: " + "; ".join(problems))

    @classmethod
    def default(cls, work: Workload, constraints: Constraints | None = None) -> Plan:
        """Lift a workload and choose by rules of thumb; nothing is measured. Raises LiftRefused and InfeasibleError."""
        return default_plan(lift(work), constraints, hardware().to_dict())

    @property
    def equivalence(self) -> str:
        """How results relate to native torch's: "bitwise", "reassociated", "lossy" or "stale"."""
        return equivalence_of(self.structure, self.config)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with a fresh checksum."""
        document = self._document()
        return {**document, "checksum": _checksum(document)}

    @classmethod
    def from_dict(cls, document: Any) -> Plan:
        """Inverse of `to_dict`.

        Raises PlanError for another schema, a field that is missing, unknown or ill-typed, or a choice that is unknown, illegal or
        against the plan's own constraints. A checksum that does not match is no error: see `edited`.
        """
        try:
            return _decode(document)
        except (ValueError, TypeError) as error:
            raise PlanError(str(error)) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all. Raises OSError naming the path."""
        canonical.write_atomic(path, canonical.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Raises PlanError as `from_dict` and for a file that is not JSON, OSError for one that cannot be read."""
        content = Path(path).read_bytes()
        try:
            return cls.from_dict(json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant))
        except UnicodeDecodeError as error:
            raise PlanError(f"{path}: not a plan: not UTF-8 text (byte {error.start})") from error
        except json.JSONDecodeError as error:
            raise PlanError(f"{path}: not a plan: not JSON: {error.msg}, line {error.lineno} column {error.colno}") from error
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def __hash__(self) -> int:
        return hash((self.workload, self.batch_size, self.config))

    def __str__(self) -> str:
        return show(self)

    def _document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "workload": self.workload,
            "structure": canonical.plain(self.structure),
            "batch_size": self.batch_size,
            "config": self.config.to_dict(),
            "equivalence": self.equivalence,
            "certificate": self.certificate,
            "evidence": canonical.plain(self.evidence),
            "sketches": {name: canonical.plain(sketch) for name, sketch in sorted(self.sketches.items())},
            "hardware": self.hardware,
            "constraints": self.constraints.to_dict(),
        }


def default_plan(graph: Graph, constraints: Constraints | None = None, hardware: Mapping[str, Any] | None = None) -> Plan:
    """The plan that rules of thumb choose, unmeasured. Raises InfeasibleError where no config satisfies the constraints."""
    space = SearchSpace(graph, constraints)
    note = "rules of thumb; nothing was measured"
    if space.blocked:
        note = "no planned config is feasible: " + "; ".join(space.blocked)
    return Plan(graph.workload, graph.structure, graph.batch_size, space.default, dict(graph.sketches), hardware or {}, space.constraints,
                evidence=Evidence(note=note))


def _decode(document: Any) -> Plan:
    if isinstance(document, dict) and document.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"schema {document['schema']!r} is unknown; this version reads {SCHEMA}")
    canonical.check_names(document, list(_FIELDS), "plan")
    structure = canonical.decode(Structure, document["structure"], "structure")
    _check_structure(structure)
    for name, kind in (("workload", str), ("batch_size", int), ("equivalence", str), ("sketches", dict), ("hardware", dict),
                       ("certificate", dict | None), ("checksum", str)):
        canonical.decode(kind, document[name], name)
    plan = Plan(
        document["workload"], structure, document["batch_size"], Config.from_dict(document["config"]),
        {name: _sketch(name, item) for name, item in document["sketches"].items()}, document["hardware"],
        Constraints.from_dict(document["constraints"]), document["certificate"],
        canonical.decode(Evidence, document["evidence"], "evidence"),
        edited=document["checksum"] != _checksum({name: value for name, value in document.items() if name != "checksum"}))
    if document["equivalence"] != plan.equivalence:
        raise ValueError(f"equivalence says {document['equivalence']!r}, but this config is {plan.equivalence!r}; "
                         "write that, or choose what keeps the promise")
    return plan


def _check_structure(structure: Structure) -> None:
    """What every reader of a structure relies on. Raises ValueError."""
    tables = [table.name for table in structure.tables]
    features = [feature.name for feature in structure.features]
    for kind, names in (("tables", tables), ("features", features)):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"structure.{kind} names {twice} twice")
    for table in structure.tables:
        if table.rows < 1 or table.dim < 1:
            raise ValueError(f"structure.tables: {table.name} must have rows and dim of at least 1; got {table.rows} and {table.dim}")
    for feature in structure.features:
        if feature.table not in tables:
            raise ValueError(f"structure.features: {feature.name} looks into {feature.table!r}, which is no table")
        if feature.pooling not in POOLINGS:
            raise ValueError(f"structure.features: {feature.name}: pooling must be one of {list(POOLINGS)}; got {feature.pooling!r}")
    for concat in structure.concats:
        if unknown := sorted(set(concat.features) - set(features)):
            raise ValueError(f"structure.concats: {concat.name} joins {unknown}, which are no features")


def _sketch(name: str, document: Any) -> Sketch:
    if not isinstance(document, dict):
        raise ValueError(f"sketches.{name} must be an object; got {document!r}")
    try:
        return Sketch.from_dict(document)
    except ValueError as error:
        raise ValueError(f"sketches.{name}: {error}") from error


def _checksum(document: Mapping[str, Any]) -> str:
    return canonical.digest(document, 32)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise PlanError(f"the fields {sorted({name for name in names if names.count(name) > 1})} are given twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise PlanError(f"{name} is no JSON number")
