"""What every backend refuses, in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from sparselift.dtypes import dtype_name, torch_dtype
from sparselift.errors import DtypeError

from .base import (
    COALESCE_METHODS,
    PARTITIONS,
    POOLINGS,
    STORES,
    UPDATE_RULES,
    WEIGHT_DTYPES,
    BagProgram,
    FeatureSpec,
    IndexBatch,
    Segment,
    State,
    TableSpec,
    UpdateRule,
    state_shapes,
)

MAX_ROWS = MAX_LOOKUPS = 2**31 - 1     # ids and positions are kept as int32
INDEX_DTYPES = (torch.int32, torch.int64)
CPU = torch.device("cpu")              # where tensors must be, unless a backend says otherwise


def check_specs(tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> None:
    """Raises ValueError for a spec that no backend implements, naming it."""
    for table in tables:
        where = f"table {table.name!r}"
        if not 1 <= table.rows <= MAX_ROWS:
            raise ValueError(f"{where}: rows must be in 1..{MAX_ROWS}; got {table.rows}")
        if table.dim < 1:
            raise ValueError(f"{where}: dim must be at least 1; got {table.dim}")
        _one_of(where, "weights", table.dtype, WEIGHT_DTYPES)
        _one_of(where, "coalesce", table.knobs.coalesce, COALESCE_METHODS)
        if table.knobs.coalesce == "none" and table.dtype != "float32":
            raise ValueError(f"{where}: coalesce='none' rounds weights once a lookup and is for float32 alone; got {table.dtype}")
        _one_of(where, "partition", table.knobs.partition, PARTITIONS)
        _one_of(where, "stores", table.knobs.stores, STORES)
        if table.knobs.prefetch < 0:
            raise ValueError(f"{where}: prefetch must not be negative; got {table.knobs.prefetch}")
    for feature in features:
        _check_feature(feature, tables)


def _check_feature(feature: FeatureSpec, tables: Sequence[TableSpec]) -> None:
    where = f"feature {feature.name!r}"
    if not 0 <= feature.table < len(tables):
        raise ValueError(f"{where}: table must be a position among the {len(tables)} tables; got {feature.table}")
    _one_of(where, "pooling", feature.pooling, POOLINGS)
    if feature.column < 0:
        raise ValueError(f"{where}: column must not be negative; got {feature.column}")
    rows = tables[feature.table].rows
    if feature.padding_idx is not None and not 0 <= feature.padding_idx < rows:
        raise ValueError(f"{where}: padding_idx must be in 0..{rows - 1}; got {feature.padding_idx}")
    if feature.weighted and feature.pooling != "sum":
        raise ValueError(f"{where}: per-sample weights need pooling 'sum'; got {feature.pooling!r}")


def _one_of(where: str, what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{where}: {what} must be one of {', '.join(choices)}; got {value!r}")


def check_rules(program: BagProgram, states: Sequence[State], rules: Sequence[UpdateRule | None], *, device: torch.device = CPU) -> None:
    """Raises ValueError or TypeError for a rule without the state it needs, or that its table's knobs exclude."""
    count = len(program.tables)
    if len(rules) != count or len(states) != count:
        raise ValueError(f"rules and states must have one entry a table ({count}); got {len(rules)} and {len(states)}")
    for table, state, rule in zip(program.tables, states, rules):
        if rule is None:
            continue
        check_rule(table, rule)
        shapes = state_shapes(rule.kind, table.rows, table.dim)
        given = state if isinstance(state, tuple) else () if state is None else (state,)
        if shapes and len(given) != len(shapes):
            wanted = f"a state of shape {shapes[0]}" if len(shapes) == 1 else f"states of shapes {' and '.join(map(str, shapes))}"
            raise ValueError(f"table {table.name!r}: {rule.kind} needs {wanted}; got {len(given) or None}")
        for tensor, shape in zip(given, shapes):
            check_dense(f"state of table {table.name!r}", tensor, shape, device=device)


def check_rule(table: TableSpec, rule: UpdateRule) -> None:
    """Raises ValueError for a rule that does not exist, or that the table's knobs exclude."""
    where = f"table {table.name!r}"
    _one_of(where, "the update rule", rule.kind, UPDATE_RULES)
    if table.knobs.coalesce == "none" and rule.kind != "sgd":
        raise ValueError(f"{where}: coalesce='none' allows sgd alone; got {rule.kind}")
    if rule.weight_decay and rule.kind != "rowwise_adagrad":
        raise ValueError(f"{where}: weight decay is defined for rowwise_adagrad alone; got {rule.weight_decay} with {rule.kind}")
    if rule.noise_key is not None and table.dtype == "float32":
        raise ValueError(f"{where}: rounding by chance is for {' and '.join(WEIGHT_DTYPES[1:])} weights; got a noise_key for float32")
    if rule.noise_key is not None and not 0 <= rule.noise_key < 2**64:
        raise ValueError(f"{where}: noise_key must be in 0..2**64 - 1; got {rule.noise_key}")
    if not all(0 <= beta < 1 for beta in rule.betas):
        raise ValueError(f"{where}: betas must be at least 0 and below 1; got {rule.betas}")


