"""Solves programs with HiGHS: the cheapest plan on a subset of labels, and the LP relaxation with prices of limits.

HiGHS is set to be the same in every run: one thread, one seed, and limits on its work that count steps instead of
seconds.
"""

from __future__ import annotations

import math
import signal
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from sbpc.solver.problem import Array, Limit, Problem, total
from sbpc.solver.program import Program, add_limits, build
from sbpc.solver.subsets import Subset

UNIT = 1e-5  # of the scale: HiGHS counts in this unit, as its tolerances are 1e-9 to 1e-6
BOXING_COST = 1e-10  # of the scale
TICKS = 10, 3e9  # interrupts after which HiGHS is stopped: at least, and times the square of the columns
PIVOTS = 2  # simplex steps per row after which a relaxation is given up; it mostly takes half as many as rows
EXCESS = 1e4  # how many times a limit can be bought in a relaxation
INTEGRAL = 1e-7  # what is nearer to 0 or 1 counts as integral; also the relative rounding error of an LP's seconds
ROUGH = 0.02  # a gap that is worth four times the ticks, or another program


@dataclass(frozen=True)
class Answer:
    """What a program gave: labels, or None; a lower bound of the plans on the subset; whether nothing there is
    cheaper."""

    labels: list[int] | None
    bound: float
    proved: bool


@dataclass(frozen=True)
class Relaxed:
    """The LP relaxation.

    prices: by limit, seconds that as much again of it would save. fractions: by variable and label, 0 to 1. Seconds
    are infinite and all fractions 1 if there is no plan or the relaxation was given up.
    """

    seconds: float
    prices: list[float]
    fractions: list[Array]


def cheapest(problem: Problem, subset: Subset, scale: float, gap: float = 0.0, limits: Sequence[Limit] = ()) -> Answer:
    """Returns the cheapest labels on `subset`, or some within the relative `gap`.

    scale: about what plans cost, in seconds. Limits know nothing of the copies that a boxing makes, so under limits
    the plan with fewer free boxings wins a tie.
    """
    program = build(problem, subset, BOXING_COST * scale if limits else 0.0)
    if np.isinf(program.constant):
        return Answer(None, np.inf, True)
    if limits:
        add_limits(program, limits)
        return by_branching(program, scale, gap)
    return by_relaxation(program, scale, gap) or by_branching(program, scale, gap)


def by_relaxation(program: Program, scale: float, gap: float) -> Answer | None:
    """Returns what the relaxation alone tells: a plan if it is integral or rounds to one within the gap; else None."""
    point, seconds, _ = solve_lp(program, scale)
    if point is None:
        return Answer(None, np.inf, True) if np.isinf(seconds) else None
    integral = all(point[columns].max() >= 1 - INTEGRAL for columns in program.x)
    if not integral and not gap:
        return None
    labels = chosen(point, program)
    above = total(program.problem, labels) - seconds
    rounding = INTEGRAL * abs(seconds)
    return Answer(labels, seconds, above <= rounding) if above <= max(gap * abs(seconds), rounding) else None


def by_branching(program: Program, scale: float, gap: float) -> Answer:
    """Returns what branch and bound gives until it is optimal, within the gap, or out of ticks."""
    unit = unit_of(scale)
    model = model_of(program, sum(map(len, program.x)), unit)
    model.setOptionValue("mip_rel_gap", gap)
    stop_by_ticks(model, max(TICKS[0], TICKS[1] / program.columns**2))
    model.run()
    status, info = model.getModelStatus(), model.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Answer(None, np.inf, True)
    bound = info.mip_dual_bound * unit + program.constant
    bound -= program.boxing_cost * sum(1 + len(value.consumers) for value in program.problem.values)
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return Answer(None, bound, False)
    labels = chosen(np.array(model.getSolution().col_value), program)
    return Answer(labels, bound, status == highspy.HighsModelStatus.kOptimal and gap == 0)


def relax(
    problem: Problem, subset: Subset, scale: float, limits: Sequence[Limit] = (), dearest: float = np.inf
) -> Relaxed:
    """Returns the LP relaxation on `subset`. dearest: seconds at which as much again as a limit can be bought."""
    program = build(problem, subset)
    rows = add_limits(program, limits)
    if limits and math.isfinite(dearest):
        program.add(rows, program.add_columns(np.full(len(rows), EXCESS * dearest)), -EXCESS)
    point, seconds, duals = (None, np.inf, None) if np.isinf(program.constant) else solve_lp(program, scale)
    if point is None or duals is None:
        return Relaxed(np.inf, [0.0] * len(limits), [np.ones(len(labels)) for labels in subset.labels])
    prices = np.maximum(-duals[rows], 0.0).tolist()
    return Relaxed(seconds, prices, [point[columns] for columns in program.x])


