"""The layout solver: one label per variable, so that labels and the boxings between them cost least. It knows no torch.

minimise   sum over variables v of cost_v(x_v)  +  sum over values of the cheapest star     -> problem.total

1. Fold: equal blocks become one, whose costs count as often.                               -> fold.fold
2. Bound: for any multipliers m by port and label, no plan costs less than
       sum_v min_x (cost_v(x) + sum of m)  +  sum over values min (star - sum of m)         -> proof.checked_bound
   Messages find good multipliers, and how far above the bound a label is (reduced cost).   -> messages, bounder
3. Plan: a program on few labels is solved exactly: on those of least reduced cost, or on
   all below the gap, if they are few.                                                      -> search, program, highs
4. Under limits, sum_v weight_v(x_v) <= most: prices turn a limit into costs, rows into
   a program.                                                                               -> problem.priced
"""

from sbpc.solver.bounder import Bounder, certify
from sbpc.solver.problem import Limit, Problem, Proof, Solution, Value, Variable, priced, star, total
from sbpc.solver.proof import checked_bound
from sbpc.solver.search import solve

__all__ = [
    "Bounder",
    "Limit",
    "Problem",
    "Proof",
    "Solution",
    "Value",
    "Variable",
    "certify",
    "checked_bound",
    "priced",
    "solve",
    "star",
    "total",
]
