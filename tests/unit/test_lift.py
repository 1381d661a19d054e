"""Lifting: what a recorded step shows of lookups, the inputs that feed them, the concats that consume them, and their cost."""

import copy
import random
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparselift.apply import apply, unapply
from sparselift.errors import LiftRefused, WorkloadError
from sparselift.ir import Concat, InputPath, OptimizerInfo, Structure
from sparselift.lift import lift
from sparselift.lift.fx import confirm, trace
from sparselift.lift.paths import Inputs
from sparselift.nn import EmbeddingBag as OurBag
from sparselift.nn import TableBatchedEmbeddingBags
from sparselift.optim import RowWiseAdagrad
from sparselift.plan import default_plan
from sparselift.workload import Workload

ROWS = (40, 30, 20)
B = 6


def bag(rows=40, dim=4, **options):
    return nn.EmbeddingBag(rows, dim, **{"mode": "sum", "sparse": True, **options})


def draw(seed, bags=B, rows=ROWS):
    """Jagged ids and offsets, a table each."""
    source = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(1, 4, (bags,), generator=source) for _ in rows]
    ids = [torch.randint(0, r, (int(n.sum()),), generator=source) for r, n in zip(rows, lengths)]
    return ids, [torch.cat([n.new_zeros(1), n.cumsum(0)[:-1]]) for n in lengths]


def work_of(model, batches, step=None, optimizer=None, **options):
    parameters = [p for p in model.parameters() if p.requires_grad] or [torch.zeros(1, requires_grad=True)]
    optimizer = optimizer or torch.optim.SGD(parameters, lr=0.1)
    return Workload("toy", model, optimizer, step or (lambda model, batch: model(*batch).sum()), batches, **options)


class OfficialDlrm(nn.Module):
    """The embedding part of facebookresearch/dlrm: a ModuleList called in a loop over stacked offsets and a list of ids."""

    def __init__(self, **options):
        super().__init__()
        self.bot = nn.Linear(3, 4)
        self.emb_l = nn.ModuleList(bag(rows, 4, **options) for rows in ROWS)
        self.top = nn.Linear(16, 1)

    def forward(self, dense, lS_o, lS_i):
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            ly.append(self.emb_l[k](sparse_index_group_batch, lS_o[k], per_sample_weights=None))
        return self.top(torch.cat([self.bot(dense)] + ly, dim=1))


def dlrm_batch(seed, bags=B):
    ids, offsets = draw(seed, bags)
    return torch.randn(bags, 3), torch.stack(offsets), ids


def dlrm_work(**options):
    torch.manual_seed(0)
    model = OfficialDlrm(**options)
    return work_of(model, [dlrm_batch(seed) for seed in range(3)] + [dlrm_batch(9, bags=4)])


def test_a_module_list_called_in_a_loop_and_concatenated():
    graph = lift(dlrm_work())
    structure = graph.structure
    assert [(t.name, t.rows, t.dim, t.sparse, t.optimizer.fused_rule) for t in structure.tables] == [
        (f"emb_l.{k}.weight", rows, 4, True, "sgd") for k, rows in enumerate(ROWS)]
    assert [f.name for f in structure.features] == ["emb_l.0", "emb_l.1", "emb_l.2"]
    for k, feature in enumerate(structure.features):
        assert feature.indices == InputPath(("args", 2, k))
        assert feature.offsets == InputPath(("args", 1), (0, k))
        assert feature.from_inputs and feature.form == "offsets" and feature.pooling == "sum" and not feature.weighted
    assert [(c.name, c.parts) for c in structure.concats] == [("concat", (4, "emb_l.0", "emb_l.1", "emb_l.2"))]
    assert graph.refusals == () and graph.batch_size == B and structure.optimizers == ("SGD",) and structure.uses is None
    assert Structure.from_dict(structure.to_dict()) == structure


@pytest.mark.parametrize(("inputs", "held"), [
    (None, ()), (tuple, ("emb_l.0", "emb_l.1", "emb_l.2")), (lambda batch: batch[:2], ()),
    (lambda batch: {"dense": batch[0], "lS_o": batch[1], "lS_i": batch[2]}, ()),              # the forward got arguments
    (lambda batch: (batch[0], batch[1], [batch[2][0], batch[2][1].clone(), batch[2][2]]), ("emb_l.0", "emb_l.2"))])
