"""`inputs="data"`: every rank gives its own rows of the batch, as loaders hand them out, evenly or not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.cli.train_loop import optimizer_of, train
from sbpc.graph.ports import INPUT, OUTPUT, Port
from sbpc.runtime.own_rows import check_rows_alike, exchanged
from sbpc.runtime.state.weight_files import read_tensors, save_tensors, save_weights, weights_of
from tests.processes import command, run_ranks

SPLITS = ((4, 4), (3, 2), (2, 3), (5, 0), (1, 0))
PARTS = {sum(split): split for split in SPLITS}


class Scored(nn.Module):
    """A loss over rows of unequal weight, batch statistics, a tensor without rows, a 0-dim tensor, and rows returned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor, factor: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.up(x))
        out = self.down(F.gelu(hidden - hidden.mean(0))) * factor
        return {"loss": F.cross_entropy(out, y, weight=weights), "out": out, "mean": out.mean(0)}


def made() -> nn.Module:
    torch.manual_seed(0)
    return Scored().double()


def batch(rows: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.arange(rows) % 3, torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor(1.5).double()


def own(args: Sequence[Tensor], split: Sequence[int], place: int) -> tuple[Tensor, ...]:
    """A rank's rows of a batch."""
    rows = sum(split)
    return tuple(each.split(list(split))[place] if each.dim() and len(each) == rows else each for each in args)


def seen(result: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**{name: value.detach().clone() for name, value in result.items()}, **gradients}


def alone(rows: int) -> dict[str, Tensor]:
    model = made()
    result = model(*batch(rows))
    result["loss"].backward()
    return seen(result, {name: each.grad for name, each in model.named_parameters() if each.grad is not None})


def on_ranks(first: sbpc.Plan, *others: sbpc.Plan) -> list[Any]:
    """What a step, and a forward with a backward, give by split on this rank."""
    module: Any = sbpc.parallelize(made(), first, also=others)
    mesh, rank, found = first.mesh, torch.distributed.get_rank(), []
    place = mesh.coordinates(rank)[mesh.axis("data")]
    for split in SPLITS:
        for way in ("step", "backward"):
            module.zero_grad()
            args = own(batch(sum(split)), split, place)
            if way == "step":
                result = module.step(*args)
            else:
                result = module(*args)
                result["loss"].backward()
            whole = {name: each.grad.full_tensor() for name, each in module.named_parameters() if each.grad is not None}
            found.append(seen(result, whole))
    return found


def check(found: Sequence[Any], places: Sequence[int]) -> None:
    """Compares the ranks with one process: results of rows have the rank's own."""
    for place, ranks in zip(places, found):
        for at, results in enumerate(ranks):
            split = SPLITS[at // 2]
            want = alone(sum(split))
            assert len(results["out"]) == split[place]
            want["out"] = want["out"].split(list(split))[place]
            for name in want:
                torch.testing.assert_close(results[name], want[name], rtol=1e-10, atol=1e-10)


def plans(mesh: Mesh, **options: Any) -> list[sbpc.Plan]:
    first = sbpc.plan(made(), batch(8), mesh, inputs="data", **options)
    return [
        first,
        *(sbpc.plan(made(), batch(rows), mesh, inputs="data", pin=first.parameters, **options) for rows in (5, 1)),
    ]


def test_each_rank_gives_its_own_rows_and_gets_them_back() -> None:
    made_plans = plans(Mesh(data=2))
    ends = [made_plans[0].given[Port(INPUT, str(at))] for at in range(4)], made_plans[0].left[Port(OUTPUT, "1")]
    assert str(ends) == "([[S(0)], [S(0)], [B], [B]], [S(0)])"
    check(run_ranks(on_ranks, 2, *made_plans), (0, 1))


class Chain(nn.Module):
    """Linear layers with a loss: a model that is cut into stages. Rows come back, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return {"loss": F.mse_loss(x, y), "out": x}


def chain() -> nn.Module:
    torch.manual_seed(0)
    return Chain().double()


def pair(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def in_a_loop(plan: sbpc.Plan) -> list[Any]:
    """Results of a loop's step by split."""
    module: Any = sbpc.parallelize(chain(), plan)
    mesh, rank, found = plan.mesh, torch.distributed.get_rank(), []
    place = mesh.coordinates(rank)[mesh.axis("data")]
    for split in ((4, 4), (5, 3), (0, 8)):
        module.zero_grad()
        result = module.step(*own(pair(), split, place))
        grads = {
            name: each.grad.full_tensor()
            for name, each in module.named_parameters()
            if each is not None and each.grad is not None
        }
        found.append((place, split, seen(result, grads)))
    return found


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 2}, {"microbatches": 2}),
        ({"pipe": 2, "data": 2}, {"stages": "pipe", "microbatches": 2}),
        ({"tensor": 2, "data": 2}, {"pin": {"layers.0.weight": "S(0)@tensor"}}),
    ],
)
def test_loops_and_stages_gather_the_rows(mesh: dict[str, int], options: dict[str, Any]) -> None:
    plan = sbpc.plan(chain(), pair(), Mesh(**mesh), inputs="data", **options)
    assert (plan.loop is not None) == ("microbatches" in options)
    model = chain()
    result = model(*pair())
    result["loss"].backward()
    names: set[str] = set()
    for ranks in run_ranks(in_a_loop, plan.mesh.ranks, plan):
        for place, split, found in ranks:
            want = seen(result, {name: each.grad for name, each in model.named_parameters()})
            want["out"] = want["out"].split(list(split))[place]
            names |= found.keys()
            for name in found:
                torch.testing.assert_close(found[name], want[name], rtol=1e-10, atol=1e-10)
    assert names == want.keys()


