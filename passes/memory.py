"""memory: of the plans that stay under a limit of bytes per rank, a fast one, found by giving bytes prices.

What is alive at a moment of the step is a sum over nodes (see `sbpc.moments`), so the limit is one row per moment, and
the price of a byte at that moment its Lagrange multiplier. Each priced problem gives a plan and a bound for all plans
under the limit; cutting planes choose the next prices; a moment is added where a plan's peak is one that has no price yet.
Between the plans that two prices give lie those that take the choices of the one for some blocks, of the other for the rest.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from torch.fx import GraphModule

from sbpc.errors import MemoryLimitError
from sbpc.memory import Life
from sbpc.moments import Moment, at_call, at_optimizer, kept, peak_call, together
from sbpc.plan import Assignment, Plan
from sbpc.ports import placeholders
from sbpc.solver import Proof
from sbpc.solver.multipliers import multipliers

ROUNDS, STEPS = 12, 6  # of cutting planes, and of narrowing down the price at which plans begin to fit
MOMENTS = 5  # that have prices, at most
CLOSE, GOOD = 1e-3, 1e-2  # relative gaps: of the bound below what the known plans allow, of the best plan above the bound
DEAREST = 1 << 4, 1 << 12  # steps that all the memory may cost, in cutting planes and in closing in; a byte, in squeezing
PEAKS = 3  # at which all that is alive is counted
TRIED, FEW = 10_000, 60  # nodes of the graphs of mixed plans that are made; modules that are mixed one by one


class Priced(Protocol):
    """The space of assignments of a graph, where bytes have prices (see `sbpc.passes.assign`)."""

    multipliers: Proof | None

    def solve(self, prices: Moment | None = None) -> tuple[Assignment, float]: ...
    def untied_proof(self, prices: Moment | None = None) -> Proof: ...
    def bound(self, proof: Proof, prices: Moment | None = None) -> float: ...
    def certify(self, seconds: float, limit: float, prices: Moment | None = None) -> float: ...
    def seconds(self, assignment: Assignment) -> float: ...
    def bytes_in(self, assignment: Assignment, counted: Moment) -> float: ...
    def mixed(self, names: Container[str], one: Assignment, other: Assignment) -> Assignment: ...


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The problem of a plan under a limit, the limit as prices of bytes: a plan that keeps it pays at most `allowed`.

    So a lower bound of seconds and priced bytes, less what is allowed, is one of the seconds of such plans.
    """

    space: Priced
    counted: Moment
    allowed: float  # seconds
    known: Proof | None  # None: made when asked for

    @cached_property
    def proof(self) -> Proof:
        """Multipliers of the priced problem."""
        return self.space.untied_proof(self.counted) if self.known is None else self.known

    def check(self, assignment: Assignment, proof: Proof) -> tuple[float, float]:
        """What an assignment costs, and the bound that the multipliers and the prices give."""
        return self.space.seconds(assignment), self.space.bound(proof, self.counted) - self.allowed


