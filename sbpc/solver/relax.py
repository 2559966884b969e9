"""Relaxations of the layout problem: what multipliers, prices of limits and labels the program has without integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from sbpc.solver.exact import Answer, Program, Rows, Tap, build, chosen, highs, limited, pay, tap, unit_of
from sbpc.solver.network import Space, slots
from sbpc.solver.problem import Limit, Problem, total

AMID = 1e-7  # relative: so near to the best ones the multipliers of a relaxation are
PIVOTS = 10  # most steps of the simplex method on the relaxation, times its rows
INTEGRAL = 1e-7  # what is nearer to 0 or 1 than that is taken for it
EXACT = 1e-7  # by so much at most the labels cost more than the relaxation says
MUCH = 1e4  # how many times a limit can be had beyond it


@dataclass(frozen=True, eq=False)
class Duals:
    """What the relaxation says: a bound in seconds; by value and port (its producer's first) the layouts there and what is
    paid in each; by value its aliases, and if it has more than two consumers, what each is charged [aliases, its layouts]."""

    bound: float
    aliases: list[np.ndarray | None]
    ports: list[list[tuple[np.ndarray, np.ndarray]]]
    charges: list[list[np.ndarray]]


def duals(problem: Problem, space: Space, scale: float, most: int) -> Duals | None:
    """The multipliers of the relaxation on `space`; None with more columns than `most`, or without a plan.

    The interior point method ends amid all best multipliers, the simplex method at a corner; from the middle they also suit
    labels that are not in the space. Some that are not the best are multipliers too: who uses them computes the bound anew.
    """
    program = Program(plain=True)
    x = [program.choose(v.costs[labels]) for v, labels in zip(problem.variables, space.labels)]
    taps, rows = list[list[Tap]](), list[Rows]()
    for value, alias in zip(problem.values, space.aliases):
        ports = [(value.producer, value.out), *slots(value)]
        taps.append([tap(x[at], layouts[space.labels[at]]) for at, layouts in ports])
        rows.append(pay(program, value, taps[-1][0], taps[-1][1:], alias))
        if program.columns > most:
            return None
    unit = unit_of(scale)
    model = highs(program, 0, unit)
    for option, setting in (("solver", "ipm"), ("run_crossover", "off"), ("ipm_optimality_tolerance", AMID)):
        model.setOptionValue(option, setting)
    model.run()
    found = np.array(model.getSolution().row_dual)
    if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible or len(found) != program.rows or not np.isfinite(found).all():
        return None
    paid = np.append(found * unit, 0.0)  # what has no row is charged nothing
    return Duals(
        model.getInfo().objective_function_value * unit,
        space.aliases,
        [[(port.layouts, paid[at]) for port, at in zip(ports, found.ends)] for ports, found in zip(taps, rows)],
        [[np.maximum(paid[charged], 0.0) for charged in found.charged] for found in rows],
    )


def relaxed(problem: Problem, space: Space, scale: float, most: int) -> Answer | None:
    """The cheapest labels on `space`, if the relaxation alone tells them; None if not, or with more columns than `most`.

    It takes a fifth of the time of the whole program, and mostly nothing is left to do; presolve takes longer than it saves.
    scale: see `cheapest`.
    """
    program, x = build(problem, space)
    if np.isinf(program.constant):
        return Answer(None, np.inf, True)
    if program.columns > most:
        return None
    unit = unit_of(scale)
    model = highs(program, 0, unit)
    for option, setting in (("presolve", "off"), ("simplex_iteration_limit", PIVOTS * program.rows)):
        model.setOptionValue(option, setting)
    model.run()
    status, point = model.getModelStatus(), np.array(model.getSolution().col_value)
    if status == highspy.HighsModelStatus.kInfeasible:
        return Answer(None, np.inf, True)
    if status != highspy.HighsModelStatus.kOptimal or any(point[columns].max() < 1 - INTEGRAL for columns in x):
        return None
    bound = model.getInfo().objective_function_value * unit + program.constant
    labels = chosen(point, x, space)
    return Answer(labels, bound, True) if total(problem, labels) <= bound + EXACT * abs(bound) else None


def priced(
    problem: Problem, space: Space, scale: float, limits: Sequence[Limit], dearest: float
) -> tuple[float, list[float], list[np.ndarray]]:
    """The relaxation under limits on `space`: seconds; what more of each limit would save, seconds for all of it; by variable
    the labels that it takes.

    dearest: seconds at which as much again as a limit can be had. Infinite seconds and all labels if there is no plan at all.
    """
    program, x = build(problem, space)
    rows = limited(program, x, space, limits)
    program.add(rows, program.add_columns(np.full(len(rows), MUCH * dearest)), -MUCH)
    unit = unit_of(scale)
    model = highs(program, 0, unit)
    model.run()
    if np.isinf(program.constant) or model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return np.inf, [0.0] * len(limits), list(space.labels)
    solution = model.getSolution()
    point, prices = np.array(solution.col_value), -np.array(solution.row_dual)[rows] * unit
    used = [labels[point[columns] > INTEGRAL] for labels, columns in zip(space.labels, x)]
    return model.getInfo().objective_function_value * unit + program.constant, np.maximum(prices, 0.0).tolist(), used