FOUR = (3, 1, 0, 4)  # rows by place


def by_two_axes(plan: sbpc.Plan) -> Any:
    """The rows that come back from a model without a loss, their gradient's way to the rows given, and what misuse gets."""
    module: Any = sbpc.parallelize(made_out(), plan)
    rank, mesh = torch.distributed.get_rank(), plan.mesh
    at = mesh.coordinates(rank)
    place = 2 * at[mesh.axis("shard")] + at[mesh.axis("replicate")]
    x = own(pair()[:1], FOUR, place)[0].requires_grad_()
    out = module(x)
    (out * own(pair()[1:], FOUR, place)[0]).sum().backward()
    weight = module.layers[0].weight.grad.full_tensor()
    rows = {0: 5, 1: 3, 2: 0, 3: 0}
    refused = [
        said(lambda: module(torch.zeros(rows[place], 6).double().requires_grad_(place != 1))),
        said(lambda: module(torch.zeros(2 + (rank == 3), 6).double().requires_grad_())),
        said(lambda: module(torch.zeros(2, 6 + (rank == 2)).double().requires_grad_())),
    ]
    return place, out.detach(), x.grad, weight, refused


def made_out() -> nn.Module:
    """The chain without its loss."""
    return Rowwise(chain())


class Rowwise(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.layers = inner.layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(sbpc.SbpcError) as error:
        call()
    return str(error.value)


def test_gradients_go_back_to_the_rows_of_each_rank_over_two_axes() -> None:
    x, tangent = pair()
    model = made_out()
    mesh = Mesh(replicate=2, shard=2)
    plan = sbpc.plan(model, (x.requires_grad_(),), mesh, inputs="shard,replicate")
    assert "each rank gets its own rows of the results, and no loss" in str(plan)
    out = model(x)
    (out * tangent).sum().backward()
    assert x.grad is not None
    for place, mine, grad, weight, refused in run_ranks(by_two_axes, 4, plan):
        for given, whole in ((mine, out.detach()), (grad, x.grad)):
            torch.testing.assert_close(given, whole.split(list(FOUR))[place], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(weight, model.layers[0].weight.grad, rtol=1e-10, atol=1e-10)  # type: ignore[union-attr,index]
        assert "rank 2 gives other arguments than rank 0" in refused[0]  # one asks for a gradient, the others do not
        assert (
            "argument 0 of all ranks together is torch.float64 (9, 6), the plan is for torch.float64 (8, 6)"
            in refused[1]
        )
        assert "rank 2 gives other arguments than rank 0\n" in refused[2]


def unequal(plan: sbpc.Plan) -> list[str]:
    """What is said of ranks of one place that give other rows, or other numbers of them, and of tensors that do not fit together."""
    module: Any = sbpc.parallelize(chain(), plan)
    rank = torch.distributed.get_rank()
    place, twin = plan.mesh.coordinates(rank)
    x, y = own(pair(), (4, 4), place)
    padded = sbpc.buckets([4, 8], together=True)({"input_ids": torch.ones(2, 3 + 2 * place)})  # one has 3, one 5
    assert padded["input_ids"].shape == (2, 8)
    errors = [
        said(lambda: module.step(x[: 3 if rank == 1 else 4], y[: 3 if rank == 1 else 4])),
        said(lambda: module.step(x, y[: 3 if rank == 2 else 4])),
        said(lambda: module.step(x + twin, y)),
    ]
    for _ in range(3):  # later calls are compared by what each of them sends anyway
        module.step(x, y)
    with module.no_sync() if rank == 3 else contextlib.nullcontext():
        return [*errors, said(lambda: module.step(x, y))]


def test_ranks_that_share_a_batch_must_give_the_same_rows() -> None:
    plan = sbpc.plan(chain(), pair(), Mesh(data=2, tensor=2), inputs="data")
    for errors in run_ranks(unequal, 4, plan):
        assert errors[0].startswith("rank 0 gives 4 rows, rank 1 3, and both share one place on inputs='data'\n")
        assert errors[1].startswith("the tensors that rank 2 gives have other numbers of rows than each other")
        assert errors[2].startswith("argument x is not the same on rank 1 as on rank 0")
        assert (
            errors[3].startswith("rank 3 gives other arguments than rank 0") and "'within no_sync': True" in errors[3]
        )


def channels_last() -> Tensor:
    """Rows 3 and 4 of five on rank 1, of which rank 0 has all but the last."""
    rows = torch.arange(120.0).view(5, 2, 3, 4).to(memory_format=torch.channels_last)
    mine = rows.split([4, 1])[torch.distributed.get_rank()]
    return exchanged(mine, ((0, 4), (4, 1)), ((0, 3), (3, 2)), frozenset((0, 1)))


def test_rows_go_to_other_ranks_however_they_lie_in_memory() -> None:
    assert torch.cat(run_ranks(channels_last, 2)).equal(torch.arange(120.0).view(5, 2, 3, 4))


class Told(nn.Module):
    """A loss, and a result that is not of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.layer(x)
        return {"loss": out.square().mean(), "mean": out.mean(0)}


def told() -> nn.Module:
    torch.manual_seed(0)
    return Told().double()


def as_long_by_chance(rows: int, splits: Sequence[Sequence[int]], options: dict[str, Any]) -> Any:
    """By batch that result, and what it is on one device. rows: those of the plan."""
    plan = sbpc.plan(told(), batch(rows)[:1], Mesh(data=2), inputs="data", **options)
    module: Any = sbpc.parallelize(told(), plan, also="auto")
    rank, found = torch.distributed.get_rank(), []
    for split in splits:
        x = batch(sum(split))[:1]
        found.append((module.step(own(x, split, rank)[0])["mean"].detach(), told()(*x)["mean"].detach()))
    return found


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}])
def test_a_result_as_long_as_a_later_batch_by_chance_stays_whole(options: dict[str, Any]) -> None:
    for found in run_ranks(as_long_by_chance, 2, 8, ((4, 4), (2, 1), (3, 0)), options):
        for mine, whole in found:
            torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)


def test_what_is_as_long_as_the_first_batch_by_chance_is_told_of() -> None:
    for error in run_ranks(as_long_by_chance, 2, 3, ((2, 1), (4, 4)), {}):
        assert error.startswith(
            "PlanError: result 1 was as long as the batch in the first call, and of a batch of 8 rows it is"
        )
    first, small = (sbpc.plan(made(), batch(rows), Mesh(data=2), inputs="data") for rows in (8, 3))
    assert "argument 2 is as long as the batch of one plan by chance" in said(lambda: check_rows_alike(first, small))


def target() -> tuple[nn.Module, Any]:
    """A model and its batch, as `sbpc run` takes them."""
    return chain(), pair()


def test_the_command_line_trains_and_infers_by_plans_with_rows_of_each_rank(tmp_path: Path) -> None:
    file, out, (model, args) = tmp_path / "c.sbpc", tmp_path / "out.safetensors", target()
    plan = sbpc.plan(model, args, Mesh(data=2), inputs="data")
    plan.save(tmp_path / "plan.sbpc")
    plan.export(file, sbpc.plan(model.eval(), args, Mesh(data=2), inputs="data", train=False))
    save_weights(weights_of(model), file.with_suffix(".safetensors"))
    save_tensors({str(at): each for at, each in enumerate(args)}, file.with_suffix(".inputs.safetensors"))
    result = {name: each.detach() for name, each in model(*args).items()}
    losses = train(model.train(), [(args, {})] * 2, optimizer_of("adamw", model, 1e-3))
    calls = [
        ["run", str(file), "--json", "--steps", "2"],
        ["run", f"{__file__}:target", "--plan", str(tmp_path / "plan.sbpc"), "--json", "--steps", "2"],
        ["run", str(file), "--infer", "--json", "--output", str(out)],
    ]
    found = [json.loads(run_ranks(command, 2, *call)[0]) for call in calls]
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-10) and found[1]["losses"] == found[0]["losses"]
    for name, each in read_tensors(out).items():
        torch.testing.assert_close(each[0], [*result.values()][int(name)], rtol=1e-10, atol=1e-10)
