"""Lookups that a schedule groups become one node of a compiled graph.

Each module's forward left a node of its own. What the tracer gives is not functional yet: between two nodes somebody may write to what the
second one reads. So lookups are merged only where nothing that they read is written to anywhere in the graph, and where their inputs are
there at the first one, or are views of what is.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sparselift.runtime.library import find

_VIEW_FUNCTIONS = {operator.getitem, torch.select}
_VIEW_METHODS = {"select", "view", "reshape", "flatten", "squeeze", "unsqueeze"}


def merge_lookups(module: GraphModule) -> None:
    """Merge planned lookups in a graph of torch.compile's tracer, before autograd sees it; their backwards are one node then, too."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for members in _groups(module).values():
        first, views = members[0], []
        together = [first]
        for node in members[1:]:
            found = _moved(node, order, order[first])
            if found is not None:
                together.append(node)
                views += found
        if len(together) > 1:
            for view in sorted(set(views), key=order.__getitem__):
                first.prepend(view)
            _merge(module, together)
    module.graph.lint()
    module.recompile()


def _groups(module: GraphModule) -> dict[Hashable, list[Node]]:
    """Nodes that a schedule wants in one, in their order. Each is named after its feature, also where its module is called again."""
    calls: Counter[Hashable] = Counter()
    found: dict[Hashable, list[Node]] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.sparselift.planned_lookup:
            continue
        *inputs, features, forms, weighted, plan = node.args
        recorded = find(plan).recorded(features[0], calls[plan, features[0]])
        calls[plan, features[0]] += 1
        tensors = [_value(each) for each in node.all_input_nodes]
        if recorded is not None and node.users and not any(tensor is None or tensor._version for tensor in tensors):
            name, group = recorded
            node.args = (*inputs, [name], forms, weighted, plan)
            # The outputs of one node are differentiable together.
            trains = any(tensor is not None and tensor.requires_grad for tensor in tensors)
            found.setdefault((plan, group, trains), []).append(node)
    return found


def _value(node: Node) -> Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def _moved(node: Node, order: dict[Node, int], before: int) -> list[Node] | None:
    """What must move so that the inputs of a node are there before a place; None if something cannot."""
    found: list[Node] = []
    for each in node.all_input_nodes:
        if order[each] < before:
            continue
        if not _is_view(each):
            return None
        above = _moved(each, order, before)
        if above is None:
            return None
        found += [*above, each]
    return found


def _is_view(node: Node) -> bool:
    if _value(node) is None:
        return False
    return node.target in (_VIEW_FUNCTIONS if node.op == "call_function" else _VIEW_METHODS if node.op == "call_method" else ())


def _merge(module: GraphModule, nodes: Sequence[Node]) -> None:
    graph, first = module.graph, nodes[0]
    with graph.inserting_before(first):
        arguments = [[each for node in nodes for each in node.args[place]] for place in range(len(first.args) - 1)]    # type: ignore[union-attr]
        merged = graph.call_function(torch.ops.sparselift.planned_lookup, (*arguments, first.args[-1]))
        items = [graph.call_function(operator.getitem, (merged, place)) for place in range(len(nodes))]
    for node, own in zip(nodes, items):
        item, = node.users                       # its one output
        own.meta = dict(item.meta)
        item.replace_all_uses_with(own)
        graph.erase_node(item)
        graph.erase_node(node)
