"""Relaxations of the layout problem: what prices of limits and labels the program has without integers."""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np

from sbpc.solver.exact import Answer, Program, build, chosen, highs, limited, unit_of
from sbpc.solver.network import Space
from sbpc.solver.problem import Limit, Problem, total

PIVOTS = 2  # most steps of the simplex method on the relaxation, times its rows: it mostly takes half as many as there are
INTEGRAL = 1e-7  # what is nearer to 0 or 1 than that is taken for it
EXACT = 1e-7  # labels that cost no more than the relaxation says, but for rounding: the part that is that
MUCH = 1e4  # how many times a limit can be had beyond it


def relaxed(problem: Problem, space: Space, scale: float, most: int, gap: float = 0.0) -> Answer | None:
    """The cheapest labels on `space`, or some within the relative `gap`, if the relaxation alone tells them; None if not, or with
    more columns than `most`.

    It takes a fifth of the time of the whole program, and mostly nothing is left to do. scale: see `cheapest`.
    """
    program, x = build(problem, space)
    if np.isinf(program.constant):
        return Answer(None, np.inf, True)
    point, bound = solved(program, scale, most)
    if np.isinf(bound):
        return Answer(None, np.inf, True)
    if point is None or (not gap and any(point[columns].max() < 1 - INTEGRAL for columns in x)):
        return None
    labels = chosen(point, x, space)
    above = total(problem, labels) - bound
    return Answer(labels, bound, above <= EXACT * abs(bound)) if above <= max(gap, EXACT) * abs(bound) else None


def supported(problem: Problem, space: Space, scale: float, most: int) -> list[np.ndarray] | None:
    """By variable the labels that the relaxation on `space` takes, mostly one; None if there is no plan, or with more
    columns than `most`. scale: see `cheapest`."""
    program, x = build(problem, space, sparse=True)
    point = None if np.isinf(program.constant) else solved(program, scale, most)[0]
    return None if point is None else [labels[point[columns] > INTEGRAL] for labels, columns in zip(space.labels, x)]


def solved(program: Program, scale: float, most: int) -> tuple[np.ndarray | None, float]:
    """A vertex at which the program without integers is cheapest, and its seconds, infinite if there is no plan; None and 0 if
    it has more columns than `most`, or takes too many steps. Presolve takes longer than it saves, and so do interior points."""
    if program.columns > most:
        return None, 0.0
    unit = unit_of(scale)
    model = highs(program, 0, unit)
    for option, setting in (("presolve", "off"), ("simplex_iteration_limit", PIVOTS * program.rows)):
        model.setOptionValue(option, setting)
    model.run()
    status, point = model.getModelStatus(), np.array(model.getSolution().col_value)
    if status == highspy.HighsModelStatus.kInfeasible:
        return None, np.inf
    if status != highspy.HighsModelStatus.kOptimal:
        return None, 0.0
    return point, model.getInfo().objective_function_value * unit + program.constant


def priced(
    problem: Problem, space: Space, scale: float, limits: Sequence[Limit], dearest: float
) -> tuple[float, list[float], list[np.ndarray]]:
    """The relaxation under limits on `space`: seconds; what more of each limit would save, seconds for all of it; by variable
    how much it takes of each label.

    dearest: seconds at which as much again as a limit can be had. Infinite seconds, and of all labels all, if there is no plan.
    """
    program, x = build(problem, space, sparse=True)
    rows = limited(program, x, space, limits)
    program.add(rows, program.add_columns(np.full(len(rows), MUCH * dearest)), -MUCH)
    unit = unit_of(scale)
    model = highs(program, 0, unit)
    model.run()
    if np.isinf(program.constant) or model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return np.inf, [0.0] * len(limits), [np.ones(len(labels)) for labels in space.labels]
    solution = model.getSolution()
    point, prices = np.array(solution.col_value), -np.array(solution.row_dual)[rows] * unit
    parts = [point[columns] for columns in x]
    return model.getInfo().objective_function_value * unit + program.constant, np.maximum(prices, 0.0).tolist(), parts
