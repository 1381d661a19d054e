"""Row-wise Adagrad against plain float64 loops, and which formula a fused update runs for an optimizer."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparselift
from sparselift.kernels.base import UPDATE_RULES, UpdateRule
from sparselift.optim import RowWiseAdagrad, fused_rule, update_rule

ROWS, DIM = 6, 4
IDS = [3, 1, 3, 0, 3]                     # duplicates; rows 2, 4 and 5 are never named


def weights(seed: int = 0, rows: int = ROWS, dim: int = DIM) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)))


def sparse_grad(ids: list[int], seed: int = 1, rows: int = ROWS, dim: int = DIM) -> Tensor:
    values = torch.randn(len(ids), dim, generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(torch.tensor([ids], dtype=torch.int64), values, (rows, dim), check_invariants=True)


class Loops:
    """The formula, element by element, in float64."""

    def __init__(self, weight: Tensor, lr: float, eps: float, weight_decay: float = 0.0, start: float = 0.0,
                 maximize: bool = False) -> None:
        self.weight = weight.detach().double().tolist()
        self.sums = [start] * len(weight)
        self.lr, self.eps, self.weight_decay, self.sign = lr, eps, weight_decay, -1.0 if maximize else 1.0

    def step(self, grad: Tensor) -> None:
        if grad.is_sparse:
            grads: dict[int, list[float]] = {}
            for row, values in zip(grad._indices()[0].tolist(), grad._values().double().tolist()):
                grads[row] = [a + b for a, b in zip(grads.get(row, [0.0] * len(values)), values)]
        else:
            grads = dict(enumerate(grad.double().tolist()))
        for row, values in grads.items():
            total = [self.sign * g + self.weight_decay * w for g, w in zip(values, self.weight[row])]
            self.sums[row] += sum(g * g for g in total) / len(total)
            rate = self.lr / (math.sqrt(self.sums[row]) + self.eps)
            self.weight[row] = [w - rate * g for w, g in zip(self.weight[row], total)]


def assert_close(parameter: nn.Parameter, optimizer: RowWiseAdagrad, loops: Loops) -> None:
    np.testing.assert_allclose(parameter.detach().numpy(), np.array(loops.weight), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(optimizer.state[parameter]["sum"].numpy(), np.array(loops.sums), rtol=2e-6, atol=2e-6)


OPTIONS = [
    pytest.param({}, id="defaults"),
    pytest.param({"weight_decay": 0.1}, id="weight decay"),
    pytest.param({"maximize": True}, id="maximize"),
    pytest.param({"start": 0.5}, id="initial accumulator"),
    pytest.param({"weight_decay": 0.25, "maximize": True, "start": 0.125}, id="all"),
]


@pytest.mark.parametrize("layout", ["sparse", "dense"])
@pytest.mark.parametrize("options", OPTIONS)
def test_follows_the_formula(layout: str, options: dict) -> None:
    weight = weights()
    start = options.get("start", 0.0)
    given = {key: value for key, value in options.items() if key != "start"}
    optimizer = RowWiseAdagrad([weight], lr=0.5, eps=1e-3, initial_accumulator_value=start, **given)
    loops = Loops(weight, 0.5, 1e-3, **options)
    for seed in range(3):
        grad = sparse_grad(IDS, seed)
        weight.grad = grad if layout == "sparse" else grad.to_dense()
        loops.step(weight.grad)
        optimizer.step()
    assert_close(weight, optimizer, loops)
    assert optimizer.state[weight]["step"].item() == 3


def test_known_values() -> None:
    """Row 1 gets [1, 2, 3, 4] and [1, 1, 1, 1]: g = [2, 3, 4, 5], sum = 54 / 4."""
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = RowWiseAdagrad([weight], lr=0.5, eps=1e-8)
    values = torch.tensor([[1.0, 2, 3, 4], [1, 1, 1, 1], [1, 1, 1, 1]])
    weight.grad = torch.sparse_coo_tensor([[1, 1, 2]], values, (4, 4), check_invariants=True)
    optimizer.step()
    assert optimizer.state[weight]["sum"].tolist() == [0, 13.5, 1, 0]
    want = np.ones((4, 4))
    want[1] -= 0.5 * np.array([2, 3, 4, 5]) / math.sqrt(13.5)
    want[2] -= 0.5
    np.testing.assert_allclose(weight.detach().numpy(), want, rtol=1e-6)


def test_sparse_and_dense_gradients_give_the_same_bits() -> None:
    first, second = weights(), weights()
    one, two = RowWiseAdagrad([first], lr=0.1), RowWiseAdagrad([second], lr=0.1)
    for seed in range(4):
        first.grad = sparse_grad(IDS, seed).coalesce()
        second.grad = first.grad.to_dense()
        one.step()
        two.step()
    assert torch.equal(first, second)
    assert torch.equal(one.state[first]["sum"], two.state[second]["sum"])


def test_untouched_rows_stay_bit_for_bit() -> None:
    weight = weights()
    before = weight.detach().clone()
    optimizer = RowWiseAdagrad([weight], lr=0.5, weight_decay=0.5)
    weight.grad = sparse_grad(IDS)
    optimizer.step()
    changed = (weight != before).any(1)
    assert changed.tolist() == [row in IDS for row in range(ROWS)]
    assert (optimizer.state[weight]["sum"] > 0).tolist() == [row in IDS for row in range(ROWS)]


def test_dense_weight_decay_reaches_every_row() -> None:
    weight = weights()
    before = weight.detach().clone()
    optimizer = RowWiseAdagrad([weight], lr=0.5, weight_decay=0.5)
    weight.grad = sparse_grad(IDS).to_dense()
    optimizer.step()
    assert bool((weight != before).any(1).all())


def test_parameters_without_a_gradient_are_left_alone() -> None:
    weight = weights()
    before = weight.detach().clone()
    optimizer = RowWiseAdagrad([weight])
    optimizer.step()
    assert torch.equal(weight, before)
    assert optimizer.state[weight]["step"].item() == 0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_tables_without_elements(shape: tuple[int, int], layout: str) -> None:
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = RowWiseAdagrad([weight], weight_decay=0.5)
    ids = list(range(shape[0]))
    weight.grad = sparse_grad(ids, rows=shape[0], dim=shape[1]) if layout == "sparse" else torch.zeros(shape)
    optimizer.step()
    assert optimizer.state[weight]["sum"].tolist() == [0.0] * shape[0]


def test_a_sparse_gradient_without_entries() -> None:
    weight = weights()
    before = weight.detach().clone()
    optimizer = RowWiseAdagrad([weight], weight_decay=0.5)
    weight.grad = sparse_grad([])
    optimizer.step()
    assert torch.equal(weight, before)
    assert optimizer.state[weight]["step"].item() == 1


def test_groups_have_their_own_options() -> None:
    first, second = weights(1), weights(2)
    optimizer = RowWiseAdagrad([{"params": [first], "lr": 0.5}, {"params": [second], "eps": 0.25, "initial_accumulator_value": 2.0}],
                               lr=0.125, eps=1e-3)
    loops = Loops(first, 0.5, 1e-3), Loops(second, 0.125, 0.25, start=2.0)
    for seed in range(2):
        first.grad, second.grad = sparse_grad(IDS, seed), sparse_grad([5, 5], seed + 7)
        for weight, each in zip((first, second), loops):
            each.step(weight.grad)
        optimizer.step()
    assert_close(first, optimizer, loops[0])
    assert_close(second, optimizer, loops[1])


def test_a_group_that_joins_later_is_trained() -> None:
    first, second = weights(1), weights(2)
    optimizer = RowWiseAdagrad([first], lr=0.5, eps=1e-3)
    optimizer.add_param_group({"params": [second], "initial_accumulator_value": 1.0})
    loops = Loops(second, 0.5, 1e-3, start=1.0)
    second.grad = sparse_grad(IDS)
    loops.step(second.grad)
    optimizer.step()
    assert_close(second, optimizer, loops)


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    weight = weights()
    optimizer = RowWiseAdagrad([weight])
    with pytest.raises(ValueError, match=r"2-D.*\(3,\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    assert set(optimizer.state) == {weight}


def test_state_dict_round_trip_continues_with_the_same_bits() -> None:
    kept, reloaded = weights(), weights()
    optimizer = RowWiseAdagrad([kept], lr=0.25, weight_decay=0.125)
    for seed in range(2):
        kept.grad = sparse_grad(IDS, seed)
        optimizer.step()
    with torch.no_grad():
        reloaded.copy_(kept)
    other = RowWiseAdagrad([reloaded], lr=99.0)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert sorted(optimizer.state_dict()["state"][0]) == ["step", "sum"]
    assert other.param_groups[0]["lr"] == 0.25
    for seed in range(2, 4):
        kept.grad, reloaded.grad = sparse_grad(IDS, seed), sparse_grad(IDS, seed)
        optimizer.step()
        other.step()
    assert torch.equal(kept, reloaded)
    assert torch.equal(optimizer.state[kept]["sum"], other.state[reloaded]["sum"])
    assert other.state[reloaded]["step"].item() == 4


def test_a_deep_copy_is_independent() -> None:
    model = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    pair = model, RowWiseAdagrad(model.parameters(), lr=0.5)
    copied_model, copied_optimizer = copy.deepcopy(pair)
    copied_model(torch.tensor([1, 1]), torch.tensor([0])).sum().backward()
    copied_optimizer.step()
    assert pair[1].state[model.weight]["sum"].tolist() == [0.0] * ROWS
    assert copied_optimizer.state[copied_model.weight]["sum"].tolist() == [0, 4, 0, 0, 0, 0]


def test_schedulers_and_closures_work() -> None:
    weight = weights()
    optimizer = RowWiseAdagrad([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loops = Loops(weight, 1.0, 1e-8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight[:2].sum()
        loss.backward()
        return loss

    for _ in range(2):
        loss = optimizer.step(closure)
        assert torch.is_tensor(loss)
        loops.step(sparse_grad_of_ones([0, 1]))
        scheduler.step()
        loops.lr *= 0.5
    assert_close(weight, optimizer, loops)


def sparse_grad_of_ones(ids: list[int]) -> Tensor:
    return torch.sparse_coo_tensor([ids], torch.ones(len(ids), DIM), (ROWS, DIM), check_invariants=True)


@pytest.mark.parametrize("option", ["lr", "eps", "weight_decay", "initial_accumulator_value"])
@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_options_below_zero_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 0; got {value}"):
        RowWiseAdagrad([weights()], **{option: value})


def test_gradients_sparse_in_columns_are_refused() -> None:
    weight = weights()
    optimizer = RowWiseAdagrad([weight])
    weight.grad = torch.ones(ROWS, DIM).to_sparse(2)
    with pytest.raises(ValueError, match="2 sparse dimensions"):
        optimizer.step()


# ---------------------------------------------------------------------------------------------- which formula is fused

RULES = [
    (torch.optim.SGD, {"lr": 0.1}, "sgd", "sgd"),
    (torch.optim.SGD, {"lr": 0.1, "maximize": True}, "sgd", "sgd"),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum=0.9", "momentum=0.9"),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.5}, "weight_decay=0.5", "weight_decay=0.5"),
    (torch.optim.SGD, {"lr": torch.tensor(0.1)}, "tensor learning rate", "tensor learning rate"),
    (torch.optim.SGD, {"lr": 0.1, "differentiable": True}, "differentiable=True", "differentiable=True"),
    (torch.optim.SGD, {"lr": 0.1, "fused": True}, "refuses for sparse gradients", "sgd"),
    (torch.optim.Adagrad, {"lr": 0.1}, "adagrad", "adagrad"),
    (torch.optim.Adagrad, {"lr": 0.1, "eps": 0.0}, "adagrad", "eps=0"),
    (torch.optim.Adagrad, {"lr": 0.1, "eps": 0.0, "initial_accumulator_value": 1.0}, "adagrad", "adagrad"),
    (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.5}, "weight_decay=0.5", "weight_decay=0.5"),
    (torch.optim.Adagrad, {"lr": torch.tensor(0.1)}, "tensor learning rate", "tensor learning rate"),
    (RowWiseAdagrad, {"lr": 0.1}, "rowwise_adagrad", "rowwise_adagrad"),
    (RowWiseAdagrad, {"lr": 0.1, "eps": 0.0}, "rowwise_adagrad", "eps=0"),
    (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.5}, "rowwise_adagrad", "every row"),
    (torch.optim.SparseAdam, {"lr": 0.1}, "adam", "sparse gradients alone"),
    (torch.optim.SparseAdam, {"lr": torch.tensor(0.1)}, "tensor learning rate", "sparse gradients alone"),
    (torch.optim.Adam, {"lr": 0.1}, "Adam", "Adam"),
]


@pytest.mark.parametrize("kind, options, with_sparse, with_dense", RULES)
def test_fused_rule(kind: type, options: dict, with_sparse: str, with_dense: str) -> None:
    """The expected text is the rule's name, or part of the reason why there is none."""
    optimizer = kind([weights()], **options)
    for sparse, want in ((True, with_sparse), (False, with_dense)):
        rule, reason = fused_rule(optimizer, optimizer.param_groups[0], sparse)
        if want in UPDATE_RULES:
            assert (rule, reason) == (want, "")
        else:
            assert rule is None
            assert want in reason


