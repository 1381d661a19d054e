"""What the runtime's kinds of tensors have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PlainCopies(Tensor):
    """A tensor of a kind that one step alone knows: pickled or deep copies are plain tensors, without the buffer that it lies in."""

    def _plain(self) -> Tensor:
        return self.detach().clone(memory_format=torch.contiguous_format)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            return Tensor.__deepcopy__(self, memo)                               # which torch refuses
        memo[id(self)] = values = self._plain()
        return values
