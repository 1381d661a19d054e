"""Index work of coming batches, done while the current step runs.

What a lookup does with ids alone needs no weights and no gradients: check them, narrow them, and find the lookups of every row for the
update. A thread beside the training loop does it for batches that the loader has given already. The step that a batch is for compares
its tensors with those that were prepared; where they differ it prepares them itself, as if nothing had been.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn

from sparselift.apply import ATTRIBUTE, Applied
from sparselift.runtime.executor import Prelude
from sparselift.runtime.groups import Prepared
from sparselift.workload import check_kind, forward_arguments

Batch = TypeVar("Batch")
Inputs = Callable[[Any], Any]


def prefetch_batches(loader: Iterable[Batch], model: nn.Module, inputs: Inputs | None = None,
                     depth: int | None = None) -> BatchPrefetcher[Batch]:
    """The batches of a loader, whose index work for a planned model is done ahead on a thread of its own, as far as the plan says.

    ```
    for batch in sl.prefetch_batches(loader, model, lambda batch: (batch.dense, batch.offsets, batch.ids)):
        loss = step(model, batch)
    ```

    Results are bit for bit those of the loader alone. What a batch or the loader raises is raised where it natively is: bad ids by the
    forward that looks them up, the loader's error when its batch is asked for. The loader itself is read in the caller's thread, as many
    batches early; one that draws from torch's global random numbers therefore draws them earlier. Without a plan, and with tables on a
    device, whose kernels check ids beside the host by themselves, batches pass through.
    A forked child may go on with a pass: it has a thread of its own, and does what the parent's has begun itself.

    Parameters
    ----------
    loader  read anew in every pass
    model   the root module that plans are applied to, before or during a pass
    inputs  what the forward gets of a batch, as Workload.inputs: a tuple of its arguments, or a mapping of keywords; None: the batch
            itself, alone
    depth   batches ahead, 0 or more; None: what the applied plan's `prefetch_batches` says, 0 without one

    Raises ValueError for a negative depth and TypeError for a model that is none.
    """
    check_kind("prefetch_batches", "model", model, nn.Module, "the call is sl.prefetch_batches(loader, model, inputs)")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise ValueError(f"depth must be a number of batches, 0 or more, or None; got {depth!r}")
    return BatchPrefetcher(loader, model, inputs, depth)


class BatchPrefetcher(Generic[Batch]):
    """See `prefetch_batches`. Every `iter` is a pass of its own; `len` is the loader's."""

    def __init__(self, loader: Iterable[Batch], model: nn.Module, inputs: Inputs | None, depth: int | None) -> None:
        self.loader, self.model, self.inputs, self.depth = loader, model, inputs, depth

    def __iter__(self) -> Iterator[Batch]:
        return _Pass(iter(self.loader), IndexAhead(self.model, self.inputs), self.depth)

    def __len__(self) -> int:
        return len(self.loader)                                  # type: ignore[arg-type]  # raises what the loader's does


class IndexAhead:
    """Does the index work of batches that a planned model's forward will get, on a thread of its own that ends with this object.

    For one thread that trains. In a forked child, which has none but the one that forked, what was begun is the step's to do again.
    """

    def __init__(self, model: nn.Module, inputs: Inputs | None) -> None:
        self._model, self._inputs = model, inputs
        self._waiting: list[tuple[Prelude, Prepared]] = []       # of the batch that was delivered last
        self._thread: ThreadPoolExecutor | None = None
        self._process = 0                                        # whose thread it is

    @property
    def depth(self) -> int:
        """How many batches ahead the applied plan wants."""
        applied = self._applied
        return 0 if applied is None else applied.schedule.prefetch_batches

    @property
    def _applied(self) -> Applied | None:
        return self._model.__dict__.get(ATTRIBUTE)

    def begin(self, batch: Any) -> list[Job]:
        """Give a batch to the thread. Raises what `inputs` raises."""
        applied = self._applied
        if applied is None or applied.runtime is None or applied.structure.device != "cpu":
            return []
        args, kwargs = forward_arguments(batch, self._inputs)
        return [self._job(prelude, work) for prelude in applied.runtime.preludes if (work := prelude.ahead(args, kwargs)) is not None]

    def _job(self, prelude: Prelude, work: Callable[[], Prepared]) -> Job:
        if self._thread is None or self._process != os.getpid():
            self._thread, self._process = ThreadPoolExecutor(1, "sparselift-ahead"), os.getpid()
        return Job(prelude, self._thread.submit(_undivided, work), self._process)

    def deliver(self, jobs: list[Job]) -> None:
        """Leave what is prepared with the lookups that it is for; empties `jobs`. What the thread has not begun, they do themselves."""
        while jobs:
            prelude, work, process = jobs[-1]
            # An error is the step's to raise, which prepares the batch again.
            if process == os.getpid() and not work.cancel() and work.exception() is None:
                prelude.group.ahead = work.result()
                self._waiting.append((prelude, work.result()))
            jobs.pop()

    def prepare(self, batch: Any) -> None:
        """Begin, wait and deliver: for a step that has to find its batch prepared."""
        jobs = self.begin(batch)
        self.finish(jobs)
        self.deliver(jobs)

    def finish(self, jobs: Iterable[Job]) -> None:
        """Wait until the thread is through with them."""
        for _, work, process in jobs:
            if process == os.getpid():
                work.exception()

    def forget(self) -> None:
        """Take back whatever waits for a forward that has not come."""
        for prelude, prepared in self._waiting:
            if prelude.group.ahead is prepared:
                prelude.group.ahead = None
                prelude.in_vain(prepared)
        self._waiting.clear()

    def close(self) -> None:
        """Stop the thread, and forget what it has prepared."""
        self.forget()
        if self._thread is not None and self._process == os.getpid():
            self._thread.shutdown(wait=False, cancel_futures=True)

    __del__ = close


class Job(NamedTuple):
    """The index work of one prelude, and the process whose thread does it."""

    prelude: Prelude
    work: Future[Prepared]
    process: int


_no_fork = threading.Lock()


def _undivided(work: Callable[[], Prepared]) -> Prepared:
    """Run what takes locks of kernels, which a child that is forked meanwhile would find held for ever. Threads of other passes wait."""
    with _no_fork:
        return work()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)


class _Item:
    """A batch on its way, or what was raised in its place."""

    __slots__ = ("batch", "error", "jobs")

    def __init__(self, batch: Any = None, error: Exception | None = None) -> None:
        self.batch, self.error = batch, error
        self.jobs: list[Job] = []


class _Pass(Generic[Batch]):
    """One pass over a loader. Its thread ends with it, however it ends."""

    def __init__(self, batches: Iterator[Batch], ahead: IndexAhead, depth: int | None) -> None:
        self._batches, self._ahead, self._depth = batches, ahead, depth
        self._items: deque[_Item] = deque()
        self._ended = False                                      # the loader

    def __iter__(self) -> _Pass[Batch]:
        return self

    def __next__(self) -> Batch:
        self._ahead.forget()
        depth = self._ahead.depth if self._depth is None else self._depth
        while not self._ended and len(self._items) <= depth:
            self._read()
        if not self._items:
            self.close()
            raise StopIteration
        self._ahead.deliver(self._items[0].jobs)
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
        self._ahead.close()

    def _read(self) -> None:
        """Take a batch from the loader. The one that is handed out next has no step to hide behind."""
        try:
            item = _Item(next(self._batches))
            if self._items:
                item.jobs = self._ahead.begin(item.batch)
        except StopIteration:
            self._ended = True
            return
        except Exception as error:
            item = _Item(error=error)
        self._items.append(item)
