"""Schedules: any legal one computes the same, the chosen one is no slower and keeps to its bytes, and files keep starts and waits."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import PlanError, SbpcError, VerifyError
from sbpc.graph.operands import is_late
from sbpc.graph.ports import results
from sbpc.mesh.cluster import CLUSTERS, Cluster
from sbpc.mesh.kernels import Attention, Product
from sbpc.passes.panels.choice import with_panels
from sbpc.passes.panels.cut import moves
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.passes.schedule import choice
from sbpc.passes.schedule.choice import choose, weighted
from sbpc.passes.schedule.list_schedule import RULES, ListScheduler, list_schedule
from sbpc.passes.schedule.schedule import GAIN, SLACK, STORED, leanest, ordered, schedule, seconds_of
from sbpc.plans.measure import sent_by
from sbpc.plans.memory import Life
from sbpc.plans.staged.chunk_programs import extracted, whole
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import PARTS
from sbpc.plans.storages import Storages
from sbpc.plans.timeline import (
    ACROSS,
    COMPUTE,
    INSIDE,
    STREAMS,
    Clock,
    Span,
    Work,
    busy_seconds,
    critical_seconds,
    kind_of,
    makespan,
    played,
    sends,
    timeline,
    works,
)
from sbpc.runtime.prepared import prepared, wait
from tests import models
from tests.compare import compare, eager, error_of
from tests.random_plans import random_plan
from tests.routed import Layer

LAN = Cluster("lan", 5e9, 1e10, 5e-7, 1, 2e-6, 24e6, 2e-6, 24e6)
NETS: dict[str, dict[str, Any]] = {"mlp": {}, "gpt2": {"tied": True}, "resnet": {}}
MESHES = [Mesh(x=2), Mesh(x=3), Mesh(x=2, y=2), Mesh(x=2, y=3)]


def random_order(boxed: GraphModule, mesh: Mesh, seed: int) -> list[tuple[Node, bool]]:
    """A random order of the calls that works, with waits at random places between a collective and its first reader."""
    draw = random.Random(seed)
    calls = [node for node in boxed.graph.nodes if node.op == "call_function"]
    known = set(calls)
    missing = {node: sum(used in known for used in node.all_input_nodes) for node in calls}
    ready = [(node, False) for node in calls if not missing[node]]
    order = []
    while ready:
        node, waits = ready.pop(draw.randrange(len(ready)))
        order.append((node, waits))
        if sends(node, mesh) and not waits:
            ready.append((node, True))
            continue
        for user in node.users:
            if user in known:
                missing[user] -= 1
                ready += [(user, False)] if not missing[user] else []
    return order


def random_buckets(order: list[tuple[Node, bool]], seed: int) -> tuple[list[tuple[Node, bool]], dict[Node, Node]]:
    """The order with random collectives of one kind moved to the last of them, as one message; nothing that they wait for moves."""
    draw, buckets = random.Random(seed), dict[Node, Node]()
    at = 0
    while at < len(order):
        node, waits = order[at]
        members = [at]
        for other in range(at + 1, len(order)) if (node, True) in order[at:] and not waits else ():
            late, waited = order[other]
            if waited and late in {order[each][0] for each in members}:
                break
            if not waited and (late, True) in order[other:] and kind_of(late) == kind_of(node) and draw.random() < 0.7:
                members.append(other)
        if len(members) > 1:
            together = [order[each] for each in members]
            buckets |= {each: node for each, _ in together}
            rest = [order[each] for each in range(at, members[-1]) if each not in members]
            order[at : members[-1] + 1] = rest + together
            at += len(rest) + len(together)
        else:
            at += 1
    return order, buckets


def with_order(plan: Plan, order: list[tuple[Node, bool]], buckets: dict[Node, Node] | None = None) -> Plan:
    """The plan, its boxed graph in another order."""
    result = replace(plan)
    result.programs[0].known[PARTS, False] = whole(plan.unscheduled, ordered(plan.unscheduled, order, buckets))
    return result


def random_panels(plan: Plan, seed: int) -> Plan:
    """The plan with random collectives next to products in random numbers of panels."""
    draw, found = random.Random(seed), moves(plan)
    wanted = [(move, draw.choice((2, 3, 4))) for move in draw.sample(found, len(found)) if draw.random() < 0.7]
    return with_panels(
        plan, found, wanted, lambda gm, assignment: make_plan(gm, plan.mesh, assignment, 0.0, plan.options, Stages())
    )


def check_random_schedules(net: str, mesh: Mesh, seeds: range) -> None:
    """Random schedules of random legal plans in random panels compute what one device computes, and send what the plans say."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = getattr(models, net)(**NETS[net])
    outputs, gradients = eager(model, args)
    solved = sbpc.plan(model, args, mesh)
    for seed in seeds:
        plan = random_plan(solved, seed)
        cut = random_panels(plan, seed)
        scheduled = with_order(cut, *random_buckets(random_order(cut.unscheduled, mesh, seed), seed))
        scheduled.verify()
        run = sbpc.simulate(scheduled, model, args)
        assert error_of(run, outputs, gradients) <= 1e-10
        sent = {axes: size for axes, size in cut.cost.bytes_sent.items() if size}
        assert scheduled.cost.bytes_sent == pytest.approx(cut.cost.bytes_sent)
        assert {axes: size for axes, size in run.bytes_sent.items() if size} == pytest.approx(sent)
        assert scheduled.cost.seconds <= scheduled.cost.compute_seconds + scheduled.cost.comm_seconds + 1e-12


