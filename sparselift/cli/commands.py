"""The commands other than `tune`: each takes parsed arguments and gives an Answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sparselift import canonical
from sparselift.cli.console import Answer, Console, UsageError, check_writable, columns, existing_file
from sparselift.cli.inputs import load_plan, plan_or_study, workload
from sparselift.hardware import hardware
from sparselift.lift import lift
from sparselift.plan import Difference, compare, diff, explain
from sparselift.verify import verify


def run_lift(args: argparse.Namespace, console: Console) -> Answer:
    graph = lift(workload(args), batches=args.batches)
    data = {"workload": graph.workload, "batch_size": graph.batch_size, "structure": graph.structure.to_dict(),
            "nodes": [canonical.plain(node) for node in graph.nodes], "refusals": [asdict(refusal) for refusal in graph.refusals],
            "frontends": dict(graph.frontends)}
    return Answer(str(graph), data)


def run_show(args: argparse.Namespace, console: Console) -> Answer:
    plan = load_plan(args.plan)
    return Answer(str(plan), plan.to_dict())


def run_diff(args: argparse.Namespace, console: Console) -> Answer:
    differences = diff(load_plan(args.plan), load_plan(args.other))
    return Answer(_listed(differences, args.plan, args.other) or "the plans are equal", {"differences": _plain(differences)})


def run_explain(args: argparse.Namespace, console: Console) -> Answer:
    text = explain(load_plan(args.plan))
    return Answer(text, {"text": text})


def run_check(args: argparse.Namespace, console: Console) -> Answer:
    if args.set and not args.workload:
        raise UsageError("--set is for a WORKLOAD, and none is given")
    plan = load_plan(args.plan)
    graph = lift(workload(args)) if args.workload else None
    seen: dict[str, Any] = {}
    if graph is not None:
        seen = {"structure": graph.structure, "batch_size": graph.batch_size, "sketches": graph.sketches}
    differences = compare(plan, hardware=hardware().to_dict(), **seen)
    refused = any(difference.grade == "refuse" for difference in differences)
    scope = "this machine" if graph is None else f"this machine and {graph.workload}"
    verdict = f"the plan does not fit {scope}" if refused else f"the plan fits {scope}"
    if any(difference.grade == "re-check" for difference in differences) and not refused:
        verdict += "; what differs may have made it slow, so tune again or bench it"
    text = verdict + ("\n" + _listed(differences, "saved", "here") if differences else "")
    return Answer(text, {"fits": not refused, "differences": _plain(differences)}, "failed" if refused else "done")


def run_verify(args: argparse.Namespace, console: Console) -> Answer:
    out = check_writable(Path(args.out)) if args.out else None
    plan = load_plan(args.plan)
    certificate = verify(plan, workload(args))
    native = plan.config.path == "native"
    text = "nothing to verify: the plan is native" if native else f"holds: {certificate}"
    if out is not None:
        replace(plan, certificate=None if native else certificate.to_dict()).save(out)
        text += f"\nsaved {out}"
    return Answer(text, {"certificate": certificate.to_dict()})


def run_bench(args: argparse.Namespace, console: Console) -> Answer:
    from sparselift.bench import bench

    plan = load_plan(args.plan) if args.plan else None
    outcome = bench(workload(args), plan, seconds=args.seconds)
    return Answer(str(outcome), outcome.to_dict())


def run_report(args: argparse.Namespace, console: Console) -> Answer:
    from sparselift.report import write

    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"cannot write into {out}: it is a file")
    source = existing_file(args.source)
    plan, trials = plan_or_study(source)
    title = f"SparseLift: {plan.workload if plan else source.stem}"
    try:
        files = write(out, title, plan, trials)
    except OSError as error:
        raise UsageError(f"cannot write into {out}: {error.strerror}") from error
    lines = [(str(path), f"{path.stat().st_size:,} bytes") for path in files]
    note = "" if trials or (plan and plan.evidence.trials) else "\nThere are no trials: report on a study file to see its search."
    return Answer(columns(lines, indent="") + note, {"files": [str(path) for path in files], "trials": len(trials)})


def _listed(differences: Sequence[Difference], saved: str, current: str) -> str:
    """Differences as a table for people."""
    if not differences:
        return ""
    rows = [(d.grade, d.field, _short(d.saved), _short(d.current)) for d in differences]
    widths = [max(len(row[i]) for row in [("", "field", saved, current), *rows]) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [("", "field", saved, current), *rows]]
    return "\n".join(lines)


def _short(value: Any, limit: int = 48) -> str:
    text = "nothing" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= limit else text[:limit - 1] + "…"


def _plain(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    return [{"field": d.field, "saved": _json(d.saved), "current": _json(d.current), "grade": d.grade} for d in differences]


def _json(value: Any) -> Any:
    try:
        return canonical.plain(value)
    except TypeError:
        return str(value)
