"""Orders the nodes of a boxed graph by list scheduling.

One order is made for all ranks, from the durations of the busiest one. A collective starts when its operand is there
and its link would otherwise be idle before the next kernel ends. A kernel runs as soon as its operands are there.
Where none can run, the computing stream waits for the collective that ends first. Of the kernels that may run one
goes first by one of three rules:

- "way": the one with the longest way to the end of the step. The gradient of an input goes before that of a weight.
- "feed": the same, but while a link is idle the one after which a collective can start soonest. The gradient of a
  weight goes before that of an input if the link has nothing else to do.
- "order": the first one in the order given.

None is the best for all graphs, so the caller simulates what each gives. The longest way knows no queues: a gradient
that a busy link sends at the end of the step has a short one. So the step is then played from its end to its beginning,
what ended last first, and in a further order what stood farthest from the end there goes first (forward-backward
improvement: Li and Willis 1992; Valls et al. 2005).

Collectives of one kind over the same ranks may go in one message, a bucket, which has the latency of one. With a
collective that starts, others start that could start then, too, as long as latency is a share of the bucket's time,
and was of theirs. So a link that has nothing to do waits for nothing, and on one that is busy what has gathered
meanwhile goes together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

from torch.fx import Node

from sbpc.plans.timeline import COMPUTE, STREAMS, Work

RULES = "feed", "way", "order"


Order = list[tuple[Node, bool]]
Buckets = dict[Node, Node]


def list_schedule(
    nodes: Sequence[Node],
    works: Mapping[Node, Work],
    window: float = math.inf,
    rule: str = "way",
    after: Mapping[Node, Sequence[Node]] | None = None,
    kinds: Mapping[Node, Hashable] | None = None,
    share: float = 0.0,
) -> tuple[Order, Buckets]:
    """Returns the calls of a graph in the order in which they are to run, with (node, True) where a collective is
    waited for; and by collective that is not alone in its bucket the first one of that. Those of a bucket follow
    each other.

    nodes: the calls in an order that works. window: how many calls a call may run ahead of the first one, in the
    order of `nodes`, that has not run; it bounds what is alive at once. rule: one of RULES. after: by call, earlier
    calls behind whose ends it must run though it reads nothing of theirs. kinds: by collective what is equal for those
    that may share a bucket; without, none does. share: the least part of the time of a bucket, and of a collective
    that joins it, that is latency.
    """
    return ListScheduler(nodes, works, after or {}, kinds or {}).run(window, rule, share)


class ListScheduler:
    """Calls and what they wait for, and the state of a simulated step: the time on the computing stream, what may run,
    and what is in flight.

    Nodes are numbered in the order given. used, behind: by node the calls that it must wait for, and how many. way:
    seconds of the longest way to the end of the step. feed: seconds until a collective can start. ends: when it ended
    in the last run.
    ready, sendable: heaps of (priority, number) of the kernels that may run now and, by link, of the collectives that
    may start now; feeding: of the same kernels as ready, by feed. early: numbers that lie beyond the window. flying:
    (end, number).
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        works: Mapping[Node, Work],
        after: Mapping[Node, Sequence[Node]],
        kinds: Mapping[Node, Hashable],
    ) -> None:
        self.nodes = nodes
        self.kinds = [kinds.get(node, at) for at, node in enumerate(nodes)]
        number = {node: at for at, node in enumerate(nodes)}
        self.work = [works[node] for node in nodes]
        self.users = [[number[user] for user in node.users if user in number] for node in nodes]
        self.used = [[number[used] for used in node.all_input_nodes if used in number] for node in nodes]
        for node, earlier in after.items():
            for each in earlier:
                self.users[number[each]].append(number[node])
                self.used[number[node]].append(number[each])
        self.behind = list(map(len, self.used))
        self.way, self.feed = self.longest_ways()

    def longest_ways(self) -> tuple[list[float], list[float]]:
        """Returns `way` and `feed` by node."""
        way, feed = [0.0] * len(self.work), [math.inf] * len(self.work)
        for at in reversed(range(len(self.work))):
            work, users = self.work[at], self.users[at]
            way[at] = work.seconds + max((way[user] for user in users), default=0.0)
            starts = min((feed[user] for user in users), default=math.inf)
            feed[at] = 0.0 if work.stream != COMPUTE else work.seconds + starts
        return way, feed

    def ways_back(self) -> list[float]:
        """Returns by node the seconds from its start to the end of the step if the last run is played backwards: of
        what may run on a stream that first which ended last."""
        way, missing = [0.0] * len(self.work), list(map(len, self.users))
        waiting: dict[str, list[tuple[float, int]]] = {stream: [] for stream in STREAMS}
        now, free, flying = 0.0, dict.fromkeys(STREAMS, 0.0), list[tuple[float, int]]()
        free_to_run = [at for at, users in enumerate(missing) if not users]
        while True:
            while free_to_run:
                at = free_to_run.pop()
                if self.work[at].seconds:
                    heapq.heappush(waiting[self.work[at].stream], (-self.ends[at], -at))
                else:
                    way[at] = now
                    free_to_run += passed(self.used[at], missing)
            for stream, heap in waiting.items():
                if heap and free[stream] <= now:
                    at = -heapq.heappop(heap)[1]
                    way[at] = free[stream] = now + self.work[at].seconds
                    heapq.heappush(flying, (way[at], at))
            if not flying:
                return way
            now = flying[0][0]
            while flying and flying[0][0] <= now:
                free_to_run += passed(self.used[heapq.heappop(flying)[1]], missing)

    def run(self, window: float, rule: str, share: float, way: list[float] | None = None) -> tuple[Order, Buckets]:
        """Runs the simulated step from its beginning to its end, see `list_schedule`. way: by node instead of the
        longest one."""
        self.window, self.rule, self.share = window, rule, share
        self.goes_by = self.way if way is None else way
        self.ends = [0.0] * len(self.nodes)
        self.now, self.first, self.missing = 0.0, 0, list(self.behind)
        self.free = dict.fromkeys(STREAMS, 0.0)
        self.done, self.taken = [False] * len(self.nodes), [False] * len(self.nodes)
        self.ready: list[tuple[float, int]] = []
        self.feeding: list[tuple[float, int]] = []
        self.sendable: dict[str, list[tuple[float, int]]] = {stream: [] for stream in STREAMS if stream != COMPUTE}
        self.early: list[int] = []
        self.flying: list[tuple[float, int]] = []
        self.landed: set[int] = set()  # collectives that have ended, and that nothing has waited for yet
        self.order: Order = []
        self.buckets: Buckets = {}
        for at, missing in enumerate(self.missing):
            if not missing:
                self.offer(at)
        while self.first < len(self.nodes):
            self.land(self.now)
            kernel = self.next_kernel()
            self.start_collectives(math.inf if kernel is None else self.now + self.work[kernel].seconds)
            if kernel is not None:
                self.compute(kernel)
            elif self.flying:
                self.now = max(self.now, self.flying[0][0])
        self.land(math.inf)
        for at in sorted(self.landed):
            self.end(at)
        return self.order, self.buckets

    def next_kernel(self) -> int | None:
        """Takes out the kernel that goes first, or what takes no time."""
        links = [link for link in self.sendable if self.free[link] <= self.now and not self.sendable[link]]
        first = self.feeding if links and self.rule == "feed" else self.ready
        for heap in (first, self.ready):
            while heap:
                _, at = heapq.heappop(heap)
                if not self.taken[at]:
                    self.taken[at] = True
                    return at
        return None

    def offer(self, at: int) -> None:
        """Takes in a node whose operands are there: it may run, or lies beyond the window."""
        if at > self.first + self.window:
            heapq.heappush(self.early, at)
            return
        work = self.work[at]
        if not work.seconds:
            heapq.heappush(self.ready, (-math.inf, at))  # before everything, as a collective may hang on it
        elif work.stream != COMPUTE:
            heapq.heappush(self.sendable[work.stream], (-self.goes_by[at], at))
        else:
            heapq.heappush(self.ready, (at if self.rule == "order" else -self.goes_by[at], at))
            if self.feed[at] < math.inf:
                heapq.heappush(self.feeding, (self.feed[at], at))

    def land(self, until: float) -> None:
        """Lets the readers of the collectives run that end by a time."""
        while self.flying and self.flying[0][0] <= until:
            _, at = heapq.heappop(self.flying)
            for before in [each for each in self.landed if not self.users[each]]:
                self.end(before)  # a result of the step: its operand need not live on
            self.landed.add(at)
            self.release(at)

    def start_collectives(self, horizon: float) -> None:
        """Starts those collectives whose link would be idle before a time."""
        for link, heap in self.sendable.items():
            while heap and max(self.free[link], self.now) < horizon:
                self.send(link, self.next_bucket(heap))

    def next_bucket(self, heap: list[tuple[float, int]]) -> list[int]:
        """Takes out the collective that goes first, and those that go with it."""
        first, *others = [at for _, at in sorted(heap)]
        together, seconds = [first], self.work[first].seconds
        for at in others:
            work = self.work[at]
            if self.kinds[at] == self.kinds[first] and work.latency >= self.share * max(seconds, work.seconds):
                together.append(at)
                seconds += work.seconds - work.latency
        taken = set(together)
        heap[:] = sorted(item for item in heap if item[1] not in taken)
        return together

    def send(self, link: str, together: list[int]) -> None:
        """Starts a collective, or several as one."""
        for at in together:
            self.await_operands(at)
        begin = max(self.free[link], self.now)
        first = self.nodes[together[0]]
        self.free[link] = (
            begin
            + sum(self.work[at].seconds - self.work[at].latency for at in together)
            + self.work[together[0]].latency
        )
        for at in together:
            self.order.append((self.nodes[at], False))
            self.ends[at] = self.free[link]
            heapq.heappush(self.flying, (self.free[link], at))
            if len(together) > 1:
                self.buckets[self.nodes[at]] = first
        for at in together:
            self.finish(at)

    def compute(self, at: int) -> None:
        """Runs a kernel, or what takes no time."""
        self.await_operands(at)
        self.now += self.work[at].seconds
        self.ends[at] = self.now
        self.order.append((self.nodes[at], False))
        self.finish(at)
        self.release(at)

    def await_operands(self, at: int) -> None:
        """Waits for those operands of a node that were collectives."""
        for used in self.used[at]:
            if used in self.landed:
                self.end(used)

    def end(self, at: int) -> None:
        """Writes that a collective is waited for."""
        self.landed.remove(at)
        self.order.append((self.nodes[at], True))

    def finish(self, at: int) -> None:
        """Notes that a node was written, and offers what the window has reached."""
        self.done[at] = True
        while self.first < len(self.done) and self.done[self.first]:
            self.first += 1
        while self.early and self.early[0] <= self.first + self.window:
            self.offer(heapq.heappop(self.early))

    def release(self, at: int) -> None:
        """Offers the readers of a value that have all their operands now."""
        for user in passed(self.users[at], self.missing):
            self.offer(user)


def passed(others: Iterable[int], missing: list[int]) -> list[int]:
    """Counts for each of `others` one less that it waits for; returns those that wait for nothing more."""
    found = []
    for other in others:
        missing[other] -= 1
        if not missing[other]:
            found.append(other)
    return found
