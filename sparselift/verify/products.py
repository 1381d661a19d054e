"""The interaction's part of the certificate: a forward's own steps over the kernel that a plan runs, against torch and float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sparselift.errors import EquivalenceError
from sparselift.ir import Structure
from sparselift.kernels.base import KernelBackend
from sparselift.kernels.interaction import InteractionSpec, interact
from sparselift.lift.nodes import interaction_spec
from sparselift.runtime.interaction import Crossing
from sparselift.schedule import Schedule

BATCH = 5
LARGEST = 4                        # of the integers: their products, summed over any number of columns below 2**20, are exact
U = 2.0 ** -24


def check_products_exact(structure: Structure, schedule: Schedule, backend: str | KernelBackend, seed: int) -> dict[str, int]:
    """On small integers: values compared bit for bit, by kind. Raises EquivalenceError with the first interaction that differs."""
    generator = torch.Generator().manual_seed(seed)
    counts: dict[str, int] = {}
    for crossing in crossings(structure, schedule, backend):
        spec = crossing.spec
        parts = [torch.randint(-LARGEST, LARGEST + 1, (BATCH, spec.dim), generator=generator).float() for _ in range(spec.num_vectors)]
        grad = torch.randint(-LARGEST, LARGEST + 1, (BATCH, spec.width), generator=generator).float()
        got, want = _followed(crossing, parts, grad), _in_torch(spec, parts, grad, torch.float32)
        for kind, mine, theirs in zip(("interaction", "interaction gradient"), got, want):
            if not torch.equal(mine, theirs):
                place = tuple((mine != theirs).nonzero()[0].tolist())
                raise EquivalenceError(f"{kind} {crossing.name} differs: at {list(place)} planned has {mine[place].item():.9g}, native "
                                       f"{theirs[place].item():.9g}")
            counts[kind] = counts.get(kind, 0) + mine.numel()
    return counts


def check_products_real(structure: Structure, schedule: Schedule, backend: str | KernelBackend,
                        lookups: Mapping[str, Tensor]) -> dict[str, float]:
    """On pooled rows of a real step, `lookups` by feature: the largest share of its rounding bound that a value used.

    A dot product of D terms is within (D + 2) u of the sum of its absolute terms; a gradient sums V and the dense vector's own.
    Raises EquivalenceError above the bound.
    """
    worst: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for crossing in crossings(structure, schedule, backend):
        spec, concat = crossing.spec, next(each for each in structure.concats if each.name == _concat_of(structure, crossing))
        first = lookups.get(concat.features[0])
        if first is None:
            continue
        spread = first.float().std(correction=0)
        parts = [lookups[part].float() if isinstance(part, str) else torch.randn(first.shape, generator=generator) * spread
                 for part in concat.parts]
        grad = torch.randn(len(first), spec.width, generator=generator)
        got, want = _followed(crossing, parts, grad), _in_torch(spec, parts, grad, torch.float64)
        sizes = _in_torch(spec, [part.abs() for part in parts], grad.abs(), torch.float64)
        for mine, exact, size, terms in zip(got, want, sizes, (spec.dim + 2, spec.num_vectors + 3)):
            share = (mine.double() - exact).abs() / (terms * U * size + torch.finfo(torch.float32).tiny)
            found = float(share.nan_to_num(nan=float("inf")).max()) if share.numel() else 0.0
            if found > 1:
                raise EquivalenceError(f"{crossing.name}: planned differs from float64 by {found:.3g} times the rounding bound")
            worst["interactions"] = max(worst.get("interactions", 0.0), found, 1e-9)
    return worst


def crossings(structure: Structure, schedule: Schedule, backend: str | KernelBackend) -> Iterator[Crossing]:
    """The interactions that a schedule fuses."""
    wanted = {group.interaction for group in schedule.groups}
    for each in structure.interactions:
        if each.name in wanted:
            yield Crossing(each.name, interaction_spec(structure, each), backend)


def _concat_of(structure: Structure, crossing: Crossing) -> str:
    return next(each.concat for each in structure.interactions if each.name == crossing.name)


def _followed(crossing: Crossing, parts: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and gradients side by side, by a forward's own steps. Raises EquivalenceError where they do not lead to the kernel."""
    spec, given = crossing.spec, [part.detach().clone().requires_grad_() for part in parts]
    rows, columns = spec.pairs()
    with torch.enable_grad():
        vectors = crossing.start(torch.cat(given, dim=1), given).view(len(given[0]), spec.num_vectors, spec.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        out = torch.cat([given[spec.passed or 0], products[:, rows, columns]], dim=1)
    if crossing.calls != 1:
        raise EquivalenceError(f"{crossing.name}: its own steps do not lead to its kernel")
    return out.detach(), torch.cat(torch.autograd.grad(out, given, grad), dim=1)


def _in_torch(spec: InteractionSpec, parts: Sequence[Tensor], grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    given = torch.stack([part.detach().to(dtype) for part in parts], dim=1).requires_grad_()
    with torch.enable_grad():
        out = interact(given, spec)
    return out.detach(), torch.autograd.grad(out, given, grad.to(dtype))[0].flatten(1)
