"""In which types gradients are summed over ranks, micro-batches and stages, and the casts that see to it.

A marked cast to a wider type reads what is not summed before it: the sum is taken of what it makes. A marked cast to a
narrower type reads what is summed already: no partial sum goes through it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc.graph.about import FLOAT32, REDUCE, SENDS, is_boxing
from sbpc.graph.operands import is_sum, operands, value_of
from sbpc.graph.ports import GRADIENT, PARAMETER, outputs, placeholders
from sbpc.mesh.states import P
from sbpc.rules.binding import has_sums

CAST = torch.ops.aten._to_copy.default


def dtype_of(node: Node) -> torch.dtype | None:
    """Returns the type of a tensor of real floating-point numbers; None for anything else."""
    value: Any = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def narrower(one: torch.dtype | None, other: torch.dtype | None) -> bool:
    """Returns whether numbers of one type have fewer bits than those of another.

    >>> narrower(torch.bfloat16, torch.float32), narrower(torch.float16, torch.bfloat16)
    (True, False)
    """
    return one is not None and other is not None and one.itemsize < other.itemsize


def narrows(node: Node) -> bool:
    """Returns whether a node is a cast to a narrower type."""
    return node.target is CAST and narrower(dtype_of(node), dtype_of(node.all_input_nodes[0]))


def ends_sums(node: Node) -> bool:
    """Returns whether a node is a marked cast to a narrower type."""
    return REDUCE in node.meta and narrows(node)


def begins_sums(node: Node) -> bool:
    """Returns whether a node is a marked cast to a wider type."""
    return REDUCE in node.meta and node.target is CAST and narrower(dtype_of(node.all_input_nodes[0]), dtype_of(node))


def sums_of(maker: Node, readers: Iterable[Node]) -> str | None:
    """Returns how the sum of a value is taken if it is cast to a wider type then, or was cast from one, or has 8 bits,
    of which there are no sums: see `STEPS` of `sbpc.boxing.steps`. None for any other value."""
    if not has_sums(dtype_of(value_of(maker)[0])):
        return FLOAT32
    marks = [str(reader.meta[REDUCE]) for reader in readers if begins_sums(reader)]
    return FLOAT32 if is_cast_gradient(maker) else marks[0] if marks else None


def sent_in(gm: GraphModule) -> dict[tuple[Node, int], str]:
    """Returns by gradient or parameter of float32 (of which output of which node it is) the type of 8 bits in which it
    may be sent, where its maker says so; of a gradient, where nothing else reads it."""
    stored = placeholders(gm, PARAMETER).values()
    found = {(x, 0): str(x.meta[SENDS]) for x in stored if SENDS in x.meta and dtype_of(x) == torch.float32}
    ports = dict[tuple[Node, int], list[Any]]()
    for port, node in outputs(gm):
        end = operands(node)[0] if is_cast_gradient(node) else node
        ports.setdefault(value_of(end), []).append((port.kind, end))
    for key, ends in ports.items():
        readers = {user for _, end in ends for user in end.users if user.op != "output" and not is_cast_gradient(user)}
        kinds = {(kind, dtype_of(end)) for kind, end in ends}
        if SENDS in key[0].meta and not readers and kinds == {(GRADIENT, torch.float32)}:
            found[key] = str(key[0].meta[SENDS])
    return found


def is_cast_gradient(node: Node) -> bool:
    """Returns whether a node is the cast to the type of a parameter behind the sums of its gradient."""
    return ends_sums(node) and all(user.op == "output" for user in node.users)


def sum_types(gm: GraphModule) -> dict[Node, torch.dtype]:
    """Returns by value that ends in gradients of parameters alone, through calls that keep partial sums, the type in
    which it is to be summed: float32, or that of the parameter if that is wider.

    gm: an annotated or a boxed graph.
    """
    stored = {port.name: wide(dtype_of(node)) for port, node in placeholders(gm, PARAMETER).items()}
    left: dict[Node, list[torch.dtype | None]] = {}
    for port, node in outputs(gm):
        left.setdefault(node, []).append(stored[port.name] if port.kind == GRADIENT else None)
    found: dict[Node, torch.dtype] = {}
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and dtype_of(node) is not None:
            readers = [user for user in node.users if user.op != "output"]
            types = [*left.get(node, ()), *map(found.get, readers)]
            if (kind := widest(types)) is not None and all(keeps_sums(user, node) for user in readers):
                found[node] = kind
    return found


def wide(dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the type in which the gradients of a parameter are summed; None for one of other numbers."""
    return torch.float32 if narrower(dtype, torch.float32) else dtype


def widest(types: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """Returns the widest of some types; None for none, or where one is None."""
    known = list(types)
    return None if not known or None in known else max((each for each in known if each), key=lambda t: t.itemsize)


def keeps_sums(node: Node, operand: Node) -> bool:
    """Returns whether a call takes partial sums of an operand to partial sums, makes none of its own, and takes it in
    a wider type to a result of that."""
    if is_boxing(node) or is_sum(node):
        return True
    signatures = node.meta["match"].signatures if "match" in node.meta else ()
    if dtype_of(node) is None or any(P in s.outputs and P not in s.inputs for s in signatures):
        return False
    slots = [slot for slot, used in enumerate(operands(node)) if used is operand]
    linear = any({*s.outputs} == {P} and all(s.inputs[slot] == P for slot in slots) for s in signatures)
    stays = node.meta["val"].device == operand.meta["val"].device
    return linear and stays and (node.target is CAST or follows_type(node, operand))


def follows_type(node: Node, operand: Node) -> bool:
    """Returns whether a call gives float64 if an operand is of that type."""

    def given(used: Node) -> Any:
        value = used.meta["val"]
        return torch.empty(value.shape, dtype=torch.float64 if used is operand else value.dtype, device="meta")

    try:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), given)
        made: Any = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError):  # it wants operands of one type
        return False
    return isinstance(made, torch.Tensor) and made.dtype == torch.float64
