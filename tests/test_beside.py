"""What goes on at once slows each other down: kernels beside collectives, and ranks that share cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

import sbpc
from sbpc import Mesh
from sbpc.mesh.cluster import CLUSTERS
from sbpc.plans.cost import kernel_work
from sbpc.plans.staged.schedules import FORWARD, Action, actions_of, shared_spans, spans
from sbpc.plans.timeline import ACROSS, COMPUTE, Clock, Span, Work, makespan
from tests import models
from tests.random_plans import elsewhere

LAN = CLUSTERS["ethernet"]
ONE_CORE = replace(LAN, kernels_beside=2.0, links_beside=1.5)


def test_beside_a_collective_both_take_longer() -> None:
    clock = Clock(ONE_CORE)
    first = clock.take(Work(ACROSS, 3.0), "first", True)
    second = clock.take(Work(ACROSS, 1.0), "second", True)
    kernel = clock.take(Work(COMPUTE, 4.0), "kernel", False)
    assert kernel == Span(0.0, 7.0)  # of which 3 seconds' work in the 6 seconds of the collectives
    clock.take(Work(ACROSS, 2.0), "third", True)
    clock.take(Work(COMPUTE, 1.0), "kernel", False)
    clock.wait("third")
    assert clock.now == pytest.approx(7.0 + 2.0 + (2.0 - 2.0 / 1.5))
    clock.settle()
    assert (first, second) == (Span(0.0, 4.5), Span(4.5, 6.0))


def test_a_step_takes_longer_where_one_core_computes_and_sends() -> None:
    model, args = models.gpt2(batch=16, seq=32, width=64, heads=4, layers=2)
    plan = sbpc.baseline("data", model, args, Mesh(x=4, cluster=LAN), microbatches=1)
    slower = elsewhere(plan, Mesh(x=4, cluster=ONE_CORE))
    assert plan.cost.seconds < slower.cost.seconds < 2 * plan.cost.seconds
    assert slower.cost.compute_seconds == pytest.approx(plan.cost.compute_seconds)
    assert makespan(slower.timeline()) == pytest.approx(slower.cost.seconds)


def test_to_start_a_message_costs_computing() -> None:
    clock = Clock(replace(LAN, start=0.25))
    first, second = (clock.take(Work(ACROSS, 2.0, 0.5), "message", True) for _ in range(2))
    assert (first, second) == (Span(0.0, 2.0), Span(2.0, 3.5)), "one message starts once"
    assert clock.take(Work(COMPUTE, 1.0), "kernel", False) == Span(0.25, 1.25)
    clock.take(Work(ACROSS, 2.0), "at once", False)
    assert clock.now == 5.5, "what is waited for at once takes as long as was measured, its start included"


def test_stages_start_each_message_at_both_ends() -> None:
    model, args = models.gpt2(layers=2, tied=False)
    costs = [
        sbpc.plan(
            model,
            args,
            Mesh(pipe=2, cluster=replace(LAN, start=start)),
            stages="pipe",
            microbatches=1,
            schedule="gpipe",
        ).cost
        for start in (0.0, 0.25)
    ]
    assert costs[1].seconds == pytest.approx(costs[0].seconds + 4 * 0.25), (
        "one forth and one back, and nothing beside them"
    )
    assert costs[1].compute_seconds == pytest.approx(costs[0].compute_seconds)


def test_attention_takes_as_many_times_as_long_as_its_flops_say() -> None:
    model, args = models.gpt2(layers=1)
    slow = replace(LAN, memory_bandwidth=1e30, launch=0.0)
    costs = [
        sbpc.plan(model, args, Mesh(x=2, cluster=replace(slow, attention=times)), objective="serial").cost
        for times in (1.0, 3.0)
    ]
    attention = sum(
        count * float(kernel_work(kernel, (2,))[0]) / slow.peak
        for kernel, count in costs[0].kernels
        if "attention" in kernel.op
    )
    assert costs[0].flops == costs[1].flops and attention > 0
    assert costs[1].compute_seconds == pytest.approx(costs[0].compute_seconds + 2 * attention)
    for cost in costs:
        assert cost.subs() == pytest.approx(cost.seconds) and cost.lower_bound <= cost.seconds


def test_kernels_that_hide_nothing_take_the_sum_of_their_parts() -> None:
    model, args = models.gpt2(layers=1)
    costs = [
        sbpc.plan(model, args, Mesh(x=2, cluster=replace(LAN, hidden=part)), objective="serial", pin={"*.weight": "B"}, inputs=["S(0)"] * len(args)).cost
        for part in (1.0, 0.5, 0.0)
    ]  # fmt: skip
    for cost in costs:
        assert cost.subs() == pytest.approx(cost.seconds)
    most, half, whole = (cost.compute_seconds for cost in costs)
    assert half == pytest.approx((most + whole) / 2) and most < whole < 3 * most


def needs(action: Action) -> list[Action]:
    """Two stages: the second one works on what the first one sends."""
    earlier = Action(FORWARD, 0, action.micro_batch)
    forward = Action(FORWARD, action.chunk, action.micro_batch)
    back = Action("B", 1, action.micro_batch)
    return (
        ([earlier] if action.chunk else []) if action.kind == FORWARD else [forward] + ([] if action.chunk else [back])
    )


def test_a_stage_that_shares_cores_is_faster_while_others_wait() -> None:
    actions = actions_of("1f1b", 2, 4)
    orders = [[((action.kind,), action) for action in mine] for mine in actions]
    played, _ = spans(orders, needs, lambda *_: (1.0, ()), lambda *_: 0.25, [0.0, 0.5])
    apart = {each.action: (each.start, each.end) for mine in played for each in mine}
    alone = shared_spans(actions, needs, lambda action: (0.75, 0.25), lambda *_: 0.25, [0.0, 0.5], 1.0, 1.0)
    assert alone == {action: pytest.approx(span) for action, span in apart.items()}
    shared = shared_spans(actions, needs, lambda action: (1.0, 0.0), lambda *_: 0.0, [0.0, 0.0], 2.0, 0.0)
    assert shared[Action(FORWARD, 0, 0)] == (0.0, 0.5)  # the second stage has nothing to do yet
    # 16 seconds' work on two ranks' share of the cores
    assert max(end for _, end in shared.values()) == pytest.approx(8.0)


def test_a_step_becomes_a_loop_on_whatever_cluster() -> None:
    model, args = models.gpt2(batch=8, layers=2)
    fast = replace(
        LAN,
        peak=1e6,
        memory_bandwidth=1e6,
        inter_bandwidth=1e12,
        inter_latency=0.0,
        intra_bandwidth=1e12,
        intra_latency=0.0,
    )
    plan = sbpc.plan(model, args, Mesh(pipe=2, cluster=fast), stages="pipe", microbatches=4)
    assert plan.loop.count == 4
