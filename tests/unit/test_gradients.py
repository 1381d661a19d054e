"""`.grad` of a lifted table beside torch's: whatever a loop reads there or writes to it, it is the gradient that torch would have."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparselift.errors import LiftRefused
from sparselift.grad import GradState, PendingGrad
from tests.unit.runtime_models import DIM, ROWS, Bags, assert_same, attach, bags_structure, batch, schedule
from tests.unit.test_runtime import Pair, backward, step, train

TABLE = 1                                 # of the model, whose gradient is looked at
SHAPE = (ROWS[TABLE], DIM)


@pytest.fixture(params=[True, False], ids=["sparse", "dense"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(sparse=request.param)


def weights(pair: Pair) -> tuple[nn.Parameter, nn.Parameter]:
    """The table of both models, natively and lifted."""
    return pair.native.emb[TABLE].weight, pair.lifted.emb[TABLE].weight


def fresh(pair: Pair, seed: int = 0) -> tuple[Tensor, Tensor]:
    """New gradients of the table, natively and lifted."""
    for model in (pair.native, pair.lifted):
        model.zero_grad()
        backward(model, seed)
    native, lifted = (weight.grad for weight in weights(pair))
    assert type(lifted) is PendingGrad and type(native) is Tensor
    return native, lifted


def another(grad: PendingGrad) -> PendingGrad:
    """The same pending gradient once more."""
    state = GradState(grad.state.table, grad.state.shape, grad.state.sparse, grad.dtype)
    state.arrived = grad.state.arrived
    return PendingGrad(state)


def assert_same_grad(native: Tensor, lifted: Tensor, exact: bool = True) -> None:
    assert native.layout == lifted.layout and native.dtype == lifted.dtype and native.shape == lifted.shape
    torch.testing.assert_close(lifted.to_dense(), native.to_dense(), equal_nan=True, **({"rtol": 0, "atol": 0} if exact else {}))


# ------------------------------------------------------------------------------------------------------------- mutating operations

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


# ------------------------------------------------------------------------------------------------------------ what loops read and write

READS: dict[str, Callable[[Tensor], Any]] = {
    "dense": lambda g: g.to_dense(),
    "clone": lambda g: g.clone(),
    "data": lambda g: g.data.clone(),
    "detach": lambda g: g.detach().clone(),
    "product": lambda g: g * 2 + g,
    "coalesced": lambda g: g.coalesce() if g.is_sparse else g,
    "values": lambda g: g._values() if g.is_sparse else g,
    "indices": lambda g: g._indices() if g.is_sparse else g,
    "norm": lambda g: g.norm(),
    "max norm": lambda g: g.to_dense().norm(float("inf")),
    "sum": lambda g: g.sum(),
    "finite": lambda g: torch.isfinite(g.to_dense()).all(),
    "copy": lambda g: pickle.loads(pickle.dumps(g)),
    "facts": lambda g: (g.layout, g.shape, g.dtype, g.device, g.is_sparse, g.dim(), g.numel(), len(g)),
    "autograd facts": lambda g: (g.requires_grad, g.is_leaf, g.grad_fn),
    "sparse facts": lambda g: (g._nnz(), g.sparse_dim(), g.dense_dim(), g.is_coalesced()) if g.is_sparse else g.stride(),
    "text": repr,
    "array": lambda g: None if g.is_sparse else g.numpy().copy(),
    "lists": lambda g: None if g.is_sparse else (g.tolist(), np.asarray(g).tolist(), [row.tolist() for row in g]),
    "dlpack": lambda g: None if g.is_sparse else torch.from_dlpack(g).clone(),
    "storage": lambda g: None if g.is_sparse else list(g.untyped_storage()),
}


@pytest.mark.parametrize("read", READS)
def test_reading_gives_what_torch_gives(pair: Pair, read: str) -> None:
    native, lifted = (READS[read](grad) for grad in fresh(pair))
    if isinstance(native, Tensor):
        assert type(lifted) in (Tensor, PendingGrad)
        assert_same_grad(native, lifted, exact=False)
    else:
        assert np.array_equal(native, lifted) if isinstance(native, np.ndarray) else native == lifted
    pair.both(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad()))
    train(pair, range(2))
    pair.check()


def own_update(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.data.add_(parameter.grad, alpha=-0.05)
            parameter.grad = None


def masters(model: nn.Module, optimizer: Any) -> None:
    """Gradients handed to other parameters, which keep them over the next backward."""
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for p, master in zip(model.parameters(), copies):
        master.grad, p.grad = p.grad, None
    backward(model, 7)
    other = torch.optim.SGD(copies, lr=0.1)
    other.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), copies):
            p.copy_(master)
    optimizer.step()


def twins(model: nn.Module, optimizer: Any) -> None:
    """One gradient for two parameters of one optimizer."""
    twin = nn.Parameter(torch.ones(SHAPE))
    optimizer.add_param_group({"params": [twin]})
    optimizer.param_groups[0]["params"].append(twin)
    del optimizer.param_groups[1]
    twin.grad = model.emb[TABLE].weight.grad
    optimizer.step()
    with torch.no_grad():
        model.emb[TABLE].weight += twin


def buffers(model: nn.Module, optimizer: Any) -> None:
    """Gradients that accumulate in memory of the loop's."""
    flats = []
    for p in model.parameters():
        flats.append(torch.ones(p.numel()))
        p.grad = flats[-1].view_as(p)
    backward(model, 3)
    with torch.no_grad():
        for p, flat in zip(model.parameters(), flats):
            p -= 0.1 * flat.view_as(p)
    optimizer.step()


