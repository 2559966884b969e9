"""`also="auto"`: a batch of a new shape, or in a new mode, is planned when it comes, on the same state."""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.alike import relaid
from sbpc.runtime.executors import executor_of
from sbpc.runtime.further_plans import FurtherPlans, check_homes, most_plans
from sbpc.runtime.module import RUNNERS
from tests.models import gpt2
from tests.processes import run_ranks

BATCHES = ((8, 6), (3, 4), (8, 6))  # rows and length


class Words(nn.Module):
    """Tokens in, logits out: a loss of its own comes behind. A hook, and a number that training turns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        self.temperature, self.powers, self.by_name = 1.0, [1], {"shift": 0.0}
        self.norm.register_forward_hook(doubled)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.embed(tokens)))
        if self.training:
            hidden = hidden * 1.5
        hidden = sum(hidden**each for each in self.powers) + self.by_name["shift"]
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
    for temperature, powers, shift in ((1.0, [1], 0.0), (1.0, [1, 2], 0.0), (1.0, [1], 0.5), (1.0, [1], 0.0)):
        module.temperature, module.powers, module.by_name["shift"] = temperature, powers, shift  # by turns
        found.append(step(module, *map(own, tokens(8, 6))).item())
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
    found["logged"] = [line for line in logged if line.startswith(("plan ", "the layouts of a plan serve"))]
    few: Any = sbpc.parallelize(words(), sbpc.plan(words(), args[:1], Mesh(data=2), **about), also="auto:1")
    few.step(*tokens(4, 6))  # in the layouts of the first plan
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        found["errors"] = [said(lambda: few.eval()(*tokens(4, 6)))]
    found["errors"].append(said(lambda: few.train().step(*tokens(8, 6 - 2 * rank))))
    few.temperature = 2.0 + rank
    found["errors"].append(said(lambda: few.step(*tokens(8, 6))))
    few.temperature, few.head = 1.0, nn.Linear(8, 11)
    found["errors"].append(said(lambda: few.step(*tokens(8, 6))))
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
        made = 3 * 6  # training and evaluation of two shapes, of which one was there, one more, and two of other values
        assert len(found["logged"]) == made
        assert any(line.startswith("the layouts of a plan serve, train: (int64[") for line in found["logged"])
        full = "the module has 1 of 1 plans, as many as also='auto:1' allows: the module is in another mode"
        assert full in found["errors"][0]
        assert "rank 1 gives other arguments than rank 0" in found["errors"][1]
        assert (
            "rank 1 gives other arguments than rank 0" in found["errors"][2]
            and "temperature is 2.0" in found["errors"][2]
        )
        assert found["errors"][3].startswith("head is another module than before")


class Weighed(nn.Module):
    """A loss, and what may come to it: weights of classes, of rows and of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        losses = F.cross_entropy(self.head(x), labels, weight=more.get("classes"), reduction="none")
        return (losses * more.get("rows", 1.0)).mean() * (more["nothing"].sum() if "nothing" in more else 1.0)


def weighed_on_ranks() -> Any:
    """By what comes to the loss: what four rows on each of two ranks give, and what one device does."""
    torch.manual_seed(0)
    model, found = Weighed().double(), {}
    x, labels, rows = torch.randn(8, 6).double(), torch.arange(8) % 4, torch.rand(8).double()
    plan = sbpc.plan(model, (x, labels), Mesh(data=2), inputs="data")
    module: Any = sbpc.parallelize(model, plan, also="auto")
    cut = slice(0, 4) if torch.distributed.get_rank() == 0 else slice(4, 8)
    sides = {"classes": torch.rand(4).double(), "nothing": torch.ones(4).double()}
    for names in ("rows", "classes", "rows classes", "nothing"):
        given = {name: each for name, each in {**sides, "rows": rows}.items() if name in names}
        own = {name: each[cut] if name == "rows" else each for name, each in given.items()}
        if names == "nothing":
            found[names] = said(lambda own=own: module.step(x[cut], labels[cut], **own))  # type: ignore[misc]
        else:
            found[names] = module.step(x[cut], labels[cut], **own).item(), model(x, labels, **given).item()
    return found


