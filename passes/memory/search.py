"""memory: the fastest plan that can be found under a limit of bytes per rank.

What is alive at a moment of the step is a sum over nodes (see `sbpc.passes.memory.live_bytes`), so the limit at a
moment is a row of weights, and the price of a byte its Lagrange multiplier.

1. Prices: the relaxation on labels of least reduced cost says what the rows are worth. At these prices messages give
   a plan and a bound for all plans under the limit. A moment is added at the plan's peak, and again. Two more plans
   at lower and higher prices.
2. Mixtures: the relaxation on the labels of all plans, equal blocks as one, says which labels to mix. A program on
   these, every block by itself, mixes them.
3. What the new plan holds beyond the limit, exactly counted, becomes rows that are linear about this plan. Again
   from 2, until a plan fits that is about as fast as the relaxation, or no faster than the best one before.
4. While no plan fits, prices rise, and at last all labels of a small problem are mixed. In small problems mixtures
   are made anew with rows about the best plan alone, as long as that finds a better one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import GraphModule

from sbpc.errors import MemoryLimitError
from sbpc.passes.memory.limited_space import LimitedSpace, PricedBound, by_class, shortage
from sbpc.passes.memory.live_bytes import (
    Moment,
    at_optimizer,
    bytes_alive_in_every_plan,
    bytes_at_next_reads,
    calls_of,
    peak_calls,
)
from sbpc.plans.chunk import Assignment
from sbpc.plans.plan import Plan
from sbpc.plans.storages import POSITION
from sbpc.solver import Bounder, Limit, Problem, Proof, certify, checked_bound, priced, total
from sbpc.solver.bounder import is_wide
from sbpc.solver.fold import fold
from sbpc.solver.highs import ROUGH, cheapest, relax, support
from sbpc.solver.problem import gap_of
from sbpc.solver.program import columns_of
from sbpc.solver.search import COLUMNS, restricted_program
from sbpc.solver.subsets import Subset, around, everything, least_reduced

progress = logging.getLogger("sbpc.progress")
GOOD = 3e-3  # the gap with which the search ends
ROUNDS, LADDER = 3, (0.25, 4.0)  # of prices; factors on the best prices for two more plans
TURNS = 6  # of mixtures in a row, and moments that have prices while plans are looked for, at most
ROWS = 4  # calls spread over the step, at which what a plan holds too much becomes rows
DEAREST = 16.0  # steps that all of a limit may cost, at most
EVER_DEARER = 1.0, 8.0, 64.0  # the same, one after the other, while no plan fits
EACH = 4  # labels a class for the relaxation that finds prices, and for the program at them
NEAR_LIMIT = 0.95  # of the limit: calls that hold more become rows
SMALL = 2_000  # variables of a problem that is not folded for the last bound, at most
# of the limit, what a row allows at least; of boxing all values once, what a plan costs if that is a scale for prices
LEAST = 1e-3
Make = Callable[[Assignment], Plan]


@dataclass
class Candidate:
    """A plan that was made: its labels and seconds, and what it holds at calls, most first."""

    plan: Plan
    labels: list[int]
    seconds: float
    held: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """The bytes that the plan takes on a rank."""
        return self.plan.memory["total"]


class MemorySearch:
    """Plans of a graph, and the best bound of those that take no more than `limit` bytes. One search serves several
    limits, one after the other: what it learns under one makes the next one quick.

    Afterwards it is the prover of the plan, see `sbpc.plans.plan.Prover`. room: bytes that the calls may hold at a
    moment. moments: by name of a call, what has a price. pool: labels of all plans, made or not. mixed: by class,
    the labels of mixtures. corrections: by name of a call, the rows about plans. reduced_costs: by class and label,
    the least at any prices.
    """

    def __init__(self, space: LimitedSpace, gm: GraphModule, copies: int, make: Make) -> None:
        self.space, self.gm, self.copies, self.make = space, gm, copies, make
        self.least = space.least
        self.calls = calls_of(gm)
        self.moments: dict[str, Moment] = {"": at_optimizer(gm, copies)}
        self.folded = fold(space.problem, space.classes())
        self.candidates: dict[tuple[int, ...], Candidate] = {}
        self.pool: list[list[int]] = []
        self.mixed = [np.zeros(0, dtype=np.intp) for _ in self.folded.members]
        self.reduced_costs: list[np.ndarray] = []

    @property
    def best(self) -> Candidate | None:
        """The fastest plan under the limit; of equally fast ones that with the fewest bytes."""
        fitting = [each for each in self.candidates.values() if each.bytes <= self.limit]
        return min(fitting, key=lambda each: (float(f"{each.seconds:.9g}"), each.bytes), default=None)

    @property
    def large(self) -> bool:
        """Whether messages on the unfolded problem would take long."""
        return is_wide(self.space.problem) or len(self.space.problem.variables) > SMALL

    @property
    def gap(self) -> float:
        """How far the best plan may be above the bound, as a part of it; 1 if there is none."""
        return 1.0 if self.best is None else gap_of(self.best.seconds, min(self.bound.bound, self.best.seconds))

    def run(self, free: Plan, limit: float) -> None:
        """Looks for prices, then for mixtures of the plans found on the way. Raises MemoryLimitError if no plan is
        found that fits.

        free: a plan that takes more than the limit, and whose lower bound is one of all plans.
        """
        self.limit, self.bound, self.corrections = limit, PricedBound(free.lower_bound), dict[str, Limit]()
        # less what every plan holds at every moment
        self.room = limit - min(POSITION * len(self.space.mesh.axes), limit / 2)
        start = self.keep(self.space.labels(free.assignment))
        if not self.reduced_costs:
            values = self.space.problem.values
            # each of them once
            boxed = math.fsum(float(np.mean(value.closure[np.isfinite(value.closure)])) for value in values)
            # where nothing is sent it is free
            self.scale = start.seconds if start.seconds > LEAST * boxed else boxed or 1.0
            self.bounder = Bounder(self.space.problem, self.folded, 2 * TURNS * EVER_DEARER[-1] * self.scale)
            self.reduced_costs = self.bounder.reduced_costs
            self.add_moments([name for name, node in self.calls.items() if node.meta.get("phase") == "backward"])
        self.add_moments(self.peaks_of(start))
        self.find_plans()
        if self.best is None:
            least = min(self.candidates.values(), key=lambda each: each.bytes).plan
            raise MemoryLimitError(shortage(least, limit, math.isinf(self.bound.bound)), least)

    def find_plans(self) -> None:
        """Looks for prices and mixtures; while nothing fits at ever dearer prices, at last among all labels.
        Polishes small plans."""
        prices = self.find_prices()
        if self.impossible:
            self.squeeze()  # for the error, which tells of the plan that takes least
            return
        for factor in LADDER if any(prices) else ():
            self.bound_at([factor * price for price in prices])
            self.pool.append(self.folded.unfold(self.priced_labels()))
        self.mix(TURNS)
        if self.best is None:
            self.squeeze()
            self.mix(TURNS)
        if self.best is None and columns_of(self.space.problem, everything(self.space.problem)) <= COLUMNS:
            self.below_gap(everything(self.space.problem))
            self.mix(3 * TURNS if math.isfinite(self.bound.bound) else 0, max(map(len, self.reduced_costs)))
        while self.best and not self.large and self.gap > ROUGH and self.polish():
            pass

    # --- prices -------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Limit]:
        """Returns the limit at every moment that has a price."""
        return [Limit(self.space.weights(moment), self.room) for moment in self.moments.values()]

    def find_prices(self) -> list[float]:
        """Solves at the prices of the relaxation, adds a moment at the peak of the plan, and again; returns the last
        prices."""
        prices: list[float] = []
        for _ in range(ROUNDS):
            before, prices = prices, self.lp_prices()
            if prices == before or self.gap <= GOOD:
                break
            self.solve_at(prices)
        return prices

    def lp_prices(self) -> list[float]:
        """Returns what more of each row would save in the relaxation on the labels of all plans and those of least
        reduced cost."""
        plans = list(map(self.folded.fold, self.pool))
        subset = around(self.folded.problem, plans, least_reduced(self.reduced_costs, EACH))
        return relax(
            self.folded.problem, subset, self.scale, by_class(self.folded, self.rows()), DEAREST * self.scale
        ).prices

    def bound_at(self, prices: Sequence[float]) -> None:
        """Takes the bound at these prices, each for all of a row; messages go on from the last prices."""
        rows = self.rows()
        prices = [*prices, *[0.0] * (len(rows) - len(prices))]
        self.bounder.solve(priced(self.space.problem, rows, prices))
        self.reduced_costs = list(map(np.minimum, self.reduced_costs, self.bounder.reduced_costs))
        self.take_bound(PricedBound(self.bounder.bound - math.fsum(prices), rows, prices, self.bounder.proof))

    def solve_at(self, prices: Sequence[float]) -> Candidate:
        """Returns the plan at these prices; takes its bound, and a moment at its peak."""
        self.bound_at(prices)
        candidate = self.keep(self.folded.unfold(self.priced_labels()))
        self.add_moments(self.peaks_of(candidate))
        progress.debug("memory: %.4g s, %.4g bytes", candidate.seconds, candidate.bytes)
        return candidate

    def priced_labels(self) -> list[int]:
        """Returns, by class, the labels of the plan at the last prices."""
        labels, problem = self.bounder.labels, self.bounder.folded.problem
        if gap_of(total(problem, labels), self.bounder.bound) > ROUGH:
            labels = restricted_program(problem, labels, [self.bounder.reduced_costs], self.scale, EACH) or labels
        return labels

    def squeeze(self) -> None:
        """Raises the price of all moments until a plan fits, or none can."""
        for price in EVER_DEARER:
            if self.solve_at([price * self.scale] * len(self.moments)).bytes <= self.limit:
                return
        if self.impossible:
            self.bound = PricedBound(math.inf)

    @property
    def impossible(self) -> bool:
        """Whether at some moment every label takes too much: then no plan fits."""
        return any(sum(float(weights.min()) for weights in row.weights.values()) > row.most for row in self.rows())

    def take_bound(self, bound: PricedBound) -> None:
        """Takes a bound if it is the best."""
        if bound.bound >= self.bound.bound:
            self.bound = bound

    # --- mixtures -----------------------------------------------------------------------------------------------------

    def mix(self, turns: int, more: int = 0, until: float = math.inf) -> None:
        """Mixes the plans so far, and corrects the rows by what mixtures hold, until one fits and is about as fast
        as the relaxation, or no faster than the best plan before.

        more: labels a class that may be mixed besides those of plans. until: CPU time at which no turn is begun.
        """
        base: Candidate | None = None
        for _ in range(turns):
            if time.process_time() > until:
                return
            labels, least = self.mixture(base, more)
            if labels is None:  # no mixture keeps the rows: let it be the best plan, then allow more
                if self.best is None or base is self.best:
                    self.corrections = {
                        n: replace(row, most=(row.most + self.limit) / 2) for n, row in self.corrections.items()
                    }
                base = self.best
                continue
            before = self.best.seconds if self.best else math.inf
            candidate = self.keep(labels)
            if candidate.bytes <= self.limit and (
                candidate.seconds >= before * (1 - GOOD) or candidate.seconds <= least * (1 + GOOD)
            ):
                return
            self.correct(candidate)

    def polish(self, more: int = 0, until: float = math.inf) -> bool:
        """Mixes plans with rows about the best plan alone: those about others may forbid what is better. Returns
        whether that is found."""
        before = self.best
        assert before is not None
        self.corrections = {}
        self.correct(before)
        self.mix(TURNS, more, until)
        return self.best is not before

    def mixture(self, base: Candidate | None, more: int) -> tuple[list[int] | None, float]:
        """Returns the cheapest labels within all rows on the support of the relaxation and those of `base`, None if
        there are none; and the seconds of the relaxation."""
        folded, problem, limits = self.folded, self.space.problem, [*self.rows(), *self.corrections.values()]
        plans = np.array(self.pool, dtype=np.intp)
        labels_of_plans = [np.unique(plans[:, members]) for members in folded.members]
        subset = around(folded.problem, list(map(folded.fold, self.pool)), labels_of_plans)
        relaxed = relax(folded.problem, subset, self.scale, by_class(folded, limits), 100 * self.scale)
        self.mixed = list(map(np.union1d, self.mixed, support(subset, relaxed)))
        allowed = list(map(np.union1d, self.mixed, least_reduced(self.reduced_costs, more))) if more else self.mixed
        by_variable = folded.unfold(allowed)
        if base is not None:
            by_variable = [np.union1d(each, [label]) for each, label in zip(by_variable, base.labels)]
        subset = around(problem, [self.pool[0] if base is None else base.labels], by_variable)
        subset.labels = by_variable  # without those of the plan whose aliases it has
        return cheapest(problem, subset, self.scale, GOOD, limits).labels, relaxed.seconds

    def correct(self, candidate: Candidate) -> None:
        """Adds rows for a plan at its peak, and at the largest of calls spread over the step: linear about what it
        holds there."""
        sizes = peak_calls(candidate.plan, self.gm, NEAR_LIMIT * self.limit)
        if not sizes:
            return
        in_order = [name for name in self.calls if name in sizes]
        chunks = np.array_split(np.array(in_order), min(ROWS, len(sizes)))
        for name in dict.fromkeys([next(iter(sizes)), *(str(max(chunk, key=sizes.__getitem__)) for chunk in chunks)]):
            row = Limit(self.space.weights(self.moment(name, sure=False)), LEAST * self.limit)
            self.corrections[name] = replace(
                row, most=max(row.most, row.used(candidate.labels) - (sizes[name] - self.limit))
            )

    # --- bounds -------------------------------------------------------------------------------------------------------

    def sharpen(self, exact: bool) -> None:
        """Raises the bound at the prices of rows at the best plan's peak, too; if `exact`, in small problems by
        messages on the unfolded problem, and by the program on all labels that can be in a better plan."""
        assert self.best is not None
        if self.gap <= (GOOD if self.large else 0.0):
            return
        for name in list(peak_calls(self.best.plan, self.gm, NEAR_LIMIT * self.limit))[:1]:
            self.moments.setdefault(name, self.moment(name))
        self.bound_at(self.lp_prices())
        if not exact or self.large or self.gap == 0.0:
            return
        _, problem, allowed = self.priced()
        whole = Bounder(problem, fold(problem, range(len(problem.variables))), total(problem, self.best.labels))
        self.take_bound(replace(self.bound, bound=whole.bound - allowed, proof=whole.proof))
        subset = whole.below(self.best.seconds + allowed)
        if subset is not None and columns_of(problem, subset) <= COLUMNS:
            self.below_gap(subset)

    def below_gap(self, subset: Subset) -> None:
        """Solves the program on a subset that holds every better plan, with rows that every plan keeps, until its
        plan fits or breaks no new row: nothing is faster than what it finds."""
        for _ in range(TURNS):
            answer = cheapest(self.space.problem, subset, self.scale, 0.0, self.rows())
            self.bound = replace(
                self.bound, bound=max(self.bound.bound, min(answer.bound, self.best.seconds if self.best else math.inf))
            )
            if answer.labels is None:
                return
            candidate = self.keep(answer.labels)
            new = [name for name in self.peaks_of(candidate)[:ROWS] if name not in self.moments]
            if candidate.bytes <= self.limit or not new:
                return
            self.moments |= {name: self.moment(name) for name in new}

    @property
    def proof(self) -> Proof:
        """The multipliers of the bound."""
        if not self.bound.proof.classes:
            self.bound = replace(self.bound, proof=Bounder(self.priced()[1], self.folded).proof)
        return self.bound.proof

    def priced(self) -> tuple[LimitedSpace, Problem, float]:
        """Returns the space, its problem at the prices of the bound, and what a plan under the limit pays at most."""
        problem = priced(self.space.problem, self.bound.limits, self.bound.prices)
        return self.space, problem, math.fsum(self.bound.prices)

    def check(self, assignment: Assignment, proof: Proof) -> tuple[float, float]:
        """Returns the seconds of an assignment, and the bound that the multipliers and the prices give."""
        space, problem, allowed = self.priced()
        return space.seconds(assignment), checked_bound(problem, proof) - allowed

    def certify(self, plan: Plan, limit: float) -> tuple[Plan | None, float]:
        """Looks for a better plan, then for a better bound, for about `limit` CPU seconds in all; returns both."""
        assert self.best is not None
        start, more, every = time.process_time(), 0, max(map(len, self.reduced_costs))
        while time.process_time() < start + limit / 2:
            if not self.polish(more, start + limit / 2):
                if more == every:
                    break
                more = min(2 * more or 1, every)
        better = None if self.best.labels == self.space.labels(plan.assignment) else self.finished()
        _, problem, allowed = self.priced()
        most = total(problem, self.best.labels)
        bound, proof = certify(problem, self.space.classes(1), most, start + limit - time.process_time())
        self.take_bound(replace(self.bound, bound=bound - allowed, proof=proof))
        return better, min(self.bound.bound, self.best.seconds)

    # --- plans --------------------------------------------------------------------------------------------------------

    def keep(self, labels: Sequence[int]) -> Candidate:
        """Makes the plan of these labels, once, and counts its bytes; drops the graphs of those before it."""
        key = tuple(map(int, labels))
        if key not in self.candidates:
            for other in self.candidates.values():
                other.plan.forget()
            plan = self.make(self.space.assignment(list(key)))
            seconds = total(self.space.problem, key)
            self.pool.append(list(key))
            self.candidates[key] = Candidate(plan, list(key), seconds, peak_calls(plan, self.gm, 0.0))
        return self.candidates[key]

    def peaks_of(self, candidate: Candidate) -> list[str]:
        """Returns the calls at which a plan holds more than the limit, most first."""
        return [name for name, size in candidate.held.items() if size > self.limit]

    def finished(self) -> Plan:
        """Returns the best plan, with its bound and this search as its prover."""
        assert self.best is not None
        # which may differ by rounding
        return replace(self.best.plan, lower_bound=min(self.bound.bound, self.best.seconds), prover=self)

    def add_moments(self, names: Sequence[str]) -> None:
        """Gives a price to what is alive during the first of these calls, unless many moments have prices."""
        if len(self.moments) < TURNS:
            self.moments |= {name: self.moment(name) for name in names[:1] if name not in self.moments}

    def moment(self, name: str, sure: bool = True) -> Moment:
        """Returns what is alive during a call, in every plan if `sure`, else about; counted once."""
        count = bytes_alive_in_every_plan if sure else bytes_at_next_reads
        return self.space.once((count, name, self.copies), lambda: count(self.gm, self.calls[name], self.copies))
