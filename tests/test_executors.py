"""What runs a program: generated code calls ops by the shortest way, and just these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import sbpc
from sbpc._compat import TorchDispatchMode
from sbpc.runtime.executors import BINDINGS, inductor
from sbpc.runtime.start import process_groups
from tests import models
from tests.processes import run_ranks

aten = torch.ops.aten
X, ONES = torch.arange(12.0).reshape(3, 4), torch.ones(4)
CASES: dict[Any, tuple[Any, ...]] = {
    aten.add.Tensor: (X, X),
    aten.addmm.default: (ONES[:3], X, X.T),
    aten.bmm.default: (X[None], X.T[None]),
    aten.cat.default: ([X, X], 1),
    aten.clone.default: (X,),
    aten.div.Tensor: (X, ONES),
    aten.embedding.default: (X, torch.tensor([2, 0]), 1),
    aten.mm.default: (X, X.T),
    aten.mul.Tensor: (X, X),
    aten.native_layer_norm.default: (X, [4], ONES, ONES, 1e-5),
    aten.permute.default: (X, [1, 0]),
    aten.reshape.default: (X.T, [2, 6]),
    aten.sub.Tensor: (X, ONES),
    aten.sum.dim_IntList: (X, [0], True),
}


class Calls(TorchDispatchMode):
    """Records the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_functions_in_the_place_of_ops_run_the_same_ops() -> None:
    assert BINDINGS.keys() == CASES.keys()
    for op, args in CASES.items():
        with Calls() as named:
            expected = op(*args)
        with Calls() as bound:
            found = BINDINGS[op](*args)
        assert named.ops == bound.ops and (op in named.ops or op is aten.reshape.default), op
        pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (found, expected)))
        assert all(torch.equal(one, other) for one, other in pairs), op


def test_what_a_program_hands_on_goes_around_inductor() -> None:
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    graph.output((weight, graph.call_function(aten.mm.default, (x, weight)), None, weight, x))
    run, given = inductor(GraphModule(nn.Module(), graph)), [X, X.T.contiguous()]
    for _ in range(2):
        lent = list(given)
        found = run(lent)
        assert not lent  # values die while the program runs
        assert found[0] is found[3] is given[1] and found[4] is X and found[2] is None
        assert torch.equal(found[1], X @ X.T)


def test_inductor_keeps_the_order_of_a_program() -> None:
    """A gradient is computed where it stands, not at the end, so that what it is computed from dies early."""
    graph = Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    gradient = graph.call_function(aten.mm.default, (x, weight))
    through = graph.call_function(aten.addmm.default, (bias, x, weight))
    graph.output((graph.call_function(aten.addmm.default, (bias, through, weight)), gradient))
    run, given = inductor(GraphModule(nn.Module(), graph)), [X, torch.eye(4), ONES]
    run(list(given))  # compiles
    with Calls() as calls:
        found = run(list(given))
    assert [op for op in calls.ops if op.name().endswith("mm.out")] == [aten.mm.out, aten.addmm.out, aten.addmm.out]
    assert torch.equal(found[0], X + 2) and torch.equal(found[1], X)


def train(executor: str) -> list[float]:
    """On a rank: the losses of three steps of an MLP."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.mlp()
    module = sbpc.parallelize(model, sbpc.plan(model, args, sbpc.Mesh(x=2)), executor=executor)
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    process_groups.stop()
    return losses


@pytest.mark.prove
@pytest.mark.parametrize("executor", ["inductor", "interpreter"])
def test_executors_train_alike_on_ranks(executor: str) -> None:
    expected, found = run_ranks(train, 2, "code"), run_ranks(train, 2, executor)
    assert found[0] == found[1] == pytest.approx(expected[0], rel=1e-12)
