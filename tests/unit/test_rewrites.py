"""Legality, equivalence and resource changes of every rewrite, on graphs built by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparselift.ir import DEVICES, Concat, Graph, Interaction, Node, Resources
from sparselift.rewrites import CATALOG, EQUIVALENCES, Rewrite, Site, SizeClass, Value, catalog_table, same, weakest
from sparselift.rewrites.base import SCOPES
from tests.unit.example_graphs import ADAGRAD, MOMENTUM, SGD, batch_sketch, feature, graph, on_cuda, small_graph, table

NAMES = [rewrite.name for rewrite in CATALOG]


def by_name(name: str) -> Rewrite:
    return next(rewrite for rewrite in CATALOG if rewrite.name == name)


def whole(g: Graph) -> Site:
    """All tables as one class."""
    return Site("all", (SizeClass("all", tuple(t.name for t in g.structure.tables)),))


def split(g: Graph) -> Site:
    """A class a table."""
    return Site("policy", tuple(SizeClass(t.name, (t.name,)) for t in g.structure.tables))


def legal(name: str, g: Graph, site: Site | None = None, **knobs: Value) -> str | None:
    return by_name(name).legal(g.structure, site or whole(g), knobs)


def node(g: Graph, name: str) -> Node:
    return next(each for each in g.nodes if each.name == name)


def test_catalog_is_well_formed() -> None:
    knobs = [knob for rewrite in CATALOG for knob in rewrite.knobs]
    assert len({knob.name for knob in knobs}) == len(knobs)
    assert len(set(NAMES)) == len(NAMES)
    for rewrite in CATALOG:
        assert rewrite.scope in SCOPES and rewrite.summary and rewrite.equivalence_note
    for knob in knobs:
        assert len(knob.choices) > 1 and knob.holds(knob.off)
        for required, values in knob.requires:
            other = next(each for each in knobs if each.name == required)
            assert knobs.index(other) < knobs.index(knob), "a knob comes after those it requires"
            assert all(other.holds(value) for value in values)


@pytest.mark.parametrize("rewrite", CATALOG, ids=NAMES)
def test_off_is_legal_and_changes_nothing(rewrite: Rewrite) -> None:
    for g in (small_graph(), small_graph(ADAGRAD, sparse=False), small_graph(None), small_graph(MOMENTUM), on_cuda(small_graph())):
        off = {knob.name: knob.off for knob in rewrite.knobs}
        assert not rewrite.applied(off)
        assert rewrite.legal(g.structure, whole(g), off) is None
        assert rewrite.transform(g, whole(g), off) == g


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rewrite", CATALOG, ids=NAMES)
def test_on_marks_the_nodes_that_it_changes(rewrite: Rewrite, device: str) -> None:
    g = on_cuda(small_graph()) if device == "cuda" else small_graph()
    site = split(g) if rewrite.scope == "policy" else whole(g)
    for setting in rewrite.combinations():
        assert rewrite.equivalence(g.structure, site, setting) in EQUIVALENCES
        if rewrite.legal(g.structure, site, {"group_by": "all", **setting}) is None and rewrite.applied(setting):
            after = rewrite.transform(g, site, {"group_by": "all", **setting})
            marked = {each.name for each in after.nodes if rewrite.name in each.rewrites}
            assert marked
            names = {each.name for each in after.nodes}
            assert all(name in names for each in after.nodes for name in each.inputs), "no node reads one that went away"


@pytest.mark.parametrize("rewrite", CATALOG, ids=NAMES)
def test_preferences_are_choices(rewrite: Rewrite) -> None:
    g = small_graph()
    wish = rewrite.prefer(g, whole(g))
    assert set(wish) == {knob.name for knob in rewrite.knobs}
    assert all(knob.holds(wish[knob.name]) for knob in rewrite.knobs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rewrite", CATALOG, ids=NAMES)
def test_what_does_nothing_on_a_device_is_refused_there(rewrite: Rewrite, device: str) -> None:
    g = on_cuda(small_graph()) if device == "cuda" else small_graph()
    for setting in filter(rewrite.applied, rewrite.combinations()):
        reason = rewrite.legal(g.structure, split(g), {"group_by": "all", **setting})
        refused = reason == f"{rewrite.name} is for tables on {rewrite.devices[0]}, and these are on {device}"
        assert refused == (device not in rewrite.devices)


def test_shapes_of_kernels_are_cuda_s_and_hints_to_a_cpu_the_cpu_s() -> None:
    assert {rewrite.name for rewrite in CATALOG if rewrite.devices == ("cuda",)} == {"bag_shape", "kernel_shape"}
    assert {rewrite.name for rewrite in CATALOG if rewrite.devices == ("cpu",)} == {
        "dedup", "prefetch", "partition", "stores", "huge_pages", "linear_library", "compile_dense", "prefetch_batches"}


def test_combinations_give_knobs_without_effect_their_off_value() -> None:
    assert by_name("fuse_update").combinations() == (
        {"update": "native", "coalesce": "chain"}, {"update": "coalesced", "coalesce": "chain"}, {"update": "fused", "coalesce": "chain"},
        {"update": "fused", "coalesce": "none"}, {"update": "fused", "coalesce": "sort"}, {"update": "fused", "coalesce": "dense"})


def test_weakest_and_same() -> None:
    assert weakest([]) == "bitwise"
    assert weakest(["bitwise", "lossy", "reassociated"]) == "lossy"
    with pytest.raises(ValueError, match="exact"):
        weakest(["exact"])
    assert same(0, 0) and not same(0, False) and not same(1, True) and not same(1, 1.0)


# bag_shape and kernel_shape


def test_a_shape_without_effect_is_refused() -> None:
    narrow = on_cuda(graph([table("w", 10, 3)], [feature("f", "w")]))
    maxima = on_cuda(graph([table("w", 10)], [feature("f", "w", "max")]))
    weighted = on_cuda(graph([table("w", 10)], [feature("f", "w", weighted=True)]))
    assert "rows of 12 bytes are read an element at a time anyway" in (legal("bag_shape", narrow, vector_bytes=4, bags_per_group=1) or "")
    assert legal("bag_shape", narrow, vector_bytes="auto", bags_per_group=1) is None
    assert "one bag at a time" in (legal("bag_shape", maxima, vector_bytes=4, bags_per_group=2) or "")
    assert legal("bag_shape", maxima, vector_bytes=4, bags_per_group="auto") is None
    for g in (maxima, weighted):
        setting = {"block_threads": 64, "loads_in_flight": 8, "chunk_lookups": 64}
        assert "no lookup sums without weights" in (legal("kernel_shape", g, **setting) or "")
        assert legal("kernel_shape", g, **{**setting, "loads_in_flight": "auto"}) is None


def test_sums_in_other_chunks_are_reassociated() -> None:
    g = on_cuda(small_graph())
    setting: dict[str, Value] = {"block_threads": 64, "loads_in_flight": 8, "chunk_lookups": "auto"}
    assert by_name("kernel_shape").equivalence(g.structure, whole(g), setting) == "bitwise"
    assert by_name("kernel_shape").equivalence(g.structure, whole(g), {**setting, "chunk_lookups": 64}) == "reassociated"


def test_on_cuda_lookups_of_a_row_have_no_order() -> None:
    g = on_cuda(small_graph())
    assert "those of one row run at the same time" in (legal("fuse_update", g, update="fused", coalesce="none") or "")
    dense = legal("fuse_update", g, update="fused", coalesce="dense")
    assert dense == "table big.weight: coalesce='dense' takes up to 2,048 rows of 2,048 columns on CUDA; got 2,000,000 of 16"
    assert legal("fuse_update", on_cuda(graph([table("w", 2048, 2048)], [feature("f", "w")])), update="fused", coalesce="dense") is None
    assert by_name("fuse_update").prefer(g, whole(g)) == {"update": "fused", "coalesce": "chain"}


def test_on_cuda_memory_grows_with_lookups_and_not_with_rows() -> None:
    g = on_cuda(small_graph())
    grads = 3 * 64 * 4 * 16
    assert by_name("fuse_update").memory_bytes(g, whole(g), CHAIN) == grads + 3 * 256 * (2 * 12 + 8)
    assert by_name("fuse_update").memory_bytes(g, whole(g), DENSE) == grads
    # An update reads ids, entries (once made, once sorted by each of 1, 1 and 3 digits) and origins, gradients, and distinct rows.
    update = by_name("fuse_update").transform(g, whole(g), CHAIN)
    rows = {"bags.0.weight": 100, "bags.1.weight": 200, "big.weight": 256}
    for name, digits in (("bags.0.weight", 1), ("bags.1.weight", 1), ("big.weight", 3)):
        moved = node(update, f"update:{name}").resources
        assert moved.read_bytes == 4 * 256 + 256 * (12 * (1 + digits) + 8) + 4 * 256 * 16 + rows[name] * 4 * 16
        assert moved.write_bytes == 256 * (12 * (1 + digits) + 8) + rows[name] * 4 * 16


# group_tables and fuse_concat


def test_grouping_needs_ids_from_the_root_forward() -> None:
    g = graph([table("w", 10)], [feature("f", "w", from_inputs=False)])
    assert "none can run before" in (legal("group_tables", g, group_by="all") or "")
    assert legal("group_tables", small_graph(), group_by="all") is None


def test_grouping_by_the_only_class_is_pointless() -> None:
    g = small_graph()
    assert "one size class" in (legal("group_tables", g, whole(g), group_by="class") or "")
    assert legal("group_tables", g, split(g), group_by="class") is None


def test_a_group_is_one_launch() -> None:
    g = small_graph()
    after = by_name("group_tables").transform(g, split(g), {"group_by": "all", "concat": False})
    lookups = [each for each in after.nodes if each.op == "lookup"]
    assert sum(each.resources.launches for each in lookups) == 1
    assert [each.resources.traffic_bytes for each in lookups] == [each.resources.traffic_bytes for each in g.nodes if each.op == "lookup"]


def test_concat_needs_one() -> None:
    g = small_graph()
    assert legal("fuse_concat", g, concat=True) is None
    assert "no torch.cat" in (legal("fuse_concat", replace(g, structure=replace(g.structure, concats=())), concat=True) or "")
    twice = replace(g, structure=replace(g.structure, concats=(Concat("cat", ("big", "big")),)))
    assert "cat" in (legal("fuse_concat", twice, concat=True) or "")


def test_concat_copies_what_is_no_lookup() -> None:
    g = small_graph()
    after = by_name("fuse_concat").transform(g, split(g), {"group_by": "all", "concat": True})
    assert node(g, "concat:cat").resources.read_bytes == 64 * 4 * (8 + 16 + 16)
    assert node(after, "concat:cat").resources.read_bytes == 64 * 4 * 8


def test_a_concat_of_lookups_alone_goes_away() -> None:
    g = graph([table("a", 10), table("b", 10)], [feature("a", "a"), feature("b", "b")], (Concat("cat", ("a", "b")),))
    after = by_name("fuse_concat").transform(g, split(g), {"group_by": "all", "concat": True})
    assert "concat:cat" not in {each.name for each in after.nodes}
    assert node(after, "dense").inputs == ("lookup:a", "lookup:b")


# fuse_interaction


def interacting(order: str = "lower", diagonal: bool = False, from_inputs: bool = True) -> Graph:
    """Two lookups and a dense vector, multiplied pair by pair, as torch does it."""
    features = [feature("a", "a", from_inputs=from_inputs), feature("b", "b", from_inputs=from_inputs)]
    g = graph([table("a", 10), table("b", 10)], features, (Concat("cat", (16, "a", "b")),))
    products = (Node("products", "interaction", "forward", ("concat:cat",), resources=Resources(flops=9, launches=5, time_s=1.0)),
                Node("products_backward", "interaction_backward", "backward", ("dense_backward",),
                     resources=Resources(launches=9, time_s=1.0)))
    return replace(g, nodes=(*g.nodes, *products),
                   structure=replace(g.structure, interactions=(Interaction("products", "cat", 0, order, diagonal),)))


def test_interaction_needs_one_of_lookups_before_the_forward() -> None:
    assert legal("fuse_interaction", interacting(), interaction=True) is None
    assert "torch.bmm" in (legal("fuse_interaction", small_graph(), interaction=True) or "")
    assert "cat cannot be written" in (legal("fuse_interaction", interacting(from_inputs=False), interaction=True) or "")
    rewrite = by_name("fuse_interaction")
    assert rewrite.equivalence(interacting().structure, whole(interacting()), {"interaction": True}) == "reassociated"
    assert rewrite.equivalence(interacting().structure, whole(interacting()), {"interaction": False}) == "bitwise"


@pytest.mark.parametrize(("diagonal", "pairs"), [(False, 3), (True, 6)])
def test_a_fused_interaction_moves_vectors_once_and_no_square(diagonal: bool, pairs: int) -> None:
    g = interacting(diagonal=diagonal)
    after = by_name("fuse_interaction").transform(g, split(g), {"group_by": "all", "concat": True, "interaction": True})
    forward, backward = (node(after, name).resources for name in ("products", "products_backward"))
    vectors, out = 64 * 4 * 3 * 16, 64 * 4 * (16 + pairs)
    assert (forward.read_bytes, forward.write_bytes, forward.launches, forward.time_s) == (vectors, out, 1, None)
    assert (backward.read_bytes, backward.write_bytes, backward.launches) == (vectors + out, vectors, 1)
    assert forward.flops == 2 * 64 * 16 * pairs and backward.flops == 2 * 64 * 16 * 9


# fuse_update


def test_fused_updates_need_a_rule() -> None:
    assert legal("fuse_update", small_graph(SGD), update="fused", coalesce="chain") is None
    assert legal("fuse_update", small_graph(ADAGRAD), update="fused", coalesce="chain") is None
    assert "momentum=0.9" in (legal("fuse_update", small_graph(MOMENTUM), update="fused", coalesce="chain") or "")
    assert "no optimizer" in (legal("fuse_update", small_graph(None), update="fused", coalesce="chain") or "")


def test_uncoalesced_updates_are_for_sgd() -> None:
    assert legal("fuse_update", small_graph(SGD), update="fused", coalesce="none") is None
    assert "Adagrad needs the sum" in (legal("fuse_update", small_graph(ADAGRAD), update="fused", coalesce="none") or "")


def test_sums_of_a_tables_shape_are_for_small_tables() -> None:
    g = small_graph()
    small = Site("small", (SizeClass("small", ("bags.0.weight", "bags.1.weight")),))
    assert legal("fuse_update", g, small, update="fused", coalesce="dense") is None
    assert "table big.weight: coalesce='dense' would keep sums of 128,000,000 bytes" in (
        legal("fuse_update", g, update="fused", coalesce="dense") or "")
    after = by_name("fuse_update").transform(g, small, DENSE)
    k, u, d = 256, 100, 16                                                     # ids and distinct rows of the first table
    assert node(after, "update:bags.0.weight").resources.write_bytes == 4 * d * (k + u) + 4 * u * d
    assert by_name("fuse_update").memory_bytes(g, small, DENSE) == 2 * 64 * 4 * d + 4 * 300 * d + round(300 / 8)


NATIVE = {"update": "native", "coalesce": "chain"}
CHAIN = {"update": "fused", "coalesce": "chain"}
NONE = {"update": "fused", "coalesce": "none"}
DENSE = {"update": "fused", "coalesce": "dense"}


@pytest.mark.parametrize(("g", "setting", "expected"), [
    (small_graph(), NATIVE, "bitwise"),
    (small_graph(), CHAIN, "reassociated"),
    (small_graph(), NONE, "bitwise"),
    (small_graph(sparse=False), NONE, "reassociated"),
    (small_graph(sparse=False), NATIVE, "reassociated"),
    (small_graph(uses=("scaler", "skip")), NONE, "bitwise"),
    (small_graph(uses=("accumulate", "scaler")), NONE, "reassociated"),
    (small_graph(uses=("accumulate", "scaler")), NATIVE, "bitwise"),
    (small_graph(uses=("clip",)), NONE, "reassociated"),
    (small_graph(uses=("clip",)), NATIVE, "reassociated"),
    (graph([table("w", 10)], [feature("f", "w"), feature("f#1", "w", call=1)]), NONE, "reassociated"),
    (graph([table("w", 10)], [feature("f", "w"), feature("f#1", "w", call=1)]), NATIVE, "reassociated"),
])
def test_update_equivalence(g: Graph, setting: dict[str, Value], expected: str) -> None:
    assert by_name("fuse_update").equivalence(g.structure, whole(g), setting) == expected


def test_a_fused_update_takes_the_place_of_expand_and_coalesce() -> None:
    g = small_graph()
    after = by_name("fuse_update").transform(g, whole(g), CHAIN)
    assert not [each for each in after.nodes if each.op in ("expand", "coalesce")]
    update = node(after, "update:big.weight")
    assert update.inputs == ("dense_backward",)
    k, u, d = 256, 256, 16                                                     # 64 bags of 4 ids, all different
    assert update.resources.read_bytes == 4 * k + (4 * k + 4 * u) + 4 * k * d + 4 * u * d
    assert update.resources.write_bytes == (4 * k + 4 * u) + 4 * u * d
    assert update.resources.live_bytes == 64 * 4 * d + 4 * 2_000_000 + 8 * k
    sort = node(by_name("fuse_update").transform(g, whole(g), {"update": "fused", "coalesce": "sort"}), "update:big.weight")
    assert sort.resources.write_bytes == 8 * k * (1 + 2) + 4 * u * d              # two digits of 11 bits make 2 million rows
    assert sort.resources.live_bytes == 64 * 4 * d + (8 + 16) * k


def test_uncoalesced_updates_move_a_row_a_lookup_and_hold_no_heads() -> None:
    g = graph([table("w", 1000)], [feature("f", "w")], sketches={"f": batch_sketch(1000, distinct=8)})
    chain, none = (by_name("fuse_update").transform(g, whole(g), setting) for setting in (CHAIN, NONE))
    assert node(none, "update:w").resources.write_bytes == 256 * 64
    assert node(chain, "update:w").resources.write_bytes == 8 * 64 + 4 * 256 + 4 * 8
    memory = [by_name("fuse_update").memory_bytes(g, whole(g), setting) for setting in (NATIVE, CHAIN, NONE)]
    assert memory == [256 * (8 + 64), 64 * 64 + 4 * 1000 + 8 * 256, 64 * 64]


def test_dense_gradients_are_as_large_as_the_table() -> None:
    g = small_graph(sparse=False)
    assert by_name("fuse_update").memory_bytes(g, whole(g), NATIVE) == sum(t.nbytes for t in g.structure.tables)


# dedup, prefetch, partition, huge_pages


def test_dedup_reads_each_distinct_row_once() -> None:
    g = graph([table("w", 1000)], [feature("f", "w")], sketches={"f": batch_sketch(1000, distinct=8)})
    after = by_name("dedup").transform(g, whole(g), {"dedup": True})
    assert node(after, "lookup:f").resources.read_bytes == 16 * 256 + 2 * 8 * 64
    assert by_name("dedup").memory_bytes(g, whole(g), {"dedup": True}) == 8 * 64 + 4 * 256


@pytest.mark.parametrize(("pooling", "distinct", "expected"), [(20, 8, True), (20, 900, False), (5, 8, False)])
def test_dedup_is_preferred_for_long_bags_of_few_rows(pooling: int, distinct: int, expected: bool) -> None:
    sketches = {"f": batch_sketch(1000, pooling=pooling, distinct=distinct)}
    g = graph([table("w", 1000)], [feature("f", "w")], sketches=sketches)
    assert by_name("dedup").prefer(g, whole(g)) == {"dedup": expected}


def test_huge_pages_are_for_large_tables() -> None:
    g = small_graph()
    assert legal("huge_pages", g, huge_pages="madvise") is None
    small = Site("small", (SizeClass("small", ("bags.0.weight", "bags.1.weight")),))
    assert "12,800 bytes" in (legal("huge_pages", g, small, huge_pages="madvise") or "")
    after = by_name("huge_pages").transform(g, whole(g), {"huge_pages": "madvise"})
    assert [each.name for each in after.nodes if each.rewrites] == ["lookup:big", "update:big.weight"]
    assert by_name("huge_pages").memory_bytes(g, whole(g), {"huge_pages": "madvise"}) == 62 * 2**21 - 2_000_000 * 64


def test_streaming_stores_are_for_rows_of_whole_lines() -> None:
    g = small_graph()
    assert legal("stores", g, stores="streamed") is None
    odd = graph([table("w", 100, 17)], [feature("f", "w")])
    assert legal("stores", odd, stores="streamed") == "pooled rows of 68 bytes are no whole cache lines of 64"
    assert legal("stores", odd, stores="cached") is None
    assert by_name("stores").prefer(g, whole(g)) == {"stores": "cached"}                       # 12 KiB of outputs
    large = graph([table("w", 100, 256)], [feature("f", "w")], sketches={"f": batch_sketch(100, bags=1024)})
    assert by_name("stores").prefer(large, whole(large)) == {"stores": "streamed"}             # 1 MiB
    after = by_name("stores").transform(large, whole(large), {"stores": "streamed"})
    assert [each.name for each in after.nodes if each.rewrites] == ["lookup:f"]


def test_class_rewrites_leave_other_tables_alone() -> None:
    g = small_graph()
    site = Site("one", (SizeClass("one", ("bags.0.weight",)),))
    for rewrite in CATALOG:
        if rewrite.scope == "class":
            on = {knob.name: next(choice for choice in knob.choices if not same(choice, knob.off)) for knob in rewrite.knobs}
            after = rewrite.transform(g, site, on)
            others = {each.name: each.resources for each in g.nodes if each.tables and "bags.0.weight" not in each.tables}
            assert {each.name: each.resources for each in after.nodes if each.name in others} == others


def test_the_page_shows_the_catalog() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewrites.md").read_text(encoding="utf-8")
    assert catalog_table() in page


def test_coalesced_update_takes_the_expansion_away_and_nothing_else() -> None:
    g = small_graph(ADAGRAD)
    after = by_name("fuse_update").transform(g, whole(g), {"update": "coalesced", "coalesce": "chain"})
    assert [node.name for node in after.nodes] == [node.name for node in g.nodes if node.op != "expand"]
    for node in after.nodes:
        assert set(node.inputs) <= {other.name for other in after.nodes}
        assert ("fuse_update" in node.rewrites) == (node.op == "coalesce")


def test_coalesced_update_is_for_sparse_gradients() -> None:
    g = small_graph()
    dense = replace(g.structure, tables=tuple(replace(t, sparse=False) for t in g.structure.tables))
    knobs = {"update": "coalesced", "coalesce": "chain"}
    assert by_name("fuse_update").legal(g.structure, whole(g), knobs) is None
    assert "dense" in str(by_name("fuse_update").legal(dense, whole(g), knobs))
    assert by_name("fuse_update").equivalence(g.structure, whole(g), knobs) == "reassociated"


# prefetch_batches


def test_index_work_ahead_needs_batches_that_hold_the_ids() -> None:
    g = small_graph()
    assert "a batch does not hold what bags.0 and 2 more is given" in (legal("prefetch_batches", g, prefetch_batches=1) or "")
    held = replace(g, structure=replace(g.structure, in_batch=("bags.0", "bags.1", "big")))
    assert legal("prefetch_batches", held, prefetch_batches=2) is None
    some = replace(g, structure=replace(g.structure, in_batch=("bags.0", "big")))
    assert (legal("prefetch_batches", some, prefetch_batches=1) or "").startswith("a batch does not hold what bags.1 is given")
    inside = graph([table("w", 10)], [feature("f", "w", from_inputs=False)])
    assert "no lookup's ids are arguments" in (legal("prefetch_batches", inside, prefetch_batches=1) or "")


def test_index_work_ahead_moves_what_the_prelude_looks_up() -> None:
    g = graph([table("a", 1000), table("b", 10)], [feature("a", "a"), feature("b", "b", from_inputs=False)])
    after = by_name("prefetch_batches").transform(g, split(g), {"prefetch_batches": 1})
    assert {each.name for each in after.nodes if each.rewrites} == {"lookup:a", "update:a"}
    assert [each.resources for each in after.nodes] == [each.resources for each in g.nodes]
    # 256 distinct ids in 64 bags: 4 bytes an id and a bag, 8 a lookup and a row.
    assert [by_name("prefetch_batches").memory_bytes(g, split(g), {"prefetch_batches": depth}) for depth in (0, 1, 2)] == [
        0, 4 * (256 + 64) + 16 * 256, 2 * (4 * (256 + 64) + 16 * 256)]
