"""The predicates of `when(...)`: comparisons of arguments and sizes, a small part of Python's expressions."""

from __future__ import annotations

import ast

# Names, constants and lists of them, compared and joined; no calls, no attributes, so evaluating a stranger's predicate
# runs nothing.
ALLOWED = (
    ast.Expression, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Name, ast.Constant, ast.List, ast.boolop, ast.Not,
    ast.USub, ast.cmpop, ast.Load,
)  # fmt: skip


def predicate_fault(text: str) -> tuple[str, int] | None:
    """What is wrong with a predicate and at which character, None if nothing is.

    >>> predicate_fault("not causal and f(s)")
    ('a predicate cannot hold Call', 15)
    """
    try:
        tree = ast.parse(text, mode="eval")
        compile(tree, "when", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"{text!r} is no predicate", 0
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            return f"a predicate cannot hold {type(node).__name__}", getattr(node, "col_offset", 0)
    return None


def names_in(text: str) -> list[str]:
    """The names that a predicate speaks of, in order.

    >>> names_in("not causal and s > 1")
    ['causal', 's']
    """
    return [node.id for node in ast.walk(ast.parse(text or "True", mode="eval")) if isinstance(node, ast.Name)]


def holds(predicate: str, names: dict[str, object]) -> bool:
    """Whether a predicate is true of these arguments and sizes; tuples are taken for lists.

    >>> holds("not is_causal and s > 1", {"is_causal": False, "s": 4})
    True
    """
    assert predicate_fault(predicate) is None, predicate
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in names.items()}
    return bool(eval(compile(ast.parse(predicate, mode="eval"), "when", "eval"), {"__builtins__": {}}, given))
