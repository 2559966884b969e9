"""Memory: the prediction against the simulator's count of live bytes, and plans under falling limits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import MemoryLimitError
from sbpc.mesh.cluster import CLUSTERS
from sbpc.passes.memory.live_bytes import STORED
from sbpc.plans.staged import stage_memory
from sbpc.plans.staged.schedules import EARLY
from sbpc.runtime.one_process.simulate import LoopSimulation
from tests import models
from tests.compare import largest_error
from tests.models import Model
from tests.random_plans import random_plan
from tests.routed import Gated, batch
from tests.test_breadth_first import LAN
from tests.test_closed_forms import Linears
from tests.test_sequence import COLUMN_ROW
from tests.test_sequence import Model as SequenceModel

MESHES = Mesh(x=2), Mesh(x=3), Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=2, z=2)
QUICK = [("mlp", MESHES[2]), ("vgg", MESHES[1]), ("lora", MESHES[3])]


def error(plan: Plan, model: Model) -> float:
    """How far the predicted peak is from what the simulator counts; optimizer state never enters a program."""
    memory = plan.cost.memory
    return (memory["total"] - memory["optimizer"]) / sbpc.simulate(plan, *model).peak_memory - 1


def limited(model: Model, mesh: Mesh, shares: tuple[float, ...]) -> list[Plan]:
    """Plans for limits that are shares of what the unlimited plan takes, down to the first that cannot be met."""
    found = [sbpc.plan(*model, mesh, objective="serial")]
    for share in shares:
        try:
            found.append(sbpc.plan(*model, mesh, memory=share * found[0].cost.memory["total"], objective="serial"))
        except MemoryLimitError:
            break
        assert found[-1].cost.memory["total"] <= share * found[0].cost.memory["total"]
    return found


@pytest.mark.parametrize(("name", "mesh"), QUICK, ids=str)
def test_predicted_memory_is_what_the_simulator_counts(name: str, mesh: Mesh) -> None:
    model = models.MODELS[name]()
    plans = limited(model, mesh, (0.8, 0.6))
    plans += [random_plan(plans[0], seed) for seed in range(2)]
    assert max(abs(error(plan, model)) for plan in plans) <= 0.05


@pytest.mark.prove
@pytest.mark.parametrize(("name", "mesh"), list(itertools.product(models.MODELS, MESHES)), ids=str)
def test_predicted_memory_of_all_models_is_what_the_simulator_counts(name: str, mesh: Mesh) -> None:
    model = models.MODELS[name]()
    plans = limited(model, mesh, (0.9, 0.8, 0.7, 0.6, 0.5))
    plans += [random_plan(plans[0], seed) for seed in range(5)]
    assert max(abs(error(plan, model)) for plan in plans) <= 0.05


def test_live_bytes_count_a_storage_once_and_the_copies_of_a_boxing() -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(30).view(6, 5).sum(1)

    plan = sbpc.plan(
        Sum(), (torch.randn(6, 5),), Mesh(a=2), train=False, inputs=["S(1)@a"], outputs=["B"], objective="serial"
    )
    life = plan.life
    kinds = [str(node.name) for node, _ in life.at_peak()]
    assert life.peak == sbpc.simulate(plan, Sum(), (torch.randn(6, 5),)).peak_memory
    assert kinds[0] == "x" and life.live[0] == 8 + 6 * 3 * 4


class Does(nn.Module):
    """Calls a function."""

    def __init__(self, does: Callable[..., Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, *args: Tensor) -> Tensor:
        return self.does(*args)


X, INDEX = torch.randn(400, 4), torch.randint(400, (300, 4))
COUNTING: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "arange": ("S(0)", lambda x: torch.arange(6400) * x, (torch.ones((), dtype=torch.int64),)),
    "arange32": ("S(0)", lambda x: torch.arange(6400, dtype=torch.float32) * x, (torch.ones(()),)),
    "embedding": ("P", lambda x, i: F.embedding(i[:, 0], x), (X, INDEX)),
    "gather": ("P", lambda x, i: x.gather(0, i), (X, INDEX)),
    "scatter_add": ("S(0)", lambda x, i: x.scatter_add(0, i, x[:300]), (X, INDEX)),
    "nll_loss_forward": ("P", lambda x, i: F.nll_loss(x, i[:, 0], reduction="sum"), (torch.randn(300, 400), INDEX)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_call_that_counts_places_of_a_split_dim_takes_what_it_is_written_as(name: str) -> None:
    """It holds a second index for a moment, or what is then masked."""
    state, does, args = COUNTING[name]
    model = Does(does)
    plan = sbpc.plan(model, args, Mesh(x=2), train=False, pin={name.rstrip("32"): state}, dynamic={"n": 300})
    node = next(node for node in plan.boxed.graph.nodes if node.name == name.rstrip("32"))
    assert node.meta["choice"].cuts().keys() & node.meta["match"].shifts
    assert plan.cost.memory["total"] == pytest.approx(sbpc.simulate(plan, model, args).peak_memory, abs=16)
    numbers = {plan.cost.symbols[name]: value for name, value in plan.cost.numbers.items()}
    assert plan.cost.memory_expr.xreplace(numbers) == plan.cost.memory["total"]


def test_operands_that_are_laid_out_anew_for_an_op_without_a_rule_are_counted() -> None:
    model, args = nn.Bilinear(40, 40, 8), (torch.randn(6, 40), torch.randn(6, 40))
    model.weight.data = model.weight.data.mT.contiguous().mT  # a collective gives it in order, and it is put back
    plan = sbpc.plan(model, args, Mesh(x=2), train=False, pin={"weight": "S(0)"})
    assert plan.cost.memory["total"] == pytest.approx(sbpc.simulate(plan, model, args).peak_memory, abs=16)


def test_a_limit_that_cannot_be_met_names_what_holds_most() -> None:
    model, args = models.mlp(batch=12)
    with pytest.raises(MemoryLimitError) as raised:
        sbpc.plan(model, args, Mesh(x=4), memory=1000, objective="serial")
    message = str(raised.value)
    assert "more than the limit of 1,000" in message and message.count("%") == 3


class Scores(nn.Module):
    """A loss, and the scores that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(x)
        return scores.square().mean(), scores


