"""What a user demands of a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparselift import canonical
from sparselift.ir import Structure
from sparselift.rewrites import CATALOG, EQUIVALENCES, Knob, Rewrite, Site, Value, same
from sparselift.space.config import PATHS, POLICY, Config, knob_catalog, lookup_equivalence, rewrites_at


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits of a search. Every one is checked before anything runs.

    Parameters
    ----------
    memory_bytes   limit of the predicted memory of tables, optimizer state and a step's sparse path; None: no limit
    equivalence    weakest class of rounding admitted: "bitwise", "reassociated", "lossy" or "stale"
    allow          names of rewrites: if there are any, no other is used
    deny           names of rewrites that are not used
    pin            values of knobs: {"prefetch@d16-sum-to2M-few-dup": 16} in one size class, {"prefetch": 8} in all where it is legal;
                   policy knobs and "path" too
    lossy_consent  names of rewrites that may change results by their stated bound

    Raises
    ------
    ValueError   an unknown name, class or choice, a limit below 1, a rewrite both allowed and denied
    TypeError    a string where a collection of names is due
    """

    memory_bytes: int | None = None
    equivalence: str = "reassociated"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    pin: Mapping[str, Value] = field(default_factory=dict)
    lossy_consent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and (isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int)
                                              or self.memory_bytes < 1):
            raise ValueError(f"memory_bytes must be a whole number of bytes, at least 1, or None; got {self.memory_bytes!r}")
        if self.equivalence not in EQUIVALENCES:
            raise ValueError(f"equivalence must be one of {list(EQUIVALENCES)}; got {self.equivalence!r}")
        for name in ("allow", "deny", "lossy_consent"):
            object.__setattr__(self, name, _rewrite_names(name, getattr(self, name)))
        if both := sorted(set(self.allow) & set(self.deny)):
            raise ValueError(f"allow and deny both name {both}")
        object.__setattr__(self, "pin", dict(sorted(self.pin.items())))
        for key, value in self.pin.items():
            _check_pin(key, value)

    def __hash__(self) -> int:
        return hash((self.memory_bytes, self.equivalence, self.allow, self.deny, tuple(self.pin.items()), self.lossy_consent))

    def pinned(self, structure: Structure, rewrite: Rewrite, knob: Knob, site: Site) -> Value | None:
        """The value that a knob must have at a site, or None.

        A pin of one class holds whatever comes; a pin of all leaves out classes where no legal setting has that value.
        """
        exact = self.pin.get(f"{knob.name}@{site.name}")
        if exact is not None or knob.name not in self.pin:
            return exact
        value = self.pin[knob.name]
        legal = rewrite.scope == POLICY or any(same(setting[knob.name], value) and rewrite.legal(structure, site, setting) is None
                                               for setting in rewrite.combinations())
        return value if legal else None

    def admits(self, equivalence: str) -> bool:
        """Whether a class of rounding is within the demanded one."""
        return EQUIVALENCES.index(equivalence) <= EQUIVALENCES.index(self.equivalence)

    def objection(self, structure: Structure, rewrite: Rewrite, site: Site, knobs: Mapping[str, Value]) -> str | None:
        """Which constraint these choices of a rewrite break at a site, or None. `knobs` holds all of the rewrite's own."""
        for knob in rewrite.knobs:
            pinned = self.pinned(structure, rewrite, knob, site)
            if pinned is not None and not same(pinned, knobs[knob.name]):
                return f"{knob.name} is pinned to {pinned!r}"
        if rewrite.applied(knobs) and rewrite.name in self.deny:
            return f"{rewrite.name} is denied"
        if rewrite.applied(knobs) and self.allow and rewrite.name not in self.allow:
            return f"{rewrite.name} is not among the allowed {list(self.allow)}"
        found = rewrite.equivalence(structure, site, knobs)
        if not self.admits(found):
            return f"equivalence={self.equivalence!r} is demanded, and this is {found}"
        if found == "lossy" and rewrite.name not in self.lossy_consent:
            return f"{rewrite.name} is lossy, and lossy_consent does not name it"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return canonical.plain(self)

    @classmethod
    def from_dict(cls, document: Any) -> Constraints:
        """Inverse of `to_dict`. Raises ValueError or TypeError naming the field."""
        return canonical.decode(cls, document, "constraints")