def test_which_lookups_a_batch_holds_the_inputs_of(inputs, held):
    work = dlrm_work()
    assert lift(replace(work, inputs=inputs)).structure.in_batch == held


def test_inputs_that_are_none():
    with pytest.raises(WorkloadError, match=r"inputs must be a function inputs\(batch\).*; got 3"):
        replace(dlrm_work(), inputs=3)
    with pytest.raises(TypeError, match="inputs must give a tuple of the forward's arguments or a mapping of its keywords; got int"):
        lift(replace(dlrm_work(), inputs=len))


def test_the_step_as_nodes():
    work = dlrm_work()
    graph = lift(work, batches=3)
    by_name = {node.name: node for node in graph.nodes}
    assert [node.op for node in graph.nodes] == (
        ["lookup"] * 3 + ["concat", "dense", "dense_backward"] + ["expand"] * 3 + ["update"] * 3 + ["dense_update"])
    assert by_name["dense"].inputs == ("concat",) and by_name["concat"].inputs == tuple(f"lookup:emb_l.{k}" for k in range(3))
    assert by_name["dense_update:0"].inputs == ("dense_backward",)
    # Two linear layers: B x (3 * 4 + 16 * 1) multiply-adds; backward has no input gradient for the first.
    assert by_name["dense"].resources.flops == 2 * B * (3 * 4 + 16)
    assert by_name["dense_backward"].resources.flops == 2 * B * (3 * 4 + 2 * 16)
    assert by_name["dense"].resources.time_s > 0 and by_name["dense_backward"].resources.time_s > 0
    sketch = graph.sketches["emb_l.1"]
    assert sketch.batches == 3 and sketch.bags == 3 * B           # the shorter last batch is a check, not a sample
    k, u = sketch.lookups / 3, sketch.unique / 3
    lookup, expand, update = (by_name[name].resources for name in ("lookup:emb_l.1", "expand:emb_l.1.weight", "update:emb_l.1.weight"))
    assert (lookup.read_bytes, lookup.write_bytes) == (round(8 * k + 8 * B + 16 * u), B * 16)  # so few rows stay in cache
    assert (expand.read_bytes, expand.write_bytes) == (round(16 * k), round(24 * k))
    assert (update.read_bytes, update.write_bytes) == (round(32 * k), round(16 * k))           # SGD does not coalesce
    dense = sum(p.numel() for p in (*work.model.bot.parameters(), *work.model.top.parameters()))
    assert by_name["dense_update:0"].resources.traffic_bytes == 12 * dense


def test_an_optimizer_that_coalesces_and_two_optimizers():
    model = OfficialDlrm()
    optimizers = [torch.optim.SGD([*model.bot.parameters(), *model.top.parameters()], lr=0.1),
                  RowWiseAdagrad(model.emb_l.parameters(), lr=0.1)]
    graph = lift(work_of(model, [dlrm_batch(0)], optimizer=optimizers, uses={"clip", "accumulate"}))
    structure = graph.structure
    assert structure.optimizers == ("SGD", "RowWiseAdagrad") and structure.uses == ("accumulate", "clip")
    assert {t.optimizer for t in structure.tables} == {OptimizerInfo(1, "RowWiseAdagrad", "rowwise_adagrad")}
    by_name = {node.name: node for node in graph.nodes}
    assert by_name["update:emb_l.0.weight"].inputs == ("coalesce:emb_l.0.weight",)
    u = graph.sketches["emb_l.0"].unique
    assert by_name["update:emb_l.0.weight"].resources.write_bytes == u * (16 + 4)
    assert by_name["coalesce:emb_l.0.weight"].inputs == ("expand:emb_l.0.weight",)
    assert "dense_update:1" not in by_name


Named = namedtuple("Named", "ids offsets")


@dataclass
class Typed:
    ids: Tensor
    offsets: Tensor
    label: str = "x"


class Plain:
    def __init__(self, ids, offsets):
        self.ids, self.offsets = ids, offsets


