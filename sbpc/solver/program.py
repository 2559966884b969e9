"""The layout problem as a mixed-integer program: its columns and rows. Exact on the true objective, stars included.

Every variable has a column x[label] in {0, 1}. A value with one consumer has a flow from the layouts in which it is
made to those that are wanted. A value with several consumers has a column z[alias], a flow from made layouts to
aliases, one flow from aliases to wanted layouts per consumer, and for every (alias, wanted layout) a payment that is
at least the flow of each consumer: an equal boxing is paid once.

        made layouts ==flow==> z[alias] ==flow of consumer 1==> wanted layouts 1
                                  |\\====flow of consumer 2==> wanted layouts 2      payment >= each flow
             \\==straight==============flow of consumer 3==> wanted layouts 3      taken as it was made: free

Of more than two consumers each may also take the value as it was made: for every (made layout, alias), some of what
flows there goes straight on to the consumer, unpaid. This makes the relaxation nearly always integral. If x is
integral, an optimal vertex has one alias, so only x need be integral. A port with one layout needs no flow: its
costs fall on the columns at the other end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.problem import Array, Limit, Problem, Value, star_seconds
from sbpc.solver.subsets import Subset, distinct


@dataclass(eq=False)
class Program:
    """Columns with costs, rows with lower and upper limits, and the entries of the matrix, all still in pieces.

    x: by variable the columns of its labels in the subset. column_costs: costs added to columns later. constant:
    seconds that every plan pays. boxing_cost: seconds added to a boxing that costs nothing, so that of equal plans
    the one with fewer boxings wins.
    """

    problem: Problem
    subset: Subset
    x: list[Array] = field(default_factory=list)
    costs: list[Array] = field(default_factory=list)
    columns: int = 0
    rows: int = 0
    lower: list[Array] = field(default_factory=list)
    upper: list[Array] = field(default_factory=list)
    entries: list[tuple[Array, Array, Array]] = field(default_factory=list)
    column_costs: list[tuple[Array, Array]] = field(default_factory=list)
    constant: float = 0.0
    boxing_cost: float = 0.0

    def add_columns(self, costs: Array) -> Array:
        """Adds columns of these costs; returns their numbers."""
        self.costs.append(costs)
        self.columns += costs.size
        return np.arange(self.columns - costs.size, self.columns)

    def add_rows(self, count: int, least: float, most: float) -> Array:
        """Adds empty rows; returns their numbers."""
        self.lower.append(np.full(count, least))
        self.upper.append(np.full(count, most))
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def add(self, rows: Array, columns: Array, entry: float) -> None:
        """Puts `entry` at each pair of `rows` and `columns`, broadcast against each other."""
        if rows.shape != columns.shape:
            rows, columns = (found.ravel() for found in np.broadcast_arrays(rows, columns))
        self.entries.append((rows, columns, np.full(rows.size, entry)))

    def choose(self, costs: Array) -> Array:
        """Adds columns that sum to 1; returns their numbers."""
        columns = self.add_columns(costs)
        self.add(self.add_rows(1, 1.0, 1.0), columns, 1.0)
        return columns


@dataclass(eq=False)
class PortColumns:
    """The columns at a port, which sum to 1; its layouts; the place of each column's layout among them."""

    columns: Array
    layouts: Array
    at: Array


@dataclass(eq=False)
class Detours:
    """Flows from made layouts to other aliases: their columns, the layout `made`, the place of the alias."""

    columns: Array
    made: Array
    alias: Array


def add_value(program: Program, value: Value, out: PortColumns, heads: list[PortColumns], alias: Array | None) -> None:
    """Adds the columns and rows of one value: of its star, or of one flow if it has no alias."""
    if alias is None:
        for head in heads:
            flow(program, value.closure[np.ix_(out.layouts, head.layouts)], out, head)
        return
    middle = PortColumns(program.choose(np.zeros(len(alias))), alias, np.arange(len(alias)))
    first = flow(program, value.closure[np.ix_(out.layouts, alias)], out, middle)
    prices = [value.closure[np.ix_(alias, head.layouts)] for head in heads]
    if len(heads) <= 2:  # two never share a boxing: if both want one layout, the alias is that layout
        for head, price in zip(heads, prices):
            flow(program, price, middle, head)
        return
    detours = detours_of(first, out, middle)
    layouts = np.unique(np.concatenate([head.layouts for head in heads]))
    payment = np.full((len(alias), len(layouts)), -1)
    for head, price in zip(heads, prices):
        flows = flow(program, np.where(np.isfinite(price), 0.0, np.inf), middle, head, detours)
        at, to = np.nonzero(np.isfinite(price) & (price > 0))
        which = np.searchsorted(layouts, head.layouts)[to]
        new = payment[at, which] < 0
        payment[at[new], which[new]] = program.add_columns(price[at[new], to[new]])
        rows = program.add_rows(len(at), 0.0, np.inf)  # payment >= flow
        program.add(rows, payment[at, which], 1.0)
        program.add(rows, flows[at, to], -1.0)


