"""Size classes, configs, constraints, and the search space built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselift.errors import InfeasibleError
from sparselift.ir import Graph, Structure
from sparselift.lift import lift
from sparselift.models import DLRM
from sparselift.rewrites import CATALOG, EQUIVALENCES, Site, Value, same
from sparselift.rewrites.prefetch import Prefetch
from sparselift.space import (
    ClassConfig,
    Config,
    Constraints,
    SearchSpace,
    config_problems,
    equivalence_of,
    memory_bytes,
    size_classes,
)
from sparselift.space.classes import MAX_CLASSES
from sparselift.workload import Workload
from tests.unit.example_graphs import ADAGRAD, MOMENTUM, SGD, batch_sketch, feature, graph, on_cuda, small_graph, table

BIG = "d16-sum-to2M-few-dup"


def many_tables(rows: list[int], dims: tuple[int, ...] = (16,)) -> Graph:
    tables = [table(f"t{i}", r, dims[i % len(dims)]) for i, r in enumerate(rows)]
    return graph(tables, [feature(f"f{i}", t.name) for i, t in enumerate(tables)])


def sampled(space: SearchSpace, draw: Any) -> dict[str, Value]:
    params: dict[str, Value] = {}
    for dimension in space.dimensions:
        if dimension.active(params):
            params[dimension.name] = draw(dimension)
    return params


# size classes


def test_classes_are_named_by_what_their_tables_share() -> None:
    g = small_graph()
    assert [(each.name, each.tables) for each in size_classes(g)] == [
        ("d16-sum-to4k-few-dup", ("bags.1.weight",)),
        ("d16-sum-to4k-some-dup", ("bags.0.weight",)),
        (BIG, ("big.weight",)),
    ]


def test_a_class_name_tells_kinds_of_update_apart() -> None:
    tables = [table("a", 10), table("b", 10, optimizer=ADAGRAD), table("c", 10, sparse=False), table("d", 10, optimizer=None)]
    g = graph(tables, [feature(t.name, t.name) for t in tables] + [feature("a#1", "a", call=1)])
    names = {each.tables: each.name for each in size_classes(g)}
    assert names[("a",)].endswith("-sgd-shared")
    assert names[("b",)].endswith("-adagrad")
    assert names[("c",)].endswith("-sgd-dense")
    assert names[("d",)].endswith("-frozen")


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.integers(1, 10**9), min_size=1, max_size=40), dims=st.sampled_from([(16,), (8, 16), (4, 8, 16, 32, 64)]))
def test_every_table_is_in_one_of_a_few_classes(rows: list[int], dims: tuple[int, ...]) -> None:
    g = many_tables(rows, dims)
    classes = size_classes(g)
    assert 1 <= len(classes) <= MAX_CLASSES
    assert sorted(name for each in classes for name in each.tables) == sorted(t.name for t in g.structure.tables)
    assert len({each.name for each in classes}) == len(classes)
    assert classes == size_classes(g)


def test_classes_do_not_depend_on_the_order_of_tables() -> None:
    g = many_tables([10, 10**5, 10**6, 200, 10**7, 10**8], (4, 8, 16, 32))
    structure = replace(g.structure, tables=g.structure.tables[::-1], features=g.structure.features[::-1])
    assert ([(c.name, set(c.tables)) for c in size_classes(replace(g, structure=structure))]
            == [(c.name, set(c.tables)) for c in size_classes(g)])


def test_tables_of_unlike_legality_never_merge() -> None:
    optimizers = [SGD, ADAGRAD, MOMENTUM, None]
    tables = [table(f"t{i}", 10 ** (1 + i // 8), sparse=i % 2 == 0, optimizer=optimizers[i % 8 // 2]) for i in range(64)]
    g = graph(tables, [feature(t.name, t.name) for t in tables])
    for each in size_classes(g):
        found = [g.structure.table(name) for name in each.tables]
        assert len({(t.sparse, t.optimizer) for t in found}) == 1


# constraints


@pytest.mark.parametrize(("arguments", "message"), [
    ({"memory_bytes": 0}, "memory_bytes must be a whole number of bytes, at least 1, or None; got 0"),
    ({"memory_bytes": True}, "got True"),
    ({"memory_bytes": 1e9}, "got 1000000000.0"),
    ({"equivalence": "exact"}, "equivalence must be one of .*got 'exact'"),
    ({"allow": ["fuse"]}, r"allow names unknown rewrites \['fuse'\]"),
    ({"deny": ["fuse"]}, r"deny names unknown rewrites \['fuse'\]"),
    ({"allow": ["dedup"], "deny": ["dedup"]}, r"allow and deny both name \['dedup'\]"),
    ({"pin": {"depth": 1}}, "unknown knob 'depth'"),
    ({"pin": {"prefetch": 7}}, r"pin prefetch: must be one of \[0, 8, 32, 64, 128\]; got 7"),
    ({"pin": {"prefetch": False}}, "got False"),
    ({"pin": {"group_by@x": "all"}}, "group_by is one setting for the whole step"),
    ({"pin": {"path": "fast"}}, "pin path: must be one of .*got 'fast'"),
])
def test_constraints_name_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Constraints(**arguments)


def test_a_name_where_names_are_due_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="collection of rewrite names; got 'dedup'"):
        Constraints(deny="dedup")                                              # type: ignore[arg-type]


def test_constraints_survive_a_round_trip() -> None:
    constraints = Constraints(10**9, "bitwise", ("dedup",), ("prefetch",), {"path": "planned", "dedup@x": True}, ())
    assert Constraints.from_dict(constraints.to_dict()) == constraints
    assert hash(Constraints.from_dict(constraints.to_dict())) == hash(constraints)
    with pytest.raises(ValueError, match="constraints has the unknown field 'memory'"):
        Constraints.from_dict({**constraints.to_dict(), "memory": 1})


class Lossy(Prefetch):
    """A rewrite of a class that the catalog does not have yet."""

    def equivalence(self, structure: Structure, site: Site, knobs: Mapping[str, Value]) -> str:
        return "lossy" if self.applied(knobs) else "bitwise"


def test_lossy_rewrites_need_consent_by_name() -> None:
    g = small_graph()
    site = Site("all", size_classes(g))

    def objection(constraints: Constraints, distance: int) -> str | None:
        return constraints.objection(g.structure, Lossy(), site, {"prefetch": distance})

    assert objection(Constraints(), 0) is None
    assert "this is lossy" in (objection(Constraints(lossy_consent=("prefetch",)), 8) or "")
    assert "lossy_consent does not name it" in (objection(Constraints(equivalence="lossy"), 8) or "")
    assert objection(Constraints(equivalence="lossy", lossy_consent=("prefetch",)), 8) is None


# configs


def test_configs_are_equal_by_choice_and_survive_a_round_trip() -> None:
    config = SearchSpace(small_graph()).default
    again = Config.from_dict(config.to_dict())
    assert again == config and hash(again) == hash(config) and again.digest == config.digest
    assert again != Config.native()


def edited(config: Config, site: str, **knobs: Value) -> Config:
    if site == "policy":
        return replace(config, policy={**config.policy, **knobs})
    return replace(config, classes=tuple(replace(each, knobs={**each.knobs, **knobs}) if each.name == site else each
                                         for each in config.classes))


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: replace(c, path="fast"), "path must be one of"),
    (lambda c: replace(c, path="native"), "takes no policy"),
    (lambda c: edited(c, "policy", depth=1), "policy: unknown knob 'depth'"),
    (lambda c: replace(c, policy={"group_by": "all"}), "policy: knob 'concat' is missing"),
    (lambda c: edited(c, BIG, prefetch=5), r"class .*: prefetch must be one of \[0, 8, 32, 64, 128\]; got 5"),
    (lambda c: edited(c, BIG, prefetch=False), "got False"),
    (lambda c: edited(c, BIG, update="native", coalesce="none"), r"coalesce='none' has an effect only with update in \['fused'\]"),
    (lambda c: edited(c, "policy", group_by="none"), "concat=True has an effect only with group_by in"),
    (lambda c: edited(c, "d16-sum-to4k-few-dup", huge_pages="madvise"), "huge_pages='madvise' is illegal: the largest table"),
    (lambda c: replace(c, classes=c.classes[1:]), "table 'bags.1.weight' is in no class"),
    (lambda c: replace(c, classes=(*c.classes, replace(c.classes[0], name="again"))), "'bags.1.weight' is in two classes"),
    (lambda c: replace(c, classes=(*c.classes, ClassConfig("new", ("x",), c.classes[0].knobs))), "there is no table 'x'"),
    (lambda c: replace(c, classes=(*c.classes, c.classes[0])), "two size classes are named"),
])
def test_config_problems_name_the_site_and_the_rule(change: Any, message: str) -> None:
    g = small_graph()
    config = SearchSpace(g).default
    assert config_problems(g.structure, config) == ()
    assert re.search(message, "; ".join(config_problems(g.structure, change(config))))


def test_a_config_has_its_weakest_class() -> None:
    g = small_graph()
    space = SearchSpace(g)
    assert equivalence_of(g.structure, space.native) == "bitwise"
    assert equivalence_of(g.structure, space.default) == "bitwise"
    assert equivalence_of(g.structure, edited(space.default, BIG, coalesce="chain")) == "reassociated"
    assert equivalence_of(small_graph(ADAGRAD).structure, SearchSpace(small_graph(ADAGRAD)).default) == "reassociated"


def test_weights_that_the_model_computes_have_gradients_in_another_order() -> None:
    learned = replace(feature("f", "w", weighted=True), weights=None)
    g = graph([table("w", 10)], [learned])
    assert equivalence_of(g.structure, SearchSpace(g).default) == "reassociated"
    assert "per-sample weights" in SearchSpace(g, Constraints(equivalence="bitwise")).blocked[0]
    given_weights = graph([table("w", 10)], [feature("f", "w", weighted=True)])
    assert not SearchSpace(given_weights, Constraints(equivalence="bitwise")).blocked


# search space


def test_dimensions_come_after_what_they_depend_on() -> None:
    space = SearchSpace(small_graph())
    assert space.dimensions[0].name == "path"
    known: set[str] = set()
    for dimension in space.dimensions:
        assert len(dimension.choices) > 1
        assert {name for name, _, _ in dimension.condition} <= known
        known.add(dimension.name)
    assert f"huge_pages@{BIG}" in known
    assert "huge_pages@d16-sum-to4k-few-dup" not in known


@pytest.mark.parametrize("constraints", [
    Constraints(), Constraints(equivalence="bitwise"), Constraints(deny=("group_tables", "dedup")), Constraints(allow=("prefetch",)),
    Constraints(pin={"path": "planned"}), Constraints(pin={"concat": True, f"prefetch@{BIG}": 32}), Constraints(pin={"coalesce": "none"}),
], ids=str)
@pytest.mark.parametrize("g", [small_graph(), small_graph(ADAGRAD), small_graph(MOMENTUM)], ids=["sgd", "adagrad", "momentum"])
def test_every_point_of_a_space_is_feasible(g: Graph, constraints: Constraints) -> None:
    rules = {table.optimizer and table.optimizer.fused_rule for table in g.structure.tables}
    if constraints.pin.get("coalesce") == "none" and rules != {"sgd"}:
        with pytest.raises(InfeasibleError, match="the pin coalesce='none' is legal in no size class"):
            SearchSpace(g, constraints)
        return
    space = SearchSpace(g, constraints)

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def check(data: Any) -> None:
        params = sampled(space, lambda dimension: data.draw(st.sampled_from(dimension.choices)))
        config = space.from_params(params)
        assert space.check(config) == ()
        assert space.to_params(config) == params
        assert EQUIVALENCES.index(equivalence_of(g.structure, config)) <= EQUIVALENCES.index(constraints.equivalence)

    check()
    for _, config in (("default", space.default), *space.toggles()):
        assert space.check(config) == ()
        assert space.from_params(space.to_params(config)) == config


def test_params_are_taken_literally() -> None:
    space = SearchSpace(small_graph())
    params = space.to_params(space.default)
    with pytest.raises(ValueError, match="'group_by' is missing"):
        space.from_params({name: value for name, value in params.items() if name != "group_by"})
    with pytest.raises(ValueError, match="'depth' is unknown"):
        space.from_params({**params, "depth": 1})
    with pytest.raises(ValueError, match=f"'prefetch@{BIG}' must be one of .*; got 7"):
        space.from_params({**params, f"prefetch@{BIG}": 7})
    with pytest.raises(ValueError, match="'group_by' has no effect beside the others"):
        space.from_params({"path": "native", "group_by": "all"})
    with pytest.raises(ValueError, match="'concat' has no effect"):
        space.from_params({**params, "group_by": "none"})


def test_configs_of_other_spaces_have_no_params() -> None:
    space = SearchSpace(small_graph(), Constraints(pin={"prefetch": 8}))
    with pytest.raises(ValueError, match=r"prefetch@.*=8 for 64"):
        space.to_params(SearchSpace(small_graph()).default)
    with pytest.raises(ValueError, match="size classes"):
        space.to_params(SearchSpace(many_tables([10])).default)


def test_native_has_nothing_else_to_choose() -> None:
    space = SearchSpace(small_graph())
    assert space.to_params(space.native) == {"path": "native"}
    assert space.from_params({"path": "native"}) == space.native
    assert space.check(space.native) == ()


def test_default_is_what_the_page_says() -> None:
    default = SearchSpace(small_graph()).default
    policy = {"group_by": "all", "concat": True, "interaction": False, "linear": "native", "compile": "eager",
              "block_threads": "auto", "loads_in_flight": "auto", "chunk_lookups": "auto", "prefetch_batches": 0}
    assert default.policy == policy
    assert default.knobs_at(BIG) == {**policy, "update": "fused", "coalesce": "none", "dedup": False, "prefetch": 64, "partition": "bag",
                                     "stores": "cached", "huge_pages": "madvise", "vector_bytes": "auto", "bags_per_group": "auto"}
    assert default.knobs_at("d16-sum-to4k-few-dup")["huge_pages"] == "off"
    with pytest.raises(KeyError, match="no size class 'x'"):
        default.knobs_at("x")


@pytest.mark.parametrize(("g", "update", "coalesce"), [
    (small_graph(), "fused", "none"), (small_graph(ADAGRAD), "native", "chain"), (small_graph(MOMENTUM), "native", "chain")])
def test_bitwise_defaults(g: Graph, update: str, coalesce: str) -> None:
    space = SearchSpace(g, Constraints(equivalence="bitwise"))
    assert all((each.knobs["update"], each.knobs["coalesce"]) == (update, coalesce) for each in space.default.classes)


def test_without_a_bitwise_way_the_space_is_native_and_says_why() -> None:
    g = small_graph(sparse=False)
    space = SearchSpace(g, Constraints(equivalence="bitwise"))
    assert space.dimensions == () and space.default == space.native and space.toggles() == ()
    assert "equivalence='bitwise' is demanded, and this is reassociated" in space.blocked[0]
    assert space.from_params({}) == space.native
    assert space.check(SearchSpace(g).default)
    with pytest.raises(InfeasibleError, match="path is pinned to 'planned'"):
        SearchSpace(g, Constraints(equivalence="bitwise", pin={"path": "planned"}))


def test_denied_rewrites_stay_off_and_pins_hold() -> None:
    space = SearchSpace(small_graph(), Constraints(deny=("fuse_update",), pin={"prefetch": 8, f"prefetch@{BIG}": 32}))
    assert {each.knobs["update"] for each in space.default.classes} == {"native"}
    assert [each.knobs["prefetch"] for each in space.default.classes] == [8, 8, 32]
    assert not [d for d in space.dimensions if d.name.startswith(("update", "coalesce", "prefetch"))]
    assert "fuse_update is denied" in " ".join(space.check(SearchSpace(small_graph()).default))
    assert "prefetch is pinned to 32" in " ".join(space.check(SearchSpace(small_graph()).default))


def test_only_allowed_rewrites_are_on() -> None:
    space = SearchSpace(small_graph(), Constraints(allow=("prefetch",)))
    assert {name.partition("@")[0] for name in (d.name for d in space.dimensions)} == {"path", "prefetch"}


def test_a_pin_settles_what_it_needs() -> None:
    space = SearchSpace(small_graph(), Constraints(pin={"concat": True}))
    assert next(d for d in space.dimensions if d.name == "group_by").choices == ("class", "all")
    with pytest.raises(InfeasibleError, match=r"the pin group_by='none' cannot be met at policy: concat is pinned to True"):
        SearchSpace(small_graph(), Constraints(pin={"concat": True, "group_by": "none"}))


def test_pins_that_cannot_be_met_are_named() -> None:
    small = "huge_pages@d16-sum-to4k-few-dup"
    with pytest.raises(InfeasibleError, match=r"the pin huge_pages='madvise' cannot be met at d16-sum-to4k.*the largest table"):
        SearchSpace(small_graph(), Constraints(pin={small: "madvise"}))
    with pytest.raises(InfeasibleError, match=r"the pin update='fused' is legal in no size class: .*momentum=0.9"):
        SearchSpace(small_graph(MOMENTUM), Constraints(pin={"update": "fused"}))
    with pytest.raises(InfeasibleError, match=r"update='fused'.*equivalence='bitwise' is demanded"):
        SearchSpace(small_graph(ADAGRAD), Constraints(equivalence="bitwise", pin={"update": "fused"}))
    with pytest.raises(ValueError, match="there is no size class 'd1'"):
        SearchSpace(small_graph(), Constraints(pin={"prefetch@d1": 8}))


def test_a_pin_of_all_classes_leaves_out_those_where_it_is_illegal() -> None:
    space = SearchSpace(small_graph(), Constraints(pin={"huge_pages": "madvise"}))
    assert [each.knobs["huge_pages"] for each in space.default.classes] == ["off", "off", "madvise"]
    assert not [d for d in space.dimensions if d.name.startswith("huge_pages")]
    assert "huge_pages is pinned to 'madvise'" in " ".join(space.check(edited(space.default, BIG, huge_pages="off")))


def test_memory_is_predicted_by_kind() -> None:
    g = small_graph(ADAGRAD)
    space = SearchSpace(g)
    native, planned = memory_bytes(g, space.native), memory_bytes(g, space.default)
    rows, k, bags = 2_000_300, 3 * 256, 3 * 64
    assert native == {"weights": rows * 64, "optimizer_state": rows * 64, "outputs": bags * 64, "gradients": k * (8 + 64)}
    assert planned["fuse_update"] == bags * 64 + (8 + 16) * k
    assert planned["indices"] == 4 * (k + bags)


def test_memory_limits_bind_and_say_how_much_is_needed() -> None:
    g = small_graph()
    native = sum(memory_bytes(g, Config.native()).values())
    with pytest.raises(InfeasibleError, match=r"memory_bytes=1,000 is the binding constraint: the leanest config .* needs [\d,]+ bytes"):
        SearchSpace(g, Constraints(memory_bytes=1000))
    lean = SearchSpace(g, Constraints(memory_bytes=native))
    assert lean.check(lean.native) == () and lean.check(lean.default) == ()
    assert "memory_bytes" in lean.check(SearchSpace(g).default)[0]
    assert "fuse_update" in lean.check(SearchSpace(g).default)[0]
    only_planned = SearchSpace(g, Constraints(memory_bytes=native - 1))
    assert only_planned.check(only_planned.native) and only_planned.default.path == "planned"
    assert "path" not in {d.name for d in only_planned.dimensions}


def test_the_smallest_relaxation_is_enough() -> None:
    g = small_graph()
    with pytest.raises(InfeasibleError) as caught:
        SearchSpace(g, Constraints(memory_bytes=1000))
    need = int(str(caught.value).split("needs ")[1].split(" ")[0].replace(",", ""))
    assert SearchSpace(g, Constraints(memory_bytes=need)).default
    with pytest.raises(InfeasibleError):
        SearchSpace(g, Constraints(memory_bytes=need - 1))


def test_toggles_switch_one_knob_each() -> None:
    space = SearchSpace(small_graph())
    labels = [label for label, _ in space.toggles()]
    assert labels == ["group_by=none", "concat=False", "update=native", "coalesce=chain", "dedup=True", "prefetch=0", "partition=table",
                      "stores=streamed", "huge_pages=off"]
    before = space.to_params(space.default)
    for label, config in space.toggles():
        after = space.to_params(config)
        changed = {name.partition("@")[0] for name in set(before) & set(after) if not same(before[name], after[name])}
        assert changed == {label.partition("=")[0]}


def test_fingerprints_tell_spaces_apart() -> None:
    spaces = [SearchSpace(small_graph()), SearchSpace(small_graph(ADAGRAD)), SearchSpace(small_graph(), Constraints(pin={"prefetch": 8})),
              SearchSpace(small_graph(), Constraints(pin={"prefetch": 64})), SearchSpace(many_tables([10, 20]))]
    assert len({space.fingerprint for space in spaces}) == len(spaces)
    assert SearchSpace(small_graph()).fingerprint == spaces[0].fingerprint


def test_a_thousand_tables_need_a_few_dozen_numbers() -> None:
    g = many_tables([10 ** (1 + i % 7) for i in range(1000)], (8, 16, 32))
    space = SearchSpace(g)
    assert len(space.dimensions) <= 2 + 1 + MAX_CLASSES * 7
    assert space.check(space.default) == ()


def test_a_step_without_lookups_is_native() -> None:
    g = graph([table("w", 10)], [])
    assert SearchSpace(g).blocked == ("no lookup was lifted",)


def test_rejections_say_what_was_left_out() -> None:
    space = SearchSpace(small_graph(ADAGRAD), Constraints(deny=("dedup",)))
    by_rewrite = {rewrite.name: [each for each in space.rejections if each.rewrite == rewrite.name] for rewrite in CATALOG}
    assert all(each.constraint for each in by_rewrite["dedup"]) and len(by_rewrite["dedup"]) == 3
    assert any(not each.constraint and "Adagrad" in str(each) for each in by_rewrite["fuse_update"])
    assert [each.site for each in by_rewrite["huge_pages"]] == ["d16-sum-to4k-few-dup", "d16-sum-to4k-some-dup"]


def test_a_space_has_the_knobs_of_its_device() -> None:
    shapes, hints = {"block_threads", "loads_in_flight", "chunk_lookups"}, {"linear", "compile"}
    of_bags, of_rows = {"vector_bytes", "bags_per_group"}, {"dedup", "prefetch", "partition", "stores", "huge_pages"}
    there, here = ({dimension.name.partition("@")[0] for dimension in SearchSpace(g).dimensions}
                   for g in (on_cuda(small_graph()), small_graph()))
    assert shapes | of_bags <= there and not there & (hints | of_rows)
    assert of_rows <= here and not here & (shapes | of_bags)


def test_shapes_of_cuda_kernels_are_the_heuristic_s_by_default() -> None:
    space = SearchSpace(on_cuda(small_graph()))
    assert space.check(space.default) == () and space.default.path == "planned"
    assert {space.default.policy[name] for name in ("block_threads", "loads_in_flight", "chunk_lookups")} == {"auto"}
    assert {each.knobs[name] for each in space.default.classes for name in ("vector_bytes", "bags_per_group")} == {"auto"}
    assert {"block_threads=64", "loads_in_flight=8", "chunk_lookups=64", "vector_bytes=4", "bags_per_group=1"} <= {
        name for name, _ in space.toggles()}


def test_sums_of_bags_on_cuda_are_not_bitwise() -> None:
    blocked = SearchSpace(on_cuda(small_graph()), Constraints(equivalence="bitwise")).blocked
    assert "on CUDA a bag of more ids than a chunk has is summed in pieces" in blocked[0]
    rows = on_cuda(graph([table("w", 10)], [feature("f", "w", "none")]))
    assert not SearchSpace(rows, Constraints(equivalence="bitwise")).blocked


def test_duplicates_split_classes() -> None:
    tables = [table(f"t{i}", 10**5) for i in range(3)]
    g = graph(tables, [feature(f"f{i}", f"t{i}") for i in range(3)],
              sketches={f"f{i}": batch_sketch(10**5, distinct=distinct) for i, distinct in enumerate((256, 128, 16))})
    names = [each.name for each in size_classes(g)]
    assert all(a != b for a, b in pairwise(names))
    assert {name.split("-")[3] for name in names} == {"few", "some", "many"}


def test_a_choice_may_depend_on_one_that_does_not_exist():
    """With linear=fused nothing is compiled, and whether is no choice. Index work ahead, which some ways of compiling rule out, is."""
    rows = (50, 300)
    model = DLRM(rows, 4, (4,), (4, 1), num_dense=3)
    ids = [torch.arange(5) for _ in rows]
    work = Workload("dlrm", model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(*batch).sum(),
                    [(torch.zeros(5, 3), ids, ids)], inputs=tuple)
    space = SearchSpace(lift(work))
    toggles = dict(space.toggles())
    assert space.default.policy["linear"] != "native" and "prefetch_batches=1" in toggles
    for config in (space.default, *toggles.values()):
        assert space.from_params(space.to_params(config)) == config