def test_a_tensor_as_long_as_the_rows_of_a_rank_is_none_of_its_rows_unless_the_model_says_so() -> None:
    for found in run_ranks(weighed_on_ranks, 2):
        assert "no plan says whether each rank gives its own rows of the tensors [2] of" in found.pop("nothing")
        assert len(found) == 3
        for one, other in found.values():
            assert one == pytest.approx(other, rel=1e-12)


class Deep(nn.Module):
    """Layers to cut into stages, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.scale = 1.0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = F.gelu(layer(x)) * (1.5 if self.training else 1.0)
        return {"loss": F.mse_loss(x, y), "out": x}


def deep() -> Any:
    torch.manual_seed(0)
    return Deep().double()


def rows_of(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return tuple(torch.randn(count, 6, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def staged(module: Any, step: Callable[..., Any]) -> Any:
    """Losses of training and of evaluation, by turns, on 8 and on 6 rows; what the last evaluation gives."""
    optimizer = torch.optim.SGD([*module.parameters()], lr=0.5)
    found, result = [], {}
    for count in (8, 6):
        optimizer.zero_grad()
        found.append(step(module.train(), *rows_of(count))["loss"].item())
        optimizer.step()
        with torch.no_grad():
            result = module.eval()(*rows_of(count))
        found.append(result["loss"].item())
    return torch.tensor(found), result["out"]


def by_autograd(module: Any, *args: Tensor) -> Any:
    result = module(*args)
    result["loss"].backward()
    return result


def in_stages(*plans: sbpc.Plan) -> Any:
    mesh = Mesh(pipe=2)
    plan = sbpc.plan(deep(), rows_of(8), mesh, stages="pipe", microbatches=2)
    found = [staged(sbpc.parallelize(deep(), plan, also="auto"), lambda module, *args: module.step(*args))]
    module = sbpc.parallelize(deep(), plans[0], also=plans[1:])
    return [*found, staged(module, lambda module, *args: module.step(*args))]


def test_evaluation_stands_beside_stages_in_one_module() -> None:
    asked: dict[str, Any] = {"stages": "pipe", "microbatches": 2}
    first = sbpc.plan(deep(), rows_of(8), Mesh(pipe=2), **asked)
    assert first.cuts == ["layers.2.weight+1"]
    asked |= {"pin": first.parameters}
    plans = [first, sbpc.plan(deep(), rows_of(6), Mesh(pipe=2), cuts=first.cuts, **asked)]
    plans += [
        sbpc.plan(deep().eval(), rows_of(count), Mesh(pipe=2), train=False, cuts=first.cuts, **asked)
        for count in (8, 6)
    ]
    other = sbpc.plan(deep(), rows_of(6), Mesh(pipe=2), cuts=["layers.1.weight"], **asked)
    assert other.cuts == ["layers.1.weight"]
    assert "is on the stages [1] of one plan, on [0] of the other" in said(lambda: check_homes(other, first))
    assert "cuts= names 'nothing'" in said(
        lambda: sbpc.plan(deep(), rows_of(6), Mesh(pipe=2), cuts=["nothing"], **asked)
    )
    losses, out = staged(deep(), by_autograd)
    for ranks in run_ranks(in_stages, 2, *plans):
        for found, result in ranks:
            torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(result, out, rtol=1e-10, atol=1e-10)


def test_what_cannot_plan_further_steps_says_so(tmp_path: Path) -> None:
    assert most_plans("auto") == 8 and most_plans("auto:20") == 20 and most_plans([]) is None
    assert 'Give "auto", "auto:20" for at most 20 plans' in said(lambda: most_plans("always"))
    plan = sbpc.plan(deep(), rows_of(8), Mesh(data=1))
    assert relaid(plan.alike.captured(deep(), rows_of(6), {}, True), plan) is not None
    assert relaid(plan.alike.captured(deep(), rows_of(6), {}, False), plan) is None  # another program
    plan.save(tmp_path / "plan.sbpc")
    read = sbpc.load(tmp_path / "plan.sbpc")
    assert "a plan from a file does not know of what model" in said(
        lambda: FurtherPlans(deep(), read, 8, executor_of("code"), torch.device("cpu"))
    )
    loop = sbpc.plan(deep(), rows_of(8), Mesh(data=1), microbatches=4)
    step = loop.alike.captured(deep(), rows_of(6), {}, True)
    smaller = loop.alike.planned(step, rows_of(6), loop.parameters, loop.cuts, True)
    assert smaller.loop is not None and smaller.loop.count == 3  # which divides 6


def of_many_sizes(count: int, inputs: str | None) -> Any:
    """Largest errors of the loss and of gradients of a GPT-2 over random batches and lengths, and how many plans were made."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = gpt2(layers=2, batch=8, seq=16, vocab=32, width=24, heads=4)
    module: Any = sbpc.parallelize(model, sbpc.plan(model, args, Mesh(data=2), inputs=inputs), also="auto:3")
    draw, errors, seconds = random.Random(0), [], []
    for _ in range(count):
        rows, length = draw.randint(2, 24), draw.randint(2, 16)
        tokens = torch.randint(32, (2, rows, length))
        cut = draw.randint(0, rows)
        place = slice(0, cut) if torch.distributed.get_rank() == 0 else slice(cut, rows)
        start = time.perf_counter()
        loss = module.step(*(each[place] if inputs else each for each in tokens))
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
        want = model(*tokens)
        want.backward()
        errors.append(abs(loss.item() - want.item()))
        for mine, own in zip(module.parameters(), model.parameters()):
            errors.append((mine.grad.full_tensor() - own.grad).abs().max().item())
        module.zero_grad()
    made = [runner for runner in vars(type(module))[RUNNERS] if runner.plan.lower_bound]
    return max(errors), len(made), statistics.median(seconds)