def test_where_whole_results_hold_much_it_is_told_how_to_split_them() -> None:
    for ranks, outputs, told in [(4, None, True), (4, [None, "S(0)@x"], False), (1, None, False)]:
        with pytest.raises(MemoryLimitError) as raised:
            sbpc.plan(Scores(), (torch.randn(16, 8),), Mesh(x=ranks), outputs=outputs, memory=1, objective="serial")
        hint = ", or leave output 1, 4,096 bytes on every rank, split: see `outputs=`."
        assert (hint in str(raised.value)) == told and ("outputs=" in str(raised.value)) == told


FALLING = [
    ("mlp", {"batch": 512, "width": 96, "hidden": 384}, Mesh(x=4, cluster="a100")),
    pytest.param(
        "mlp", {"batch": 96, "width": 48, "hidden": 192}, Mesh(x=2, y=2, cluster="h100"), marks=pytest.mark.prove
    ),
    pytest.param("gpt2", {"layers": 1}, Mesh(x=4, cluster="h100"), marks=pytest.mark.prove),
]


SPARE = 1.05


def falling(model: Model, mesh: Mesh, count: int) -> list[Plan]:
    """The unlimited plan, then plans for limits that fall evenly to SPARE times the least that any plan was found to take."""
    free = sbpc.plan(*model, mesh, objective="serial")
    with pytest.raises(MemoryLimitError) as raised:
        sbpc.plan(*model, mesh, memory=1, objective="serial")
    least = SPARE * int(str(raised.value).split(" bytes a rank")[0].split()[-1].replace(",", ""))
    most = free.cost.memory["total"]
    limits = [least + (most - least) * (count - at) / (count + 1) for at in range(count + 1)]
    found = [free]
    for limit in limits:
        found.append(sbpc.plan(*model, mesh, memory=limit, objective="serial"))
        assert found[-1].cost.memory["total"] <= limit
    return found


def whole(plan: Plan, free: Plan) -> float:
    """Bytes that all parameters, gradients and states of AdamW take beyond what they would, each split over all ranks."""
    kinds = "parameters", "gradients", "optimizer"
    return sum(plan.cost.memory[kind] - free.cost.memory[kind] / plan.mesh.ranks for kind in kinds)


def is_slower_by_no_less_than_its_gap(plans: list[Plan]) -> bool:
    """Whether no plan is faster than what is proved of any that has more memory."""
    return all(
        after.cost.seconds >= before.cost.lower_bound * (1 - 1e-9) for before, after in itertools.combinations(plans, 2)
    )


