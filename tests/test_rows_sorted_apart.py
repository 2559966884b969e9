"""Rows of experts of which each rank sorts its own before they are sent: where they stand, plans, what every rank
tells the others."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import RoutingError
from sbpc.graph.expert_rows import GATHER, SCATTER, rows_of_peers
from sbpc.mesh.states import chunk_sizes
from sbpc.plans import rank_programs
from sbpc.plans.plan_file import decode
from tests.compare import largest_error
from tests.processes import run_ranks
from tests.routed import ROUTINGS, Routed, batch
from tests.test_capacity import busiest, steps
from tests.test_shared_rows import losses, train

EXPERTS, EACH = 5, 7


@pytest.mark.parametrize("behind", [0, 2], ids=["all are counted", "some are behind the last group"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_rows_that_come_from_sorted_parts_stand_as_if_all_had_been_sorted(ranks: int, behind: int) -> None:
    """Of seven ranks some have no expert; what stands behind the last group is the last rank's."""
    ids = torch.randint(0, EXPERTS, (ranks, EACH), generator=torch.Generator().manual_seed(ranks))
    ids[:, :behind] = EXPERTS
    ids[0, behind:] = 1
    own = [torch.sort(each, stable=True) for each in ids]
    ends = torch.cat([torch.bucketize(torch.arange(EXPERTS), each, right=True) for each, _ in own])
    groups = [*itertools.accumulate(chunk_sizes(EXPERTS, ranks))]
    last = torch.tensor([*groups[:-1], EXPERTS + 1])
    sent: list[tuple[Tensor, ...]] = [  # by rank the numbers of the rows that go to each
        (order + EACH * at).split(torch.bincount(torch.bucketize(each, last, right=True), minlength=ranks).tolist())
        for at, (each, order) in enumerate(own)
    ]
    found = []
    for rank in range(ranks):
        came = torch.cat([rows[rank] for rows in sent])
        most = len(came)
        order, counts, taken = rows_of_peers(ends, torch.tensor([rank]), groups, EACH, most, False)
        back, *_ = rows_of_peers(ends, torch.tensor([rank]), groups, EACH, most, True)
        assert counts.tolist() == [*map(len, sent[rank])] and taken.tolist() == [len(rows[rank]) for rows in sent]
        assert torch.equal(came[order][back], came)
        found.append(came[order])
    assert torch.equal(torch.cat(found), torch.argsort(ids.flatten(), stable=True))


def moves(plan: Plan) -> set[str]:
    """By which signatures rows are taken to their groups and back."""
    return {str(node.meta["choice"]) for node in plan.boxed.graph.nodes if node.target in (GATHER, SCATTER)}


def pair(sizes: dict[str, int], pin: str, own: str, **options: float) -> tuple[Routed, Plan, Plan]:
    """A model, and its plans in which each rank sorts its own rows, and in which all sort those of all."""
    torch.manual_seed(0)
    model, ids = Routed().double(), ", ".join("L(0)" if state == "L(0)" else "B" for state in pin[1:-1].split(", "))
    pins = ({"_grouped_mm": pin, "sort": sort} for sort in (own, f"[{ids}]"))
    return model, *(sbpc.plan(model, batch(), Mesh(**sizes), pin=each, objective="serial", **options) for each in pins)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("sizes", "pin", "own"),
    [
        ({"a": 4}, "[R(0)]", "[L(0)]"),
        ({"a": 2, "b": 2}, "[L(0), R(0)]", "[L(0), L(0)]"),
        pytest.param({"a": 2, "b": 2}, "[R(0), R(0)]", "[L(0), L(0)]", marks=pytest.mark.prove),
        pytest.param({"a": 2, "b": 2}, "[R(0), S(1)]", "[L(0), B]", marks=pytest.mark.prove),
        pytest.param({"a": 2, "b": 2}, "[S(1), R(0)]", "[B, L(0)]", marks=pytest.mark.prove),
        pytest.param({"a": 2, "b": 2, "c": 2}, "[L(0), R(0), R(0)]", "[L(0), L(0), L(0)]", marks=pytest.mark.prove),
    ],
    ids=str,
)
def test_plans_in_which_each_rank_sorts_its_own_rows_give_the_same_bits(
    sizes: dict[str, int], pin: str, own: str, tmp_path: Path
) -> None:
    model, plan, other = pair(sizes, pin, own)
    assert any("L(0), P(own) -> R(0)" in move for move in moves(plan))
    assert plan.verify() > 1000 and not any("L(0), P(own) -> R(0)" in move for move in moves(other))
    plan.save(tmp_path / "plan.sbpc")
    plan.export(tmp_path / "programs.sbpc")
    again = sbpc.load(tmp_path / "plan.sbpc"), rank_programs.decode(decode(tmp_path / "programs.sbpc"))
    for routing in ROUTINGS:
        assert largest_error(plan, model, batch(routing)) <= 1e-10, routing
        found, *others = (sbpc.simulate(each, model, batch(routing)) for each in (plan, other, *again))
        for each in others:
            assert torch.equal(each.outputs, found.outputs)
            assert all(torch.equal(each.gradients[name], found.gradients[name]) for name in found.gradients)


