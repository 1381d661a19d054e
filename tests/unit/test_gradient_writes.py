"""No operation that can write to the `.grad` of a lifted table loses a write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sparselift.grad import GradState, PendingGrad
from tests.unit.gradient_pairs import SHAPE, fresh
from tests.unit.test_runtime import Pair


@pytest.fixture(params=[True, False], ids=["sparse", "dense"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(sparse=request.param)


def another(grad: PendingGrad) -> PendingGrad:
    """The same pending gradient once more."""
    state = GradState(grad.state.table, grad.state.shape, grad.state.sparse, grad.dtype)
    state.arrived = grad.state.arrived
    return PendingGrad(state)


def mutating_operations() -> Iterator[Any]:
    """aten's operations whose first argument is written to: a tensor, or a list of them."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and schema.arguments:
            first = schema.arguments[0]
            if first.alias_info is not None and first.alias_info.is_write and str(first.type) in ("Tensor", "List[Tensor]"):
                packet = getattr(torch.ops.aten, schema.name[6:], None)
                operation = getattr(packet, schema.overload_name or "default", None)
                if operation is not None:
                    yield operation


def tensor_for(name: str, layout: str) -> Tensor:
    if name in ("index", "indices"):
        return torch.tensor([1, 0, 1])
    if name == "mask":
        return torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE) % 3 == 0
    if name == "found_inf":
        return torch.zeros(1)
    if layout == "number":
        return torch.tensor(0.5)
    dense = torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).view(SHAPE)
    return dense if layout == "strided" else dense[:3] if layout == "rows" else dense.to_sparse(1)


def argument_for(argument: Any, layout: str) -> Any:
    """Something for an argument, by its type and name; `layout` of tensors."""
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return tensor_for(argument.name, layout)
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [torch.tensor([1, 0, 1])] if argument.name == "indices" else [tensor_for(argument.name, layout)] * 2
    if kind.startswith("List["):
        return [0.5, 0.5] if "number" in kind or "float" in kind else list(SHAPE)
    if kind.startswith("Optional["):
        return 0.5 if argument.name in ("min", "max", "eps") else None
    return {"number": 0.5, "float": 0.5, "int": 0, "bool": False, "str": "mean"}.get(kind)


def arguments_for(operation: Any) -> Iterator[list[Any]]:
    """Arguments to try after the first: all, with tensors of several layouts, and none but the required ones."""
    rest = operation._schema.arguments[1:]
    tensors = any("Tensor" in str(argument.type) for argument in rest)
    for layout in ("strided", "number", "rows", "sparse") if tensors else ("strided",):
        yield [argument_for(argument, layout) for argument in rest]
        if any(argument.has_default_value() for argument in rest):
            yield [argument_for(argument, layout) for argument in rest if not argument.has_default_value()]


def attempt(operation: Any, grad: Tensor, arguments: list[Any]) -> str:
    """Write to a gradient; the name of the error, empty if there is none."""
    rest = operation._schema.arguments[1:]
    named = {a.name: value for a, value in zip(rest, arguments) if a.kwarg_only}
    ordered = [value for a, value in zip(rest, arguments) if not a.kwarg_only]
    target = [grad, torch.ones(SHAPE)] if str(operation._schema.arguments[0].type) == "List[Tensor]" else grad
    torch.manual_seed(0)
    try:
        operation(target, *ordered, **named)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""

SKIPPED = {"record_stream", "_sobol_engine_initialize_state_", "_sobol_engine_scramble_", "_sobol_engine_ff_", "retain_grad", "set_data",
           "_fill_mem_eff_dropout_mask_", "_resize_output_", "requires_grad_"}     # of memory, streams and flags


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_no_write_is_lost(sparse: bool) -> None:
    grads, written, faults = fresh(Pair(sparse=sparse)), 0, []
    for operation in mutating_operations():
        name = operation._schema.name[6:]
        if name in SKIPPED or name.startswith("_fused_"):      # those update parameters, and crash on unequal lists
            continue
        for arguments in arguments_for(operation):
            native, lifted = grads[0].clone(), another(grads[1])
            error, ours = attempt(operation, native, arguments), attempt(operation, lifted, arguments)
            what = f"{operation} {[getattr(a, 'layout', a) for a in arguments]}"
            if "of a lifted table" in ours or "of the lifted table" in ours:
                if not error and native.shape == SHAPE and torch.Tag.inplace_view not in operation.tags:
                    faults.append(f"{what}: refused, although torch only writes: {ours}")
            elif error and not ours:                  # where torch has nothing for sparse gradients, the dense result
                expected = grads[0].to_dense()
                if not sparse or attempt(operation, expected, arguments) or not torch.allclose(expected, lifted.to_dense()):
                    faults.append(f"{what}: gave a result; torch: {error}")
            elif bool(error) != bool(ours):
                faults.append(f"{what}: {ours}; torch raises nothing")
            elif not error:
                written += 1
                same = native.layout == lifted.layout and native.shape == lifted.shape
                if not same or not torch.equal(*(grad.to_dense().nan_to_num(7.5) for grad in (native, lifted))):
                    faults.append(f"{what}: differs from torch")
    assert not faults, f"{len(faults)} of {written}:\n" + "\n".join(faults)
    assert written > (40 if sparse else 350)
