"""The graph's dataclasses: JSON, input paths, and the texts for people."""

import json
import sys
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparselift.errors import MissingExtraError
from sparselift.ir import Concat, Feature, Graph, InputPath, Interaction, Linear, Node, OptimizerInfo, Refusal, Resources, Structure, Table
from sparselift.stats import sketch

SGD = OptimizerInfo(0, "SGD", "sgd")


def make_graph(rows=(1000, 50), refusals=(), **changes):
    tables = tuple(Table(f"e.{t}.weight", r, 16, "float32", True, SGD) for t, r in enumerate(rows))
    features = tuple(Feature(f"e.{t}", f"e.{t}", 0, table.name, "sum", None, False, "offsets", False, "int64",
                             InputPath(("args", 1, t)), InputPath(("args", 0), (0, t)), None) for t, table in enumerate(tables))
    structure = Structure(tables, features, (Concat("concat", (8, *(f.name for f in features))),), ("SGD",), None)
    sketches = {f.name: sketch(np.arange(32) % 25, np.full(8, 4), table.rows) for f, table in zip(features, tables)}
    nodes = tuple(Node(f"lookup:{f.name}", "lookup", "forward", (), (f.table,), (f.name,),
                       Resources(flops=512, read_bytes=4096, write_bytes=512, time_s=0.001)) for f in features)
    graph = Graph("toy", structure, (*nodes, Node("dense", "dense", "forward", ("concat",), resources=Resources(flops=3_000_000))),
                  sketches, tuple(refusals), 8, {"record": "saw 1 batches"})
    return replace(graph, **changes)


def test_structure_round_trip():
    structure = make_graph().structure
    odd = replace(structure, uses=("clip",), tables=(replace(structure.tables[0], optimizer=None), structure.tables[1]))
    multiplied = replace(structure, interactions=(Interaction("interaction", "concat", 0, "lower", True),))
    layered = replace(structure, linears=(Linear("top.0", 16, 1, True),))
    for each in (structure, odd, multiplied, layered):
        assert Structure.from_dict(json.loads(json.dumps(each.to_dict()))) == each


def test_names_that_are_not_there_are_answered_with_those_that_are():
    with pytest.raises(KeyError, match=r"no table 'x'; there are \['e\.0\.weight', 'e\.1\.weight'\]"):
        make_graph().structure.table("x")
    with pytest.raises(KeyError, match="no feature 'x'"):
        make_graph().structure.feature("x")


def test_paths_fetch_what_they_name():
    pair = namedtuple("pair", "ids offsets")(torch.arange(6).view(2, 3), "o")
    kwargs = {"batch": {"ids": pair, 7: [pair]}}
    assert InputPath(("args", 0)).fetch((5,), {}) == 5
    assert InputPath(("kwargs", "batch", "ids", "offsets")).fetch((), kwargs) == "o"
    assert InputPath(("kwargs", "batch", 7, 0, 1)).fetch((), kwargs) == "o"
    assert InputPath(("kwargs", "batch", "ids", 0), (1, 2)).fetch((), kwargs).tolist() == [2, 5]
    for path, error in ((("args", 0), IndexError), (("kwargs", "x"), KeyError), (("kwargs", "batch", "ids", "x"), AttributeError)):
        with pytest.raises(error):
            InputPath(path).fetch((), kwargs)
    assert str(InputPath(("kwargs", "batch", 7), (1, 2))) == "kwargs['batch'][7].select(1, 2)"


def test_a_graph_reads_well():
    text = str(make_graph(refusals=[Refusal("bad", "max_norm=1.0 rewrites rows", "max_norm=None")]))
    assert text.splitlines()[0] == "toy: 2 tables, 1,050 rows, 65.6 KiB; batch 8; SGD"
    assert "2 lookups a step, all of them with ids from the arguments of the forward" in text
    assert "concat joins 2 lookups beside 1 other part (8 columns)" in text
    assert "e.0.weight  1,000   16  62.5 KiB  sum            4.0           32       78%  SGD" in text
    assert "forward  lookups         2  8.0 KiB  1.0 KiB  1.0 k   2.00 ms" in text
    assert "         dense part      1                    3.0 M" in text
    assert text.endswith("not lifted:\n  bad: max_norm=1.0 rewrites rows (max_norm=None)")
    assert max(map(len, text.splitlines())) < 120


def test_many_alike_tables_take_few_lines():
    text = str(make_graph(rows=(1000,) * 500 + (10**6,) * 500))
    assert len(text.splitlines()) < 15
    assert "e.0.weight and 499 like it" in text and "e.500.weight and 499 like it" in text


def test_many_refusals_are_cut_short_in_print_and_not_in_explain():
    graph = make_graph(refusals=[Refusal(f"m{k}", "why") for k in range(50)])
    assert "and 38 more; explain() names them" in str(graph) and "m49" not in str(graph)
    assert "m49: why" in graph.explain()


def test_explain_says_how_each_module_was_lifted():
    native = OptimizerInfo(0, "SparseAdam", None, "no fused update for it")
    graph = make_graph(notes={"e.1": "has forward hooks, which keep running"})
    graph = replace(graph, structure=replace(graph.structure, tables=(replace(graph.structure.tables[0], optimizer=native),
                                                                      replace(graph.structure.tables[1], optimizer=None))))
    lines = graph.explain().splitlines()
    assert lines[0] == ("e.0: lifted; sum over bags of e.0.weight (1,000 x 16); int64 ids args[1][0], offsets args[0].select(0, 0)")
    assert lines[1] == "  its table is updated by torch's SparseAdam: no fused update for it"
    assert lines[3:5] == ["  no optimizer updates its table", "  has forward hooks, which keep running"]
    assert "  record: saw 1 batches" in lines


def test_nodes_as_a_frame(monkeypatch):
    pytest.importorskip("pandas")
    frame = make_graph().to_pandas()
    assert frame["name"].tolist() == ["lookup:e.0", "lookup:e.1", "dense"] and frame["flops"].sum() == 3_001_024
    assert {"op", "phase", "tables", "read_bytes", "time_s", "rewrites"} <= set(frame.columns)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'sparselift\[report\]'"):
        make_graph().to_pandas()
