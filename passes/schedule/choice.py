"""Chooses the plan whose step is shortest when collectives run beside computing, and bounds the steps of all plans.

A plan that is busy for C seconds of computing and M_l on link l takes T >= max(C, M_1, ...). While a link is busy,
kernels lose a part t of the device to it, whatever they do then: T >= C + t M_l. So for weights w that sum to 1,
T >= w_0 (C + t sum v_l M_l) + sum w_l M_l with any v that sum to 1, and the least of that over all plans is a layout
problem with scaled costs, whose certified bound is a bound of T. Plans are looked for at equal weights and halfway to
those at which the plans so far cost most; bounds, which cost more time, at weights of computing alone, where every
call is at its least, and once at the weights of `bounding` at which all plans cost most, if those leave much.
Collectives that go in one message share a latency, so in these problems there is none.

Weights know no time: at the ends of a step there is nothing beside which a collective could run. So the best plan is
played, and plans are looked for again where a boxing that the step does not wait for counts little. At last single
calls that meet what the step waits for are laid out otherwise, and each such plan is played.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sbpc.mesh.cluster import LINKS
from sbpc.mesh.mesh import Mesh
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan, Prover, no_model
from sbpc.plans.timeline import ACROSS, COMPUTE, INSIDE, STREAMS, critical_seconds, timeline

Weights = Mapping[str, float]
GRID, LEAST = 32, 1 / 1024  # weights are multiples of one part of GRID, or, of all but one stream, as small as LEAST
SHARES = 8  # of what links weigh when plans are bounded, one link has one part of them at least
# fraction of the seconds by which two plans may differ and count as about as fast, so that computing counts, too
EQUAL = 1e-2
CLOSE = 1e-3  # fraction by which a plan is busy for longer than a bound, below which no other plan is looked for
# what a boxing counts at first that no one waits for, and how many plans, and one, are looked for where it does not
# count whole
HIDDEN, TURNS = 0.2, 4
# calls, in all, of the plans in which single calls are laid out otherwise, and how many of these are worth trying at
# all: of larger graphs the few that could be tried save nothing
MOVED, MOVES = 1_000, 8
LOOSE = 5e-2  # fraction by which a bound is to be below what plans are busy for, that a better one is looked for


class Layouts(Prover, Protocol):
    """The layout problem of a graph at some weights."""

    def solve(self, *, bounded: bool) -> tuple[Assignment, float]:
        """Returns the cheapest assignment that was found. bounded: whether a bound is looked for."""

    def bound(self) -> float:
        """Returns a bound of all assignments."""

    def bound_apart(self) -> float:
        """Returns the bound of every call by itself."""


LayoutsAt = Callable[[Weights], Layouts]
# the best assignment where boxing costs parts of its seconds, by name of a call, and of all others such a part
WhereItCounts = Callable[[Mapping[str, float], float], Assignment]
# those in which one call that meets what is boxed behind some calls is laid out otherwise, the cheapest there first
Moves = Callable[[Assignment, Container[str], Mapping[str, float], float], Iterator[Assignment]]


@dataclass
class Overlap:
    """Proves bounds of steps in which streams overlap. Takes the place of the prover of a layout problem in a plan.

    serial: of the layout problem as it is. best: of the one whose bound, times `share`, is the best for the step.
    whole: the plan of the whole batch, where it runs in halves. least: see `Prover`; none where no bound of
    computing alone was asked for.
    """

    serial: Prover
    best: Prover
    share: float
    bound: float
    whole: Plan | None = None
    least: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> Overlap:
        """Returns the prover of a plan that was solved as if nothing overlapped, at equal weights of the streams:
        what that proves of the step, which is nothing where collectives have latencies."""
        share = 0.0 if has_latency(plan.mesh) else 1 / len(streams_of(plan.mesh))
        return cls(plan.problem, plan.problem, share, plan.lower_bound * share)

    def improve(self, best: Prover, bound: float) -> None:
        """Takes another bound, that of a problem with weights, if it is better."""
        if bound > self.bound:
            self.best, self.share, self.bound = best, 1.0, bound

    def improve_by_computing(self, layouts_at: LayoutsAt) -> None:
        """Takes the bound of computing alone if it is better: every kernel, with its start, in the fastest of its
        layouts.

        It is that of weights 1 for computing and 0 for links. So boxing costs nothing, and the least of all plans is
        the sum of what each call takes at its fastest by itself. Kernels run one after the other on a device,
        whatever its links do beside them.
        """
        computing = layouts_at(dict.fromkeys(STREAMS, 0.0) | {COMPUTE: 1.0})
        self.improve(computing, computing.bound_apart())
        self.least = computing.least

    def improve_at_weights(self, layouts_at: LayoutsAt, mesh: Mesh, loads: list[Mapping[str, float]]) -> None:
        """Takes the bound near the weights at which plans cost most, if these leave much. loads: busy seconds of
        plans."""
        ways = bounding(streams_of(mesh), mesh.cluster.taken)
        weights = max(ways, key=lambda weights: lightest(weights, loads), default=None)
        if weights is not None and lightest(weights, loads) > self.bound * (1 + LOOSE):
            layouts = layouts_at(weights)
            self.improve(layouts, layouts.bound())

    @property
    def proof(self) -> Any:
        """The multipliers of the best bound."""
        return self.best.proof

    def check(self, assignment: Assignment, proof: Any) -> tuple[float, float]:
        """Returns the weighted busy seconds of an assignment, which its step takes at least, and the least of any
        assignment."""
        paid, bound = self.best.check(self.whole.assignment if self.whole else assignment, proof)
        return paid * self.share, bound * self.share

    def certify(self, plan: Plan, limit: float) -> tuple[Plan | None, float]:
        """Returns a faster plan, if one is found, and a bound found in about `limit` CPU seconds."""
        solved, each = self.whole or plan, limit if self.serial is self.best else limit / 2
        better, bound = self.serial.certify(solved, each)
        if self.serial is not self.best:
            _, bound = self.best.certify(solved, each)
        if better is None:
            return None, bound * self.share
        faster = overlapped(better, plan.options, self, plan.lower_bound, plan.serial_bound)
        return faster if faster.cost.seconds < plan.cost.seconds else None, bound * self.share


def first_choice(
    mesh: Mesh, options: Options, serial: Layouts, layouts_at: LayoutsAt, made: Callable[[Assignment], Plan]
) -> Plan:
    """Returns the plan that is found at equal weights of the streams, mostly about as good as any. Where its step waits
    for what weights know nothing of, that of the layouts that are fastest if nothing overlaps, if it is faster. Its
    bound is that of computing alone. serial: these layouts' problem. Others: as of `choose`."""
    streams = streams_of(mesh)
    assignment, _ = layouts_at(dict.fromkeys(streams, 1 / len(streams))).solve(bounded=False)
    plan = overlapped(made(assignment), options, serial)
    late = plan.cost.seconds > least_seconds(plan) * (1 + EQUAL)
    others = [serial.solve(bounded=False)[0]] if late else []
    return choose(plan, options, layouts_at, others, made, None, 0)


