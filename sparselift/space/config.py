"""A config: every knob of one way to run the sparse path, by site. What it is worth, and whether it is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparselift import canonical
from sparselift.ir import Graph, Structure
from sparselift.rewrites import CATALOG, Knob, Rewrite, Site, SizeClass, Value, same, weakest
from sparselift.rewrites.base import outputs_per_batch, sketch_of, state_row_bytes

PATHS = ("native", "planned")
POLICY = "policy"                  # name of the site of policy knobs


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """The knobs of one size class."""

    name: str
    tables: tuple[str, ...]
    knobs: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Config:
    """One point of the search space. Native means that torch runs everything; then there is nothing else to choose.

    Planned, it names every knob of every site; one without effect has its off value, so that equal configs are equal choices.
    The mappings are not to be changed.
    """

    path: str
    policy: Mapping[str, Value]
    classes: tuple[ClassConfig, ...]

    @classmethod
    def native(cls) -> Config:
        return cls("native", {}, ())

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where rewrites apply: the policy first, then a site a class."""
        classes = tuple(SizeClass(each.name, each.tables) for each in self.classes)
        return (Site(POLICY, classes), *(Site(each.name, (each,)) for each in classes))

    def knobs_at(self, site: str) -> dict[str, Value]:
        """Policy knobs, and those of the class of this name. Raises KeyError for an unknown class."""
        if site == POLICY:
            return dict(self.policy)
        for each in self.classes:
            if each.name == site:
                return {**self.policy, **each.knobs}
        raise KeyError(f"no size class {site!r}; there are {[each.name for each in self.classes]}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return canonical.plain(self)

    @classmethod
    def from_dict(cls, document: Any) -> Config:
        """Inverse of `to_dict`. Raises ValueError naming the field that is missing, unknown or of another type."""
        return canonical.decode(cls, document, "config")

    @property
    def digest(self) -> str:
        """Equal for equal choices, in every process."""
        return canonical.digest(self.to_dict())

    def __hash__(self) -> int:
        return hash(self.digest)


def rewrites_at(site: Site) -> tuple[Rewrite, ...]:
    """The catalog's rewrites of the site's scope."""
    scope = "policy" if site.name == POLICY else "class"
    return tuple(rewrite for rewrite in CATALOG if rewrite.scope == scope)


def knob_catalog() -> dict[str, tuple[Rewrite, Knob]]:
    """Every knob by name, with the rewrite that it belongs to."""
    return {knob.name: (rewrite, knob) for rewrite in CATALOG for knob in rewrite.knobs}


def config_problems(structure: Structure, config: Config) -> tuple[str, ...]:
    """Why a config cannot run on this structure: unknown or missing knobs and choices, tables that are not in exactly one class,
    and illegal rewrites. Empty for a legal config.
    """
    if config.path not in PATHS:
        return (f"path must be one of {list(PATHS)}; got {config.path!r}",)
    if config.path == "native":
        return () if not config.policy and not config.classes else ("path='native' takes no policy and no classes",)
    found = _membership_problems(structure, config)
    for site in config.sites:
        found += _knob_problems(site, dict(config.policy) if site.name == POLICY else _class_knobs(config, site.name))
    return tuple(found or _illegal(structure, config))


def equivalence_of(structure: Structure, config: Config) -> str:
    """The weakest class among the config's rewrites. Raises KeyError where a knob or class is missing."""
    if config.path == "native":
        return "bitwise"
    return weakest([lookup_equivalence(structure)[0],
                    *(rewrite.equivalence(structure, site, config.knobs_at(site.name))
                      for site in config.sites for rewrite in rewrites_at(site))])


def lookup_equivalence(structure: Structure) -> tuple[str, str]:
    """The class of a planned lookup before any rewrite, and why it is not bitwise."""
    for feature in structure.features:
        dtype = structure.table(feature.table).dtype
        if dtype != "float32" and feature.pooling in ("sum", "mean"):
            return "reassociated", (f"lookup {feature.name}: a bag of {dtype} rows is summed in float32 and rounded once, by torch in "
                                    "roundings of its own")
        if feature.weighted and feature.weights is None:
            return "reassociated", (f"lookup {feature.name}: the gradient of per-sample weights that the model computes is a dot product, "
                                    "summed in another order than torch's")
        if structure.device == "cuda" and feature.pooling in ("sum", "mean"):
            return "reassociated", f"lookup {feature.name}: on CUDA a bag of more ids than a chunk has is summed in pieces"
    return "bitwise", ""


def setup_s(structure: Structure, config: Config, first: bool = True) -> float:
    """Seconds, about, that a process spends on a config before its first step, of the rewrites that know of any. `first`: none before it
    has spent them.
    """
    if config.path == "native":
        return 0.0
    return sum(rewrite.setup_s(structure, site, config.knobs_at(site.name), first)
               for site in config.sites for rewrite in rewrites_at(site))


def memory_bytes(graph: Graph, config: Config) -> dict[str, int]:
    """Predicted memory of a step's sparse path by kind: weights, optimizer_state, outputs, indices, and one entry a rewrite.

    Natively gradients count as `gradients`; planned, they are part of "fuse_update".
    """
    structure = graph.structure
    found = {
        "weights": sum(table.nbytes for table in structure.tables),
        "optimizer_state": sum(table.rows * state_row_bytes(table) for table in structure.tables),
        "outputs": round(sum(structure.table(f.table).row_bytes * outputs_per_batch(graph, f) for f in structure.features)),
    }
    if config.path == "native":
        classes = (SizeClass("all", tuple(table.name for table in structure.tables)),)
        fuse = next(rewrite for rewrite in CATALOG if rewrite.name == "fuse_update")
        found["gradients"] = fuse.memory_bytes(graph, Site("all", classes), {knob.name: knob.off for knob in fuse.knobs})
        return found
    sketches = [sketch_of(graph, feature.name) for feature in structure.features]
    found["float32_outputs"] = round(sum(          # of kernels, before they are rounded
        4 * table.dim * outputs_per_batch(graph, f) for f in structure.features if (table := structure.table(f.table)).dtype != "float32"))
    found["indices"] = round(sum(4 * (sketch.lookups_per_batch + sketch.bags_per_batch) for sketch in sketches))
    for site in config.sites:
        for rewrite in rewrites_at(site):
            held = rewrite.memory_bytes(graph, site, config.knobs_at(site.name))
            found[rewrite.name] = found.get(rewrite.name, 0) + held
    return {name: held for name, held in found.items() if held}


def _class_knobs(config: Config, name: str) -> dict[str, Value]:
    return dict(next(each.knobs for each in config.classes if each.name == name))


def _membership_problems(structure: Structure, config: Config) -> list[str]:
    found = []
    known = {table.name: table for table in structure.tables}
    owner: dict[str, str] = {}
    names: set[str] = set()
    for each in config.classes:
        if each.name in names or each.name == POLICY:
            found.append(f"two size classes are named {each.name!r}" if each.name in names else f"a size class cannot be named {POLICY!r}")
        names.add(each.name)
        for table in each.tables:
            if table not in known:
                found.append(f"class {each.name}: there is no table {table!r}")
            elif table in owner:
                found.append(f"table {table!r} is in two classes, {owner[table]} and {each.name}")
            owner.setdefault(table, each.name)
    return found + [f"table {table!r} is in no class" for table in known if table not in owner]


def _knob_problems(site: Site, knobs: Mapping[str, Value]) -> list[str]:
    known = {knob.name: knob for rewrite in rewrites_at(site) for knob in rewrite.knobs}
    where = "policy" if site.name == POLICY else f"class {site.name}"
    found = [f"{where}: unknown knob {name!r}; there are {sorted(known)}" for name in knobs if name not in known]
    for name, knob in known.items():
        if name not in knobs:
            found.append(f"{where}: knob {name!r} is missing; choose from {list(knob.choices)}")
        elif not knob.holds(knobs[name]):
            found.append(f"{where}: {name} must be one of {list(knob.choices)}; got {knobs[name]!r}")
        elif not knob.active(knobs) and not same(knobs[name], knob.off):
            needs = " and ".join(f"{other} in {list(values)}" for other, values in knob.requires)
            found.append(f"{where}: {name}={knobs[name]!r} has an effect only with {needs}; without it, write {knob.off!r}")
    return found


def _illegal(structure: Structure, config: Config) -> list[str]:
    found = []
    for site in config.sites:
        for rewrite in rewrites_at(site):
            knobs = config.knobs_at(site.name)
            if reason := rewrite.legal(structure, site, knobs):
                chosen = ", ".join(f"{knob.name}={knobs[knob.name]!r}" for knob in rewrite.knobs)
                found.append(f"{'policy' if site.name == POLICY else f'class {site.name}'}: {chosen} is illegal: {reason}")
    return found
