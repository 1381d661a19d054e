"""Index work of coming batches, done while the current step runs.

What a lookup does with ids alone needs no weights and no gradients: check them, narrow them, and find the lookups of every row for the
update. A thread beside the training loop does it for batches that the loader has given already. The step that a batch is for compares
its tensors with those that were prepared; where they differ it prepares them itself, as if nothing had been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from torch import nn

from sparselift.apply import ATTRIBUTE
from sparselift.runtime.executor import Prelude
from sparselift.runtime.groups import Prepared
from sparselift.workload import check_kind

Batch = TypeVar("Batch")
Inputs = Callable[[Any], Any]


def prefetch_batches(loader: Iterable[Batch], model: nn.Module, inputs: Inputs | None = None, depth: int = 1) -> BatchPrefetcher[Batch]:
    """The batches of a loader, whose index work for a planned model is done ahead on a thread of its own.

    ```
    for batch in sl.prefetch_batches(loader, model, lambda batch: (batch.dense, batch.offsets, batch.ids)):
        loss = step(model, batch)
    ```

    Results are bit for bit those of the loader alone. What a batch or the loader raises is raised where it natively is: bad ids by the
    forward that looks them up, the loader's error when its batch is asked for. The loader itself is read in the caller's thread, `depth`
    batches early; one that draws from torch's global random numbers therefore draws them earlier. Without a plan batches pass through.

    Parameters
    ----------
    loader  read anew in every pass
    model   the root module that plans are applied to, before or during a pass
    inputs  what the forward gets of a batch: a tuple of its arguments, or a mapping of keywords; None: the batch itself, alone
    depth   batches ahead, 0 or more; 0: none

    Raises ValueError for a negative depth and TypeError for a model that is none.
    """
    check_kind("prefetch_batches", "model", model, nn.Module, "the call is sl.prefetch_batches(loader, model, inputs)")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth must be a number of batches, 0 or more; got {depth!r}")
    return BatchPrefetcher(loader, model, inputs, depth)


class BatchPrefetcher(Generic[Batch]):
    """See `prefetch_batches`. Every `iter` is a pass of its own; `len` is the loader's."""

    def __init__(self, loader: Iterable[Batch], model: nn.Module, inputs: Inputs | None, depth: int) -> None:
        self.loader, self.model, self.inputs, self.depth = loader, model, inputs, depth

    def __iter__(self) -> Iterator[Batch]:
        return _Pass(iter(self.loader), self.model, self.inputs, self.depth)

    def __len__(self) -> int:
        return len(self.loader)                                  # type: ignore[arg-type]  # raises what the loader's does


class _Item:
    """A batch on its way, or what was raised in its place."""

    __slots__ = ("batch", "error", "jobs")

    def __init__(self, batch: Any = None, error: Exception | None = None) -> None:
        self.batch, self.error = batch, error
        self.jobs: list[tuple[Prelude, Future[Prepared]]] = []


class _Pass(Generic[Batch]):
    """One pass over a loader. Its thread ends with it, however it ends."""

    def __init__(self, batches: Iterator[Batch], model: nn.Module, inputs: Inputs | None, depth: int) -> None:
        self._batches, self._model, self._inputs, self._depth = batches, model, inputs, depth
        self._items: deque[_Item] = deque()
        self._waiting: list[tuple[Prelude, Prepared]] = []       # of the batch that was handed out last
        self._thread: ThreadPoolExecutor | None = None
        self._ended = False                                      # the loader

    def __iter__(self) -> _Pass[Batch]:
        return self

    def __next__(self) -> Batch:
        self._forget()
        while not self._ended and len(self._items) <= self._depth:
            self._read()
        if not self._items:
            self.close()
            raise StopIteration
        self._hand_over(self._items[0])
        item = self._items.popleft()
        if item.error is None:
            return item.batch
        try:
            raise item.error
        finally:
            del item                                             # which the error refers to: nothing in a circle would keep the thread

    def close(self) -> None:
        """Stop the thread, and forget what it has prepared."""
        self._ended = True
        self._items.clear()
        self._forget()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    __del__ = close

    def _read(self) -> None:
        """Take a batch from the loader. The one that is handed out next has no step to hide behind."""
        try:
            item = _Item(next(self._batches))
            if self._items:
                item.jobs = list(self._jobs(item.batch))
        except StopIteration:
            self._ended = True
            return
        except Exception as error:
            item = _Item(error=error)
        self._items.append(item)

    def _jobs(self, batch: Batch) -> Iterator[tuple[Prelude, Future[Prepared]]]:
        applied = self._model.__dict__.get(ATTRIBUTE)
        if applied is None or applied.runtime is None:
            return
        args, kwargs = _arguments(batch if self._inputs is None else self._inputs(batch), self._inputs is None)
        for prelude in applied.runtime.preludes:
            work = prelude.ahead(args, kwargs)
            if work is not None:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "sparselift-ahead")
                yield prelude, self._thread.submit(work)

    def _hand_over(self, item: _Item) -> None:
        """Leave what is prepared with the lookups that it is for. What the thread has not begun, they do themselves."""
        while item.jobs:
            prelude, job = item.jobs[-1]
            if not job.cancel() and job.exception() is None:      # an error is the step's to raise, which prepares the batch again
                prelude.group.ahead = job.result()
                self._waiting.append((prelude, job.result()))
            item.jobs.pop()

    def _forget(self) -> None:
        """Whatever waits for a forward that has not come."""
        for prelude, prepared in self._waiting:
            if prelude.group.ahead is prepared:
                prelude.group.ahead = None
                prelude.in_vain(prepared)
        self._waiting.clear()


def _arguments(given: Any, alone: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the forward."""
    if alone:
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, Sequence):
        return tuple(given), {}
    raise TypeError("prefetch_batches: inputs must give a tuple of the forward's arguments or a mapping of its keywords; "
                    f"got {type(given).__name__}")