CONTAINERS = {
    "list": (lambda i, o: [i, o], lambda x: (x[0], x[1]), ((0,), (1,))),
    "dict": (lambda i, o: {"i": i, "o": o}, lambda x: (x["i"], x["o"]), (("i",), ("o",))),
    "named": (Named, lambda x: (x.ids, x.offsets), ((0,), (1,))),
    "dataclass": (Typed, lambda x: (x.ids, x.offsets), (("ids",), ("offsets",))),
    "object": (Plain, lambda x: (x.ids, x.offsets), (("ids",), ("offsets",))),
    "nested": (lambda i, o: {"f": [(i, o)], 3: None}, lambda x: x["f"][0], (("f", 0, 0), ("f", 0, 1))),
    "detached": (lambda i, o: (i, o), lambda x: (x[0].detach(), x[1].view(-1)), ((0,), (1,))),
    "columns": (lambda i, o: (torch.stack([i, i], 1), torch.stack([o, o])), lambda x: (x[0][:, 1], x[1][0]), None),
}


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_where_ids_are_found(kind, keyword):
    pack, unpack, keys = CONTAINERS[kind]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = bag()

        def forward(self, other, x=None):
            return self.e(*unpack(x))

    batches = [pack(ids[0], offsets[0]) for ids, offsets in (draw(0), draw(1), draw(2, bags=3))]
    step = (lambda model, x: model(None, x=x).sum()) if keyword else (lambda model, x: model(None, x).sum())
    feature, = lift(work_of(Net(), batches, step)).structure.features
    root = ("kwargs", "x") if keyword else ("args", 1)
    if keys is None:
        assert (feature.indices, feature.offsets) == (InputPath((*root, 0), (1, 1)), InputPath((*root, 1), (0, 0)))
    else:
        assert (feature.indices, feature.offsets) == tuple(InputPath((*root, *key)) for key in keys)


@pytest.mark.parametrize("forward", [
    lambda e, ids, offsets: e(ids % 40, offsets), lambda e, ids, offsets: e(ids.clone(), offsets),
    lambda e, ids, offsets: e(ids[1:], offsets.clamp(max=len(ids) - 1)),
], ids=["hashed", "copied", "sliced"])
def test_computed_ids_are_lifted_where_they_stand(forward):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = bag()

        def forward(self, ids, offsets):
            return torch.cat([forward(self.e, ids, offsets), torch.ones(len(offsets), 2)], 1)

    graph = lift(work_of(Net(), [(ids[0], offsets[0]) for ids, offsets in map(draw, range(3))]))
    feature, = graph.structure.features
    assert feature.indices is None and not feature.from_inputs and graph.structure.concats == ()
    assert "its ids" in graph.notes["e"] and "where it stands" in graph.explain()


def test_paths_that_do_not_hold_in_every_batch_are_dropped():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = bag()

        def forward(self, ids, offsets, swap):
            return self.e(ids[1 if swap else 0], offsets)

    def batch(seed, swap):
        ids, offsets = draw(seed)
        return [ids[0], ids[0].clone()], offsets[0], swap

    stays = lift(work_of(Net(), [batch(0, False), batch(1, False)])).structure.features[0]
    assert stays.indices == InputPath(("args", 0, 0))
    moves = lift(work_of(Net(), [batch(0, False), batch(1, True)])).structure.features[0]
    assert moves.indices is None and moves.offsets is not None
    # The last batch of a sequence is looked at too, however few are asked for.
    moves = lift(work_of(Net(), [batch(0, False), batch(1, False), batch(2, True)]), batches=1).structure.features[0]
    assert moves.indices is None


def test_a_slice_is_no_column():
    matrix = torch.arange(12).view(4, 3)
    inputs = Inputs((matrix,), {})
    assert list(inputs.find(matrix[2])) == [InputPath(("args", 0), (0, 2))]
    assert list(inputs.find(matrix[:, 1])) == [InputPath(("args", 0), (1, 1))]
    assert list(inputs.find(matrix.view(-1)[1:4])) == [] and list(inputs.find(matrix[1:, 1])) == []
    assert list(inputs.find(matrix[2].clone())) == []


def test_ambiguous_empty_inputs_are_told_apart_by_later_batches():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = bag(), bag()

        def forward(self, ids, offsets):
            return self.b(ids[1], offsets) + self.a(ids[0], offsets)

    empty = torch.zeros(0, dtype=torch.int64)
    batches = [([empty, empty.clone()], torch.zeros(B, dtype=torch.int64)),
               ([torch.tensor([1]), torch.tensor([2])], torch.zeros(B, dtype=torch.int64))]
    paths = {f.name: f.indices.keys for f in lift(work_of(Net(), batches)).structure.features}
    assert paths == {"a": ("args", 0, 0), "b": ("args", 0, 1)}