def choose(
    plan: Plan,
    options: Options,
    layouts_at: LayoutsAt,
    others: Iterable[Assignment],
    made: Callable[[Assignment], Plan],
    where_it_counts: WhereItCounts | None,
    rounds: int,
    moves: Moves | None = None,
) -> Plan:
    """Returns the plan with the shortest step of those that are fastest at some weights of the streams, and of
    `others`.

    plan: the fastest one where nothing overlaps, with its bound and its prover; it fits into the memory that
    `options` name. options: of the plan to be returned. layouts_at: makes the layout problem at some weights.
    made: makes the plan of an assignment. where_it_counts: None where that takes long. rounds: how many weights are
    tried, equal ones first; none: nothing is solved, and the bound is that of computing alone. moves: none are tried
    without.
    """
    streams, prover = streams_of(plan.mesh), Overlap.of(plan)
    known, candidates = [plan.assignment], [overlapped(plan, options)]
    equal = dict.fromkeys(streams, 1 / len(streams))

    def offer(assignment: Assignment) -> None:
        if assignment not in known:
            known.append(assignment)
            candidates.append(overlapped(made(assignment), options))

    for other in others:
        offer(other)
    prover.improve_by_computing(layouts_at)
    for turn in range(rounds):
        weights = equal
        if turn or not has_latency(plan.mesh):  # without latencies the plan is that of equal weights
            weights, most = heaviest(streams, list(map(bare_seconds, candidates)))
            if most <= prover.bound * (1 + (EQUAL if turn else CLOSE)):
                break
        if turn:  # halfway: the layouts of equal weights are good ones, the bound of the others is
            weights = {stream: (weights[stream] + equal[stream]) / 2 for stream in streams}
        offer(layouts_at(weights).solve(bounded=False)[0])
    if rounds:
        prover.improve_at_weights(layouts_at, plan.mesh, list(map(bare_seconds, candidates)))
    best, hidden = fastest(candidates, options.memory or math.inf), HIDDEN
    for turn in range(TURNS + 1):
        if where_it_counts is None or not waits(best):
            break
        if turn < TURNS:
            offer(where_it_counts(*parts_that_count(best, hidden)))
        else:  # once as if nothing waited for what the plan does not box: it may go beside kernels
            offer(where_it_counts(parts_that_count(best, HIDDEN)[0], HIDDEN))
        before, best = best, fastest(candidates, options.memory or math.inf)
        hidden = hidden if best is not before else (1 + hidden) / 2
    if moves is not None:
        best = moved(best, moves, known, lambda other: overlapped(made(other), options))
    return overlapped(best, options, prover, min(prover.bound, best.cost.seconds), plan.lower_bound)


