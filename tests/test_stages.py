"""Pipeline stages: loss and gradients are those of one process on the whole batch, simulated and on real ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError, SbpcError
from sbpc.graph.ports import Port
from sbpc.mesh.states import B, Split
from sbpc.plans.chunk import OnUse
from sbpc.plans.memory_curve import GROUP_OF
from sbpc.plans.plan import Plan
from sbpc.plans.staged.chunk_cost import ChunkCost, Numbers, likeness
from sbpc.plans.staged.schedules import FORWARD, SCHEDULES, Action, actions_of, in_turn
from sbpc.runtime.start.mail import Mail
from tests import models
from tests.bench.zoo import Decoder, tokens
from tests.compare import compare, eager
from tests.processes import run_ranks

MESHES = {
    "2": {"pipe": 2},
    "3": {"pipe": 3},
    "2x2": {"pipe": 2, "data": 2},
    "2x2x2": {"pipe": 2, "data": 2, "tensor": 2},
}
NETS: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 2}, "gpt2": {"batch": 8, "layers": 4}, "resnet": {"layers": 2}, "vgg": {}, "ignore_index_loss": {},
}  # fmt: skip


class Dropping(nn.Module):
    """Blocks with dropout, and a mean over targets of which the first half of the batch has few that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.5)) for _ in range(4)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), target, ignore_index=-1)


def long(*case: str, quick: bool) -> Any:
    """A case of a test, left to the long proofs unless it is quick."""
    return pytest.param(*case, marks=() if quick else pytest.mark.prove)


QUICK = ("2x2", "gpipe"), ("2x2", "zbv"), ("2x2", "interleaved:3"), ("3", "1f1b")


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [long(mesh, each, quick=(mesh, each) in QUICK) for mesh in ("2x2", "3") for each in (*SCHEDULES, "interleaved:3")],
)
def test_every_schedule_has_the_numbers_of_the_whole_batch(mesh: str, schedule: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=8, layers=4 if "interleaved" in schedule else 2)
    plan = sbpc.plan(model, args, Mesh(**MESHES[mesh]), stages="pipe", microbatches=4, schedule=schedule)
    plan.verify()
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10
    run = sbpc.simulate(plan, model, args)
    assert run.bytes_sent == plan.cost.bytes_sent
    memory = plan.cost.memory  # nothing is kept of an optimizer in the simulation
    assert memory["total"] - memory["optimizer"] == run.peak_memory


