"""What every rewrite of the dense part has: forwards of a model's modules that are replaced while a plan is applied, and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import nn


class OwnForward:
    """The forward of a module: an attribute of the instance, bound to an object of an importable class, so that copies and pickles of the
    model have their own.
    """

    path: str
    module: nn.Module
    forward: Callable[..., Any]


Own = TypeVar("Own", bound=OwnForward)


class OwnForwards(Generic[Own]):
    """Those of one model.

    Attributes
    ----------
    forwards  path -> replaced forward's owner
    calls     that ran as the plan says
    report    called with (path, why) for a call that did not
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.report, self.calls = report, 0
        self.forwards: dict[str, Own] = {}

    def attach(self) -> None:
        """Replace the forwards."""
        for own in self.forwards.values():
            own.module.forward = own.forward

    def detach(self) -> None:
        """Put torch's back."""
        for own in self.forwards.values():
            if getattr(own.module.__dict__.get("forward"), "__self__", None) is own:
                del own.module.forward


def is_free(module: nn.Module) -> bool:
    """Whether a module's forward is its class's, or one of ours, which another plan has there for now."""
    forward = module.__dict__.get("forward")
    return forward is None or isinstance(getattr(forward, "__self__", None), OwnForward)


def plain_modules(model: nn.Module) -> Mapping[str, nn.Module]:
    """By path, the modules whose forward may be replaced."""
    return {path: module for path, module in model.named_modules() if is_free(module)}
