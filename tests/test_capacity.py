"""What is asked of a plan about rows of experts: how many a rank has at most, and what prices expect."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh, Plan
from sbpc.cli.main import main
from sbpc.errors import LoopError, PlanError, RoutingError, SbpcError
from sbpc.mesh.routing import ANY, most_rows, stretched
from tests.bench import experts_by_hand as by_hand
from tests.bench.by_hand import loss_of
from tests.compare import compare, eager
from tests.processes import run_ranks
from tests.routed import ROUTINGS, Layers, Routed, batch, product
from tests.test_local_rows import Biased

SHARED = {"experts*": "S(0)", "_grouped_mm": "R(0)"}


def planned(mesh: Mesh, **options: Any) -> tuple[nn.Module, Plan]:
    """A small mixture of experts, and a plan that shares out its rows."""
    torch.manual_seed(0)
    model = Routed().double()
    pin = {name: f"[{', '.join([state] * len(mesh.axes))}]" for name, state in SHARED.items()}
    return model, sbpc.plan(model, batch(), mesh, pin=pin, **options)


def test_a_multiple_of_the_mean_is_taken_as_it_is_written_and_never_more_than_all() -> None:
    assert [most_rows(96, 3, times) for times in (1.0, 1.1, 1.25, 3.0, 9.0, ANY)] == [32, 36, 40, 96, 96, 96]
    assert stretched(10, 5, 1.1) == 11  # which 1.1 * 10 is above


def at_worst(plan: Plan) -> int:
    """The bytes that a step takes at most, without the state of the optimizer."""
    return plan.cost.memory["total"] - plan.cost.memory["optimizer"]


def test_memory_is_that_of_the_worst_routing() -> None:
    model, plan = planned(Mesh(a=3))
    run = sbpc.simulate(plan, model, batch("the last ones idle"))  # the experts that are left are those of one rank
    assert run.peak_memory == pytest.approx(at_worst(plan), rel=0.05)


def test_memory_within_a_capacity_is_that_of_the_worst_routing_within_it() -> None:
    model, free = planned(Mesh(a=3))
    model, plan = planned(Mesh(a=3), capacity=2)
    run = sbpc.simulate(plan, model, batch("all to one"))  # whose rank has twice the mean
    assert run.peak_memory == pytest.approx(at_worst(plan), rel=0.05)
    assert at_worst(plan) < 0.8 * at_worst(free)
    assert sbpc.simulate(free, model, batch("all to one")).outputs == run.outputs


def test_every_row_beyond_the_capacity_is_an_error_that_tells_the_counts() -> None:
    model, plan = planned(Mesh(a=3), capacity=1.25)
    with pytest.raises(RoutingError) as found:
        sbpc.simulate(plan, model, batch("the last ones idle"))
    assert str(found.value).splitlines()[1:] == [
        "  Rows by rank: 96, 0, 0.",
        '  It needs capacity=3. Plan with that, or without capacity=, which fits any routing; or overflow="drop" leaves '
        "out what is too much for an expert.",
    ]
    assert "rank 0 of 3 gets 96 of 96 rows of experts in" in str(found.value)
    assert "experts   at most 1.25 times the mean of the rows is a rank's where" in str(plan)
    assert str(plan.diff(planned(Mesh(a=3))[1])).count("capacity")


def steps(path: str) -> tuple[dict[str, float], str]:
    """What is measured of the routing of two steps on this rank, and what it says of one that the plan has no memory
    for."""
    from sbpc.runtime.step_trace import recorded

    torch.manual_seed(0)
    model = sbpc.parallelize(Routed().double(), sbpc.load(path))
    with recorded(model) as recorder:
        for routing in ("as it comes", "one idle"):
            model.step(*batch(routing))
    try:
        model.step(*batch("the last ones idle"))
    except RoutingError as error:
        return recorder.busiest(), str(error)
    return recorder.busiest(), "nothing"


def test_what_was_routed_is_measured_and_every_rank_stops_beyond_the_capacity(tmp_path: Path) -> None:
    model, plan = planned(Mesh(a=2, b=2), capacity=3)
    plan.save(tmp_path / "routed.sbpc")
    assert sbpc.load(tmp_path / "routed.sbpc").cost.memory == plan.cost.memory
    found = run_ranks(steps, 4, str(tmp_path / "routed.sbpc"))
    assert len(set(map(str, found))) == 1 and "Rows by rank: 96, 0, 0, 0" in found[0][1], found
    shares = [busiest(model, routing) for routing in ("as it comes", "one idle")]
    of_all, most = found[0][0].pop(""), found[0][0]
    assert of_all == pytest.approx(sum(shares) / 2) and [*most.values()] == [pytest.approx(max(shares))] * len(most)


def to_one() -> Layers:
    """A layer whose tokens go to one expert each."""
    torch.manual_seed(0)
    model = Layers(1).double()
    model.layers[0].chosen = 1  # type: ignore[assignment]
    return model


def stopped(plan: Plan) -> str:
    """What this rank says of a step whose second half of the tokens all go to one expert."""
    model = sbpc.parallelize(to_one(), plan)
    x, favour = batch()
    model.step(x, favour)
    x[4:] = x[4, 0]
    try:
        model.step(x, favour)
    except RoutingError as error:
        return str(error)
    return "nothing"


def test_every_rank_stops_where_rows_of_some_tokens_are_too_many_for_their_ranks() -> None:
    """Those of others know it, too, and none waits for ranks that have stopped."""
    pin = {"_grouped_mm": "[L(0), R(0)]", "_grouped_mm_1": "[L(0), R(0)]"}
    plan = sbpc.plan(to_one(), batch(), Mesh(data=2, expert=2), pin=pin, capacity=1.9)
    found = run_ranks(stopped, 4, plan)
    assert len({*found}) == 1 and "part 1 of 2 of the tokens, and 23 are what capacity=" in found[0], found
    pin = dict.fromkeys(pin, "[L(0), R(0), L(0)]")
    plan = sbpc.plan(to_one(), batch(), Mesh(a=2, b=2, c=2), pin=pin, capacity=1.5)
    with pytest.raises(RoutingError, match="of 4 of the tokens"):
        sbpc.simulate(plan, to_one(), batch("the last ones idle"))


def busiest(model: Routed, routing: str) -> float:
    """The rows of the rank that has most, of four, as a multiple of the mean: the first has two experts."""
    x, favour = batch(routing)
    rows = (x + torch.nn.functional.gelu(model.first(x))).flatten(0, 1)
    ids = (torch.softmax(model.router(rows) + favour, -1)).topk(model.chosen)[1]
    return 4 * float(torch.bincount((ids.flatten() - 1).clamp(min=0), minlength=4).max() / ids.numel())


def test_prices_follow_the_rows_that_are_expected() -> None:
    costs = [planned(Mesh(a=3), routing=times)[1].cost for times in (1.0, 1.5, 3.0, 5.0)]
    assert costs[0].flops < costs[1].flops < costs[2].flops == costs[3].flops  # all rows on one rank are the most
    assert costs[0].seconds < costs[1].seconds < costs[2].seconds
    assert len({cost.flops_one_device for cost in costs}) == len({str(cost.memory) for cost in costs}) == 1
    for cost in costs:
        assert cost.subs() == pytest.approx(cost.compute_seconds + cost.comm_seconds)


def stopped_in_stages(plan: Plan, folder: str) -> tuple[str, float]:
    """What this rank says of a step whose rows are too many for the first stage, and after how many seconds. The
    ranks of that one live on until all have said something."""
    torch.manual_seed(0)
    module = sbpc.parallelize(Layers(2).double(), plan)
    module.step(*batch())
    begun, said = time.monotonic(), "nothing"
    try:
        module.step(*batch("the last ones idle"))
    except SbpcError as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    Path(folder, os.environ["RANK"]).touch()
    while len(list(Path(folder).iterdir())) < 4:
        time.sleep(0.1)
    return said, seconds


def test_other_stages_stop_where_one_has_too_many_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pin = {f"_grouped_mm{at}": "R(0)" for at in ("", "_1", "_2", "_3")} | {"*experts*": "S(0)"}
    options: dict[str, Any] = {"stages": "pipe", "microbatches": 2, "schedule": "1f1b", "capacity": 1.6}
    plan = sbpc.plan(Layers(2).double(), batch(), Mesh(pipe=2, expert=2), pin=pin, **options)
    found = run_ranks(stopped_in_stages, 4, plan, str(tmp_path), seconds=90)
    assert all(said.startswith("RoutingError: rank 0 of 2 gets 48 of 48 rows of experts") for said, _ in found[:2]), (
        found
    )
    for said, seconds in found[2:]:
        first = (
            r"LostRankError: rank [01] of stage 0 has stopped in call 2 of plan 0, forward and backward: RoutingError: "
        )
        assert re.match(first + "rank 0 of 2 gets 48 of 48 rows of experts in layers.0", said), found
        assert seconds < 20, found


def dropping(model: Routed, x: Tensor, favour: Tensor, capacity: float) -> Tensor:
    """What the model computes if each expert takes so many times the mean of all rows, the first ones of the batch."""
    x = x + F.gelu(model.first(x))
    rows = x.flatten(0, 1)
    share = torch.softmax(model.router(rows) + favour, -1)
    weights, ids = share.topk(model.chosen)
    mixed, counts = torch.zeros_like(rows), torch.bincount(ids.flatten(), minlength=len(favour))
    for expert in range(len(favour)):
        tokens, slots = torch.where(ids == expert)
        taken = slice(math.ceil(capacity * ids.numel() / len(favour)))
        made = F.silu(rows[tokens[taken]] @ model.experts["up"][expert].T) @ model.experts["down"][expert].T
        mixed = mixed.index_add(0, tokens[taken], made * weights[tokens[taken], slots[taken]].unsqueeze(1))
    return (rows + mixed).square().sum() + (share.mean(0) * counts / counts.sum()).sum()


@pytest.mark.parametrize("sizes", [{"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_rows_beyond_the_capacity_of_an_expert_add_nothing_on_any_mesh(sizes: dict[str, int], tmp_path: Path) -> None:
    model, plan = planned(Mesh(**sizes), capacity=1.1, overflow="drop")
    assert "drops others" in str(plan)
    plan.save(tmp_path / "dropping.sbpc")
    plan = sbpc.load(tmp_path / "dropping.sbpc")
    for routing in ROUTINGS:
        args = batch(routing)
        expected = dropping(model, *args, 1.1)
        gradients = torch.autograd.grad(expected, [*model.parameters()])
        run = sbpc.simulate(plan, model, args)
        assert run.outputs.item() == pytest.approx(expected.item(), rel=1e-12)
        for (name, _), gradient in zip(model.named_parameters(), gradients):
            assert torch.allclose(run.gradients[name], gradient, rtol=1e-10, atol=1e-10), (routing, name)
        assert run.peak_memory <= 1.001 * at_worst(plan)


def test_experts_with_biases_drop_rows_too() -> None:
    class Alone(Biased):
        """Each row by itself, with a weight of zero if it is beyond the capacity."""

        def forward(self, x: Tensor, favour: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            weights, ids = torch.softmax(self.router(rows) + favour, -1).topk(self.chosen)
            hot = F.one_hot(ids.flatten(), len(favour))
            kept = ((hot.cumsum(0) * hot).sum(-1) <= math.ceil(1.1 * ids.numel() / len(favour))).view_as(ids)
            both = torch.einsum("td,tkhd->tkh", rows, self.experts["up"][ids]) + self.experts["bias"][ids]
            made = torch.einsum("tkh,tkdh->tkd", F.silu(both[..., ::2]) * both[..., 1::2], self.experts["down"][ids])
            made = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + 1e-6) * self.scale
            return (rows + (made * (weights * kept)[..., None]).sum(1)).square().sum()

    torch.manual_seed(0)
    model, alone = Biased().double(), Alone().double()
    alone.load_state_dict(model.state_dict())
    pin = {"_grouped_mm": "[R(0), R(0)]"}
    plan = sbpc.plan(model, batch(), Mesh(a=2, b=2), pin=pin, capacity=1.1, overflow="drop")
    for routing in ROUTINGS:
        assert compare(plan, model, batch(routing), *eager(alone, batch(routing))) <= 1e-10, routing


def test_rows_that_stages_would_drop_are_refused_as_what_they_are() -> None:
    model, mesh, more = Layers(2, experts=8).double(), Mesh(pipe=2, a=2), {"stages": "pipe", "microbatches": 2}
    with pytest.raises(LoopError, match='with stages=, plan without\n  overflow="drop"; capacity= alone stops'):
        sbpc.plan(model, batch(experts=8), mesh, capacity=1.25, overflow="drop", **more)
    assert sbpc.plan(model, batch(experts=8), mesh, capacity=1.25, **more).verify() > 100


def test_what_is_computed_of_all_rows_of_experts_drops_none() -> None:
    class Loose(Routed):
        def forward(self, x: Tensor, favour: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            ids = (self.router(rows) + favour).argmax(-1)
            order = torch.argsort(ids, stable=True)
            ends = torch.cumsum(torch.histc(ids.float(), 5, 0, 4), 0, dtype=torch.int32)
            return product(rows[order], self.experts["up"].mT, ends).square().sum()

    with pytest.raises(PlanError, match="this is computed of all rows of experts"):
        sbpc.plan(Loose().double(), batch(), Mesh(a=2), capacity=1.5, overflow="drop")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"capacity": 0.5}, "capacity is 0.5\n  It is a multiple of the mean, a number from 1 on."),
        ({"capacity": "much"}, "capacity is 'much'\n  It is a multiple of the mean, a number from 1 on."),
        ({"capacity": True}, "capacity is True\n  It is a multiple of the mean, a number from 1 on."),
        ({"capacity": float("nan")}, "capacity is nan\n  It is a multiple of the mean, a number from 1 on."),
        ({"routing": 0}, "routing is 0\n  It is a multiple of the mean, a number from 1 on."),
        ({"overflow": "drop"}, "overflow='drop' without capacity=\n  Say how many rows are not too many."),
        ({"capacity": 2, "overflow": "wait"}, "overflow is 'wait'\n  It is one of 'error', 'drop'."),
    ],
)
def test_what_is_no_capacity_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SbpcError) as found:
        sbpc.plan(Routed(), batch(), Mesh(a=2), **asked)
    assert str(found.value) == message


@pytest.mark.parametrize("asked", [{"capacity": 1.25}, {"routing": 1.5}])
def test_a_step_without_experts_has_no_capacity(asked: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="of a step in which no rows of experts were found\n  Leave it out"):
        sbpc.plan(nn.Linear(4, 4), (torch.zeros(4, 4),), Mesh(a=2), **asked)


def test_the_command_line_takes_all_of_these(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, file = tmp_path / "target_of_experts.py", str(tmp_path / "plan.sbpc")
    target.write_text(
        "from tests.routed import Routed, batch\n\n\ndef made():\n    return Routed().double(), batch()\n"
    )
    asked = "plan", f"{target}:made", "--mesh", "a=3", "-o", file
    assert main([*asked, "--capacity", "2", "--overflow", "drop", "--routing", "1.5"]) == 0
    options = sbpc.load(file).options
    assert (options.capacity, options.overflow, options.routing) == (2.0, "drop", 1.5)
    assert "the busiest rank is expected to have 1.5 times the mean" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "--capacity", "0.5"])
    assert "'0.5' is no multiple of the mean, as in 1.25" in capsys.readouterr().err


def test_a_step_whose_head_is_in_slices_shares_out_rows_of_experts() -> None:
    net, (tokens, targets) = by_hand.build(batch=4, seq=6, vocab=40, width=16, heads=2, layers=1, experts=8, hidden=24)
    pin = {"*mix.up": "S(0)", "*mix.down": "S(0)", "_grouped_mm": "R(0)"}
    asked = {"loss": loss_of, "targets": (targets,), "pin": pin}
    for count in (1, 2):  # the pin could not be met
        plan = sbpc.plan(net, (tokens,), Mesh(a=4), slices=count, **asked)
        assert sum("R(0)" in str(node.meta.get("sbp")) for node in plan.graph.graph.nodes) > 10


@pytest.mark.parametrize("sort", ["[L(0), L(0)]", "[L(0), B]"])
def test_bytes_as_a_formula_know_results_that_lie_in_larger_storages(sort: str) -> None:
    """Rows that come back lie in a storage of as many as may come: the formula is of all of it."""
    args = torch.randn(32, 16, 64).bfloat16(), torch.zeros(8).bfloat16()
    mesh, pin = Mesh(a=2, e=2, cluster="ethernet"), {"_grouped_mm": "[L(0), R(0)]", "sort": sort}
    plan = sbpc.plan(Routed(64, 128, 8, 2).bfloat16(), args, mesh, pin=pin, capacity=1.5)
    numbers = {each: 2 for each in plan.cost.memory_expr.free_symbols if each.name in mesh.axes}
    assert plan.cost.memory_expr.xreplace(numbers) == plan.cost.memory["total"]
