"""How long work shows that it goes on: a bar on a terminal, plain lines elsewhere, or nothing. And the project's log."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from typing import Any, TextIO

logger = logging.getLogger("sparselift")

KINDS = ("auto", "bar", "lines", "silent")


class Progress:
    """What long work reports to. This one says nothing; the others show it.

    A report is `begin`, any number of `say` and `advance`, and `end`; then it may begin again.
    """

    def begin(self, title: str, total: int, done: int = 0) -> None:
        """Work of `total` parts begins, `done` of which were done before."""

    def say(self, text: str) -> None:
        """Something that is worth a line."""

    def advance(self, text: str, best: str = "", counts: bool = True) -> None:
        """One more part is done. `best` says how the work stands; a part that does not count is shown only."""

    def end(self) -> None:
        """The work has ended, one way or the other."""


class Lines(Progress):
    """One line a part, at once."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._total = self._done = 0

    def begin(self, title: str, total: int, done: int = 0) -> None:
        self._total, self._done = total, done
        self.say(f"{title}: {total}" + (f", {done} of them done before" if done else ""))

    def say(self, text: str) -> None:
        print(text, file=self._stream or sys.stderr, flush=True)

    def advance(self, text: str, best: str = "", counts: bool = True) -> None:
        self._done += counts
        place = f"[{self._done}/{self._total}]" if counts else ""
        self.say(f"{place:<9}{text}" + (f"  ({best})" if best else ""))


class Bar(Progress):
    """A tqdm bar; parts appear above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._bar: Any = None

    def begin(self, title: str, total: int, done: int = 0) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self._bar = tqdm(total=total, initial=done, desc=title, file=self._stream or sys.stderr, dynamic_ncols=True, leave=False)

    def say(self, text: str) -> None:
        if self._bar is None:
            print(text, file=self._stream or sys.stderr, flush=True)
        else:
            self._bar.write(text, file=self._stream or sys.stderr)

    def advance(self, text: str, best: str = "", counts: bool = True) -> None:
        self.say(f"  {text}")
        if self._bar is not None:
            self._bar.update(int(counts))
            self._bar.set_postfix_str(best)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def progress(kind: str = "auto", stream: TextIO | None = None) -> Progress:
    """A reporter to `stream`, by default standard error.

    "auto" is a bar where the stream is a terminal and tqdm is installed, else lines. Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"progress must be one of {list(KINDS)}; got {kind!r}")
    if kind == "silent":
        return Progress()
    has_bar = find_spec("tqdm") is not None
    if kind == "bar" and not has_bar:
        logger.info("tqdm is not installed; progress is shown as lines")
    if has_bar and (kind == "bar" or (kind == "auto" and (stream or sys.stderr).isatty())):
        return Bar(stream)
    return Lines(stream)


def show_log(level: int = logging.WARNING, stream: TextIO | None = None) -> logging.Handler:
    """Send the project's log from `level` on to `stream`, by default standard error, one "sparselift: warning: ..." a record.

    For programs; a library leaves this to whoever imports it. Returns the handler, for `logger.removeHandler`.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter())
    handler.setLevel(level)
    logger.addHandler(handler)
    if logger.level == logging.NOTSET or logger.level > level:
        logger.setLevel(level)
    return handler


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"sparselift: {record.levelname.lower()}: {super().format(record)}"