def test_forms_weights_and_dtypes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tags = nn.ModuleDict({"weighted": bag(padding_idx=-1), "last": bag(mode="mean", include_last_offset=True)})
            self.matrix = bag(dim=3)
            self.token = nn.Embedding(40, 5, sparse=True, padding_idx=0)
            self.ours = OurBag(40, 4, mode="sum", sparse=True)

        def forward(self, ids, offsets, last, weights, matrix):
            pooled = [self.tags["weighted"](ids, offsets, weights), self.tags["last"](ids, last), self.matrix(matrix),
                      self.ours(ids, offsets)]
            return sum(p.sum() for p in pooled) + self.token(matrix).sum()

    def batch(seed):
        ids, offsets = draw(seed)
        n = len(ids[0])
        return ids[0].int(), offsets[0].int(), torch.cat([offsets[0], torch.tensor([n])]).int(), torch.rand(n), torch.randint(0, 40, (B, 7))

    graph = lift(work_of(Net(), [batch(seed) for seed in range(3)]))
    seen = {f.name: (f.form, f.pooling, f.weighted, f.index_dtype, f.padding_idx, f.include_last_offset) for f in graph.structure.features}
    assert seen == {
        "tags.weighted": ("offsets", "sum", True, "int32", 39, False), "tags.last": ("offsets", "mean", False, "int32", None, True),
        "matrix": ("matrix", "sum", False, "int64", None, False), "token": ("ids", "none", False, "int64", 0, False),
        "ours": ("offsets", "sum", False, "int32", None, False)}
    assert all(f.from_inputs for f in graph.structure.features)
    assert graph.structure.feature("tags.weighted").weights == InputPath(("args", 3))
    assert (graph.sketches["token"].bags, graph.sketches["matrix"].bags) == (3 * 7 * B, 3 * B)
    assert graph.sketches["tags.last"].bags == 3 * B and graph.batch_size == B
    assert graph.sketches["token"].padding > 0


def test_shared_tables_and_repeated_calls():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = bag(), bag()
            self.second.weight = self.first.weight
            self.alias = self.second

        def forward(self, ids, offsets):
            return torch.cat([self.second(ids[0], offsets[0]), self.first(ids[1], offsets[1]), self.second(ids[2], offsets[2])], -1)

    structure = lift(work_of(Net(), [draw(seed) for seed in range(2)])).structure
    assert [t.name for t in structure.tables] == ["first.weight"]
    assert [(f.name, f.module, f.call, f.table) for f in structure.features] == [
        ("second", "second", 0, "first.weight"), ("first", "first", 0, "first.weight"), ("second#1", "second", 1, "first.weight")]
    assert structure.concats[0].parts == ("second", "first", "second#1")
    assert structure.feature("second#1").indices == InputPath(("args", 0, 2))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return torch.ones(())

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.shape)


JOINS = {
    "alone": (lambda a, b: torch.cat([a, b], 1), True),
    "axis": (lambda a, b: torch.cat((a, b), axis=-1), True),
    "metadata": (lambda a, b: torch.cat([a, b], 1) * a.shape[0] * a.size(1) * a.dim(), True),
    "concat": (lambda a, b: torch.concat([a, torch.ones(B, 3), b], dim=1), True),
    "rows": (lambda a, b: torch.cat([a, b], 0), False),
    "default": (lambda a, b: torch.cat([a, b]), False),
    "read": (lambda a, b: torch.cat([a, b], 1).sum() + a.sum(), False),
    "twice": (lambda a, b: torch.cat([a, a], 1).sum() + b.sum(), False),
    "two cats": (lambda a, b: torch.cat([a, b], 1).sum() + torch.cat([b, torch.ones(B, 1)], 1).sum(), False),
    "custom function": (lambda a, b: torch.cat([a, b], 1).sum() + Doubled.apply(a).sum(), False),
    "function that does not look": (lambda a, b: torch.cat([a, b], 1).sum() + Constant.apply(a), False),
    "detached": (lambda a, b: torch.cat([a, b], 1).sum() + a.detach().sum(), False),
    "changed": (lambda a, b: torch.cat([a + 1, b.view(B, 4)], 1), False),
    "stacked": (lambda a, b: torch.stack([a, b], 1), False),
    "into": (lambda a, b: torch.cat([a.detach(), b.detach()], 1, out=torch.empty(B, 8)).sum() + a.sum(), False),
}


