"""EmbeddingBag and Embedding as modules: options, copies, hooks, shared weights, threads."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparselift.functional import lookups
from sparselift.nn import Embedding, EmbeddingBag
from tests.unit.lookup_loops import dense_grad, filled, offsets, pool, use_backend
from tests.unit.module_pairs import BAGS, DIM, IDS, ROWS, STARTS, integers


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(request.param, monkeypatch)


@pytest.mark.parametrize("ours, theirs", [(EmbeddingBag, nn.EmbeddingBag), (Embedding, nn.Embedding)])
def test_the_face_is_torchs(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    assert ours.__name__ == theirs.__name__
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert list(inspect.signature(ours.forward).parameters) == list(inspect.signature(theirs.forward).parameters)
    options = {"padding_idx": 2, "max_norm": 1.0, "sparse": True}
    assert repr(ours(ROWS, DIM, **options)) == repr(theirs(ROWS, DIM, **options))
    torch.manual_seed(0)
    a = ours(ROWS, DIM, padding_idx=1)
    torch.manual_seed(0)
    b = theirs(ROWS, DIM, padding_idx=1)
    assert torch.equal(a.weight, b.weight)
    assert a.state_dict().keys() == b.state_dict().keys()
    pretrained = ours.from_pretrained(b.weight.detach(), sparse=True)
    assert type(pretrained) is ours
    assert not pretrained.weight.requires_grad


def test_options_that_change_after_a_call_count() -> None:
    module = filled(EmbeddingBag(ROWS, DIM, mode="sum"), integers(ROWS, DIM))

    def check(path: str = "fused bag") -> None:
        module.zero_grad()
        starts = offsets(BAGS, module.include_last_offset)
        want = pool(module.weight.detach().double().numpy(), BAGS, module.mode, padding_idx=module.padding_idx)
        out = module(IDS, starts)
        out.sum().backward()
        np.testing.assert_allclose(out.detach().double().numpy(), want.out, rtol=1e-6)
        np.testing.assert_allclose(dense_grad(module.weight), want.weight_grad, rtol=1e-6)
        assert module.weight.grad.is_sparse == module.sparse
        assert module.last_path == path

    check()
    module.mode = "mean"
    check()
    module.padding_idx = 6
    check()
    module.sparse = True
    check()
    module.include_last_offset = True
    check()
    module.weight = nn.Parameter(integers(ROWS + 3, DIM + 2, seed=9))
    check()
    module.double()
    check("torch: weight is torch.float64")
    module.float()
    check()


def test_a_table_that_grows_leaves_no_programs_behind() -> None:
    module, counts = EmbeddingBag(1, DIM, mode="sum"), []
    for rows in range(1, 30):
        module.weight = nn.Parameter(torch.ones(rows, DIM))
        assert module(torch.tensor([rows - 1]), torch.tensor([0])).sum() == DIM
        counts.append(len(module._routes))
    assert max(counts) < 10


@pytest.mark.parametrize("kind", [EmbeddingBag, Embedding])
def test_copies_are_independent_and_compile_their_own_lookups(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "FUSED_ELEMENTS", 0)
    module = kind(ROWS, DIM)
    args = (IDS[:8].reshape(4, 2),)
    want = module(*args).detach()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert type(other) is kind
        assert other.last_path == "no call yet"
        assert torch.equal(other(*args), want)
        assert other._routes is not module._routes
    with torch.no_grad():
        module.weight.zero_()
    assert [bool(other(*args).any()) for other in copies] == [True, False, True, True]    # a shallow copy shares its weight


def test_state_loaded_by_assignment_is_used() -> None:
    module = EmbeddingBag(ROWS, DIM, mode="sum")
    module(IDS, STARTS)
    module.load_state_dict({"weight": torch.ones(ROWS, DIM)}, assign=True)
    assert torch.equal(module(IDS, STARTS)[0], torch.full((DIM,), 3.0))


def test_hooks_run() -> None:
    module, seen = EmbeddingBag(ROWS, DIM, mode="sum"), []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_hook(lambda *_: seen.append("module"))
    module.weight.register_hook(lambda grad: seen.append("weight") or 2 * grad)
    module.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    module(IDS, STARTS).sum().backward()
    assert seen[:2] == ["before", "after"]
    assert sorted(seen[2:]) == ["accumulated", "module", "weight"]
    np.testing.assert_array_equal(dense_grad(module.weight), 2 * pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)


def test_parametrized_weights_are_trained() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module = filled(EmbeddingBag(ROWS, DIM, mode="sum"), integers(ROWS, DIM))
    plain = module.weight.detach().numpy().copy()
    parametrize.register_parametrization(module, "weight", Double())
    out = module(IDS, STARTS)
    out.sum().backward()
    np.testing.assert_array_equal(out.detach().numpy(), 2 * pool(plain, BAGS, "sum").out)
    assert module.last_path == "fused bag"
    np.testing.assert_array_equal(dense_grad(module.parametrizations.weight.original), 2 * pool(plain, BAGS, "sum").weight_grad)


def test_modules_may_share_a_weight() -> None:
    bag, rows = EmbeddingBag(ROWS, DIM, mode="sum"), Embedding(ROWS, DIM)
    rows.weight = bag.weight
    (bag(IDS, STARTS).sum() + rows(IDS).sum()).backward()
    np.testing.assert_array_equal(dense_grad(bag.weight), 2 * pool(np.zeros((ROWS, DIM)), BAGS, "sum").weight_grad)


def test_threads_may_share_a_module() -> None:
    module = filled(EmbeddingBag(1000, 16, mode="sum"), integers(1000, 16))
    batches = [torch.randint(0, 1000, (64, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    wrong = []

    def work(ids: Tensor) -> None:
        for _ in range(20):
            out = module(ids)
            grad, = torch.autograd.grad(out.sum(), module.weight)
            if not torch.equal(out, module.weight[ids].sum(1)) or grad.sum() != ids.numel() * 16:
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(ids,)) for ids in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