@pytest.mark.parametrize("net, mesh", [("mlp", MESHES[3]), ("gpt2", MESHES[1]), ("resnet", MESHES[2])], ids=repr)
def test_random_legal_schedules_compute_the_same(net: str, mesh: Mesh) -> None:
    check_random_schedules(net, mesh, range(1))


def bytes_in_order(gm: GraphModule, mesh: Mesh, seed: int) -> None:
    """Bytes are counted without a graph of an order as they are of that graph, moment by moment."""
    storages, stored = Storages(gm, mesh), [(node, False) for node in gm.graph.nodes if node.op in STORED]
    random_one = random_order(gm, mesh, seed)
    for order, buckets in ((random_one, {}), random_buckets(list(random_one), seed)):
        found, made = Life.in_order(storages, [*stored, *order], buckets), Life.of(ordered(gm, order, buckets), mesh)
        assert found.live == made.live and found.peak == made.peak > 0


@pytest.mark.parametrize("net, mesh", [("mlp", MESHES[3]), ("gpt2", MESHES[2]), ("resnet", MESHES[2])], ids=repr)
def test_the_bytes_of_an_order_need_no_graph(net: str, mesh: Mesh) -> None:
    """Of random plans, and of some in panels."""
    model, args = getattr(models, net)(**NETS[net])
    plan = sbpc.plan(model, args, mesh, microbatches=1)
    for seed in range(2):
        other = random_plan(plan, seed)
        bytes_in_order((random_panels(other, seed) if seed % 2 else other).unscheduled, mesh, seed)


def test_the_bytes_of_an_order_that_adds_to_sums_need_no_graph() -> None:
    """Of the parts of a loop over micro-batches, which add in place."""
    loop = sbpc.plan(*models.mlp(), Mesh(x=2, y=2), microbatches=4).programs[0]
    for parts in ((FORWARD,), (INPUTS, WEIGHTS)):
        bytes_in_order(extracted(loop, parts).gm, loop.chunk.mesh, 0)


def test_the_bytes_of_an_order_that_sends_rows_need_no_graph() -> None:
    plan = sbpc.plan(Layer(experts=4), (torch.randn(4, 6, 8), torch.zeros(4)), Mesh(x=4), microbatches=1)
    plans = [random_plan(plan, seed) for seed in range(6)]
    for seed, each in enumerate(plans):
        bytes_in_order(each.unscheduled, plan.mesh, seed)
    assert any(sent_by(node) for each in plans for node in each.unscheduled.graph.nodes if "step" not in node.meta)


