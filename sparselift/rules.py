"""What is not done the fast way, as tables: the code decides by them, and a page of the documentation is written from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """One case, and what is said about it.

    what     the case, for the page
    holds    whether it is this case, given the subject
    reason   text with {fields} of the facts about the subject
    remedy   the smallest change that would help, with the same fields; empty: there is none
    """

    what: str
    holds: Callable[[Any], bool]
    reason: str
    remedy: str = ""


def first(rules: Iterable[Rule], subject: Any) -> Rule | None:
    """The first rule that holds for a subject."""
    for rule in rules:
        if rule.holds(subject):
            return rule
    return None


def in_general(text: str) -> str:
    """A reason or remedy without a subject: every field is an ellipsis."""
    return re.sub(r"\{[^}]*\}", "…", text)
