"""The torch.compile backend on real processes, and what it refuses."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc.api.torch_compile import checked
from tests import models
from tests.processes import run_ranks


class Broken(nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x).square().mean() * x.shape[0]


def steps(module: Any, model: nn.Module, batches: list[Any]) -> list[Any]:
    """Losses of training steps, one without gradients, and the state afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    found: list[Any] = []
    for args in batches:
        optimizer.zero_grad()
        loss = module(*args)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        found.append(module(*batches[0]).item())
    return found + [value.clone() for value in model.state_dict().values()]


def script(compile: Any, wrap: Any) -> dict[str, list[Any]]:
    """A model of many ops, one with buffers that change, one with a graph break and batches of two sizes."""
    found = {}
    for name in ("gpt2", "batch_norm"):
        torch.manual_seed(0)
        model, args = getattr(models, name)(batch=4, **({"layers": 1} if name == "gpt2" else {}))
        found[name] = steps(compile(model), model, [args, args])
    torch.manual_seed(0)
    model = Broken()
    batches = [(torch.randn(rows, 6),) for rows in (8, 8, 4, 8)]
    found["broken"] = steps(compile(model), model, batches)
    torch.manual_seed(0)
    model, args = models.mlp(batch=4)
    parallel = wrap(model, args)
    outer = compile(lambda x: parallel(x) * F.softplus(x).sum())
    loss = outer(*args)
    loss.backward()
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parallel.parameters()]
    found["parallel"] = [loss.item(), *whole]
    return found


def on_ranks() -> Any:
    """The script through the backend, what it logged, and what one more option comes to."""
    torch.set_default_dtype(torch.float64)
    mesh, lines = sbpc.Mesh(data=2), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sbpc").addHandler(handler)
    logging.getLogger("sbpc").setLevel(logging.INFO)
    found = script(
        lambda model: torch.compile(model, backend="sbpc", options={"mesh": mesh}),
        lambda model, args: sbpc.parallelize(model, sbpc.plan(model, args, mesh)),
    )
    return found, [line for line in lines if "graph" in line or "whole" in line]


def test_compiled_modules_train_as_one_process_and_say_what_they_do() -> None:
    torch.set_default_dtype(torch.float64)
    expected = script(lambda model: model, lambda model, args: model)
    for result in run_ranks(on_ranks, 2):
        assert isinstance(result, tuple), result
        found, lines = result
        for name, values in expected.items():
            for at, (one, other) in enumerate(zip(found[name], values)):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=lambda m, p=(name, at): f"{p}: {m}")
        assert sum("whole parameters" in line for line in lines) == 1
        assert any("a graph break lies between" in line for line in lines)
        assert any("is planned anew, for the 2. time: for other shapes" in line for line in lines)
        assert any(" on [4, 6], 2 parameters" in line for line in lines)


class Words(nn.Module):
    """Means over a length that is asked for, by a number that is computed of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        before = F.pad(hidden, (0, 0, tokens.shape[1] // 2, 0))[:, : tokens.shape[1]]
        return F.cross_entropy(self.head(hidden + before).flatten(0, 1), tokens.flatten()) * tokens.shape[0]


SIZES = [(8, 6), (4, 6), (8, 10), (3, 5), (7, 9), (2, 4), (8, 6), (5, 7), (6, 12), (12, 3), (9, 8), (10, 11)]


def of_sizes(compile: Any, mark: bool = False) -> list[float]:
    """Losses of training on batches of many sizes."""
    torch.manual_seed(0)
    model, found = Words().double(), []
    module, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, length in SIZES:
        tokens = torch.randint(11, (rows, length))
        if mark:
            torch._dynamo.mark_dynamic(tokens, (0, 1))
        optimizer.zero_grad()
        loss = module(tokens)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def with_symbols() -> Any:
    """Losses by way in which sizes become symbols, how many graphs were planned, and what is said of too many plans."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sbpc").addHandler(handler)
    logging.getLogger("sbpc").setLevel(logging.INFO)
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"mesh": sbpc.Mesh(data=2)}
    ways: list[tuple[str, dict[str, Any]]] = [("dynamic=True", {"dynamic": True}), ("as it comes", {}), ("marked", {})]
    for name, about in ways:
        torch._dynamo.reset()
        lines.clear()
        losses = of_sizes(partial(torch.compile, backend="sbpc", options=options, **about), name == "marked")
        found[name] = losses, sum("calls on" in line for line in lines)
    torch._dynamo.reset()
    with pytest.raises(sbpc.SbpcError) as error:
        of_sizes(partial(torch.compile, backend="sbpc", options={**options, "plans": 1}, dynamic=True))
    return found, str(error.value)