def held(model: nn.Module, optimizer: Any) -> None:
    """A gradient that somebody keeps is theirs."""
    old = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    backward(model, 5)
    with torch.no_grad():
        for p, grad in zip(model.parameters(), old):
            p.add_(grad, alpha=-0.1)
    optimizer.step()
    for p, grad in zip(model.parameters(), old):
        p.grad = grad
    backward(model, 6)
    optimizer.step()


def view_after_zero(model: nn.Module, optimizer: Any) -> None:
    grad = model.emb[TABLE].weight.grad
    view = None if grad.is_sparse else grad.view(-1)
    optimizer.zero_grad(set_to_none=False)
    if view is not None:
        view += 1
    backward(model, 5)
    optimizer.step()


def written(write: Callable[[Tensor], Any]) -> Callable[[nn.Module, Any], None]:
    def use(model: nn.Module, optimizer: Any) -> None:
        write(model.emb[TABLE].weight.grad)
        optimizer.step()
        backward(model, 4)                       # adds to what was written
        optimizer.step()
    return use


def first_row(grad: Tensor) -> None:
    (grad._values() if grad.is_sparse else grad)[0] = 7


def as_array(grad: Tensor) -> None:
    (grad._values() if grad.is_sparse else grad).numpy()[:2] = 3


USES: dict[str, Callable[[nn.Module, Any], None]] = {
    "own update": own_update, "masters": masters, "buffers": buffers, "held": held, "view after zero": view_after_zero,
    "row": written(first_row), "array": written(as_array), "data": written(lambda g: g.data.mul_(0.5)),
    "scaled twice": written(lambda g: g.mul_(0.5).mul_(3)), "divided": written(lambda g: g.div_(3)),
    "values": written(lambda g: g._values().mul_(2) if g.is_sparse else g.clamp_(-0.01, 0.01)),
    "detached": written(lambda g: g.detach().mul_(2)), "added": written(lambda g: g.add_(g.clone())),
    "copied": written(lambda g: g.copy_(g * 2)), "data set": written(lambda g: setattr(g, "data", g.clone() * 2)),
    "data kept": written(lambda g: setattr(g, "data", g)), "detached values": written(lambda g: first_row(g.detach())),
    "detached and zeroed": written(lambda g: g.detach().zero_()), "zeroed": written(lambda g: g.zero_()), "twins": twins,
}


@pytest.mark.parametrize("use", USES)
def test_what_loops_do_with_gradients(pair: Pair, use: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, 0)
        USES[use](model, optimizer)
        optimizer.zero_grad()
        step(model, optimizer, 1)

    pair.both(loop)
    pair.check()


