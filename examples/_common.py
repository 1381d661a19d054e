"""What the examples share: train natively and under two tuned plans from the same start, compare, and time the plans against native."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.metrics import roc_auc_score

import sparselift as sl
from sparselift.datasets import Batch, Ragged, Tabular
from sparselift.measure import Steps, compare
from sparselift.models import DLRM
from sparselift.plan import Interval, Plan
from sparselift.workloads.dlrm import click_inputs, click_loss

LOSS_TOLERANCE = 1e-3
TRAIN_SHARE = 0.8                # in the order of the file, which is that of time; the rest is for testing
TEST_BATCH_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Task:
    """What to train on, and with which layers."""

    name: str
    rows: tuple[int, ...]
    train: list[Batch]
    test: list[Batch]
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @classmethod
    def of(cls, name: str, train: Tabular | Ragged, test: Tabular | Ragged, batch_size: int, bottom: tuple[int, ...],
           top: tuple[int, ...]) -> Task:
        return cls(name, train.rows, train.batches(batch_size, drop_last=True), test.batches(TEST_BATCH_SIZE), bottom, top)

    def workload(self, args: argparse.Namespace) -> sl.Workload:
        """A fresh model, the same for a seed, under plain SGD."""
        model = DLRM(self.rows, args.dim, self.bottom, self.top, num_dense=self.train[0].dense.shape[1],
                     generator=torch.Generator().manual_seed(args.seed))
        return sl.Workload(self.name, model, torch.optim.SGD(model.parameters(), lr=args.lr), click_loss, self.train, uses=frozenset(),
                           inputs=click_inputs)


@dataclass(frozen=True, slots=True)
class Run:
    """One training."""

    name: str
    equivalence: str
    losses: list[float]          # one a step
    auc: float                   # on the test rows
    speedup: Interval            # native time / planned time of a step: median, and its 95% interval


def options(description: str | None, *, batch_size: int, epochs: int, lr: float) -> argparse.ArgumentParser:
    """The options that all examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--limit", type=int, help="rows to read; default: all")
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--dim", type=int, default=16, help="columns of a table")
    parser.add_argument("--trials", type=int, default=24, help="of each of the two searches")
    parser.add_argument("--pairs", type=int, default=31, help="blocks of steps to time a plan with, at most; 6 give a 95%% interval")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="CSV file for the results")
    return parser


def run(task: Task, args: argparse.Namespace) -> list[Run]:
    """Train three times, check that the plans keep their promises, print, and write the CSV."""
    print(f"{task.name}: {len(task.train)} batches of {args.batch_size}, {len(task.rows)} tables of {sum(task.rows):,} rows")
    native = train(task, args, "native", None)
    bitwise = train(task, args, "bitwise plan", sl.Constraints(equivalence="bitwise"))
    default = train(task, args, "default plan", sl.Constraints())
    runs = [native, bitwise, default]
    for each in runs:
        speed = f"{each.speedup.value:.2f}x [{each.speedup.low:.2f}, {each.speedup.high:.2f}]"
        print(f"{each.name:14} {each.equivalence:12} last loss {each.losses[-1]:.6f}  AUC {each.auc:.4f}  {speed}")
    if args.out:
        write(args.out, runs)
    if bitwise.losses != native.losses:
        raise SystemExit("the bitwise plan's losses are not those of native training, bit for bit")
    gap = max(abs(a - b) for a, b in zip(default.losses, native.losses, strict=True))
    if not gap <= LOSS_TOLERANCE:
        raise SystemExit(f"the default plan's losses are up to {gap:.1e} from native training; allowed {LOSS_TOLERANCE:.0e}")
    print(f"losses: the bitwise plan's are native's bit for bit; the default plan's are within {gap:.1e}")
    return runs


def train(task: Task, args: argparse.Namespace, name: str, constraints: sl.Constraints | None) -> Run:
    """Train from the common start; with constraints, under the plan that a search finds within them."""
    work = task.workload(args)
    model, optimizer = work.model, work.optimizer
    equivalence, speedup = "native", Interval(1.0, 1.0, 1.0)
    if constraints is not None:
        plan = sl.tune(work, trials=args.trials, constraints=constraints, seed=args.seed).plan
        equivalence, speedup = plan.equivalence, time_against_native(task, args, plan)
        model, optimizer = sl.apply(plan, model, optimizer)
    losses = [work.train(model, optimizer, batch).item() for _ in range(args.epochs) for batch in task.train]
    return Run(name, equivalence, losses, auc(model, task.test), speedup)


def time_against_native(task: Task, args: argparse.Namespace, plan: Plan) -> Interval:
    """Real training steps, interleaved (A B B A), each side with its own weights and optimizer."""
    native, planned = task.workload(args), task.workload(args)
    model, optimizer = sl.apply(plan, planned.model, planned.optimizer)
    found = compare(Steps(lambda batch: native.train(native.model, native.optimizer, batch)),
                    Steps(lambda batch: planned.train(model, optimizer, batch)),
                    task.train, min_pairs=min(9, args.pairs), max_pairs=args.pairs)
    return found.speedup


def auc(model: torch.nn.Module, batches: Sequence[Batch]) -> float:
    """Area under the ROC curve."""
    with torch.no_grad():
        scores = torch.cat([model(batch.dense, batch.offsets, batch.indices) for batch in batches])
    return float(roc_auc_score(torch.cat([batch.labels for batch in batches]), scores))


def write(path: Path, runs: Sequence[Run]) -> None:
    """One line a run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "equivalence", "first_loss", "last_loss", "auc", "speedup", "low", "high"])
        writer.writerows([each.name, each.equivalence, each.losses[0], each.losses[-1], each.auc, each.speedup.value,
                          each.speedup.low, each.speedup.high] for each in runs)


