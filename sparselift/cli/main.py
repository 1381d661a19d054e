"""Runs one command: exit codes, errors, and the JSON envelope."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from sparselift.cli.arguments import build_parser
from sparselift.cli.console import Answer, Console, UsageError
from sparselift.errors import EquivalenceError, MissingExtraError, SparseLiftError, WorkloadError, WorkloadReferenceError
from sparselift.progress import logger, show_log

SCHEMA = 1
_CODES = {"done": 0, "usage": 2, "missing": 3}    # every other status: 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises nothing but SystemExit, for --help and --version."""
    handler = show_log()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    finally:
        logger.removeHandler(handler)


def _run(arguments: list[str]) -> int:
    console = Console(as_json="--json" in arguments)
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    try:
        parsed = build_parser().parse_args(arguments)
        module = import_module("sparselift.cli.tune" if command == "tune" else "sparselift.cli.commands")
        answer: Answer = getattr(module, f"run_{command}")(parsed, console)
        if console.as_json:
            _print_envelope(command, answer.status, answer.data, ())
        elif answer.text:
            print(answer.text)
        sys.stdout.flush()
        return _CODES.get(answer.status, 1)
    except BrokenPipeError:
        # The reader has gone (`| head`). Python's own flush at exit would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail(console, command, "interrupted", "KeyboardInterrupt", "stopped by Ctrl-C")
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        ours = isinstance(error, (SparseLiftError, UsageError))
        message = str(error) if ours else f"{type(error).__name__}: {error} (--debug shows where)"
        return _fail(console, command, _status(error), type(error).__name__, message)


def _status(error: Exception) -> str:
    if isinstance(error, (UsageError, WorkloadReferenceError)):
        return "usage"
    if isinstance(error, WorkloadError):
        return "error"
    if isinstance(error, MissingExtraError):
        return "missing"
    if isinstance(error, EquivalenceError):
        return "failed"
    return "refused" if isinstance(error, SparseLiftError) else "error"


def _fail(console: Console, command: str, status: str, kind: str, message: str) -> int:
    print(f"sparselift: {'' if status == 'interrupted' else 'error: '}{_one_line(message)}", file=sys.stderr)
    if console.as_json:
        _print_envelope(command, status, {}, ({"kind": kind, "message": message},))
    return _CODES.get(status, 1)


def _one_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return "; ".join(lines).replace(":; ", ": ")


def _print_envelope(command: str, status: str, data: dict[str, Any], errors: Sequence[dict[str, str]]) -> None:
    print(json.dumps({"schema": SCHEMA, "command": command, "status": status, "data": data, "errors": list(errors)},
                     indent=2, sort_keys=True))
