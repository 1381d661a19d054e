"""From a recording to the structure: features with their input paths, and concats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparselift.ir import Concat, Feature, InputPath, Interaction, Refusal, Table
from sparselift.lift.modules import EmbeddingModule
from sparselift.lift.paths import holds
from sparselift.lift.record import Key, Parts, Recording, Scope


def find_features(recording: Recording, modules: Mapping[str, EmbeddingModule], tables: Mapping[Tensor, Table],
                  notes: dict[str, str]) -> dict[Key, Feature]:
    """The lookups of these modules. Adds to `notes`, by feature, why one cannot run before the forward."""
    roots = [scope for scope in recording.scopes if scope.args is not None]
    features: dict[Key, Feature] = {}
    for key in recording.keys:
        path, call = key
        if path not in modules:
            continue
        module, (_, lookup) = modules[path], next(recording.seen(key))
        name = (path or "root") + (f"#{call}" if call else "")
        everywhere = all(key in scope.lookups for scope in roots) and all(scope.args is not None for scope, _ in recording.seen(key))
        found: dict[str, InputPath | None] = {"ids": None, "offsets": None, "weights": None}
        if everywhere and recording.inputs is not None:
            for what in found:
                tensor = getattr(lookup, what)
                candidates = recording.inputs.find(tensor) if tensor is not None else ()
                found[what] = next((each for each in candidates if _always_holds(each, recording, key, what)), None)
        feature = Feature(
            name=name, module=path, call=call, table=tables[module.weight].name, pooling=getattr(module, "mode", "none"),
            padding_idx=module.padding_idx, include_last_offset=bool(getattr(module, "include_last_offset", False)),
            form=form(module, lookup.offsets), weighted=lookup.weights is not None, index_dtype=_name(lookup.ids.dtype),
            indices=found["ids"], offsets=found["offsets"], weights=found["weights"])
        features[key] = feature
        if not feature.from_inputs:
            notes[name] = "is looked up where it stands: " + (_why(feature) if everywhere else "not every forward of the model calls it")
    return features


def _always_holds(path: InputPath, recording: Recording, key: Key, what: str) -> bool:
    return all(holds(path, scope.args or (), scope.kwargs, getattr(lookup, what)) for scope, lookup in recording.seen(key))


def find_in_batch(recording: Recording, features: Mapping[Key, Feature],
                  arguments: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> tuple[str, ...]:
    """Features whose tensors are found at their paths in what the workload says that a forward gets, (args, kwargs) a batch, too."""
    def is_given(key: Key, what: str, path: InputPath) -> bool:
        return all(holds(path, *arguments[scope.step], getattr(lookup, what)) for scope, lookup in recording.seen(key))

    return tuple(feature.name for key, feature in features.items() if feature.from_inputs and all(
        is_given(key, what, path) for what, path in (("ids", feature.indices), ("offsets", feature.offsets), ("weights", feature.weights))
        if path is not None))


def _why(feature: Feature) -> str:
    missing = [what for what, path, needed in (
        ("ids", feature.indices, True), ("offsets", feature.offsets, feature.form == "offsets"),
        ("per-sample weights", feature.weights, feature.weighted)) if needed and path is None]
    return f"its {' and '.join(missing)} are no argument of the model's forward, or not the same one in every batch"


def form(module: nn.Module, offsets: object) -> str:
    """How the ids of a call make bags; see ir.Feature.form."""
    return "ids" if isinstance(module, nn.Embedding) else "matrix" if offsets is None else "offsets"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_unfit(recording: Recording, modules: Mapping[str, EmbeddingModule]) -> list[Refusal]:
    """Modules that the steps did not call, called in different ways, or whose weight something else reads."""
    refusals: dict[str, Refusal] = {}
    called = {path for path, _ in recording.keys}
    for path, module in modules.items():
        if path not in called:
            refusals[path] = Refusal(path, "was not called in the recorded steps", "a step that calls it")
        elif module.weight in recording.weight_uses:
            refusals[path] = Refusal(path, f"its weight is read by {recording.weight_uses[module.weight]} as well, outside of its lookups",
                                     "read it through the module alone")
    for key in recording.keys:
        ways = {f"{form(modules[key[0]], lookup.offsets)} of {_name(lookup.ids.dtype)}" + (
            " with per-sample weights" if lookup.weights is not None else "") for _, lookup in recording.seen(key)}
        if len(ways) > 1:
            seen = " and ".join(sorted(ways))
            refusals.setdefault(key[0], Refusal(key[0], f"was called in different ways: {seen}", "call it in one way"))
    return list(refusals.values())


def find_concats(recording: Recording, features: Mapping[Key, Feature], hooked: frozenset[str]) -> tuple[Concat, ...]:
    """The concats that every forward has, of pooled lookups that can run before it and whose outputs no hook sees."""
    roots: list[Scope] = [scope for scope in recording.scopes if scope.args is not None]
    concats: list[Concat] = []
    for joined in roots[0].concats if roots else ():
        lookups = [features.get(part) for part in joined.parts if isinstance(part, tuple)]
        fit = all(each is not None and each.from_inputs and each.pooling != "none" and each.module not in hooked for each in lookups)
        if fit and all(joined in scope.concats for scope in roots):
            concats.append(Concat(_numbered("concat", len(concats)), _named_parts(joined.parts, features), joined.dtype))
    return tuple(concats)


def find_interactions(recording: Recording, features: Mapping[Key, Feature], concats: Sequence[Concat]) -> tuple[Interaction, ...]:
    """The interactions of these concats that every forward has, one a concat."""
    roots = [scope for scope in recording.scopes if scope.args is not None]
    names: dict[tuple[str | int, ...], str] = {}
    for concat in reversed(concats):
        names[concat.parts] = concat.name
    found: list[Interaction] = []
    for parts, each in roots[0].interactions if roots else ():
        lifted = all(part in features for part in parts if isinstance(part, tuple))
        name = names.pop(_named_parts(parts, features), None) if lifted else None
        there = all(any(parts == other and each[1:] == seen[1:] for other, seen in scope.interactions) for scope in roots)
        if name is not None and there and not isinstance(parts[each.passed], tuple):
            found.append(Interaction(_numbered("interaction", len(found)), name, each.passed, each.order, each.diagonal))
    return tuple(found)


def _named_parts(parts: Parts, features: Mapping[Key, Feature]) -> tuple[str | int, ...]:
    return tuple(features[part].name if isinstance(part, tuple) else part for part in parts)


def _numbered(kind: str, number: int) -> str:
    return f"{kind}#{number}" if number else kind
