"""Linear layers with their bias and the ReLU that follows them in one pass around torch's matrix products, or in oneDNN's.

A layer's own forward is replaced, and that of a `nn.Sequential` in which a ReLU follows a layer: nothing else sees what lies between the
two. Each call is checked; whatever is not taken runs as torch runs it, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook

from sparselift.functional.interaction import is_lowered
from sparselift.ir import Structure
from sparselift.kernels.epilogue import get_epilogue
from sparselift.lift.dense_modules import HOOKS
from sparselift.lift.linears import pairs
from sparselift.ops import nobody_watches
from sparselift.runtime.dense import OwnForward, OwnForwards, plain_modules

_SCHEMA = "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"


_WAYS = {"fused": "bias and ReLU in one pass around torch's products", "onednn_forward": "through oneDNN, forward",
         "onednn": "through oneDNN, forward and backward"}


def is_available() -> bool:
    """Whether this torch has oneDNN, and the operator with the signature that is used here: it is no public one."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        return str(torch.ops.mkldnn._linear_pointwise.default._schema) == _SCHEMA
    except AttributeError:
        return False


class DenseLayers(OwnForwards["LinearForward | ChainForward"]):
    """The layers of one model, and the chains that they are in. `calls`: of layers that ran as the plan says."""

    def __init__(self, structure: Structure, model: nn.Module, library: str, report: Callable[[str, str], None]) -> None:
        """`library`: "fused", "onednn_forward" or "onednn", as the knob of rewrites.linear."""
        super().__init__(report)
        self.library = library
        self.epilogue = get_epilogue()
        modules = plain_modules(model)
        layers = {linear.name: modules.get(linear.name) for linear in structure.linears}
        if library != "fused" and not is_available():
            report("linear layers", "this torch has no oneDNN operator for them")
            return
        roads = {layer: LinearForward(self, path, layer) for path, layer in layers.items()
                 if type(layer) is nn.Linear}
        self.forwards.update({road.path: road for road in roads.values()})
        for path, chain in modules.items():
            if type(chain) is nn.Sequential:
                fused = {layer: roads[layer] for layer, _ in pairs(chain) if layer in roads}
                if fused:
                    self.forwards[path] = ChainForward(self, path, chain, fused)

    def __str__(self) -> str:
        layers = [each for each in self.forwards.values() if isinstance(each, LinearForward)]
        fused = sum(len(each.fused) for each in self.forwards.values() if isinstance(each, ChainForward))
        return (f"dense part, no part of the sparse path's gains: {len(layers)} linear layers, {fused} with their ReLU, "
                f"{_WAYS[self.library]}: {self.calls} calls")


class LinearForward(OwnForward):
    """The forward of a layer."""

    def __init__(self, owner: DenseLayers, path: str, module: nn.Linear) -> None:
        self.owner, self.path, self.module = owner, path, module

    def forward(self, input: Tensor) -> Tensor:
        """As torch.nn.Linear.forward."""
        found = None if is_dynamo_compiling() else self.run(input, False)
        return type(self.module).forward(self.module, input) if found is None else found

    def run(self, input: Tensor, relu: bool) -> Tensor | None:
        """The layer with a ReLU behind it; None where torch must run both."""
        parameters = self.module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        why = self._obstacle(input, weight, bias)
        if why:
            self.owner.report(self.path, why)
            return None
        assert weight is not None
        self.owner.calls += 1
        return _Linear.apply(input, weight, bias, relu, self.owner)

    @staticmethod
    def _obstacle(input: Any, weight: Tensor | None, bias: Tensor | None) -> str:
        if type(input) not in (Tensor, Parameter) or input.dtype != torch.float32 or not input.is_cpu or input.dim() != 2 \
                or not input.numel() or input.layout is not torch.strided or input.is_neg():
            return "torch's product ran: the input is no plain float32 matrix with elements on the CPU"
        for each in (weight,) if bias is None else (weight, bias):
            if type(each) is not Parameter or each.dtype != torch.float32 or not each.is_cpu or not each.is_contiguous():
                return "torch's product ran: a parameter of the layer is no plain contiguous float32 one on the CPU any more"
        fits = weight is not None and weight.dim() == 2 and weight.shape[1] == input.shape[1]
        if weight is None or not fits or (bias is not None and bias.shape != weight.shape[:1]):
            return "torch's product ran: a call that it refuses"
        if is_lowered():
            return "torch's product ran: autocast multiplies in a smaller dtype"
        return "" if nobody_watches() else "torch's product ran: its operations are being watched"


class ChainForward(OwnForward):
    """The forward of a chain in which ReLUs follow layers."""

    def __init__(self, owner: DenseLayers, path: str, module: nn.Sequential, fused: Mapping[nn.Linear, LinearForward]) -> None:
        self.owner, self.path, self.module, self.fused = owner, path, module, dict(fused)

    def forward(self, input: Any) -> Any:
        """As torch.nn.Sequential.forward."""
        if is_dynamo_compiling():
            return type(self.module).forward(self.module, input)
        layers, place = list(self.module._modules.values()), 0
        while place < len(layers):
            layer = layers[place]
            assert layer is not None
            found = self._fused(layer, layers[place + 1], input) if place + 1 < len(layers) else None
            input = layer(input) if found is None else found
            place += 1 if found is None else 2
        return input

    def _fused(self, layer: nn.Module, following: nn.Module | None, input: Any) -> Tensor | None:
        """Both at once; None where each must be called, because of what it became or who listens."""
        if type(layer) is not nn.Linear or type(following) is not nn.ReLU or layer not in self.fused:
            return None
        road = self.fused[layer]
        own = getattr(layer.__dict__.get("forward"), "__self__", None)
        heard = _has_any_global_hook() or any(getattr(each, name) for each in (layer, following) for name in HOOKS)
        if heard or own is not road or "forward" in following.__dict__:
            self.owner.report(road.path, "its ReLU ran by itself: one of the two has hooks or a replaced forward")
            return None
        return road.run(input, True)


class _Linear(torch.autograd.Function):
    """input (B, I) times weight (O, I) transposed, plus bias (O,), and ReLU of it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, owner: DenseLayers) -> Tensor:
        if owner.library == "fused":
            out = _torch_product(input, weight)
            owner.epilogue.finish(out, bias, relu)
        else:
            out = _product(input, weight, bias, relu)
        ctx.owner = owner
        ctx.save_for_backward(input, weight, *((out,) if relu else ()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        input, weight, *out = ctx.saved_tensors
        by_input, by_weight, by_bias = ctx.needs_input_grad[:3]
        product = _product if ctx.owner.library == "onednn" else _torch_product
        # torch's own can be differentiated and followed, and runs for several gradients at once.
        if torch.is_grad_enabled() or not torch._C._has_storage(grad) or not nobody_watches():
            product = _torch_product
            grad = torch.ops.aten.threshold_backward(grad, out[0], 0) if out else grad
            bias_grad = grad.sum(0) if by_bias else None
        else:
            grad, bias_grad = ctx.owner.epilogue.begin(_with_plain_rows(grad), out[0] if out else None, by_bias)
        return (product(grad, weight.t()) if by_input else None, product(grad.t(), input.t()) if by_weight else None, bias_grad, None, None)


def _with_plain_rows(grad: Tensor) -> Tensor:
    return grad if grad.stride(1) == 1 or grad.shape[1] == 1 else grad.contiguous()


def _torch_product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.t()


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """left (M, K) times right (N, K) transposed."""
    if not right.is_contiguous() and not right.t().is_contiguous():      # strides of views and expansions
        right = right.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "relu" if relu else "none", [], "")
