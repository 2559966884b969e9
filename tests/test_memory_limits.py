"""Plans under a limit of bytes: what prices are put on is alive, bounds hold for everything that fits, limits are kept."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import MemoryLimitError
from sbpc.mesh.cluster import CLUSTERS
from sbpc.passes.annotate import annotate
from sbpc.passes.assign.local_bytes import Place, PlaceKind
from sbpc.passes.assign.wishes import placeholder_wishes
from sbpc.passes.memory import search as memory
from sbpc.passes.memory.limited_space import LimitedSpace, store
from sbpc.passes.memory.live_bytes import Moment, at_optimizer, bytes_alive_in_every_plan, bytes_at_next_reads, calls_of
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import OPTIMIZER_STATE, Options
from sbpc.solver import Problem, total
from sbpc.solver.surroundings import Surroundings
from tests import models
from tests.random_plans import draw
from tests.test_closed_forms import Linears

COPIES = 1 + OPTIMIZER_STATE["adamw"]


def bytes_in(space: LimitedSpace, assignment: Assignment, moment: Moment) -> float:
    """The bytes that a moment counts in an assignment."""
    labels = space.labels(assignment)
    return sum(float(weights[labels[at]]) for at, weights in space.weights(moment).items())


def moments_of(name: str, mesh: Mesh, plans: int, every: int) -> tuple[float, float]:
    """The most that a moment of random plans counts, as a part of what the plan takes; and of what is alive then."""
    free = sbpc.plan(*models.MODELS[name](), mesh, objective="serial")
    gm = annotate(store(free.graph))
    space = LimitedSpace(gm, mesh, {}, {})
    calls = list(calls_of(gm).values())[::every]
    wishes = placeholder_wishes(gm, mesh, None, None, False)
    most = then = 0.0
    for seed in range(plans):
        plan = make_plan(
            gm, mesh, draw(gm, mesh, wishes, random.Random(seed)), 0.0, Options(objective="serial"), Stages()
        )
        memory, live = plan.cost.memory, alive(plan)
        counted = {
            call.name: bytes_in(space, plan.assignment, bytes_alive_in_every_plan(gm, call, COPIES)) for call in calls
        }
        at_end = bytes_in(space, plan.assignment, at_optimizer(gm, COPIES))
        most = max(most, max(at_end, *counted.values()) / memory["total"])
        state = OPTIMIZER_STATE["adamw"] * memory["gradients"]
        then = max([then, *(counted[name] / (live[name] + state) for name in counted.keys() & live.keys())])
    return most, then


def alive(plan: sbpc.Plan) -> dict[str, int]:
    """The most bytes that are alive at a call, or at a call of those that stand for it, by name."""
    found: dict[str, int] = {}
    life = plan.life
    for moment, live in zip(life.moments, life.live):
        if "call" in moment.node.meta and "step" not in moment.node.meta:
            name = moment.node.meta["call"]
            found[name] = max(live, found.get(name, 0))
    return found


@pytest.mark.parametrize(("name", "mesh"), [("mlp", Mesh(x=4)), ("lora", Mesh(x=2, y=2))], ids=str)
def test_what_a_moment_counts_is_alive(name: str, mesh: Mesh) -> None:
    most, then = moments_of(name, mesh, 6, 1)
    assert 0.5 <= most <= 1 and 0.9 <= then <= 1


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "mesh"), list(itertools.product(models.MODELS, (Mesh(x=3), Mesh(x=4), Mesh(x=2, y=2)))), ids=str
)
def test_what_any_moment_counts_is_alive(name: str, mesh: Mesh) -> None:
    assert max(moments_of(name, mesh, 6, 1)) <= 1


def test_of_pieces_of_one_storage_each_is_counted_and_of_values_that_overlap_one() -> None:
    class Pieces(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * x
            a, b = y.split(4, 1)
            return (a.sin() * b.cos() * y.exp()[:, :4]).sum()

    gm = annotate(
        store(sbpc.plan(Pieces(), (torch.randn(4, 8, requires_grad=True),), Mesh(x=2), objective="serial").graph)
    )
    first = next(node for node in gm.graph.nodes if node.op == "call_function" and node.meta["phase"] == "backward")
    counted = {
        name for name, _ in bytes_alive_in_every_plan(gm, next(iter(first.users)), COPIES) if name.endswith("_stored")
    }
    pieces, overlapping = {"getitem_stored", "getitem_1_stored"}, {"exp_stored", "slice_1_stored"}
    assert pieces <= counted and len(overlapping & counted) == 1


class Again(nn.Module):
    """A value that is read, and once more later."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * x
        return y.sin().cos() * y


