"""SparseLift: a compiler and autotuner for the sparse path of recommendation-model training in PyTorch.

Public names load on first use, so that `import sparselift` costs nothing that a program does not use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparselift import errors as errors
    from sparselift import functional as functional
    from sparselift import nn as nn
    from sparselift import optim as optim
    from sparselift.apply import apply as apply
    from sparselift.apply import explain as explain
    from sparselift.apply import unapply as unapply
    from sparselift.batches import prefetch_batches as prefetch_batches
    from sparselift.ir import Graph as Graph
    from sparselift.lift import lift as lift
    from sparselift.plan import Plan as Plan
    from sparselift.space import Constraints as Constraints
    from sparselift.tuning import TuneResult as TuneResult
    from sparselift.tuning import tune as tune
    from sparselift.verify import Certificate as Certificate
    from sparselift.verify import verify as verify
    from sparselift.workload import Workload as Workload

__version__ = "0.1.0"

_SUBMODULES = ("errors", "functional", "nn", "optim")
_HOMES = {
    "Certificate": "sparselift.verify",
    "Constraints": "sparselift.space",
    "Graph": "sparselift.ir",
    "Plan": "sparselift.plan",
    "TuneResult": "sparselift.tuning",
    "Workload": "sparselift.workload",
    "apply": "sparselift.apply",
    "explain": "sparselift.apply",
    "lift": "sparselift.lift",
    "prefetch_batches": "sparselift.batches",
    "tune": "sparselift.tuning",
    "unapply": "sparselift.apply",
    "verify": "sparselift.verify",
}

__all__ = ["__version__", *_SUBMODULES, *_HOMES]


def _refuse_unbuilt_tree(package: Path) -> None:
    """A clone whose folder happens to be the current one hides the package that is installed, and has no kernels."""
    built = any((package / "kernels" / f"_cpu{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
    if not built and (package.parent / "csrc").is_dir():
        raise ImportError(f"this is SparseLift's source tree, {package}, without its compiled extensions; run from another folder to "
                          "import the installed package, or build them here: pip install -e .")


class _Facade(ModuleType):
    """Resolves public names on first use.

    Some functions share their name with the module they live in (`apply`, `lift`, `verify`). Importing such a module makes
    the import system bind it on this package, which would hide the function; the binding is ignored.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f"{self.__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(__all__)


_refuse_unbuilt_tree(Path(__file__).parent)
sys.modules[__name__].__class__ = _Facade
