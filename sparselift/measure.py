"""Which of two ways to run a training step is faster, and how sure that is.

Both run in one process on the same batches, in blocks of steps in the order A B B A A B ..., so that whatever drifts (clock rates,
neighbours, temperature) meets both alike and cancels in the ratio of a pair. The interval of the median ratio comes from order
statistics: it assumes nothing about how times are distributed.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from sparselift.apply import Applied
from sparselift.batches import IndexAhead, Job
from sparselift.ir import Structure
from sparselift.kernels.base import KernelBackend
from sparselift.memory import HugePageSet
from sparselift.plan import Interval
from sparselift.schedule import build_schedule
from sparselift.space import Config
from sparselift.workload import Workload

logger = logging.getLogger("sparselift")

_MAX_STEPS = 64                    # in a block
_MAX_VISIT = 4                     # blocks in a row of a candidate that is costly to enter
_PEEKING_CONFIDENCE = 0.99         # who looks after every pair errs more often than who looks once
_ENTERING_SHARE = 0.08             # of the timed part that entering may take, as far as that bound allows


class Candidate(Protocol):
    """One way to run a training step."""

    def enter(self) -> None:
        """Make it the way that runs. Called when the other one ran before; not timed."""

    def run(self, batches: Sequence[Any], coming: Iterator[Any]) -> None:
        """One whole training step a batch, all done when it returns.

        `coming` gives the batches of the next calls, without end: a training loop that works ahead has begun with them by then, and so
        does it in the time of these. A step with another batch may come in between.
        """


@dataclass(frozen=True, slots=True)
class Steps:
    """A candidate that shares nothing with the other: a function that runs one whole training step."""

    step: Callable[[Any], object]

    def enter(self) -> None:
        return

    def run(self, batches: Sequence[Any], coming: Iterator[Any]) -> None:
        for batch in batches:
            self.step(batch)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Incumbent against candidate.

    Attributes
    ----------
    speedup          the incumbent's time over the candidate's, median of the pairs: above 1 the candidate is faster
    incumbent        seconds a step, median of the blocks
    candidate        seconds a step, median of the blocks
    confidence       that the interval of `speedup` covers the median: the one asked for, or less where there are too few pairs for it
    pairs            of blocks
    steps_per_block  steps in each
    pruned           stopped early: it could not reach what was asked of it
    timed_s          in blocks
    warmup_s         in steps that were not timed
    total_s          altogether, switching included
    waited_s         before that, for other processes that were measuring
    """

    speedup: Interval
    incumbent: Interval
    candidate: Interval
    confidence: float
    pairs: int
    steps_per_block: int
    pruned: bool
    timed_s: float
    warmup_s: float
    total_s: float
    waited_s: float = 0.0