def test_of_a_value_that_has_been_read_and_will_be_again_what_it_takes_at_the_least_is_counted() -> None:
    gm, mesh = (
        sbpc.plan(Again(), (torch.randn(6, 9),), Mesh(x=2, y=2), train=False, objective="serial").graph,
        Mesh(x=2, y=2),
    )
    space = LimitedSpace(gm, mesh, {}, {})
    sin, cos, mul = (next(node for node in gm.graph.nodes if node.name == name) for name in ("sin", "cos", "mul_1"))
    place = ("mul", Place(PlaceKind.LEAST, 0))
    assert [place in bytes_alive_in_every_plan(gm, call, 0) for call in (sin, cos, mul)] == [False, True, False]
    assert place not in bytes_at_next_reads(gm, cos, 0)  # which counts it as it is read next
    weights = space.weights({place: 1.0})[space.named["mul"]]
    assert set(weights.tolist()) == {4 * 14.0} and len(weights) == len(space.tables[space.named["mul"]])


def test_a_result_is_counted_as_it_is_left_once_it_is_there() -> None:
    class Scored(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = 2 * x
            return scores.sin().sum(), scores

    plan = sbpc.plan(
        Scored(),
        (torch.randn(48, 10),),
        Mesh(x=4),
        train=False,
        inputs=["S(0)"],
        pin={"mul": "S(0)"},
        objective="serial",
    )
    gm, space = plan.graph, LimitedSpace(plan.graph, plan.mesh, {}, {})
    call = next(node for node in gm.graph.nodes if node.name == "sum_1")
    x, scores, sines = 4 * 120, 4 * 480, 4 * 120  # bytes on a rank: of scores the whole, which is boxed at once
    assert bytes_in(space, plan.assignment, bytes_alive_in_every_plan(gm, call, 0)) == x + scores + sines + 4
    assert alive(plan)["sum_1"] >= x + scores + sines + 4


class Scaled(nn.Module):
    """A layer norm with a bias that is computed: its backward, taken apart, reads of the bias the shape alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.log_bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[1:], self.weight, 1.5 * self.log_bias.exp()).sin().sum()


def test_what_a_call_that_is_taken_apart_does_not_read_is_not_counted_until_then() -> None:
    gm = annotate(store(sbpc.plan(Scaled(64), (torch.randn(1, 64),), Mesh(x=4), objective="serial").graph))
    call = next(node for node in gm.graph.nodes if node.name == "cos")
    backward = next(node for node in gm.graph.nodes if "native_layer_norm_backward" in node.name)
    read = {node.name for node in backward.all_input_nodes}
    counted = {name for name, _ in bytes_alive_in_every_plan(gm, call, COPIES)}
    assert {"mul_stored", "getitem_1_stored"} <= read and "getitem_1_stored" in counted and "mul_stored" not in counted


def test_a_limit_under_which_many_plans_hold_too_much_is_kept_by_the_best() -> None:
    model, mesh = (Scaled(4096), (torch.randn(1, 4096),)), Mesh(x=2, cluster=models.bare("a100"))
    most = 0.65 * sbpc.plan(*model, mesh, optimizer="sgd", objective="serial").cost.memory["total"]
    plan = sbpc.plan(*model, mesh, optimizer="sgd", memory=most, objective="serial")
    # nothing is faster
    assert plan.cost.memory["total"] <= most and plan.cost.seconds == pytest.approx(1.05027e-4, rel=1e-4)


class Squared(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


def test_a_tight_limit_of_a_tiny_model_is_met() -> None:
    model = Squared(nn.Linear(4, 6), nn.Linear(6, 4)), (torch.randn(3, 4),)
    assert sbpc.plan(*model, Mesh(x=5), optimizer="sgd", memory=640, objective="serial").cost.memory["total"] <= 640


def test_a_limit_that_no_plan_keeps_is_refused_as_soon_as_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, search = list[float](), memory.MemorySearch.run

    def run(self: memory.MemorySearch, free: sbpc.Plan, limit: float) -> None:
        limits.append(limit)
        search(self, free, limit)

    monkeypatch.setattr(memory.MemorySearch, "run", run)
    model = Squared(nn.Linear(4, 6), nn.Linear(6, 4)), (torch.randn(3, 4),)
    with pytest.raises(MemoryLimitError, match="no plan takes as little as 100"):
        sbpc.plan(*model, Mesh(x=5), optimizer="sgd", memory=100, objective="serial")
    assert limits == [100]


def test_what_a_plan_leaves_open_takes_the_cheapest_label() -> None:
    """Also where blocks differ, of which equal ones are looked at once."""
    with torch.device("meta"):
        model, args = models.gpt2(batch=16, seq=64, vocab=1024, width=512, heads=8, layers=4)
    free = sbpc.plan(
        model,
        args,
        Mesh(x=2, y=2, cluster=models.bare("h100")),
        pin={"blocks.1.up.weight": "S(0)@x", "blocks.2.down.weight": "[B, B]"},
    )
    space = LimitedSpace(annotate(store(free.graph)), free.mesh, {}, {})
    known, around = space.known_labels(free.assignment), Surroundings(space.problem)
    expected = [label or 0 for label in known]
    for at in (at for at, label in enumerate(known) if label is None):
        expected[at] = int(around.costs(at, expected).argmin())
    assert space.labels(free.assignment) == expected
    assert known.count(None) > 20 and len({expected[at] for at, label in enumerate(known) if label is None}) > 2


def test_a_plan_under_a_limit_is_polished_and_certify_goes_on() -> None:
    """Rows about plans that were tried before forbid better ones: about the best plan alone they do not."""
    with torch.device("meta"):
        model, args = models.gpt2(batch=16, seq=64, vocab=1024, width=512, heads=8, layers=2)
    mesh = Mesh(x=2, y=2, cluster=models.bare("h100"))
    most = 0.4 * sbpc.plan(model, args, mesh, objective="serial").cost.memory["total"]
    plan = sbpc.plan(model, args, mesh, objective="serial", memory=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.MemorySearch, "polish", lambda self, more=0, until=0.0: False)
        rough = sbpc.plan(model, args, mesh, objective="serial", memory=most)
    before = rough.cost.seconds
    assert plan.cost.seconds < 0.99 * before
    with pytest.MonkeyPatch.context() as patch:  # a clock that stands still until a better plan is found
        search = rough.prover
        assert isinstance(search, memory.MemorySearch)
        first = search.best
        patch.setattr(memory.time, "process_time", lambda: 0.0 if search.best is first else 60.0)
        rough.certify(seconds=1)
    assert plan.cost.lower_bound <= rough.cost.seconds < before and rough.cost.memory["total"] <= most


def test_a_bound_is_not_above_the_plan_by_rounding() -> None:
    plan = sbpc.plan(
        Squared(nn.Linear(4, 6), nn.Linear(6, 4)), (torch.randn(3, 4),), Mesh(x=5), optimizer="sgd", objective="serial"
    )
    assert plan.cost.gap == 0 and plan.cost.lower_bound == plan.cost.seconds  # the solver adds in another order


def test_a_limit_below_what_the_caller_holds_is_refused() -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(24, 24)), nn.Parameter(torch.randn(24, 24))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            hidden = x @ self.up
            return x, hidden, self.up, x.t(), hidden @ self.down

    for limit in (5764.0, 1.0):
        with pytest.raises(MemoryLimitError, match="no plan was found that takes less than 11,528 bytes a rank"):
            sbpc.plan(
                Returned(),
                (torch.randn(24, 24),),
                Mesh(x=4, cluster="a100"),
                train=False,
                memory=limit,
                objective="serial",
            )


def test_a_gathered_parameter_that_is_kept_is_counted_beside_its_home() -> None:
    model, args = Linears(64), (torch.randn(4, 4, 64, requires_grad=True),)
    free = sbpc.baseline("fsdp", model, args, Mesh(p=4), inputs=["S(0)"], objective="serial")
    then, alive_then = first_of_backward(free)
    assert 0.9 * alive_then <= then <= alive_then


def first_of_backward(free: sbpc.Plan) -> tuple[float, float]:
    """What is counted at the first product of the backward, as parameters are kept in the layout in which they are read
    there; what is alive."""
    gm = annotate(store(free.graph))
    space = LimitedSpace(gm, free.mesh, {}, {})
    plan = make_plan(
        gm, free.mesh, space.assignment(space.labels(free.assignment)), 0.0, Options(objective="serial"), Stages()
    )
    late = [node for node in gm.graph.nodes if node.op == "call_function" and node.meta.get("phase") == "backward"]
    call = next(node for node in late if "einsum" in node.name)
    state = OPTIMIZER_STATE["adamw"] * plan.cost.memory["gradients"]
    return bytes_in(space, plan.assignment, bytes_alive_in_every_plan(gm, call, COPIES)), alive(plan)[call.name] + state


def test_of_a_call_that_is_taken_apart_what_is_alive_at_once_is_counted() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (2 * x).log_softmax(1)

    plan = sbpc.plan(
        Scores(),
        (torch.randn(6, 40),),
        Mesh(x=2),
        train=False,
        inputs=["S(1)"],
        pin={"_log_softmax": "S(1)"},
        objective="serial",
    )
    call = next(node for node in plan.graph.graph.nodes if "log_softmax" in node.name)
    assert call.meta["candidates"].apart(plan.assignment.choices[call.name])
    space = LimitedSpace(plan.graph, plan.mesh, {}, {})
    counted = bytes_in(space, plan.assignment, bytes_alive_in_every_plan(plan.graph, call, 0))
    assert 0.95 * alive(plan)[call.name] <= counted + 8 <= alive(plan)[call.name] + 8


def test_of_a_call_that_is_taken_apart_a_result_that_nothing_reads_is_alive_no_longer_than_its_parts_need_it() -> None:
    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.layer_norm(2 * x, (40,))

    plan = sbpc.plan(
        Normed(),
        (torch.randn(6, 40),),
        Mesh(x=2),
        train=False,
        inputs=["S(1)"],
        pin={"native_layer_norm": "S(1)"},
        objective="serial",
    )
    call = next(node for node in plan.graph.graph.nodes if node.name == "native_layer_norm")
    assert call.meta["candidates"].apart(plan.assignment.choices[call.name])
    space = LimitedSpace(plan.graph, plan.mesh, {}, {})
    assert (
        bytes_in(space, plan.assignment, bytes_alive_in_every_plan(plan.graph, call, 0)) <= alive(plan)[call.name] - 8
    )


WIDE, SMALL = Mesh(x=4, cluster=models.bare("a100")), Mesh(x=2, y=2, cluster=models.bare("h100"))
PROVED = [
    ("mlp", {"batch": 512, "width": 96, "hidden": 384}, WIDE, 0.7),
    ("vgg", {}, WIDE, 0.7),
    pytest.param("mlp", {"batch": 96, "width": 48, "hidden": 192}, SMALL, 0.8, marks=pytest.mark.prove),
]


@pytest.mark.parametrize(("name", "sizes", "mesh", "share"), PROVED, ids=str)
def test_a_small_plan_under_a_limit_is_proved_to_be_the_best(
    name: str, sizes: dict[str, int], mesh: Mesh, share: float
) -> None:
    model = models.MODELS[name](**sizes)
    free = sbpc.plan(*model, mesh, objective="serial")
    plan = sbpc.plan(*model, mesh, memory=share * free.cost.memory["total"], objective="serial")
    assert free.cost.seconds < plan.cost.seconds and plan.cost.gap <= 1e-5


class Drawn(nn.Module):
    """Linear layers and activations, drawn; two of them may share what they read."""

    def __init__(self, program: list[tuple[str, bool]], width: int) -> None:
        super().__init__()
        self.program = program
        self.weights = nn.ParameterList(torch.randn(width, width) for op, _ in program if op == "mm")

    def forward(self, x: Tensor) -> Tensor:
        first, weights = x, iter(self.weights)
        for op, again in self.program:
            source = first if again else x
            if op == "mm":
                x = source @ next(weights)
            elif op == "relu":
                x = torch.relu(source)
            else:
                x = x + source
        return x


@pytest.mark.parametrize(("seeds", "most"), [(8, 30_000), pytest.param(80, 100_000, marks=pytest.mark.prove)])
def test_no_plan_under_the_limit_is_faster_than_the_bound(seeds: int, most: int) -> None:
    """Of all choices of all nodes those that are faster than the bound are made: each takes more than the limit."""
    tighter = made = 0
    for seed in range(seeds):
        draws = random.Random(seed)
        program = [
            ("mm", False),
            *draws.choices([("relu", False), ("add", False), ("add", True)], k=draws.randint(0, 1)),
        ]
        width, batch, share = draws.choice((6, 8, 12)), draws.choice((1, 2, 4, 8)), draws.uniform(0.6, 0.95)
        cluster = dataclasses.replace(CLUSTERS["ideal"], peak=CLUSTERS["ideal"].peak * draws.choice((10, 100)))
        mesh = Mesh(x=draws.choice((2, 3)), cluster=cluster)
        model, args = Drawn(program, width), (torch.randn(batch, width),)
        free = sbpc.plan(model, args, mesh, objective="serial")
        limit = share * free.cost.memory["total"]
        gm = annotate(store(free.graph))
        space = LimitedSpace(gm, mesh, placeholder_wishes(gm, mesh, None, None, False), {})
        counts = [len(variable.costs) for variable in space.variables]
        try:
            plan = sbpc.plan(model, args, mesh, memory=limit, objective="serial")
        except MemoryLimitError:
            continue
        assert plan.cost.memory["total"] <= limit
        assert free.cost.lower_bound * (1 - 1e-9) <= plan.cost.lower_bound <= plan.cost.seconds
        if math.prod(counts) > most:
            continue
        before = plan.cost.gap
        assert plan.certify(seconds=0.1) <= before
        tighter += plan.cost.lower_bound > free.cost.seconds * (1 + 1e-9)
        problem = Problem(space.variables, space.values)
        for labels in itertools.product(*map(range, counts)):
            if total(problem, labels) < plan.cost.lower_bound * (1 - 1e-9):
                other = make_plan(gm, mesh, space.assignment(list(labels)), 0.0, Options(objective="serial"), Stages())
                assert other.cost.memory["total"] > limit, seed
                made += 1
    assert tighter >= seeds // 4 and made > 0, (tighter, made)


def test_a_limit_is_met_where_a_plan_that_sends_nothing_costs_nothing() -> None:
    """Prices are in the plan's own cost, which is 0: all ranks compute all. Then they are in what boxing costs."""
    model, args = models.mlp()
    free = sbpc.plan(model, args, Mesh(x=2, y=2), objective="bytes")
    assert not any(free.cost.bytes_sent.values())
    limit = 0.5 * free.cost.memory["total"]
    plan = sbpc.plan(model, args, Mesh(x=2, y=2), objective="bytes", memory=limit)
    assert plan.cost.memory["total"] <= limit and any(plan.cost.bytes_sent.values())
