"""`also="auto"`: a batch of a new shape, or in a new mode, is planned when it comes, on the same state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from tests.processes import run_ranks

BATCHES = ((8, 6), (3, 4), (8, 6))  # rows and length


class Words(nn.Module):
    """Tokens in, logits out: a loss of its own comes behind. A hook, and a number that training turns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        self.temperature = 1.0
        self.norm.register_forward_hook(doubled)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.embed(tokens)))
        if self.training:
            hidden = hidden * 1.5
        return self.head(hidden) / self.temperature


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def scored(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words() -> Any:
    torch.manual_seed(0)
    return Words().double()


def tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * length)
    return tuple(torch.randint(11, (rows, length), generator=generator) for _ in range(2))  # type: ignore[return-value]


def trained(module: Any, step: Callable[..., Tensor], own: Callable[[Tensor], Tensor] = lambda each: each) -> Any:
    """Losses of training on batches of several shapes, with an evaluation after each; the weights at the end."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    found = []
    for rows, length in BATCHES:
        args = [own(each) for each in tokens(rows, length)]
        optimizer.zero_grad()
        found.append(step(module.train(), *args).item())
        optimizer.step()
        with torch.no_grad():
            found.append(step(module.eval(), *args).item())
    module.temperature = 2.0
    found.append(step(module.train(), *map(own, tokens(5, 6))).item())
    return torch.tensor(found)


def alone(module: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = scored(module(x), y)
    if loss.requires_grad:
        loss.backward()
    return loss.detach()


def on_rank(module: Any, x: Tensor, y: Tensor) -> Tensor:
    result: Tensor = module.step(x, y) if torch.is_grad_enabled() else module(x, y)
    return result


def half(each: Tensor) -> Tensor:
    """This rank's rows: all but one on rank 0."""
    rank = torch.distributed.get_rank()
    return each[:-1] if rank == 0 else each[-1:]


def on_ranks() -> Any:
    """Losses with whole batches, with each rank's own rows, and in a loop; what is said of too many plans and of ranks that differ."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sbpc").addHandler(handler)
    logging.getLogger("sbpc").setLevel(logging.INFO)
    args, found = tokens(8, 6), {}
    about: dict[str, Any] = {"loss": scored, "targets": args[1:]}
    for name, options in (("whole", {}), ("rows", {"inputs": "data"}), ("loop", {"microbatches": 2})):
        model = words()
        plan = sbpc.plan(model, args[:1], Mesh(data=2), **about, **options)
        module = sbpc.parallelize(model, plan, also="auto:9")
        found[name] = trained(module, on_rank, half if name == "rows" else lambda each: each)
    found["logged"] = [line for line in logged if line.startswith("plan ")]
    few: Any = sbpc.parallelize(words(), sbpc.plan(words(), args[:1], Mesh(data=2), **about), also="auto:2")
    few.step(*tokens(4, 6))
    rank = torch.distributed.get_rank()
    found["errors"] = [said(lambda: few.step(*tokens(5, 6))), said(lambda: few.step(*tokens(8, 6 - 2 * rank)))]
    return found


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(sbpc.SbpcError) as error:
        call()
    return str(error.value)


def test_batches_of_new_shapes_and_modes_are_planned_when_they_come() -> None:
    want = trained(words(), alone)
    for found in run_ranks(on_ranks, 2, seconds=200):
        for name in ("whole", "rows", "loop"):
            torch.testing.assert_close(found[name], want, rtol=1e-10, atol=1e-10)
        assert found["logged"][0] == "plan 2 of at most 9, no grad: (int64[8, 6], int64[8, 6])"
        assert (
            len(found["logged"]) == 3 * 4
        )  # training and evaluation of two shapes, of which one was there, and one more
        assert "there are 2 plans, as many as also='auto:2' allows: no plan is for arguments" in found["errors"][0]
        assert "rank 1 gives other arguments than rank 0" in found["errors"][1]
