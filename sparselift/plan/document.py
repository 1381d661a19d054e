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
from sparselift.ir import DEVICES, FORMS, INDEX_DTYPES, POOLINGS, TABLE_DTYPES, Feature, Graph, InputPath, Interaction, Structure, Table
from sparselift.kernels.base import WEIGHT_DTYPES
from sparselift.kernels.interaction import ORDERS
from sparselift.lift import lift
from sparselift.plan.evidence import Evidence, Interval
from sparselift.plan.show import show
from sparselift.space import Config, Constraints, SearchSpace, config_problems, constraint_problems, equivalence_of
from sparselift.stats import Sketch
from sparselift.workload import USES, Workload, check_kind

SCHEMA = 1

_MAX_WHOLE = 2**63 - 1             # kernels count in 64 bits
_MAX_WIDTH = 2**31 - 1             # columns of a concatenation's part, far beyond what memory holds
_LONG_S = 1e9                      # above any step time in seconds, and any ratio of two

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
        except RecursionError as error:
            raise PlanError("not a plan: nested too deeply") from error
        except (ValueError, TypeError, ArithmeticError) as error:
            raise PlanError(str(error)) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all. Raises OSError naming the path."""
        canonical.write_atomic(path, canonical.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Raises PlanError as `from_dict` and for a file that is not JSON, OSError for one that cannot be read."""
        content = Path(path).read_bytes()
        try:
            return cls.from_dict(json.loads(content.decode("utf-8"), object_pairs_hook=_object, parse_int=_whole_number,
                                            parse_constant=_refuse_constant))
        except UnicodeDecodeError as error:
            raise PlanError(f"{path}: not a plan: not UTF-8 text (byte {error.start})") from error
        except json.JSONDecodeError as error:
            raise PlanError(f"{path}: not a plan: not JSON: {error.msg}, line {error.lineno} column {error.colno}") from error
        except RecursionError as error:
            raise PlanError(f"{path}: not a plan: nested too deeply") from error
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


def check_plan(call: str, value: object) -> None:
    """Raises TypeError unless `value` is a Plan."""
    made_by = f"sl.Plan.load({os.fspath(value)!r})" if isinstance(value, (str, os.PathLike)) else "sl.Plan.load(path)"
    check_kind(call, "plan", value, Plan, made_by)


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
    evidence = canonical.decode(Evidence, document["evidence"], "evidence")
    _check_evidence(evidence)
    for name, kind in (("workload", str), ("batch_size", int), ("equivalence", str), ("sketches", dict), ("hardware", dict),
                       ("certificate", dict | None), ("checksum", str)):
        canonical.decode(kind, document[name], name)
    plan = Plan(
        document["workload"], structure, document["batch_size"], Config.from_dict(document["config"]),
        {name: _sketch(name, item) for name, item in document["sketches"].items()}, document["hardware"],
        Constraints.from_dict(document["constraints"]), document["certificate"],
        evidence,
        edited=document["checksum"] != _checksum({name: value for name, value in document.items() if name != "checksum"}))
    if document["equivalence"] != plan.equivalence:
        raise ValueError(f"equivalence says {document['equivalence']!r}, but this config is {plan.equivalence!r}; "
                         "write that, or choose what keeps the promise")
    return plan


def _check_structure(structure: Structure) -> None:
    """What every reader of a structure relies on. Raises ValueError."""
    tables = {table.name: table for table in structure.tables}
    features = {feature.name for feature in structure.features}
    for kind in ("tables", "features", "concats", "interactions", "linears", "dense_modules"):
        names = [each.name for each in getattr(structure, kind)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"structure.{kind} names {twice} twice")
    if structure.device not in DEVICES:
        raise ValueError(f"structure.device must be one of {list(DEVICES)}; got {structure.device!r}")
    if structure.world_size < 1:
        raise ValueError(f"structure.world_size must be at least 1; got {structure.world_size}")
    if unknown := sorted(set(structure.uses or ()) - USES):
        raise ValueError(f"structure.uses may hold {sorted(USES)}; got {unknown}")
    for table in structure.tables:
        _check_table(table, len(structure.optimizers))
    if unknown := sorted(set(structure.in_batch) - features):
        raise ValueError(f"structure.in_batch names {unknown}, which are no features")
    for feature in structure.features:
        if feature.table not in tables:
            raise ValueError(f"structure.features: {feature.name} looks into {feature.table!r}, which is no table")
        _check_feature(feature, tables[feature.table].rows)
    for concat in structure.concats:
        where = f"structure.concats: {concat.name}"
        if unknown := sorted(set(concat.features) - features):
            raise ValueError(f"{where} joins {unknown}, which are no features")
        if concat.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{where}: dtype must be one of {list(WEIGHT_DTYPES)}; got {concat.dtype!r}")
        for width in concat.parts:
            if isinstance(width, int) and not 0 <= width <= _MAX_WIDTH:
                raise ValueError(f"{where}: parts must hold features and widths between 0 and {_MAX_WIDTH}; got {width}")
    for interaction in structure.interactions:
        _check_interaction(interaction, structure)
    for linear in structure.linears:
        if not all(1 <= size <= _MAX_WIDTH for size in (linear.in_features, linear.out_features)):
            raise ValueError(f"structure.linears: {linear.name}: in_features and out_features must be between 1 and {_MAX_WIDTH}; "
                             f"got {linear.in_features} and {linear.out_features}")