def test_nesterov_and_dampening_without_momentum_change_nothing() -> None:
    optimizer = torch.optim.SGD([weights()], lr=0.1, momentum=0.9, nesterov=True)
    group = {**optimizer.param_groups[0], "momentum": 0, "dampening": 0.5}      # a constructor wants momentum, a group may lose it
    assert fused_rule(optimizer, group, True) == ("sgd", "")


@pytest.mark.parametrize("options", [{}, {"dampening": 0.5}, {"nesterov": True}, {"foreach": True}], ids=str)
def test_momentum_moves_rows_of_earlier_batches(options: dict) -> None:
    """Why it has no fused update: torch's sparse buffer names every row so far, and grows by an entry a lookup."""
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5, **options)
    sizes = []
    for rows in ([0, 1, 1], [2], [3, 3]):
        before = weight.detach().clone()
        weight.grad = torch.sparse_coo_tensor([rows], torch.ones(len(rows), 2), (5, 2), check_invariants=True)
        optimizer.step()
        sizes.append(optimizer.state[weight]["momentum_buffer"]._nnz())
    assert (weight[:4] != before[:4]).all() and (weight[4] == 0).all()
    assert sizes == [3, 4, 6]


def test_torch_refuses_weight_decay_of_sparse_gradients() -> None:
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (5, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="sparse, dense"):
        torch.optim.SGD([weight], lr=1.0, weight_decay=0.1).step()


