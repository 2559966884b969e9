"""The layout solver: one label per variable, so that labels and the boxings between them cost least."""

from sbpc.solver.check import Proof, checked_bound
from sbpc.solver.moves import Neighbours
from sbpc.solver.problem import Problem, Solution, Value, Variable, check, star, total
from sbpc.solver.solve import certify, solve, untied_proof

__all__ = [
    "Neighbours",
    "Problem",
    "Proof",
    "Solution",
    "Value",
    "Variable",
    "certify",
    "check",
    "checked_bound",
    "solve",
    "star",
    "total",
    "untied_proof",
]