def detours_of(columns: Array, out: PortColumns, middle: PortColumns) -> Detours:
    """Returns the detours among the flows from `out` to `middle`; a flow without columns of its own has those of an
    end."""
    if min(columns.shape) > 1:
        at, to = np.nonzero((columns >= 0) & (out.layouts[:, None] != middle.layouts))
        return Detours(columns[at, to], out.layouts[at], to)
    if len(middle.layouts) == 1:
        away = out.layouts[out.at] != middle.layouts[0]
        return Detours(out.columns[away], out.layouts[out.at[away]], np.zeros(away.sum(), dtype=np.intp))
    away = middle.layouts[middle.at] != out.layouts[0]
    return Detours(middle.columns[away], np.full(away.sum(), out.layouts[0]), middle.at[away])


def flow(
    program: Program, seconds: Array, tail: PortColumns, head: PortColumns, detours: Detours | None = None
) -> Array:
    """Adds a flow of cost `seconds` [tail, head] between two ports; returns its columns, -1 if impossible or not
    needed.

    detours: what flows there may go straight on to `head`, unpaid, if `head` has the layout in which the value is made.
    """
    columns = np.full(seconds.shape, -1)
    if program.boxing_cost:
        seconds = seconds + program.boxing_cost * ((seconds == 0) & (tail.layouts[:, None] != head.layouts))
    if detours is None and 1 in seconds.shape:
        end = head if len(tail.layouts) == 1 else tail
        program.column_costs.append((end.columns, seconds.ravel()[end.at]))
        return columns
    at, to = np.nonzero(np.isfinite(seconds))
    columns[at, to] = program.add_columns(seconds[at, to])
    balances = [program.add_rows(len(end.layouts), 0.0, 0.0) for end in (tail, head)]
    for end, balance, side in zip((tail, head), balances, (at, to)):
        program.add(balance[side], columns[at, to], 1.0)
        program.add(balance[end.at], end.columns, -1.0)
    if detours is not None:
        add_straight_flows(program, detours, head, balances)
    return columns


def add_straight_flows(program: Program, detours: Detours, head: PortColumns, balances: list[Array]) -> None:
    """Lets `head` take a value as it was made: per (made layout, alias) at most what flows there. balances: rows of
    both ends."""
    usable = np.flatnonzero(np.isin(detours.made, head.layouts))
    pairs, which = np.unique(np.stack([detours.made[usable], detours.alias[usable]]), axis=1, return_inverse=True)
    straight = program.add_columns(np.zeros(pairs.shape[1]))
    program.add(balances[0][pairs[1]], straight, 1.0)
    program.add(balances[1][np.searchsorted(head.layouts, pairs[0])], straight, 1.0)
    rows = program.add_rows(pairs.shape[1], -np.inf, 0.0)
    program.add(rows, straight, 1.0)
    program.add(rows[which.reshape(-1)], detours.columns[usable], -1.0)


def build(problem: Problem, subset: Subset, boxing_cost: float = 0.0) -> Program:
    """Returns the program of the problem on `subset`."""
    program = Program(problem, subset, boxing_cost=boxing_cost)
    program.x = [program.choose(v.costs[labels]) for v, labels in zip(problem.variables, subset.labels)]
    first = [int(labels[0]) for labels in subset.labels]
    for value, alias in zip(problem.values, subset.aliases):
        ports = value.distinct_ends
        if all(len(subset.labels[at]) == 1 for at, _ in ports):  # most values of a program that mixes a few labels
            program.constant += star_seconds(value, first)
            continue
        ends = [PortColumns(program.x[at], *distinct(layouts[subset.labels[at]])) for at, layouts in ports]
        if all(len(end.layouts) == 1 for end in ends):
            program.constant += star_seconds(value, first)
        else:
            add_value(program, value, ends[0], ends[1:], alias)
    return program


def add_limits(program: Program, limits: Sequence[Limit]) -> Array:
    """Adds a row for every limit, scaled to an upper limit of about 1; returns their numbers."""
    rows = program.add_rows(len(limits), -np.inf, 1.0)
    upper = program.upper[-1]  # of these rows
    for at, (row, limit) in enumerate(zip(rows, limits)):
        for number, weights in limit.weights.items():
            part = weights[program.subset.labels[number]] / limit.most
            least = part.min()
            upper[at] -= least  # what every label uses
            more = np.flatnonzero(part > least)
            program.entries.append((np.full(len(more), row), program.x[number][more], part[more] - least))
    return rows


def columns_of(problem: Problem, subset: Subset) -> int:
    """Returns about how many columns `build` makes."""
    count = sum(map(len, subset.labels))
    for value, alias in zip(problem.values, subset.aliases):
        out, *wanted = (len(distinct(layouts[subset.labels[at]])[0]) for at, layouts in value.distinct_ends)
        through = out if alias is None else len(alias)
        count += through * sum(wanted) * (2 if len(wanted) > 2 else 1) + (0 if alias is None else out * through)
    return count