@pytest.mark.parametrize("net", [net for net in NETS if net != "gpt2"])
@pytest.mark.parametrize("mesh", [long("2", quick=False), "2x2"])
def test_kinds_of_models_have_the_numbers_of_the_whole_batch(mesh: str, net: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = getattr(models, net)(**NETS[net])
    plan = sbpc.plan(model, args, Mesh(**MESHES[mesh]), stages="pipe", microbatches=4)
    plan.verify()
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10


class Losses(nn.Module):
    """The sum of a mean for every layer, as Python's `sum` writes it: 0 is added first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            found.append(x.square().mean())
        return sum(found) + x.abs().mean()  # type: ignore[return-value]


@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 2, "tensor": 5}], ids=str)
def test_losses_of_all_layers_are_added_up_over_stages_whatever_the_sizes_divide(mesh: dict[str, int]) -> None:
    """5 ranks divide neither the width of 8 nor the 6 rows of a micro-batch: values cross whole."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = Losses(), (torch.randn(24, 8),)
    plan = sbpc.plan(model, args, Mesh(**mesh), stages="pipe", microbatches=4, schedule="zbv")
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10


def test_gradients_are_communicated_once_for_any_number_of_micro_batches() -> None:
    model, args = models.mlp(layers=4)
    few, many = (
        sbpc.plan(model, args, Mesh(pipe=2, data=2), stages="pipe", microbatches=count).cost.bytes_sent
        for count in (2, 8)
    )
    assert few["pipe"] == many["pipe"]
    assert many["data"] == pytest.approx(few["data"], rel=0.01)


def test_dropout_draws_the_same_numbers_for_every_number_of_micro_batches_and_stages() -> None:
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(8, 6)
    target = torch.tensor([-1, -1, -1, 2, 0, 1, 2, 3])
    alone = sbpc.simulate(sbpc.plan(model, (x, target), Mesh(x=1)), model, (x, target), seed=3)
    for axes, count in (({"pipe": 4}, 8), ({"pipe": 2, "data": 2}, 4)):
        run = sbpc.simulate(
            sbpc.plan(model, (x, target), Mesh(**axes), stages="pipe", microbatches=count), model, (x, target), seed=3
        )
        assert torch.allclose(run.outputs, alone.outputs, atol=1e-6)
        for name, gradient in run.gradients.items():
            assert torch.allclose(gradient, alone.gradients[name], atol=1e-5)  # type: ignore[arg-type]


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    model, args = models.mlp(layers=4)
    peaks, counted = {}, {}
    for schedule in ("gpipe", "1f1b"):
        plan = sbpc.plan(model, args, Mesh(pipe=2), stages="pipe", microbatches=8, schedule=schedule)
        peaks[schedule], counted[schedule] = (
            plan.cost.memory["activations"],
            sbpc.simulate(plan, model, args).peak_memory,
        )
    assert peaks["1f1b"] < 0.3 * peaks["gpipe"]  # two of eight micro-batches in flight
    assert counted["1f1b"] < 0.7 * counted["gpipe"]


def test_actions_can_run_in_their_order() -> None:
    for schedule in [*SCHEDULES, "interleaved:3"]:
        actions = actions_of(schedule, 4, 8)
        last = max(action.chunk for mine in actions for action in mine)

        def needs(action: Action, last: int = last) -> list[Action]:
            if action.kind == FORWARD:
                return [Action(FORWARD, action.chunk - 1, action.micro_batch)] if action.chunk else []
            if action.kind == "W":
                return [Action("I", action.chunk, action.micro_batch)]
            own = [Action(FORWARD, action.chunk, action.micro_batch)]
            return own + ([Action(action.kind, action.chunk + 1, action.micro_batch)] if action.chunk < last else [])

        order = [action for _, action in in_turn(actions, needs)]
        assert len(set(order)) == len(order) == (3 if schedule == "zbv" else 2) * 8 * (last + 1)


def small_gpt(layers: int) -> models.Model:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return models.gpt2(batch=8, layers=layers)


def train(layers: int, plan: Plan) -> list[Any]:
    """Losses and parameters of three steps of Adam on this rank, with those of one process; tied parameters on two stages."""
    model, args = small_gpt(layers)
    parallel = sbpc.parallelize(model, plan)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (parallel, model)]
    losses = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone = model(*args)
        alone.backward()
        losses.append((float(parallel.step(*args)), float(alone)))
        for optimizer in optimizers:
            optimizer.step()
    own = dict(model.named_parameters())
    errors = {name: float((p.full_tensor() - own[name]).abs().max()) for name, p in parallel.named_parameters()}  # type: ignore[attr-defined]
    return [losses, errors]


def most_held(plan: Plan) -> list[int]:
    """How many messages this rank holds at most in a step of twelve micro-batches: sent ones, and ones that came."""
    model, args = models.mlp(layers=4)
    parallel = sbpc.parallelize(model, plan)
    most, send = [0, 0], Mail.send

    def counted(self: Mail, *args: Any) -> None:
        send(self, *args)
        most[:] = max(most[0], len(self.sent)), max(most[1], len(self.coming) + len(self.kept))

    Mail.send = counted  # type: ignore[method-assign]
    parallel.step(*args)
    return most


def test_messages_are_let_go_as_soon_as_the_schedule_tells_that_they_are_there() -> None:
    plan = sbpc.plan(*models.mlp(layers=4), Mesh(pipe=2), stages="pipe", microbatches=12)
    for sent, held in run_ranks(most_held, 2, plan):
        assert 0 < sent <= 4 and held <= 3


@pytest.mark.parametrize(
    ("axes", "schedule", "layers"),
    [
        ({"pipe": 2, "data": 2}, "1f1b", 2),
        ({"pipe": 4}, "zbv", 4),
        pytest.param({"pipe": 2, "data": 2}, "interleaved:3", 4, marks=pytest.mark.prove),
    ],
)
def test_adam_on_four_ranks_does_what_it_does_in_one_process(axes: dict[str, int], schedule: str, layers: int) -> None:
    """What the ranks find: losses and parameters, each of its stages alone."""
    plan = sbpc.plan(*small_gpt(layers), Mesh(**axes), stages="pipe", microbatches=4, schedule=schedule)
    found = run_ranks(train, 4, layers, plan)
    names = {name for name, _ in small_gpt(layers)[0].named_parameters()}
    for losses, errors in found:
        assert all(here == pytest.approx(alone, rel=1e-10) for here, alone in losses)
        assert max(errors.values()) <= 1e-10
        assert 0 < len(errors) < 0.7 * len(names)  # of its stages alone
    assert set().union(*(errors for _, errors in found)) == names


