"""Whatever runs inside `preserve`, model, optimizers and random state are afterwards bit for bit what they were."""

import copy
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from sparselift.nn import TableBatchedEmbeddingBags
from sparselift.optim import RowWiseAdagrad
from sparselift.preserve import preserve, sigint_deferred
from sparselift.workload import Workload

ROWS = (50, 400)


class Net(nn.Module):
    """Two tables, a tail with BatchNorm and Dropout, and a buffer that the forward replaces."""

    def __init__(self, sparse=True):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 4, mode="sum", sparse=sparse) for rows in ROWS)
        self.tail = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids, offsets):
        if self.training:
            self.calls = self.calls + 1
        pooled = [bag(i, o) for bag, i, o in zip(self.bags, ids, offsets)]
        return self.tail(torch.cat(pooled, 1))[:, 0]


def make_batch(seed, bags=16):
    draw = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, 4, (bags,), generator=draw) for _ in ROWS]
    ids = [torch.randint(0, rows, (int(n.sum()),), generator=draw) for rows, n in zip(ROWS, lengths)]
    offsets = [torch.cat([n.new_zeros(1), n.cumsum(0)[:-1]]) for n in lengths]
    return ids, offsets, torch.randint(0, 2, (bags,), generator=draw).float()


def step(model, batch):
    ids, offsets, label = batch
    random.random(), np.random.rand()
    return binary_cross_entropy_with_logits(model(ids, offsets), label)


OPTIMIZERS = {
    "sgd": lambda dense, tables: torch.optim.SGD([*dense, *tables], lr=0.5),
    "adagrad": lambda dense, tables: torch.optim.Adagrad([*dense, *tables], lr=0.5),
    "momentum": lambda dense, tables: torch.optim.SGD([*dense, *tables], lr=0.5, momentum=0.9),
    "rowwise": lambda dense, tables: [torch.optim.AdamW(dense, lr=0.5), RowWiseAdagrad(tables, lr=0.5)],
    "sparse_adam": lambda dense, tables: [torch.optim.SGD(dense, lr=0.5, momentum=0.9), torch.optim.SparseAdam(tables, lr=0.5)],
}


def make_work(kind="sgd", sparse=True, model=None):
    torch.manual_seed(0)
    model = model or Net(sparse)
    tables = [p for name, p in model.named_parameters() if name.startswith("bags")]
    dense = [p for name, p in model.named_parameters() if not name.startswith("bags")]
    return Workload("w", model, OPTIMIZERS[kind](dense, tables), step, [make_batch(seed) for seed in range(4)])


def bits(value):
    """Everything comparable bit for bit: tensors as bytes, with identity and address."""
    if isinstance(value, torch.Tensor):
        parts = (value._indices(), value._values()) if value.is_sparse else (value,)
        content = [p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if p.numel() else b"" for p in parts]
        return id(value), None if value.is_sparse else value.data_ptr(), tuple(value.shape), content
    if isinstance(value, dict):
        return {(id(key) if isinstance(key, torch.Tensor) else key): bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value if isinstance(value, (int, float, str, bool, type(None), np.ndarray)) else id(value)


def everything(work):
    model = work.model
    numpy_state = np.random.get_state()
    return {
        "parameters": bits(dict(model.named_parameters())), "buffers": bits(dict(model.named_buffers())),
        "grads": bits({name: p.grad for name, p in model.named_parameters()}),
        "modes": [module.training for module in model.modules()],
        "states": [bits(dict(o.state)) for o in work.optimizers],
        "groups": [bits(o.param_groups) for o in work.optimizers],
        "random": (torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state[1].tobytes(), numpy_state[2:]),
    }


def train(work, count=3, seed=0):
    for k in range(count):
        work.train(work.model, work.optimizer, make_batch(seed + k))


def disturb(work, batches):
    work.model.eval()
    work.model.tail.train()
    for optimizer in work.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["made_up"] = 1
    for _ in range(2):
        for batch in batches:
            work.train(work.model, work.optimizer, batch)
    work.step(work.model, batches[0]).backward()                # leaves gradients behind


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nothing_changes(kind, trained):
    work = make_work(kind)
    if trained:
        train(work, seed=100)
        work.step(work.model, make_batch(99)).backward()        # gradients in flight
    before = everything(work)
    batches = work.take(4)
    with preserve(work, batches):
        assert all(p.grad is None for p in work.model.parameters())
        disturb(work, batches)
        assert everything(work)["parameters"] != before["parameters"]
    assert everything(work) == before


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "momentum"])
def test_nothing_changes_with_dense_gradients(kind):
    work = make_work(kind, sparse=False)
    train(work, seed=100)
    before = everything(work)
    with preserve(work, work.take(4)) as kept:
        assert bool(kept.touched_rows) == (kind != "momentum")  # momentum moves rows that no id names
        disturb(work, work.take(4))
    assert everything(work) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["sgd", "rowwise"])
