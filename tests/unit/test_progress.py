"""Progress on a terminal and elsewhere, and the log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from sparselift import progress as module
from sparselift.progress import Bar, Lines, Progress, logger, progress, show_log


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report(reporter):
    reporter.begin("trials", 3, 1)
    reporter.advance("native 1.00x", "best 1.00x")
    reporter.advance("failed", counts=False)
    reporter.say("a note")
    reporter.advance("default 2.00x", "best 2.00x")
    reporter.end()


def test_lines_are_one_a_part():
    stream = io.StringIO()
    report(progress(stream=stream))
    assert stream.getvalue().splitlines() == [
        "trials: 3, 1 of them done before",
        "[2/3]    native 1.00x  (best 1.00x)",
        "         failed",
        "a note",
        "[3/3]    default 2.00x  (best 2.00x)",
    ]


def test_a_terminal_gets_a_bar_with_the_parts_above():
    pytest.importorskip("tqdm")
    stream = Terminal()
    reporter = progress(stream=stream)
    assert type(reporter) is Bar
    report(reporter)
    text = stream.getvalue()
    assert "native 1.00x" in text and "a note" in text and "best 2.00x" in text and "3/3" in text
    reporter.say("after the end")
    assert stream.getvalue().endswith("after the end\n")


def test_silence_is_silent(capsys):
    reporter = progress("silent")
    assert type(reporter) is Progress
    report(reporter)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["auto", "bar"])
def test_without_tqdm_a_terminal_gets_lines(monkeypatch, kind):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert type(progress(kind, Terminal())) is Lines


def test_kinds_can_be_asked_for(monkeypatch):
    pytest.importorskip("tqdm")
    assert type(progress("lines", Terminal())) is Lines
    assert type(progress("bar", io.StringIO())) is Bar
    with pytest.raises(ValueError, match="'loud'"):
        progress("loud")


def test_standard_error_is_found_when_it_is_written_to(monkeypatch):
    reporter = progress("lines")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    reporter.say("hello")
    assert stream.getvalue() == "hello\n"


def test_the_log_says_whose_it_is():
    stream, level = io.StringIO(), logger.level
    handler = show_log(logging.INFO, stream)
    try:
        logging.getLogger("sparselift.tuning").info("a fact")
        logging.getLogger("sparselift.tuning").debug("too much")
        logger.warning("look")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert stream.getvalue() == "sparselift: info: a fact\nsparselift: warning: look\n"
