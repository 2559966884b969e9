"""The layout problem as a mixed-integer program, solved by HiGHS: exact on the true objective, shared boxings included.

Per variable x[label] in {0, 1}. Per value with one consumer a flow from made to wanted layouts; else a flow from made
layouts to alias layouts z, per consumer a flow from z to wanted layouts, and per (alias, wanted layout) a payment that
is at least the flow of each consumer. Of more than two consumers each may also take the value as it was made, for
nothing: per (made layout, alias) some of what flows there then flows on to the consumer unpaid. By made layout alone
the program is right too, but its relaxation far weaker: this one is nearly always integral. With x integral an optimal
vertex has one alias, so only x need be integral. Ports with one layout left need no flow: what they pay falls on the
labels, or on the aliases, at the other end. A flow runs straight from layout to layout, or in large relaxations over the boxings
that no others replace (arcs.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np

from sbpc.solver.arcs import Arcs, arcs
from sbpc.solver.network import Space, distinct, slots
from sbpc.solver.problem import Limit, Problem, Value, star_seconds
from sbpc.solver.quiet import Quiet

ASKED = 10, 3e9  # times that HiGHS asks whether to go on, after which it is told not to, at least; the same times the square of
# the columns: a measure of work that is the same in every run
AGAIN = 8  # times
TILT = 1e-10  # of the scale
SCALE = 1e5  # the program counts in 1/SCALE of the cost of the best known plan; HiGHS' tolerances are 1e-9 to 1e-6


@dataclass(eq=False)
class Program:
    """Columns with costs and bounds, rows with least and most values, and the entries of the matrix."""

    costs: list[np.ndarray] = field(default_factory=list)
    columns: int = 0
    rows: int = 0
    lower: list[np.ndarray] = field(default_factory=list)
    upper: list[np.ndarray] = field(default_factory=list)
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    dues: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # more costs of columns
    constant: float = 0.0
    tilt: float = 0.0  # what a boxing costs that costs nothing
    sparse: bool = False  # flows run over arcs
    arcs: dict[tuple[int, bytes], Arcs] = field(default_factory=dict)  # by closure and layouts

    def add_columns(self, costs: np.ndarray) -> np.ndarray:
        """New columns of these costs; their numbers."""
        self.costs.append(costs)
        self.columns += costs.size
        return np.arange(self.columns - costs.size, self.columns)

    def add_rows(self, count: int, least: float, most: float) -> np.ndarray:
        """New rows, empty; their numbers."""
        self.lower.append(np.full(count, least))
        self.upper.append(np.full(count, most))
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def add(self, rows: np.ndarray, columns: np.ndarray, entry: float) -> None:
        """Put `entry` at each of `rows` and `columns`, broadcast against each other."""
        if rows.shape != columns.shape:
            rows, columns = (found.ravel() for found in np.broadcast_arrays(rows, columns))
        self.entries.append((rows, columns, np.full(rows.size, entry)))

    def choose(self, costs: np.ndarray) -> np.ndarray:
        """New columns that sum to 1."""
        columns = self.add_columns(costs)
        self.add(self.add_rows(1, 1.0, 1.0), columns, 1.0)
        return columns


@dataclass(eq=False)
class Tap:
    """A port in the program: columns that sum to 1, its layouts, and which of them each column has."""

    columns: np.ndarray
    layouts: np.ndarray
    at: np.ndarray


@dataclass(eq=False)
class Detours:
    """By column: a value is made in the layout `made` and boxed to another one, at place `alias` among its aliases."""

    columns: np.ndarray
    made: np.ndarray
    alias: np.ndarray


@dataclass(frozen=True)
class Answer:
    """What the program found: labels (None if there are none, or the limit came first), and a bound in seconds."""

    labels: list[int] | None
    bound: float
    proved: bool


def tap(columns: np.ndarray, layouts: np.ndarray) -> Tap:
    """The port of columns that have these layouts."""
    return Tap(columns, *distinct(layouts))


def pay(program: Program, value: Value, out: Tap, heads: list[Tap], alias: np.ndarray | None) -> None:
    """Add the columns and rows of one value."""
    if alias is None:
        for head in heads:
            route(program, value.closure, out, head)
        return
    middle = tap(program.choose(np.zeros(len(alias))), alias)
    if len(heads) == 2 and all(len(head.layouts) > 1 for head in heads):
        for tail, head in ((out, middle), *((middle, head) for head in heads)):
            route(program, value.closure, tail, head)
        return
    first = flow(program, value.closure[np.ix_(out.layouts, alias)], out, middle)
    one = {int(head.layouts[0]) for head in heads if len(head.layouts) == 1}
    if len(heads) > 2:  # what is never taken as it was made
        one -= set(out.layouts.tolist())
    known = np.array(sorted(one), dtype=np.intp)
    program.dues.append((middle.columns, value.closure[np.ix_(alias, known)].sum(1)))
    around = detours(first, out, middle)
    free = [head for head in heads if len(head.layouts) > 1 or int(head.layouts[0]) not in one]
    prices = [value.closure[np.ix_(alias, head.layouts)] for head in free]
    for head, price in zip(free, prices):
        price[:, np.isin(head.layouts, known)] = 0.0  # paid already; an alias that cannot go there has infinite dues
    if len(free) < 2 or len(heads) == 2:  # two never share a boxing: where both want one layout, alias = that layout
        for head, price in zip(free, prices):
            flow(program, price, middle, head, around if len(heads) > 2 else None)
        return
    layouts = np.unique(np.concatenate([head.layouts for head in free]))
    share = np.full((len(alias), len(layouts)), -1)
    for head, price in zip(free, prices):
        found = flow(program, np.where(np.isfinite(price), 0.0, np.inf), middle, head, around)
        at, to = np.nonzero(np.isfinite(price) & (price > 0))
        which = np.searchsorted(layouts, head.layouts)[to]
        new = share[at, which] < 0
        share[at[new], which[new]] = program.add_columns(price[at[new], to[new]])
        charged = program.add_rows(len(at), 0.0, np.inf)
        program.add(charged, share[at, which], 1.0)
        program.add(charged, found[at, to], -1.0)


def detours(columns: np.ndarray, out: Tap, middle: Tap) -> Detours:
    """The detours among the flows from `out` to `middle`, which may have needed no columns of their own."""
    if min(columns.shape) > 1:
        at, to = np.nonzero((columns >= 0) & (out.layouts[:, None] != middle.layouts))
        return Detours(columns[at, to], out.layouts[at], to)
    if len(middle.layouts) == 1:
        kept = out.layouts[out.at] != middle.layouts[0]
        return Detours(out.columns[kept], out.layouts[out.at[kept]], np.zeros(kept.sum(), dtype=np.intp))
    kept = middle.layouts[middle.at] != out.layouts[0]
    return Detours(middle.columns[kept], np.full(kept.sum(), out.layouts[0]), middle.at[kept])


def route(program: Program, closure: np.ndarray, tail: Tap, head: Tap) -> None:
    """A flow between two ports, in a sparse program over arcs where these are fewer than the pairs of layouts."""
    seconds = closure[np.ix_(tail.layouts, head.layouts)]
    if not program.sparse or 1 in seconds.shape:
        flow(program, seconds, tail, head)
        return
    layouts = np.union1d(tail.layouts, head.layouts)
    if (key := (id(closure), layouts.tobytes())) not in program.arcs:
        program.arcs[key] = arcs(closure[np.ix_(layouts, layouts)])
    found = program.arcs[key]
    if len(found.seconds) >= np.isfinite(seconds).sum():
        flow(program, seconds, tail, head)
        return
    rows = program.add_rows(len(layouts), 0.0, 0.0)
    columns = program.add_columns(found.seconds)
    program.add(rows[found.tails], columns, 1.0)
    program.add(rows[found.heads], columns, -1.0)
    program.add(rows[np.searchsorted(layouts, tail.layouts)][tail.at], tail.columns, -1.0)
    program.add(rows[np.searchsorted(layouts, head.layouts)][head.at], head.columns, 1.0)


def flow(program: Program, seconds: np.ndarray, tail: Tap, head: Tap, around: Detours | None = None) -> np.ndarray:
    """A flow of cost `seconds` [tail, head] between two ports; its columns (-1: impossible, or none needed).

    around: detours that the head can leave out, for nothing, where it has the layout in which the value is made.
    """
    columns = np.full(seconds.shape, -1)
    if program.tilt:
        seconds = seconds + program.tilt * ((seconds == 0) & (tail.layouts[:, None] != head.layouts))
    if around is None and 1 in seconds.shape:
        end = head if len(tail.layouts) == 1 else tail
        program.dues.append((end.columns, seconds.ravel()[end.at]))
        return columns
    at, to = np.nonzero(np.isfinite(seconds))
    columns[at, to] = program.add_columns(seconds[at, to])
    ends = [program.add_rows(len(end.layouts), 0.0, 0.0) for end in (tail, head)]
    for end, balance, side in zip((tail, head), ends, (at, to)):
        program.add(balance[side], columns[at, to], 1.0)
        program.add(balance[end.at], end.columns, -1.0)
    if around is not None:
        kept = np.flatnonzero(np.isin(around.made, head.layouts))
        pairs, which = np.unique(np.stack([around.made[kept], around.alias[kept]]), axis=1, return_inverse=True)
        straight = program.add_columns(np.zeros(pairs.shape[1]))
        program.add(ends[0][pairs[1]], straight, 1.0)
        program.add(ends[1][np.searchsorted(head.layouts, pairs[0])], straight, 1.0)
        limit = program.add_rows(pairs.shape[1], -np.inf, 0.0)
        program.add(limit, straight, 1.0)
        program.add(limit[which.reshape(-1)], around.columns[kept], -1.0)
    return columns


def build(problem: Problem, space: Space, tilt: float = 0.0, sparse: bool = False) -> tuple[Program, list[np.ndarray]]:
    """The program of the problem on `space`, and the columns of the labels of each variable. sparse: it may have fewer
    columns, not tilted; of labels that cost the same it finds others."""
    program = Program(tilt=tilt, sparse=sparse)
    x = [program.choose(v.costs[labels]) for v, labels in zip(problem.variables, space.labels)]
    first = [int(labels[0]) for labels in space.labels]
    for value, alias in zip(problem.values, space.aliases):
        ports = [(value.producer, value.out), *slots(value)]
        taps = [tap(x[at], layouts[space.labels[at]]) for at, layouts in ports]
        if all(len(found.layouts) == 1 for found in taps):
            program.constant += star_seconds(value, first)
        else:
            pay(program, value, taps[0], taps[1:], alias)
    return program, x


def columns_of(problem: Problem, space: Space) -> int:
    """How many columns the program on `space` has."""
    return build(problem, space)[0].columns


def limited(program: Program, x: Sequence[np.ndarray], space: Space, limits: Sequence[Limit]) -> np.ndarray:
    """Rows for limits; x: the columns of the labels of each variable."""
    rows = program.add_rows(len(limits), -np.inf, 1.0)
    most = program.upper[-1]  # of these rows
    for at, (row, limit) in enumerate(zip(rows, limits)):
        for number, weights in limit.weights.items():
            part = weights[space.labels[number]] / limit.most
            least = part.min()
            most[at] -= least  # what all labels take
            more = np.flatnonzero(part > least)
            program.entries.append((np.full(len(more), row), x[number][more], part[more] - least))
    return rows


def cheapest(
    problem: Problem,
    space: Space,
    scale: float,
    nodes: int = 10_000,
    gap: float = 0.0,
    limits: Sequence[Limit] = (),
    longer: float = 1.0,
    rough: float = np.inf,
) -> Answer:
    """The cheapest labels on `space`, or some within the relative `gap`; `scale`: about what plans cost, in seconds.

    nodes: of the search tree, at most; as its root alone can take long, HiGHS is also stopped after a measure of work, of
    `longer` times the usual one; only after AGAIN times that while the labels are dearer than the bound by more than the part
    `rough`. Under limits, which know nothing of the copies that a boxing makes, of two plans that cost the same the one with
    fewer boxings for nothing is taken.
    """
    program, x = build(problem, space, TILT * scale if limits else 0.0)
    if np.isinf(program.constant):
        return Answer(None, np.inf, True)
    limited(program, x, space, limits)
    unit = unit_of(scale)
    model = highs(program, sum(map(len, x)), unit)
    model.setOptionValue("mip_max_nodes", nodes)
    model.setOptionValue("mip_rel_gap", gap)
    asked, most, seen = 0, longer * max(ASKED[0], ASKED[1] / program.columns**2), weakref.proxy(model)

    def limit(event: Any) -> None:
        nonlocal asked
        asked += 1
        event.data_in.user_interrupt = seen.stopped or (asked > most and (asked > AGAIN * most or event.data_out.mip_gap <= rough))

    model.cbMipInterrupt.subscribe(limit)
    model.run()
    status, info = model.getModelStatus(), model.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Answer(None, np.inf, True)
    bound = info.mip_dual_bound * unit + program.constant
    bound -= program.tilt * sum(1 + len(value.consumers) for value in problem.values)
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return Answer(None, bound, False)
    labels = chosen(np.array(model.getSolution().col_value), x, space)
    return Answer(labels, bound, status == highspy.HighsModelStatus.kOptimal and gap == 0)


def unit_of(scale: float) -> float:
    """The seconds in which a program counts."""
    return scale / SCALE if scale > 0 else 1.0


def chosen(point: np.ndarray, x: Sequence[np.ndarray], space: Space) -> list[int]:
    """The labels of a point; x: the columns of the labels of each variable."""
    return [int(labels[point[columns].argmax()]) for columns, labels in zip(x, space.labels)]


def highs(program: Program, integral: int, unit: float) -> Quiet:
    """HiGHS with the program, its first columns integral, costs in `unit` seconds, set to be repeatable."""
    rows, columns, entries = (np.concatenate(parts) for parts in zip(*program.entries))
    by_column = np.lexsort((rows, columns))
    costs = np.concatenate(program.costs)
    for at, due in program.dues:
        costs[at] += due
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
        ("parallel", "off"), ("random_seed", 0),
        ("mip_abs_gap", 1e-6), ("mip_feasibility_tolerance", 1e-9),
        ("mip_heuristic_run_rins", False), ("mip_heuristic_run_rens", False),  # a third of the time, mostly for nothing
    ):  # fmt: skip
        model.setOptionValue(option, setting)
    model.passModel(lp)
    return model
