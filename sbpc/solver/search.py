"""Solves a layout problem: a lower bound from messages, then better plans and bounds in turn until the gap is small."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from sbpc.solver.bounder import STALLED, Bounder, blocks, folded_messages, is_wide, messages_of, raised
from sbpc.solver.fold import fold
from sbpc.solver.highs import cheapest, relax, support
from sbpc.solver.messages.trws import Messages, big_m
from sbpc.solver.problem import Labels, Problem, Proof, Solution, gap_of, total, validate, with_ports
from sbpc.solver.program import columns_of
from sbpc.solver.subsets import around, least_reduced
from sbpc.solver.surroundings import Surroundings

progress = logging.getLogger("sbpc.progress")
PLAN_GAP = 7e-3  # above it a restricted program looks for a better plan
BOUND_GAP = {False: 1e-2, True: 3e-2}  # above it finer classes raise the bound; by whether the problem is wide
EACH, OWN = 8, 2  # labels a variable of a restricted program: by reduced costs; by each of two more orders
# as STALLED, for messages of a wide problem of which a plan is asked alone: the same plans in half the sweeps
ENOUGH = 4e-3
FEW_AXES = 3  # on more, messages of the blocks first take longer than they save
COLUMNS = 20_000  # of a program of all labels below the gap, at most: it takes some two seconds
NEAR_ENOUGH = 3e-4  # the gap to which a restricted program is solved


class Search:
    """The best plan so far and the best bound.

    classes: variables of one class take one label, so a plan has the same seconds in the folded problem. labels: by
    class. unfolded_labels: by variable, if a plan in which members of a class differ is better. proved: no plan
    costs less.
    """

    def __init__(self, problem: Problem, classes: Sequence[int]):
        self.problem, self.folded = problem, fold(problem, classes)
        self.surroundings = Surroundings(self.folded.problem)
        self.labels, self.seconds = (
            [0] * len(self.folded.sizes),
            total(self.folded.problem, [0] * len(self.folded.sizes)),
        )
        self.unfolded_labels: list[int] | None = None
        self.bound, self.proof = 0.0, Proof(self.folded.classes)
        self.proved = False

    @property
    def exact(self) -> bool:
        """Whether no plan costs less."""
        return self.proved or self.bound >= self.seconds

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds."""
        return 0.0 if self.exact else gap_of(self.seconds, self.bound)

    def offer(self, labels: Labels) -> None:
        """Takes a plan of the folded problem if it is the best."""
        seconds = total(self.folded.problem, labels)
        if seconds < self.seconds:
            self.labels, self.seconds = list(labels), seconds

    def bounded_by(self, bounder: Bounder) -> None:
        """Takes a bound and its proof if it is the best."""
        if bounder.bound >= self.bound:
            self.bound, self.proof = bounder.bound, bounder.proof

    def log(self, name: str) -> None:
        """Tells what a step gave."""
        progress.debug("assign: %s: %.4g s, gap %.2f %%", name, self.seconds, 100 * self.gap)

    def find_plan(self) -> None:
        """Looks for a plan without a bound of the whole problem."""
        most, stalled = big_m(self.folded.problem), ENOUGH if is_wide(self.problem) else STALLED
        if self.folded.trivial or self.problem.variables[0].digits.shape[1] > FEW_AXES:
            messages = raised(messages_of(self.folded.problem, most), stalled=stalled, planned=True)
        else:
            part = blocks(self.folded)
            messages = raised(messages_of(part.problem, most), stalled=stalled, planned=True)
            messages = folded_messages(self.folded, messages, part.bundles, stalled)
        self.solve_near(messages, [])

    def solve_near(self, messages: Messages, reduced_costs: list[list[np.ndarray]]) -> None:
        """Takes the plan of messages of the folded problem, whose bound is one of plans in which a class has one label,
        and looks for a better one among labels of least reduced cost if that is far. reduced_costs: others to go by
        first."""
        self.offer(messages.decode())
        if gap_of(self.seconds, messages.bound) > PLAN_GAP:
            orders = [*reduced_costs, messages.reduced_costs()]
            given = self.folded.problem, self.labels, orders, self.scale
            self.offer(restricted_program(*given, surroundings=self.surroundings) or self.labels)

    @property
    def scale(self) -> float:
        """About what plans cost."""
        return self.seconds if math.isfinite(self.seconds) else big_m(self.folded.problem)

    def solve_restricted(self, bounder: Bounder) -> None:
        """Looks for a better plan among labels of least reduced cost: by the bound of the blocks, and by that of the
        folded problem, which knows the ends."""
        if self.folded.trivial:
            self.solve_near(bounder.messages, [])
        else:
            messages = folded_messages(self.folded, bounder.messages, bounder.bundles)
            self.solve_near(messages, [bounder.reduced_costs])

    def refined(self, bounder: Bounder, partitions: Sequence[Sequence[int]]) -> Bounder:
        """Looks for a better bound with one partition into classes after the other while the gap is large; returns
        the last bounder."""
        for partition in partitions:
            if self.gap > BOUND_GAP[is_wide(self.problem)]:
                bounder = Bounder(self.problem, fold(self.problem, partition), self.seconds)
                self.bounded_by(bounder)
                self.log(f"messages of {len(bounder.folded.sizes)} classes")
        return bounder

    def below_gap(self, bounder: Bounder) -> None:
        """If only few labels can be in a cheaper plan, solves the program on all of these (reduced-cost fixing). In
        `bounder` every class must have one member."""
        problem, subset = bounder.folded.problem, bounder.below(self.seconds)
        if subset is None:
            self.proved = True  # no plan costs less
            return
        if columns_of(problem, subset) > COLUMNS:
            return
        answer = cheapest(problem, subset, self.scale)
        if answer.labels is not None and total(problem, answer.labels) < self.seconds:
            self.unfolded_labels, self.seconds = answer.labels, total(problem, answer.labels)
        self.proved = answer.proved
        self.bound = max(self.bound, min(answer.bound, self.seconds))

    def solution(self) -> Solution:
        """Returns the best plan, of equally cheap ones that with the fewest boxings, and the bound."""
        if self.unfolded_labels is not None:
            labels = Surroundings(self.problem).tidy(self.unfolded_labels, self.seconds)
        else:
            labels = self.folded.unfold(self.surroundings.tidy(self.labels, self.seconds))
        seconds = total(self.problem, labels)
        bound = seconds if self.exact else min(self.bound, seconds)
        return Solution(labels, seconds, bound, self.exact, self.proof)