def test_a_graph_of_symbolic_sizes_is_planned_for_those_that_come_in_few_layouts() -> None:
    expected = of_sizes(lambda model: model)
    for found, said in run_ranks(with_symbols, 2):
        for losses, plans in found.values():
            assert losses == pytest.approx(expected, rel=1e-12) and 2 <= plans <= 4, found
        assert said.startswith("graph 0 has 1 plans, of which none serves [") and "sbpc.buckets" in said


def behind_sizes() -> list[float]:
    """What is computed behind a graph that gives numbers, or nothing but what it writes into a buffer."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(6, 2), nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            width, _ = x.view(len(x), -1).shape[1], self.calls.add_(1)
            torch._dynamo.graph_break()
            found: Tensor = self.layer(x).sum() * width * self.calls
            return found

    torch.manual_seed(0)
    found, mesh = list[float](), sbpc.Mesh(data=2)
    for dynamic in (True, None):
        torch._dynamo.reset()
        model = Scaled()
        compiled = torch.compile(model, backend="sbpc", dynamic=dynamic, options={"mesh": mesh})
        for length in (3, 3, 5):
            x, before = torch.randn(4, length, 6), model.calls.clone()
            found += [compiled(x).item(), model(x).item() / (before + 2).item() * (before + 1).item()]
    return found


def test_a_graph_that_gives_no_tensor_runs_as_it_is() -> None:
    for found in run_ranks(behind_sizes, 2):
        assert found[::2] == pytest.approx(found[1::2], rel=1e-5)


def test_options_that_there_are_not_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(sbpc.SbpcError) as error:
        checked({"mesh": sbpc.Mesh(data=2), "mode": "fast"})
    assert str(error.value) == (
        "the backend has no option 'mode'\n"
        "  It has\n"
        "    mesh: sbpc.Mesh(data=2), or a DeviceMesh; needed\n"
        "    memory: bytes per rank\n"
        '    objective: "seconds" or "bytes"\n'
        '    executor: "auto", "code", "graph", "interpreter" or "inductor"\n'
        "    plans: how many a graph of symbolic sizes may have, 8"
    )
    with pytest.raises(sbpc.SbpcError, match="the option plans is 0"):
        checked({"mesh": sbpc.Mesh(data=2), "plans": 0})
    with pytest.raises(sbpc.SbpcError, match="the option mesh is None"):
        checked({})


def of_three_batches(compile: Any) -> tuple[Any, list[float]]:
    """A model, compiled, and its losses of batches of two sizes."""
    torch.manual_seed(0)
    module = compile(models.mlp()[0])
    return module, [module(torch.randn(rows, 24)).item() for rows in (4, 6, 4)]


def beyond_the_limit() -> tuple[list[float], str, str]:
    """Losses of two sizes where dynamo compiles a function twice, what is said meanwhile, and of a third size."""
    torch._dynamo.config.recompile_limit = 2
    said: list[str] = []
    logging.getLogger("sbpc").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    compile = partial(torch.compile, backend="sbpc", dynamic=False, options={"mesh": sbpc.Mesh(data=2)})
    compiled, found = of_three_batches(compile)
    try:
        compiled(*models.mlp(batch=8)[1])
    except Exception as error:
        return found, said[-1], f"{type(error).__name__}: {error}"
    return found, said[-1], "nothing"


def test_what_dynamo_compiles_no_more_is_an_error() -> None:
    for found, said, error in run_ranks(beyond_the_limit, 2):
        assert found == pytest.approx(of_three_batches(lambda model: model)[1])
        assert said.startswith("graph 0 is planned for the 2. time, and dynamo compiles a function no more often.")
        assert said.endswith("torch._dynamo.config.recompile_limit = 4.")
        assert error.startswith("FailOnRecompileLimitHit: ")
