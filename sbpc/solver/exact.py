"""The layout problem as a mixed-integer program, solved by HiGHS: exact on the true objective, shared boxings included.

Per variable x[label] in {0, 1}. Per value with one consumer a flow from made to wanted layouts; else a flow from made
layouts to alias layouts z, per consumer a flow from z to wanted layouts, and per (alias, wanted layout) a payment that
is at least the flow of each consumer. With x integral an optimal vertex has one alias, so only x need be integral.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import highspy
import numpy as np

from sbpc.solver.problem import Problem, Value
from sbpc.solver.trws import Space, slots

SCALE = 1e5  # the program counts in 1/SCALE of the cost of the best known plan; HiGHS' tolerances are 1e-7 to 1e-6


@dataclass(eq=False)
class Program:
    """Columns with costs and bounds, rows with equal or least right-hand sides, and the entries of the matrix."""

    costs: list[np.ndarray] = field(default_factory=list)
    columns: int = 0
    rows: int = 0
    lower: list[np.ndarray] = field(default_factory=list)
    upper: list[np.ndarray] = field(default_factory=list)
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def add_columns(self, costs: np.ndarray) -> np.ndarray:
        """New columns of these costs; their numbers, in the shape of `costs`."""
        self.costs.append(costs.ravel())
        self.columns += costs.size
        return np.arange(self.columns - costs.size, self.columns).reshape(costs.shape)

    def add_rows(self, count: int, least: float, most: float) -> np.ndarray:
        """New rows, empty; their numbers."""
        self.lower.append(np.full(count, least))
        self.upper.append(np.full(count, most))
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def add(self, rows: np.ndarray, columns: np.ndarray, entry: float) -> None:
        """Put `entry` at rows x columns, broadcast against each other."""
        at, columns = np.broadcast_arrays(rows, columns)
        self.entries.append((at.ravel(), columns.ravel(), np.full(at.size, entry)))


@dataclass(frozen=True)
class Answer:
    """What the program found: labels (None if there are none or the limit came first) and a bound in seconds."""

    labels: list[int] | None
    bound: float
    proved: bool


def flows(program: Program, x: list[np.ndarray], space: Space, value: Value, alias: np.ndarray | None) -> None:
    """Add the columns and rows of one value."""
    out = x[value.producer], value.out[space.labels[value.producer]]
    wanted = [(x[at], wants[space.labels[at]]) for at, wants in slots(value)]
    if alias is None:
        for port in wanted:
            flow(program, value, out, port, True)
        return
    z = program.add_columns(np.zeros(len(alias)))
    flow(program, value, out, (z, alias), True)
    branches = [flow(program, value, (z, alias), port, len(wanted) == 2) for port in wanted]
    if len(wanted) == 2:  # with two, both want one layout only where that layout is the best alias: nothing to share
        return
    layouts = np.unique(np.concatenate([layouts for layouts, _ in branches]))
    seconds = value.closure[np.ix_(alias, layouts)]
    paid = program.add_columns(np.where(np.isfinite(seconds), seconds, 0.0))
    for found, columns in branches:
        which = np.searchsorted(layouts, found)
        at, to = np.nonzero(columns >= 0)
        price = seconds[at, which[to]]
        at, to = at[price > 0], to[price > 0]
        rows = program.add_rows(len(at), 0.0, np.inf)
        program.add(rows, paid[at, which[to]], 1.0)
        program.add(rows, columns[at, to], -1.0)


def flow(
    program: Program, value: Value, tail: tuple[np.ndarray, np.ndarray], head: tuple[np.ndarray, np.ndarray], pay: bool
) -> tuple[np.ndarray, np.ndarray]:
    """A flow between two ports (columns, layouts); the layouts of the head, and the columns [tail, head] (-1: none)."""
    rows, at_tail = np.unique(tail[1], return_inverse=True)
    layouts, at_head = np.unique(head[1], return_inverse=True)
    seconds = value.closure[np.ix_(rows, layouts)]
    possible = np.isfinite(seconds)
    columns = np.full(seconds.shape, -1)
    columns[possible] = program.add_columns(seconds[possible] if pay else np.zeros(int(possible.sum())))
    at, to = np.nonzero(possible)
    for names, count, which, side in ((tail[0], len(rows), at_tail, at), (head[0], len(layouts), at_head, to)):
        balance = program.add_rows(count, 0.0, 0.0)
        program.add(balance[side], columns[at, to], 1.0)
        program.add(balance[which], names, -1.0)
    return layouts, columns


def build(problem: Problem, space: Space) -> tuple[Program, list[np.ndarray]]:
    """The program of the problem on `space`, and the columns of the labels of each variable."""
    program = Program()
    x = [program.add_columns(v.costs[labels]) for v, labels in zip(problem.variables, space.labels)]
    for columns in x:
        program.add(program.add_rows(1, 1.0, 1.0), columns, 1.0)
    for value, alias in zip(problem.values, space.aliases):
        flows(program, x, space, value, alias)
    return program, x


def cheapest(problem: Problem, space: Space, scale: float, nodes: int = 10_000, relaxed: bool = False) -> Answer:
    """The cheapest labels on `space`; `scale`: seconds of a known plan; `relaxed`: only the bound of the LP."""
    program, x = build(problem, space)
    unit = scale / SCALE
    model = highs(program, 0 if relaxed else sum(map(len, x)), unit)
    model.setOptionValue("mip_max_nodes", nodes)
    model.run()
    status, info = model.getModelStatus(), model.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Answer(None, np.inf, True)
    done = status == highspy.HighsModelStatus.kOptimal
    if relaxed:
        return Answer(None, info.objective_function_value * unit if done else -np.inf, False)
    bound = info.mip_dual_bound * unit
    if info.primal_solution_status != 2:  # no feasible point
        return Answer(None, bound, False)
    point = np.array(model.getSolution().col_value)
    labels = [int(labels[point[columns].argmax()]) for columns, labels in zip(x, space.labels)]
    return Answer(labels, bound, done)


def highs(program: Program, integral: int, unit: float) -> highspy.Highs:
    """HiGHS with the program, its first `integral` columns integral, costs in `unit` seconds, set to be repeatable."""
    rows, columns, entries = (np.concatenate(parts) for parts in zip(*program.entries))
    by_column = np.lexsort((rows, columns))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = program.columns, program.rows
    lp.col_cost_ = np.concatenate(program.costs) / unit
    lp.col_lower_ = np.zeros(program.columns)
    lp.col_upper_ = np.full(program.columns, np.inf)
    lp.row_lower_, lp.row_upper_ = np.concatenate(program.lower), np.concatenate(program.upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(columns[by_column], np.arange(program.columns + 1)).astype(np.int32)
    lp.a_matrix_.index_ = rows[by_column].astype(np.int32)
    lp.a_matrix_.value_ = entries[by_column]
    if integral:
        kinds = [highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous]
        lp.integrality_ = [kinds[at >= integral] for at in range(program.columns)]
    model = highspy.Highs()
    for option, setting in (
        ("output_flag", False), ("threads", 1), ("parallel", "off"), ("random_seed", 0),
        ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-6), ("mip_feasibility_tolerance", 1e-9),
    ):  # fmt: skip
        model.setOptionValue(option, setting)
    model.passModel(lp)
    return model
