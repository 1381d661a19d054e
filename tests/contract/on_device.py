"""A backend whose memory is a device's, for tests whose tensors are the host's: a call gets copies there, and what it wrote comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparselift.kernels.base import Segment


class Storages:
    """Whole storages on a device, so that views keep their strides, their offsets and what they share, and stray writes show."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.there: dict[int, tuple[Tensor, Tensor]] = {}       # bytes here and there, by address

    def moved(self, value: Any) -> Any:
        """`value` with every tensor of the host in it on the device; what is on no host is left alone."""
        if isinstance(value, Tensor):
            return self._moved(value) if value.device.type == "cpu" and value.layout is torch.strided else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.moved, value))
        if isinstance(value, Segment):
            return dataclasses.replace(value, batch=self.moved(value.batch), grad=self.moved(value.grad))
        return value.inner if isinstance(value, OnDevice) else value

    def _moved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.there:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.there[storage.data_ptr()] = here, here.to(self.device, copy=True)
        other = self.there[storage.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self.device).set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())
        return view.requires_grad_(tensor.requires_grad)

    def bring_back(self) -> None:
        for here, there in self.there.values():
            if len(here) and not torch.equal(here, there.cpu()):
                here.copy_(there)


class OnDevice:
    """A backend, a program or a batch. An instance of what it stands for."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        self.inner, self.on = inner, device

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return OnDevice, (self.inner, self.on)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return self._calling(value) if callable(value) else value

    def _calling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method for tensors of the host. What a program's call queued is done when it returns, and its faults are raised."""
        def call(*arguments: Any, **options: Any) -> Any:
            storages = Storages(self.on)
            result = method(*storages.moved(arguments), **{name: storages.moved(value) for name, value in options.items()})
            if hasattr(self.inner, "synchronize"):
                self.inner.synchronize()
            storages.bring_back()
            return self._returned(result)

        return call

    def _returned(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._returned, value))
        if isinstance(value, Tensor):
            return value.cpu()
        return OnDevice(value, self.on) if type(value).__module__.startswith("sparselift.kernels") else value
