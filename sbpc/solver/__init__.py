"""The layout solver: one label per variable, so that labels and the boxings between them cost least."""

from sbpc.solver.problem import Problem, Solution, Value, Variable, check, star, total
from sbpc.solver.solve import certify, solve

__all__ = ["Problem", "Solution", "Value", "Variable", "certify", "check", "solve", "star", "total"]