def restricted_program(
    problem: Problem,
    plan: Labels,
    reduced_costs: Sequence[Sequence[np.ndarray]],
    scale: float,
    each: int = EACH,
    surroundings: Surroundings | None = None,
) -> list[int] | None:
    """Returns the cheapest plan on some labels: `each` a variable by the first reduced costs, OWN by any others, and
    OWN that cost least around `plan`. surroundings: those of the problem, where they are known."""
    surroundings = surroundings or Surroundings(problem)
    others = [*reduced_costs[1:], [surroundings.costs(at, plan) for at in range(len(plan))]]
    first = [[np.argsort(costs, kind="stable")[:OWN] for costs in order] for order in others]
    subset = around(problem, [plan], least_reduced(reduced_costs[0], each), *first)
    # of these the best plan is mostly made
    some = around(problem, [plan], support(subset, relax(problem, subset, scale)))
    labels = cheapest(problem, some, scale, NEAR_ENOUGH).labels
    return labels and surroundings.tidy(labels, total(problem, labels))


def solve(
    problem: Problem,
    starts: Sequence[Labels] = (),
    classes: Sequence[int] | None = None,
    finer: Sequence[int] | None = None,
    exact: bool = True,
    bounded: bool = True,
) -> Solution:
    """Returns the cheapest plan that was found and a bound of all plans; the same in every run.

    starts: plans to begin from. classes: a number per variable; variables of one number are solved as one. finer:
    classes in which the ends of runs of equal blocks are on their own, for a better bound. Unless `exact` is false,
    these are tried, and the plan is known to be the best one if few labels of the unfolded problem lie below the gap.
    bounded: whether a bound is looked for; without, `starts` are no help.
    """
    validate(problem)
    if not problem.variables:
        return Solution([], 0.0, 0.0, True)
    problem, every = with_ports(problem), range(len(problem.variables))
    search = Search(problem, every if classes is None else classes)
    if not bounded:
        search.find_plan()
        return search.solution()
    bounder = Bounder(problem, search.folded)
    for labels in (bounder.labels, *map(search.folded.fold, starts)):
        search.offer(labels)
    search.bounded_by(bounder)
    search.log("messages")
    if search.gap > PLAN_GAP:
        search.solve_restricted(bounder)
        search.log("program on labels of least reduced cost")
    if exact and not search.folded.trivial:
        bounder = search.refined(bounder, [finer or every] if is_wide(problem) else [finer or every, every])
    if exact and bounder.folded.trivial and search.gap > 0:
        search.below_gap(bounder)
        search.log("program on all labels below the gap")
    return search.solution()
