"""torch.nn.functional's embedding functions, DLRM's interaction and regrouping over the kernels, and what sparselift.nn's modules share."""

from __future__ import annotations

import torch

from . import clipping as clipping  # registers what torch lacks for sparse gradients
from . import library as library  # registers the operators that compiled and exported graphs hold
from .interaction import dot_interaction
from .lookups import embedding, embedding_bag, last_path, look_up_bags, look_up_rows, look_up_tables
from .regroup import RegroupSpec, regroup
from .routes import Routes

__all__ = ["RegroupSpec", "dot_interaction", "embedding", "embedding_bag", "last_path", "regroup"]


def _leave_to_eager() -> None:
    """Keep torch.compile away from frames of the eager road. It meets them where it could not make a graph of the frame that calls them,
    and would make many small ones. A graph still reads into these functions; torch.compiler.disable would forbid that, and costs
    as much as a tiny lookup.
    """
    compiler = torch._C._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):
        skip = compiler._FrameAction.SKIP
        for function in (look_up_bags, look_up_rows, look_up_tables, Routes.__init__):
            compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))


_leave_to_eager()
