"""The pages: their links lead somewhere, their Python parses and runs, and the command line page knows every option."""

from __future__ import annotations

import argparse
import ast
import doctest
import re
from pathlib import Path

import pytest

from sparselift.cli.main import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get where Markdown is rendered."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_snippets_parse_and_examples_run(page: Path) -> None:
    for language, code in FENCE.findall(page.read_text()):
        if language == "python" and ">>>" not in code:
            ast.parse(code, filename=str(page))
    failures, _ = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert failures == 0


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.name)
def test_the_index_names_every_page(page: Path) -> None:
    if page.name != "README.md":
        assert f"]({page.name})" in (ROOT / "docs" / "README.md").read_text()


def test_the_command_line_page_names_every_command_and_option() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    for name, parser in commands().items():
        assert f"## {name}\n" in text, f"docs/cli.md has no section {name}"
        section = text.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0]
        for option in own_options(parser):
            assert f"`{option}" in section, f"docs/cli.md does not explain {name} {option}"


def test_the_command_line_page_names_no_option_that_does_not_exist() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    for name, parser in commands().items():
        section = text.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0]
        known = set(parser._option_string_actions)
        assert set(re.findall(r"--[a-z][a-z-]+", section)) <= known


def commands() -> dict[str, argparse.ArgumentParser]:
    action = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def own_options(parser: argparse.ArgumentParser) -> list[str]:
    """Long options, without those that every command has."""
    return [name for name in parser._option_string_actions if name.startswith("--") and name not in ("--help", "--json", "--debug")]
