"""Optimizers of embedding tables: row-wise Adagrad in plain torch, and which formula a fused update runs for an optimizer."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sparselift.dtypes import dtype_name
from sparselift.ir import OptimizerInfo
from sparselift.kernels.base import State, UpdateRule, state_shapes
from sparselift.kernels.noise import chance, noise_key, round_by_chance
from sparselift.rules import Rule, first


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row instead of one an element, for embedding tables.

    For a row with gradient g (duplicates summed first)::

        sum += mean(g ** 2);  weight -= lr * g / (sqrt(sum) + eps)

    Sparse gradients touch only the rows that they name. `weight_decay` adds `weight_decay * weight` to the gradient of the
    touched rows first (all rows, where the gradient is dense). The formula is that of FBGEMM's EXACT_ROWWISE_ADAGRAD.

    Parameters
    ----------
    params                     2-D parameters (rows, dim), or groups of them
    lr                         learning rate, >= 0
    initial_accumulator_value  start of every row's sum, >= 0
    eps                        added to the square root, >= 0
    rounding_seed              None: everything is of the parameter's dtype. A number: what float16 and bfloat16 parameters become is
                               computed in float32, and rounded by chance to one of the two neighbours so that the mean is the number
                               itself: steps too small for the dtype add up. A weight is off by less than one spacing a step

    Chance is drawn from rounding_seed, the position of the parameter in the optimizer, its step, row and column: `state_dict` holds all
    that it takes to go on with the same bits. A step is counted in float32, as torch counts it: from 2^24 on every step draws alike.

    State: `sum`, (rows,) of the parameter's dtype, float32 where it is rounded by chance; `step`, 0-d float32, as in torch.optim.Adagrad.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0,
                 initial_accumulator_value: float = 0.0, *, maximize: bool = False, rounding_seed: int | None = None) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay),
                            ("initial_accumulator_value", initial_accumulator_value)):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0; got {value}")
        if rounding_seed is not None:
            rounding_seed = _seed(rounding_seed)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay,
                                  "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
                                  "rounding_seed": rounding_seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, now or later. Raises ValueError for a parameter that is not 2-D."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for weight in group["params"]:
            if weight.dim() != 2:
                self.param_groups.pop()
                raise ValueError(f"RowWiseAdagrad takes 2-D parameters (rows, dim); got one of shape {tuple(weight.shape)}")
        for weight in group["params"]:
            self.state[weight] = {
                "step": torch.tensor(0.0),
                "sum": weight.new_full((len(weight),), group["initial_accumulator_value"], dtype=_sum_dtype(weight, group),
                                       requires_grad=False),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of groups that were saved before there was a seed."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("rounding_seed", None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would make the sums of the parameters' dtype: those of weights that are rounded by chance are taken from
        `state_dict` as they are there."""
        super().load_state_dict(state_dict)
        saved = (state_dict["state"].get(number, {}) for group in state_dict["param_groups"] for number in group["params"])
        for state, (group, weight) in zip(saved, self._parameters()):
            if "sum" in state and _is_rounded(weight, group):
                self.state[weight]["sum"] = state["sum"].to(weight.device, _sum_dtype(weight, group), copy=True)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Each with its group, in the order of state_dict."""
        return ((group, weight) for group in self.param_groups for weight in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for position, (group, weight) in enumerate(self._parameters()):
            if weight.grad is not None:
                state = self.state[weight]
                _rowwise_adagrad(weight, weight.grad, state["sum"], group, rounding_key(group, weight, position, state))
                state["step"] += 1
        return loss


def _seed(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"rounding_seed must be None or an integer; got {value!r}") from None


def _is_rounded(weight: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter is rounded by chance."""
    return group["rounding_seed"] is not None and weight.dtype in _HALVES


def _sum_dtype(weight: Tensor, group: dict[str, Any]) -> torch.dtype:
    return torch.float32 if _is_rounded(weight, group) else weight.dtype


def _rowwise_adagrad(weight: Tensor, grad: Tensor, row_sum: Tensor, group: dict[str, Any], key: int | None) -> None:
    if not weight.numel():
        return                                                      # the mean over no columns would be NaN
    rows: Tensor | slice = slice(None)
    if key is not None:
        grad = grad.float()
    if grad.is_sparse:
        if grad.sparse_dim() != 1:
            raise ValueError(f"RowWiseAdagrad takes gradients that are sparse in rows alone; got {grad.sparse_dim()} sparse dimensions")
        grad = grad.coalesce()
        rows, grad = grad.indices()[0], grad.values()               # (U,), (U, D)
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"]:
        grad = grad + group["weight_decay"] * weight[rows].to(grad.dtype)
    new_sum = row_sum[rows] + grad.square().mean(1)                 # (U,)
    row_sum[rows] = new_sum
    change = grad * (-group["lr"] / (new_sum.sqrt() + group["eps"]))[:, None]
    if key is not None:
        numbers = torch.arange(len(weight)) if isinstance(rows, slice) else rows.cpu()
        random = chance(key, numbers, weight.shape[1]).to(weight.device)
        weight[rows] = round_by_chance(weight[rows] + change, random, weight.dtype).to(weight.dtype)
    elif isinstance(rows, slice):
        weight.add_(change)
    else:
        weight.index_add_(0, rows, change)