@dataclass
class Found:
    """A plan, its seconds in the space, and its bytes at each moment, as parts of the limit."""

    plan: Plan
    seconds: float
    peak: str | None = None  # the call during which it takes more than the limit
    held: list[float] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The bytes that the plan takes."""
        return self.plan.cost.memory["total"]


def within(
    free: Plan, space: Priced, gm: GraphModule, copies: int, made: Callable[[Assignment], Plan]
) -> Plan:
    """The fastest plan found that stays under the limit of the plan `free`, which does not; gm: the graph of the space.

    copies: tensors of the size of a trained parameter beside it. made: the plan of an assignment. Raises
    MemoryLimitError.
    """
    search = Search(float(free.options["memory"]), space, gm, copies, made, free.lower_bound)
    search.run()
    if search.best is None:
        raise MemoryLimitError(shortage(min(search.plans, key=lambda found: found.bytes).plan, search.limit))
    search.mix()
    plan = made(search.best.plan.assignment)  # the layouts in a graph are those of the plan that was made last
    plan.lower_bound, plan.certifier, plan.prover = search.bound, search.certifier(plan.assignment), search.proof
    return plan


class Search:
    """Plans of a graph, and the best bound for those that take no more than `limit` bytes.

    bound: seconds below which no such plan is. proof: what gave it.
    It begins as that of the problem without the limit, which had bounded the plan `free` in its own space.
    """

    def __init__(
        self, limit: float, space: Priced, gm: GraphModule, copies: int, made: Callable[[Assignment], Plan], bound: float
    ) -> None:
        self.limit, self.space, self.gm, self.copies, self.made, self.bound = limit, space, gm, copies, made, bound
        self.calls = {node.name: node for node in gm.graph.nodes if node.op == "call_function" and "candidates" in node.meta}
        self.plans: list[Found] = []
        self.moments: list[Moment] = [at_optimizer(gm, copies)]
        self.named: dict[str, None] = {}  # the calls during which bytes have a price
        self.peaks = Counter[str]()  # of plans that do not fit
        self.proof = Relaxed(space, {}, 0.0, None)
        self.add(next((name for name, node in self.calls.items() if node.meta.get("phase") == "backward"), None))

    @property
    def best(self) -> Found | None:
        """The fastest plan under the limit, None if there is none."""
        return min(filter(self.fits, self.plans), key=lambda found: found.seconds, default=None)

    def fits(self, found: Found) -> bool:
        """Whether a plan stays under the limit."""
        return found.bytes <= self.limit

    def good(self) -> bool:
        """Whether a plan fits that is hardly slower than the bound."""
        return self.best is not None and self.best.seconds - self.bound <= GOOD * self.best.seconds

    def run(self) -> None:
        """Solve at prices that cutting planes choose, then at one price for all that is kept, also at the peaks; then squeeze."""
        step = self.prove([0.0] * len(self.moments)).seconds or 1.0
        asked: list[list[float]] = []
        for _ in range(ROUNDS):
            over = [[held - 1 for held in self.held(found)] for found in self.plans]
            prices, most = multipliers([found.seconds / step for found in self.plans], over, DEAREST[0])
            if self.bound >= (1 - CLOSE) * most * step or prices in asked:
                break
            self.prove([price * step / self.limit for price in prices])
            asked.append([*prices, *[0.0] * (len(self.moments) - len(prices))])
        unit, always = step / self.limit, kept(self.gm, self.copies)
        self.close_in(always, unit)
        peaks = [name for name, _ in self.peaks.most_common(PEAKS)]
        self.close_in(self.counted(always, peaks), unit)
        self.squeeze(always, peaks, unit)

    def squeeze(self, always: Moment, peaks: list[str], unit: float) -> None:
        """While no plan fits, let only bytes count, and count the peak of the plan that this gives, until it is no new one."""
        while self.best is None:
            found = self.solve(self.counted(always, peaks), unit * self.limit * DEAREST[1])
            if found.peak is None or found.peak in peaks:
                return
            peaks.append(found.peak)

    def counted(self, always: Moment, peaks: Sequence[str]) -> Moment:
        """What is always counted, and all that is alive at these calls."""
        moments = [at_call(self.gm, self.calls[name], self.copies, sure=False) for name in peaks]
        return together([always, *moments], [1.0] * (1 + len(moments)))

    def close_in(self, counted: Moment, unit: float) -> None:
        """Solve at one price for what is counted: higher until a plan fits; then at that at which the best plan and the
        smallest of the faster ones, which do not fit, cost the same, until no other takes the place of either."""
        price = unit / 16
        while not self.good() and not self.fits(self.solve(counted, price)):
            price *= 4
            if price > unit * DEAREST[1]:
                return
        before = -1.0
        for _ in range(STEPS):
            fit = self.best
            faster = [found for found in self.plans if fit and not self.fits(found) and found.seconds < fit.seconds]
            sizes = [self.space.bytes_in(found.plan.assignment, counted) for found in faster]
            if self.good() or fit is None or not faster:
                return
            least, over = min(sizes), faster[sizes.index(min(sizes))]
            room = least - self.space.bytes_in(fit.plan.assignment, counted)
            if room <= 0 or (fit.seconds - over.seconds) / room == before:
                return
            before = (fit.seconds - over.seconds) / room
            self.solve(counted, before)

    def prove(self, prices: Sequence[float]) -> Found:
        """The plan at these prices of a byte, by moment; the bound that they give, and a new moment for the plan's peak."""
        counted = together(self.moments, prices)
        found = self.solve(counted)
        bound = self.paid - sum(prices) * self.limit
        if bound >= self.bound:
            self.bound = bound
            self.proof = Relaxed(self.space, counted, sum(prices) * self.limit, self.space.multipliers)
        if found.peak is not None and found.peak not in self.named and len(self.moments) < MOMENTS:
            self.add(found.peak)
        return found

    def solve(self, counted: Moment, price: float = 1.0) -> Found:
        """The plan where every byte that is counted has a price; `paid`: what no plan's seconds and bytes cost less than."""
        assignment, self.paid = self.space.solve(together([counted], [price]))
        found = Found(self.made(assignment), self.space.seconds(assignment))
        if not self.fits(found) and (call := peak_call(found.plan, self.gm)) is not None:
            found.peak = call.name
            self.peaks[call.name] += 1
        self.plans.append(found)
        return found

    def add(self, name: str | None) -> None:
        """Put a price on what is alive during a call."""
        if name is not None:
            self.named[name] = None
            self.moments.append(at_call(self.gm, self.calls[name], self.copies))

    def held(self, found: Found) -> list[float]:
        """What a plan takes at each moment."""
        for moment in self.moments[len(found.held) :]:
            found.held.append(self.space.bytes_in(found.plan.assignment, moment) / self.limit)
        return found.held

    def mix(self) -> None:
        """Take the choices of faster plans, which do not fit, for parts of the model while the limit allows."""
        budget = max(8, TRIED // len(self.gm.graph.nodes))
        best = self.best
        assert best is not None
        faster = [found for found in self.plans if not self.fits(found) and found.seconds < best.seconds]
        for fast in sorted(faster, key=lambda found: found.bytes)[:2]:
            for names in self.pieces:
                tried = self.space.mixed(names, fast.plan.assignment, best.plan.assignment)
                seconds = self.space.seconds(tried)
                if seconds >= best.seconds * (1 - 1e-9):
                    continue
                if any(self.space.bytes_in(tried, moment) > self.limit for moment in self.moments):
                    continue
                if budget == 0:
                    return
                budget -= 1
                found = Found(self.made(tried), seconds)
                self.plans.append(found)
                best = found if self.fits(found) else best

    @cached_property
    def pieces(self) -> list[dict[str, None]]:
        """Names of nodes that change together: halves of the model's blocks in order, quarters, ..., each block; then the
        same of modules."""
        names = {node: port.name for port, node in placeholders(self.gm).items()}
        blocks: dict[Sequence[str], dict[str, None]] = {}
        modules: dict[Sequence[str], dict[str, None]] = {}
        for node in self.gm.graph.nodes:
            path = names[node].split(".")[:-1] if node in names else node.meta.get("module", "").split(".")
            number = next((place for place, part in enumerate(path) if part.isdigit()), len(path))
            blocks.setdefault(tuple(path[: number + 1]), {})[node.name] = None
            modules.setdefault(tuple(path), {})[node.name] = None
        found: list[dict[str, None]] = []
        for each in (list(blocks.values()), list(modules.values()) if len(modules) <= FEW else []):
            width = len(each)
            while width > 1:
                width = (width + 1) // 2
                found += [dict(ChainMap(*each[start : start + width])) for start in range(0, len(each), width)]
        return found

    def certifier(self, assignment: Assignment) -> Callable[[float, float], float]:
        """The function of a plan's seconds and of CPU seconds that gives a tighter bound, at the prices of the best one."""
        space, counted, allowed = self.space, self.proof.counted, self.proof.allowed
        paid = space.seconds(assignment) + space.bytes_in(assignment, counted)
        return lambda _, seconds: space.certify(paid, seconds, counted) - allowed


def shortage(plan: Plan, limit: float) -> str:
    """What is missing for a plan to fit, and the three tensors that hold most at its peak."""
    memory = plan.cost.memory
    sizes: Counter[str] = Counter()
    for node, size in Life.of(plan.boxed, plan.mesh).at_peak():
        sizes[node.name] += size
    most = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
    held = ", ".join(f"%{name} {sizes[name]:,}" for name in most)
    parts = ", ".join(f"{kind} {size:,}" for kind, size in memory.items() if kind != "total")
    over = f"{memory['total'] - int(limit):,} more than the limit of {int(limit):,}"
    return (
        f"the step needs at least {memory['total']:,} bytes a rank, {over}\n"
        f"  of which {parts}; the largest tensors: {held}\n"
        "  Give more memory, more ranks or a smaller batch."
    )
