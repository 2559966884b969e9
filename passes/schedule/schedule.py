"""Schedules: puts the calls of a boxed graph in the order that makes the step shortest, with starts and waits apart."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.graph.about import PANEL_OF, must_wait
from sbpc.graph.rewrite import Copies, called, put
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.passes.schedule.list_schedule import RULES, Buckets, ListScheduler, Order
from sbpc.plans.measure import sent_by
from sbpc.plans.memory import Life
from sbpc.plans.storages import Storages, local_bytes
from sbpc.plans.stored_order import Numbers, order_of
from sbpc.plans.timeline import COMPUTE, Clock, Span, Work, kind_of, unpacking, works

WINDOWS = math.inf, 256, 64, 16, 0  # calls that one may run ahead of the first that has not run
SHARES = 0.05, 0.2, math.inf  # see `list_schedule`: of the buckets that are tried; by the last one, none
STORED = "placeholder", "get_attr"  # which are there before all calls
STARTS = "step", "bucket", "choice", "match", "candidates", "signatures"  # which are not in the meta of what waits
# where no limit is given: what a schedule may take of the bytes of the graph as it is, and the fraction of the seconds
# for which it takes no more
SLACK, GAIN = 1.05, 1e-2


def wait(x: Tensor) -> Tensor:
    """Stands for the end of a collective. At global shapes it changes nothing."""
    return x


def schedule(
    boxed: GraphModule,
    mesh: Mesh,
    budget: float | None = None,
    room: float = 0.0,
    orders: Orders | None = None,
    stored: Numbers | None = None,
) -> GraphModule:
    """Returns the fastest of the scheduled graphs whose bytes alive, at their peak, stay within a budget; else the
    order of `boxed`.

    No schedule is slower than that order, in which one thing runs at a time: here something always does.

    Before: a boxed graph. After: the same calls in an order for all ranks, and for every collective that sends
    something a node `wait(x)` with `meta["awaits"]`, which all its readers read. budget: bytes besides the
    optimizer's; by default SLACK times those of the graph as it is, and what the panels of one product hold
    together, as without panels. room: bytes that it may take instead where the step is shorter by
    GAIN so. orders: of `boxed`, where some are made already. stored: an order that was found before, which is taken
    if it is one. Raises VerifyError if it is none.
    """
    if stored is not None:
        return ordered(boxed, *order_of(boxed, mesh, stored))
    orders = Orders(boxed, mesh) if orders is None else orders
    if not orders.sends:
        return boxed
    storages, ports = Storages(boxed, mesh), [(node, False) for node in boxed.graph.nodes if node.op in STORED]

    def peak_of(order: Order, buckets: Buckets) -> int:
        return Life.in_order(storages, [*ports, *order], buckets).peak

    in_turn = [(node, False) for node in orders.calls]
    most = SLACK * (peak_of(in_turn, {}) + panel_bytes(boxed, mesh)) if budget is None else budget
    tried, ways = set[Hashable](), list[tuple[float, float, Order, Buckets]]()
    for window in (each for each in WINDOWS if each == math.inf or each < len(orders.calls)):
        for seconds, order, buckets in orders.within(window):
            key = tuple(order), tuple(buckets.items())
            if key in tried:
                continue
            tried.add(key)
            if (peak := peak_of(order, buckets)) > max(most, room):
                continue
            ways.append((seconds, peak, order, buckets))
            if peak <= most:
                return ordered(boxed, *leanest(ways))
    if ways:
        return ordered(boxed, *leanest(ways))
    result = ordered(boxed, in_turn)
    result.meta["remarks"] += (
        f"no schedule takes at most {most:,.0f} bytes a rank: every collective is waited for at once",
    )
    return result


class Orders:
    """The orders that are tried of a boxed graph, made when they are first asked for. work: see `works`."""

    def __init__(self, boxed: GraphModule, mesh: Mesh) -> None:
        self.boxed, self.cluster, self.work = boxed, mesh.cluster, works(boxed, mesh)
        self.calls = [node for node in boxed.graph.nodes if node.op == "call_function"]
        self.kinds = {node: kind_of(node) for node in self.calls if self.work[node].latency}
        self.known = dict[float, list[tuple[float, Order, Buckets]]]()

    @property
    def sends(self) -> bool:
        """Whether there is anything to wait for."""
        return any(self.work[node].stream != COMPUTE for node in self.calls)

    @functools.cached_property
    def scheduler(self) -> ListScheduler:
        return ListScheduler(self.calls, self.work, must_wait(self.boxed), self.kinds)

    def within(self, window: float) -> list[tuple[float, Order, Buckets]]:
        """Returns orders with their seconds, the fastest first. window: see `list_schedule`."""
        if window not in self.known:
            found, ways = list[tuple[float, Order, Buckets]](), list[tuple[str, list[float] | None]]()
            for rule in RULES:
                found.append(self.timed(window, rule, None, SHARES[0]))
                ways += [(rule, None), ("way", self.scheduler.ways_back())]
                found.append(self.timed(window, *ways[-1], SHARES[0]))
            best = ways[min(range(len(ways)), key=lambda at: found[at][0])]
            found += [self.timed(window, *best, share) for share in SHARES[1:] if self.kinds]
            self.known[window] = sorted(found, key=lambda way: way[0])
        return self.known[window]

    def timed(self, window: float, rule: str, way: list[float] | None, share: float) -> tuple[float, Order, Buckets]:
        """Returns an order and what a step takes in it. See `ListScheduler.run`."""
        order, buckets = self.scheduler.run(window, rule, share, way)
        return seconds_of(order, buckets, self.work, self.cluster), order, buckets

    @property
    def seconds(self) -> float:
        """What a step takes where all bytes of the fastest order may be alive."""
        return self.within(math.inf)[0][0] if self.sends else sum(work.seconds for work in self.work.values())


def leanest(ways: Sequence[tuple[float, float, Order, Buckets]]) -> tuple[Order, Buckets]:
    """Returns the order that takes least of those that are about as fast as the fastest. ways: seconds, bytes at the
    peak, and the order."""
    least = min(seconds for seconds, *_ in ways)
    near = (way for way in ways if way[0] * (1 - GAIN) <= least)
    _, _, order, buckets = min(near, key=lambda way: way[1])
    return order, buckets


def panel_bytes(boxed: GraphModule, mesh: Mesh) -> int:
    """Returns the most bytes that the panels of one product hold together: what they read of boxings, and make for
    boxings."""
    held = Counter[str]()
    for node in boxed.graph.nodes:
        if PANEL_OF in node.meta:
            moved = [used for used in node.all_input_nodes if "step" in used.meta]
            moved += [node] if any("step" in user.meta for user in node.users) else []
            held[node.meta[PANEL_OF]] += sum(local_bytes(each, mesh) for each in moved)
    return max(held.values(), default=0)


def seconds_of(order: Order, buckets: Buckets, work: Mapping[Node, Work], cluster: Cluster) -> float:
    """Returns what a step takes in an order: the makespan of the timeline of `ordered`."""
    awaited, clock, spans = {node for node, waits in order if waits}, Clock(cluster), list[Span]()
    for node, waits in order:
        message = buckets.get(node, node)
        if waits:
            clock.wait(message)
            if work[node].unpack:
                spans.append(clock.take(unpacking(work[node]), message, False))
        elif work[node].seconds:
            spans.append(clock.take(work[node], message, node in awaited))
    clock.settle()
    return max((span.end for span in spans), default=0.0)


def ordered(boxed: GraphModule, order: Iterable[tuple[Node, bool]], buckets: Buckets | None = None) -> GraphModule:
    """Returns a graph with its calls in an order. (node, True) stands for a node that waits for a collective.
    buckets: by collective that shares one, the first of it, whose name is then its `meta["bucket"]`."""
    copies = Copies()
    for node in boxed.graph.nodes:
        if node.op in STORED:
            copies.keep(node)
    for node, waits in order:
        if waits:
            about = {key: value for key, value in node.meta.items() if key not in STARTS}
            about["awaits"] = sent_by(node)
            copies[node] = called(copies.graph, wait, (copies[node],), {}, f"wait_{node.name}", about)
        else:
            copies.keep(node)
            if buckets and node in buckets:
                put(copies[node], "meta", node.meta | {"bucket": copies[buckets[node]].name})
    copies.keep(boxed.graph.output_node())
    return copies.module(boxed)