def compare(incumbent: Candidate, candidate: Candidate, batches: Sequence[Any], *, clock: Callable[[], float] = time.perf_counter,
            min_pairs: int = 6, max_pairs: int = 12, steps_per_block: int | None = None, block_s: float = 0.12, prune_below: float = 0.0,
            prune_pairs: int = 3, confidence: float = 0.95, precision: float = 0.02, bar: float | None = None,
            max_s: float = math.inf, warmups: tuple[int, int] = (3, 3)) -> Comparison:
    """Time two candidates against each other.

    Parameters
    ----------
    batches          to rotate over; both see the same ones
    clock            seconds, monotonic
    min_pairs        6 is the fewest that give an interval of 95%
    max_pairs        stop here, however wide the interval is
    steps_per_block  None: as many as fill `block_s` seconds of the slower candidate, 64 at most
    prune_below      after `prune_pairs` pairs, stop as soon as none of them reached this speed-up
    precision        after `min_pairs` pairs, stop as soon as the interval's ends are this close to its middle, relative
    bar              after `min_pairs` pairs, stop as soon as the interval lies on one side of this speed-up
    max_s            after `min_pairs` pairs, stop when so many seconds have passed
    warmups          steps of the incumbent and of the candidate before their first block (compilation, page faults, allocators); later
                     one step follows every switch

    Where entering a candidate takes long, up to four blocks in a row share it, and blocks of one step come in twos: A A B B B B A A.
    Garbage collection is off meanwhile, and other processes of this user that compare something wait. What a step raises is passed on.

    Raises
    ------
    ValueError   no batches, numbers of pairs and steps below 1, or a clock that stands still
    """
    if not batches:
        raise ValueError("compare needs at least one batch; got none")
    counts = {"min_pairs": min_pairs, "prune_pairs": prune_pairs, "steps_per_block": steps_per_block or 1, "warmups": min(warmups)}
    if min(counts.values()) < 1 or steps_per_block == 0 or max_pairs < min_pairs:
        raise ValueError(f"max_pairs must be at least min_pairs, and all counts at least 1; got {counts | {'max_pairs': max_pairs}}")
    asked = clock()
    with _alone(), _no_garbage_collection():
        start = clock()
        track = _Track((incumbent, candidate), batches, clock)
        steps, visit = track.warm_up(warmups, steps_per_block, block_s)
        pruned = False
        while len(track.log_ratios) < max_pairs and not pruned:
            track.pairs(steps, min(visit, max_pairs - len(track.log_ratios)))
            done = len(track.log_ratios)
            pruned = done >= prune_pairs and prune_below > 0 and max(track.log_ratios) < math.log(prune_below)
            if done >= min_pairs and (_is_settled(track.log_ratios, confidence, precision, bar) or clock() - start >= max_s):
                break
        total_s = clock() - start
    low, mid, high, covered = median_interval(track.log_ratios, confidence)
    return Comparison(
        Interval(math.exp(mid), math.exp(low), math.exp(high)), track.step_s(0, steps, confidence), track.step_s(1, steps, confidence),
        covered, len(track.log_ratios), steps, pruned, sum(map(sum, track.blocks_s)), track.warmup_s, total_s,
        start - asked)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float, float]:
    """(low, median, high, coverage) of the median, distribution-free.

    The interval is from the r-th smallest to the r-th largest value, with the largest r whose coverage 1 - 2 P(Bin(n, 1/2) < r)
    reaches `confidence`; where none does, it is the whole range. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("the median of no values")
    ordered = sorted(values)
    count = len(ordered)
    rank, tail = 1, 0.5 ** count                                       # tail = P(Bin < rank)
    while rank < (count + 1) // 2:
        more = tail + math.comb(count, rank) * 0.5 ** count
        if 1 - 2 * more < confidence:
            break
        rank, tail = rank + 1, more
    return ordered[rank - 1], median(ordered), ordered[count - rank], 1 - 2 * tail


@dataclass(slots=True)
class _Track:
    """Runs blocks, and keeps what they took. 0 is the incumbent, 1 the candidate."""

    candidates: tuple[Candidate, Candidate]
    batches: Sequence[Any]
    clock: Callable[[], float]
    active: int = 0
    warmup_s: float = 0.0
    blocks_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    log_ratios: list[float] = field(default_factory=list)

    def warm_up(self, warmups: tuple[int, int], steps_per_block: int | None, block_s: float) -> tuple[int, int]:
        """Enter both, the incumbent last. Returns (steps in a block, blocks in a row)."""
        begin, before_s = self.clock(), self.warmup_s
        step_s = max(self._switch(which, warmups[which]) for which in (1, 0))
        entering_s = self.clock() - begin - (self.warmup_s - before_s)
        steps = steps_per_block or max(1, min(_MAX_STEPS, math.ceil(block_s / step_s)))
        blocks_in_a_row = entering_s / (4 * steps * step_s * _ENTERING_SHARE)      # four blocks and both ways make A B B A
        fewest = 2 if steps == 1 else 1                                            # else every third step would be a warm-up
        return steps, max(fewest, min(_MAX_VISIT, math.ceil(blocks_in_a_row)))

    def pairs(self, steps: int, count: int) -> None:
        """`count` blocks each, on the same batches. The one that is active begins, so that A B is followed by B A."""
        first = len(self.log_ratios)
        for which in (self.active, 1 - self.active):
            if which != self.active:
                self._switch(which, 1, first * steps)
            for pair in range(first, first + count):
                rotation = self._rotation(pair * steps)
                self._block(which, list(islice(rotation, steps)), rotation)
        self.log_ratios += [math.log(a / b) for a, b in zip(*(blocks[first:] for blocks in self.blocks_s), strict=True)]

    def step_s(self, which: int, steps: int, confidence: float) -> Interval:
        low, mid, high, _ = median_interval([block / steps for block in self.blocks_s[which]], confidence)
        return Interval(mid, low, high)

    def _rotation(self, start: int) -> Iterator[Any]:
        return islice(cycle(self.batches), start % len(self.batches), None)

    def _block(self, which: int, batches: Sequence[Any], coming: Iterator[Any]) -> None:
        begin = self.clock()
        self.candidates[which].run(batches, coming)
        self.blocks_s[which].append(self._since(begin))

    def _switch(self, which: int, warmups: int, start: int = 0) -> float:
        """Enter a candidate and run steps that are not timed, before those from `start` on. Returns what the last of them took."""
        self.active = which
        self.candidates[which].enter()
        last_s = 0.0
        for step in range(warmups):
            begin = self.clock()
            self.candidates[which].run([self.batches[-1 - step % len(self.batches)]], self._rotation(start))
            last_s = self._since(begin)
            self.warmup_s += last_s
        return last_s

    def _since(self, begin: float) -> float:
        took = self.clock() - begin
        if not took > 0:
            raise ValueError(f"the clock did not advance during a training step: {took} s")
        return took


class Stage:
    """A workload's one model and its optimizers, run under one config at a time.

    Steps train: use it inside `preserve`. Leave it to have the model native again.
    """

    def __init__(self, work: Workload, structure: Structure, backend: str | KernelBackend = "cpu") -> None:
        self._work, self._structure, self._backend = work, structure, backend
        self._applied: Applied | None = None
        self._freezes = False
        self._huge_pages = HugePageSet()

    def candidate(self, config: Config) -> Candidate:
        """The workload's training step under a config. Compiled now; entered when its turn comes."""
        gc.collect()               # earlier configs hold buffers, and refer to themselves in circles
        if config.path != "planned":
            return _Staged(self, None)
        schedule = build_schedule(self._structure, config)
        applied = Applied(self._structure, schedule, self._work.model, self._backend, self._huge_pages)
        return _Staged(self, applied, _Ahead(self._work, schedule.prefetch_batches) if schedule.prefetch_batches else None)

    def show(self, applied: Applied | None) -> None:
        """Switch to a compiled config; None is native. Huge pages that only the config before wanted go: they would serve this one, too.
        """
        current, self._applied = self._applied, None
        if current is not None:
            current.detach(self._work.model)
        if applied is None:
            self._huge_pages.replace({})
        else:
            applied.attach(self._work.model, self._work.optimizers)
            self._applied = applied

    def train(self, batch: Any) -> object:
        return self._work.train(self._work.model, self._work.optimizer, batch)

    def __enter__(self) -> Stage:
        self._freezes = gc.get_freeze_count() == 0
        if self._freezes:          # what is there now is not looked at again by every collection
            gc.collect()
            gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        self.show(None)
        if self._freezes:
            gc.unfreeze()