def test_what_cannot_be_cut_into_stages_is_refused() -> None:
    model, args = models.mlp(layers=4)
    for options, words in (
        ({"mesh": Mesh(data=2)}, "no axis 'pipe'"),
        ({"schedule": "2f2b"}, "no schedule '2f2b'"),
        ({"schedule": "interleaved:1"}, "how many chunks of the model each stage has"),
        ({"mesh": Mesh(pipe=3), "schedule": "interleaved", "microbatches": 16}, "rounds of 3 do not divide"),
        ({"microbatches": 7}, "a batch of 96 in 7 micro-batches"),
        ({"memory": 1e3}, "more than the limit of 1,000"),
        ({"spread": True}, "spread= with stages="),
        ({"stages": None, "microbatches": 1, "schedule": "1f1b"}, "schedule='1f1b' of a step that is no loop"),
        ({"stages": None, "panels": 2, "schedule": "gpipe"}, "schedule='gpipe' of a step that is no loop"),
    ):
        given = {"mesh": Mesh(pipe=2), "stages": "pipe", "microbatches": 4} | options
        with pytest.raises(SbpcError, match=words):
            sbpc.plan(model, args, given.pop("mesh"), **given)
    with pytest.raises(PlanError, match="chunks of a model that can be cut at"):
        sbpc.plan(*models.mlp(layers=1), Mesh(pipe=32), stages="pipe", microbatches=4)
    net, images = models.batch_norm()
    with pytest.raises(PlanError, match="each micro-batch needs the whole batch's value"):
        sbpc.plan(net, images, Mesh(pipe=2), stages="pipe", microbatches=4)
    with pytest.raises(PlanError, match=r"(?s)schedule='gpipe' of a step that is no loop over.*Leave schedule= out"):
        sbpc.plan(net, images, Mesh(pipe=2), microbatches=4, schedule="gpipe")


def test_an_expert_plans_every_stage_and_the_numbers_stay() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=8, layers=2)
    plan = sbpc.baseline("data", model, args, Mesh(pipe=2, data=2, cluster="ethernet"), stages="pipe", microbatches=4)
    assert {str(layout) for layout in plan.parameters.values()} == {"[B]"} and plan.options.baseline == "data"
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10
    assert sbpc.simulate(plan, model, args).bytes_sent == plan.cost.bytes_sent and plan.cost.bytes_sent["data"] > 0


def test_every_stage_has_a_trained_parameter_where_that_can_be() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *(nn.Tanh() for _ in range(12)))
    plan = sbpc.plan(
        model, (torch.randn(8, 4),), Mesh(pipe=2, cluster="h100"), loss=Tensor.mean, stages="pipe", microbatches=2
    )
    assert all(chunk.parameters for chunk in plan.chunks)
    model[0].requires_grad_(False)  # now one stage has none
    plan = sbpc.plan(
        model, (torch.randn(8, 4),), Mesh(pipe=2, cluster="h100"), loss=Tensor.mean, stages="pipe", microbatches=2
    )
    assert len(plan.chunks) == 2


def test_a_memory_limit_is_met_by_every_stage_and_the_numbers_stay() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=8, layers=2)
    free = sbpc.plan(model, args, Mesh(pipe=2, data=2), stages="pipe", microbatches=4)
    limit = 0.85 * free.cost.memory["total"]
    plan = sbpc.plan(model, args, Mesh(pipe=2, data=2), stages="pipe", microbatches=4, memory=limit)
    assert plan.cost.memory["total"] <= limit
    plan.verify()
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10
    names = list(plan.parameters)
    for in_loop in (
        names_of("parameter", names),
        names_of("gradient", names),
        names_of("parameter", names[::3]) | names_of("gradient", names[1::2]),
    ):
        other = replace(plan, in_loop=in_loop)
        assert compare(other, model, args, *eager(model, args)) <= 1e-10
        run, memory = sbpc.simulate(other, model, args), other.cost.memory
        assert run.bytes_sent == other.cost.bytes_sent
        assert memory["total"] - memory["optimizer"] == run.peak_memory


@pytest.mark.prove
def test_where_nothing_overlaps_no_plan_under_a_limit_is_faster_than_the_free_one() -> None:
    model, args = models.gpt2(batch=8, layers=2)

    def planned(memory: float | None = None) -> Plan:
        return sbpc.plan(
            model, args, Mesh(pipe=2, data=2), stages="pipe", microbatches=4, memory=memory, objective="serial"
        )

    free = planned()
    limit = 0.85 * free.cost.memory["total"]
    plan = planned(limit)
    assert plan.cost.memory["total"] <= limit and plan.cost.seconds >= free.cost.seconds


def names_of(kind: str, names: Sequence[str]) -> frozenset[Port]:
    return frozenset(Port(kind, name) for name in names)


