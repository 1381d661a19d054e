"""From a reference on the command line to a Workload."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from sparselift.errors import SparseLiftError, WorkloadError, WorkloadReferenceError
from sparselift.workload import Workload
from sparselift.workloads.dlrm import dlrm

BUILT_IN: dict[str, Callable[..., Workload]] = {"dlrm": dlrm}


def resolve(reference: str, settings: Mapping[str, Any] | None = None) -> Workload:
    """The workload that `reference` names.

    Parameters
    ----------
    reference  a built-in name ("dlrm"), "package.module:function" (the current folder is searched too), or
               "path/to/file.py:function"
    settings   keyword arguments of the function

    Raises
    ------
    WorkloadReferenceError  there is no such module, file or function; the function takes no such setting, or needs one that is not
                            given, or returns something else than a Workload
    WorkloadError           the module, file or function raises
    DataError               and other errors of ours that the function raises
    """
    function = BUILT_IN[reference] if reference in BUILT_IN else _find(reference)
    settings = dict(settings or {})
    _check_settings(reference, function, settings)
    try:
        workload = function(**settings)
    except SparseLiftError:
        raise
    except Exception as error:
        raise WorkloadError(f"workload {reference!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(workload, Workload):
        raise WorkloadReferenceError(f"workload {reference!r} must return a sparselift.Workload; got {type(workload).__name__}")
    return workload


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Settings from "key=value" texts. A value is a Python literal where it reads as one, else the text itself.

    Raises WorkloadReferenceError for a text without "=", a key that is no identifier, or a key given twice.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise WorkloadReferenceError(f"a setting must read key=value; got {pair!r}")
        if key in settings:
            raise WorkloadReferenceError(f"setting {key!r} is given twice")
        try:
            settings[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[key] = text
    return settings


def _find(reference: str) -> Callable[..., Any]:
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise WorkloadReferenceError(f"a workload is one of {sorted(BUILT_IN)}, package.module:function or path/to/file.py:function; "
                                     f"got {reference!r}")
    is_file = place.endswith(".py") or "/" in place or os.sep in place
    module = _load_file(reference, Path(place)) if is_file else _import(reference, place)
    try:
        function = getattr(module, name)
    except AttributeError:
        raise WorkloadReferenceError(f"workload {reference!r}: {place} has no {name!r}") from None
    if not callable(function):
        raise WorkloadReferenceError(f"workload {reference!r}: {name} must be a function that returns a Workload; "
                                     f"got {type(function).__name__}")
    return function


def _import(reference: str, module: str) -> ModuleType:
    with _importable(Path.cwd()):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(f"{error.name}.")):
                raise WorkloadReferenceError(f"workload {reference!r}: there is no module {error.name!r}") from error
            raise WorkloadError(f"workload {reference!r}: importing {module} failed: {error}") from error
        except Exception as error:
            raise WorkloadError(f"workload {reference!r}: importing {module} failed: {type(error).__name__}: {error}") from error


def _load_file(reference: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise WorkloadReferenceError(f"workload {reference!r}: there is no file {str(path)!r}")
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise WorkloadReferenceError(f"workload {reference!r}: {str(path)!r} is no Python file")
    # As `python path/to/file.py` has it: the file's folder is searched, and pickling finds the module by its name.
    module = importlib.util.module_from_spec(spec)
    hidden = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    with _importable(path.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            if hidden is None:
                del sys.modules[path.stem]
            else:
                sys.modules[path.stem] = hidden
            raise WorkloadError(f"workload {reference!r}: running {str(path)!r} failed: {type(error).__name__}: {error}") from error
    return module


@contextmanager
def _importable(folder: Path) -> Any:
    """Search `folder` first while a module is loaded; a command's own sys.path starts at its script, not at the current folder."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _check_settings(reference: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):          # built in C: its own error has to do
        return
    named = [name for name, parameter in parameters.items()
             if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = f"it accepts {', '.join(named) or 'none'}"
    for name in settings:
        if name not in named and not takes_any:
            raise WorkloadReferenceError(f"workload {reference!r} has no setting {name!r}; {accepted}")
    for name in named:
        if name not in settings and parameters[name].default is parameters[name].empty:
            raise WorkloadReferenceError(f"workload {reference!r} needs the setting {name!r}; {accepted}")