@pytest.mark.parametrize(("name", "sizes", "mesh"), FALLING, ids=str)
def test_with_less_memory_homes_are_split_and_steps_take_longer(name: str, sizes: dict[str, int], mesh: Mesh) -> None:
    model = models.MODELS[name](**sizes)
    plans = falling(model, mesh, 2)
    assert not any("S" in str(home) for home in plans[0].parameters.values())
    # small ones may be left where there is room
    assert whole(plans[-1], plans[0]) <= plans[-1].options.memory * (1 - 1 / SPARE)
    assert is_slower_by_no_less_than_its_gap(plans)
    for plan in plans[1:]:
        assert plans[0].cost.lower_bound * (1 - 1e-9) <= plan.cost.lower_bound <= plan.cost.seconds
        assert plan.verify() > 0
        assert largest_error(plan, *model) <= 1e-4
    assert abs(error(plans[-1], model)) <= 0.05


def gathered_again(plan: Plan) -> set[str]:
    """What is stored of values until the backward, split further than it is read there: it is gathered again."""
    return {
        step.args[0].name.removesuffix("_stored")
        for step in plan.boxed.graph.nodes
        if "step" in step.meta and step.meta["step"].collective == "all_gather" and STORED in step.args[0].meta
    }


def test_with_less_memory_parameters_are_gathered_again_in_the_backward() -> None:
    torch.manual_seed(0)
    model, args = Linears(64).double(), (torch.randn(16, 32, 64, dtype=torch.float64, requires_grad=True),)
    about: dict[str, Any] = {"inputs": ["S(0)"], "outputs": ["S(0)"], "optimizer": "sgd"}
    free = sbpc.baseline("fsdp", model, args, Mesh(p=4), **about, objective="serial")
    most = free.cost.memory["total"]
    plans = [
        sbpc.baseline("fsdp", model, args, Mesh(p=4), **about, memory=share * most, objective="serial")
        for share in (0.98, 0.9)
    ]
    again = [
        sorted(model.get_parameter(name.replace("_", ".")).numel() for name in gathered_again(plan))
        for plan in (free, *plans)
    ]
    assert again == [[], [64 * 64, 64 * 64], [64 * 64, 64 * 64, 64 * 256]]
    assert free.cost.seconds < plans[0].cost.seconds < plans[1].cost.seconds
    for plan in plans:
        assert plan.cost.gap <= 0.01 and abs(error(plan, (model, args))) <= 0.05
        assert largest_error(plan, model, args) <= 1e-10


def test_with_less_memory_activations_are_stored_split_and_gathered_again_in_the_backward() -> None:
    """Sequence parallelism as Korthikanti et al. (2022) have it: what columns read is kept split."""
    torch.manual_seed(0)
    model, args = SequenceModel(32, 4, 128, 1).double(), (torch.randn(4, 64, 32, dtype=torch.float64),)
    about: dict[str, Any] = {"pin": COLUMN_ROW, "inputs": ["S(1)"], "optimizer": "sgd"}
    mesh = Mesh(tensor=4, cluster=dataclasses.replace(CLUSTERS["a100"], peak=1e9, device=None, ways=()))
    free = sbpc.plan(model, args, mesh, **about, objective="serial")
    assert not gathered_again(free)
    plans = [
        sbpc.plan(model, args, mesh, **about, memory=share * free.cost.memory["total"], objective="serial")
        for share in (0.95, 0.74)
    ]
    assert [gathered_again(plan) for plan in plans] == [set(), {"getitem"}]
    assert plans[0].cost.seconds < plans[1].cost.seconds and plans[1].layouts["getitem_stored"].cuts
    for plan in plans:
        assert free.cost.seconds < plan.cost.seconds and plan.cost.gap <= 0.01
        assert abs(error(plan, (model, args))) <= 0.05 and largest_error(plan, model, args) <= 1e-10


