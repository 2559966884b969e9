"""Inside a stage collectives run beside computing: closed forms of the seconds, the numbers of one device, and broken programs are found."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import VerifyError
from sbpc.mesh.cluster import Cluster
from sbpc.plans.staged.schedules import EARLY, INPUTS, WEIGHTS, piece_of
from sbpc.plans.staged.stage_parts import AFTER, BEFORE
from sbpc.plans.staged.staged_timeline import program_spans
from sbpc.plans.timeline import makespan, sends
from tests import models
from tests.compare import compare, eager

WIDTH, LAYERS, BATCH, COUNT = 64, 4, 256, 4
# flops in which one of two ranks multiplies a micro-batch by the weights of a layer
PRODUCT = 2 * WIDTH**2 * BATCH / COUNT / 2
# products of a step: one forward and two back, but for that of the first layer's input
COMPUTING = COUNT * (3 * LAYERS - 1)


def squares(x: Tensor) -> Tensor:
    return x.square().sum()


def planned(home: str, send: float, objective: str = "seconds") -> Any:
    """Linear layers, whose products take a second each, and each of whose gradients is all-reduced in `send` seconds."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    cluster = Cluster("flat", PRODUCT, math.inf, 0.0, 8, 0.0, 8 * WIDTH**2 / send, 0.0, 8 * WIDTH**2 / send)
    options: dict[str, Any] = {
        "loss": squares,
        "stages": "pipe",
        "microbatches": COUNT,
        "schedule": "gpipe",
        "objective": objective,
        "pin": {"*": home},
    }
    return sbpc.plan(net, (torch.randn(BATCH, WIDTH),), Mesh(pipe=1, data=2, cluster=cluster), **options)


def test_gradients_go_home_while_the_last_micro_batch_is_on_its_way_back() -> None:
    assert planned("B", 0.5, "serial").cost.seconds == pytest.approx(COMPUTING + LAYERS * 0.5, rel=0.01)
    # of the gradient that is computed last
    assert planned("B", 0.5).cost.seconds == pytest.approx(COMPUTING + 0.5, rel=0.01)
    behind = 2 * LAYERS - 2  # products behind the first gradient
    assert planned("B", 4.0).cost.seconds == pytest.approx(COMPUTING - behind + LAYERS * 4.0, rel=0.01)


def test_parameters_are_gathered_while_the_first_micro_batch_is_on_its_way() -> None:
    serial, plan = (planned("S(0)@data", 1.0, objective) for objective in ("serial", "seconds"))
    assert serial.programs[0].calls[BEFORE] and serial.programs[0].calls[AFTER]
    assert serial.cost.seconds == pytest.approx(COMPUTING + LAYERS * 1.0, rel=0.01)
    assert plan.cost.seconds == pytest.approx(COMPUTING + 2 * 0.5, rel=0.01)  # of the first layer, and of its gradient
    assert plan.cost.lower_bound <= plan.cost.seconds and plan.cost.exposed_seconds == pytest.approx(1.0, rel=0.1)
    assert plan.cost.bytes_sent == serial.cost.bytes_sent


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.prove)])
def test_what_is_hidden_changes_no_number(schedule: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=8, layers=2)
    mesh = Mesh(pipe=2, tensor=2, cluster=Cluster("lan", 1e9, 1e10, 1e-6, 1, 5e-6, 1e9, 5e-6, 1e9))
    plans = [
        sbpc.plan(model, args, mesh, stages="pipe", microbatches=4, schedule=schedule, objective=objective)
        for objective in ("seconds", "serial")
    ]
    assert (
        plans[0].cost.seconds < plans[1].cost.seconds and plans[0].cost.exposed_seconds < plans[1].cost.exposed_seconds
    )
    for plan in plans:
        assert compare(plan, model, args, *eager(model, args)) <= 1e-10
        assert sbpc.simulate(plan, model, args).bytes_sent == plan.cost.bytes_sent


