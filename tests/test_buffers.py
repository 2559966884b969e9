"""Writes: what a forward writes in place is functional in the graph, and buffers come out as eager torch leaves them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from tests.compare import compare, eager, relative_error
from tests.processes import run_ranks
from tests.random_plans import random_plan

TOLERANCE = 1e-9


class Writes(nn.Module):
    """A linear layer, a part and buffers, used by `function(self, h)`."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.function, self.part = nn.Linear(6, 4), function, part
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("seen", torch.zeros(3, 4), persistent=False)
        self.register_buffer("unused", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x)).square().mean()


def parted(part: nn.Module) -> Writes:
    return Writes(lambda m, h: m.part(h), part)


def counted(m: Any, h: Tensor) -> Tensor:
    m.count += 1
    return h * m.count


def averaged(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - m.average


def replaced(m: Any, h: Tensor) -> Tensor:
    m.average = torch.lerp(m.average, h.detach().amax(0), 0.5)
    return h * m.average


def one_row(m: Any, h: Tensor) -> Tensor:
    m.seen[1] = h.detach().sum(0)
    m.seen[:, 2] += 1
    return h + m.seen.sum(0)


def into_views(m: Any, h: Tensor) -> Tensor:
    y = h * 2
    y[:, 0] = 0
    y[1:3, 1:].mul_(3).add_(1)
    y.view(-1)[::2] *= 0.5
    y.t()[3].clamp_(min=0.1)
    return y


def half(m: Any, h: Tensor) -> Tensor:
    h[:, :2] += h[:, 2:]
    return F.relu_(h)


def tied(m: Any, h: Tensor) -> Tensor:
    m.part[1](m.part[0](h).exp())
    return m.part[0](h)


NETS: dict[str, Callable[[], Writes]] = {
    "an average": lambda: Writes(averaged),
    "an average replaced": lambda: Writes(replaced),
    "a counter": lambda: Writes(counted),
    "batch norm": lambda: parted(nn.BatchNorm1d(4)),
    "batch norm in eval": lambda: parted(nn.BatchNorm1d(4).eval()),
    "batch norm twice": lambda: Writes(tied, nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))),
    "batch norm without statistics": lambda: parted(nn.BatchNorm1d(4, track_running_stats=False)),
    "half of a tensor": lambda: Writes(half),
    "instance norm with statistics": lambda: Writes(
        lambda m, h: m.part(h.view(-1, 2, 2)).flatten(1), nn.InstanceNorm1d(2, track_running_stats=True)
    ),
    "rows of a buffer": lambda: Writes(one_row),
    "views of an intermediate": lambda: Writes(into_views),
}


def made(name: str) -> tuple[Writes, tuple[Tensor]]:
    """A net and five rows, which no mesh divides."""
    torch.manual_seed(0)
    return NETS[name](), (torch.randn(5, 6),)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


@functools.cache
def planned(name: str) -> sbpc.Plan:
    """The plan of a net on three ranks."""
    model, args = made(name)
    return sbpc.plan(model, args, Mesh(x=3))


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.prove)])
@pytest.mark.parametrize("name", NETS)
def test_buffers_outputs_and_gradients_are_those_of_eager_torch(name: str, quick: bool, float64: None) -> None:
    model, args = made(name)
    after, before = copy.deepcopy(model), buffers(model)
    outputs, gradients = eager(after, args)
    others = ({"x": 3}, "aot"), ({"x": 2, "y": 2}, "light")
    for plan in (
        (planned(name),)
        if quick
        else (sbpc.plan(model, args, Mesh(**sizes), capture=method) for sizes, method in others)
    ):
        assert not plan.notes
        for each in (plan, random_plan(plan, 0)):
            assert compare(each, model, args, outputs, gradients) <= TOLERANCE
            found = {**before, **sbpc.simulate(each, model, args).buffers}
            for key, value in buffers(after).items():
                assert relative_error(found[key], value) <= TOLERANCE, key
    assert all(torch.equal(value, before[key]) for key, value in buffers(model).items())


def two_steps(paths: dict[str, str]) -> dict[str, Any]:
    """The buffers and the loss of every net after two steps on this rank."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, path in paths.items():
        model, args = made(name)
        parallel = sbpc.parallelize(model, sbpc.load(path))
        losses = [parallel(*args) for _ in range(2)]
        losses[1].backward()
        found[name] = losses[1].item(), buffers(parallel), list(parallel.state_dict()) == list(model.state_dict())
    return found


def test_ranks_hold_the_buffers_of_eager_torch_after_two_steps(tmp_path: Any, float64: None) -> None:
    paths, expected = {}, {}
    for name in NETS:
        model, args = made(name)
        paths[name] = str(tmp_path / f"{name}.sbpc")
        planned(name).save(paths[name])
        model(*args)
        expected[name] = model(*args).item(), buffers(model)
    for results in run_ranks(two_steps, 3, paths):
        assert isinstance(results, dict), results
        for name, (loss, values) in expected.items():
            found, held, same_names = results[name]
            assert found == pytest.approx(loss, rel=1e-10) and same_names, name
            for key, value in values.items():
                assert relative_error(held[key], value) <= TOLERANCE, (name, key)
