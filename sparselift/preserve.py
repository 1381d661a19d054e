"""Run real training steps on a user's model and leave no trace.

Everything small is cloned. Embedding tables are not: the batches are known, so a dry forward pass tells which rows they touch, and
only those rows (and their optimizer state) are kept and put back.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparselift.nn import TableBatchedEmbeddingBags
from sparselift.optim import RowWiseAdagrad, fused_rule
from sparselift.workload import Workload

# With a sparse gradient these move the rows that it names, and (momentum) those that a sparse state tensor names. Nothing else.
_ROWWISE_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, RowWiseAdagrad)

# These ask a tensor for its layout or its gradient, or set its gradient, and leave its values alone.
_METADATA = frozenset({
    Tensor.grad.__get__, Tensor.grad.__set__, Tensor.requires_grad.__set__,  # type: ignore[attr-defined,union-attr]
    Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor,
    torch.empty_like, torch.zeros_like, torch.ones_like})


class preserve:
    """Context manager: parameters, gradients, buffers, optimizer state and options, train/eval modes and random state (torch, CUDA
    where it runs, `random`, NumPy's global one) are on exit bit for bit what they were on entry, in the same tensor objects, after an
    exception or Ctrl-C too. Memory stays where it is, unless something inside assigns `.data`.

    Inside, gradients start out as None and any number of steps on `batches` may run. A table takes memory for the rows that these
    batches touch, not for a second copy; this holds for `nn.EmbeddingBag` and `nn.Embedding` weights whose other rows the
    optimizer leaves alone. Every other parameter is cloned.

    Parameters
    ----------
    work      the workload; its `step` runs once a batch, forward only, to see the ids
    batches   every batch that will be used inside; more may be announced with `touch` before they are used

    Not seen, so not restored: what lives outside the model and the optimizers (a loss scaler, a scheduler, a data loader), and
    attributes of modules that are neither parameters nor buffers.
    """

    def __init__(self, work: Workload, batches: Sequence[Any]) -> None:
        self._work = work
        self._batches = batches
        self._tables: dict[Tensor, _TouchedRows] = {}
        self._undo = ExitStack()

    @property
    def touched_rows(self) -> dict[str, Tensor]:
        """Table name -> (U,) int64 rows kept so far, ascending. Tables that are kept whole are absent."""
        return {table.name: table.rows for table in self._tables.values() if not table.whole}

    def __enter__(self) -> preserve:
        try:
            self._keep_random_state()
            self._keep_model()
            for optimizer in self._work.optimizers:
                self._keep_optimizer(optimizer)
            self.touch(self._batches)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def touch(self, batches: Iterable[Any]) -> None:
        """Keep the rows that further batches touch. To be called before any step on them."""
        tables = self._tables
        with torch.no_grad(), ExitStack() as hooks, eager():
            for module in self._work.model.modules():
                if found := [tables.get(weight) for weight in _weights_of(module)]:
                    hooks.callback(module.register_forward_pre_hook(partial(_see_call, found), with_kwargs=True).remove)
            with _WatchTables(tables):
                for batch in batches:
                    self._work.step(self._work.model, batch)
        for table in tables.values():
            table.keep()

    def watch(self) -> AbstractContextManager[Any]:
        """While this is entered, a table that the model's Python reads or writes beside lookups is kept whole just before.

        For runs that update nothing on batches that were not announced.
        """
        return _WatchTables(self._tables)

    def _restore(self) -> None:
        # The stack runs every undo, even after one has raised; a second Ctrl-C waits until it is done.
        with sigint_deferred(), torch.no_grad():
            self._undo.close()
        self._tables = {}

    def _keep_random_state(self) -> None:
        self._undo.callback(torch.set_rng_state, torch.get_rng_state())
        self._undo.callback(random.setstate, random.getstate())
        self._undo.callback(np.random.set_state, np.random.get_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())

    def _keep_model(self) -> None:
        model, optimizers = self._work.model, self._work.optimizers
        row_wise = set(_row_wise_tables(self._work))
        names = {weight: name for name, weight in model.named_parameters()}
        held = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
        for weight in dict.fromkeys([*names, *held]):
            self._undo.callback(setattr, weight, "grad", weight.grad)
            weight.grad = None
            if weight in row_wise:
                self._tables[weight] = _TouchedRows(names[weight], weight, optimizers)
                self._undo.callback(self._tables[weight].restore)
            else:
                self._undo.callback(keep(weight))
        for module in model.modules():
            self._undo.callback(setattr, module, "training", module.training)
            for name, buffer in module._buffers.items():
                self._undo.callback(_put, module._buffers, name, keep(buffer))

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self._undo.callback(_refill, group, {key: keep(value) if key != "params" else partial(_same, value)
                                                 for key, value in group.items()})
        state: dict[Any, Callable[[], Any]] = {}
        for weight, values in optimizer.state.items():
            table = self._tables.get(weight)
            if table is None:
                state[weight] = keep(values)
            else:  # the rows of a tensor with a row's state in each row are kept by the table
                state[weight] = partial(_refill, values, {
                    key: partial(_same, value) if table.has_rows(value) else keep(value) for key, value in values.items()})
        self._undo.callback(_refill, optimizer.state, state)


class _TouchedRows:
    """The rows of one table, and of its optimizer state, that batches touch."""

    def __init__(self, name: str, weight: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.name = name
        self.whole = False         # something other than a lookup reads the weight, so that any row may move
        self._weight = weight
        self._seen: dict[int, Tensor] = {}  # ids of lookups since the last keep(), by id() of the tensor: a call is seen twice
        states = [value for optimizer in optimizers if weight in optimizer.state for value in optimizer.state[weight].values()]
        self._targets = [weight, *(value for value in states if self.has_rows(value))]
        for value in states:       # a sparse momentum moves its rows at every step
            if isinstance(value, Tensor) and value.is_sparse:
                self.see(value._indices()[0])
        self._kept: list[tuple[Tensor, list[Tensor]]] = []  # (rows, the values of each target), disjoint
        self._clones: list[Tensor] = []

    @property
    def rows(self) -> Tensor:
        """(U,) kept rows, ascending."""
        rows = [rows for rows, _ in self._kept]
        return torch.cat(rows).sort().values if rows else torch.empty(0, dtype=torch.int64)

    def has_rows(self, value: Any) -> bool:
        """Whether an optimizer's state value is a strided tensor with one entry a row."""
        return isinstance(value, Tensor) and value.layout is torch.strided and value.shape[:1] == self._weight.shape[:1]

    def see(self, ids: Any) -> None:
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            self._seen[id(ids)] = ids

    def keep(self) -> None:
        """Copy the rows of the ids seen since the last call. Rows kept before keep their first values."""
        if self._seen and not self.whole:
            fresh = torch.zeros(len(self._weight), dtype=torch.bool, device=self._weight.device)
            for ids in self._seen.values():
                fresh[_valid(ids.detach().flatten().long(), len(fresh)).to(fresh.device)] = True
            for rows, _ in self._kept:
                fresh[rows] = False
            rows = fresh.nonzero()[:, 0]
            self._kept.append((rows, [target.detach()[rows] for target in self._targets]))
        self._seen = {}

    def keep_whole(self) -> None:
        """Copy everything. Rows kept before keep their first values."""
        if not self.whole:
            self.whole = True
            self._clones = [target.detach().clone() for target in self._targets]

    def restore(self) -> None:
        for target, clone in zip(self._targets, self._clones, strict=False):
            target.copy_(clone)
        for rows, values in self._kept:  # after the clones, which may be younger
            for target, value in zip(self._targets, values, strict=True):
                target.index_copy_(0, rows, value)


def _see_call(tables: Sequence[_TouchedRows | None], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of a module that looks into `tables`."""
    if isinstance(module, TableBatchedEmbeddingBags):
        given = dict(zip(("indices", "offsets"), args), **kwargs)
        starts = given["offsets"][::max(1, (len(given["offsets"]) - 1) // len(tables))].tolist()
        parts = [given["indices"][start:stop] for start, stop in zip(starts, starts[1:])]
    else:
        parts = [args[0] if args else kwargs.get("input")]
    for table, part in zip(tables, parts):
        if table is not None:
            table.see(part)


def _valid(ids: Tensor, rows: int) -> Tensor:
    """Ids within the table. A module may be given others and hash them; what it then looks up is seen as well."""
    if ids.numel() and (ids.min() < 0 or ids.max() >= rows):
        return ids[(ids >= 0) & (ids < rows)]
    return ids


class _WatchTables(TorchFunctionMode):
    """Sees every torch function that is given a table's weight."""

    def __init__(self, tables: dict[Tensor, _TouchedRows]) -> None:
        super().__init__()
        self._tables = {id(weight): table for weight, table in tables.items()}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _writes(func, kwargs):  # through an alias it cannot: whoever takes one is a reader already
            self._keep_whole(values_read(func, args, kwargs, (), self._tables))
        result = func(*args, **kwargs)
        self._keep_whole(values_read(func, args, kwargs, result, self._tables))
        if func in (F.embedding, F.embedding_bag):
            table = self._tables.get(id(args[1] if len(args) > 1 else kwargs.get("weight")))
            if table is not None:
                table.see(args[0] if args else kwargs.get("input"))
        return result

    def _keep_whole(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            self._tables[id(weight)].keep_whole()


def values_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tensors: Container[int]) -> Iterator[Tensor]:
    """The arguments of a torch function whose id() is in `tensors`, where the call reads values, or gives an alias, or writes.

    Lookups of rows do not count, nor what gives no tensor (sizes, flags), nor looks at layout and gradient.
    """
    if func in (F.embedding, F.embedding_bag) or func in _METADATA:
        return
    if not isinstance(result, (Tensor, list, tuple)) or isinstance(result, torch.Size):
        return
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if id(item) in tensors:
                yield item


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function writes to an argument, by its name: add_, __setitem__, __iadd__, or by out=."""
    name = getattr(func, "__name__", "")
    return "out" in kwargs or (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__") or (
        name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))


def _row_wise_tables(work: Workload) -> Iterator[nn.Parameter]:
    """Weights of embedding modules, and of no others, of which a step moves the looked-up rows only."""
    sparse: dict[nn.Parameter, set[bool]] = {}
    others: set[nn.Parameter] = set()
    for module in work.model.modules():
        weights = _weights_of(module)
        for weight in weights:
            sparse.setdefault(weight, set()).add(module.sparse)  # type: ignore[arg-type]
        if not isinstance(module, nn.ParameterList):
            others.update({weight for weight in module._parameters.values() if weight is not None} - set(weights))
        if getattr(module, "max_norm", None) is not None:       # rows move in the forward, before we have seen them
            others.update(weights)
    holders: dict[Tensor, list[tuple[torch.optim.Optimizer, dict[str, Any]]]] = {}
    for optimizer in work.optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                holders.setdefault(weight, []).append((optimizer, group))
    for weight in sparse.keys() - others:
        stays = all(_leaves_other_rows(*holder, sparse[weight] == {True}) for holder in holders.get(weight, ()))
        if not weight.requires_grad or (stays and (weight in holders or sparse[weight] == {True})):
            yield weight


def _weights_of(module: nn.Module) -> list[nn.Parameter]:
    """The tables that a module looks into; none for a module that is no embedding."""
    if isinstance(module, TableBatchedEmbeddingBags):
        return list(module.weights)
    weight = module._parameters.get("weight") if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else None
    return [] if weight is None else [weight]


def _leaves_other_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any], sparse: bool) -> bool:
    if not sparse:
        return fused_rule(optimizer, group, sparse=False)[0] is not None
    return type(optimizer) in _ROWWISE_OPTIMIZERS or not (group.get("weight_decay") or group.get("momentum"))


def keep(value: Any) -> Callable[[], Any]:
    """A function that puts a value back as it is now and returns it: tensors and containers in place, by identity and content."""
    if isinstance(value, Tensor):
        # An expanded tensor cannot be written in place, neither by the step nor by us.
        expanded = any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)) \
            if value.layout is torch.strided else False
        return partial(_same, value) if expanded else partial(_copy_back, value, value.detach().clone())
    if isinstance(value, dict):
        return partial(_refill, value, {key: keep(item) for key, item in value.items()})
    if isinstance(value, list):
        return partial(_relist, value, [keep(item) for item in value])
    return partial(_same, value)


def _same(value: Any) -> Any:
    return value


@torch.no_grad()
def _copy_back(target: Tensor, saved: Tensor) -> Tensor:
    return target.copy_(saved)


def _put(target: dict[str, Any], key: str, restore: Callable[[], Any]) -> None:
    target[key] = restore()


def _refill(target: Any, items: dict[Any, Callable[[], Any]]) -> Any:
    values = {key: restore() for key, restore in items.items()}
    target.clear()
    target.update(values)
    return target


def _relist(target: list[Any], items: list[Callable[[], Any]]) -> list[Any]:
    target[:] = [restore() for restore in items]
    return target


def eager() -> AbstractContextManager[Any]:
    """Runs compiled modules as plain Python, so that hooks see them. Free while nothing in the process has been compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def sigint_deferred() -> Iterator[None]:
    """Ctrl-C inside takes effect at the end. Signals reach the main thread alone, so elsewhere nothing changes."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[-1])