class Written(nn.Module):
    """Writes into slices of a value: a slice of a slice is written by a copy of all that the outer one is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(64)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x * self.scale) * 1
        h[:-1, 1:] += 1
        h[2] *= 3
        return h.logsumexp(0).sum()


@pytest.mark.parametrize("ranks", [1, 2])
def test_writes_into_slices_take_what_is_predicted(ranks: int) -> None:
    model, args = Written(), (torch.randn(64, 64),)
    plan = sbpc.plan(model, args, Mesh(x=ranks), optimizer=None)
    cost = plan.cost
    assert sbpc.simulate(plan, model, args).peak_memory == cost.memory["total"]
    numbers = {cost.symbols[name]: number for name, number in cost.numbers.items()}
    assert float(cost.memory_expr.subs(numbers)) == cost.memory["total"]


class Tied(nn.Module):
    """Layers between an embedding and a head of the same weight, which are on two stages or in two chunks of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        return F.cross_entropy((h @ self.embedding.weight.T).flatten(0, 1), y.flatten())


class Reread(Tied):
    """The same, but that all layers read also what comes out of the first one, which several chunks of a stage keep."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, *layers = self.layers
        h = start = F.gelu(first(self.embedding(x)))
        for layer in layers:
            h = h * start + F.gelu(layer(h))
        return F.cross_entropy((h @ self.embedding.weight.T).flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    ("schedule", "count", "objective"),
    [("zbv", 4, "serial"), ("zbv", 1, "seconds"), ("interleaved", 2, "seconds"), ("interleaved", 1, "seconds")],
)
@pytest.mark.parametrize("make", [Tied, Reread])
def test_every_program_of_every_stage_holds_what_is_predicted(
    make: type[Tied], schedule: str, count: int, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in flight, gradients at home, and what arrives for a part of the backward that has nothing to compute;
    and what several chunks of a stage receive."""
    torch.manual_seed(0)
    model, args = make(), (torch.randint(24, (8, 4)), torch.randint(24, (8, 4)))
    plan = sbpc.plan(
        model,
        args,
        Mesh(pipe=2, data=2),
        stages="pipe",
        schedule=schedule,
        microbatches=count,
        optimizer=None,
        objective=objective,
    )
    held: list[list[int]] = [[] for _ in range(plan.stages)]
    count_memory = LoopSimulation.count

    def counted(self: LoopSimulation, at: int, given: Any, peak: int) -> None:
        before, self.peak = self.peak, 0
        count_memory(self, at, given, peak)
        held[plan.owners[at]].append(self.peak)
        self.peak = max(before, self.peak)

    monkeypatch.setattr(LoopSimulation, "count", counted)
    assert sbpc.simulate(plan, model, args).peak_memory == plan.cost.memory["total"]
    numbers = {plan.cost.symbols[name]: value for name, value in plan.cost.numbers.items()}
    assert plan.cost.memory_expr.xreplace(numbers) == plan.cost.memory["total"] == max(plan.memory_curve().bytes)
    for stage, counts in enumerate(held):
        stored = plan.memory_of(stage)["parameters"]
        moments = [sum(stage_memory.held_at(plan, moment)) for moment in stage_memory.moments(plan, stage)][
            :-1
        ]  # at the last one nothing runs
        assert [stored + each for each in moments] == counts


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 2}, {"schedule": "breadth-first:4"}),
        ({"pipe": 2, "data": 2}, {"schedule": "interleaved", "stages": "pipe"}),
    ],
    ids=str,
)
def test_what_chunks_of_a_stage_share_is_held_once_where_parameters_come_early(
    axes: dict[str, int], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, args, mesh = Reread(), (torch.randint(24, (8, 4)), torch.randint(24, (8, 4))), Mesh(cluster=LAN, **axes)
    plan = sbpc.baseline("fsdp", model, args, mesh, microbatches=4, optimizer=None, **options)
    assert any(EARLY in which for which, _ in plan.order(0))
    assert sbpc.simulate(plan, model, args).peak_memory == plan.cost.memory["total"]


@pytest.mark.parametrize("pin", ["[B, B]", "[S(1), B]", "[R(0), S(1)]"])
def test_products_of_groups_that_are_written_as_others_count_what_those_hold(pin: str) -> None:
    """No kernel takes float64, of GPUs neither: each group is a product of all rows with zeros."""
    torch.manual_seed(0)
    model = Gated().double()
    plan = sbpc.plan(model, batch(), Mesh(a=2, b=2, cluster="h100"), pin={"_grouped_mm": pin})
    run = sbpc.simulate(plan, model, batch("the last ones idle"))
    assert run.peak_memory == pytest.approx(plan.cost.memory["total"] - plan.cost.memory["optimizer"], rel=0.01)
