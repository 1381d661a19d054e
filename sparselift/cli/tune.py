"""`sparselift tune`: from a workload to a plan file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparselift.cli.console import Answer, Console, UsageError, check_writable, columns, labelled
from sparselift.cli.inputs import workload
from sparselift.errors import PlanError
from sparselift.hardware import hardware
from sparselift.plan import Evidence, Interval, Plan
from sparselift.plan.evidence import STATUSES
from sparselift.progress import progress
from sparselift.rewrites import CATALOG
from sparselift.space import Constraints
from sparselift.workloads import parse_settings


def run_tune(args: argparse.Namespace, console: Console) -> Answer:
    from sparselift.tuning import tune

    out = check_writable(Path(args.out))
    storage = _storage(args.storage, out)
    constraints = _constraints(args)
    work = workload(args)
    console.say(labelled([("machine", _machine()), ("workload", work.name), ("study", storage)]))
    result = tune(work, trials=args.trials, timeout=args.timeout, storage=storage, constraints=constraints, seed=args.seed,
                  progress=progress())
    status = "interrupted" if result.status == "interrupted" else "done"
    data = {"plan": result.plan.to_dict(), "out": str(out), "study": storage, "search": result.status}
    if status == "interrupted" and _says_more(out, result.plan):
        return Answer(f"\nInterrupted. {out} rests on better evidence than this call came to, and stays as it was.\n"
                      "What was measured is kept in the study; the same command goes on from there.", {**data, "saved": False}, status)
    result.plan.save(out)
    return Answer("\n" + summary(result.plan, out, result.status, args.trials), {**data, "saved": True}, status)


def _says_more(out: Path, plan: Plan) -> bool:
    """Whether the plan file that is there is better founded than the plan of an interrupted call, or as well and faster."""
    try:
        there = Plan.load(out)
    except (OSError, PlanError):
        return False

    def standing(plan: Plan) -> tuple[int, float]:
        return STATUSES.index(plan.evidence.status), plan.evidence.speedup.value if plan.evidence.speedup else 1.0

    return standing(there) > standing(plan)


def summary(plan: Plan, out: Path, search: str, trials: int) -> str:
    """The result of a search for a person: times, equivalence, where the plan is, why the search ended, and what to do with the plan."""
    lines = [_times(plan.evidence), ""] if plan.evidence.native else []
    lines.append(labelled([
        ("plan", f"{plan.config.path}, {plan.evidence.status}" + (f": {plan.evidence.note}" if plan.evidence.note else "")),
        ("equivalence", plan.equivalence + ("" if plan.certificate or plan.config.path == "native" else ", not certified")),
        ("saved", str(out)),
    ]))
    if ended := _ended(plan, search, trials):
        lines += ["", ended]
    if search == "interrupted":
        return "\n".join(lines)
    if plan.config.path == "planned":
        lines += ["", "Use it in a training script:", "  import sparselift as sl",
                  f'  model, optimizer = sl.apply(sl.Plan.load("{out}"), model, optimizer)']
        if plan.config.policy["prefetch_batches"]:
            lines.append("  for batch in sl.prefetch_batches(batches, model, inputs): ...            # inputs: the workload's")
    else:
        lines += ["", "A native plan changes nothing: train as before. sparselift explain says how the best planned config did."]
    return "\n".join(lines)


def _ended(plan: Plan, search: str, trials: int) -> str:
    """Why the search ended before its last trial; empty if it did not."""
    done = sum(trial.state in ("complete", "pruned") for trial in plan.evidence.trials)
    reasons = {
        "interrupted": "Interrupted. What was measured is kept; the same command goes on from there.",
        "timeout": f"Stopped after {done} of {trials} trials: the timeout. The same command goes on.",
        "exhausted": f"Stopped after {done} of {trials} trials: there is nothing new to try.",
        "failing": f"Stopped after {done} of {trials} trials: too many failed in a row. sparselift report shows why.",
    }
    return reasons.get(search, "")


def _machine() -> str:
    """The hardware in a line."""
    here = hardware()
    known = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))
    isa = next((name for flag, name in known if flag in here.isa), here.architecture)
    return (f"{here.cpu}, {isa}, {here.cores} cores, {here.memory_bytes / 2**30:.0f} GiB; torch {here.torch_version}, "
            f"{here.torch_threads} thread{'s' * (here.torch_threads != 1)}")


def _times(evidence: Evidence) -> str:
    rows = [("", "step", "95% interval", "speed-up")]
    named: tuple[tuple[str, Interval | None], ...] = (
        ("native", evidence.native), ("default", evidence.default), ("plan", evidence.planned))
    for name, interval in named:
        if interval is None:
            continue
        ms = interval.scaled(1e3)
        speedup = f"{evidence.native.value / interval.value:.2f}x" if evidence.native else ""
        if name == "plan" and evidence.speedup:
            speedup = f"{evidence.speedup.value:.2f}x [{evidence.speedup.low:.2f}, {evidence.speedup.high:.2f}]"
        rows.append((name, f"{ms.value:.2f} ms", f"[{ms.low:.2f}, {ms.high:.2f}]", speedup))
    return columns(rows)


def _storage(given: str | None, out: Path) -> str:
    """The study's file or URL. Raises UsageError for a file that cannot be written, before anything is measured."""
    if given and "://" in given:
        return given
    path = Path(given) if given else out.with_suffix(".study")
    if path.resolve() == out.resolve():
        raise UsageError(f"--storage and --out are the same file: {path}")
    return str(check_writable(path))


def _constraints(args: argparse.Namespace) -> Constraints:
    lossy: dict[str, Any] = {}
    if args.allow_lossy:
        lossy = {"equivalence": "lossy", "lossy_consent": tuple(rewrite.name for rewrite in CATALOG)}
    try:
        return Constraints(**{"memory_bytes": args.memory, "equivalence": args.equivalence, "allow": tuple(args.allow),
                              "deny": tuple(args.deny), "pin": dict(map(_pin, args.pin)), **lossy})
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def _pin(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--pin must read KNOB=VALUE or KNOB@CLASS=VALUE; got {text!r}")
    return key, parse_settings([f"value={value}"])["value"]