@dataclass(frozen=True, slots=True)
class Rejection:
    """A setting of one rewrite at one site that is out of the question, and why."""

    site: str
    rewrite: str
    knobs: Mapping[str, Value]
    reason: str
    constraint: bool               # it is legal, and a constraint forbids it

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.knobs.items())
        return f"{self.site}: {chosen}: {self.reason}"


def settings_at(structure: Structure, constraints: Constraints, site: Site,
                rewrite: Rewrite) -> tuple[tuple[dict[str, Value], ...], tuple[Rejection, ...]]:
    """Every combination of a rewrite's own knobs at a site: the feasible ones, and the others with their reason."""
    kept: list[dict[str, Value]] = []
    rejected: list[Rejection] = []
    for setting in rewrite.combinations():
        illegal = rewrite.legal(structure, site, setting)
        reason = (illegal or _pinned_away(structure, constraints, site, setting)
                  or constraints.objection(structure, rewrite, site, setting))
        if reason is None:
            kept.append(setting)
        else:
            rejected.append(Rejection(site.name, rewrite.name, setting, reason, constraint=illegal is None))
    return tuple(kept), tuple(rejected)


def constraint_problems(structure: Structure, config: Config, constraints: Constraints) -> tuple[str, ...]:
    """Which constraints a legal config breaks, but for the memory limit."""
    pinned = constraints.pin.get("path", config.path)
    found = [] if pinned == config.path else [f"path is pinned to {pinned!r}"]
    if config.path == "native":
        return tuple(found)
    lookup_class, reason = lookup_equivalence(structure)
    if not constraints.admits(lookup_class):
        found.append(f"equivalence={constraints.equivalence!r} is demanded, and a planned step is {lookup_class}: {reason}")
    for site in config.sites:
        for rewrite in rewrites_at(site):
            if objection := constraints.objection(structure, rewrite, site, config.knobs_at(site.name)):
                found.append(f"{site.name}: {objection}")
    return tuple(found)


def _pinned_away(structure: Structure, constraints: Constraints, site: Site, setting: Mapping[str, Value]) -> str | None:
    """A pinned knob that has an effect only beside some values of another knob pins that one to them."""
    for rewrite, other in ((each, knob) for each in rewrites_at(site) for knob in each.knobs if knob.requires):
        pinned = constraints.pinned(structure, rewrite, other, site)
        if pinned is None or same(pinned, other.off):
            continue
        for name, values in other.requires:
            if name in setting and not any(same(setting[name], value) for value in values):
                return f"{other.name} is pinned to {pinned!r}, which needs {name} in {list(values)}"
    return None


def _rewrite_names(field_name: str, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{field_name} takes a collection of rewrite names; got {names!r}")
    found = tuple(dict.fromkeys(names))
    known = [rewrite.name for rewrite in CATALOG]
    if unknown := [name for name in found if name not in known]:
        raise ValueError(f"{field_name} names unknown rewrites {unknown}; known are {known}")
    return tuple(sorted(found))


def _check_pin(key: str, value: Value) -> None:
    """Class names are not known here; the search space checks them."""
    name, _, site = key.partition("@")
    if key == "path":
        if value not in PATHS:
            raise ValueError(f"pin path: must be one of {list(PATHS)}; got {value!r}")
        return
    knobs = knob_catalog()
    if name not in knobs:
        raise ValueError(f"pin {key}: unknown knob {name!r}; known are {['path', *knobs]}")
    rewrite, knob = knobs[name]
    if site and rewrite.scope == POLICY:
        raise ValueError(f"pin {key}: {name} is one setting for the whole step; pin it as {name!r}")
    if not knob.holds(value):
        raise ValueError(f"pin {key}: must be one of {list(knob.choices)}; got {value!r}")