def test_nothing_changes_through_an_exception(kind, error):
    work = make_work(kind)
    train(work, seed=100)
    before = everything(work)
    with pytest.raises(error), preserve(work, work.take(4)):
        disturb(work, work.take(4))
        raise error
    assert everything(work) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_changes_when_the_dry_pass_fails(error):
    work = make_work()
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return step(model, batch)

    work = Workload("w", work.model, work.optimizer, failing, work.batches)
    before = everything(work)
    with pytest.raises(error), preserve(work, work.take(4)):
        pytest.fail("the context must not be entered")
    assert everything(work) == before
    assert not any(module._forward_pre_hooks for module in work.model.modules())


def test_a_second_ctrl_c_waits_for_the_restoration():
    done = []
    with pytest.raises(KeyboardInterrupt), sigint_deferred():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_touched_rows_are_kept():
    work = make_work("adagrad")
    batches = work.take(2)
    with preserve(work, batches[:1]) as kept:
        first = kept.touched_rows
        assert {name: rows.tolist() for name, rows in first.items()} == {
            f"bags.{t}.weight": sorted(set(batches[0][0][t].tolist())) for t in range(2)}
        kept.touch(batches[1:])
        assert kept.touched_rows["bags.1.weight"].tolist() == sorted({*batches[0][0][1].tolist(), *batches[1][0][1].tolist()})


def test_rows_announced_later_are_put_back():
    work = make_work("adagrad")
    before, batches = everything(work), work.take(4)
    with preserve(work, batches[:1]) as kept:
        disturb(work, batches[:1])
        kept.touch(batches[1:])
        disturb(work, batches)
    assert everything(work) == before


class Tied(Net):
    """Reads the weight of a table other than by lookups."""

    def __init__(self, use):
        super().__init__(sparse=False)
        self.use = use

    def forward(self, ids, offsets):
        return super().forward(ids, offsets) + self.use(self.bags[1].weight)


@pytest.mark.parametrize("use", [
    lambda w: w.square().sum(), lambda w: w[7, 0], lambda w: nn.functional.linear(w.new_ones(1, 4), w).sum(),
    lambda w: torch.cat([w, w]).sum(), lambda w: w.T.sum(),
], ids=["norm", "row", "linear", "cat", "transpose"])
def test_a_table_that_is_read_otherwise_is_kept_whole(use):
    work = make_work(model=Tied(use))
    before, batches = everything(work), work.take(4)
    with preserve(work, batches[:2]) as kept:
        assert set(kept.touched_rows) == {"bags.0.weight"}
        disturb(work, batches[:2])
        kept.touch(batches[2:])
        disturb(work, batches)
    assert everything(work) == before


@pytest.mark.parametrize("write", [
    lambda w: w.detach().mul_(2), lambda w: w.data.mul_(2), lambda w: w.add_(1), lambda w: w.__setitem__(3, 7.0),
    lambda w: w.__imul__(2), lambda w: torch.add(w, 1, out=w), lambda w: nn.init.ones_(w), lambda w: torch._foreach_mul_([w], 2),
], ids=["detached", "data", "method", "row", "operator", "out", "init", "foreach"])
def test_a_table_that_the_forward_writes_to_is_put_back(write):
    def use(weight):
        with torch.no_grad():
            write(weight)
        return 0.0

    work = make_work(model=Tied(use))
    before, batches = everything(work), work.take(4)
    with preserve(work, batches[:2]):
        assert everything(work)["parameters"] != before["parameters"]
    assert everything(work) == before


def test_reading_metadata_is_no_use():
    work = make_work(model=Tied(lambda w: len(w) + w.shape[0] + w.requires_grad + w.dim()))
    with preserve(work, work.take(1)) as kept:
        assert set(kept.touched_rows) == {"bags.0.weight", "bags.1.weight"}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_dropping_gradients_is_no_use(set_to_none):
    work = make_work()
    with preserve(work, work.take(1)) as kept, kept.watch():
        work.step(work.model, work.take(1)[0]).backward()
        work.model.zero_grad(set_to_none)
        for weight in work.model.parameters():
            weight.grad = None
            weight.requires_grad = True
        assert set(kept.touched_rows) == {"bags.0.weight", "bags.1.weight"}


