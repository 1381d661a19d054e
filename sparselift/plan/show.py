"""A plan in words: what was chosen, for what, on which evidence, and what was rejected and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import TYPE_CHECKING

from sparselift.plan.evidence import Interval, TrialRecord
from sparselift.rewrites import CATALOG, Rewrite, Site, Value, same
from sparselift.space.config import POLICY, ClassConfig, rewrites_at
from sparselift.space.constraints import Rejection, settings_at

if TYPE_CHECKING:
    from sparselift.plan.document import Plan

_WIDTH = 110
_MACHINE = ("cpu", "cores", "torch_threads", "huge_pages", "torch_version")      # what a page says of the hardware


def show(plan: Plan) -> str:
    """A page: the choice by size class, times, constraints that bound, and what the plan is made for."""
    lines = [f"plan for {plan.workload}: {plan.config.path}, {plan.equivalence}, {plan.evidence.status}"]
    if plan.edited:
        lines.append("  edited by hand since it was saved")
    lines += _indented([*_made_for(plan), *_times(plan), *([("why", plan.evidence.note)] if plan.evidence.note else [])])
    if plan.config.path == "planned":
        lines += ["", f"  policy  {_knobs(plan, plan.config.policy)}"]
        for each in plan.config.classes:
            lines += [f"  {each.name}  ({_class_size(plan, each)})", f"    {_knobs(plan, each.knobs)}"]
    bound = _bound(plan)
    lines += ["", "  constraints that bound: " + ("; ".join(bound) if bound else "none")]
    return "\n".join(lines)


def explain(plan: Plan) -> str:
    """For every table, by size class: each knob's choice, and every other choice with the reason against it."""
    if plan.config.path == "native":
        lines = [f"plan for {plan.workload}: native. torch runs every lookup and update."]
        if plan.evidence.note:
            lines.append(f"  {plan.evidence.note}")
        return "\n".join(lines + [f"  {line}" for line in _other_trials(plan)])
    lines = [f"plan for {plan.workload}: planned, {plan.equivalence}"]
    for site in plan.config.sites:
        if site.name == POLICY:
            lines += ["", "policy, for the whole step"]
        else:
            lines += ["", f"{site.name}: " + _class_size(plan, next(c for c in plan.config.classes if c.name == site.name))]
            lines += wrap(", ".join(site.tables), _WIDTH, initial_indent="  tables: ", subsequent_indent="    ", break_on_hyphens=False)
        for rewrite in rewrites_at(site):
            if plan.structure.device in rewrite.devices:
                lines += [f"  {line}" for line in _explained(plan, site, rewrite)]
            else:
                lines.append(f"  {rewrite.name}: for tables on {' or '.join(rewrite.devices)}")
    return "\n".join(lines)


def _explained(plan: Plan, site: Site, rewrite: Rewrite) -> Iterator[str]:
    """The rewrite's knobs at one site: the chosen values, then a line for each other value."""
    chosen = plan.config.knobs_at(site.name)
    _, rejected = settings_at(plan.structure, plan.constraints, site, rewrite)
    yield f"{rewrite.name}: " + ", ".join(f"{knob.name}={chosen[knob.name]!r}" for knob in rewrite.knobs)
    for knob in rewrite.knobs:
        if not knob.active(chosen):
            needs = " and ".join(f"{name} in {list(values)}" for name, values in knob.requires)
            yield f"  {knob.name} has an effect only with {needs}"
            continue
        reasons: dict[str, list[Value]] = {}
        for value in knob.choices:
            if not same(value, chosen[knob.name]):
                reasons.setdefault(_why_not(plan, site, knob.name, value, chosen, rejected), []).append(value)
        for reason, values in reasons.items():
            yield f"  not {knob.name}={' or '.join(map(repr, values))}: {reason}"


def _why_not(plan: Plan, site: Site, knob: str, value: Value, chosen: Mapping[str, Value], rejected: tuple[Rejection, ...]) -> str:
    """A rejection of the chosen setting with this one value; else what trials with the value measured."""
    out = [each for each in rejected if same(each.knobs[knob], value)]
    nearest = sorted(out, key=lambda each: sum(not same(chosen[name], there) for name, there in each.knobs.items()))
    one_step = [each for each in nearest if sum(not same(chosen[name], there) for name, there in each.knobs.items()) == 1]
    if one_step:
        return one_step[0].reason
    name = knob if site.name == POLICY else f"{knob}@{site.name}"
    tried = [trial for trial in plan.evidence.trials if name in trial.params and same(trial.params[name], value)]
    complete = [trial for trial in tried if trial.state == "complete" and trial.ratio is not None]
    if complete:
        best = max(complete, key=lambda trial: trial.ratio or 0.0)
        return f"at best {best.ratio:.3g}x native (trial {best.number}, {best.label})" + _against(plan)
    if tried:
        return f"trial {tried[0].number}: {tried[0].state}" + (f": {tried[0].reason}" if tried[0].reason else "")
    return nearest[0].reason if nearest else "not tried" if plan.evidence.trials else "by rule of thumb; nothing was measured"


