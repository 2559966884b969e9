"""memory: of the plans that stay under a limit of bytes per rank, a fast one, found by giving bytes prices.

What is alive at a moment of the step is a sum over nodes (see `sbpc.passes.memory.live_bytes`), so the limit is one row per moment, and
the price of a byte at that moment its Lagrange multiplier. Each priced problem gives a plan and a bound for all plans
under the limit; the next prices are what the rows are worth in the relaxation on labels near the plans known; a moment
is added where a plan's peak is one that has no price yet. Blocks of a fast plan that takes too much are spliced into
one that fits; in small graphs a plan that takes a little too much is changed in single nodes, those of which no row
counts all that they hold. On the same labels programs then look for a better plan, with rows for what plans hold at
their peaks (see `held`). Where the labels are all that matter these rows bound all plans too; else, and where a gap is
left, guessed rows help that would have been right for the last plan. At last all rows have prices, for a bound that is
as sharp as messages make it; where that is far from the plan of a small graph, the plan is bettered window by window.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch.fx import GraphModule

from sbpc.errors import MemoryLimitError
from sbpc.passes.memory.candidate_plans import Found, Plans
from sbpc.passes.memory.limit_error import shortage
from sbpc.passes.memory.live_bytes import Moment, at_call, at_optimizer, calls_of, kept, peak_calls, together
from sbpc.passes.memory.local_repair import mends
from sbpc.passes.memory.mix_blocks import blocks, spliced
from sbpc.passes.memory.peak_rows import rows
from sbpc.passes.memory.priced_space import Divided, PricedSpace, Relaxed
from sbpc.plans.memory import POSITION
from sbpc.plans.plan import Assignment, Plan
from sbpc.solver import Limit, Windows

ROUNDS, TURNS = 8, 16  # of prices, at most, and of plans that are tried where all labels that matter are looked at
EASY = 12_000  # labels times plans that are tried there, if they are more
SOME, TRIED = (6, 12), 4_000  # plans that are tried on some labels, at least and at most; between these plans times variables
FAR = 0.03  # the gap with which these tries end, which else are twice as many; above it small graphs are bettered in windows
TIGHTER = 0.95, 0.85  # parts of a limit under which no plan was found, under which one is looked for next
CUT = 3  # programs on all labels that matter that end before their time, at most
STRAIGHT = 3  # numbers of blocks that are read off bytes, as if these rose evenly; then halves
NEARLY = 1.25  # times a limit: plans that take more are not mended
MENDED, MENDS = 6, 100  # nodes of a plan that are changed, at most, and plans that are tried for each
FULL, WINDOWED, AROUND = 0.6, 3, 4  # part of the limit: calls that hold more have rows in windows; plans tried in each; turns, at most
SPLICED = 2  # plans that do not fit, at most, that are spliced with the best one
MOMENTS = 6  # that have prices, at most
CLOSE, GOOD = 1e-3, 3e-3  # relative gaps: of the bound below the relaxation, of the best plan above the bound
CLOSED = 1e-5  # relative gap of a plan that is the best of all that matter, but for rounding
AIM = 9e-3  # relative gap to which a bound is made sharper with the greatest effort
CASED = 9.9e-3  # the same where each step to it takes long
DEAREST = 1 << 4  # steps that all the memory may cost, at most
DEARER = 0.25, 4, 64, 1 << 12  # the same, where no plan fits
PEAKS = 6  # of a plan that are looked at together
APART = 1e-3  # of the limit: by so much a row is tightened, at least; and all are at first


def within(
    free: Plan, space: PricedSpace, gm: GraphModule, copies: int, made: Callable[[Assignment], Plan]
) -> Plan:
    """The fastest plan found that stays under the limit of the plan `free`, which does not; gm: the graph of the space.

    copies: tensors of the size of a trained parameter beside it. made: the plan of an assignment. Raises
    MemoryLimitError.
    """
    limit = float(free.options["memory"])
    search = Search(limit, space, gm, copies, made, free.lower_bound)
    search.run(free.assignment)
    for part in TIGHTER if search.near.complete else ():  # other prices and rows lead to other plans
        if search.best is None and search.bound < math.inf:
            tighter = Search(part * limit, space, gm, copies, made, free.lower_bound)
            tighter.run(free.assignment)
            search.found |= tighter.found
    if search.best is None:
        least = min(search.plans, key=lambda found: found.bytes).plan
        raise MemoryLimitError(shortage(least, search.limit, search.bound == math.inf))
    plan = made(search.best.plan.assignment)  # the layouts in a graph are those of the plan that was made last
    plan.lower_bound = min(search.bound, search.best.seconds)  # which may differ by rounding
    plan.prover = search.prover
    return plan


class Search(Plans):
    """Plans of a graph, and the best bound for those that take no more than `limit` bytes.

    bound: seconds below which no such plan is, infinite where there is none. prover: what gave it; proof: the best one without
    cases. limits: rows that no such plan breaks; limited: the calls of which the sure moment is among them.
    It begins as that of the problem without the limit, which had bounded the plan `free` in its own space.
    """

    def __init__(
        self, limit: float, space: PricedSpace, gm: GraphModule, copies: int, made: Callable[[Assignment], Plan], bound: float
    ) -> None:
        super().__init__(limit, space, gm, made)
        self.copies, self.bound, self.calls = copies, bound, calls_of(gm)
        self.moments: list[Moment] = [at_optimizer(gm, copies)]
        self.known: dict[tuple[str, bool], Moment] = {}
        self.named: dict[str, None] = {}  # the calls during which bytes have a price
        self.proof = Relaxed(space)
        self.prover: Relaxed | Divided = self.proof
        self.near = space.near()
        self.always = min(POSITION * len(space.mesh.axes), limit / 2)  # bytes that every plan takes at every moment
        self.limits: list[Limit] = []
        self.limited: set[str] = set()
        self.add(next((name for name, node in self.calls.items() if node.meta.get("phase") == "backward"), None))

    @property
    def gap(self) -> float:
        """How far the best plan may be above the bound, as a part of it; 0 where it is known that there is no plan."""
        if self.best is None:
            return float(self.bound < math.inf)
        return (self.best.seconds - self.bound) / (self.best.seconds or 1.0)

    def run(self, free: Assignment) -> None:
        """Begin with the plan without the limit; find prices, then plans on the labels that were near on the way, if there
        are none those that take least; then a sharper bound at the best prices."""
        self.step = self.begin(free).seconds or 1.0
        asked: list[tuple[int, ...]] = []
        for _ in range(ROUNDS):
            seconds, worth = self.near.worth(list(map(self.row, self.moments)), self.step, DEAREST * self.step)
            rounded = tuple(round(price / self.step / CLOSE) for price in worth if price)
            if self.bound >= (1 - CLOSE) * seconds or rounded in asked or self.gap <= GOOD:
                break
            self.prove(worth)
            asked.append(rounded)
        self.limits, self.limited = [self.row(moment) for moment in self.moments], set(self.named)
        before = self.best
        if before is not None and not self.near.complete:
            self.splice(before)
            before = self.best
        self.look()
        if self.best is None:
            self.squeeze()
            if not self.near.complete:
                self.find()
        if self.best is not None and self.gap > GOOD:
            if self.best is not before:
                self.splice(self.best)
            self.sharpen(self.best)
            if self.near.few and self.gap > FAR:
                self.improve(self.best)
        if self.best is None or self.gap <= GOOD:
            return
        if not self.near.complete and self.near.close(self.proof.problem, self.best.seconds + self.proof.allowed):
            self.look(long=True)
        if self.near.few and self.gap > CASED and len(self.space.mesh.axes) <= 2:
            self.divide(self.best)

    def row(self, moment: Moment, most: float | None = None) -> Limit:
        """The limit, or what is at most to be held, at a moment."""
        return Limit(self.space.weights(moment), self.limit - self.always if most is None else most)

    def look(self, long: bool = False) -> None:
        """Look for a plan on the labels that are near; where these are all that matter for one that is proved to be the best,
        and on as before only if that leaves a gap. long: see `settle`."""
        if self.near.complete:
            self.settle(long)
        if not self.near.complete or self.gap > GOOD:
            self.find()

    def settle(self, long: bool) -> None:
        """The cheapest plan of all that matter; rows for what it holds too much, until one fits.

        No plan under the limit is faster than what is found, or than the best one where only faster plans are looked at.
        long: programs may take long from the first on; else only once no row can be added, when the proof alone is missing.
        """
        fastest, cut = self.best.seconds if self.best else math.inf, 0
        for _ in range(max(TURNS, EASY // self.near.size)):
            answer = self.near.cheapest(self.limits, self.step, 0.0, long)
            self.bound = max(self.bound, min(answer.bound, fastest))
            if answer.labels is None:
                return
            found = self.keep(answer.labels)
            new = self.hold(found)
            if self.gap <= CLOSED or (not new and (long or answer.proved)):
                return
            long, cut = long or not new, cut + (not answer.proved)
            if cut == CUT:
                return

    def find(self) -> None:
        """A cheap plan on the labels that are near, first with a little to spare. Rows that all plans keep are added for the
        peaks of those that do not fit; where a peak is one for which there were rows, or none are left to add, guessed ones:
        what would have been right for the last plan."""
        guessed, peaks, again, spare = dict[str, Limit](), set[str | None](), True, APART * self.limit
        known = self.best  # and from then on what programs find: one that was mended would end the search
        if known is not None:
            self.near.mix(known.labels)
        tries = min(max(SOME[0], TRIED // len(self.space.variables)), SOME[1])
        for turn in range(2 * tries):
            if turn >= tries and self.gap <= FAR:
                return
            limits = [replace(row, most=row.most - spare) for row in self.limits]
            answer = self.near.cheapest([*limits, *guessed.values()], self.step, CLOSE, known=known.labels if known else None)
            if answer.labels is None and spare:
                spare = 0.0
                continue
            if answer.labels is None and guessed:  # what would have been right for some plans is wrong for all
                loose = {name: (row.most + self.limit) / 2 for name, row in guessed.items()}
                guessed = {name: self.row(self.at(name, False), most) for name, most in loose.items()}
                continue
            if answer.labels is None:
                return
            found = self.keep(answer.labels)
            self.mend(found)
            if self.gap <= GOOD:
                return
            if self.fits(found):  # once more, with rows that are right for a plan that fits
                known = found if known is None or found.seconds < known.seconds else known
                if not guessed or not again:
                    return
                again, held = False, peak_calls(found.plan, self.gm, 0.0)
                guessed = {name: self.right(found, name, held[name]) for name in guessed if name in held}
            elif not self.hold(found) or found.peak in peaks or self.near.complete:
                guessed |= self.guess(found, guessed)
            peaks.add(found.peak)

    def hold(self, found: Found) -> bool:
        """Add rows for the peaks of a plan: for what is sure then, and for what it holds beyond; whether there are any."""
        peaks, before = [self.calls[name] for name in found.peaks][:PEAKS], len(self.limits)
        self.limits += [self.row(self.at(call.name)) for call in peaks if call.name not in self.limited]
        self.limited |= {call.name for call in peaks}
        self.limits += rows(self.space, found.plan, peaks, self.copies, self.limit - self.always)
        return len(self.limits) > before

    def right(self, found: Found, name: str, held: int) -> Limit:
        """The row for what is about alive during a call that would have been right for a plan, which holds so much then."""
        moment = self.at(name, sure=False)
        most = self.space.bytes_in(found.plan.assignment, moment) - (held - self.limit)
        return self.row(moment, max(most, APART * self.limit))

    def guess(self, found: Found, known: Mapping[str, Limit]) -> dict[str, Limit]:
        """By call the row that would have been right for a plan at its peaks; where one is known, tighter than that, if there is
        room."""
        guessed, least = dict[str, Limit](), APART * self.limit
        for name in list(found.peaks)[:PEAKS]:
            row = self.right(found, name, found.peaks[name])
            most = min(row.most, known[name].most - least) if name in known else row.most
            guessed[name] = replace(row, most=max(most, least))
        return guessed

    def improve(self, best: Found) -> None:
        """Better the best plan in one window of its nodes after the other, until none of them gives a faster one that fits."""
        windows, idle, room = Windows(self.space.problem, self.near.distances), 0, self.room(best)
        for center in itertools.islice(itertools.cycle(windows.centers), AROUND * len(windows.centers)):
            found = self.improved_in(windows, center, best, room)
            idle = 0 if found else idle + 1
            if found is not None:
                best, room = found, self.room(found)
            if idle == len(windows.centers):
                return

    def room(self, found: Found) -> dict[str, Limit]:
        """By call during which a plan holds much the row that leaves it as much more as there is room for then."""
        held = peak_calls(found.plan, self.gm, FULL * self.limit)
        return {name: self.right(found, name, most) for name, most in held.items()}

    def improved_in(self, windows: Windows, center: int, best: Found, room: Mapping[str, Limit]) -> Found | None:
        """A faster plan that fits and differs from the best one in a window; None if none was found. room: of the best one."""
        guessed = dict(room)
        for _ in range(WINDOWED):
            labels = windows.cheaper(center, best.labels, [*self.limits, *guessed.values()])
            if labels is None:
                return None
            found = self.keep(labels)
            if self.fits(found):
                return found
            self.hold(found)
            guessed |= self.guess(found, guessed)
        return None

    def splice(self, slow: Found) -> None:
        """Of the best plan and faster ones that do not fit, plans with as many blocks of these as there is room for."""
        along = blocks(self.gm, [variable.name for variable in self.space.variables])
        count = len(np.unique(along[~np.isnan(along)]))
        faster = [each for each in self.plans if not self.fits(each) and each.seconds < slow.seconds]
        for fast in sorted(faster, key=lambda each: each.bytes)[:SPLICED]:
            fitted, over, held, tried = 0, count, (slow.bytes, fast.bytes), 0
            while over - fitted > 1:
                part = (self.limit - held[0]) / (held[1] - held[0]) if tried < STRAIGHT else 0.5
                many = min(max(fitted + int((over - fitted) * part), fitted + 1), over - 1)
                ways = [spliced(fast.labels, slow.labels, along, many / count, last) for last in (True, False)]
                labels, tried = min(ways, key=self.seconds), tried + 1
                found = self.keep(labels) if self.seconds(labels) < slow.seconds else slow
                if self.fits(found):  # of more blocks it is faster
                    fitted, held = many, (found.bytes, held[1])
                else:
                    over, held = many, (held[0], found.bytes)

    def mend(self, found: Found) -> None:
        """Where variables are few, change a plan that takes a little too much, in one node at a time and to take less each time,
        until it fits or would be no faster than the best one, or no such change is found."""
        if not self.near.few or found.bytes > NEARLY * self.limit:
            return
        for _ in range(MENDED):
            most = self.best.seconds if self.best else math.inf
            if self.fits(found) or found.seconds >= most:
                return
            calls = [self.calls[name] for name in found.peaks][:PEAKS]
            tried = map(self.make, itertools.islice(mends(self.space, found.plan, calls, self.copies, most), MENDS))
            better = next((each for each in tried if each.bytes < found.bytes), None)
            if better is None:
                return
            found = self.found[tuple(better.labels)] = better

    def squeeze(self) -> None:
        """Give bytes higher and higher prices: all that is kept, then also what is alive at the peaks of most plans; at the
        highest also at those of each plan that this gives, until one fits or has a peak that is among them."""
        for peaks in ([], self.common()):
            for price in DEARER:
                if self.fits(self.solve(self.counted(peaks), price * self.step / self.limit)):
                    return
        peaks = self.common()
        while len(peaks) <= PEAKS:
            found = self.solve(self.counted(peaks), DEARER[-1] * self.step / self.limit)
            if found.peak is None or found.peak in peaks:
                return
            peaks.append(found.peak)

    def common(self) -> list[str]:
        """The calls at which most plans so far take most."""
        found = Counter(plan.peak for plan in self.plans if plan.peak)
        return [name for name, _ in found.most_common(PEAKS // 2)]

    def counted(self, peaks: Sequence[str]) -> Moment:
        """All that is kept, and all that is alive at these calls."""
        moments = [kept(self.gm, self.copies), *(self.at(name, sure=False) for name in peaks)]
        return together(moments, [1.0] * len(moments))

    def begin(self, free: Assignment) -> Found:
        """The plan without the limit, with stored values in the cheapest layouts; a moment for its peak."""
        labels = self.space.labels(free)
        self.near.add(labels)
        return self.watched(self.keep(labels))

    def watched(self, found: Found) -> Found:
        """A plan whose peak has a price from now on."""
        if found.peak not in self.named and len(self.moments) < MOMENTS:
            self.add(found.peak)
        return found

    def prove(self, prices: Sequence[float]) -> Found:
        """The plan at these prices, each for all of the limit at a moment; the bound that they give, and a new moment for the
        plan's peak."""
        limits = list(map(self.row, self.moments))
        found = self.solve(together(self.moments, [price / limit.most for price, limit in zip(prices, limits)]))
        self.bettered(self.paid - math.fsum(prices), Relaxed(self.space, limits, prices, self.space.multipliers))
        return self.watched(found)

    def sharpen(self, best: Found) -> None:
        """A sharper bound, at what all rows are worth; where that leaves a gap also at what moments alone are."""
        found, aim = [Relaxed(self.space, self.proof.limits, self.proof.prices)], best.seconds * (1 - AIM)
        if len(self.space.mesh.axes) <= 2:
            found.insert(0, Relaxed(self.space, self.limits, self.near.dear(self.limits, self.step, best.labels)))
        for each in found:
            self.bettered(each.sharpen(best.plan.assignment, aim), each)
            if self.bound >= aim:
                return

    def divide(self, best: Found) -> None:
        """A bound by cases, where that is sharper."""
        found = Divided(self.space, self.limits, self.near, best.labels, self.step)
        bound = found.sharpen(best.seconds * (1 - CASED))
        if bound > self.bound:
            self.bound, self.prover = bound, found

    def bettered(self, bound: float, proof: Relaxed) -> None:
        """Keep a bound and its proof, if it is better."""
        if bound >= self.bound:
            self.bound, self.proof, self.prover = bound, proof, proof

    def solve(self, counted: Moment, price: float = 1.0) -> Found:
        """The plan where every byte that is counted has a price; `paid`: what no plan's seconds and bytes cost less than."""
        assignment, self.paid = self.space.solve(together([counted], [price]), quick=True)
        found = self.keep(self.space.labels(assignment))
        self.near.add(found.labels, self.space.distances(together([counted], [price])))
        return found

    def add(self, name: str | None) -> None:
        """Put a price on what is alive during a call."""
        if name is not None:
            self.named[name] = None
            self.moments.append(self.at(name))

    def at(self, name: str, sure: bool = True) -> Moment:
        """What is alive during a call, see `at_call`; found once."""
        if (name, sure) not in self.known:
            self.known[name, sure] = at_call(self.gm, self.calls[name], self.copies, sure)
        return self.known[name, sure]