def test_a_plan_serves_other_batches_and_lengths() -> None:
    for error, plans, _ in run_ranks(of_many_sizes, 2, 4, "data"):
        assert error < 1e-10 and plans == 2  # of odd batches rows are flattened whole


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("inputs", [None, "data"])
def test_200_batches_and_lengths_of_a_gpt_run_by_at_most_3_plans(inputs: str | None) -> None:
    for error, plans, seconds in run_ranks(of_many_sizes, 2, 200, inputs, seconds=1700):
        print(f"largest error {error:.1e}, {plans} plans, {seconds:.2f} s for the median step")
        assert error < 1e-10 and plans <= 3


def with_gradients_in_eval(options: Any, once: bool) -> Any:
    """A loss and a gradient in eval mode, where an evaluation without gradients was planned first."""
    model = words().eval()
    about: dict[str, Any] = {"loss": scored, "targets": tokens(8, 6)[1:]} if once else {}
    plan = sbpc.plan(model.train(), tokens(8, 6)[:1], Mesh(data=2), **about, **options)
    module: Any = sbpc.parallelize(model, plan, also="auto").eval()
    args = tokens(8, 6) if once else tokens(8, 6)[:1]
    with torch.no_grad():
        first = module(*args)
    loss = module.step(*args) if once else scored(module(*args), tokens(8, 6)[1])
    if not once:
        loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(module(*args), first)
    return loss.detach(), module.head.weight.grad.full_tensor(), len(vars(type(module))[RUNNERS])


@pytest.mark.parametrize("once", [False, True])
def test_gradients_in_eval_mode_are_planned_beside_an_evaluation_without(once: bool) -> None:
    model = words().eval()
    loss = scored(model(tokens(8, 6)[0]), tokens(8, 6)[1])
    loss.backward()
    for options in ({}, {"microbatches": 2}) if once else ({},):
        for found, gradient, plans in run_ranks(with_gradients_in_eval, 2, options, once, seconds=120):
            torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(gradient, model.head.weight.grad, rtol=1e-10, atol=1e-10)
            assert plans == 3
