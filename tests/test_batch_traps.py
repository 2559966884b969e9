"""Models whose micro-batches need each other, or more than a part of the batch: a step in parts has the whole batch's numbers, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import LoopError, MemoryLimitError, SbpcError
from tests import models
from tests.compare import eager, error_of, relative_error

Step = Callable[["Net", Tensor, Any], Tensor]


class Net(nn.Module):
    """A layer, buffers, and a loss made of the layer's values."""

    def __init__(self, loss: Step) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(6, 4), loss
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("weight", torch.rand(4))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.loss(self, torch.tanh(self.layer(x)), other)


def averaged(net: Net, y: Tensor, _: Tensor) -> Tensor:
    net.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return (y - net.mean).square().mean()


def counted(net: Net, y: Tensor, _: Tensor) -> Tensor:
    net.count += 1
    return y.square().mean() / net.count


def smoothed(net: Net, y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y, target, weight=net.weight, ignore_index=-1, label_smoothing=0.1) + y.abs().sum()


LOOPS: dict[str, Step] = {
    "a sum over the sequence of another input": lambda _, y, other: (y * other.sum().sin()).square().mean(),
    "a counter": counted,
    "weights, ignored targets and smoothed labels": smoothed,
    "a term of weights alone": lambda net, y, _: (
        y.square().mean() + 0.1 * sum(p.square().sum() for p in net.parameters())
    ),
    "product of sums": lambda _, y, __: y.square().mean() * y.sum(),
    "a product of a mean and a count": lambda _, y, target: y.square().mean() * (target >= 0).sum(),
}
NO_LOOPS: dict[str, Step] = {
    "contrast": lambda _, y, __: F.cross_entropy(y @ y.T, torch.arange(8)),
    "deviation": lambda _, y, __: y.std(0).sum(),
    "exponential averages": averaged,
    "order": lambda _, y, __: (y.sort(0).values * torch.arange(8.0)[:, None]).sum(),
    "running sum": lambda _, y, __: y.cumsum(0).square().mean(),
    "median": lambda _, y, __: y.median(),
}


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.tensor([-1, -1, -1, -1, -1, 1, 2, 3])


@pytest.mark.parametrize(("name", "loops"), [*((name, True) for name in LOOPS), *((name, False) for name in NO_LOOPS)])
def test_parts_have_the_numbers_of_the_whole_batch_and_loop_where_they_can(
    name: str, loops: bool, float64: None
) -> None:
    net, args = Net((LOOPS | NO_LOOPS)[name]), arguments()
    plan = sbpc.plan(net, args, Mesh(x=2), microbatches=4 if loops else 2, objective="serial")
    assert (plan.loop is not None) == loops
    run = sbpc.simulate(plan, net, args)
    assert error_of(run, *eager(net, args)) <= 1e-10  # which writes the buffers
    buffers = dict(net.named_buffers())
    assert all(relative_error(value, buffers[key]) <= 1e-10 for key, value in run.buffers.items())
    assert sum(map(bool, run.buffers)) == (name in ("a counter", "exponential averages"))


def test_inputs_of_other_sizes_are_cut_evenly_or_are_whole_in_every_part(float64: None) -> None:
    """The batch is that of the first input. What has 6 or 3 rows is not four equal parts."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.layer(x).sum(0) * self.layer(y).tanh()).square().mean() + self.layer(y).square().mean()

    class Added(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x).square().mean() + self.layer(y).square().mean()

    for sizes in [(4, 8), (8, 3), (4, 6)]:
        for net in (Two(), Added()):
            args = torch.randn(sizes[0], 6), torch.randn(sizes[1], 6)
            plan = sbpc.plan(net, args, Mesh(x=2), microbatches=4, objective="serial")
            assert plan.loop is not None
            assert error_of(sbpc.simulate(plan, net, args), *eager(net, args)) <= 1e-10


def test_numbers_of_parts_that_do_not_divide_the_batch_are_refused() -> None:
    for count in [16, 3, 0, -4, 4.0, True, "4"]:
        with pytest.raises(SbpcError, match=r"a batch of 8 in \d+ micro-batches|microbatches is") as caught:
            sbpc.plan(Net(LOOPS["a counter"]), arguments(), Mesh(x=2), microbatches=count)
        assert "\n  " in str(caught.value)  # what to do


def test_stages_name_the_op_that_needs_the_whole_batch() -> None:
    with pytest.raises(LoopError, match=r"depends on parameter layer\.weight\n.*aten\.\w+") as caught:
        sbpc.plan(Net(NO_LOOPS["running sum"]), arguments(), Mesh(pipe=2), stages="pipe", microbatches=4)
    assert "test_batch_traps.py" in str(caught.value) and "Plan without stages=" in str(caught.value)


class Penalized(nn.Module):
    """Layers that share a factor made of a parameter, and penalties on weights. It returns its input, a parameter and constants, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.heat, self.alone = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        given, factor = x, self.heat.exp().sum()
        for layer in self.layers:
            x = torch.tanh(layer(x * factor))
        penalty = (
            0.1 * sum(p.square().sum() for p in self.parameters())
            + 1e-3 * self.layers[1].weight.norm()
            + self.alone.sin().sum()
        )
        return {
            "loss": x.square().mean() + penalty,
            "x": given,
            "heat": self.heat.detach(),
            "constant": torch.arange(3.0),
        }


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_what_is_made_of_parameters_alone_is_made_by_every_stage_that_reads_it(schedule: str, float64: None) -> None:
    net, x = Penalized(), torch.randn(8, 6)
    plan = sbpc.plan(net, (x,), Mesh(pipe=2), stages="pipe", schedule=schedule, microbatches=4, objective="serial")
    assert error_of(sbpc.simulate(plan, net, (x,)), *eager(net, (x,))) <= 1e-10


def test_a_number_of_micro_batches_beyond_all_batches_is_refused_at_once() -> None:
    for options in ({"mesh": Mesh(x=2)}, {"mesh": Mesh(pipe=2), "stages": "pipe"}):
        with pytest.raises(SbpcError, match="a batch of 8 in 1000000000 micro-batches"):
            sbpc.plan(Net(LOOPS["a counter"]), arguments(), microbatches=10**9, **options)


def test_stages_that_do_not_fit_say_what_the_least_is_made_of() -> None:
    """With recompute="auto", too, though there is no block to compute again."""
    for options in ({}, {"recompute": "auto"}):
        with pytest.raises(
            MemoryLimitError, match=r"no plan was found that takes less than [\d,]+ bytes a rank, .*\n  of which parame"
        ) as caught:
            sbpc.plan(*models.mlp(layers=2), Mesh(pipe=2), stages="pipe", microbatches=4, memory=1e3, **options)
        assert caught.value.nearest.memory["total"] > 1e3