def _against(plan: Plan) -> str:
    return f", against {plan.evidence.speedup.value:.3g}x" if plan.evidence.speedup else ""


def _other_trials(plan: Plan) -> Iterator[str]:
    """Of a native plan: how the best planned config did."""
    complete: list[TrialRecord] = [trial for trial in plan.evidence.trials if trial.state == "complete" and trial.label != "native"]
    if complete:
        best = max(complete, key=lambda trial: trial.ratio or 0.0)
        yield f"the best planned config ran at {best.ratio or 0.0:.3g}x native (trial {best.number}, {best.label})"


def _made_for(plan: Plan) -> Iterator[tuple[str, str]]:
    tables = plan.structure.tables
    rows, nbytes = sum(table.rows for table in tables), sum(table.nbytes for table in tables)
    device = "" if plan.structure.device == "cpu" else f" on {plan.structure.device}"
    yield "made for", (f"{len(tables)} tables, {len(plan.structure.features)} lookups, {rows:,} rows, {_size(nbytes)}{device}; "
                       f"batch {plan.batch_size:,}; {' + '.join(plan.structure.optimizers)}")
    if plan.hardware:
        yield "machine", _scalars({name: plan.hardware[name] for name in _MACHINE if name in plan.hardware})
    if plan.config.path == "planned":
        if ahead := plan.config.policy["prefetch_batches"]:
            yield "trains with", f"sl.prefetch_batches(batches, model, inputs), {ahead} ahead; another loop gains less than was measured"
        yield "certificate", _scalars(plan.certificate) if plan.certificate else "none yet: sparselift verify --out saves one"


def _times(plan: Plan) -> Iterator[tuple[str, str]]:
    evidence = plan.evidence
    for name in ("native", "default", "planned"):
        interval: Interval | None = getattr(evidence, name)
        if interval is not None:
            ms = interval.scaled(1e3)
            yield f"{name} step", f"{ms.value:.4g} ms [{ms.low:.4g}, {ms.high:.4g}]"
    if evidence.speedup is not None:
        yield "speed-up", f"{evidence.speedup.value:.3f}x [{evidence.speedup.low:.3f}, {evidence.speedup.high:.3f}] over native"
    if plan.config.policy.get("compile", "eager") != "eager" and evidence.overhead.get("compile_s"):
        yield "compiling", f"{evidence.overhead['compile_s']:.0f} s in the search; about as much in every process, before its first step"
    if evidence.trials:
        states = [trial.state for trial in evidence.trials]
        yield "trials", ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _bound(plan: Plan) -> list[str]:
    """Constraints that ruled out a legal setting or a trial, each once."""
    found = [reason for site in plan.config.sites for rewrite in rewrites_at(site)
             for each in settings_at(plan.structure, plan.constraints, site, rewrite)[1] if each.constraint
             for reason in [each.reason]]
    found += [trial.reason for trial in plan.evidence.trials if trial.state == "infeasible" and trial.reason]
    return list(dict.fromkeys(found))


def _class_size(plan: Plan, each: ClassConfig) -> str:
    tables = [plan.structure.table(name) for name in each.tables]
    count = f"{len(tables)} table" + ("s" if len(tables) != 1 else "")
    return f"{count}, {sum(table.rows for table in tables):,} rows, {_size(sum(table.nbytes for table in tables))}"


def _knobs(plan: Plan, knobs: Mapping[str, Value]) -> str:
    """Those of rewrites for the device that the tables are on."""
    here = {knob.name for rewrite in CATALOG if plan.structure.device in rewrite.devices for knob in rewrite.knobs}
    return "  ".join(f"{name}={value}" for name, value in knobs.items() if name in here)


def _scalars(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in mapping.items() if isinstance(value, (str, int, float)))


def _indented(pairs: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in pairs]


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
