"""The linear layers' part of the certificate: each one that a plan hands to another library, by itself, on the real step's numbers.

Letters: B rows of a batch, I and O inputs and outputs of a layer. u is half a unit in the last place, 2**-24.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.errors import EquivalenceError
from sparselift.ir import Linear, Structure
from sparselift.preserve import eager, preserve
from sparselift.runtime.linear import DenseLayers
from sparselift.schedule import Schedule
from sparselift.workload import Workload

U = 2.0 ** -24
ROWS = 5
LARGEST = 4                        # of the integers: sums of up to 2**19 of their products are exact


@dataclass(slots=True)
class _Call:
    """A layer, and what a step gave it: inputs (B, I), and the gradient of its own output (B, O)."""

    linear: Linear
    layer: nn.Linear
    given: Tensor
    grad: Tensor | None = None

    def see_gradient(self, grad: Tensor) -> None:
        self.grad = grad.detach().clone()


def check_linears_exact(structure: Structure, schedule: Schedule, seed: int) -> dict[str, int]:
    """Every layer's shape on small integers, native and planned: values compared bit for bit. Raises EquivalenceError."""
    counts: dict[str, int] = {}
    generator = torch.Generator().manual_seed(seed)
    for linear in structure.linears if schedule.linear != "native" else ():
        layer = nn.utils.skip_init(nn.Linear, linear.in_features, linear.out_features)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(_integers(tuple(parameter.shape), generator))
        given, grad = _integers((ROWS, linear.in_features), generator), _integers((ROWS, linear.out_features), generator)
        got, want = _planned(linear, layer, schedule, given, grad), _differentiated(_chain(layer, linear.relu), given, grad)
        for kind, mine, theirs in zip(("linear", *["linear gradient"] * 3), got, want):
            if not torch.equal(mine, theirs):
                raise EquivalenceError(f"{kind} of {linear.name} differs from native's bits on integers, by up to "
                                       f"{(mine - theirs).abs().max().item():.3g}")
            counts[kind] = counts.get(kind, 0) + mine.numel()
    return counts


def check_linears_real(structure: Structure, schedule: Schedule, work: Workload, batch: Any) -> dict[str, float]:
    """Every layer on what one real step gives it, against float64: the largest share of its rounding bound that a value used.

    A sum of n products is within (n + 2) u of the sum of their absolute values: n = I forward, O and B in the gradients.
    Raises EquivalenceError above the bound.
    """
    worst = 0.0
    for call in _calls(structure, work, batch) if schedule.linear != "native" else ():
        assert call.grad is not None
        layer, relu = _alike(call.layer), call.linear.relu
        got = _planned(call.linear, layer, schedule, call.given, call.grad)
        arriving = torch.where(got[0] > 0, call.grad, 0.0) if relu else call.grad
        for (what, exact, bound), value in zip(_oracle(layer, relu, call.given, arriving), got):
            share = (value.double() - exact).abs() / (bound + torch.finfo(torch.float32).tiny)
            found = float(share.nan_to_num(nan=float("inf")).max()) if share.numel() else 0.0
            if found > 1:
                raise EquivalenceError(f"{what} of {call.linear.name}: planned differs from float64 by {found:.3g} times the rounding "
                                       "bound")
            worst = max(worst, found)
    return {"linear layers": worst} if worst else {}


def _oracle(layer: nn.Linear, relu: bool, given: Tensor, grad: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what, float64 value, bound) of the output and the gradients by input, weight and bias."""
    x, g, weight = given.double(), grad.double(), layer.weight.detach().double()
    bias = torch.zeros(1, dtype=torch.float64) if layer.bias is None else layer.bias.detach().double()
    exact = x @ weight.t() + bias
    yield "output", exact.clamp(min=0) if relu else exact, (x.shape[1] + 2) * U * (x.abs() @ weight.abs().t() + bias.abs())
    yield "input gradient", g @ weight, (g.shape[1] + 2) * U * (g.abs() @ weight.abs())
    yield "weight gradient", g.t() @ x, (len(x) + 2) * U * (g.abs().t() @ x.abs())
    if layer.bias is not None:
        yield "bias gradient", g.sum(0), (len(x) + 2) * U * g.abs().sum(0)


def _calls(structure: Structure, work: Workload, batch: Any) -> list[_Call]:
    """The first call of every layer in a native step, where a gradient arrives."""
    found: dict[str, _Call] = {}

    def note(linear: Linear, module: nn.Linear, args: tuple[Any, ...], output: Tensor) -> None:
        if linear.name not in found and args and args[0].dim() == 2 and output.requires_grad:
            call = found[linear.name] = _Call(linear, module, args[0].detach().clone())
            output.register_hook(call.see_gradient)

    with preserve(work, [batch]), eager(), torch.enable_grad():
        hooks = [work.model.get_submodule(linear.name).register_forward_hook(partial(note, linear)) for linear in structure.linears]
        try:
            loss = work.step(work.model, batch)
            if loss.requires_grad:
                loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
    return [call for call in found.values() if call.grad is not None]


def _planned(linear: Linear, layer: nn.Linear, schedule: Schedule, given: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients by the road that a plan installs. Raises EquivalenceError where it does not lead to the library."""
    asides: list[str] = []
    structure = Structure((), (), (), (), None, linears=(replace(linear, name="0"),))
    chain = _chain(layer, linear.relu)
    dense = DenseLayers(structure, chain, schedule.linear, lambda _, why: asides.append(why))
    dense.attach()
    try:
        found = _differentiated(chain, given, grad)
    finally:
        dense.detach()
    if dense.calls != 1 and not asides:
        raise EquivalenceError(f"the call of {linear.name} does not lead to its library")
    return found


def _alike(layer: nn.Linear) -> nn.Linear:
    """A layer of its own on the same numbers, without hooks and trainable."""
    own = nn.utils.skip_init(nn.Linear, layer.in_features, layer.out_features, bias=layer.bias is not None)
    for name, parameter in layer.named_parameters():
        setattr(own, name, nn.Parameter(parameter.detach()))
    return own


def _chain(layer: nn.Linear, relu: bool) -> nn.Sequential:
    return nn.Sequential(layer, nn.ReLU()) if relu else nn.Sequential(layer)


def _differentiated(module: nn.Module, given: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output, and gradients by the input and the parameters, whose own are not touched."""
    given = given.detach().requires_grad_()
    with torch.enable_grad():
        out = module(given)
    return out.detach(), *torch.autograd.grad(out, [given, *module.parameters()], grad)


def _integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator).float()