@pytest.mark.parametrize("kind", JOINS)
def test_a_concat_is_one_that_alone_reads_its_lookups(kind):
    join, is_concat = JOINS[kind]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = bag(), bag()

        def forward(self, ids, offsets):
            assert len(ids) == 3                                # which torch.fx cannot trace: what follows is the record's alone
            return join(self.a(ids[0], offsets[0]), self.b(ids[1], offsets[1]))

    graph = lift(work_of(Net(), [draw(seed) for seed in range(2)]))
    concats = graph.structure.concats
    assert bool(concats) is is_concat and "does not trace" in graph.frontends["fx"]
    if kind == "concat":
        assert concats[0].parts == ("a", 3, "b")


def test_two_concats_and_one_that_only_some_steps_have():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.ModuleList(bag() for _ in range(6))

        def forward(self, ids, offsets, more):
            a, b, c, d, e, f = (each(ids[0], offsets[0]) for each in self.bags)
            rest = torch.cat([e, f], 1) if more else torch.cat([f, e], 1)
            return torch.cat([a, b], 1).sum() + torch.cat([d, c], 1).sum() + rest.sum()

    structure = lift(work_of(Net(), [(*draw(seed), seed == 0) for seed in range(3)])).structure
    assert [(c.name, c.parts) for c in structure.concats] == [("concat", ("bags.0", "bags.1")), ("concat#1", ("bags.3", "bags.2"))]


def test_a_concat_of_what_a_hook_sees_is_none():
    work = dlrm_work()
    calls = []
    work.model.emb_l[1].register_forward_hook(lambda module, args, output: calls.append(1))
    graph = lift(work)
    assert graph.structure.concats == () and len(graph.structure.features) == 3 and calls
    assert graph.notes["emb_l.1"] == "has forward hooks, which keep running"


def test_fx_confirms_a_model_that_traces_and_leaves_it_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.tail = bag(), bag(), Tail()
            self.seen, self.last = [], None

        def forward(self, ids, offsets):
            self.last = ids
            self.seen.append(ids)
            return self.tail(torch.cat([self.a(ids, offsets), self.b(ids, offsets)], 1))

    class Tail(nn.Module):
        def forward(self, x):
            return x + 1

    model = Net()
    model.tail.register_forward_hook(lambda module, args, output: model.seen.append(output))
    graph = lift(work_of(model, [(ids[0], offsets[0]) for ids, offsets in map(draw, range(2))]))
    assert graph.frontends["fx"].endswith("confirms 1 concats")
    assert len(graph.structure.concats) == 1
    assert type(model.last) is Tensor and all(type(ids) is Tensor for ids in model.seen)
    assert "does not trace" in lift(dlrm_work()).frontends["fx"]


def test_tracing_cannot_reach_the_model():
    class Forwarding(nn.Module):
        """Sets attributes on the module inside, as the wrapper of torch.compile does."""

        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def __setattr__(self, name, value):
            super().__setattr__(name, value) if name == "inside" or "inside" not in self._modules else setattr(self.inside, name, value)

        def forward(self, *args):
            return self.inside(*args)

    work = dlrm_work()
    seen = []
    work.model.bot.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    work.model.top.forward = lambda x: nn.Linear.forward(work.model.top, x)
    names = dict(work.model.named_modules())
    graph = lift(work_of(Forwarding(work.model), work.batches))
    assert dict(work.model.named_modules()) == names and set(seen) == {Tensor}
    assert "the forward of Linear is replaced on the instance" in graph.frontends["fx"]


def test_fx_drops_a_concat_that_it_sees_another_reader_of():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = bag(), bag()

        def forward(self, ids, offsets):
            a, b = self.a(ids, offsets), self.b(ids, offsets)
            return torch.cat([a, b], 1).sum() * a.size(0) + b.sum()

    work = work_of(Net(), [(ids[0], offsets[0]) for ids, offsets in map(draw, range(2))])
    features = {f.name: f for f in lift(work).structure.features}
    concats, said = confirm(trace(work.model), [Concat("both", ("a", "b")), Concat("one", ("a",))], features)
    assert [c.name for c in concats] == ["one"] and said.endswith("both is not alone: sum_2 reads its lookups too")


class Subclass(nn.EmbeddingBag):
    pass


def parametrized():
    module = bag()
    return nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())


def with_hook(kind):
    module = bag()
    getattr(module.weight, kind)(lambda grad: None)
    return module


def with_forward():
    module = bag()
    module.forward = module.forward
    return module


def transposed():
    module = bag(4, 4)
    module.weight.data = torch.ones(4, 8)[:, ::2]
    return module


