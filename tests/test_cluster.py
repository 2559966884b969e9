"""Clusters: named ones, their files and what is wrong with them, links shared inside a node, rates of collectives."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import sympy

import sbpc
from sbpc import Cluster, Mesh
from sbpc.api.task import prepare
from sbpc.boxing.steps import step_cost
from sbpc.errors import MeshError
from sbpc.mesh import cluster as cluster_module
from sbpc.mesh.cluster import CLUSTERS, COLLECTIVES, RANGES, UNBOUNDED, Rate
from sbpc.mesh.collectives import CARRIERS, WIRE, Way
from sbpc.passes.schedule.choice import weighted
from sbpc.plans.options import Options
from sbpc.plans.timeline import ACROSS, COMPUTE, INSIDE, Clock, Work
from tests import models
from tests.random_plans import elsewhere, random_plan

H100 = CLUSTERS["h100"]
MEASURED = dataclasses.replace(
    H100,
    name="measured",
    collectives=(
        Rate("all_reduce", 2, "intra", 1e-5, 0.8),
        Rate("all_reduce", 8, "intra", 2e-5, 0.9),
        Rate("all_reduce", 4, "inter", 7e-5, 0.5, least=3e-4),
        Rate("reduce_scatter", efficiency=0.5, traffic=2.0),
    ),
)


ENDLESS = dataclasses.replace(H100, name="endless", **dict.fromkeys(UNBOUNDED, math.inf))


def test_a_cluster_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    for cluster in [*CLUSTERS.values(), MEASURED, ENDLESS]:
        cluster.save(tmp_path / "cluster.json")
        assert Cluster.load(tmp_path / "cluster.json") == cluster
        assert cluster.source


def test_a_plan_file_holds_its_cluster(tmp_path: Path) -> None:
    model, args = models.mlp()
    plan = sbpc.plan(model, args, Mesh(data=4, cluster=MEASURED), objective="serial")
    plan.save(tmp_path / "plan.sbpc")
    loaded = sbpc.load(tmp_path / "plan.sbpc")
    assert loaded.mesh.cluster == MEASURED and loaded.cost.seconds == plan.cost.seconds


BROKEN: list[tuple[Any, str]] = [
    ({"peak": "fast"}, "cluster 'h100': peak is 'fast'\n  It is a number from 1 to 1e+30 flop/s, or infinite."),
    ({"peak": 5e-324}, "cluster 'h100': peak is 5e-324\n  It is a number from 1 to 1e+30 flop/s, or infinite."),
    ({"launch": None}, "cluster 'h100': launch is None\n  It is a number from 0 to 1e+06 seconds."),
    ({"peak": True}, "cluster 'h100': peak is True\n  It is a number from 1 to 1e+30 flop/s, or infinite."),
    (
        {"inter_bandwidth": -1},
        "cluster 'h100': inter_bandwidth is -1\n  It is a number from 1 to 1e+30 bytes/s, or infinite.",
    ),
    (
        {"inter_bandwidth": 0},
        "cluster 'h100': inter_bandwidth is 0\n  It is a number from 1 to 1e+30 bytes/s, or infinite.",
    ),
    ({"intra_bandwidth": 1e308}, "cluster 'h100': intra_bandwidth is 1e+308\n  It is a number from 1 to 1e+30 bytes/s"),
    ({"memory": math.nan}, "cluster 'h100': memory is nan\n  It is a number from 1 to 1e+30 bytes, or infinite."),
    ({"intra_latency": -1e-6}, "cluster 'h100': intra_latency is -1e-06\n  It is a number from 0 to 1e+06 seconds."),
    ({"launch": math.inf}, "cluster 'h100': launch is inf\n  It is a number from 0 to 1e+06 seconds."),
    ({"inter_latency": 1e308}, "cluster 'h100': inter_latency is 1e+308\n  It is a number from 0 to 1e+06 seconds."),
    (
        {"ranks_per_node": 1 << 31},
        "cluster 'h100': ranks_per_node is 2147483648\n  It is an integer from 1 to 1,073,741,824.",
    ),
    ({"ranks_per_node": 2.5}, "cluster 'h100': ranks_per_node is 2.5\n  It is an integer from 1 to 1,073,741,824."),
    ({"name": 3}, "cluster 3: name is 3\n  It is a text of one line."),
    ({"speed": 3}, " has unknown speed\n  It needs name, peak, memory_bandwidth, "),
    ({"peak": 10**400}, ": it holds an integer of 1329 bits\n  Write one with Cluster.save"),
    ({"collectives": {"all_reduce": 1}}, ": collectives is {'all_reduce': 1}\n  It is a list of rates"),
    ({"collectives": [1]}, ": a rate of collectives is 1\n  It is a JSON object with collective."),
    ({"collectives": [{"efficiency": 1}]}, ": a rate of collectives lacks collective\n  It needs collective; it may"),
    (
        {"collectives": [{"collective": "gossip"}]},
        "cluster 'h100': of gossip, a rate is given\n  The collectives are all_gather, all_reduce, all_to_all, reduce_scatter.",
    ),
    (
        {"collectives": [{"collective": "all_reduce", "ranks": 1}]},
        "cluster 'h100': of all_reduce, ranks is 1\n  It is an integer from 2 to 1,073,741,824.",
    ),
    (
        {"collectives": [{"collective": "all_reduce", "link": "wire"}]},
        "cluster 'h100': of all_reduce, link is 'wire'\n  It is intra or inter, or left out for both.",
    ),
    (
        {"collectives": [{"collective": "all_reduce", "efficiency": -0.5}]},
        "cluster 'h100': of all_reduce, efficiency is -0.5\n  It is a number from 1e-12 to 1e+12.",
    ),
    (
        {"collectives": [{"collective": "all_reduce", "latency": "short"}]},
        "cluster 'h100': of all_reduce, latency is 'short'\n  It is a number from 0 to 1e+06 seconds.",
    ),
]


def test_a_bad_figure_in_a_cluster_file_is_refused(tmp_path: Path) -> None:
    for changed, message in BROKEN:
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(H100.figures() | changed))
        with pytest.raises(MeshError) as error:
            Cluster.load(path)
        assert str(error.value).startswith(f"cluster file {path}") and message in str(error.value)


ENDS = [(name, end, number) for name, (_, *ends) in RANGES.items() for end, number in zip(("least", "most"), ends)]


def at_end(name: str, number: float) -> Mesh:
    """A mesh of a cluster with one figure, or one of every rate or way, at an end of its range."""
    cluster = dataclasses.replace(H100, ranks_per_node=2)
    if name in vars(Way):
        ways = tuple(dataclasses.replace(way, **{name: number}) for way in H100.ways)
        return Mesh(a=2, b=2, cluster=dataclasses.replace(cluster, ways=ways))
    rates = tuple(Rate(kind, **({name: number} if name in vars(Rate) else {})) for kind in COLLECTIVES)
    figures: dict[str, Any] = {} if name in vars(Rate) else {name: number}
    assert H100.device is not None
    if name in vars(H100.device):
        figures = {"device": dataclasses.replace(H100.device, **figures)}
    return Mesh(a=2, b=2, cluster=dataclasses.replace(cluster, collectives=rates, **figures))


def test_no_figure_in_its_range_makes_a_cost_overflow() -> None:
    plan = random_plan(
        sbpc.plan(*models.unused_parameter(), Mesh(a=2, b=2, cluster=models.RINGS), objective="serial"), seed=1
    )
    assert {transfer.step.collective for transfer, _ in plan.cost.transfers} >= set(COLLECTIVES)
    for name, _, number in ENDS:
        cost = elsewhere(plan, at_end(name, number)).cost
        assert math.isfinite(cost.seconds) and cost.subs() == pytest.approx(cost.seconds, rel=1e-9)


@pytest.mark.prove
def test_no_figure_in_its_range_keeps_a_plan_from_being_proved() -> None:
    task = prepare(*models.mlp())
    for name, _, number in ENDS:
        plan = task.again().plan(at_end(name, number), Options(objective="serial"))
        for each in (plan, random_plan(plan, seed=1)):
            assert math.isfinite(each.cost.seconds) and each.cost.subs() == pytest.approx(each.cost.seconds, rel=1e-9)
        assert plan.cost.gap <= 1e-3


def test_a_cluster_file_that_lacks_figures_names_them(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    figures = H100.figures()
    del figures["peak"], figures["launch"]
    path.write_text(json.dumps(figures))
    with pytest.raises(MeshError, match="lacks peak, launch\n  It needs name, peak, "):
        Cluster.load(path)
    for text in ("", "[1]", "{", "null", '"h100"'):
        path.write_text(text)
        with pytest.raises(MeshError, match=r"cluster file .*cluster.json(: | is )"):
            Cluster.load(path)
    with pytest.raises(MeshError, match="No such file"):
        Cluster.load(tmp_path / "none.json")


def test_an_axis_is_not_called_as_something_in_formulas() -> None:
    for name in ["", "a b", "data+tensor", "peak", "launch", "memory_bandwidth", "latency_x", "bandwidth_x", "least_x"]:
        with pytest.raises(
            MeshError, match=r"an axis is called .*\n  Give it a word that formulas of costs do not use"
        ):
            Mesh(**{name: 2})


def test_shared_links_are_slower_for_axes_that_leave_a_node() -> None:
    mesh = Mesh(data=4, tensor=4, pipe=2, cluster=H100)  # 8 ranks a node: tensor and pipe fit into one
    inside = H100.intra_latency, H100.intra_bandwidth, 0.0
    assert [mesh.link(axes, "all_gather") for axes in ((2,), (1,), (1, 2))] == [inside] * 3
    assert mesh.link((0,), "all_gather") == (H100.inter_latency, H100.inter_bandwidth / 8, 0.0)
    assert mesh.link((0, 1), "all_gather") == (H100.inter_latency, H100.inter_bandwidth / 2, 0.0)


def test_a_collective_runs_at_the_rate_of_its_link_and_of_the_nearest_group_size() -> None:
    mesh = Mesh(data=4, tensor=8, cluster=MEASURED)
    assert mesh.link((1,), "all_reduce") == (2e-5, 0.9 * H100.intra_bandwidth, 0.0)
    assert mesh.link((0,), "all_reduce") == (7e-5, 0.5 * H100.inter_bandwidth / 8, 3e-4)
    assert mesh.link((1,), "all_gather") == (H100.intra_latency, H100.intra_bandwidth, 0.0)
    assert mesh.link((0,), "reduce_scatter") == (H100.inter_latency, 0.5 * H100.inter_bandwidth / 8, 0.0)
    small = Mesh(data=3, cluster=MEASURED)  # 3 is nearer to 2 than to 8
    assert small.link((0,), "all_reduce") == (1e-5, 0.8 * H100.intra_bandwidth, 0.0)


def test_solver_cost_and_formula_agree_on_measured_rates() -> None:
    model, args = models.gpt2(layers=1)
    slow = dataclasses.replace(MEASURED, peak=1e9, launch=0.0)  # so slow that it pays to communicate
    plan = sbpc.plan(model, args, Mesh(data=4, tensor=4, cluster=slow), optimizer="sgd", objective="serial")
    assert plan.cost.comm_seconds > 0 and plan.cost.gap <= 1e-3
    assert plan.cost.subs() == pytest.approx(plan.cost.seconds, rel=1e-9)
    rates = tuple(dataclasses.replace(rate, latency=1e-3) for rate in MEASURED.collectives)
    slower = dataclasses.replace(slow, collectives=rates)
    other = sbpc.plan(model, args, Mesh(data=4, tensor=4, cluster=slower), optimizer="sgd", objective="serial")
    assert other.cost.seconds > plan.cost.seconds


def test_plans_and_formulas_count_what_a_collective_takes_at_least() -> None:
    model, args = models.mlp()
    cluster = dataclasses.replace(H100, collectives=tuple(Rate(name, least=1.0) for name in COLLECTIVES))
    free = sbpc.plan(model, args, Mesh(data=4, cluster=cluster), objective="serial")
    assert free.cost.comm_seconds == 0.0  # nothing is so dear
    plan = random_plan(free, seed=1)
    count = sum(many for transfer, many in plan.cost.transfers if transfer.step.collective in COLLECTIVES)
    assert count > 3 and plan.cost.comm_seconds == pytest.approx(count, rel=1e-12)
    assert plan.cost.subs() == pytest.approx(plan.cost.seconds, rel=1e-12)
    assert plan.cost.subs(data=2) > count > 1.0 > plan.cost.subs(data=1)  # one rank sends nothing


def test_bytes_on_the_wire_are_those_of_the_backend() -> None:
    model, args = models.mlp()
    plan = random_plan(sbpc.plan(model, args, Mesh(data=4, cluster=MEASURED), objective="serial"), seed=1)
    sent = {kind: 0.0 for kind in ("reduce_scatter", "other")}
    for row in plan.cost.transfers:
        terms = dataclasses.replace(plan.cost.terms, transfers=(row,))
        one = dataclasses.replace(plan.cost, terms_of=lambda terms=terms: terms, bytes_sent={"data": 0.0})
        kind = "reduce_scatter" if row[0].step.collective == "reduce_scatter" else "other"
        sent[kind] += one.bytes_on_wire["data"]
    assert sent["reduce_scatter"] > 0
    assert plan.cost.bytes_on_wire["data"] == pytest.approx(sum(sent.values()))
    assert plan.cost.bytes_sent["data"] == pytest.approx(sent["reduce_scatter"] / 2 + sent["other"])


KINDS = sorted(WIRE)
SIZES = [2**at for at in range(0, 36, 3)]
MESHES = [Mesh(d=48, t=8, cluster="h100"), Mesh(d=4, t=2, cluster="a100"), Mesh(d=3, t=6, cluster="perlmutter"), Mesh(d=6, t=2, cluster="frontier"),
          Mesh(d=16, t=4, cluster="b200"), Mesh(d=2, t=4, cluster="workstation")]  # fmt: skip
GROUPS = [(mesh, axes, kind) for mesh in MESHES for axes in mesh.runs() for kind in KINDS]


def seconds_of(mesh: Mesh, axes: tuple[int, ...], kind: str, block: float) -> float:
    """What a collective takes by its lines."""
    lines, least = mesh.lines(axes, kind)
    return max(least, min(start + each * block for start, each in lines))


def test_small_messages_over_many_ranks_take_the_rounds_of_a_tree() -> None:
    found = seconds_of(Mesh(d=1024, cluster="h100"), (0,), "all_reduce", 1000)
    base, chain, levels = 6.8e-6, 2 * 7 * 0.6e-6, 2 * 7 * 5e-6  # 8 ranks on each of 128 nodes
    assert found == pytest.approx(base + chain + levels, rel=0.01)
    assert seconds_of(Mesh(d=1024, cluster=models.RINGS), (0,), "all_reduce", 1000) > 28e-3


def test_large_messages_run_at_the_published_rates() -> None:
    def bus(cluster: Cluster, ranks: int, kind: str) -> float:
        block = 16e9 if kind == "all_reduce" else 16e9 / ranks
        sent = WIRE[kind](ranks, block)[1]
        return float(sent / seconds_of(Mesh(d=ranks, cluster=cluster), (0,), kind, block))

    plain = dataclasses.replace(H100, ways=tuple(way for way in H100.ways if "nvls" not in way.algorithm))
    assert bus(H100, 8, "all_reduce") == pytest.approx(480e9, rel=0.02)  # NVLink SHARP
    assert bus(plain, 8, "all_reduce") == pytest.approx(367e9, rel=0.02)
    assert bus(H100, 8, "all_gather") == pytest.approx(361e9, rel=0.03)
    assert bus(H100, 4, "all_reduce") == pytest.approx(363e9, rel=0.03)  # where SHARP does not pay
    assert bus(H100, 16, "all_to_all") == pytest.approx(16 / 15 * 15 / 8 * 0.907 * 50e9 * 15 / 16, rel=0.01)
    assert bus(CLUSTERS["a100"], 8, "all_reduce") == pytest.approx(235e9, rel=0.02)


def test_longer_messages_take_longer_and_gain_by_going_together() -> None:
    for mesh, axes, kind in GROUPS:
        found = [seconds_of(mesh, axes, kind, size) for size in SIZES]
        assert found == sorted(found)
        for small, large in itertools.pairwise(SIZES):
            apart = seconds_of(mesh, axes, kind, small) + seconds_of(mesh, axes, kind, large)
            assert seconds_of(mesh, axes, kind, small + large) <= apart


def sent_at_least(mesh: Mesh, axes: tuple[int, ...], kind: str, block: float) -> float:
    """Seconds for what must leave a rank, and what must leave a node, at the full bandwidth of the data sheet."""
    ranks, nodes = (
        math.prod(mesh.sizes[at] for at in axes),
        float(mesh.nodes(axes, math.prod(mesh.sizes[at] for at in axes))),
    )
    _, bandwidth, _ = mesh.link(axes, kind)
    if kind == "dispatch":  # its block is all rows of a rank
        return sent_at_least(mesh, axes, "all_to_all", block / ranks)
    if nodes == 1:  # a switch adds up: of an all_reduce each rank sends all it has once
        return (block if kind == "all_reduce" else (ranks - 1) * block) / bandwidth
    there = ranks / nodes
    left = {"all_reduce": block, "all_to_all": there * (ranks - there) * block}
    return left.get(kind, (ranks - there) * block) / bandwidth


def test_no_collective_beats_its_links() -> None:
    for mesh, axes, kind in GROUPS:
        if math.prod(mesh.sizes[at] for at in axes) > 1:
            for size in SIZES:
                assert seconds_of(mesh, axes, kind, size) >= sent_at_least(mesh, axes, kind, size)


def test_formulas_have_every_way_and_give_the_numbers_of_the_cheapest() -> None:
    model, args = models.mlp(batch=96)
    for mesh in (Mesh(d=2, e=6, t=2, cluster="h100"), Mesh(d=8, t=4, cluster="perlmutter")):
        plan = random_plan(sbpc.plan(model, args, mesh, objective="serial"), seed=1)
        assert plan.cost.subs() == pytest.approx(plan.cost.seconds, rel=1e-9)
        for transfer, _ in plan.cost.transfers[:40]:
            step, formula = transfer.step, plan.cost.transfer_expr(transfer)
            lines, _ = mesh.lines(step.axes, step.collective)
            kind = formula.replace(lambda part: isinstance(part, sympy.Min) and len(part.args) > 2, lambda part: part)
            assert len(lines) == 1 or any(len(part.args) >= len(lines) for part in kind.atoms(sympy.Min))


def test_formulas_at_other_sizes_and_rates_are_the_cost_there() -> None:
    model, args = models.mlp(batch=96)
    plan = random_plan(sbpc.plan(model, args, Mesh(d=4, t=8, cluster="h100"), objective="serial"), seed=3)
    seen, moved = set(), [transfer for transfer, _ in plan.cost.transfers]
    alike = {name: "reduce_scatter" if name.startswith("exchange") else "all_gather" for name in CARRIERS}
    sent = [
        dataclasses.replace(each, step=dataclasses.replace(each.step, collective=name))
        for name, kind in alike.items()
        for each in [each for each in moved if each.step.collective == kind]
    ]
    for transfer in (*moved, *sent):
        step, even = transfer.step, dataclasses.replace(transfer, shape=(1 << 12,) * len(transfer.shape))
        for sizes in ({"d": 2, "t": 8}, {"d": 64, "t": 8}, {"d": 2, "t": 4}, {"d": 1, "t": 8}, {"d": 1, "t": 1}):
            there, ranks = Mesh(cluster="h100", **sizes), math.prod(list(sizes.values())[at] for at in step.axes)
            if ranks > 1 and (
                there.inside(step.axes) != plan.mesh.inside(step.axes) or (0 in step.axes and sizes["t"] < 8)
            ):
                continue  # formulas stay inside a node, or across nodes, and groups share links as they did
            known = {plan.cost.symbols[name]: sizes.get(name, number) for name, number in plan.cost.numbers.items()}
            for itemsize in (1, 1000, 1000000):  # other ways are the cheapest for other sizes of messages
                formula = plan.cost.transfer_expr(dataclasses.replace(even, itemsize=itemsize)).xreplace(known)
                number = step_cost(step, even.shape, itemsize, there)[0]
                assert float(formula) == pytest.approx(number, rel=1e-9)
                seen.add((step.collective, step.axes, ranks))
    assert {(kind, (0,), 64) for kind in KINDS} <= seen and {axes for _, axes, _ in seen} == {(0,), (1,), (0, 1)}


def test_what_goes_in_one_message_takes_what_the_message_takes() -> None:
    works = [
        Work(ACROSS, 3.0, 2.5, 1.0, ((1.0, 2.0), (2.5, 0.5))),
        Work(ACROSS, 6.0, 5.0, 4.0, ((1.0, 2.0), (2.5, 0.5))),
    ]
    clock = Clock(H100)
    for work in works:
        clock.take(work, "message", True)
    assert clock.last["message"].end == min(1.0 + 2.0 * 5.0, 2.5 + 0.5 * 5.0)


def test_what_was_measured_of_a_collective_counts_more_than_the_ways_of_the_library() -> None:
    mesh = Mesh(data=4, tensor=8, cluster=MEASURED)
    assert mesh.ways((1,), "all_reduce") == [] and mesh.ways((1,), "all_gather")
    assert mesh.lines((1,), "all_reduce") == (((14 * 2e-5, 14 / 8 / (0.9 * H100.intra_bandwidth)),), 0.0)


def test_each_figure_of_a_named_cluster_says_where_it_is_from() -> None:
    for path in sorted(Path(cluster_module.__file__).with_name("clusters").glob("*.json")):
        read = json.loads(path.read_text())
        told = " ".join(read["sources"]).split()
        assert path.stem == "ideal" or sorted(told) == sorted(read["figures"]), path.stem
        for text in read["sources"].values():
            assert text.split(":")[0] in ("data sheet", "published", "estimated", "measured", "no machine"), text


def test_bounds_take_of_a_collective_what_its_bytes_take_on_the_fastest_way() -> None:
    weights = {COMPUTE: 0.5, INSIDE: 0.2, ACROSS: 0.3}
    for mesh, axes, kind in GROUPS:
        lines, _ = mesh.lines(axes, kind)
        weight = weights[INSIDE if mesh.inside(axes) else ACROSS]
        ((start, each),), least = weighted(mesh, weights).lines(axes, kind)
        assert (start, least) == (0.0, 0.0) and each == pytest.approx(weight * lines[-1][1], rel=1e-12)
