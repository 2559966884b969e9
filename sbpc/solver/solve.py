"""Solve a layout problem: messages for a bound, a search for labels near it, both bettered in turns until the gap is small."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sbpc.solver.chains import shrink
from sbpc.solver.check import Proof
from sbpc.solver.dual import NONE, Effort, between_ends, passed, prove
from sbpc.solver.fold import fold
from sbpc.solver.moves import Neighbours
from sbpc.solver.problem import SLACK, Problem, Solution, check, total
from sbpc.solver.resume import untied
from sbpc.solver.search import ENOUGH, NEAR, Search
from sbpc.solver.trws import ceiling

NEARLY = 0.9  # the part of the gap that is allowed at which bounds are bettered no more
TURNS = 3  # of messages, at most, for a certificate
TIED = ((7e-3, 9.9e-3), (2e-2, 2.9e-2))  # gaps of folded problems, on at most two axes and on more: above the first the
# search goes on, above the second all is tried
FAR = 5e-2  # a gap with which the bound is bettered before many labels are looked at
FINER = 1.5e-2  # a gap that ends of runs on their own may close; a larger one is left to better plans and bounds first
CLOSE = 5e-3  # of a plan: what smooth messages of the problem in which nothing is tied may add to a bound
FEW = 2_000  # variables, at most, of a problem that is also solved with nothing tied
LABELS = 30_000  # most labels of a folded problem of which everything is tried: more take minutes and gigabytes


def solve(
    problem: Problem,
    starts: Sequence[Sequence[int]] = (),
    alike: Sequence[int] | None = None,
    finer: Sequence[int] | None = None,
    quick: bool = False,
) -> Solution:
    """The cheapest labels that were found, and a bound; `starts` are plans to begin from. The same in every run. Of labels
    that cost the same those with fewer boxings are looked for.

    alike: a number per variable; those with the same number get the same label, but where variables are few and other labels
    are better. finer: the same with the ends of runs of equal blocks on their own, which makes the bound tighter. The bound holds
    for all labels. quick: of a problem with equal variables the labels next to the bound will do.
    """
    check(problem)
    if not problem.variables:
        return Solution([], 0.0, 0.0, True)
    if alike is None or len(set(alike)) == len(alike):
        search = Search(problem, starts)
        found = search.run(quick)
        if found.labels is not search.labels:
            return found
        labels = search.tidied()
        seconds = total(problem, labels)
        return Solution(labels, seconds, seconds if found.exact else min(found.lower_bound, seconds), found.exact)
    return solve_folded(problem, starts, alike, alike if finer is None else finer, quick)


def solve_folded(
    problem: Problem,
    starts: Sequence[Sequence[int]],
    alike: Sequence[int],
    finer: Sequence[int],
    quick: bool,
) -> Solution:
    """Labels for classes, or apart where variables are few; a bound for the whole problem. More is tried only while the gap
    is not small."""
    both = Both(problem, alike, starts)
    both.better(finer if quick and not both.wide else alike)
    if both.gap > ENOUGH and both.tied:
        both.search.approach(both.extra, NEAR)
    if not quick and both.wide:
        both.free()
    elif not quick:
        both.widen(finer)
        if both.gap > both.most and both.tied and len(problem.variables) <= FEW:
            return both.apart(quick)
        if both.gap > both.most:
            both.turn()
        if both.gap > both.most and both.tied:
            both.resume()
    if both.gap > both.most and both.wide:
        both.better(finer)
    if both.gap > both.most and not quick and both.labels <= LABELS:
        if not both.wide:
            both.search.move()
        both.search.run()
    return both.solution(quick)


class Both:
    """The labels and the bound of a folded problem, each of which says where the other can be bettered.

    The labels that the bound is made of are nearly those of the best plan: the program on the nearest ones comes first. On
    at most two axes a small gap is left to the ends of runs; then the relaxation tells which of many labels are worth a look,
    and where that leaves a gap, the bound is bettered: by smooth messages, which also say better which labels are near, and
    then by those of the problem in which nothing is tied. On more axes, where labels are too many, one axis is freed at a
    time, then two.
    """

    def __init__(self, problem: Problem, alike: Sequence[int], starts: Sequence[Sequence[int]]):
        self.problem, self.alike = problem, alike
        self.folded = folded = fold(problem, alike)
        self.small = shrink(folded.problem, ceiling(folded.problem))
        self.search = Search(self.small.problem, [self.small.part(folded.fold(labels)) for labels in starts], first=False)
        self.axes = folded.problem.variables[0].digits.shape[1]
        self.wide = self.axes > 2
        self.enough, self.most = TIED[self.wide]
        self.dual, labels = between_ends(folded, self.search.cap)
        self.search.offer(self.small.part(labels))
        self.tied = max(folded.sizes) > 1
        if not self.tied:
            self.search.own = self.extra
        self.bound, self.proof = 0.0, Proof(folded.classes)

    @property
    def labels(self) -> int:
        """How many there are in the folded problem."""
        return sum(len(v.costs) for v in self.folded.problem.variables)

    @property
    def gap(self) -> float:
        """How far the best plan may be above the bound, as a part of it; about 1 where none is known yet."""
        seconds = self.search.seconds
        if not math.isfinite(seconds):
            return 1.0
        return (seconds - self.bound) / seconds if seconds else 0.0

    @property
    def extra(self) -> list[np.ndarray]:
        """By variable that is left and label, about how far plans with the label are from the bound."""
        return self.small.part(self.dual.extra)

    def better(self, partition: Sequence[int], effort: Effort = NONE) -> None:
        """The bound in which these classes are tied, if it is better."""
        part = self.folded if partition is self.alike else fold(self.problem, partition)
        bound, proof = prove(self.problem, self.dual, part, self.search.cap, effort)
        if bound > self.bound:
            self.bound, self.proof = bound, proof

    def free(self) -> None:
        """Free one axis at a time, then two."""
        if self.gap > self.enough:
            self.search.move()
        for pair in itertools.combinations(range(self.axes), 2):
            if self.gap > self.most:
                self.search.pair(self.extra, pair)
                self.search.move()

    def widen(self, finer: Sequence[int]) -> None:
        """Ends of runs on their own where they may close the gap; then many labels, unless the bound is far."""
        tried = self.gap <= FINER
        if self.most < self.gap and tried:
            self.better(finer)
        if self.most < self.gap <= FAR:
            self.search.widen(self.extra)
        if self.most < self.gap <= FINER and not tried:
            self.better(finer)

    def turn(self) -> None:
        """Better the bound by smooth messages; look again at many labels."""
        aim = self.search.seconds * (1 - NEARLY * self.most)
        self.dual, labels = between_ends(self.folded, self.search.cap, Effort(math.inf), self.dual)
        self.search.offer(self.small.part(labels))
        self.better(self.alike, Effort(aim))
        if self.gap > self.most:
            self.search.widen(self.extra)

    def resume(self) -> None:
        """The bound of the problem in which nothing is tied, from the best one so far on."""
        aim = self.search.seconds * (1 - NEARLY * self.most)
        found = untied(self.problem, self.proof, self.search.cap, aim, math.inf)
        self.bound, self.proof = max((self.bound, self.proof), found, key=lambda pair: pair[0])

    def apart(self, quick: bool) -> Solution:
        """The solution where nothing is tied; its bound or that of this problem, whichever is better."""
        every = range(len(self.problem.variables))
        found = solve_folded(self.problem, [self.solution(quick).labels], every, every, quick)
        return found if found.lower_bound >= self.bound else replace(found, lower_bound=self.bound, proof=self.proof)

    def solution(self, quick: bool) -> Solution:
        """Labels of the whole problem, of plans that cost the same those with fewer boxings unless it is to be quick."""
        labels = self.small.expand(self.search.labels)
        if not quick:
            labels = Neighbours(self.folded.problem).tidied(labels, self.search.seconds)
        found = self.folded.unfold(labels)
        seconds = total(self.problem, found)
        return Solution(found, seconds, min(self.bound, seconds), False, self.proof, self.folded.unfold(self.dual.extra))


def certify(problem: Problem, partitions: Sequence[Sequence[int]], seconds: float, limit: float) -> tuple[float, Proof]:
    """The best bound found within about `limit` CPU seconds, and its proof; partitions: classes of variables, coarse ones
    first. seconds: what a plan takes. Half the time is for equal blocks, the rest for ends of more and more blocks; on at most
    two axes, where all messages have room, for ends of one block and then for all blocks."""
    start = time.process_time()
    coarse = fold(problem, partitions[0])
    wide = problem.variables[0].digits.shape[1] > 2
    steps = [*partitions] if wide else [*partitions[:2], None]
    cap = ceiling(coarse.problem, seconds)
    found, dual = (0.0, Proof(coarse.classes)), None
    for _ in range(TURNS):
        dual, _ = between_ends(coarse, cap, Effort(math.inf, start + limit / 2), dual)
        for at, partition in enumerate(steps):
            left = start + limit - time.process_time()
            if found[0] >= seconds * (1 - SLACK) or (found[0] and left < 0):
                return min(found[0], seconds), found[1]
            effort = Effort(seconds, time.process_time() + left / (len(steps) - at))
            if partition is None:
                better = untied(problem, found[1], cap, seconds, effort.until)
            else:
                better = prove(problem, dual, fold(problem, partition), cap, effort)
            found = max(found, better, key=lambda pair: pair[0])
    return min(found[0], seconds), found[1]


def sharp(problem: Problem, alike: Sequence[int], finer: Sequence[int], seconds: float, aim: float) -> tuple[float, Proof]:
    """A bound that is bettered beyond that of `solve`, and its proof; seconds: of a plan. aim: a bound with which it is enough; to
    come to it from near by, messages of the problem in which nothing is tied are made smooth."""
    folded = fold(problem, alike)
    cap = ceiling(folded.problem, seconds)
    dual, _ = between_ends(folded, cap, Effort(math.inf))
    found = prove(problem, dual, fold(problem, finer), cap, Effort(seconds))
    if problem.variables[0].digits.shape[1] > 2:
        return found
    found = max(found, untied(problem, found[1], cap, seconds), key=lambda pair: pair[0])
    if 0 < aim - found[0] <= CLOSE * seconds:
        found = max(found, untied(problem, found[1], cap, aim, math.inf), key=lambda pair: pair[0])
    return found


def untied_proof(problem: Problem) -> Proof:
    """Multipliers of a problem in which nothing is tied, from messages alone."""
    folded = fold(problem, range(len(problem.variables)))
    return between_ends(folded, ceiling(problem))[0].proof() if problem.variables else Proof([])


def untied_distances(problem: Problem) -> list[np.ndarray]:
    """By variable and label, about how far plans with the label are from a bound, from messages alone; nothing is tied."""
    return passed(problem, ceiling(problem)).extra()
