"""What the modules share: routes that are planned on first use."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparselift.functional.routes import Routes

# A table that grows step by step is not to leave a program behind a step.
MAX_ROUTES = 8


class RoutedModule(nn.Module):
    """A module whose lookups are compiled on first use. They stay out of copies, pickles and the state_dict.

    `_quick` is what a call like the last one needs, for as long as no attribute is set: most calls are, and building the key of a
    route costs as much as looking up a few ids.
    """

    _quick: Any = None

    @property
    def last_path(self) -> str:
        """What the last forward outside of compiled graphs ran: "fused bag", or "torch: " and the reason."""
        return self._routes.last_path

    @property
    def _routes(self) -> Routes:
        # Straight into __dict__: nn.Module's own __setattr__ costs more than looking up a few ids.
        found = self.__dict__.get("_planned_routes")
        if found is None:
            found = self.__dict__["_planned_routes"] = Routes(type(self).__name__, MAX_ROUTES)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop("_quick", None)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_planned_routes", None)
        state.pop("_quick", None)
        return state