def test_an_optimizer_that_writes_to_gradients() -> None:
    class Decayed(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:       # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(0.5)
                p.add_(p.grad, alpha=-0.1)

    pair = Pair()
    pair.both(lambda model, _: backward(model, 0))
    for model in (pair.native, pair.lifted):
        optimizer = Decayed(model.parameters(), {})
        if model is pair.lifted:                            # known to the plan
            pair.applied.detach(model)
            pair.applied.attach(model, [optimizer])
            backward(model, 0)
            model.zero_grad()
            backward(model, 0)
        for _ in range(2):
            optimizer.step()
    pair.check()


@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_values_equals_the_dense_native_result(foreach: bool | None) -> None:
    dense, sparse = Pair(sparse=False), Pair()
    for model, optimizer in ((dense.native, dense.native_opt), (dense.lifted, dense.lifted_opt), (sparse.lifted, sparse.lifted_opt)):
        for seed in range(3):
            backward(model, seed)
            nn.utils.clip_grad_value_(model.parameters(), 0.02, foreach=foreach)
            assert max(p.grad.to_dense().abs().max() for p in model.parameters()) <= 0.02
            optimizer.step()
            optimizer.zero_grad()
    assert_same(dense.native, dense.lifted, exact=False)
    assert_same(dense.native, sparse.lifted, exact=False)


def test_bounds_that_would_move_untouched_rows_raise_as_natively() -> None:
    for grad in fresh(Pair()):
        with pytest.raises(NotImplementedError):
            grad.clamp_(0.1, 0.2)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_equal_the_dense_native_ones(norm_type: float) -> None:
    dense, sparse = Pair(sparse=False), Pair()
    norms = []
    for model in (dense.native, dense.lifted, sparse.lifted):
        backward(model, 0)
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type))
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(norms[2], norms[0])


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 0.0])
def test_clipping_infinities_is_native(factor: float) -> None:
    pair = Pair(sparse=False)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, 0, factor)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    pair.both(loop)
    for native, lifted in zip(pair.native.parameters(), pair.lifted.parameters()):
        assert torch.equal(native.isnan(), lifted.isnan())
    for model in (pair.native, pair.lifted):
        backward(model, 0, factor)
        if factor:
            with pytest.raises(RuntimeError, match="non-finite"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)


def test_a_clip_that_leaves_gradients_as_they_are_keeps_the_usual_step() -> None:
    pair = Pair(coalesce="none")
    for model, optimizer in ((pair.native, pair.native_opt), (pair.lifted, pair.lifted_opt)):
        backward(model, 0)
        if model is pair.lifted:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            assert model.emb[0].weight.grad.state.scales is None
        optimizer.step()
    pair.check(exact=True)


def test_shapes_and_storage_of_the_handle_cannot_be_changed() -> None:
    pair = Pair(sparse=False)
    changes: list[Callable[[Tensor], Any]] = [
        lambda g: g.t_(), lambda g: g.resize_(3), lambda g: g.set_(torch.ones(3)), lambda g: g.unsqueeze_(0),
        lambda g: torch.add(torch.ones(2, 2), 1, out=g)]
    for change in changes:
        _, lifted = fresh(pair)
        with pytest.raises(RuntimeError, match=r"of (a|the) lifted table"):
            change(lifted)
    _, lifted = fresh(pair)
    torch.add(torch.ones(SHAPE), 1, out=lifted)
    assert (pair.lifted.emb[TABLE].weight.grad == 2).all()


# ---------------------------------------------------------------------------------------------------------------------------- autograd

def test_inputs_of_backward(pair: Pair) -> None:
    for wanted in ([TABLE], [0, 2], [], [0, 1, 2]):
        for others in (True, False):
            if not wanted and not others:
                continue
            for model in (pair.native, pair.lifted):
                model.zero_grad()
                inputs = [model.emb[t].weight for t in wanted] + list(model.top.parameters()) * others
                for seed in range(2):
                    model(*batch(seed)).pow(2).mean().backward(inputs=inputs)
            for native, lifted in zip(pair.native.parameters(), pair.lifted.parameters()):
                assert (native.grad is None) == (lifted.grad is None)
                if native.grad is not None:
                    assert_same_grad(native.grad, lifted.grad, exact=False)
            pair.both(lambda _, optimizer: optimizer.step())
    pair.check()
    train(pair, range(2))
    pair.check()


