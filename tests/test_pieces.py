"""Programs in pieces: equal layers share one, the numbers are those of the whole, and nothing lives longer."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import sbpc
from sbpc import Mesh
from sbpc.runtime.executors import EXECUTORS, code, kernels
from sbpc.runtime.pieces import cut, in_pieces
from sbpc.runtime.start import process_groups
from tests import models
from tests.processes import run_ranks


def program(layers: int) -> GraphModule:
    """The step of a GPT on one rank."""
    model, args = models.gpt2(layers=layers)
    return sbpc.plan(model, args, Mesh(p=1)).local


def values(gm: GraphModule) -> list[Tensor]:
    """Values for the placeholders of a program."""
    torch.manual_seed(0)
    shapes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [torch.randint(0, 12, x.shape) if x.dtype == torch.int64 else torch.randn(x.shape) * 0.1 for x in shapes]


def pieces(gm: GraphModule) -> Any:
    """The executor that runs generated code piece by piece."""
    return in_pieces(kernels(gm), gm, code)


def test_a_deeper_model_has_more_pieces_and_no_more_kinds() -> None:
    found = [cut(program(layers).graph) for layers in (6, 9)]
    kinds = [len({piece.key for piece in each}) for each in found]
    assert kinds[0] == kinds[1] <= 8 and len(found[1]) == len(found[0]) + 6  # a forward and a backward for each layer
    assert all(sum(len(piece.calls) for piece in each) > 12 * len(each) for each in found)


def test_a_program_in_pieces_gives_what_the_whole_gives() -> None:
    gm = program(6)
    whole, parts = code(gm)(values(gm)), pieces(gm)(values(gm))
    assert len(whole) == len(parts)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(whole, parts))


def test_nothing_lives_longer_than_it_is_read() -> None:
    gm = program(6)
    graph = kernels(gm)
    order = cut(graph)
    born: list[list[weakref.ref[Tensor]]] = []

    def watched(piece: GraphModule) -> Any:
        run = code(piece)

        def boxed(given: list[Tensor]) -> Any:
            made = run(given)
            assert not given
            born.append([weakref.ref(value) for value in made])
            return made

        return boxed

    results = in_pieces(graph, gm, watched)(values(gm))
    kept = {id(value) for value in results if value is not None}
    alive = [ref() for each in born for ref in each]
    assert len(born) == len(order) and all(value is None or id(value) in kept for value in alive)


def train(executor: str) -> list[float]:
    """Trains a deep GPT for three steps on a rank, with collectives that begin in one piece and end in another."""
    EXECUTORS["pieces"] = pieces
    process_groups.start("cpu")
    torch.manual_seed(0)
    model, args = models.gpt2(layers=5)
    plan = sbpc.plan(model, args, Mesh(x=2, cluster="ethernet"), pin={"*": "S(0)"}, microbatches=1, panels=1)
    module = sbpc.parallelize(model, plan, executor=executor)
    found = [len({piece.key for piece in cut(plan.local.graph)}), len(cut(plan.local.graph))]
    assert found[0] < found[1], found
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(module.step(*args).item())
        optimizer.step()
    process_groups.stop()
    return losses


@pytest.mark.parametrize("executor", ["pieces", pytest.param("inductor", marks=pytest.mark.prove)])
def test_collectives_that_begin_in_one_piece_end_in_another(executor: str) -> None:
    expected, found = run_ranks(train, 2, "code"), run_ranks(train, 2, executor)
    assert found[0] == found[1] == pytest.approx(expected[0], rel=1e-5 if executor == "inductor" else 1e-12)