@dataclass(slots=True)
class _Staged:
    """Steps of a workload's model under one config; with the index work of coming batches ahead, if the config says so."""

    stage: Stage
    applied: Applied | None
    ahead: _Ahead | None = None

    def enter(self) -> None:
        self.stage.show(self.applied)

    def run(self, batches: Sequence[Any], coming: Iterator[Any]) -> None:
        if self.ahead is None:
            for batch in batches:
                self.stage.train(batch)
            return
        todo = deque(chain(batches, islice(coming, self.ahead.depth)))
        for batch in batches:
            todo.popleft()
            self.ahead.turn_to(batch, todo)
            self.stage.train(batch)
        self.ahead.finish()


class _Ahead:
    """What `sl.prefetch_batches` does for a loop, for one whose batches are known, and that stops now and then.

    As much index work is timed as steps are: what a block begins is done before it ends, and serves the block after it.
    """

    def __init__(self, work: Workload, depth: int) -> None:
        self.depth = depth
        self._index = IndexAhead(work.model, work.inputs)
        self._begun: deque[tuple[Any, list[Job]]] = deque()

    def turn_to(self, batch: Any, coming: Iterable[Any]) -> None:
        """Begin with the batches that come next, and leave what is done of `batch` with the model."""
        self._index.forget()
        own = self._begun.popleft()[1] if self._begun and self._begun[0][0] is batch else []
        upcoming = list(islice(coming, self.depth))
        if any(begun is not later for (begun, _), later in zip(self._begun, upcoming, strict=False)):
            self._begun.clear()
        for later in upcoming[len(self._begun):]:
            self._begun.append((later, self._index.begin(later)))
        self._index.deliver(own)

    def finish(self) -> None:
        """Wait for the thread."""
        for _, jobs in self._begun:
            self._index.finish(jobs)


def _is_settled(log_ratios: Sequence[float], confidence: float, precision: float, bar: float | None) -> bool:
    """Whether the interval is as narrow as it has to be, or a stricter one is clear of the bar."""
    low, mid, high, covered = median_interval(log_ratios, confidence)
    if covered >= confidence and max(high - mid, mid - low) <= math.log1p(precision):
        return True
    low, _, high, covered = median_interval(log_ratios, _PEEKING_CONFIDENCE)
    return bar is not None and covered >= _PEEKING_CONFIDENCE and not low <= math.log(bar) <= high


@contextmanager
def _alone() -> Iterator[None]:
    """One comparison at a time on a machine: two would time each other. A record lock, since it is not left to forked children."""
    try:
        descriptor = os.open(Path(tempfile.gettempdir()) / f"sparselift-{os.getuid()}.lock",
                             os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        logger.info("measurements of other processes are not waited for: %s", error)
        yield
        return
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _tell_of_waiting()
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@cache
def _tell_of_waiting() -> None:
    """Once is enough."""
    logger.warning("another process measures on this machine, too; the two take turns")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