@pytest.mark.prove
def test_layouts_of_the_expert_take_part_under_a_limit() -> None:
    """The free plan gathers every weight: to do so in every micro-batch takes 50 ms or more, and the expert's layouts
    27.0."""
    with torch.device("meta"):
        model = Decoder(1024, 2048, 4096, 32, 2).to(torch.bfloat16)
    args, options = (
        (tokens(16, 2048, 1024), tokens(16, 2048, 1024)),
        {"stages": "pipe", "microbatches": 16, "recompute": "full"},
    )
    mesh = Mesh(pipe=2, tensor=8, cluster="h100")
    free = sbpc.plan(model, args, mesh, **options)
    limited = sbpc.plan(model, args, mesh, memory=0.8 * free.memory["total"], **options)
    assert limited.memory["total"] <= 0.8 * free.memory["total"]
    assert free.cost.seconds < limited.cost.seconds < 1.2 * free.cost.seconds


def likenesses(plan: Plan) -> list[Hashable]:
    """What is equal for chunks that are measured as one, by chunk."""
    numbers = Numbers()
    return [likeness(chunk, plan.in_loop, numbers) for chunk in plan.chunks]


def test_chunks_with_other_layouts_inside_are_not_alike() -> None:
    model, args = models.gpt2(batch=8, layers=2)
    chunk, numbers = (
        sbpc.plan(model, args, Mesh(pipe=2, data=2, cluster="h100"), stages="pipe", microbatches=2).chunks[0],
        Numbers(),
    )
    choices, aliases = chunk.assignment.choices, chunk.assignment.aliases
    at, choice = next((at, other) for at, each in choices.items() for other in choices.values() if other != each)
    (key, layout), *_ = ((key, each) for key, each in aliases.items() if each.states == (B,))
    for changed in ({"choices": choices | {at: choice}}, {"aliases": aliases | {key: layout.replace({0: Split(0)})}}):
        other = replace(chunk, assignment=replace(chunk.assignment, **changed))
        assert likeness(other, frozenset(), numbers) != likeness(chunk, frozenset(), numbers), list(changed)


def test_equal_chunks_are_measured_once() -> None:
    """Also under a limit of bytes, where parameters and gradients are in the loop."""
    model, args = models.gpt2(batch=16, layers=6)
    mesh, options = Mesh(pipe=2, data=2, cluster="h100"), dict[str, Any](stages="pipe", microbatches=8)
    options |= {"schedule": "interleaved:3", "recompute": "selective"}
    free = sbpc.plan(model, args, mesh, **options)
    assert isinstance(free.programs, OnUse)
    assert len(free.programs.made) == len(set(likenesses(free))) < len(free.chunks)
    limited = sbpc.plan(model, args, mesh, **options, memory=0.6 * free.memory["total"])
    assert limited.in_loop
    for plan in (free, limited):
        for at, (cost, alone) in enumerate(zip(plan.chunk_costs, map(ChunkCost, plan.programs), strict=True)):
            assert (cost.homes, cost.trained, cost.adds()) == (alone.homes, alone.trained, alone.adds())
            assert [cost.held(kind) for kind in GROUP_OF] == [alone.held(kind) for kind in GROUP_OF]
            for which in plan.tally(at):
                assert cost.program(which) == alone.program(which)
                rises = [[each.rise(which, first) for first in (True, False)] for each in (cost, alone)]
                assert rises[0] == rises[1]
        assert len({id(cost.known) for cost in plan.chunk_costs}) < len(plan.chunk_costs) == 6
    first, *inner, last = likenesses(free)
    assert len(set(inner)) == 1 and len({first, inner[0], last}) == 3
    pinned = sbpc.plan(model, args, mesh, pin={"blocks.2.up.weight": "S(0)"}, **options)
    assert len(set(likenesses(pinned))) == len({id(cost.known) for cost in pinned.chunk_costs}) == 4


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2"])
def test_a_plan_in_stages_is_no_slower_than_an_expert(schedule: str) -> None:
    """What its layouts take one after the other says little of a step where stages wait for each other."""
    model, args = models.gpt2(batch=24, layers=4, seq=16, width=32, heads=4)
    mesh = Mesh(pipe=2, data=2, tensor=2, cluster="workstation")
    options: dict[str, Any] = {"stages": "pipe", "microbatches": 6, "schedule": schedule}
    plan = sbpc.plan(model, args, mesh, **options)
    for name in ("data", "megatron", "megatron+sp"):
        assert plan.cost.seconds <= sbpc.baseline(name, model, args, mesh, **options).cost.seconds * (1 + 1e-9), name