Holder = tuple[int, torch.optim.Optimizer, dict[str, Any]]     # position of an optimizer, the optimizer, one of its param groups


def holders(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, list[Holder]]:
    """The param groups that hold each parameter, in the order of the optimizers."""
    found: dict[Tensor, list[Holder]] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                found.setdefault(weight, []).append((index, optimizer, group))
    return found


def optimizer_info(sparse: bool, held: Sequence[Holder], dtype: torch.dtype) -> OptimizerInfo | None:
    """The optimizer of a table and the fused rule for it. `held`: the table's entry of `holders`; None where no optimizer holds it."""
    for index, optimizer, group in held:
        return OptimizerInfo(index, type(optimizer).__name__, *fused_rule(optimizer, group, sparse, dtype))
    return None


def fused_rule(optimizer: torch.optim.Optimizer, group: dict[str, Any], sparse: bool,
               dtype: torch.dtype = torch.float32) -> tuple[str | None, str]:
    """The kernel's rule for the tables of a param group, or None and the reason.

    Parameters
    ----------
    group   one of optimizer.param_groups
    sparse  whether the table's gradient is torch.sparse_coo
    dtype   of the table

    Only exact types count: a subclass may compute something else. With a dense gradient a rule is exact only where an
    untouched row (gradient 0) stays as it is.
    """
    kind = type(optimizer)
    rules = OPTIMIZER_RULES.get(kind)
    if rules is None:
        return None, f"no fused update for {kind.__module__}.{kind.__qualname__}"
    found = first(rules, (group, sparse)) or first(STATE_RULES.get(kind, ()), (group, dtype))
    if found is not None:
        return None, found.reason.format(optimizer=kind.__name__, dtype=dtype_name(dtype), **group)
    return _KINDS[kind], ""


def _has(option: str) -> Callable[[Any], bool]:
    return lambda subject: bool(subject[0].get(option))


_DIFFERENTIABLE = Rule("`differentiable=True`", _has("differentiable"),
                       "{optimizer} with differentiable=True, whose step is part of the autograd graph")
_FUSED = Rule("`fused=True` with sparse gradients", lambda subject: bool(subject[0].get("fused")) and subject[1],
              "{optimizer} with fused=True, which torch refuses for sparse gradients")
_TENSOR_RATE = Rule("a tensor as learning rate", lambda subject: isinstance(subject[0]["lr"], Tensor),
                    "{optimizer} with a tensor learning rate")
_NO_FLOOR = Rule("a dense gradient, `eps=0` and no initial accumulator",
                 lambda subject: not subject[1] and not subject[0]["eps"] and not subject[0]["initial_accumulator_value"],
                 "with eps=0 and no initial accumulator, an untouched row of a dense gradient becomes NaN (0 / 0)")

# By exact type, what has no fused rule, given (param group, whether gradients are sparse). Everything else about these types has.
OPTIMIZER_RULES: dict[type[torch.optim.Optimizer], tuple[Rule, ...]] = {
    torch.optim.SGD: (
        _DIFFERENTIABLE, _FUSED,
        Rule("`momentum` with sparse gradients", lambda subject: bool(subject[0]["momentum"]) and subject[1],
             "SGD with momentum={momentum} moves every row that any step has named: torch's buffer of sparse gradients keeps them all"),
        Rule("`momentum` with a dense gradient", _has("momentum"), "SGD with momentum={momentum} moves every row"),
        Rule("`weight_decay` with sparse gradients", lambda subject: bool(subject[0]["weight_decay"]) and subject[1],
             "SGD with weight_decay={weight_decay}, which torch refuses for sparse gradients"),
        Rule("`weight_decay` with a dense gradient", _has("weight_decay"), "SGD with weight_decay={weight_decay} moves every row"),
        _TENSOR_RATE),
    torch.optim.Adagrad: (
        _DIFFERENTIABLE, _FUSED,
        Rule("`weight_decay`", _has("weight_decay"), "Adagrad with weight_decay={weight_decay} (torch refuses it for sparse gradients)"),
        _TENSOR_RATE, _NO_FLOOR),
    RowWiseAdagrad: (
        Rule("`weight_decay` with a dense gradient", lambda subject: bool(subject[0]["weight_decay"]) and not subject[1],
             "RowWiseAdagrad with weight_decay moves every row of a table whose gradient is dense"),
        _NO_FLOOR),
    torch.optim.SparseAdam: (
        Rule("a dense gradient", lambda subject: not subject[1], "SparseAdam takes sparse gradients alone"),
        _TENSOR_RATE),
}

