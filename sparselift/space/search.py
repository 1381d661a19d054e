"""The space of configs of one graph under constraints: its dimensions, seeds, and which points are feasible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sparselift import canonical
from sparselift.errors import InfeasibleError
from sparselift.ir import Graph
from sparselift.rewrites import Knob, Rewrite, Site, Value, same
from sparselift.space.classes import size_classes
from sparselift.space.config import (
    POLICY,
    ClassConfig,
    Config,
    config_problems,
    knob_catalog,
    lookup_equivalence,
    memory_bytes,
    rewrites_at,
)
from sparselift.space.constraints import Constraints, Rejection, constraint_problems, settings_at


@dataclass(frozen=True, slots=True)
class Dimension:
    """One open choice. It exists only where every dimension named by `condition` has one of the values given there; a dimension that does
    not exist itself counts as its knob's off value.
    """

    name: str                      # "path", a policy knob, or "knob@class"
    choices: tuple[Value, ...]     # two or more
    condition: tuple[tuple[str, tuple[Value, ...], Value], ...] = ()       # (name, values, off)

    def active(self, params: Mapping[str, Value]) -> bool:
        return all(any(same(params.get(name, off), value) for value in values) for name, values, off in self.condition)


class SearchSpace:
    """Every config of a graph that is legal and within the constraints, but for the memory limit, which `check` tells by config.

    Attributes
    ----------
    classes     the graph's size classes
    dimensions  open choices, each after those it depends on; a choice with one legal value is fixed and not among them
    default     the config that rules of thumb choose; native where no planned config is feasible
    native      torch runs everything
    rejections  settings left out, with the reason
    blocked     why no planned config is feasible; empty if one is

    Raises
    ------
    ValueError       a pin names a size class that is not there
    InfeasibleError  no config satisfies the constraints: names the binding one and the smallest relaxation
    """

    def __init__(self, graph: Graph, constraints: Constraints | None = None) -> None:
        self.graph = graph
        self.constraints = constraints or Constraints()
        self.classes = size_classes(graph)
        self.native = Config.native()
        self._sites = Config("planned", {}, tuple(ClassConfig(each.name, each.tables, {}) for each in self.classes)).sites
        self._check_pins()
        self.rejections: tuple[Rejection, ...] = ()
        self._settings = {(site.name, rewrite.name): self._settings_of(site, rewrite) for site, rewrite in self._each_rewrite()}
        self._choices = {site.name: {knob.name: self._choices_of(site, rewrite, knob)
                                     for rewrite in rewrites_at(site) for knob in rewrite.knobs} for site in self._sites}
        self.blocked = self._why_blocked()
        self.default = self.native if self.blocked else self._preferred()
        self._paths = self._feasible_paths()
        if "planned" not in self._paths:
            self.default = self.native
        self.dimensions = tuple(self._dimensions())

    @property
    def fingerprint(self) -> str:
        """Equal for spaces in which the same parameters mean the same configs."""
        return canonical.digest({
            "dimensions": [[d.name, d.choices, d.condition] for d in self.dimensions],
            "fixed": [self._paths, self._choices],
            "classes": [[each.name, each.tables] for each in self.classes],
        })

    def toggles(self) -> tuple[tuple[str, Config], ...]:
        """Every knob alone switched at all its sites: off where the default has it on somewhere, else to its first other choice."""
        found: list[tuple[str, Config]] = []
        if self.default.path == "native":
            return ()
        seen = {self.default}
        for name in dict.fromkeys(knob.name for _, rewrite in self._each_rewrite() for knob in rewrite.knobs):
            for target in self._toggle_targets(name):
                config = self._switched(name, target)
                if config not in seen and not self.check(config):
                    seen.add(config)
                    found.append((f"{name}={target}", config))
                    break
        return tuple(found)

    def check(self, config: Config) -> tuple[str, ...]:
        """Every reason why a config is infeasible: illegal, against a constraint, or too large. Empty for a feasible one."""
        if found := config_problems(self.graph.structure, config):
            return found
        if config.path == "planned" and not self._has_classes_of(config):
            found += ("the config's size classes are not those of this space",)
        return found + constraint_problems(self.graph.structure, config, self.constraints) + self._memory_problems(config)

    def to_params(self, config: Config) -> dict[str, Value]:
        """The open choices of a config by dimension name. Raises ValueError for a config of another space, naming what differs."""
        if config.path == "planned" and not self._has_classes_of(config):
            raise ValueError("the config's size classes are not those of this space: "
                             f"{[c.name for c in config.classes]} and {[c.name for c in self.classes]}")
        known = {_dimension_name(knob, site): value for site, knobs in _values(config).items() for knob, value in knobs.items()}
        known["path"] = config.path
        params: dict[str, Value] = {}
        for dimension in self.dimensions:
            if dimension.active(params):
                params[dimension.name] = known[dimension.name]
        if (back := self.from_params(params)) != config:
            raise ValueError("the config is outside this space; the nearest one inside has "
                             + "; ".join(_differences(config, back)))
        return params

    def from_params(self, params: Mapping[str, Value]) -> Config:
        """Inverse of `to_params`. Raises ValueError for a parameter that is unknown, missing, without effect, or no choice."""
        used: dict[str, Value] = {}
        for dimension in self.dimensions:
            if not dimension.active(used):
                continue
            if dimension.name not in params:
                raise ValueError(f"parameter {dimension.name!r} is missing; choose from {list(dimension.choices)}")
            if not any(same(params[dimension.name], choice) for choice in dimension.choices):
                raise ValueError(f"parameter {dimension.name!r} must be one of {list(dimension.choices)}; got {params[dimension.name]!r}")
            used[dimension.name] = params[dimension.name]
        if extra := sorted(set(params) - set(used)):
            names = {dimension.name for dimension in self.dimensions}
            raise ValueError("; ".join(f"parameter {name!r} " + ("has no effect beside the others" if name in names else "is unknown")
                                       for name in extra))
        if used.get("path", self._paths[0]) == "native":
            return self.native
        return self._settled({site.name: {knob: used[key] for knob in self._choices[site.name]
                                          if (key := _dimension_name(knob, site.name)) in used} for site in self._sites})

    # How the space is found. A setting is one combination of a rewrite's own knobs at one site.

    def _each_rewrite(self) -> Iterator[tuple[Site, Rewrite]]:
        return ((site, rewrite) for site in self._sites for rewrite in rewrites_at(site))

    def _check_pins(self) -> None:
        known = [each.name for each in self.classes]
        for key, value in self.constraints.pin.items():
            name, _, site = key.partition("@")
            if site and site not in known:
                raise ValueError(f"pin {key}: there is no size class {site!r}; there are {known}")
            if not site and name != "path" and self._may_plan:
                self._check_applies(name, value)

    def _check_applies(self, name: str, value: Value) -> None:
        """A pin of all classes has to be legal in one."""
        rewrite, knob = knob_catalog()[name]
        sites = [site for site in self._sites if rewrite in rewrites_at(site)]
        if not any(self.constraints.pinned(self.graph.structure, rewrite, knob, site) is not None for site in sites):
            settings_with = [setting for setting in rewrite.combinations() if same(setting[name], value)]
            reasons = dict.fromkeys(f"{site.name}: {rewrite.legal(self.graph.structure, site, settings_with[0])}" for site in sites)
            raise InfeasibleError(f"the pin {name}={value!r} is legal in no size class: {'; '.join(reasons)}; take it away")

    def _settings_of(self, site: Site, rewrite: Rewrite) -> tuple[dict[str, Value], ...]:
        """Feasible settings. Raises InfeasibleError where pins leave none."""
        kept, rejected = settings_at(self.graph.structure, self.constraints, site, rewrite)
        self.rejections += rejected
        pins = [f"{knob.name}={pinned!r}" for knob in rewrite.knobs
                if (pinned := self.constraints.pinned(self.graph.structure, rewrite, knob, site)) is not None]
        if not kept and pins and self._may_plan:
            own = tuple(f"{knob.name} is pinned to" for knob in rewrite.knobs)
            why = "; ".join(dict.fromkeys(each.reason for each in rejected if not each.reason.startswith(own)))
            raise InfeasibleError(f"the pin {', '.join(pins)} cannot be met at {site.name}"
                                  + (f": {why}" if why else "") + "; take it away there, or pin path to 'native'")
        return kept

    @property
    def _may_plan(self) -> bool:
        return self.constraints.pin.get("path") != "native"

    def _choices_of(self, site: Site, rewrite: Rewrite, knob: Knob) -> tuple[Value, ...]:
        """Values of a knob that some feasible setting has where the knob is active."""
        found = [setting[knob.name] for setting in self._settings[site.name, rewrite.name] if knob.active(setting)]
        return tuple(choice for choice in knob.choices if any(same(choice, value) for value in found))

    def _why_blocked(self) -> tuple[str, ...]:
        if not self._may_plan:
            return ("path is pinned to 'native'",)
        found = []
        lookup_class, reason = lookup_equivalence(self.graph.structure)
        if not self.constraints.admits(lookup_class):
            found.append(f"equivalence={self.constraints.equivalence!r} is demanded, and a planned step is {lookup_class}: {reason}")
        for site, rewrite in self._each_rewrite():
            if not self._settings[site.name, rewrite.name]:
                found += [str(each) for each in self.rejections if (each.site, each.rewrite) == (site.name, rewrite.name)]
        if not self.graph.structure.features:
            found.append("no lookup was lifted")
        return tuple(found)

    def _preferred(self) -> Config:
        """The default: at every site the feasible setting nearest to what each rewrite prefers, or the leanest where that is too large."""
        values: dict[str, dict[str, Value]] = {}
        for site, rewrite in self._each_rewrite():
            wish = rewrite.prefer(self.graph, site)
            best = min(self._settings[site.name, rewrite.name],
                       key=lambda setting: [not same(setting[knob.name], wish[knob.name]) for knob in rewrite.knobs])
            values.setdefault(site.name, {}).update(best)
        config = self._settled(values)
        return self._leanest() if self._memory_problems(config) else config

    def _leanest(self) -> Config:
        """The planned config with the least memory: rewrites add to it independently of one another."""
        values: dict[str, dict[str, Value]] = {}
        for site, rewrite in self._each_rewrite():
            best = min(self._settings[site.name, rewrite.name], key=lambda setting: rewrite.memory_bytes(self.graph, site, setting))
            values.setdefault(site.name, {}).update(best)
        return self._settled(values)

    def _feasible_paths(self) -> tuple[str, ...]:
        """Raises InfeasibleError where neither path is left."""
        pinned = self.constraints.pin.get("path")
        if pinned == "planned" and self.blocked:
            raise InfeasibleError("path is pinned to 'planned', and no planned config is feasible: " + "; ".join(self.blocked))
        candidates = {"native": self.native} if self.blocked else {"native": self.native, "planned": self._leanest()}
        if pinned is not None:
            candidates = {path: config for path, config in candidates.items() if path == pinned}
        fitting = tuple(path for path, config in candidates.items() if not self._memory_problems(config))
        if not fitting:
            need, path = min((sum(memory_bytes(self.graph, config).values()), path) for path, config in candidates.items())
            raise InfeasibleError(f"memory_bytes={self.constraints.memory_bytes:,} is the binding constraint: the leanest config "
                                  f"({path}) needs {need:,} bytes; allow that many")
        if "planned" not in fitting and not self.blocked:
            self.blocked = self._memory_problems(candidates["planned"])
        return fitting

    def _dimensions(self) -> Iterator[Dimension]:
        planned: tuple[tuple[str, tuple[Value, ...], Value], ...] = ()
        if len(self._paths) > 1:
            yield Dimension("path", self._paths)
            planned = (("path", ("planned",), "native"),)
        if "planned" not in self._paths:
            return
        for site, rewrite in self._each_rewrite():
            for knob in rewrite.knobs:
                condition = self._condition(site, knob)
                if condition is not None and len(self._choices[site.name][knob.name]) > 1:
                    yield Dimension(_dimension_name(knob.name, site.name), self._choices[site.name][knob.name], planned + condition)

    def _condition(self, site: Site, knob: Knob) -> tuple[tuple[str, tuple[Value, ...], Value], ...] | None:
        """When the knob has an effect, in terms of open choices; None if never."""
        found = []
        off = {other.name: other.off for rewrite in rewrites_at(site) for other in rewrite.knobs}
        for name, values in knob.requires:
            choices = self._choices[site.name][name]
            met = tuple(choice for choice in choices if any(same(choice, value) for value in values))
            if not met:
                return None
            if len(met) < len(choices):
                found.append((_dimension_name(name, site.name), met, off[name]))
        return tuple(found)

    # How configs are made.

    def _has_classes_of(self, config: Config) -> bool:
        return [(each.name, each.tables) for each in config.classes] == [(each.name, each.tables) for each in self.classes]

    def _settled(self, values: Mapping[str, Mapping[str, Value]]) -> Config:
        """The planned config with these values by site. Fixed knobs get their only choice, knobs without effect their off value."""
        settled: dict[str, dict[str, Value]] = {}
        for site in self._sites:
            here = settled.setdefault(site.name, {})
            for rewrite in rewrites_at(site):
                for knob in rewrite.knobs:
                    choices = self._choices[site.name][knob.name]
                    if not choices or not knob.active(here):
                        here[knob.name] = knob.off
                    else:
                        wish = values.get(site.name, {}).get(knob.name, choices[0])
                        here[knob.name] = wish if any(same(wish, choice) for choice in choices) else choices[0]
        return Config("planned", settled[POLICY], tuple(ClassConfig(each.name, each.tables, settled[each.name]) for each in self.classes))

    def _toggle_targets(self, name: str) -> Iterator[Value]:
        for site, rewrite in self._each_rewrite():
            for knob in rewrite.knobs:
                if knob.name == name:
                    on = any(name in knobs and not same(knobs[name], knob.off) for knobs in _values(self.default).values())
                    if on:
                        yield knob.off
                    else:
                        yield from (choice for choice in self._choices[site.name][name] if not same(choice, knob.off))

    def _switched(self, name: str, target: Value) -> Config:
        """The default with one knob at `target` wherever that is a choice, and what this requires of other knobs."""
        values = _values(self.default)
        for site, rewrite in self._each_rewrite():
            for knob in rewrite.knobs:
                if knob.name != name or not any(same(target, choice) for choice in self._choices[site.name].get(name, ())):
                    continue
                knobs = values[site.name]
                knobs[name] = target
                if not same(target, knob.off):
                    knobs.update({other: allowed[0] for other, allowed in knob.requires
                                  if not any(same(knobs[other], value) for value in allowed)})
        return self._settled(values)

    def _memory_problems(self, config: Config) -> tuple[str, ...]:
        if self.constraints.memory_bytes is None:
            return ()
        parts = memory_bytes(self.graph, config)
        if (need := sum(parts.values())) <= self.constraints.memory_bytes:
            return ()
        return (f"memory_bytes={self.constraints.memory_bytes:,} is exceeded: {need:,} bytes are predicted ("
                + ", ".join(f"{name} {held:,}" for name, held in parts.items()) + ")",)


def _dimension_name(knob: str, site: str) -> str:
    return knob if site == POLICY else f"{knob}@{site}"


def _values(config: Config) -> dict[str, dict[str, Value]]:
    """Knobs by site, to be changed freely."""
    return {POLICY: dict(config.policy), **{each.name: dict(each.knobs) for each in config.classes}}


def _differences(a: Config, b: Config) -> list[str]:
    found = [f"path={b.path!r} for {a.path!r}"] if a.path != b.path else []
    there = _values(b)
    return found + [f"{_dimension_name(name, site)}={there[site][name]!r} for {value!r}" for site, knobs in _values(a).items()
                    for name, value in knobs.items() if name in there.get(site, {}) and not same(there[site][name], value)]