def test_a_subclass_is_not_taken_for_its_base() -> None:
    class Clipped(torch.optim.SGD):
        pass

    optimizer = Clipped([weights()], lr=0.1)
    rule, reason = fused_rule(optimizer, optimizer.param_groups[0], True)
    assert rule is None
    assert "Clipped" in reason


def test_update_rule_reads_the_hyperparameters_of_the_coming_step() -> None:
    weight = weights()
    sgd = torch.optim.SGD([weight], lr=0.5, maximize=True)
    assert update_rule("sgd", sgd.param_groups[0], sgd.state[weight]) == UpdateRule("sgd", 0.5, maximize=True)
    rowwise = RowWiseAdagrad([weight], lr=0.5, eps=0.25, weight_decay=0.125)
    assert update_rule("rowwise_adagrad", rowwise.param_groups[0], rowwise.state[weight]) == UpdateRule("rowwise_adagrad", 0.5, 0.25, 0.125)


def test_adagrads_rate_decays_as_torchs_does() -> None:
    """With gradient 1 and sums that stay huge, a step moves a weight by rate / sqrt(sum): torch's own rate can be read off."""
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    optimizer = torch.optim.Adagrad([weight], lr=0.5, lr_decay=0.25, initial_accumulator_value=2.0**60, eps=0.0)
    for _ in range(3):
        rule = update_rule("adagrad", optimizer.param_groups[0], optimizer.state[weight])
        before = weight.item()
        weight.grad = torch.ones(1, 1, dtype=torch.float64)
        optimizer.step()
        assert (before - weight.item()) * 2.0**30 == pytest.approx(rule.lr, rel=1e-9)


def test_the_package_offers_the_optimizer() -> None:
    assert sparselift.optim.RowWiseAdagrad is RowWiseAdagrad