def test_a_table_tied_to_a_linear_layer_is_kept_whole():
    class Lm(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(30, 4)
            self.head = nn.Linear(4, 30, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            return self.head(self.tokens(ids)).sum()

    model = Lm()
    work = Workload("lm", model, torch.optim.SGD(model.parameters(), lr=1.0), lambda m, ids: m(ids), [torch.tensor([1, 2])])
    before = everything(work)
    with preserve(work, work.take(1)) as kept:
        assert kept.touched_rows == {}
        work.train(model, work.optimizer, torch.tensor([1, 2]))
    assert everything(work) == before


class Hashed(nn.EmbeddingBag):
    def forward(self, ids, offsets):
        return super().forward(ids * 7919 % self.num_embeddings, offsets)


def test_ids_hashed_inside_the_module_are_seen():
    work = make_work()
    work.model.bags[1] = Hashed(ROWS[1], 4, mode="sum", sparse=True)
    work.optimizer.add_param_group({"params": [work.model.bags[1].weight]})
    ids, offsets, label = make_batch(0)
    batch = ([ids[0], ids[1] + 10**6], offsets, label)
    before = everything(work)
    with preserve(work, [batch]) as kept:
        assert kept.touched_rows["bags.1.weight"].tolist() == sorted(set(((ids[1] + 10**6) * 7919 % ROWS[1]).tolist()))
        work.train(work.model, work.optimizer, batch)
    assert everything(work) == before


def test_the_tables_of_a_fused_module_are_kept_by_rows():
    model = TableBatchedEmbeddingBags([(30, 4), (40, 4)])
    data = [(torch.tensor([1, 2, 2, 7, 39]), torch.tensor([0, 1, 3, 3, 5])), (torch.tensor([29]), torch.tensor([0, 0, 1]))]
    work = Workload("fused", model, torch.optim.SGD(model.parameters(), lr=1.0), lambda m, b: m(b[0], offsets=b[1]).sum(), data)
    before = everything(work)
    with preserve(work, data) as kept:
        assert {name: rows.tolist() for name, rows in kept.touched_rows.items()} == {"weights.0": [1, 2], "weights.1": [7, 29, 39]}
        for batch in data:
            work.train(model, work.optimizer, batch)
    assert everything(work) == before


class Scaled(nn.EmbeddingBag):
    """Has a parameter beside its table."""

    def __init__(self):
        super().__init__(ROWS[1], 4, mode="sum", sparse=True)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids, offsets):
        return super().forward(ids, offsets) * self.scale


def test_a_parameter_beside_the_table_is_kept_whole():
    model = Net()
    model.bags[1] = Scaled()
    work = make_work(model=model)
    before = everything(work)
    with preserve(work, work.take(2)) as kept:
        assert set(kept.touched_rows) == {"bags.0.weight", "bags.1.weight"}
        disturb(work, work.take(2))
    assert everything(work) == before


def test_weights_that_a_lookup_renormalises_are_put_back():
    work = make_work()
    work.model.bags[0].max_norm = 0.1
    before = everything(work)
    with preserve(work, work.take(2)):
        work.step(work.model, work.take(1)[0])
    assert everything(work) == before


def test_parameters_of_the_optimizer_alone_are_put_back():
    work = make_work()
    scale = nn.Parameter(torch.ones(1))
    work.optimizer.add_param_group({"params": [scale]})
    with preserve(work, work.take(1)):
        scale.grad = torch.ones(1)
        work.optimizer.step()
        assert scale.item() != 1
    assert scale.item() == 1 and scale.grad is None


def test_nested_lists_of_optimizer_state_are_put_back():
    net = nn.Linear(3, 1)
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=3)
    data = torch.randn(5, 3)

    def closure():
        lbfgs.zero_grad()
        loss = net(data).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    work = Workload("lbfgs", net, lbfgs, lambda model, batch: model(batch).mean(), [data])
    before, weights = copy.deepcopy(lbfgs.state_dict()), everything(work)
    with preserve(work, [data]):
        lbfgs.step(closure)
    assert everything(work) == weights
    assert str(lbfgs.state_dict()) == str(before)
