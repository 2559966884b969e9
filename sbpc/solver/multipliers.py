"""Prices of limited things, by cutting planes (Kelley 1960): where the least of the known plans, priced, is greatest."""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np

from sbpc.solver.quiet import Quiet

SMALL = 1e-9  # what a price costs, so that of equally good ones the lowest are taken


def multipliers(seconds: Sequence[float], excess: Sequence[Sequence[float]], most: float) -> tuple[list[float], float]:
    """The prices per limit, each at most `most`, that make min over plans of seconds + prices * excess greatest; that.

    seconds: by plan. excess: by plan and limit how much more than allowed is taken, negative where there is room.
    The dual function of the limits is nowhere greater.
    """
    over = np.asarray(excess, dtype=float)
    many = over.shape[1]
    model = Quiet()
    model.addVar(-highspy.kHighsInf, highspy.kHighsInf)
    model.changeColCost(0, -1.0)
    for at in range(many):
        model.addVar(0.0, most)
        model.changeColCost(1 + at, SMALL)
    columns = np.arange(1 + many, dtype=np.int32)
    for taken, row in zip(seconds, over):
        model.addRow(-highspy.kHighsInf, taken, 1 + many, columns, np.concatenate([[1.0], -row]))
    model.run()
    found = model.getSolution().col_value
    return [max(0.0, price) for price in found[1 : 1 + many]], found[0]