def check_max(spec: FeatureSpec) -> None:
    """Raises ValueError unless the feature's pooling is "max"."""
    if spec.pooling != "max":
        raise ValueError(f"feature {spec.name!r}: pooling {spec.pooling!r} has no maxima")


def check_dense(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *,
                device: torch.device = CPU) -> None:
    """Raises unless `tensor` is a contiguous tensor of `shape` and `dtype` on the device."""
    check_kind(what, tensor, (dtype,), device=device)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{what} must have shape {shape}; got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous; got strides {tensor.stride()}")


def check_tables(program: BagProgram, tables: Sequence[Any], rules: Sequence[UpdateRule | None] | None = None, *,
                 device: torch.device = CPU) -> None:
    """Raises unless `tables` are the program's weights; with `rules`, only those that have one."""
    check_count("tables", "table", len(tables), len(program.tables))
    for position, (spec, tensor) in enumerate(zip(program.tables, tables)):
        if rules is None or rules[position] is not None:
            check_dense(f"weight of table {spec.name!r}", tensor, (spec.rows, spec.dim), torch_dtype(spec.dtype), device=device)


def check_whole(what: str, value: object) -> None:
    """Raises TypeError unless `value` is a whole number, not true or false."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{what} must be a whole number; got {value!r}")


def check_instance(what: str, value: object, kind: type) -> None:
    """Raises TypeError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be a {kind.__name__}; got {type(value).__name__}")


def check_count(what: str, unit: str, got: int, wanted: int) -> None:
    """Raises ValueError unless there is one entry a unit."""
    if got != wanted:
        raise ValueError(f"{what} must have one entry a {unit} ({wanted}); got {got}")


def split_columns(what: str, program: BagProgram, batch: IndexBatch, shared: Tensor) -> list[Tensor]:
    """The (B, D) columns of every feature in one (B, width) buffer."""
    if shared.dim() != 2 or any(bags != shared.shape[0] for bags in batch.num_bags):
        raise ValueError(f"{what} must be (B, width) with the B of every feature; got {tuple(shared.shape)} "
                         f"for {sorted(set(batch.num_bags))} bags")
    end = 0
    for spec in sorted(program.features, key=lambda feature: feature.column):
        if spec.column < end:
            raise ValueError(f"feature {spec.name!r}: column {spec.column} lies in another feature's columns; they end at {end}")
        end = spec.column + program.tables[spec.table].dim
    if end > shared.shape[1]:
        raise ValueError(f"{what} must have at least {end} columns; got {shared.shape[1]}")
    return [shared[:, spec.column:spec.column + program.tables[spec.table].dim] for spec in program.features]


def feature_outputs(program: BagProgram, batch: IndexBatch, out: Tensor | Sequence[Tensor], *,
                    device: torch.device = CPU) -> list[Tensor]:
    """The (B, D) output of every feature. Raises unless float32 with last stride 1."""
    outputs = split_columns("the output", program, batch, out) if isinstance(out, Tensor) else list(out)
    check_count("outputs", "feature", len(outputs), len(program.features))
    for position, (spec, output) in enumerate(zip(program.features, outputs)):
        check_rows(f"output of feature {spec.name!r}", output, (batch.num_bags[position], program.tables[spec.table].dim), device=device)
        if output.shape[1] > 1 and output.stride(1) != 1:
            raise ValueError(f"output of feature {spec.name!r} must have last stride 1; got strides {output.stride()}")
    return outputs


def feature_grads(program: BagProgram, segment: Segment, *, device: torch.device = CPU) -> list[Tensor | None]:
    """The (B, D) gradient that arrived at every feature's output."""
    given = segment.grad
    grads: list[Tensor | None] = (list(split_columns("the gradient", program, segment.batch, given)) if isinstance(given, Tensor)
                                  else list(given))
    check_count("gradients", "feature", len(grads), len(program.features))
    if segment.scales is not None:
        check_count("scales", "table", len(segment.scales), len(program.tables))
    for position, (spec, grad) in enumerate(zip(program.features, grads)):
        if grad is not None:
            check_rows(f"gradient of feature {spec.name!r}", grad,
                       (segment.batch.num_bags[position], program.tables[spec.table].dim), device=device)
    return grads


