"""Lockstep: collectives over the ranks in one process, bytes as a ring sends them, live bytes, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from sbpc.errors import VerifyError
from sbpc.runtime.one_process.lockstep import lockstep

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
PAIR = {"g": [[0, 1]]}


def written(write: Callable[[Graph, Node], Any]) -> GraphModule:
    """The program of one placeholder that `write` writes."""
    graph = Graph()
    graph.output(write(graph, graph.placeholder("x")))
    return GraphModule(Module(), graph)


def one(op: Any, *rest: Any) -> GraphModule:
    """The program of one collective."""
    return written(
        lambda graph, x: graph.call_function(c10d.wait_tensor.default, (graph.call_function(op, (x, *rest)),))
    )


def results(op: Any, *rest: Any, inputs: list[Tensor]) -> tuple[list[list[float]], float]:
    run = lockstep([one(op, *rest)] * len(inputs), [[x] for x in inputs], {"g": [list(range(len(inputs)))]})
    return [outputs[0].tolist() for outputs in run.outputs], run.bytes_sent["g"]


def test_each_collective_does_what_it_is_called_and_sends_what_a_ring_sends() -> None:
    inputs = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 0, 7, 8])]  # 16 bytes each
    assert results(c10d.all_reduce.default, "sum", "g", inputs=inputs) == ([[6, 2, 10, 12]] * 2, 16)
    assert results(c10d.all_reduce.default, "max", "g", inputs=inputs) == ([[5, 2, 7, 8]] * 2, 16)
    assert results(c10d.reduce_scatter_tensor.default, "min", 2, "g", inputs=inputs) == ([[1, 0], [3, 4]], 8)
    assert results(c10d.all_gather_into_tensor.default, 2, "g", inputs=inputs) == ([[1, 2, 3, 4, 5, 0, 7, 8]] * 2, 16)
    assert results(c10d.all_to_all_single.default, [2, 2], [2, 2], "g", inputs=inputs) == (
        [[1, 2, 5, 0], [3, 4, 7, 8]],
        8,
    )
    assert results(c10d.broadcast.default, 1, "g", inputs=inputs) == ([[5, 0, 7, 8]] * 2, 8)


def test_a_chunk_of_a_ring_passes_every_link_but_one() -> None:
    inputs = [torch.ones(7) for _ in range(3)]
    assert results(c10d.all_reduce.default, "sum", "g", inputs=inputs)[1] == pytest.approx(2 * 2 / 3 * 28)
    assert results(c10d.all_gather_into_tensor.default, 3, "g", inputs=inputs)[1] == 2 * 28


def test_an_uneven_exchange_counts_its_busiest_group() -> None:
    programs = [
        one(c10d.all_to_all_single.default, [1, 2], [1, 0], "g"),
        one(c10d.all_to_all_single.default, [0, 1], [2, 1], "g"),
    ]
    run = lockstep(programs, [[torch.tensor([1.0])], [torch.tensor([2.0, 3, 4])]], PAIR)
    assert [out[0].tolist() for out in run.outputs] == [[1, 2, 3], [4]]
    assert run.bytes_sent == {"g": 8 / 2}


def test_groups_meet_on_their_own() -> None:
    program = one(c10d.all_reduce.default, "sum", "g")
    idle = written(lambda graph, x: x)
    groups = {"g": [[0, 2], [1], [3]]}
    run = lockstep([program, idle, program, program], [[torch.ones(2) * rank] for rank in range(4)], groups)
    assert [out[0].tolist() for out in run.outputs] == [[2, 2], [1, 1], [2, 2], [3, 3]]
    assert run.bytes_sent == {"g": 8}


def test_live_bytes_are_counted_by_storage_until_the_last_use() -> None:
    def write(graph: Graph, x: Node) -> Node:
        first = graph.call_function(aten.add.Tensor, (x, x))  # 400 + 400
        view = graph.call_function(aten.view.default, (first, [10, 10]))  # shares its storage
        second = graph.call_function(aten.sum.default, (view,))  # 804, then first and view die
        return graph.call_function(aten.mul.Tensor, (second, second))

    run = lockstep([written(write)], [[torch.ones(100)]], {})
    assert run.peak_memory == 400 + 400 + 4
    assert run.outputs[0][0].item() == 40000


def test_a_value_without_a_reader_dies_at_once() -> None:
    def write(graph: Graph, x: Node) -> Node:
        for _ in range(3):
            graph.call_function(aten.add.Tensor, (x, x))
        return x

    assert lockstep([written(write)], [[torch.ones(100)]], {}).peak_memory == 800


def test_outputs_are_flat_and_no_gradient_is_recorded() -> None:
    x = torch.ones(2, requires_grad=True)
    program = written(lambda graph, x: [graph.call_function(aten.neg.default, (x,)), (None, x)])
    outputs = lockstep([program], [[x]], {}).outputs[0]
    assert outputs[1] is None and outputs[2] is x and not outputs[0].requires_grad


def refused(programs: list[GraphModule], groups: dict[str, list[list[int]]] = PAIR, size: int = 4) -> str:
    with pytest.raises(VerifyError) as error:
        lockstep(programs, [[torch.ones(size)] for _ in programs], groups)
    return str(error.value)


def test_ranks_at_different_collectives_are_refused() -> None:
    first, second = one(c10d.all_reduce.default, "sum", "g"), one(c10d.all_reduce.default, "max", "g")
    message = refused([first, second])
    assert message.startswith(
        "rank 1 is at _c10d_functional.all_reduce.default of [4] with ('max', 'g'), "
        "rank 0 at _c10d_functional.all_reduce.default of [4] with ('sum', 'g')\n  %all_reduce"
    )
    assert message.endswith("mend the pass that wrote these programs.")


def test_ranks_that_wait_for_ever_are_named() -> None:
    message = refused([one(c10d.all_reduce.default, "sum", "g"), written(lambda graph, x: x)])
    assert message.startswith("rank 0 waits in 'g' for ever, with rank 1 at its end\n  %all_reduce")


def test_a_wrong_node_is_named() -> None:
    for program, what in [
        (one(c10d.all_gather_into_tensor.default, 3, "g"), "does not fit a group of 2"),
        (one(c10d.reduce_scatter_tensor.default, "sum", 4, "g"), "does not fit a group of 2"),
        (one(c10d.all_reduce.default, "avg", "g"), "does not fit a group of 2"),
        (one(c10d.all_to_all_single.default, [2, 2], [1, 3], "g"), "does not fit a group of 2"),
        (one(c10d.all_to_all_single.default, [1, 2], [1, 2], "g"), "does not fit a group of 2"),
        (one(c10d.broadcast.default, 2, "g"), "does not fit a group of 2"),
        (one(c10d.all_reduce.default, "sum", "h"), "no group is called 'h'"),
        (one(c10d.all_reduce_coalesced.default, "sum", "g"), "all_reduce_coalesced.default is not run in lockstep"),
        (written(lambda graph, x: graph.call_method("sum", (x,))), "call_method is not run in lockstep"),
        (
            written(lambda graph, x: graph.call_function(aten.view.default, (x, [3]))),
            "RuntimeError: shape '[3]' is invalid",
        ),
    ]:
        message = refused([program, program])
        assert what in message.splitlines()[0] and "\n  %" in message


def test_a_chunk_that_does_not_divide_is_refused() -> None:
    program = one(c10d.reduce_scatter_tensor.default, "sum", 2, "g")
    assert "of [5] with ('sum', 2, 'g') does not fit a group of 2" in refused([program, program], size=5)


def test_every_placeholder_needs_an_input() -> None:
    with pytest.raises(VerifyError, match="0 inputs for a program with 1 placeholders"):
        lockstep([one(c10d.all_reduce.default, "sum", "g")], [[]], {"g": [[0]]})
