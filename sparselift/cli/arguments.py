"""The command line's grammar. Nothing heavy is imported here, so that --help and --version answer at once."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from sparselift import __version__
from sparselift.cli.console import UsageError, size_bytes

EPILOG = """\
WORKLOAD is a built-in name (dlrm), package.module:function, or path/to/file.py:function. The function returns a
sparselift.Workload; --set KEY=VALUE passes it a keyword argument: a Python literal, else text.

exit codes: 0 done; 1 a check failed or something was refused; 2 usage; 3 an extra or a device is missing"""


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of leaving the process, so that a wrong command line is reported like every other error."""

    def __init__(self, **options: Any) -> None:
        super().__init__(epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def build_parser() -> Parser:
    """Every command with its arguments."""
    parser = Parser(prog="sparselift", description="Compile and tune the sparse path of recommendation-model training in PyTorch.")
    parser.add_argument("--version", action="version", version=f"sparselift {__version__}")
    children = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _lift(_command(children, "lift", "Show the graph of one training step: tables, lookups, resources, and what was not lifted and why."))
    _tune(_command(children, "tune", "Search for the fastest way to run the sparse path, by measuring real training steps."))
    _plan(_command(children, "show", "Show what a plan chose, for what, and on which evidence."))
    _plan(diff := _command(children, "diff", "Show how two plans differ."))
    diff.add_argument("other", metavar="PLAN2", help="another plan file")
    _plan(_command(children, "explain", "For every table of a plan: what was chosen, what was rejected, and why."))
    _plan(check := _command(children, "check", "Tell whether a plan fits this machine, and a model and its data where they are given."))
    _workload(check, nargs="?")
    _plan(verify := _command(children, "verify", "Run the equivalence certificate of a plan on a workload."))
    _workload(verify)
    verify.add_argument("--out", metavar="FILE", help="save the plan there with its new certificate; it may be PLAN itself")
    _bench(_command(children, "bench", "Time native against planned training steps, interleaved in one process."))
    _report(_command(children, "report", "Write CSV tables, Markdown and one HTML page about a plan or a study."))
    return parser


def _command(children: Any, name: str, summary: str) -> Parser:
    parser: Parser = children.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout; everything else goes to stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _plan(parser: Parser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file")


def _workload(parser: Parser, nargs: str | None = None) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", nargs=nargs, help="name or reference, see below")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the workload (may be given again)")


def _lift(parser: Parser) -> None:
    _workload(parser)
    parser.add_argument("--batches", type=_positive_int, default=8, metavar="N", help="batches to look at (default: %(default)s)")


def _tune(parser: Parser) -> None:
    _workload(parser)
    parser.add_argument("--out", default="plan.json", metavar="FILE", help="where the plan goes (default: %(default)s)")
    parser.add_argument("--trials", type=_positive_int, default=64, metavar="N",
                        help="complete trials of the study in all (default: %(default)s)")
    parser.add_argument("--timeout", type=_positive_float, metavar="SECONDS", help="stop the search after this long, confirmation included")
    parser.add_argument("--seed", type=int, default=0, help="of the search's proposals (default: %(default)s)")
    parser.add_argument("--storage", metavar="FILE|URL", help="study file or Optuna storage URL (default: --out with suffix .study)")
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="limit of the predicted memory, such as 8GiB")
    parser.add_argument("--equivalence", choices=("bitwise", "reassociated"), default="reassociated",
                        help="weakest class of rounding admitted (default: %(default)s)")
    parser.add_argument("--allow-lossy", action="store_true", help="admit rewrites that change results within a stated bound too")
    parser.add_argument("--allow", action="append", default=[], metavar="REWRITE", help="use no rewrite but these (may be given again)")
    parser.add_argument("--deny", action="append", default=[], metavar="REWRITE", help="do not use this rewrite (may be given again)")
    parser.add_argument("--pin", action="append", default=[], metavar="KNOB[@CLASS]=VALUE", help="fix a knob (may be given again)")


def _bench(parser: Parser) -> None:
    _workload(parser)
    parser.add_argument("--plan", metavar="FILE", help="the plan to run (default: the one that rules of thumb choose)")
    parser.add_argument("--seconds", type=_positive_float, default=20.0, help="time to measure for, about (default: %(default)s)")


def _report(parser: Parser) -> None:
    parser.add_argument("source", metavar="PLAN|STUDY", help="a plan file, or the study file of a search")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the files; made if need be")


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1; got {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return value