def support(subset: Subset, relaxed: Relaxed) -> list[Array]:
    """Returns, by variable, the labels whose fraction in the relaxation is not 0."""
    return [labels[fractions > INTEGRAL] for labels, fractions in zip(subset.labels, relaxed.fractions)]


def solve_lp(program: Program, scale: float) -> tuple[Array | None, float, Array | None]:
    """Returns an optimal vertex, its seconds and the rows' duals in seconds; (None, inf, None) if infeasible, (None,
    0, None) if it takes too many steps. Presolve and interior points take longer than they save here."""
    unit = unit_of(scale)
    model = model_of(program, 0, unit)
    model.setOptionValue("presolve", "off")
    model.setOptionValue("simplex_iteration_limit", PIVOTS * program.rows)
    model.run()
    status = model.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        return None, np.inf if status == highspy.HighsModelStatus.kInfeasible else 0.0, None
    solution = model.getSolution()
    seconds = model.getInfo().objective_function_value * unit + program.constant
    return np.array(solution.col_value), seconds, np.array(solution.row_dual) * unit


def unit_of(scale: float) -> float:
    """Returns the seconds in which a program counts."""
    return UNIT * scale if scale > 0 else 1.0


def chosen(point: Array, program: Program) -> list[int]:
    """Returns the labels of a point."""
    return [int(labels[point[columns].argmax()]) for columns, labels in zip(program.x, program.subset.labels)]


def stop_by_ticks(model: Quiet, ticks: float) -> None:
    """Ends the run when HiGHS has asked so many times whether to go on: a measure of work that is the same in every
    run."""
    asked, seen = 0, weakref.proxy(model)

    def interrupt(event: Any) -> None:
        nonlocal asked
        asked += 1
        allowed = 4 * ticks if event.data_out.mip_gap > ROUGH else ticks
        event.data_in.user_interrupt = seen.stopped or asked > allowed

    model.cbMipInterrupt.subscribe(interrupt)


def model_of(program: Program, integral: int, unit: float) -> Quiet:
    """Returns HiGHS with the program, its first `integral` columns integral, costs counted in `unit` seconds."""
    rows, columns, entries = (np.concatenate(parts) for parts in zip(*program.entries))
    by_column = np.lexsort((rows, columns))
    costs = np.concatenate(program.costs)
    for at, more in program.column_costs:
        costs[at] += more
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = program.columns, program.rows
    lp.col_cost_ = np.where(np.isfinite(costs), costs, 0.0) / unit
    lp.col_lower_ = np.zeros(program.columns)
    lp.col_upper_ = np.where(np.isfinite(costs), 1.0, 0.0)
    lp.row_lower_, lp.row_upper_ = np.concatenate(program.lower), np.concatenate(program.upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(columns[by_column], np.arange(program.columns + 1)).astype(np.int32)
    lp.a_matrix_.index_ = rows[by_column].astype(np.int32)
    lp.a_matrix_.value_ = entries[by_column]
    whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    lp.integrality_ = [whole] * integral + [real] * (program.columns - integral)
    model = Quiet()
    for option, setting in (
        ("parallel", "off"),
        ("random_seed", 0),
        ("mip_abs_gap", 1e-6),
        ("mip_feasibility_tolerance", 1e-9),
        ("mip_heuristic_run_rins", False),
        ("mip_heuristic_run_rens", False),  # a third of the time, mostly for nothing
    ):
        model.setOptionValue(option, setting)
    model.passModel(lp)
    return model


class Quiet(highspy.Highs):
    """HiGHS without its banner, on one thread, and with Ctrl-C.

    An exception that is raised while HiGHS runs is lost in it. So SIGINT is noted in `stopped`, callbacks that look
    at it end the run, and the signal is handled after the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setOptionValue("output_flag", False)
        self.setOptionValue("threads", 1)
        self.stopped = False

    def enableCallbacks(self) -> None:
        """Does what HiGHS does first when a model is made; from version 1.16 on it prints its banner there."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()

    def run(self) -> highspy.HighsStatus:
        """Solves the model. Raises what the handler of SIGINT raises."""
        self.stopped = False  # a handler may have let the last run go on
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if main else None
        if not callable(handler):
            return super().run()
        signal.signal(signal.SIGINT, self.stop)
        try:
            status = super().run()
        finally:
            signal.signal(signal.SIGINT, handler)
        if self.stopped:
            handler(signal.SIGINT, None)
        return status

    def stop(self, *_: Any) -> None:
        """Notes the signal: the handler while HiGHS runs."""
        self.stopped = True