_HALVES = (torch.float16, torch.bfloat16)
_HALF_STATE = Rule("a float16 or bfloat16 table", lambda subject: subject[1] in _HALVES,
                   "{optimizer} keeps what it sums of a {dtype} table in {dtype}, and kernels sum in float32")
# The same, of what an optimizer keeps, given (param group, dtype of the table). SGD keeps nothing.
STATE_RULES: dict[type[torch.optim.Optimizer], tuple[Rule, ...]] = {
    torch.optim.Adagrad: (_HALF_STATE,),
    RowWiseAdagrad: (
        Rule("a float16 or bfloat16 table without `rounding_seed`",
             lambda subject: subject[1] in _HALVES and subject[0]["rounding_seed"] is None,
             "{optimizer} without rounding_seed keeps the sums of a {dtype} table in {dtype}, and kernels sum in float32"),),
    torch.optim.SparseAdam: (_HALF_STATE,),
}
FUSED_OPTIMIZERS = tuple(OPTIMIZER_RULES)        # all of them call a closure once, before anything else
_KINDS = {torch.optim.SGD: "sgd", torch.optim.Adagrad: "adagrad", RowWiseAdagrad: "rowwise_adagrad", torch.optim.SparseAdam: "adam"}
STATE_KEYS = {"sgd": (), "adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}     # of torch's


def update_rule(rule: str, group: dict[str, Any], state: dict[str, Any], key: int | None = None) -> UpdateRule:
    """The hyperparameters of the coming step for one table. `state` is optimizer.state[weight] before the step; `key` of `rounding_key`."""
    maximize = bool(group.get("maximize", False))
    if rule == "sgd":
        return UpdateRule("sgd", float(group["lr"]), maximize=maximize)
    if rule == "adam":
        beta1, beta2 = map(float, group["betas"])
        step = float(state.get("step", 0)) + 1
        lr = float(group["lr"]) * math.sqrt(1 - beta2 ** step) / (1 - beta1 ** step)
        return UpdateRule("adam", lr, float(group["eps"]), maximize=maximize, betas=(beta1, beta2))
    if rule == "adagrad":
        lr = group["lr"] / (1 + float(state["step"]) * group["lr_decay"]) if group["lr_decay"] else group["lr"]
        return UpdateRule("adagrad", float(lr), float(group["eps"]), maximize=maximize)
    return UpdateRule("rowwise_adagrad", float(group["lr"]), float(group["eps"]), float(group["weight_decay"]), maximize, noise_key=key)


def rounding_key(group: dict[str, Any], weight: Tensor, position: int, state: dict[str, Any]) -> int | None:
    """What the chance of a weight's coming step is drawn from; None where it is rounded to the nearest.

    `position` is the parameter's in the optimizer, `state` optimizer.state[weight] before the step.
    """
    return noise_key(group["rounding_seed"], position, int(state["step"])) if _is_rounded(weight, group) else None


def state_parts(rule: str, state: dict[str, Any]) -> tuple[Tensor, ...]:
    """The tensors that a rule keeps in `optimizer.state[weight]`; none before the first step of an optimizer that makes them there."""
    return tuple(state[key] for key in STATE_KEYS[rule] if key in state)


def rule_state(rule: str, state: dict[str, Any]) -> State:
    """The same as kernels take it."""
    parts = state_parts(rule, state)
    return (parts[0], parts[1]) if len(parts) == 2 else parts[0] if parts else None


def large_state(table: str, optimizer: torch.optim.Optimizer, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(table, and key) and tensor of what an optimizer keeps for each element of a weight. A number a row is no burden to the TLB."""
    for key, value in optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor) and value.shape == weight.shape and value.is_cpu and value.is_contiguous():
            yield f"{table}, {key}", value


def start_state(rule: str, optimizer: torch.optim.Optimizer, weight: Tensor) -> bool:
    """Give a table the state that the optimizer itself would make in the coming step; False if there is one, or it makes none."""
    if rule != "adam" or optimizer.state[weight]:
        return False
    optimizer.state[weight].update(step=0, **{key: torch.zeros_like(weight, memory_format=torch.preserve_format)
                                              for key in STATE_KEYS[rule]})
    return True


def state_obstacle(rule: str, state: dict[str, Any], weight: Tensor) -> str:
    """Why the kernels cannot take the state of a table in `optimizer.state`; empty if they can."""
    for key, shape in zip(STATE_KEYS[rule], state_shapes(rule, *weight.shape)):
        value = state.get(key)
        if ("step" not in state or not isinstance(value, Tensor) or value.dtype != torch.float32 or value.shape != shape
                or not value.is_contiguous()):
            return f"the optimizer's state has no contiguous float32 {key!r} of shape {shape}"
    return ""