def waits(plan: Plan) -> bool:
    """Returns whether the step of a plan waits for a link."""
    return plan.cost.seconds > plan.cost.compute_seconds * (1 + EQUAL)


def moved(best: Plan, moves: Moves, known: list[Assignment], made: Callable[[Assignment], Plan]) -> Plan:
    """Returns the plan, or a faster one to which a way leads from it on which single calls are laid out otherwise.

    known: assignments that were tried. made: makes the plan of an assignment.
    """
    calls = sum(node.op == "call_function" for node in best.unscheduled.graph.nodes)
    left = MOVED // max(calls, 1)
    if left < MOVES:
        return best
    while left and waits(best):
        parts = parts_that_count(best, HIDDEN)
        waited = {name for name, part in parts[0].items() if part > HIDDEN}
        others = (other for other in moves(best.assignment, waited, *parts) if other not in known)
        tried = list(itertools.islice(others, (left + 1) // 2))  # the others may follow the best of these
        if not tried:
            break
        known += tried
        left -= len(tried)
        best = fastest([best, *map(made, tried)], best.options.memory or math.inf)
    return best


def parts_that_count(plan: Plan, hidden: float) -> tuple[dict[str, float], float]:
    """Returns by name of a call what part of the seconds of boxing its value the step of a plan waits for, and of all
    together; one that it does not wait for counts as the part `hidden`."""
    events = timeline(plan.boxed, plan.mesh)
    critical, of = critical_seconds(events), {node.name: node.meta.get("of") for node in plan.boxed.graph.nodes}
    waited, sent = defaultdict[Any, float](float), defaultdict[Any, float](float)
    for event in events:
        if event.stream != COMPUTE:
            waited[of[event.name]] += critical.get(event.name, 0.0)
            sent[of[event.name]] += event.end - event.start
    every = sum(waited.values()) / (sum(sent.values()) or 1.0)
    parts = {name: waited[name] / seconds for name, seconds in sent.items() if name and seconds}
    return {name: hidden + (1 - hidden) * part for name, part in parts.items()}, hidden + (1 - hidden) * every


def bounded(plan: Plan, options: Options, layouts_at: LayoutsAt) -> Plan:
    """Returns the overlapped step of a plan under a memory limit. Its bound holds for all plans, whatever memory
    they take.

    plan: solved as if nothing overlapped. options: of the plan to be returned. layouts_at: as of `choose`.
    """
    prover, alone = Overlap.of(plan), overlapped(plan, options)
    prover.improve_by_computing(layouts_at)
    prover.improve_at_weights(layouts_at, plan.mesh, [bare_seconds(alone)])
    return overlapped(alone, options, prover, min(prover.bound, alone.cost.seconds), plan.lower_bound)


def fastest(plans: Sequence[Plan], limit: float) -> Plan:
    """Returns of the plans that are about as fast as the fastest the one whose step and computing take least together.

    limit: of bytes, which the first plan keeps. They are looked at by what is known of them, which is more each time:
    what keeps a stream busy; what the fastest order takes, whatever bytes; all. The others are left once one takes no
    longer than is known of them, nor its own orders: within fewer bytes others are made, which may be faster.
    """
    queue = [(least_seconds(plan), at, False) for at, plan in enumerate(plans)]
    most, found = math.inf, dict[int, Plan]()
    heapq.heapify(queue)
    while queue and queue[0][0] <= most:
        seconds, at, ordered = heapq.heappop(queue)
        plan = plans[at]
        if not ordered:
            heapq.heappush(queue, (max(seconds, plan.programs[0].tried.seconds), at, True))
        elif not at or plan.cost.memory["total"] <= limit:
            found[at], most = plan, min(most, max(seconds, plan.cost.seconds) * (1 + EQUAL))
    least = min(plan.cost.seconds for plan in found.values())
    near = [plan for _, plan in sorted(found.items()) if plan.cost.seconds <= least * (1 + EQUAL)]
    return min(near, key=lambda plan: plan.cost.seconds + plan.cost.compute_seconds)


def overlapped(
    plan: Plan, options: Options, prover: Prover | None = None, bound: float = 0.0, serial_bound: float = 0.0
) -> Plan:
    """Returns a plan of the same layouts with these options and bounds. It shares what does not depend on them."""
    result = replace(plan, options=options, lower_bound=bound, prover=prover, serial_bound=serial_bound, again=no_model)
    if plan.options is options:
        vars(result).update(
            (name, each) for name, each in vars(plan).items() if name in ("programs", "chunk_costs", "memory")
        )
    return result


def streams_of(mesh: Mesh) -> tuple[str, ...]:
    """Returns the streams that a plan on a mesh may use."""
    runs = [axes for axes in mesh.runs() if math.prod(mesh.sizes[at] for at in axes) > 1]
    links = {INSIDE if mesh.inside(axes) else ACROSS for axes in runs}
    return COMPUTE, *(stream for stream in STREAMS if stream in links)


def bare_seconds(plan: Plan) -> Mapping[str, float]:
    """Returns the seconds that each stream is busy in a step, the latencies of collectives apart."""
    busy = dict.fromkeys(STREAMS, 0.0)
    for work in plan.programs[0].tried.work.values():
        busy[work.stream] += work.seconds - work.latency
        busy[COMPUTE] += work.pack + work.unpack
    return busy


def least_seconds(plan: Plan) -> float:
    """Returns what the step of a plan takes at least, by what it keeps streams busy."""
    busy = bare_seconds(plan)
    sent = max(seconds for stream, seconds in busy.items() if stream != COMPUTE)
    return max(sent, busy[COMPUTE] + plan.mesh.cluster.taken * sent)


def heaviest(streams: tuple[str, ...], loads: list[Mapping[str, float]]) -> tuple[dict[str, float], float]:
    """Returns the weights at which the cheapest of some loads costs most, and what it costs there: on a grid, none
    of them 0."""
    parts = itertools.product([LEAST, *(part / GRID for part in range(1, GRID)), 1 - LEAST], repeat=len(streams) - 1)
    grid = [dict(zip(streams, (*rest, 1 - sum(rest)))) for rest in parts if 1 - sum(rest) >= LEAST]
    best = max(grid, key=lambda weights: lightest(weights, loads))
    return best, lightest(best, loads)


def lightest(weights: Weights, loads: Iterable[Mapping[str, float]]) -> float:
    """Returns what the cheapest of some loads costs at some weights."""
    return min(sum(weight * load[stream] for stream, weight in weights.items()) for load in loads)


def bounding(streams: tuple[str, ...], taken: float) -> Iterator[dict[str, float]]:
    """Yields weights of which each bounds a step, and no link has none: what costs nothing proves nothing.

    taken: the part of the device that a collective takes from kernels, which the links pay for, too.
    """
    compute, *links = streams
    shares = (
        [(1.0,)] if len(links) == 1 else [(part / SHARES, 1 - part / SHARES) for part in (1, SHARES // 2, SHARES - 1)]
    )
    for part, share in itertools.product(range(1, GRID + bool(taken)), shares if links else []):
        sent = 1 - part / GRID + taken * part / GRID
        yield {compute: part / GRID, **{link: sent * each for link, each in zip(links, share)}}


def has_latency(mesh: Mesh) -> bool:
    """Returns whether a collective on a mesh takes longer than its bytes do."""
    cluster = mesh.cluster
    return bool(
        cluster.ways
        or cluster.intra_latency
        or cluster.inter_latency
        or any(rate.latency or rate.least for rate in cluster.collectives)
    )


def weighted(mesh: Mesh, weights: Weights) -> Mesh:
    """Returns the mesh on which a second of a stream costs what its weight says, and on which collectives have no
    latency."""
    cluster, compute = mesh.cluster, weights[COMPUTE]
    link = {"intra": weights.get(INSIDE, 1.0), "inter": weights.get(ACROSS, 1.0)}
    rates = [
        replace(rate, link=name, least=0.0, latency=None)
        # the first of equally near ones is taken
        for rate in sorted(cluster.collectives, key=lambda rate: rate.link is None)
        for name in ([rate.link] if rate.link else LINKS)
    ]
    ways = [
        replace(way, base=0.0, intra=0.0, inter=0.0, most=way.most / link["inter"] if link["inter"] else math.inf)
        for way in cluster.ways
    ]
    scaled = replace(
        cluster,
        name="weighted",
        peak=cluster.peak / compute,
        memory_bandwidth=cluster.memory_bandwidth / compute,
        launch=cluster.launch * compute,
        device=None if cluster.device is None else cluster.device.scaled(compute),
        collectives=tuple(rates),
        ways=tuple(ways),
        intra_latency=0.0,
        intra_bandwidth=cluster.intra_bandwidth / link["intra"] if link["intra"] else math.inf,
        inter_latency=0.0,
        inter_bandwidth=cluster.inter_bandwidth / link["inter"] if link["inter"] else math.inf,
    )
    return mesh.like(scaled)
