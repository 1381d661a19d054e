"""Other implementations of the training step, in the shared benchmark's adapters: what they run is theirs, what they start from is ours."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from cases import Case
from torch import Tensor, nn

PEERS = ("fbgemm", "torchrec")


class PeerSide:
    """One peer in training, with its own weights, equal at the start to those of the case's other sides."""

    def __init__(self, case: Case, name: str) -> None:
        """Raises ImportError or OSError where the peer is not installed, NotImplementedError where it lacks the optimizer."""
        self.case, self.name = case, name
        weights = _weights(case)
        self.peer = _build(case, name, weights)
        self.model = SimpleNamespace(emb_l=[SimpleNamespace(weight=table) for table in weights.tables])
        self.output_grad = case.output_grad

    def step(self, number: int, scale: float = 1.0) -> Tensor:
        """As Side.step."""
        batch = self.case.batches[number]
        output = self.peer.forward(batch)
        self.peer.backward(output, torch.tensor(scale) if self.output_grad is None else self.output_grad)
        self.peer.step()
        return output


def peer_sides(case: Case, names: Sequence[str]) -> Iterator[PeerSide]:
    """The peers that can run here; of the others it is said, once, why not."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)      # its planner is talkative
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                side = PeerSide(case, name)
        except NotImplementedError as reason:
            _say(f"skipped {name}/{case.optimizer}: {reason}")
        except (ImportError, OSError) as reason:               # OSError: a shared library that does not load
            _say(f"skipped {name}: not installed ({str(reason).splitlines()[0]})")
        else:
            yield side


@cache
def _say(message: str) -> None:
    print(message, file=sys.stderr)


def release() -> None:
    """End the process group of one that TorchRec runs in."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _weights(case: Case) -> Any:
    """The case's tables back to back, as the peers keep them."""
    matrix = torch.cat([bag.weight.detach() for bag in case.side(planned=False).model.emb_l])
    return case.bench.workloads.SharedWeights(matrix.view(-1), matrix, list(matrix.split(case.shape.rows)))


def _build(case: Case, name: str, weights: Any) -> Any:
    peers = case.bench.implementations
    if not case.shape.dlrm:
        return {"fbgemm": peers.FbgemmPeer, "torchrec": peers.TorchRecPeer}[name](case.shape, weights, case.optimizer)
    if name == "torchrec":                                     # its own whole model
        peer = peers.TorchRecDlrmPeer(case.shape, weights, case.optimizer, case.seed)
        dense = peer.module
    else:
        peer = peers.DlrmPeer(case.shape, case.seed, peers.FbgemmPeer(case.shape, weights, case.optimizer))
        dense = peer.dense
    start = case.side(planned=False).model
    for theirs, own in zip(_linears(dense), _linears(start), strict=True):
        theirs.load_state_dict(own.state_dict())
    return peer


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [each for each in module.modules() if isinstance(each, nn.Linear)]