def test_grad_of_tables(pair: Pair) -> None:
    found = []
    for model in (pair.native, pair.lifted):
        model.emb[0].weight.grad = torch.ones(ROWS[0], DIM)
        loss = model(*batch(0)).pow(2).mean() + model(*batch(1)).pow(2).mean()
        inputs = [model.emb[TABLE].weight, model.top.weight, model.emb[2].weight]
        found.append([*torch.autograd.grad(loss, inputs, retain_graph=True), *torch.autograd.grad(loss, model.emb[0].weight)])
        assert model.emb[TABLE].weight.grad is None and model.emb[0].weight.grad.eq(1).all()
        unrelated = nn.Parameter(torch.ones(ROWS[TABLE], DIM))
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(model(*batch(0)).sum(), [unrelated])
        grads = torch.autograd.grad(model(*batch(0)).sum(), [unrelated, model.emb[TABLE].weight], allow_unused=True)
        assert grads[0] is None
        found[-1].append(grads[1])
        zeros, _ = torch.autograd.grad(model(*batch(0)).sum(), [unrelated, model.top.weight], allow_unused=True, materialize_grads=True)
        assert not zeros.any()
    for native, lifted in zip(*found):
        assert_same_grad(native, lifted, exact=False)
    with pytest.raises(LiftRefused, match="create_graph"):
        torch.autograd.grad(pair.lifted(*batch(0)).sum(), [pair.lifted.emb[0].weight], create_graph=True)
    train(pair, range(2))
    pair.check()


def test_many_gradients_of_a_table_at_once_are_refused() -> None:
    pair = Pair(sparse=False)
    for model in (pair.native, pair.lifted):
        out = model(*batch(0))
        many = torch.eye(len(out))[:, :, None]

        def grads(weight: Tensor, out: Tensor = out, many: Tensor = many) -> Any:
            return torch.autograd.grad(out, [weight], grad_outputs=many, is_grads_batched=True, retain_graph=True)

        assert grads(model.top.weight)[0].shape[0] == len(out)
        if model is pair.lifted:
            with pytest.raises(LiftRefused, match="is_grads_batched"):
                grads(model.emb[0].weight)


def test_gradient_of_sample_weights_alone_leaves_tables_alone() -> None:
    pair = Pair(weighted=True, concat=False)
    found = []
    for model in (pair.native, pair.lifted):
        dense, offsets, indices = batch(0)
        sample_weights = [torch.rand(len(i), generator=torch.Generator().manual_seed(0)).requires_grad_() for i in indices]
        out = model(dense, offsets, indices, sample_weights).pow(2).mean()
        found.append(torch.autograd.grad(out, sample_weights, retain_graph=True))
        assert all(each.weight.grad is None for each in model.emb)
        out.backward(inputs=[sample_weights[1]], retain_graph=True)
        assert all(each.weight.grad is None for each in model.emb) and sample_weights[0].grad is None
        out.backward(inputs=[sample_weights[0], model.emb[0].weight])
        assert model.emb[1].weight.grad is None
        found[-1] += (sample_weights[1].grad, sample_weights[0].grad, model.emb[0].weight.grad.to_dense())
    for native, lifted in zip(*found):
        torch.testing.assert_close(native, lifted)


def test_table_written_to_before_the_gradient_of_sample_weights_raises_as_natively() -> None:
    pair = Pair(weighted=True)
    for model in (pair.native, pair.lifted):
        dense, offsets, indices = batch(0)
        sample_weights = [torch.ones(len(i), requires_grad=True) for i in indices]
        out = model(dense, offsets, indices, sample_weights).sum()
        with torch.no_grad():
            model.emb[TABLE].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
            out.backward()


def test_a_backward_inside_a_backward_with_inputs_is_its_own(pair: Pair) -> None:
    for model in (pair.native, pair.lifted):
        out = model(*batch(0))

        def another_backward(grad: Tensor, model: nn.Module = model) -> None:
            with torch.enable_grad():
                model(*batch(1)).pow(2).mean().backward()

        out.register_hook(another_backward)
        torch.autograd.grad(out.sum(), [model.emb[0].weight])
    for native, lifted in zip(pair.native.emb, pair.lifted.emb):
        assert_same_grad(native.weight.grad, lifted.weight.grad, exact=False)


@pytest.mark.parametrize("moment", ["before the forward", "before the backward"])
def test_hooks_of_weights(pair: Pair, moment: str) -> None:
    seen: list[list[Tensor]] = [[], []]

    def watch(model: nn.Module, log: list[Tensor]) -> list[Any]:
        weight = model.emb[TABLE].weight
        return [weight.register_hook(lambda grad: grad * 2),
                weight.register_hook(lambda grad: log.append(grad.to_dense().clone())),
                weight.register_post_accumulate_grad_hook(lambda w: log.append(w.grad.to_dense().clone()))]

    for model, optimizer, log in ((pair.native, pair.native_opt, seen[0]), (pair.lifted, pair.lifted_opt, seen[1])):
        for seed in range(2):                    # accumulated
            hooks = watch(model, log) if moment == "before the forward" else []
            loss = model(*batch(seed)).pow(2).mean()
            hooks += watch(model, log) if moment == "before the backward" else []
            loss.backward()
            for hook in hooks:
                hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer, 3)
    assert len(seen[0]) == 4
    for native, lifted in zip(*seen, strict=True):
        torch.testing.assert_close(native, lifted)
    pair.check()