def _check_interaction(interaction: Interaction, structure: Structure) -> None:
    where = f"structure.interactions: {interaction.name}"
    concat = next((each for each in structure.concats if each.name == interaction.concat), None)
    if concat is None:
        raise ValueError(f"{where} multiplies the parts of {interaction.concat!r}, which is no concat")
    widths = {part if isinstance(part, int) else structure.table(structure.feature(part).table).dim for part in concat.parts}
    if len(widths) != 1 or widths == {0}:
        raise ValueError(f"{where}: the parts of {concat.name} must have one and the same number of columns; got {sorted(widths)}")
    if not 0 <= interaction.passed < len(concat.parts) or not isinstance(concat.parts[interaction.passed], int):
        raise ValueError(f"{where}: passed must be the place of a part of {concat.name} that is no lookup; got {interaction.passed}")
    if interaction.order not in ORDERS:
        raise ValueError(f"{where}: order must be one of {list(ORDERS)}; got {interaction.order!r}")


def _check_table(table: Table, optimizers: int) -> None:
    where = f"structure.tables: {table.name}"
    if table.rows < 1 or table.dim < 1:
        raise ValueError(f"{where} must have rows and dim of at least 1; got {table.rows} and {table.dim}")
    if table.dtype not in TABLE_DTYPES:
        raise ValueError(f"{where}: dtype must be one of {list(TABLE_DTYPES)}; got {table.dtype!r}")
    if table.nbytes > _MAX_WHOLE:
        raise ValueError(f"{where}: rows and dim must make a table of at most {_MAX_WHOLE} bytes; got {table.rows} and {table.dim}")
    if table.optimizer is not None and not 0 <= table.optimizer.index < optimizers:
        raise ValueError(f"{where}: optimizer.index must name one of {optimizers} optimizers; got {table.optimizer.index}")


def _check_feature(feature: Feature, rows: int) -> None:
    where = f"structure.features: {feature.name}"
    for name, known in (("pooling", POOLINGS), ("form", FORMS), ("index_dtype", INDEX_DTYPES)):
        if getattr(feature, name) not in known:
            raise ValueError(f"{where}: {name} must be one of {list(known)}; got {getattr(feature, name)!r}")
    if feature.call < 0:
        raise ValueError(f"{where}: call must be at least 0; got {feature.call}")
    if feature.padding_idx is not None and not 0 <= feature.padding_idx < rows:
        raise ValueError(f"{where}: padding_idx must be null or in [0, {rows}); got {feature.padding_idx}")
    for name in ("indices", "offsets", "weights"):
        path: InputPath | None = getattr(feature, name)
        if path is not None and path.keys[:1] not in (("args",), ("kwargs",)):
            raise ValueError(f"{where}: {name}.keys must begin with 'args' or 'kwargs'; got {list(path.keys)}")


def _check_evidence(evidence: Evidence) -> None:
    """Times and ratios are scaled, and divided by."""
    for name in ("native", "planned", "default", "speedup"):
        interval: Interval | None = getattr(evidence, name)
        if interval is not None and not all(0 < value < _LONG_S for value in (interval.low, interval.value, interval.high)):
            raise ValueError(f"evidence.{name} must be above 0 and below {_LONG_S:g}; "
                             f"got {interval.value} [{interval.low}, {interval.high}]")
    for i, trial in enumerate(evidence.trials):
        for name in ("ratio", "step_s", "low", "high"):
            if (value := getattr(trial, name)) is not None and not 0 < value < _LONG_S:
                raise ValueError(f"evidence.trials[{i}].{name} must be null, or above 0 and below {_LONG_S:g}; got {value}")


def _sketch(name: str, document: Any) -> Sketch:
    if not isinstance(document, dict):
        raise ValueError(f"sketches.{name} must be an object; got {document!r}")
    try:
        return Sketch.from_dict(document)
    except ValueError as error:
        raise ValueError(f"sketches.{name}: {error}") from error


def _checksum(document: Mapping[str, Any]) -> str:
    return canonical.digest(document, 32)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise PlanError(f"the fields {sorted({name for name in names if names.count(name) > 1})} are given twice in one object")
    for name, value in pairs:
        _check_whole(name, value)
    return found


@dataclass(frozen=True, slots=True)
class _TooLarge:
    """A whole number that no field can hold, until the field is known."""

    digits: int


def _whole_number(text: str) -> int | _TooLarge:
    digits = len(text.lstrip("-"))
    return _TooLarge(digits) if digits > len(str(_MAX_WHOLE)) or abs(int(text)) > _MAX_WHOLE else int(text)


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, _TooLarge):
        raise PlanError(f"the field {name!r} holds a whole number of {value.digits} digits; the largest is {_MAX_WHOLE}")
    if isinstance(value, list):
        for item in value:
            _check_whole(name, item)


def _refuse_constant(name: str) -> Any:
    raise PlanError(f"{name} is no JSON number")
