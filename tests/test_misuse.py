"""What a script may do to a parallel module out of turn: right as on one device, or refused with what to do instead."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError
from sbpc.runtime.start import process_groups
from tests.processes import run_ranks


class Net(nn.Module):
    """Two layers; the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


class Normed(Net):
    """The same with parametrized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parametrizations.weight_norm(self.up), parametrizations.spectral_norm(self.down)


def made(kind: type[nn.Module] = Net, asks: bool = False) -> tuple[nn.Module, nn.Module, Tensor]:
    """A module on this rank, the same on one device, an argument."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 6, requires_grad=asks)
    return sbpc.parallelize(copy.deepcopy(model), planned(kind, asks)), model, x


@functools.cache
def planned(kind: type[nn.Module], asks: bool) -> sbpc.Plan:
    return sbpc.plan(kind(), (torch.randn(4, 6, requires_grad=asks),), Mesh(x=2))


def error(function: Callable[[], Any]) -> str:
    """The message of the PlanError that a function raises."""
    with pytest.raises(PlanError) as caught:
        function()
    return str(caught.value)


def differences(module: nn.Module, model: nn.Module) -> float:
    """The largest difference of gradients and parameters from those on one device."""
    pairs = [(one, two) for one, two in zip(module.parameters(), model.parameters(), strict=True)]
    pairs += [(one.grad, two.grad) for one, two in pairs]
    return max(float((one.full_tensor() - two).detach().abs().max()) for one, two in pairs)  # type: ignore[union-attr]


def penalty() -> str:
    """A gradient penalty added to the loss: without the refusal it would count in the loss and give no gradient."""
    module, _, x = made(asks=True)
    loss = module(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return error((loss + slope.square().sum()).backward)


def create_graph_alone() -> float:
    """Gradients that keep a graph which nobody asks for."""
    module, model, x = made(asks=True)
    for each in (module, model):
        each(x).backward(create_graph=True)
        each(x).backward()
    return differences(module, model)


def written(step: Callable[[nn.Module], None]) -> str:
    """Parameters that are written between a forward and its backward."""
    module, _, x = made()
    module(x).backward()
    loss = module(x)
    step(module)
    return error(loss.backward)


def by_hand(module: Any) -> None:
    with torch.no_grad():
        module.down.weight.add_(1)


def by(**options: Any) -> Callable[[nn.Module], None]:
    return lambda module: torch.optim.AdamW(module.parameters(), **options).step()


def written_but_not_read() -> float:
    """A bias, which no backward reads, may be written; the memory that is read may be written after it."""
    module, model, x = made()
    for each in (module, model):
        loss: Any = each(x)
        with torch.no_grad():
            each.down.bias.add_(1)  # type: ignore[operator]
        loss.backward(retain_graph=True)
        loss.backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    return differences(module, model)


def fused(kind: Any, **options: Any) -> float:
    """Fused steps for which torch has none for DTensors."""
    module, model, x = made()
    for each in (module, model):
        optimizer = kind(each.parameters(), lr=0.1, fused=True, **options)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            each(x).backward()
            optimizer.step()
    return differences(module, model)


def parametrized() -> float:
    """Modules of torch.nn.utils.parametrizations, which copy.copy does not copy."""
    module, model, x = made(Normed)
    for each in (module, model):
        each(x).backward()
    assert list(module.state_dict()) == list(model.state_dict())
    return differences(module, model)


def elsewhere() -> list[str]:
    """A module and an argument on another device."""
    module, _, x = made()
    found = [error(lambda: module(x.to("meta")))]
    module.to("meta")
    return [*found, error(lambda: module(x))]


def changing_floats() -> float:
    """torch.compile: Python numbers that change between calls are planned anew."""
    weight, x = torch.randn(6, 6, requires_grad=True), torch.randn(4, 6)
    function = lambda x, by: ((x @ weight).sum() * by, torch.arange(3) * by)  # noqa: E731
    compiled = torch.compile(function, backend="sbpc", options={"mesh": Mesh(x=2)})
    pairs = [(compiled(x, by), function(x, by)) for by in (1, 2, 2.5, 3.5, 4.5)]
    assert all(one.dtype == two.dtype for found, wanted in pairs for one, two in zip(found, wanted))
    return max(float((one - two).detach().abs().max()) for found, wanted in pairs for one, two in zip(found, wanted))


CASES: dict[str, Callable[[], Any]] = {
    "penalty": penalty,
    "create_graph alone": create_graph_alone,
    "written by hand": lambda: written(by_hand),
    "written by foreach": lambda: written(by(foreach=True)),
    "written by fused": lambda: written(by(fused=True)),
    "written by a loop": lambda: written(by(foreach=False)),
    "written but not read": written_but_not_read,
    "fused SGD": lambda: fused(torch.optim.SGD, momentum=0.9, nesterov=True),
    "fused Adagrad": lambda: fused(torch.optim.Adagrad),
    "parametrized": parametrized,
    "elsewhere": elsewhere,
    "changing floats": changing_floats,
}
TWICE = (
    "a gradient of a gradient is asked for, and a plan has a forward and a backward alone\n"
    "  Leave out create_graph=True, or compute such a term, as a gradient penalty, by a model on one device."
)
WRITTEN = (
    "parameter down.weight was written between a forward and its backward, which reads it\n"
    "  Call backward before optimizer.step(), or run the forward again."
)
REFUSED: dict[str, Any] = {
    "penalty": TWICE,
    **{name: WRITTEN for name in CASES if name.startswith("written by")},
    "elsewhere": [
        "argument 0 is on meta, this rank computes on cpu\n  Move it there: .to('cpu').",
        "parameter up.weight is on meta, this rank computes on cpu\n  Leave the parallel module where it is.",
    ],
}


def on_ranks() -> dict[str, Any]:
    """What each case gives on this rank, or how it fails."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = case()
        except BaseException as problem:  # the test of that name fails with it
            found[name] = repr(problem)
    process_groups.stop()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2, seconds=240)


def test_a_parallel_module_is_right_or_refuses(ranks: list[dict[str, Any]]) -> None:
    for name in CASES:
        for found in ranks:
            if name in REFUSED:
                assert found[name] == REFUSED[name]
            else:
                assert isinstance(found[name], float) and found[name] < 1e-10, found[name]
