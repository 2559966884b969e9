"""Solve a layout problem: messages for a bound, a search for labels near it, both bettered in turns until the gap is small."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from sbpc.solver.check import Proof
from sbpc.solver.dual import NONE, Effort, between_ends, passed, prove
from sbpc.solver.fold import Folded, fold
from sbpc.solver.problem import SLACK, Problem, Solution, check, total
from sbpc.solver.search import ENOUGH, NEAR, STALLED, Look, Search
from sbpc.solver.trws import ceiling

LOOKS = Look(16, 3), Look(8, 6, 2)  # one after the other, where two axes are free
NEARLY = 0.9  # the part of the gap that is allowed at which bounds are bettered no more
TURNS = 3  # of smooth messages, each from where the one before ended
TIED = ((7e-3, 9.9e-3), (2e-2, 2.9e-2))  # gaps of folded problems, on at most two axes and on more: above the first the
# search goes on, above the second all is tried
FINER = 1.5e-2  # a gap that ends of runs on their own may close; a larger one is left to better plans and bounds first
LABELS = 30_000  # most labels of a folded problem of which everything is tried: more take minutes and gigabytes


def solve(
    problem: Problem,
    starts: Sequence[Sequence[int]] = (),
    alike: Sequence[int] | None = None,
    finer: Sequence[int] | None = None,
    finest: Iterable[Sequence[int]] = (),
    quick: bool = False,
) -> Solution:
    """The cheapest labels that were found, and a bound; `starts` are plans to begin from. The same in every run. Of labels
    that cost the same those with fewer boxings are looked for.

    alike: a number per variable; those with the same number get the same label. finer: the same with the ends of runs of
    equal blocks on their own, which makes the bound tighter; finest: the same with more and more such blocks, the last to be tried
    on at most two axes. The bound holds for all labels. quick: of a problem with equal variables the labels next to the bound will
    do.
    """
    check(problem)
    if not problem.variables:
        return Solution([], 0.0, 0.0, True)
    if alike is None or len(set(alike)) == len(alike):
        search = Search(problem, starts)
        found = search.run()
        return replace(found, labels=search.tidied()) if found.labels is search.labels else found
    return solve_folded(problem, starts, alike, alike if finer is None else finer, finest, quick)


def solve_folded(
    problem: Problem,
    starts: Sequence[Sequence[int]],
    alike: Sequence[int],
    finer: Sequence[int],
    finest: Iterable[Sequence[int]],
    quick: bool,
) -> Solution:
    """Labels for classes, a bound for the whole problem; more is tried only while the gap is not small.

    The labels that the bound is made of are nearly those of the best plan: the program on the nearest ones comes first. On
    at most two axes the relaxation then tells which of many labels are worth a look, and where that leaves a gap, the bound
    is bettered, which also says better which labels are near; ends of runs are proved on their own where that may close it,
    or last, with more and more blocks. On more axes, where labels are too many, one axis is freed at a time, then two.
    """
    folded = fold(problem, alike)
    search = Search(folded.problem, [folded.fold(labels) for labels in starts], first=False)
    axes = folded.problem.variables[0].digits.shape[1]
    wide = axes > 2
    enough, most = TIED[wide]
    dual, labels = between_ends(folded, search.cap)
    search.offer(labels)
    found = 0.0, Proof(folded.classes)

    def gap() -> float:
        if not math.isfinite(search.seconds):
            return 1.0  # no plan is known yet
        return (search.seconds - found[0]) / search.seconds if search.seconds else 0.0

    def better(part: Folded, effort: Effort = NONE) -> None:
        nonlocal found
        found = max(found, prove(problem, dual, part, search.cap, effort), key=lambda pair: pair[0])

    def look(enough: float) -> None:
        for at, least in zip(LOOKS, (enough, most)):
            if gap() > least:
                search.widen(dual.extra, at)

    better(folded if wide or not quick else fold(problem, finer))
    if gap() > ENOUGH:
        search.approach(dual.extra, NEAR)
    if wide and not quick:
        if gap() > enough:
            search.move()
        for pair in itertools.combinations(range(axes), 2):
            if gap() > most:
                search.pair(dual.extra, pair)
                search.move()
    elif not quick:
        apart = most < gap() <= FINER
        if apart:
            better(fold(problem, finer))
        look(enough)
        if most < gap() <= FINER and not apart:
            better(fold(problem, finer))
    if gap() > most and wide:
        better(fold(problem, finer))
    if gap() > most and not wide and not quick:
        for left in reversed(range(TURNS)):
            before, effort = gap(), Effort(search.seconds * (1 - NEARLY * most))
            dual, labels = between_ends(folded, search.cap, Effort(effort.aim + dual.bound - found[0]), dual)
            search.offer(labels)
            better(folded, effort)
            look(most)
            last = not left or gap() > (1 - STALLED) * before
            if most < gap() and (gap() <= FINER or last):
                better(fold(problem, finer), effort)
            if gap() <= most or last:
                break
        if gap() > most:
            search.move()
        for partition in finest:
            if gap() <= most:
                break
            better(fold(problem, partition), effort)
    if gap() > most and not quick and sum(len(v.costs) for v in folded.problem.variables) <= LABELS:
        search.run()
    labels = folded.unfold(search.labels if quick else search.tidied())
    seconds = total(problem, labels)
    return Solution(labels, seconds, min(found[0], seconds), False, found[1], folded.unfold(dual.extra))


def certify(problem: Problem, partitions: Sequence[Sequence[int]], seconds: float, limit: float) -> tuple[float, Proof]:
    """The best bound found within about `limit` CPU seconds, and its proof; partitions: classes of variables, coarse ones
    first. seconds: what a plan takes. Half the time is for equal blocks, the rest for ends of more and more blocks."""
    start = time.process_time()
    coarse = fold(problem, partitions[0])
    cap = ceiling(coarse.problem, seconds)
    found, dual = (0.0, Proof(coarse.classes)), None
    for _ in range(TURNS):
        dual, _ = between_ends(coarse, cap, Effort(math.inf, start + limit / 2), dual)
        for at, partition in enumerate(partitions):
            left = start + limit - time.process_time()
            if found[0] >= seconds * (1 - SLACK) or (found[0] and left < 0):
                return min(found[0], seconds), found[1]
            effort = Effort(seconds, time.process_time() + left / (len(partitions) - at))
            found = max(found, prove(problem, dual, fold(problem, partition), cap, effort), key=lambda pair: pair[0])
    return min(found[0], seconds), found[1]


def sharp(problem: Problem, alike: Sequence[int], finer: Sequence[int], seconds: float) -> tuple[float, Proof]:
    """A bound that is bettered beyond that of `solve`, and its proof; seconds: of a plan."""
    folded = fold(problem, alike)
    cap = ceiling(folded.problem, seconds)
    dual, _ = between_ends(folded, cap, Effort(math.inf))
    return prove(problem, dual, fold(problem, finer), cap, Effort(seconds))


def untied_proof(problem: Problem) -> Proof:
    """Multipliers of a problem in which nothing is tied, from messages alone."""
    folded = fold(problem, range(len(problem.variables)))
    return between_ends(folded, ceiling(problem))[0].proof() if problem.variables else Proof([])


def untied_distances(problem: Problem) -> list[np.ndarray]:
    """By variable and label, about how far plans with the label are from a bound, from messages alone; nothing is tied."""
    return passed(problem, ceiling(problem)).extra()
