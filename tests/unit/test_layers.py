"""Imports follow the layers: a row may import the rows above it, a name the names before it in its row, and nothing imports in circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROWS = (
    "errors dtypes canonical progress rules",
    "arrays hardware memory",
    "stats ir workload",
    "kernels",
    "grad ops optim functional nn",
    "preserve probe lift",
    "rewrites",
    "space schedule cost plan",
    "runtime",
    "apply batches verify",
    "datasets models workloads",
    "measure bench report",
    "tuning",
    "cli",
)
RANK = {name: (row, column) for row, names in enumerate(ROWS) for column, name in enumerate(names.split())}


def modules() -> dict[str, Path]:
    """Every module of the package by its installed name, the facade left out."""
    found = {}
    for folder, package in ((ROOT / "sparselift", "sparselift"), (ROOT / "tuning", "sparselift.tuning")):
        for path in sorted(folder.rglob("*.py")):
            parts = [*package.split("."), *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found.pop("sparselift")
    return found


MODULES = modules()
CYTHON = {f"sparselift.{'.'.join(path.relative_to(ROOT / 'sparselift').with_suffix('').parts)}"
          for path in (ROOT / "sparselift").rglob("*.pyx")}


def imports(name: str, path: Path, for_types: bool) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of our own, wherever in the file; those under TYPE_CHECKING if `for_types`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    if not for_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.partition(".")[0] == "sparselift")
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = [*package[:len(package) + 1 - node.level], *filter(None, [node.module])] if node.level else [node.module or ""]
            source = ".".join(base)
            if source.partition(".")[0] == "sparselift":
                for alias in node.names:
                    module = f"{source}.{alias.name}"
                    if module != "sparselift.__version__":
                        yield (module if source == "sparselift" or module in MODULES or module in CYTHON else source), node.lineno


def component(module: str) -> str:
    """The name in `ROWS`; the compiled `_memory` is part of `memory`."""
    return module.split(".")[1].lstrip("_") if "." in module else module


def test_every_module_has_a_layer() -> None:
    assert {component(name) for name in MODULES} <= set(RANK)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    here = component(name)
    for module, line in imports(name, MODULES[name], for_types=True):
        there = component(module)
        assert there in RANK, f"{MODULES[name]}:{line} imports {module}, which is in no layer"
        assert there == here or RANK[there] < RANK[here], f"{MODULES[name]}:{line}: {here} must not import {there}"


def test_imports_are_acyclic() -> None:
    edges = {name: {module for module, _ in imports(name, path, for_types=False) if module in MODULES} - {name}
             for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"imports in a circle: {' -> '.join((*trail[trail.index(name):], name))}"
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("name", [name for name in MODULES if component(name) != "tuning"])
def test_tuning_alone_imports_optuna(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    sources = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    sources |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [source for source in sources if source.partition(".")[0] == "optuna"]