REFUSED = {
    "max_norm": (lambda: bag(max_norm=1.0), "max_norm=1.0 rewrites rows"),
    "scale_grad_by_freq": (lambda: bag(scale_grad_by_freq=True, sparse=False), "scale_grad_by_freq=True"),
    "float64": (lambda: bag().double(), "its weight is float64"),
    "subclass": (lambda: Subclass(40, 4, mode="sum", sparse=True), "Subclass is a subclass"),
    "forward": (with_forward, "its forward has been replaced"),
    "parametrized": (parametrized, "its weight is parametrized"),
    "hook": (lambda: with_hook("register_hook"), "has gradient hooks"),
    "post hook": (lambda: with_hook("register_post_accumulate_grad_hook"), "has gradient hooks"),
    "strided": (transposed, "its weight is not contiguous"),
}


class Beside(nn.Module):
    """A module under test beside one that can be lifted."""

    def __init__(self, odd):
        super().__init__()
        self.good, self.odd = bag(), odd

    def forward(self, ids, offsets):
        return self.good(ids, offsets).sum() + self.odd(ids % 4, offsets).sum()


def beside(odd, optimizer=None):
    model = Beside(odd)
    batches = [(ids[0], offsets[0]) for ids, offsets in map(draw, range(2))]
    return work_of(model, batches, optimizer=optimizer and optimizer(model))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_lifted_is_refused_by_name(kind):
    make, reason = REFUSED[kind]
    graph = lift(beside(make()))
    assert [f.name for f in graph.structure.features] == ["good"]
    refusal, = graph.refusals
    assert refusal.where == "odd" and reason in refusal.reason and refusal.remedy
    assert f"odd: {refusal.reason}" in str(graph) and f"odd: {refusal.reason}" in graph.explain()


@pytest.mark.parametrize(("options", "optimizer", "reason"), [
    ({"sparse": False}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "untouched rows too: SGD with momentum=0.9"),
    ({"sparse": False}, lambda m: torch.optim.Adam([m.odd.weight]), "Adam natively raises or moves untouched rows too"),
    ({}, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.SGD([m.odd.weight], lr=0.1)], "is in 2 parameter groups"),
])
def test_tables_whose_update_cannot_be_taken_over(options, optimizer, reason):
    graph = lift(beside(bag(**options), optimizer))
    assert "odd" in [r.where for r in graph.refusals]
    assert reason in next(r.reason for r in graph.refusals if r.where == "odd")


@pytest.mark.parametrize(("options", "optimizer", "rule", "reason"), [
    ({"sparse": False}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "sgd", ""),
    ({}, lambda m: torch.optim.SparseAdam(m.parameters(), lr=0.1), "adam", ""),
    ({}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), None, "momentum=0.9"),
    ({}, lambda m: torch.optim.SGD([m.good.weight], lr=0.1), "unheld", ""),
])
def test_tables_that_are_lifted_with_their_own_update(options, optimizer, rule, reason):
    graph = lift(beside(bag(**options), optimizer))
    info = graph.structure.table("odd.weight").optimizer
    if rule == "unheld":
        assert info is None and "update:odd.weight" not in {node.name for node in graph.nodes}
        assert "no optimizer updates its table" in graph.explain()
    else:
        assert info.fused_rule == rule and reason in info.reason and (info.reason in graph.explain())


def test_a_dense_gradient_costs_the_whole_table():
    graph = lift(beside(bag(sparse=False)))
    nodes = {node.name: node.resources for node in graph.nodes}
    assert nodes["expand:odd.weight"].write_bytes == 40 * 16 and nodes["update:odd.weight"].write_bytes == 40 * 16


def test_a_frozen_table_is_lifted_and_never_updated():
    odd = bag()
    odd.weight.requires_grad_(False)
    graph = lift(beside(odd))
    assert len(graph.structure.features) == 2
    assert not [node.name for node in graph.nodes if node.tables == ("odd.weight",) and node.op != "lookup"]


@pytest.mark.parametrize("read", [
    lambda m: m.odd.weight.square().sum(), lambda m: F.linear(torch.ones(1, 4), m.odd.weight).sum(),
    lambda m: F.embedding(torch.tensor([1]), m.odd.weight, sparse=True).sum(),
], ids=["norm", "linear", "functional"])
def test_a_table_that_is_read_beside_its_lookups_is_refused(read):
    work = beside(bag())
    work = work_of(work.model, work.batches, step=lambda model, batch: model(*batch) + read(model))
    graph = lift(work)
    assert [t.name for t in graph.structure.tables] == ["good.weight"]
    assert "its weight is read by" in graph.refusals[0].reason


