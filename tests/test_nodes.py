"""Nodes made and copied by hand are those that torch makes."""

from __future__ import annotations

import operator

from torch.fx import Graph

from sbpc.graph.rewrite import called, copied


def test_a_node_and_its_copy_hold_what_torch_gives_them() -> None:
    graph, other = Graph(), Graph()
    x, y = graph.placeholder("x"), other.placeholder("y")
    ours = called(graph, operator.add, [x, [1, x]], {"out": x}, "total")
    torchs = graph.create_node("call_function", operator.add, (x, [1, x]), {"out": x}, "total")
    ours.meta["val"] = 3
    copy = copied(other, ours, lambda _: y)
    for node in (ours, torchs):
        assert (node.op, node.target, node.args, node.kwargs) == (
            "call_function",
            operator.add,
            (x, [1, x]),
            {"out": x},
        )
    assert (copy.name, copy.args, copy.kwargs, copy.meta) == ("total", (y, [1, y]), {"out": y}, {"val": 3})
    assert list(x.users) == [ours, torchs] and list(y.users) == [copy]
