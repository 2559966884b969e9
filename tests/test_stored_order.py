"""Orders of programs in files: a plan that is read runs as the one that was written without a search, and no other order gets in."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import PlanError
from sbpc.passes.schedule.list_schedule import ListScheduler
from sbpc.plans.plan_bytes import FORMAT
from sbpc.plans.staged.stage_parts import PARTS
from tests import models
from tests.compare import compare, eager
from tests.forging import body_of, sealed
from tests.random_plans import random_plan
from tests.test_plan import refused
from tests.test_schedule import LAN, MESHES, random_buckets, random_order, random_panels, with_order

FLAT, PIPE = Mesh(d=2, t=2, cluster=LAN), Mesh(pipe=2, d=2, cluster=LAN)
ONE: dict[str, Any] = {"microbatches": 1, "panels": 1}
STAGED: dict[str, Any] = {"stages": "pipe", "microbatches": 2}
CASES: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "one program": (FLAT, ONE),
    "halves": (FLAT, {}),
    "computed again in panels": (FLAT, {"microbatches": 1, "recompute": "full", "panels": 2}),
    "slices under a limit": (FLAT, ONE | {"slices": 2, "memory": 2e6}),
    "a loop": (FLAT, {"microbatches": 2}),
    "1f1b": (PIPE, STAGED),
    "interleaved": (PIPE, STAGED | {"schedule": "interleaved"}),
    "zbv": (PIPE, STAGED | {"schedule": "zbv"}),
    "dims with names": (FLAT, ONE | {"dynamic": {"tokens": ("b", "s")}}),
}


@functools.cache
def planned(case: str) -> Plan:
    """The plan of a case."""
    mesh, options = CASES[case]
    return sbpc.plan(*models.gpt2(batch=16, seq=32, width=64, heads=4, layers=1), mesh, **options)


def texts(plan: Plan) -> list[str]:
    """All programs of a plan as they run: the boxed graphs in their orders, and what a rank runs of each."""
    found = []
    for at, programs in enumerate(plan.programs):
        for which in map(programs.of, plan.tally(at)):
            program = programs.program(which)
            found += [str((program.gm.meta.get("pieces"), program.gives, program.late, program.early))]
            found += [calls(program.gm), calls(programs.local_at(which, True, plan.inner.ranks - 1))]
    return found


def calls(gm: GraphModule) -> str:
    """A graph as text, in its order; keywords, which files sort, in theirs."""
    lines = []
    for node in gm.graph.nodes:
        about = [str(node.meta.get(key)) for key in ("sbp", "bucket", "awaits", "step")]
        lines.append(f"{node.name} = {node.target} {node.args} {sorted(node.kwargs.items())} {' '.join(about)}")
    return "\n".join(lines)


def no_search(*_: Any) -> Any:
    """Takes the place of a search for an order."""
    raise AssertionError("an order is searched for")


@pytest.mark.parametrize("case", CASES)
def test_a_plan_that_is_read_runs_in_the_order_that_was_written(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(case)
    plan.save(tmp_path / "plan")
    assert any(chunk["orders"] for chunk in body_of(tmp_path / "plan")["chunks"])
    written, told = texts(plan), str(plan)
    monkeypatch.setattr(ListScheduler, "run", no_search)
    found = sbpc.load(tmp_path / "plan")
    assert str(found) == told and found.cost == plan.cost and texts(found) == written
    found.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "plan").read_bytes()


@pytest.mark.parametrize("case", ["one program", "1f1b"])
def test_a_cached_plan_is_not_ordered_again(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBPC_CACHE", str(tmp_path / "plans"))
    written = texts(planned.__wrapped__(case))
    monkeypatch.setattr(ListScheduler, "run", no_search)
    found = planned.__wrapped__(case)
    assert found.cached is not None and found.cost.seconds > 0 and texts(found) == written


def test_a_file_of_the_version_before_is_ordered_anew(tmp_path: Path) -> None:
    plan = planned("one program")
    plan.save(tmp_path / "plan")
    body = body_of(tmp_path / "plan")
    body["chunks"][0].pop("orders")
    first, text = (tmp_path / "plan").read_text().splitlines()[0], sealed(body).decode().partition("\n")[2]
    assert json.loads(first)["version"] == 5
    for version, reads in ((4, True), (5, True), (3, False), (6, False), (True, False), ("4", False), (None, False)):
        digest = hashlib.sha256(text[:-1].encode()).hexdigest()
        head = {"format": FORMAT, "version": version, "sha256": digest}
        (tmp_path / "other").write_text(json.dumps(head) + "\n" + text)
        if reads:
            assert texts(sbpc.load(tmp_path / "other")) == texts(plan)
        else:
            assert "this sbpc reads 4 to 5" in refused(PlanError, lambda: sbpc.load(tmp_path / "other"))


def shuffled(order: list[Any], chance: random.Random) -> list[Any]:
    """An order with one thing in it changed."""
    order = json.loads(json.dumps(order))
    at, other = chance.randrange(len(order)), chance.randrange(len(order))
    messages = [place for place, item in enumerate(order) if isinstance(item, list)]
    match chance.randrange(7):
        case 0:
            order.insert(other, order.pop(at))
        case 1:
            order[at], order[other] = order[other], order[at]
        case 2:
            order.pop(at)
        case 3:
            order.insert(other, order[at])
        case 4:
            order[at] = chance.choice((10**6, -(10**6), [], [order[at]] if isinstance(order[at], int) else [0], 0))
        case 5:
            near = min(at, len(order) - 2)
            order[near], order[near + 1] = order[near + 1], order[near]
        case _:
            place = chance.choice(messages) if messages else at
            members = order[place] if messages else [order[place], order[other]]
            order[place : place + 1] = chance.choice(
                (members, [members[::-1]], [members * 2], [members[1:]], [[*members, 0]])
            )
    return order


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.prove)])
@pytest.mark.parametrize("net, mesh", [("gpt2", MESHES[2]), ("mlp", MESHES[3])], ids=repr)
def test_random_orders_are_read_as_they_were_written_and_changed_ones_compute_the_same_or_are_refused(
    net: str, mesh: Mesh, count: int, tmp_path: Path
) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = getattr(models, net)()
    outside, chance, outcomes = eager(model, args), random.Random(0), {True: 0, False: 0}
    solved = sbpc.plan(model, args, mesh)
    for seed in range(max(count // 12, 1)):
        plan = random_panels(random_plan(solved, seed), seed)
        order = random_buckets(random_order(plan.unscheduled, mesh, seed), seed)
        scheduled = with_order(plan, *order)
        scheduled.lower_bound = scheduled.serial_bound = 0.0  # of which nothing is known in this order
        scheduled.save(tmp_path / "plan")
        found = sbpc.load(tmp_path / "plan")
        assert texts(found) == texts(scheduled) and found.cost == scheduled.cost
        body = body_of(tmp_path / "plan")
        ((_, numbers),) = body["chunks"][0]["orders"]
        assert any(isinstance(item, list) for item in numbers)
        for _ in range(12):
            body["chunks"][0]["orders"] = [[[*PARTS], shuffled(numbers, chance)]]
            (tmp_path / "changed").write_bytes(sealed(body))
            try:
                changed = sbpc.load(tmp_path / "changed")
            except PlanError as error:
                assert str(tmp_path / "changed") in str(error)
                outcomes[False] += 1
                continue
            outcomes[True] += 1
            changed.verify()
            assert compare(changed, model, args, *outside) <= 1e-10
    assert outcomes[False] > count // 4, outcomes


def moved(numbers: list[Any], item: Any, place: int) -> None:
    """Puts an item of an order at another place."""
    numbers.remove(item)
    numbers.insert(place, item)


def starts(numbers: list[Any]) -> dict[int, int]:
    """By call its place in an order."""
    return {call: at for at, item in enumerate(numbers) for call in (item if isinstance(item, list) else [item])}


def waits(numbers: list[Any]) -> list[int]:
    """The waits in an order."""
    return [item for item in numbers if isinstance(item, int) and item < 0]


FORGED: list[tuple[str, Callable[[list[Any]], Any], str]] = [
    ("no calls", lambda order: order.clear(), "is not in the order of the calls"),
    ("one call less", lambda order: order.remove(0), ""),
    ("one call twice", lambda order: order.insert(1, order[0]), "stands twice"),
    ("a call that is not there", lambda order: order.append(10**9), "call 1000000000 in the order of"),
    ("a wait for what is not there", lambda order: order.append(-(10**9)), "in the order of"),
    ("a wait before its start", lambda order: moved(order, waits(order)[0], 0), "which is not on its way"),
    ("a wait twice", lambda order: order.append(waits(order)[0]), "which is not on its way"),
    ("no wait", lambda order: order.remove(waits(order)[-1]), ""),
    ("a wait behind its readers", lambda order: moved(order, waits(order)[0], len(order)), "before %"),
    ("a wait for a kernel", lambda order: order.append(~order[-1] if order[-1] >= 0 else -1), "which is not on its way"),
    ("a message of nothing", lambda order: order.append([]), "sends nothing in one message"),
    ("a message of one", lambda order: order.__setitem__(starts(order)[~waits(order)[0]], [~waits(order)[0]]), "in one message"),
    ("a kernel in a message", lambda order: order.__setitem__(slice(0, 2), [order[:2]]), "in one message"),
    ("all the other way", lambda order: order.reverse(), ""),
    ("no numbers", lambda order: order.__setitem__(0, "0"), "orders"),
    ("a fraction", lambda order: order.__setitem__(0, 0.0), "orders"),
    ("deep", lambda order: order.__setitem__(0, [[0]]), "orders"),
    ("a flag", lambda order: order.__setitem__(0, False), "orders"),
]  # fmt: skip


def test_no_forged_order_is_read(tmp_path: Path) -> None:
    for case in ("one program", "1f1b"):
        planned(case).save(tmp_path / "plan")
        whole = body_of(tmp_path / "plan")
        for what, change, said in FORGED:
            body = json.loads(json.dumps(whole))
            orders = next(chunk["orders"] for chunk in body["chunks"] if chunk["orders"])
            change(orders[0][1])
            (tmp_path / "bad").write_bytes(sealed(body))
            message = refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))
            assert said in message and "bad: " in message, (case, what, message)


def test_orders_of_other_programs_are_refused(tmp_path: Path) -> None:
    plan = planned("1f1b")
    plan.save(tmp_path / "plan")
    whole = body_of(tmp_path / "plan")
    (which, numbers), *_ = next(chunk["orders"] for chunk in whole["chunks"] if chunk["orders"])
    for orders in ([[[*PARTS], numbers]], [[which, numbers]] * 2, [[which[::-1], numbers]], []):
        body = json.loads(json.dumps(whole))
        next(chunk for chunk in body["chunks"] if chunk["orders"])["orders"] = orders
        (tmp_path / "bad").write_bytes(sealed(body))
        assert "has orders of other programs" in refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))


def test_what_computes_again_too_early_is_refused(tmp_path: Path) -> None:
    plan = planned("computed again in panels")
    plan.save(tmp_path / "plan")
    body = body_of(tmp_path / "plan")
    ((_, numbers),) = body["chunks"][0]["orders"]
    calls = [node for node in plan.unscheduled.graph.nodes if node.op == "call_function"]
    placed, last = starts(numbers), 0
    for call in range(len(calls)):  # as soon as its operands are there
        if "recomputes" in calls[call].meta and "step" not in calls[call].meta:
            needed = [calls.index(used) for used in calls[call].all_input_nodes if used.op == "call_function"]
            ends = [numbers.index(~each) if ~each in numbers else placed[each] for each in needed]
            last = max(ends, default=-1) + 1
            if placed[call] > last and call in numbers:
                moved(numbers, call, last)
                break
    (tmp_path / "bad").write_bytes(sealed(body))
    assert "on which it waits" in refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))


def test_a_bound_that_the_plan_itself_is_below_is_refused(tmp_path: Path) -> None:
    for case in ("one program", "1f1b"):
        planned(case).save(tmp_path / "plan")
        whole = body_of(tmp_path / "plan")
        for name in ("lower_bound", "serial_bound"):
            for bound in (1.0, -1.0, math.nan):
                (tmp_path / "bad").write_bytes(sealed(whole | {name: bound}))
                message = refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))
                assert "no plan is to cost less than" in message or name in message, (case, name, bound, message)


def test_a_mesh_that_names_an_axis_twice_is_refused(tmp_path: Path) -> None:
    sbpc.plan(*models.mlp(), Mesh(x=2)).save(tmp_path / "plan")
    body = body_of(tmp_path / "plan")
    for mesh in ([["x", 2], ["x", 2]], [["x", 4], ["x", 2]]):
        (tmp_path / "bad").write_bytes(sealed(body | {"mesh": mesh}))
        assert "two axes of its mesh have one name" in refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))
