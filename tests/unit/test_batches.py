"""Batches whose index work is done ahead: the bits of the loader alone, and its errors where they natively are."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sparselift as sl
from sparselift.batches import BatchPrefetcher
from sparselift.runtime.groups import LookupGroup
from tests.unit.runtime_models import Bags, assert_same, attach, bags_structure, batch, schedule
from tests.unit.test_runtime import OPTIMIZERS

COUNT = 5


def batches(count: int = COUNT, bags: int = 6) -> list[Any]:
    return [batch(seed, bags) for seed in range(count)]


def planned(optimizer: str = "sgd", backend: str = "cpu", ahead: int = 1, **plan: Any) -> tuple[Bags, torch.optim.Optimizer]:
    model = Bags()
    made = OPTIMIZERS[optimizer](model.parameters())
    structure = bags_structure(model, [made])
    attach(structure, schedule(structure, ahead=ahead, **plan), model, [made], backend)
    return model, made


def group_of(model: Bags) -> LookupGroup:
    return model._sparselift.runtime.preludes[0].group


def train(model: Bags, optimizer: torch.optim.Optimizer, loader: Any) -> list[Tensor]:
    losses = []
    for given in loader:
        loss = model(*given).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def same(given: Any) -> Any:
    return given


def settled(loader: Any) -> Iterator[Any]:
    """The batches of a pass. Before the next one is asked for, the thread is through with all that it was given."""
    running = iter(loader)
    for given in running:
        yield given
        for item in running._items:
            running._ahead.finish(item.jobs)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sparselift-ahead")]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("sparselift-ahead"):
            thread.join(10)
    assert not threads()


@pytest.mark.parametrize(("optimizer", "coalesce"), [("sgd", "none"), ("sgd", "chain"), ("adagrad", "sort"), ("rowwise", "dense"),
                                                     ("sparse_adam", "chain")])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_bits_are_those_of_the_loader_alone(optimizer: str, coalesce: str, depth: int) -> None:
    alone, ahead = planned(optimizer, coalesce=coalesce), planned(optimizer, coalesce=coalesce)
    losses = train(*alone, batches()), train(*ahead, sl.prefetch_batches(batches(), ahead[0], same, depth))
    assert all(map(torch.equal, *losses)) and len(losses[1]) == COUNT
    assert_same(alone[0], ahead[0])
    # A step takes what is ready, and does what the thread has not begun.
    assert 0 <= group_of(ahead[0]).calls_ahead <= (COUNT - 1) * bool(depth)
    assert "nothing fell back" in sl.explain(ahead[0])


@pytest.mark.parametrize("dedup", [False, True])
def test_batches_are_prepared_before_their_step(dedup: bool) -> None:
    model, optimizer = planned("adagrad", coalesce="sort", dedup=dedup)
    group, seen = group_of(model), []
    for given in settled(sl.prefetch_batches(batches(), model, same)):
        seen.append(group.ahead is not None)
        train(model, optimizer, [given])
        assert group.ahead is None
    assert seen == [False] + [True] * (COUNT - 1) and group.calls_ahead == COUNT - 1
    assert f"{COUNT - 1} of them with index work done ahead" in sl.explain(model)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_plan_says_how_far(ahead: int) -> None:
    model, optimizer = planned(ahead=ahead)
    passing = iter(sl.prefetch_batches(batches(), model, same))
    train(model, optimizer, [next(passing)])
    assert len(passing._items) == ahead
    train(model, optimizer, passing)
    advice = f"the plan has the index work of {ahead} batches done ahead, and no step found any: train in a loop over sl.prefetch_batches"
    alone, optimizer = planned(ahead=ahead)
    train(alone, optimizer, batches())
    assert (advice in sl.explain(alone)) == bool(ahead)
    train(alone, optimizer, settled(sl.prefetch_batches(batches(), alone, same)))
    assert advice not in sl.explain(alone) and group_of(alone).calls_ahead == (COUNT - 1) * bool(ahead)


@pytest.mark.parametrize("threads_of_torch", [1, 3])
def test_chains_that_were_built_ahead_serve_every_part_of_a_table(threads_of_torch: int) -> None:
    """Enough lookups for a table to be split among threads."""
    torch.set_num_threads(threads_of_torch)
    alone, ahead = planned("adagrad", coalesce="sort"), planned("adagrad", coalesce="sort")
    given = batches(3, bags=6000)
    train(*alone, given)
    for each in settled(sl.prefetch_batches(given, ahead[0], same)):
        train(*ahead, [each])
    assert group_of(ahead[0]).calls_ahead == 2
    assert_same(alone[0], ahead[0])


def test_accumulated_and_partial_gradients_find_their_own_rows() -> None:
    """Chains of one batch are of no use where a step has two, or where a lookup got no gradient."""
    alone, ahead = planned("adagrad", coalesce="sort"), planned("adagrad", coalesce="sort")
    for model, optimizer in (alone, ahead):
        for number, given in enumerate(settled(sl.prefetch_batches(batches(6), model, same)) if model is ahead[0] else batches(6)):
            dense, offsets, indices = given
            model(dense, offsets, indices).square().mean().backward()
            if number == 3:
                optimizer.zero_grad()
                model.emb[1](indices[1], offsets[1]).sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(alone[0], ahead[0])


@pytest.mark.parametrize("place", [0, 2])
def test_a_bad_id_is_raised_by_its_own_step(place: int) -> None:
    model, optimizer = planned()
    given = batches()
    given[place][2][1][0] = 40
    done = 0
    with pytest.raises(IndexError, match=r"id 40 at position 0 .* 40 rows"):
        for each in settled(sl.prefetch_batches(given, model, same)):
            train(model, optimizer, [each])
            done += 1
    assert done == place


def test_the_loaders_error_comes_in_its_turn() -> None:
    def loader() -> Iterator[Any]:
        yield from batches(2)
        raise OSError("the disk is gone")

    model, optimizer = planned()
    passing = iter(sl.prefetch_batches(loader(), model, same, depth=3))
    train(model, optimizer, [next(passing), next(passing)])
    with pytest.raises(OSError, match="the disk is gone"):
        next(passing)
    with pytest.raises(StopIteration):
        next(passing)


def test_inputs_that_raise_or_give_something_else() -> None:
    model, _ = planned()
    passing = iter(sl.prefetch_batches(batches(), model, lambda given: 1 / 0))
    next(passing)
    with pytest.raises(ZeroDivisionError):
        next(passing)
    with pytest.raises(TypeError, match=r"inputs must give a tuple .*; got int"):
        list(sl.prefetch_batches(batches(), model, lambda given: 7))


def test_what_changes_after_it_was_prepared_is_prepared_again() -> None:
    alone, ahead = planned("adagrad", coalesce="sort"), planned("adagrad", coalesce="sort")
    for model, optimizer in (alone, ahead):
        given = batches()
        for number, each in enumerate(settled(sl.prefetch_batches(given, model, same)) if model is ahead[0] else given):
            if number == 2:
                each[2][1].fill_(3)
            train(model, optimizer, [each])
    assert_same(alone[0], ahead[0])
    assert "prepared ahead in vain: its tensors were written to afterwards: 1 times" in sl.explain(ahead[0])


def test_other_forwards_in_between_leave_it_waiting() -> None:
    model, optimizer = planned()
    for given in settled(sl.prefetch_batches(batches(), model, same)):
        with torch.no_grad():
            model(*batch(99))
        train(model, optimizer, [given])
    assert group_of(model).calls_ahead == COUNT - 1 and "nothing fell back" in sl.explain(model)


def test_inputs_that_are_not_the_forwards_are_counted() -> None:
    model, optimizer = planned()
    for given in settled(sl.prefetch_batches(batches(), model, copy.deepcopy)):
        train(model, optimizer, [given])
    assert "prepared ahead in vain: the forward was given other tensors: 4 times" in sl.explain(model)
    list(sl.prefetch_batches(batches(), model, lambda given: ()))
    assert "not prepared ahead: it is not in what the batch gives (IndexError): 4 times" in sl.explain(model)


@pytest.mark.parametrize("leave", ["break", "raise", "interrupt"])
def test_leaving_early_leaves_nothing_behind(leave: str) -> None:
    """The autouse fixture sees that no thread stays."""
    model, optimizer = planned()

    def run() -> None:
        for number, given in enumerate(settled(sl.prefetch_batches(batches(), model, same, depth=2))):
            train(model, optimizer, [given])
            if number == 1 and leave != "break":
                raise KeyboardInterrupt if leave == "interrupt" else RuntimeError
            if number == 1:
                break

    if leave == "break":
        run()
    else:
        with pytest.raises(KeyboardInterrupt if leave == "interrupt" else RuntimeError):
            run()
    gc.collect()
    assert group_of(model).ahead is None


def test_plans_may_come_and_go_during_a_pass() -> None:
    native, model = Bags(), Bags()
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (native, model)]
    structure = bags_structure(model, [optimizers[1]])
    for number, given in enumerate(settled(sl.prefetch_batches(batches(), model, same))):
        if number == 1:
            attach(structure, schedule(structure, coalesce="none", ahead=2), model, [optimizers[1]], "cpu")
        if number == 3:
            sl.unapply(model, optimizers[1])
        train(model, optimizers[1], [given])
        train(native, optimizers[0], [given])
    assert_same(native, model)


def test_copies_and_pickles_do_not_take_the_waiting_batch() -> None:
    model, _ = planned()
    passing = settled(sl.prefetch_batches(batches(), model, same))
    next(passing)
    next(passing)
    assert group_of(model).ahead is not None
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert group_of(other).ahead is None
        other(*batch(0))


def test_the_reference_prepares_ahead_as_well() -> None:
    alone, ahead = planned("adagrad", "reference"), planned("adagrad", "reference")
    train(*alone, batches())
    train(*ahead, sl.prefetch_batches(batches(), ahead[0], same))
    assert_same(alone[0], ahead[0])


def test_passes_lengths_and_single_arguments() -> None:
    class Whole(Bags):
        def forward(self, given: Any) -> Tensor:
            return super().forward(*given)

    loader = sl.prefetch_batches(batches(), Whole(), depth=2)
    assert isinstance(loader, BatchPrefetcher) and len(loader) == COUNT
    for _ in range(2):
        assert [float(given[0].sum()) for given in loader] == [float(given[0].sum()) for given in batches()]


def test_a_forked_child_goes_on_with_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is forked while the thread has begun with one batch, inside of a program's lock, and has another to come."""
    model, _ = planned(ahead=2)
    group = group_of(model)
    given = batches()
    with torch.no_grad():
        want = [model(*each) for each in given]
    inner, begun = group.prepare_ahead, threading.Event()

    class Slow(list[Tensor]):
        read = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.read += 1
            if self.read == 2:                        # the first time is before the lock
                begun.set()
                time.sleep(0.2)
            return super().__iter__()

    monkeypatch.setattr(group, "prepare_ahead", lambda program, ids, *others: inner(program, Slow(ids), *others))
    passing = iter(sl.prefetch_batches(given, model, same))
    first = next(passing)
    assert begun.wait(10)
    child = os.fork()
    if child == 0:
        monkeypatch.undo()
        with torch.no_grad():
            found = [model(*first), *(model(*each) for each in settled(passing))]
        os._exit(0 if all(map(torch.equal, found, want)) and group.calls_ahead else 1)
    assert ended(child) == 0
    with torch.no_grad():
        assert all(map(torch.equal, [model(*first), *(model(*each) for each in passing)], want))


def ended(child: int) -> int | None:
    """The exit status of a child; None for one that hung."""
    deadline = time.monotonic() + 30
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if found[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(found[1])


@pytest.mark.parametrize("depth", [-1, True, 1.5])
def test_depths_that_are_none(depth: Any) -> None:
    with pytest.raises(ValueError, match="depth must be a number of batches, 0 or more, or None; got"):
        sl.prefetch_batches([], Bags(), depth=depth)


def test_the_right_call_is_named() -> None:
    with pytest.raises(TypeError, match=r"the call is sl.prefetch_batches\(loader, model, inputs\)"):
        sl.prefetch_batches(Bags(), [])