def test_a_module_that_the_step_does_not_call_is_refused():
    work = beside(bag())
    graph = lift(work_of(work.model, work.batches, step=lambda model, batch: model.good(*batch).sum()))
    assert graph.refusals[0].where == "odd" and "was not called" in graph.refusals[0].reason
    feature, = graph.structure.features                         # called outside of the root forward
    assert feature.indices is None and feature.name == "good"


def test_sharing_a_weight_with_a_refused_module_is_refused():
    odd = bag(max_norm=1.0, sparse=False)
    work = beside(odd)
    other = bag(sparse=False)
    other.weight = odd.weight
    work.model.other = other
    work = work_of(work.model, work.batches, step=lambda model, batch: model(*batch) + model.other(*batch).sum())
    reasons = {r.where: r.reason for r in lift(work).refusals}
    assert reasons["other"] == "shares its weight with odd, which is not lifted"
    idle = bag(sparse=False)
    idle.weight = work.model.good.weight
    work.model.good.sparse = False
    work.model.idle = idle                                      # never called, so that nothing is known of what it would look up
    with pytest.raises(LiftRefused, match=r"good: shares its weight with idle, which is not lifted"):
        lift(work)
    del work.model.idle
    odd.max_norm, odd.sparse = None, True
    reasons = {r.where: r.reason for r in lift(work).refusals}
    assert "differ in sparse=" in reasons["odd"] and "differ in sparse=" in reasons["other"]


def test_a_module_called_in_two_ways_is_refused():
    work = beside(bag())
    step = lambda model, batch: model.good(batch[0] % 4, batch[1]).sum() + (  # noqa: E731
        model.odd(batch[0], batch[1]) if len(batch[0]) % 2 else model.odd(batch[0][None])).sum()
    ids = [torch.tensor([1, 2, 3]), torch.tensor([1, 2])]
    graph = lift(work_of(work.model, [(i, torch.tensor([0, 1])) for i in ids], step))
    assert graph.refusals[0].reason == "was called in different ways: matrix of int64 and offsets of int64"


def test_a_lookup_that_only_some_steps_make_stands_where_it_is():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = bag(), bag()

        def forward(self, ids, offsets):
            a = self.a(ids, offsets).sum()
            return a + self.b(ids, offsets).sum() if len(ids) % 2 else a

    offsets = torch.tensor([0, 1])
    for order in ((3, 2), (2, 3)):
        graph = lift(work_of(Net(), [(torch.arange(n), offsets) for n in order]))
        assert [(f.name, f.from_inputs) for f in graph.structure.features] == [("a", True), ("b", False)]
        assert "not every forward of the model calls it" in graph.notes["b"]


def test_functional_lookups_and_fused_modules_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.fused = bag(), TableBatchedEmbeddingBags([(40, 4)])
            self.table = nn.Parameter(torch.randn(40, 4))

        def forward(self, ids, offsets):
            looked_up = F.embedding_bag(ids, self.table, offsets, mode="sum", sparse=True)
            ends = torch.cat([offsets, torch.tensor([len(ids)])])
            return self.good(ids, offsets).sum() + self.fused(ids, ends).sum() + looked_up.sum()

    graph = lift(work_of(Net(), [(ids[0], offsets[0]) for ids, offsets in map(draw, range(2))]))
    assert {r.where: r.reason for r in graph.refusals} == {
        "fused": "TableBatchedEmbeddingBags is already one fused call",
        "table": "is looked up by torch.nn.functional.embedding_bag, without an embedding module"}


def test_an_applied_model_is_refused():
    work = dlrm_work()
    plan = default_plan(lift(work))
    apply(plan, work.model, work.optimizer, backend="reference")
    with pytest.raises(LiftRefused, match=r"runs a plan already .*call sparselift\.unapply"):
        lift(work)
    unapply(work.model, work.optimizer)
    assert lift(work).structure == plan.structure


def test_several_forwards_in_a_step_are_one_structure():
    work = beside(bag())
    ids, offsets = draw(0)
    step = lambda model, batch: model(*batch) - model(batch[0].flip(0), batch[1])  # noqa: E731
    graph = lift(work_of(work.model, [(ids[0], offsets[0])], step))
    assert [(f.name, f.indices) for f in graph.structure.features if f.name == "good"] == [("good", InputPath(("args", 0)))]
    assert graph.sketches["good"].bags == 2 * B