class Checkpointed(Bags):
    """Bags whose lookups, or whose dense parts, are computed again in backward."""

    reentrant = False
    where = "lookups"

    def forward(self, dense: Tensor, offsets: Any, indices: Any, weights: Any = None) -> Tensor:
        def look_up(dense: Tensor) -> Tensor:
            return torch.cat([self.bottom(dense).relu(), *(e(i, o) for e, i, o in zip(self.emb, indices, offsets))], dim=1)

        def all_of_it(dense: Tensor) -> Tensor:
            return self.top(look_up(dense).sigmoid() * 2)

        if self.where == "lookups":
            return self.top(checkpoint(look_up, dense, use_reentrant=self.reentrant).sigmoid() * 2)
        if self.where == "all":
            return checkpoint(all_of_it, dense, use_reentrant=self.reentrant)
        return self.top(checkpoint(torch.sigmoid, look_up(dense), use_reentrant=self.reentrant) * 2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["lookups", "all", "after", "model"])
@pytest.mark.parametrize("plan", [{"concat": True}, {"concat": False}, {"concat": False, "prelude": False}],
                         ids=["concat", "group", "alone"])
def test_activation_checkpointing(plan: dict[str, bool], where: str, reentrant: bool) -> None:
    models = []
    for lifts in (False, True):
        model = Checkpointed()
        model.reentrant, model.where = reentrant, where
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if lifts:
            structure = bags_structure(model, [optimizer])
            attach(structure, schedule(structure, coalesce="none", **plan), model, [optimizer], "reference")
        for seed in range(3):
            dense, offsets, indices = batch(seed)
            dense.requires_grad_()               # without which a reentrant checkpoint gives no gradients at all
            whole = checkpoint(model, dense, offsets, indices, use_reentrant=reentrant) if where == "model" else None
            out = model(dense, offsets, indices) if whole is None else whole
            out.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_same(*models)


def test_functional_call_with_other_parameters(pair: Pair) -> None:
    """A second set of weights, trained beside the first through the same modules."""
    others = []
    for model in (pair.native, pair.lifted):
        torch.manual_seed(5)
        others.append({name: nn.Parameter(torch.randn_like(p) * 0.1) for name, p in model.named_parameters()})

    for model, other in zip((pair.native, pair.lifted), others):
        optimizer = pair.native_opt if model is pair.native else pair.lifted_opt
        own = torch.optim.SGD(other.values(), lr=0.1)
        for seed in range(3):
            backward(model, seed)
            torch.func.functional_call(model, other, batch(seed)).pow(2).mean().backward()
            optimizer.step()
            own.step()
            backward(model, seed + 5)            # accumulates in the one, not in the other
            own.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    pair.check()
    for native, lifted in zip(others[0].values(), others[1].values()):
        torch.testing.assert_close(native, lifted)


def test_a_table_that_is_used_beside_its_lookups(pair: Pair) -> None:
    """As an output layer tied to it, say: torch's gradient and ours meet in .grad, in either order."""
    for first in (True, False):
        def loop(model: nn.Module, optimizer: torch.optim.Optimizer, first: bool = first) -> None:
            for seed in range(2):
                direct = model.emb[TABLE].weight.pow(2).sum() * 0.01
                losses = [model(*batch(seed)).pow(2).mean(), direct]
                for loss in losses if first else losses[::-1]:
                    loss.backward()
                (model(*batch(seed)).pow(2).mean() + model.emb[TABLE].weight.sum() * 0.01).backward()
                optimizer.step()
                optimizer.zero_grad()
        pair.both(loop)
        pair.check()


def test_a_graph_that_is_kept_gives_its_gradient_again(pair: Pair) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = model(*batch(0)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    pair.both(loop)
    pair.check()


def test_traced_models_look_up_anew() -> None:
    pair = Pair(concat=False)
    for model in (pair.native, pair.lifted):
        traced = torch.jit.trace(model, batch(0), check_trace=False)
        assert torch.equal(traced(*batch(1)), model(*batch(1)))


