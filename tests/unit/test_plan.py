"""Plan files: written whole, read strictly, editable by hand, compared field by field."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselift.errors import PlanError, PlanMismatchError
from sparselift.ir import Concat
from sparselift.plan import SCHEMA, Evidence, Interval, Plan, TrialRecord, check_fits, compare, default_plan, diff, explain
from sparselift.rewrites import Value
from sparselift.space import Config, Constraints, SearchSpace
from tests.unit.example_graphs import ADAGRAD, MOMENTUM, batch_sketch, feature, graph, on_cuda, small_graph, table

BIG = "d16-sum-to2M-few-dup"
HARDWARE = {"cpu": "Example 9000", "cores": 2, "torch_version": "2.13.0"}


def plan(**changes: Any) -> Plan:
    return replace(default_plan(small_graph(), hardware=HARDWARE), **changes)


def measured(g: Any = None) -> Plan:
    """A plan with a few trials, as a search would leave it."""
    space = SearchSpace(g or small_graph())
    trials = [TrialRecord(0, "native", {"path": "native"}, "complete", 1.0, 0.0412, 1.0, 1.0),
              TrialRecord(1, "default", space.to_params(space.default), "complete", 1.5, 0.0275, 1.48, 1.52)]
    for number, (label, config) in enumerate(space.toggles(), 2):
        state = "pruned" if label == "partition=table" else "failed" if label == "dedup=True" else "complete"
        done = state == "complete"
        trials.append(TrialRecord(number, label, space.to_params(config), state, 1.25 if done else None, 0.033 if done else None,
                                  1.2 if done else None, 1.3 if done else None, "" if done else f"{label} went wrong"))
    evidence = Evidence("measured", Interval(0.0412, 0.041, 0.0414), Interval(0.0275, 0.0273, 0.0277), Interval(0.028, 0.0278, 0.0282),
                        Interval(1.498, 1.48, 1.516), tuple(trials), {"dense": 1 / 3}, {}, {"wall_s": 12.0}, "plan.study", "fastest of 10")
    return plan(evidence=evidence, certificate={"kernels": "reference", "steps": 3})


# files


def test_a_plan_survives_a_round_trip(tmp_path: Path) -> None:
    for original in (plan(), measured(), plan(config=Config.native()), default_plan(small_graph(ADAGRAD, uses=("clip",)))):
        original.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == original and hash(loaded) == hash(original)
        assert not loaded.edited
        loaded.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_config_survives_a_round_trip(data: Any) -> None:
    g = small_graph()
    space = SearchSpace(g)
    params: dict[str, Value] = {}
    for dimension in space.dimensions:
        if dimension.active(params):
            params[dimension.name] = data.draw(st.sampled_from(dimension.choices))
    original = plan(config=space.from_params(params))
    assert Plan.from_dict(json.loads(json.dumps(original.to_dict()))) == original


def test_plans_can_be_copied_and_pickled() -> None:
    original = measured()
    assert copy.deepcopy(original) == original
    assert pickle.loads(pickle.dumps(original)) == original


def test_plans_that_choose_the_same_differ_in_evidence_only() -> None:
    a, b = plan().to_dict(), measured().to_dict()
    assert {name for name in a if a[name] != b[name]} == {"evidence", "certificate", "checksum"}


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere/plan\.json"):
        plan().save(tmp_path / "nowhere" / "plan.json")


@pytest.mark.parametrize(("content", "message"), [
    (b"", "not JSON: Expecting value, line 1 column 1"),
    (b'{"schema": 1,', "not JSON: .*line 1 column 14"),
    (b"\xff\xfe", "not UTF-8 text"),
    (b"[1, 2]", r"plan must be an object with the fields .*got \[1, 2\]"),
    (b'{"schema": 2}', f"schema 2 is unknown; this version reads {SCHEMA}"),
    (b'{"schema": 1}', "plan lacks the field 'workload', lacks the field 'structure'"),
    (b'{"a": 1, "a": 2}', r"the fields \['a'\] are given twice"),
    (b'{"a": NaN}', "NaN is no JSON number"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"certificate": ' * 900 + b"1" + b"}" * 900, "nested too deeply|lacks the field"),
    (b'{"schema": ' + b"9" * 6000 + b"}", "'schema' holds a whole number of 6000 digits"),
    (b'{"keys": [[1, 9223372036854775808]]}', "'keys' holds a whole number of 19 digits"),
])
def test_what_is_no_plan_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "plan.json")


def edit(document: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = copy.deepcopy(document)
    change(document)
    return document


def chained(d: dict[str, Any]) -> None:
    """Another order of sums for the big table."""
    d["config"]["classes"][2]["knobs"].update(coalesce="chain")


PRODUCTS = {"name": "products", "concat": "cat", "passed": 0, "order": "lower", "diagonal": False}


def interacting(d: dict[str, Any], **changes: Any) -> None:
    """An interaction of parts that fit."""
    d["structure"]["concats"][0]["parts"][0] = 16
    d["structure"]["interactions"].append({**PRODUCTS, **changes})


ILLEGAL: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("batch_size"), "plan lacks the field 'batch_size'"),
    (lambda d: d.update(speed=3), "plan has the unknown field 'speed'"),
    (lambda d: d.update(batch_size="64"), "batch_size must be a whole number; got '64'"),
    (lambda d: d.update(workload=None), "workload must be a string; got None"),
    (lambda d: d.update(hardware=[]), r"hardware must be an object; got \[\]"),
    (lambda d: d.update(certificate=3), "certificate must be an object or null; got 3"),
    (lambda d: d["config"].pop("policy"), "config lacks the field 'policy'"),
    (lambda d: d["config"].update(path="fast"), "path must be one of .*got 'fast'"),
    (lambda d: d["config"]["policy"].update(group_by="most"), r"policy: group_by must be one of \['none', 'class', 'all'\]; got 'most'"),
    (lambda d: d["config"]["policy"].update(depth=3), "policy: unknown knob 'depth'"),
    (lambda d: d["config"]["classes"][2]["knobs"].update(prefetch=5), f"class {BIG}: prefetch must be one of .*; got 5"),
    (lambda d: d["config"]["classes"][2]["knobs"].update(prefetch=None), "prefetch must be a string or a whole number or true or false"),
    (lambda d: d["config"]["classes"][0]["knobs"].update(huge_pages="madvise"), "huge_pages='madvise' is illegal: the largest table"),
    (lambda d: d["config"]["classes"][0]["tables"].append("big.weight"), "table 'big.weight' is in two classes"),
    (lambda d: d["config"]["classes"][0]["tables"].clear(), "table 'bags.1.weight' is in no class"),
    (lambda d: d["config"]["classes"][0]["tables"].append("new"), "there is no table 'new'"),
    (lambda d: d["structure"]["tables"][0].update(rows="many"), r"structure.tables\[0\].rows must be a whole number; got 'many'"),
    (lambda d: d["structure"]["tables"][0].update(rows=0), "bags.0.weight must have rows and dim of at least 1; got 0"),
    (lambda d: d["structure"]["tables"][0].pop("dim"), r"structure.tables\[0\] lacks the field 'dim'"),
    (lambda d: d["structure"]["features"][0].update(table="gone"), "bags.0 looks into 'gone', which is no table"),
    (lambda d: d["structure"]["features"][0].update(pooling="min"), "pooling must be one of .*; got 'min'"),
    (lambda d: d["structure"]["features"][0].update(indices={"keys": [1.5], "select": None}), r"structure.features\[0\].indices.keys\[0\]"),
    (lambda d: d["structure"]["concats"][0]["parts"].append("gone"), r"cat joins \['gone'\], which are no features"),
    (lambda d: d["structure"]["concats"][0]["parts"].append(2**63 - 1), "cat: parts must hold .*; got 9223372036854775807"),
    (lambda d: d["structure"]["concats"][0]["parts"].append(-1), "cat: parts must hold .*; got -1"),
    (lambda d: d["structure"]["interactions"].append({**PRODUCTS, "concat": "gone"}), "products multiplies the parts of 'gone'"),
    (lambda d: d["structure"]["interactions"].append(PRODUCTS), r"products: the parts of cat must have one .*; got \[8, 16\]"),
    (lambda d: d["structure"]["linears"].append({"name": "top", "in_features": 0, "out_features": 1, "relu": False}),
     "top: in_features and out_features must be between 1 and .*; got 0 and 1"),
    (lambda d: interacting(d, passed=1), "products: passed must be the place of a part of cat that is no lookup; got 1"),
    (lambda d: interacting(d, passed=3), "products: passed must be .*; got 3"),
    (lambda d: interacting(d, order="both"), r"products: order must be one of \['lower', 'upper'\]; got 'both'"),
    (lambda d: d["structure"]["tables"][0].update(dtype="flo032"), "bags.0.weight: dtype must be one of .*; got 'flo032'"),
    (lambda d: d["structure"]["tables"][0].update(rows=2**62), "bags.0.weight: rows and dim must make a table of at most"),
    (lambda d: d["structure"]["tables"][0]["optimizer"].update(index=1), "optimizer.index must name one of 1 optimizers; got 1"),
    (lambda d: d["structure"]["features"][0].update(form="bag"), "bags.0: form must be one of .*; got 'bag'"),
    (lambda d: d["structure"]["features"][0].update(index_dtype="int16"), "bags.0: index_dtype must be one of .*; got 'int16'"),
    (lambda d: d["structure"]["features"][0].update(padding_idx=100), r"bags.0: padding_idx must be null or in \[0, 100\); got 100"),
    (lambda d: d["structure"]["features"][0].update(indices={"keys": [], "select": None}), "indices.keys must begin with 'args'"),
    (lambda d: d["structure"].update(uses=["magic"]), r"structure.uses may hold .*; got \['magic'\]"),
    (lambda d: d["structure"].update(device="tpu"), r"structure.device must be one of \['cpu', 'cuda'\]; got 'tpu'"),
    (lambda d: d["structure"].update(device="cuda"), f"class {BIG}: prefetch=64 is illegal: prefetch is for tables on cpu, and these are"),
    (lambda d: d["config"]["policy"].update(block_threads=64), "block_threads=64, .* is illegal: kernel_shape is for tables on cuda"),
    (lambda d: d["config"]["policy"].update(block_threads=256), r"block_threads must be one of \['auto', 64, 128, 512\]; got 256"),
    (lambda d: d["structure"].update(world_size=0), "structure.world_size must be at least 1; got 0"),
    (lambda d: d["sketches"]["big"]["unique_curve"][-1].__setitem__(1, 0), "sketches.big: .*'unique_curve' .*at least 1"),
    (lambda d: d["sketches"]["big"].update(bags=-1), "sketches.big: .*'bags' must hold counts; got -1"),
    (lambda d: d["evidence"].update(native={"value": 0, "low": 0, "high": 0}), "evidence.native must be above 0"),
    (lambda d: d["structure"]["tables"].append(d["structure"]["tables"][0]), "structure.tables names .* twice"),
    (lambda d: d["sketches"].update(big=3), "sketches.big must be an object; got 3"),
    (lambda d: d["sketches"]["big"].update(bags="x"), "sketches.big: .*'bags' must hold integers"),
    (lambda d: d["evidence"].update(status="fast"), "evidence.status must be one of"),
    (lambda d: d["evidence"].update(native=3.5), "evidence.native must be an object"),
    (lambda d: d["constraints"].update(equivalence="exact"), "equivalence must be one of .*got 'exact'"),
    (lambda d: d["constraints"].update(deny=["dedup", "x"]), r"deny names unknown rewrites \['x'\]"),
    (lambda d: d["constraints"].update(deny=["fuse_update"]), f"{BIG}: fuse_update is denied"),
    (lambda d: (chained(d), d["constraints"].update(equivalence="bitwise")), "equivalence='bitwise' is demanded, and this is reassociated"),
    (lambda d: d["constraints"].update(pin={"path": "native"}), "path is pinned to 'native'"),
    (chained, "equivalence says 'bitwise', but this config is 'reassociated'"),
]


@pytest.mark.parametrize(("change", "message"), ILLEGAL, ids=[message[:40] for _, message in ILLEGAL])
def test_a_plan_edited_into_something_illegal_is_refused_with_the_reason(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(edit(plan().to_dict(), change))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in a document."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(item, (*path, key))


def test_a_plan_with_any_one_value_replaced_is_refused_or_can_be_shown() -> None:
    original = measured()
    document = original.to_dict()
    document["evidence"]["trials"] = document["evidence"]["trials"][:2]
    for path in leaves(document):
        for value in (None, "x", [], {}, -1, 0, 99, 1e308, 10**400):
            changed = copy.deepcopy(document)
            place: Any = changed
            for key in path[:-1]:
                place = place[key]
            if path:
                place[path[-1]] = value
            try:
                read = Plan.from_dict(changed if path else value)
            except PlanError:
                continue
            str(read), explain(read), diff(original, read), compare(read, original.structure, 1, original.sketches, HARDWARE)


def test_a_plan_edited_into_something_legal_is_read_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    path.write_text(path.read_text().replace('"prefetch": 64', '"prefetch": 32'))
    loaded = Plan.load(path)
    assert {each.knobs["prefetch"] for each in loaded.config.classes} == {32}
    assert loaded.edited and "edited by hand" in str(loaded)
    assert [(each.field, each.grade) for each in compare(loaded)] == [("checksum", "note")]
    loaded.save(path)
    assert not Plan.load(path).edited


def test_a_reformatted_plan_is_not_edited(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan().to_dict()))
    assert not Plan.load(path).edited


def test_a_plan_in_memory_is_checked_too() -> None:
    with pytest.raises(PlanError, match="is in no class"):
        plan(config=replace(plan().config, classes=()))


# default plans


def test_the_default_plan_is_unmeasured_and_says_so() -> None:
    found = default_plan(small_graph())
    assert found.evidence.status == "unmeasured" and "unmeasured" in str(found)
    assert found.config == SearchSpace(small_graph()).default
    blocked = default_plan(small_graph(sparse=False), Constraints(equivalence="bitwise"))
    assert blocked.config.path == "native"
    assert "no planned config is feasible" in blocked.evidence.note and "bitwise" in blocked.evidence.note


def test_evidence_checks_its_words() -> None:
    with pytest.raises(ValueError, match="got 'done'"):
        TrialRecord(0, "native", {}, "done")
    with pytest.raises(ValueError, match="got 'tuned'"):
        Evidence("tuned")
    assert Interval(1 / 3, 0.3, 0.4).value == 0.333333333


# comparison


def fields(found: Any) -> set[tuple[str, str]]:
    return {(each.field, each.grade) for each in found}


def test_a_plan_fits_what_it_was_made_for() -> None:
    g = small_graph()
    assert compare(plan(), g.structure, g.batch_size, g.sketches, HARDWARE) == ()
    assert check_fits(plan(), structure=g.structure) == ()


def test_every_field_is_compared_and_graded() -> None:
    g = small_graph()
    other = small_graph(ADAGRAD, uses=("clip",))
    structure = replace(other.structure, world_size=2, concats=(Concat("cat", ("bags.0", "bags.1")),), tables=(
        replace(other.structure.tables[0], rows=101, sparse=False), *other.structure.tables[1:], table("new", 5)),
        features=(replace(other.structure.features[0], padding_idx=0), *other.structure.features[1:]))
    found = compare(plan(), structure, 128, {"big": batch_sketch(2_000_000, pooling=40), "bags.0": g.sketches["bags.0"]},
                    {**HARDWARE, "cores": 64, "torch_version": "2.14.0", "gpu": "none"})
    assert fields(found) == {
        ("world_size", "refuse"), ("optimizers", "refuse"), ("tables.bags.0.weight.rows", "refuse"),
        ("tables.bags.0.weight.sparse", "refuse"), ("tables.bags.0.weight.optimizer", "refuse"),
        ("tables.bags.1.weight.optimizer", "refuse"), ("tables.big.weight.optimizer", "refuse"), ("tables.new", "refuse"),
        ("features.bags.0.padding_idx", "refuse"), ("concats.cat.parts", "refuse"), ("uses", "re-check"), ("batch_size", "re-check"),
        ("sketches.big.pooling", "re-check"), ("hardware.cores", "re-check"), ("hardware.gpu", "re-check"),
        ("hardware.torch_version", "note"),
    }
    grades = [each.grade for each in found]
    assert grades == sorted(grades, key=["refuse", "re-check", "note"].index)


def test_the_reason_why_an_optimizer_is_not_fused_is_no_difference() -> None:
    g = small_graph(MOMENTUM)
    reworded = replace(MOMENTUM, reason="another wording")
    assert compare(default_plan(g), small_graph(reworded).structure) == ()


def test_a_plan_for_another_device_is_refused() -> None:
    there = on_cuda(small_graph())
    with pytest.raises(PlanMismatchError, match="does not fit: device: saved cuda, current cpu"):
        check_fits(default_plan(there), small_graph().structure)


def test_what_does_not_fit_is_refused_with_both_values() -> None:
    structure = small_graph().structure
    structure = replace(structure, tables=(replace(structure.tables[0], rows=101), *structure.tables[1:]))
    with pytest.raises(PlanMismatchError, match=r"does not fit: tables\.bags\.0\.weight\.rows: saved 100, current 101") as caught:
        check_fits(plan(), structure)
    assert caught.value.differences == (("tables.bags.0.weight.rows", 100, 101),)
    assert fields(check_fits(plan(), small_graph().structure, batch_size=1)) == {("batch_size", "re-check")}


def test_long_refusals_are_cut_but_none_is_lost() -> None:
    tables = [table(f"t{i}", 10) for i in range(50)]
    g = graph(tables, [feature(f"f{i}", f"t{i}") for i in range(50)])
    structure = replace(g.structure, tables=tuple(replace(t, dim=8) for t in g.structure.tables))
    with pytest.raises(PlanMismatchError, match="; and 45 more") as caught:
        check_fits(default_plan(g), structure)
    assert len(caught.value.differences) == 50


def test_a_plan_of_another_model_is_told_in_a_sentence() -> None:
    saved = graph([table(f"emb_l.{i}.weight", 10) for i in range(26)], [feature(f"f{i}", f"emb_l.{i}.weight") for i in range(26)])
    other = graph([table(f"tables.{i}.weight", 10, optimizer=ADAGRAD) for i in range(5)],
                  [feature(f"f{i}", f"tables.{i}.weight") for i in range(5)])
    message = (r"the plan for 'example' does not fit: it is made for another model: 26 tables: emb_l.\*; this one has 5 tables: tables.\*; "
               "optimizers: saved SGD, current Adagrad$")
    with pytest.raises(PlanMismatchError, match=message):
        check_fits(default_plan(saved), other.structure)
    gone = replace(saved.structure, tables=(), features=())
    with pytest.raises(PlanMismatchError, match=r"this one has 1 table: bag.weight$"):
        check_fits(default_plan(saved), gone, present=["bag.weight"])
    with pytest.raises(PlanMismatchError, match=r"this one has no tables$"):
        check_fits(default_plan(saved), gone)
    with pytest.raises(PlanMismatchError, match=r"tables.emb_l.1.weight: saved a table of 10 x 16, current nothing; ") as caught:
        check_fits(default_plan(saved), replace(saved.structure, tables=saved.structure.tables[:1], features=()))
    assert "Table(" not in str(caught.value) and "Feature(" not in str(caught.value)


def test_optimizers_in_another_order_are_told_so() -> None:
    saved = small_graph().structure
    second = replace(saved.tables[0].optimizer, index=1)
    mine = replace(default_plan(small_graph()), structure=replace(saved, optimizers=("SGD", "Adam")))
    swapped = replace(saved, optimizers=("Adam", "SGD"), tables=tuple(replace(t, optimizer=second) for t in saved.tables))
    with pytest.raises(PlanMismatchError, match=r"does not fit: the optimizers come in another order: saved SGD, Adam, current Adam, SGD$"):
        check_fits(mine, swapped)


def test_diff_sorts_by_what_a_difference_is_about() -> None:
    a = plan()
    assert diff(a, a) == ()
    assert fields(diff(a, measured())) == {(f"evidence.{name}", "evidence") for name in
                                           ("status", "native", "planned", "default", "speedup", "note", "study", "trials")}
    classes = tuple(replace(each, knobs={**each.knobs, "prefetch": 32, "coalesce": "chain"}) if each.name == BIG else each
                    for each in a.config.classes)
    b = replace(a, config=replace(a.config, classes=classes), constraints=Constraints(10**12), batch_size=32)
    assert fields(diff(a, b)) == {(f"{BIG}.prefetch", "choice"), (f"{BIG}.coalesce", "choice"), ("equivalence", "choice"),
                                  ("constraints.memory_bytes", "choice"), ("batch_size", "signature")}
    assert str(diff(a, b)[0]).startswith("choice: ")


def test_diff_goes_by_table_where_classes_differ() -> None:
    a = plan()
    first, second, big = a.config.classes
    joined = replace(first, name="small", tables=(*second.tables, *first.tables), knobs={**first.knobs, "partition": "table"})
    b = replace(a, config=replace(a.config, classes=(joined, big)))
    assert fields(diff(a, b)) == {("bags.0.weight.partition", "choice"), ("bags.1.weight.partition", "choice")}
    native = replace(a, config=Config.native())
    assert ("path", "choice") in fields(diff(a, native))


# words


def test_show_says_what_was_chosen_and_how_fast_it_is() -> None:
    text = str(measured())
    for part in ("plan for example: planned, bitwise, measured", "3 tables, 3 lookups, 2,000,300 rows, 122.1 MiB; batch 64; SGD",
                 "native step   41.2 ms [41, 41.4]", "planned step  27.5 ms", "default step  28 ms", "1.498x [1.480, 1.516] over native",
                 "9 complete, 1 failed, 1 pruned", "policy  group_by=all  concat=True", f"{BIG}  (1 table, 2,000,000 rows, 122.1 MiB)",
                 "huge_pages=madvise", "fastest of 10", "constraints that bound: none", "kernels reference, steps 3"):
        assert part in text, text


def test_a_page_has_the_knobs_of_its_device() -> None:
    here, there = str(default_plan(small_graph())), str(default_plan(on_cuda(small_graph())))
    assert "prefetch=64" in here and "linear=" in here and "vector_bytes" not in here and "block_threads" not in here
    for part in ("block_threads=auto  loads_in_flight=auto  chunk_lookups=auto", "vector_bytes=auto  bags_per_group=auto",
                 "2,000,300 rows, 122.1 MiB on cuda; batch 64"):
        assert part in there, there
    assert "prefetch" not in there and "linear" not in there
    assert "kernel_shape: for tables on cuda\n" in explain(default_plan(small_graph()))
    text = explain(default_plan(on_cuda(small_graph())))
    for part in ("prefetch: for tables on cpu", "not block_threads=64 or 128 or 512: by rule of thumb",
                 "not bags_per_group=1 or 2 or 4 or 8:", "not coalesce='none': table big.weight: coalesce='none' needs lookups in turn"):
        assert part in text, text


def test_show_names_the_constraints_that_bound() -> None:
    text = str(default_plan(small_graph(), Constraints(equivalence="bitwise", deny=("dedup",))))
    assert "constraints that bound: equivalence='bitwise' is demanded, and this is reassociated; dedup is denied" in text


def test_explain_names_every_table_and_every_rejected_choice() -> None:
    text = explain(measured())
    for t in small_graph().structure.tables:
        assert t.name in text
    for knob in ("group_by", "concat", "update", "coalesce", "dedup", "prefetch", "partition", "stores", "huge_pages"):
        assert re.search(rf"not {knob}=", text), knob
    for part in ("not group_by='none': at best 1.25x native (trial 2, group_by=none), against 1.5x",
                 "not partition='table': trial 8: pruned: partition=table went wrong", "not prefetch=8 or 32 or 128: not tried",
                 "not dedup=True: trial 6: failed", "not huge_pages='madvise': the largest table has 12,800 bytes"):
        assert part in text, text


def test_explain_says_why_a_knob_has_no_effect_or_no_other_value() -> None:
    text = explain(default_plan(small_graph(ADAGRAD), Constraints(equivalence="bitwise")))
    assert "not update='coalesced' or 'fused': equivalence='bitwise' is demanded" in text
    assert "coalesce has an effect only with update in ['fused']" in text
    adagrad = explain(default_plan(small_graph(ADAGRAD)))
    assert "not coalesce='none': table big.weight: coalesce='none' is for SGD" in adagrad
    assert "by rule of thumb; nothing was measured" in adagrad


def test_explain_of_a_native_plan_says_why() -> None:
    text = explain(replace(measured(), config=Config.native()))
    assert "native. torch runs every lookup" in text and "fastest of 10" in text
    assert "the best planned config ran at 1.5x native (trial 1, default)" in text