def test_a_concat_in_each_of_several_forwards():
    work = dlrm_work()
    graph = lift(work_of(work.model, work.batches, lambda model, batch: model(*batch).sum() - model(*batch).mean()))
    assert [c.parts for c in graph.structure.concats] == [(4, "emb_l.0", "emb_l.1", "emb_l.2")]


def test_the_root_itself_may_be_a_lookup():
    model = bag()
    graph = lift(work_of(model, [(ids[0], offsets[0]) for ids, offsets in map(draw, range(2))]))
    feature, = graph.structure.features
    assert (feature.name, feature.module, feature.table, feature.indices) == ("root", "", "weight", InputPath(("args", 0)))


def test_a_table_without_rows_and_steps_without_ids():
    model = nn.ModuleDict({"none": bag(rows=0), "some": bag()})
    ids, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(B, dtype=torch.int64)
    work = work_of(model, [(ids, offsets)], lambda model, batch: sum(each(*batch).sum() for each in model.values()))
    graph = lift(work)
    assert [t.rows for t in graph.structure.tables] == [40]
    assert "none: its weight has no elements" in str(graph)
    assert all(node.resources.traffic_bytes >= 0 for node in graph.nodes)


def test_a_model_without_embeddings_says_what_was_looked_for():
    with pytest.raises(LiftRefused, match=r"Linear of workload 'toy' has no embedding to lift; looked for torch\.nn\.EmbeddingBag"):
        lift(work_of(nn.Linear(3, 1), [(torch.ones(1, 3),)]))


def test_a_model_with_refused_embeddings_alone_names_each():
    model = nn.ModuleList([bag(max_norm=1.0), bag().double()])
    with pytest.raises(LiftRefused, match=r"none of the 2 embedding modules .*\n  0: max_norm=1.0.*\n  1: its weight is float64"):
        lift(work_of(model, [()]))


def test_wrapped_models_are_refused():
    with pytest.raises(LiftRefused, match="the model is wrapped in DataParallel"):
        lift(work_of(nn.DataParallel(OfficialDlrm()), [dlrm_batch(0)]))


def test_bad_workloads_are_named():
    with pytest.raises(WorkloadError, match=r"must return a scalar loss tensor; got a tensor of shape \(6, 1\)"):
        lift(work_of(OfficialDlrm(), [dlrm_batch(0)], step=lambda model, batch: model(*batch)))
    with pytest.raises(WorkloadError, match="gives no batches"):
        lift(work_of(OfficialDlrm(), []))
    with pytest.raises(ValueError, match="batches must be at least 1; got 0"):
        lift(dlrm_work(), batches=0)
    with pytest.raises(RuntimeError, match="not in the valid range"):  # torch's own words about the user's ids
        lift(beside(bag(3)))


def test_a_forward_that_writes_to_its_table_leaves_no_trace():
    class Normalised(Beside):
        def forward(self, ids, offsets):
            self.odd.weight.data.copy_(F.normalize(self.odd.weight.data))
            return super().forward(ids, offsets)

    work = beside(bag())
    model = Normalised(work.model.odd)
    before = copy.deepcopy(model.state_dict())
    graph = lift(work_of(model, work.batches))
    assert "its weight is read by Tensor.data as well" in graph.refusals[0].reason
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_lifting_leaves_no_trace():
    work = dlrm_work()
    work.model.dropout = nn.Dropout(0.5)
    step = lambda model, batch: model.dropout(model(*batch)).sum() + random.random() + np.random.rand()  # noqa: E731
    work = work_of(work.model, work.batches, step)
    work.train(work.model, work.optimizer, work.batches[0])
    step(work.model, work.batches[0]).backward()
    grads = {name: p.grad for name, p in work.model.named_parameters()}
    before = copy.deepcopy(work.model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for each, outcome in ((step, nullcontext()), (lambda *given: step(*given) / (1 // 0), pytest.raises(ZeroDivisionError))):
        with outcome:
            lift(work_of(work.model, work.batches, each))
        assert all(torch.equal(value, before[name]) for name, value in work.model.state_dict().items())
        assert all(p.grad is grads[name] for name, p in work.model.named_parameters())
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        assert np.random.get_state()[1].tolist() == states[2]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in work.model.modules())