class Sums(torch.nn.Module):
    """Sums of one tensor: a number, and one over rows."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(), (2.0 * x).sum(0)


def test_a_number_goes_in_one_message_with_a_tensor() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    plan = sbpc.plan(Sums(), (x,), Mesh(x=2), inputs=["S(0)"], outputs=["B", "B"], microbatches=1, panels=1)
    calls = [node for node in plan.unscheduled.graph.nodes if node.op == "call_function"]
    sent = [node for node in calls if sends(node, plan.mesh)]
    assert [node.meta["val"].dim() for node in sent] == [0, 1]
    made = {used for node in sent for used in node.all_input_nodes}
    last = max(at for at, node in enumerate(calls) if node in made) + 1
    before, after = ([(node, False) for node in part if node not in sent] for part in (calls[:last], calls[last:]))
    order = [*before, *((node, waits) for waits in (False, True) for node in sent), *after]
    together = with_order(plan, order, {node: sent[0] for node in sent})
    together.verify()
    run = sbpc.simulate(together, Sums(), (x,))
    assert torch.allclose(run.outputs[0], x.sum(), 0, 1e-12) and torch.allclose(run.outputs[1], 2 * x.sum(0), 0, 1e-12)


@pytest.mark.prove
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("net", NETS)
def test_many_random_legal_schedules_compute_the_same(net: str, mesh: Mesh) -> None:
    check_random_schedules(net, mesh, range(100, 142))  # 504 in all


@functools.cache
def solved(**options: Any) -> tuple[Plan, Any, Any]:
    model, args = models.gpt2(batch=16, seq=32, width=64, heads=4, layers=2)
    return sbpc.plan(model, args, Mesh(d=2, t=2, cluster=LAN), **options), model, args


def gpt_on_slow_links(**options: Any) -> tuple[Plan, Any, Any]:
    """A plan that is solved once, with graphs of its own, and its model."""
    plan, model, args = solved(**options)
    return replace(plan), model, args


def saved_by_buckets(plan: Plan) -> float:
    """The latencies of the collectives that are not the first of their bucket."""
    joined = [node for node in plan.boxed.graph.nodes if node.meta.get("bucket", node.name) != node.name]
    return sum(works(plan.boxed, plan.mesh)[node].latency for node in joined)


def test_small_collectives_go_in_one_message_and_peak_bytes_are_those_counted() -> None:
    model, args = models.gpt2(batch=16, seq=32, width=64, heads=4, layers=2)
    outputs, gradients = eager(model, args)
    slow = replace(LAN, intra_latency=2e-4, inter_latency=2e-4)
    for scheme in ("data", "fsdp"):
        plan = sbpc.baseline(scheme, model, args, Mesh(d=2, t=2, cluster=slow), microbatches=1)
        boxed = plan.unscheduled
        apart = min(
            seconds_of(
                *list_schedule(
                    [node for node in boxed.graph.nodes if node.op == "call_function"],
                    works(boxed, plan.mesh),
                    rule=rule,
                ),
                works(boxed, plan.mesh),
                plan.mesh.cluster,
            )
            for rule in RULES
        )
        assert saved_by_buckets(plan) > 0 and plan.cost.seconds < apart
        assert compare(plan, model, args, outputs, gradients) <= 1e-5
        assert plan.life.peak == pytest.approx(sbpc.simulate(plan, model, args).peak_memory, rel=0.05)
        sent = Counter(
            node.meta["boxed"]
            for node in plan.local.graph.nodes
            if "c10d" in str(node.target) and "wait" not in str(node.target)
        )
        assert set(sent.values()) == {1} and len(sent) == len(
            {event.bucket or event.name for event in plan.timeline() if event.axis}
        )


def test_the_buffers_of_large_buckets_are_counted_as_they_live() -> None:
    model, args = models.gpt2(batch=12, seq=32, width=48, heads=4, layers=2)
    plan = sbpc.baseline("fsdp", model, args, Mesh(d=2, t=3, cluster=LAN), microbatches=1)
    calls, work = (
        [node for node in plan.unscheduled.graph.nodes if node.op == "call_function"],
        works(plan.unscheduled, plan.mesh),
    )
    kinds = {node: kind_of(node) for node in calls if work[node].latency}
    order, buckets = list_schedule(calls, work, kinds=kinds)
    together, apart = with_order(plan, order, buckets), with_order(plan, order)
    assert together.life.peak == sbpc.simulate(together, model, args).peak_memory > 1.15 * apart.life.peak


def test_a_bucket_of_different_collectives_is_found() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    starts = [
        node
        for node in plan.boxed.graph.nodes
        if "step" in node.meta and any("awaits" in user.meta for user in node.users)
    ]
    other = next(node for node in starts if kind_of(node) != kind_of(starts[0]))
    for node in (starts[0], other):
        node.meta["bucket"] = starts[0].name
    with pytest.raises(VerifyError, match=r"a bucket does not begin with its first member|cannot go in one message"):
        plan.verify()


def test_the_schedule_hides_communication_and_its_seconds_are_those_of_its_timeline() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    cost, events = plan.cost, plan.timeline()
    assert cost.seconds == pytest.approx(makespan(events)) and max(event.end for event in events) == makespan(events)
    serial = makespan(timeline(plan.unscheduled, plan.mesh))
    assert serial == pytest.approx(cost.compute_seconds + cost.comm_seconds) and cost.seconds < 0.97 * serial
    assert cost.exposed_seconds == pytest.approx(cost.seconds - cost.compute_seconds)
    for rounded in (1 + 1e-15, 1 - 1e-15):  # sums in another order are no waiting
        assert replace(cost, makespan=rounded * cost.compute_seconds).exposed_seconds == 0
    busy = busy_seconds(events)
    assert busy[COMPUTE] == pytest.approx(cost.compute_seconds)
    assert sum(busy.values()) - busy[COMPUTE] == pytest.approx(cost.comm_seconds - saved_by_buckets(plan))
    for stream in STREAMS:  # one thing at a time on every stream
        spans = sorted((event.start, event.end) for event in events if event.stream == stream)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(spans))
    assert cost.lower_bound <= cost.seconds and 0 <= cost.serial_gap <= cost.gap < 1


@pytest.mark.parametrize("loss", [None, lambda y: y.square().mean()], ids=["made outside", "planned"])
def test_without_a_loss_the_backward_begins_behind_all_results(loss: Any) -> None:
    """The caller makes the loss of the results, so no call of the backward runs beside a collective that brings one."""
    with torch.device("meta"):
        blocks = [(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
        model, x = nn.Sequential(*itertools.chain(*blocks)), torch.empty(4096, 1024)
    plan = sbpc.plan(model, (x,), Mesh(a=16, cluster="h100"), loss=loss)
    work, late = works(plan.boxed, plan.mesh), [is_late(node) for node in plan.boxed.graph.nodes]
    apart = sum(
        played({node: each for (node, each), is_of in zip(work.items(), late) if is_of == of}, plan.mesh)[1]
        for of in (False, True)
    )
    if loss is None:
        nodes, end = list(plan.boxed.graph.nodes), results(plan.boxed)[0]
        assert end is not None and "awaits" in end.meta and nodes.index(end) < late.index(True)
        assert plan.cost.seconds == pytest.approx(apart, rel=1e-9)
    else:
        assert plan.cost.seconds < apart


def test_the_calls_that_a_step_waits_for_are_a_chain_as_long_as_the_step() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    critical = critical_seconds(events := plan.timeline())
    assert sum(critical.values()) == pytest.approx(makespan(events)) and len(critical) < len(events)
    chain = [event for event in events if event.name in critical]
    assert {event.stream for event in chain} >= {COMPUTE, ACROSS}
    ordered = sorted(chain, key=lambda event: event.start)
    assert all(one.end == pytest.approx(other.start) for one, other in itertools.pairwise(ordered))


def test_layouts_of_what_a_step_waits_for_are_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = models.gpt2(batch=16, seq=64, width=256, heads=4, layers=1)

    def planned() -> Plan:
        return sbpc.plan(model, args, Mesh(x=2, y=2, cluster="h100"), microbatches=1, panels=1)

    plan = planned()
    monkeypatch.setattr(choice, "TURNS", 0)
    assert plan.cost.lower_bound <= plan.cost.seconds < 0.97 * planned().cost.seconds  # 6 %


def test_a_plan_is_no_slower_than_the_serial_one_scheduled_and_serial_plans_do_not_overlap() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    serial, *_ = gpt_on_slow_links(objective="serial")
    assert serial.cost.seconds == serial.cost.compute_seconds + serial.cost.comm_seconds
    assert not any("awaits" in node.meta for node in serial.boxed.graph.nodes)
    scheduled = replace(serial, options=plan.options)
    assert plan.cost.seconds <= scheduled.cost.seconds * (1 + 1e-2)
    assert plan.cost.lower_bound <= scheduled.cost.seconds


def test_the_seconds_of_an_order_are_those_of_its_timeline() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    boxed, mesh, work = plan.unscheduled, plan.mesh, works(plan.unscheduled, plan.mesh)
    calls = [node for node in boxed.graph.nodes if node.op == "call_function"]
    kinds = {node: kind_of(node) for node in calls if work[node].latency}
    found = [list_schedule(calls, work, 64, rule, None, kinds) for rule in RULES]
    for order in (*found, random_buckets(random_order(boxed, mesh, 3), 3), ([(node, False) for node in calls], {})):
        assert seconds_of(*order, work, mesh.cluster) == pytest.approx(makespan(timeline(ordered(boxed, *order), mesh)))


def test_peak_bytes_of_a_schedule_are_those_counted() -> None:
    plan, model, args = gpt_on_slow_links(microbatches=1)
    counted = sbpc.simulate(plan, model, args).peak_memory
    assert plan.life.peak == pytest.approx(counted, rel=0.05)


def test_a_byte_budget_is_kept_and_one_that_no_schedule_meets_leaves_the_order() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    boxed, mesh = plan.unscheduled, plan.mesh
    least = Life.of(boxed, mesh).peak
    assert Life.of(schedule(boxed, mesh), mesh).peak <= SLACK * least
    assert Life.of(schedule(boxed, mesh, 1.001 * least), mesh).peak <= 1.001 * least
    as_it_is = schedule(boxed, mesh, 10.0)
    assert makespan(timeline(as_it_is, mesh)) == pytest.approx(makespan(timeline(boxed, mesh)))
    assert "no schedule takes at most 10 bytes" in as_it_is.meta["remarks"][-1]
    assert not any("no schedule" in remark for remark in boxed.meta["remarks"])


def test_a_schedule_takes_more_than_slack_of_what_the_device_has_only_where_the_step_is_shorter() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    boxed, mesh = plan.unscheduled, plan.mesh
    tight = schedule(boxed, mesh)
    peak, seconds = Life.of(tight, mesh).peak, makespan(timeline(tight, mesh))
    for room in (0.0, peak, 1.5 * peak, math.inf):
        gm = schedule(boxed, mesh, room=room)
        shorter = makespan(timeline(gm, mesh)) < (1 - GAIN) * seconds
        assert Life.of(gm, mesh).peak <= (max(room, peak) if shorter else peak)
    assert leanest([(1.0, 9.0, [], {}), (1.0 + GAIN / 2, 3.0, ["lean"], {}), (2.0, 1.0, [], {})])[0] == ["lean"]
    assert leanest([(1.0, 9.0, ["fast"], {}), (1.0 + 2 * GAIN, 3.0, [], {})])[0] == ["fast"]


def test_a_schedule_that_may_take_what_the_device_has_gathers_earlier() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    mesh = Mesh(d=4, cluster=replace(LAN, peak=5e8))  # products take about as long as weights are gathered
    boxed = sbpc.baseline("fsdp", model, (torch.randn(16, 64),), mesh, loss=torch.sum, microbatches=1).unscheduled
    tight = schedule(boxed, mesh)
    peak, seconds = Life.of(tight, mesh).peak, makespan(timeline(tight, mesh))
    roomy = schedule(boxed, mesh, room=1.2 * peak)
    assert peak < Life.of(roomy, mesh).peak <= 1.2 * peak
    assert makespan(timeline(roomy, mesh)) < (1 - GAIN) * seconds
    assert Life.of(schedule(boxed, mesh, room=1.001 * peak), mesh).peak == peak


def test_a_narrow_window_runs_no_call_far_ahead() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    calls = [node for node in plan.unscheduled.graph.nodes if node.op == "call_function"]
    number = {node: at for at, node in enumerate(calls)}
    for window in (0, 8):
        order = [
            number[node]
            for node, waits in list_schedule(calls, works(plan.unscheduled, plan.mesh), window)[0]
            if not waits
        ]
        left = set(order)
        for at in order:
            assert at <= min(left) + window
            left.remove(at)
        assert not left


def test_a_trace_is_one_that_perfetto_reads(tmp_path: Path) -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    plan.save_trace(tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [record for record in records if record["ph"] == "X"]
    assert len(spans) == len(plan.timeline()) and {record["cat"] for record in spans} == {"forward", "backward"}
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(1e6 * plan.cost.seconds)
    with pytest.raises(SbpcError):
        plan.save_trace(3)  # type: ignore[arg-type]


def test_a_wait_that_is_missing_or_read_past_is_found() -> None:
    plan, *_ = gpt_on_slow_links(microbatches=1)
    node = next(node for node in plan.boxed.graph.nodes if "awaits" in node.meta and node.users)
    reader = next(iter(node.users))
    reader.replace_input_with(node, node.all_input_nodes[0])
    with pytest.raises(VerifyError, match="something else reads it before"):
        plan.verify()


def test_a_file_whose_starts_and_waits_do_not_match_is_refused(tmp_path: Path) -> None:
    plan = replace(gpt_on_slow_links(microbatches=1)[0])
    plan.export(tmp_path / "step.sbpc")
    sbpc.load_programs(tmp_path / "step.sbpc")
    program = plan.local
    first = next(node for node in program.graph.nodes if "wait_tensor" in str(node.target) and node.users)
    next(iter(first.users)).replace_input_with(first, first.all_input_nodes[0])
    plan.export(tmp_path / "broken.sbpc")
    with pytest.raises(PlanError, match="is not read by one wait alone"):
        sbpc.load_programs(tmp_path / "broken.sbpc")


def test_a_faster_plan_that_breaks_the_limit_is_not_chosen() -> None:
    """Of two plans of one graph the one that takes more bytes is faster; a limit between them leaves the other."""
    model, args = models.gpt2(batch=8, seq=16, width=64, heads=4, layers=1)
    mesh = Mesh(t=2, cluster=replace(LAN, peak=1e12))  # where every rank computes everything and sends nothing
    whole, small = (
        sbpc.plan(model, args, mesh, objective="serial"),
        sbpc.baseline("fsdp", model, args, mesh, objective="serial"),
    )
    assert small.cost.memory["total"] < whole.cost.memory["total"]
    slow, fast = (replace(plan, options=replace(plan.options, objective="seconds")) for plan in (small, whole))
    assert slow.cost.seconds > 1.02 * fast.cost.seconds
    made = {id(plan.assignment): plan for plan in (small, whole)}
    for limit, chosen in ((None, whole), (0.5 * (small.cost.memory["total"] + whole.cost.memory["total"]), small)):
        options = replace(small.options, objective="seconds", memory=limit)
        plan = choose(small, options, lambda _: small.problem, [whole.assignment], lambda each: made[id(each)], None, 0)  # type: ignore[arg-type, return-value]
        assert plan.assignment is chosen.assignment
        assert limit is None or plan.cost.memory["total"] <= limit


def test_waits_of_a_scheduled_program_stay_and_others_are_moved() -> None:
    scheduled, *_ = gpt_on_slow_links(microbatches=1)
    serial, *_ = gpt_on_slow_links(objective="serial")
    for plan, stay in ((scheduled, True), (serial, False)):
        program = prepared(plan.local, torch.device("cpu"), plan.options.overlaps, 1, len(plan.ports.outputs) - 1)
        before, after = (
            [node for node in gm.graph.nodes if node.op == "call_function"] for gm in (plan.local, program)
        )
        known = {node.name for node in before}
        assert ([node.name for node in after if node.name in known] == [node.name for node in before]) == stay
        apart = [
            any(node.target is wait and node.all_input_nodes != [last] for last, node in itertools.pairwise(nodes))
            for nodes in (before, after)
        ]
        assert apart == [stay, True]


@pytest.mark.parametrize("name", sorted(set(CLUSTERS) - {"ideal"}))
def test_a_second_of_computing_costs_what_its_weight_says(name: str) -> None:
    """Bounds of overlapped steps rest on it: all that a kernel takes is weighed, its start and its waves, too."""
    cluster, part = CLUSTERS[name], 0.25
    mesh = weighted(Mesh(data=2, cluster=cluster), {COMPUTE: part, INSIDE: 0.5, ACROSS: 0.25})
    shapes = (
        None,
        Product(2, 300, 500, 700),
        Attention(1 << 20, 1 << 10, 1, False),
        Attention(1 << 20, 1 << 10, 0, True),
    )
    for shape in shapes:
        for flops, moved in ((1e3, 1e3), (1e12, 1e6), (1e6, 1e10)):
            once, less = (each.kernel_seconds("mm", flops, moved, shape) for each in (cluster, mesh.cluster))
            assert less == pytest.approx(part * once, rel=1e-12), (shape, flops)


@pytest.mark.parametrize("seed", range(8))
def test_kernels_beside_links_end_when_their_seconds_are_over(seed: int) -> None:
    """However the ends of collectives round: a kernel goes on in parts, slowly up to each of them."""
    draw, beside = random.Random(seed), replace(CLUSTERS["h100"], kernels_beside=1.5, links_beside=1.25)
    clock, links = Clock(beside), list[Span]()
    seconds = 0.0
    for at in range(400):
        if draw.random() < 0.5:
            links.append(clock.take(Work(draw.choice((INSIDE, ACROSS)), draw.random()), at, True))
        span = clock.take(Work(COMPUTE, draw.random()), at, False)
        seconds += span.end - span.start
    clock.settle()
    assert clock.now == pytest.approx(seconds) and all(link.start < link.end for link in links)


def test_the_fastest_plan_is_found_though_few_are_scheduled() -> None:
    """As if all were, where any bytes may be alive."""
    plan, *_ = gpt_on_slow_links()
    plans = [plan, *(random_plan(plan, seed) for seed in range(3)), replace(plan)]
    seconds = [schedule_seconds(each) for each in plans]
    found = choice.fastest([replace(each) for each in plans], math.inf)
    assert seconds[0] == min(seconds) < max(seconds) and found.cost.seconds == pytest.approx(min(seconds))
    scheduled = [replace(each) for each in plans]
    assert choice.fastest(scheduled, math.inf) is scheduled[0]
    assert sum("cost" in vars(each) for each in scheduled) < len(plans)


def schedule_seconds(plan: Plan) -> float:
    """What the step of a plan takes, that is scheduled whatever others take."""
    return replace(plan).cost.seconds


def random_step(seed: int) -> tuple[list[Node], dict[Node, Work]]:
    """Kernels in a chain, some of which send what the next one reads, others with a gradient that is sent at last."""
    draw, graph, work = random.Random(seed), torch.fx.Graph(), dict[Node, Work]()

    def call(used: Node, stream: str, seconds: float) -> Node:
        node = graph.call_function(torch.neg, (used,))
        work[node] = Work(stream, seconds)
        return node

    chain = graph.placeholder("x")
    for _ in range(8):
        chain = call(chain, COMPUTE, draw.uniform(1, 3))
        if draw.random() < 0.5:
            call(call(chain, COMPUTE, draw.uniform(1, 3)), ACROSS, draw.uniform(1, 6))
        if draw.random() < 0.5:
            chain = call(chain, INSIDE, draw.uniform(1, 2))
    return list(work), work


def test_what_is_played_from_the_end_of_a_step_keeps_the_order_of_its_calls_and_makes_it_shorter() -> None:
    saved = []
    for seed in range(40):
        calls, work = random_step(seed)
        scheduler, found = ListScheduler(calls, work, {}, {}), dict[tuple[str, bool], float]()
        for rule in RULES:
            found[rule, False] = seconds_of(*scheduler.run(math.inf, rule, 0.0), work, LAN)
            way = scheduler.ways_back()
            for stream in STREAMS:  # one thing at a time, whole
                spans = sorted(
                    (w - work[node].seconds, w) for node, w in zip(calls, way) if work[node].stream == stream
                )
                assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(spans))
            places = dict(zip(calls, way))
            assert all(
                places[user] <= places[node] - work[node].seconds + 1e-12 for node in calls for user in node.users
            )
            found[rule, True] = seconds_of(*scheduler.run(math.inf, "way", 0.0, way), work, LAN)
        rules = min(seconds for (_, again), seconds in found.items() if not again)
        saved.append(1 - min(found.values()) / rules)
    assert max(saved) > 0.03 and sum(saved) / len(saved) > 0.003
