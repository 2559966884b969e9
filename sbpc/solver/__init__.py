"""The layout solver: one label per variable, so that labels and the boxings between them cost least."""

from sbpc.solver.cases import Division, Leaf, Tree, bound_by_cases
from sbpc.solver.check import Proof, checked_bound
from sbpc.solver.moves import Neighbours
from sbpc.solver.near import Near
from sbpc.solver.problem import Limit, Problem, Solution, Value, Variable, charged, check, split_by_costs, star, total
from sbpc.solver.solve import certify, sharp, solve, untied_distances, untied_proof
from sbpc.solver.windows import Windows

__all__ = [
    "Division",
    "Leaf",
    "Limit",
    "Near",
    "Neighbours",
    "Problem",
    "Proof",
    "Solution",
    "Tree",
    "Value",
    "Variable",
    "Windows",
    "bound_by_cases",
    "certify",
    "charged",
    "check",
    "checked_bound",
    "sharp",
    "solve",
    "split_by_costs",
    "star",
    "total",
    "untied_distances",
    "untied_proof",
]