def check_rows(what: str, tensor: Tensor, shape: tuple[int, int], *, device: torch.device = CPU) -> None:
    """Raises unless `tensor` is a float32 tensor of `shape` on the device."""
    check_kind(what, tensor, (torch.float32,), device=device)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{what} must have shape {shape}; got {tuple(tensor.shape)}")


def check_vector(feature: str, what: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], *, device: torch.device = CPU) -> None:
    """Raises unless `tensor` is a (K,) tensor of one of `dtypes` on the device."""
    check_kind(f"feature {feature!r}: {what}", tensor, dtypes, device=device)
    if tensor.dim() != 1:
        raise ValueError(f"feature {feature!r}: {what} must have one dimension; got shape {tuple(tensor.shape)}")


def check_kind(what: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], *, device: torch.device = CPU) -> None:
    """Raises TypeError unless `tensor` is an ordinary tensor of one of `dtypes` on the device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a tensor; got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise DtypeError(f"{what} must be {' or '.join(map(dtype_name, dtypes))}; got {dtype_name(tensor.dtype)}")
    if tensor.device != device:
        raise TypeError(f"{what} must be on {'the CPU' if device == CPU else device}; got {tensor.device}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} must be strided; got {tensor.layout}")


def check_lookup_count(where: str, count: int) -> None:
    """Raises ValueError where positions would not fit int32."""
    if count > MAX_LOOKUPS:
        raise ValueError(f"{where}: at most {MAX_LOOKUPS} ids a batch; got {count}")


def check_weights(spec: FeatureSpec, weights: Tensor | None, count: int, *, device: torch.device = CPU) -> None:
    """Raises unless per-sample weights are there exactly where the feature is weighted."""
    if spec.weighted != (weights is not None):
        raise ValueError(f"feature {spec.name!r}: per-sample weights are {'required' if spec.weighted else 'not expected'}")
    if weights is not None:
        check_vector(spec.name, "per-sample weights", weights, (torch.float32,), device=device)
        if len(weights) != count:
            raise ValueError(f"feature {spec.name!r}: {len(weights)} per-sample weights for {count} ids")


def check_bag_length(spec: FeatureSpec, length: int, count: int) -> None:
    """Raises ValueError unless `count` ids make bags of `length`."""
    if spec.pooling == "none" and length != 1:
        raise ValueError(f"feature {spec.name!r}: pooling 'none' has bags of 1; got {length}")
    if length < 1:
        raise ValueError(f"feature {spec.name!r}: a bag length must be at least 1; got {length}")
    if count % length:
        raise ValueError(f"feature {spec.name!r}: {count} ids do not make bags of {length}")


def check_offset_count(spec: FeatureSpec, num_offsets: int, count: int) -> None:
    """Raises ValueError for offsets that leave ids outside of all bags, and for pooling "none"."""
    if spec.pooling == "none":
        raise ValueError(f"feature {spec.name!r}: pooling 'none' takes 1 as offsets; got a tensor")
    if num_offsets == 0 and (spec.include_last_offset or count):
        raise ValueError(f"feature {spec.name!r}: no offsets for {count} ids")


def id_error(spec: FeatureSpec, table: TableSpec, position: int, value: int) -> IndexError:
    """An id that is no row."""
    return IndexError(f"feature {spec.name!r}: id {value} at position {position} is out of range for table "
                      f"{table.name!r} of {table.rows} rows")


def check_bounds(spec: FeatureSpec | None, bounds: Tensor, count: int) -> None:
    """Raises ValueError unless the (B + 1,) int64 bag boundaries start at 0, never decrease, and end at `count`."""
    previous = torch.cat([bounds.new_zeros(1), bounds[:-1]])
    wrong = (bounds < previous) | (bounds > count)
    wrong[0] |= bounds[0] != 0
    wrong[-1] |= bounds[-1] != count
    if wrong.any():
        position = int(wrong.nonzero()[0])
        raise offset_error(spec, position, int(bounds[position]), int(previous[position]), count)


def offset_error(spec: FeatureSpec | None, position: int, value: int, previous: int, count: int) -> ValueError:
    """The first wrong bag boundary, `previous` the one before it: of a feature, or of ids that belong to none."""
    where = "" if spec is None else f"feature {spec.name!r}: "
    if position == 0 and value != 0:
        return ValueError(f"{where}offsets must start at 0; got {value}")
    if value < previous:
        return ValueError(f"{where}offsets must not decrease; got {value} after {previous} at position {position}")
    if value > count:
        return ValueError(f"{where}offset {value} at position {position} passes the {count} ids")
    return ValueError(f"{where}the last offset must equal the number of ids ({count}); got {value}")