def test_adam_steps_of_ranks_that_sort_their_own_rows_equal_one_process(tmp_path: Path) -> None:
    model, plan, _ = pair({"a": 2, "b": 2}, "[R(0), R(0)]", "[L(0), L(0)]")
    plan.save(tmp_path / "routed.sbpc")
    expected = losses(model)
    for found in run_ranks(train, 4, str(tmp_path / "routed.sbpc"), "code"):
        assert isinstance(found, list), found
        assert found == pytest.approx(expected, rel=1e-10)


def test_all_stop_beyond_the_capacity_where_each_has_sorted_its_own() -> None:
    model, *plans = pair({"a": 2, "b": 2}, "[L(0), R(0)]", "[L(0), L(0)]", capacity=1.5)
    assert largest_error(plans[0], model, batch("as it comes")) <= 1e-10
    said = []
    for each in plans:
        with pytest.raises(RoutingError) as error:
            sbpc.simulate(each, model, batch("all to one"))
        said.append(str(error.value).replace("gather_rows_1", "gather_rows"))
    assert said[0] == said[1] and "rank 0 of 2 gets 40 of 48 rows of experts in" in said[0]


def test_what_was_routed_is_measured_where_each_has_sorted_its_own(tmp_path: Path) -> None:
    """What ranks tell each other before is no collective of the timeline, and every rank stops beyond the capacity."""
    model, plan, _ = pair({"a": 2, "b": 2}, "[R(0), R(0)]", "[L(0), L(0)]", capacity=3)
    plan.save(tmp_path / "routed.sbpc")
    found = run_ranks(steps, 4, str(tmp_path / "routed.sbpc"))
    assert len(set(map(str, found))) == 1 and "Rows by rank: 96, 0, 0, 0" in found[0][1], found
    shares = [busiest(model, routing) for routing in ("as it comes", "one idle")]
    assert found[0][0][""] == pytest.approx(sum(shares) / 2)


def test_each_sorts_its_own_where_that_is_cheaper_and_the_solver_prices_it_as_the_plan() -> None:
    with torch.device("meta"):
        model = Routed(1024, 512, 64, 8).bfloat16()
        args = torch.empty(64, 4096, 1024, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    mesh, pin = Mesh(expert=16, cluster="h100"), {"_grouped_mm": "[R(0)]"}
    plan, whole = (sbpc.plan(model, args, mesh, pin=each, objective="serial") for each in (pin, pin | {"sort": "[B]"}))
    assert any("L(0), P(own) -> R(0)" in move for move in moves(plan))
    for each in (plan, whole):
        assert each.lower_bound == pytest.approx(each.cost.seconds, rel=1e-9)
    assert plan.cost.seconds < whole.cost.seconds


def test_ranks_tell_each_other_once_in_each_phase_how_many_rows_there_are() -> None:
    _, plan, _ = pair({"a": 2, "b": 2}, "[R(0), R(0)]", "[L(0), L(0)]")
    own = torch.ops.sbpc.rows_of_peers.default
    calls = [node for node in plan.local.graph.nodes if node.target is own]
    assert len({node.args[0] for node in calls}) == 2 and len(calls) == 4  # there and back, forward and backward
