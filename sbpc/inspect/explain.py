"""Why a value is laid out as it is: the best whole plans in which it is laid out otherwise, and what costs more
there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sbpc.graph.no_gc import uncollected
from sbpc.inspect.tables import Report, Table, quantity
from sbpc.mesh.layout import Layout
from sbpc.plans.cost import Cost
from sbpc.plans.plan import Plan

FULL = 1  # alternatives whose whole plans are counted in the text, with their memory and what overlaps
CHANGED = 2  # alternatives whose collectives the text lists
CLOSE = 1e-6  # seconds that differ by a smaller fraction are those of the same step
STEP = "a step"
SHOWN = 8  # collectives of an alternative in the text


@dataclass(frozen=True)
class Moved:
    """A collective of one plan that another lacks. module: which reads the value; phase: in which. bytes_sent: by a
    rank."""

    collective: str
    axis: str
    value: str
    module: str
    phase: str
    before: str
    after: str
    bytes_sent: float
    seconds: float


@dataclass(frozen=True)
class Alternative:
    """The best whole plan found in which a value has another layout; it unpacks as layout, seconds, difference.

    seconds: of its step, one thing after the other (bytes, where the plan was made for few bytes). difference: to
    the plan. at_least: the difference that the multipliers of the bound prove for every plan with this layout.
    exact: whether no plan with this layout is faster. appear, gone: collectives that only it has, and that only the
    plan has. computing: by module, seconds more than in the plan.
    """

    layout: Layout
    seconds: float
    difference: float
    at_least: float
    exact: bool
    appear: tuple[Moved, ...]
    gone: tuple[Moved, ...]
    computing: dict[str, float]
    make: Callable[[], Plan] = field(repr=False, compare=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.layout, self.seconds, self.difference))

    @functools.cached_property
    def plan(self) -> Plan:
        """The whole plan."""
        return self.make()

    @property
    def cost(self) -> Cost:
        """What the whole plan costs, its bytes by axis and its memory included."""
        return self.plan.cost


@dataclass(frozen=True)
class Explanation:
    """Why a parameter or a value has its layout; `print` tells it.

    seconds: of a step of the plan, one thing after the other (bytes, where it was made for few bytes). alternatives:
    whole plans with other layouts, best first. beyond: layouts that were not solved again, with the least difference
    that the multipliers prove. decided: what pins, limits and options have to do with it. how: how the alternatives
    were found. time: what takes the seconds.
    """

    name: str
    layout: Layout
    seconds: float
    alternatives: tuple[Alternative, ...]
    beyond: tuple[tuple[Layout, float], ...]
    decided: tuple[str, ...]
    how: str
    plan: Plan = field(repr=False, compare=False)
    time: str = STEP

    @property
    @uncollected()
    def report(self) -> Report:
        """The explanation as tables and lines."""
        unit = "B" if self.plan.options.objective == "bytes" else "s"
        title = f"{self.name} is laid out {self.layout}"
        cost, full = self.plan.cost, FULL if self.time == STEP else 0
        counted = [
            quantity(size, "B") if full else "" for size in (sum(cost.bytes_sent.values()), cost.memory["total"])
        ]
        rows = [[str(self.layout), quantity(self.seconds, unit), "", *counted, "this plan"]]
        rows += [self.row(each, unit, number < full) for number, each in enumerate(self.alternatives)]
        heads = ("layout", self.time, "difference", "bytes sent", "memory", "proof")
        tables = [
            Table("", heads, rows, ("layout", "proof")),
            *(changes(each, unit) for each in self.alternatives[:CHANGED]),
        ]
        beyond = []
        if self.beyond:
            least = min(difference for _, difference in self.beyond)
            beyond = [
                f"beyond    {len(self.beyond)} more layouts cost at least {quantity(max(least, 0.0), unit, sign=True)}"
            ]
        decided = [f"decided   {line}" for line in self.decided]
        above = []
        if self.alternatives:
            runner = self.alternatives[0]
            above = [
                f"it saves {quantity(runner.difference, unit)} {self.time} against {runner.layout}, the best of the "
                "other layouts"
            ]
        if full and not math.isclose(self.seconds, cost.paid, rel_tol=CLOSE):
            taken = [quantity(paid.paid, unit) for paid in (cost, *(each.cost for each in self.alternatives[:FULL]))]
            above.append(
                "seconds are one after the other; where streams overlap, a step takes, from the top, "
                f"{', '.join(taken)}"
            )
        return Report(title, above, tables, [*beyond, *decided, f"how       {self.how}"])

    def row(self, each: Alternative, unit: str, full: bool) -> list[str]:
        """Returns the line of an alternative. full: with the memory of its whole plan, compared with the plan."""
        sure = (
            "exact"
            if each.exact
            else f"at least {quantity(each.at_least, unit, sign=True)}"
            if each.at_least > 0
            else ""
        )
        sent, held = (
            math.fsum(one.bytes_sent for one in each.appear) - math.fsum(one.bytes_sent for one in each.gone),
            "",
        )
        if full:
            cost, mine, limit = each.cost, self.plan.cost, self.plan.options.memory
            held = quantity(cost.memory["total"] - mine.memory["total"], "B", sign=True)
            sure += " over the limit" if limit is not None and cost.memory["total"] > limit else ""
        difference = quantity(each.difference, unit, sign=True)
        moved = quantity(sent, "B", sign=True)
        return [str(each.layout), quantity(each.seconds, unit), difference, moved, held, sure.strip()]

    def as_json(self) -> dict[str, Any]:
        """Returns what `sbpc explain --json` prints."""
        return {
            "name": self.name,
            "layout": str(self.layout),
            "seconds": self.seconds,
            "decided": list(self.decided),
            "how": self.how,
            "alternatives": [
                {
                    "layout": str(each.layout),
                    "seconds": each.seconds,
                    "difference": each.difference,
                    "at_least": each.at_least,
                    "exact": each.exact,
                    "appear": [vars(moved) for moved in each.appear],
                    "gone": [vars(moved) for moved in each.gone],
                    "computing": each.computing,
                }
                for each in self.alternatives
            ],
            "beyond": [{"layout": str(layout), "at_least": difference} for layout, difference in self.beyond],
        }

    def __str__(self) -> str:
        return self.report.text()

    def _repr_html_(self) -> str:
        return self.report.html()


def changes(each: Alternative, unit: str) -> Table:
    """Returns the table of what is paid otherwise in an alternative: collectives that appear and go, and computing
    by module."""
    rows = []
    for sign, moved in (("+", each.appear), ("-", each.gone)):
        for one in moved[:SHOWN]:
            what, where = f"{sign} {one.collective} over {one.axis}", f"{one.module or 'the model'}, {one.phase}"
            signed = one.seconds if sign == "+" else -one.seconds
            paid = quantity(one.bytes_sent if unit == "B" else signed, unit, sign=unit != "B")
            rows.append([what, where, f"{one.before} -> {one.after}", quantity(one.bytes_sent, "B"), paid])
        if len(moved) > SHOWN:
            rest = moved[SHOWN:]
            seconds = sum(one.seconds for one in rest) * (1 if sign == "+" else -1)
            sent = quantity(sum(one.bytes_sent for one in rest), "B")
            rows.append([f"{sign} {len(rest)} more", "", "", sent, quantity(seconds, "s", sign=True)])
    for module, seconds in sorted(each.computing.items(), key=lambda item: -abs(item[1]))[:SHOWN]:
        rows.append(["  computing", module or "the model", "", "", quantity(seconds, "s", sign=True)])
    if not rows:
        rows.append(["  nothing is sent or computed otherwise", "", "", "", quantity(0.0, unit, sign=True)])
    heads = ("what", "where", "boxing", "bytes", "time")
    return Table(
        f"in {each.layout}, {quantity(each.difference, unit, sign=True)}:", heads, rows, ("what", "where", "boxing")
    )