def test_a_value_that_is_read_before_its_collective_ends_is_found() -> None:
    plan = planned("B", 0.5)
    plan.verify()
    program = plan.programs[0].program((INPUTS, WEIGHTS, AFTER)).gm
    wait = next(node for node in program.graph.nodes if "awaits" in node.meta)
    wait.replace_all_uses_with(wait.all_input_nodes[0])
    with pytest.raises(VerifyError, match="something else reads it before"):
        plan.verify()


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.prove), {"schedule": "zbv"}, {"schedule": "gpipe", "objective": "serial"}],
    ids=str,
)
def test_lanes_of_a_stage_hold_its_actions_its_collectives_and_what_it_sends(options: dict[str, Any]) -> None:
    """The lanes end with the step, each does one thing at a time, and collectives run while an action of their stage does,
    but for those that come early: they begin then."""
    model, args = models.gpt2(batch=16, seq=32, width=64, heads=4, layers=4)
    slow = Cluster("slow", 5e12, 1e12, 1e-6, 1, 2e-6, 24e6, 2e-6, 24e6)
    plan = sbpc.plan(
        model,
        args,
        Mesh(pipe=2, d=2, cluster=slow),
        stages="pipe",
        microbatches=4,
        pin={"*up.weight": "S(0)"},
        **options,
    )
    events = plan.timeline()
    assert makespan(events) == pytest.approx(plan.cost.seconds)
    lanes: dict[str, list[Any]] = {}
    for event in events:
        lanes.setdefault(event.stream, []).append(event)
    assert {lane.partition(", ")[0] for lane in lanes} == {"stage 0", "stage 1"}
    for lane, found in lanes.items():
        ordered = sorted(found, key=lambda event: event.start)
        assert all(one.end <= other.start + 1e-12 for one, other in itertools.pairwise(ordered)) or "sends" in lane
        own = {str(each.action): each for each in program_spans(plan, int(lane.split()[1].rstrip(",")))}
        for event in found if "links" in lane else ():
            run = own[event.name.partition(" ")[0]]
            assert run.start - 1e-12 <= event.start and (event.end <= run.end + 1e-12 or EARLY in run.parts)
    sent = sum(map(len, (found for lane, found in lanes.items() if "sends" in lane)))
    assert sent == sum(plan.sending(need, action) > 0 for action in plan.spans for need in plan.needs(action)) > 0
    collectives = [event for lane, found in lanes.items() if "links" in lane for event in found]
    order = [(which, action.chunk) for stage in (0, 1) for which, action in plan.order(stage)]
    runs = [(which, at) for which, at in order if not piece_of(which)[1]]
    assert collectives and len(collectives) == sum(
        sends(node, plan.inner) for which, at in runs for node in plan.programs[at].program(which).gm.graph.nodes
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_bound_of_stages_holds_and_allows_for_cores_that_they_share(schedule: str) -> None:
    """A stage computes faster while others wait or communicate: the bound allows for that, and is no less than all computing."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for objective, send, sharing in itertools.product(("seconds", "serial"), (0.1, 3.0), (1.0, 1.2, 2.0)):
        cluster = Cluster(
            "shared", PRODUCT, math.inf, 0.0, 8, 0.0, 8 * WIDTH**2 / send, 0.0, 8 * WIDTH**2 / send, sharing=sharing
        )
        options: dict[str, Any] = {"loss": squares, "stages": "pipe", "microbatches": COUNT, "objective": objective}
        mesh = Mesh(pipe=2, data=2, cluster=cluster)
        plan: Any = sbpc.plan(net, (torch.randn(BATCH, WIDTH),), mesh, schedule=schedule, **options)
        assert COMPUTING / 2 <= plan.lower_bound <= plan.cost.seconds, (objective, send, sharing)


class Wide(nn.Module):
    """Blocks with dropout, and a mean over the targets that count."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * width, width))
                for _ in range(4)
            )
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), target, ignore_index=-1)


@pytest.mark.parametrize(("axes", "options"), [({"data": 2}, {}), ({"pipe": 2}, {"stages": "pipe"})], ids=str)
def test_micro_batches_go_in_halves_where_that_hides_collectives(axes: dict[str, int], options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    lan = Cluster("lan", 5e9, 1e10, 5e-7, 2, 2e-6, 240e6, 2e-6, 24e6)
    model, args = Wide(), (torch.randn(64, 64), torch.randint(-1, 64, (64,)))
    plan = sbpc.plan(model, args, Mesh(cluster=lan, **axes, tensor=2), microbatches=2, **options)
    assert plan.body.options.microbatches == 2 and plan.verify()
    alone = sbpc.simulate(sbpc.plan(model, args, Mesh(x=1)), model, args, seed=3)
    run = sbpc.simulate(plan, model, args, seed=3)
    assert torch.allclose(run.outputs, alone.outputs, rtol=1e-12)
    for name, gradient in run.gradients.items():
        assert torch.allclose(gradient, alone.gradients[name], atol=1e-14)  # type: ignore[arg-type]
    memory = plan.cost.memory
    assert memory["total"] - memory["optimizer"] == run.peak_memory
    numbers = {plan.cost.symbols[name]: value for name, value in plan.cost.numbers.items()}
    assert plan.cost.memory_expr.xreplace(numbers) == memory["total"]


class Scaled(nn.Module):
    """Layers, and a scale of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x.square().mean()


@pytest.mark.parametrize("sizes", [{"data": 2}, {"pipe": 2, "data": 2}])
def test_the_sum_of_gradients_of_one_number_is_no_gradient_of_a_result(sizes: dict[str, int]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = Scaled(), (torch.randn(8, 8),)
    stages = {"stages": "pipe"} if "pipe" in sizes else {}
    plan = sbpc.plan(model, args, Mesh(**sizes), microbatches=2, **stages)
    assert plan.overlaps and compare(plan, model, args, *eager(model, args)) <= 1e-10
