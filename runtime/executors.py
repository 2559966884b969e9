"""Executors: what runs a program. Each makes a function of one list, which it empties, so that values die early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.graph import CodeGen

from sbpc._compat import inductor_compile
from sbpc.errors import PlanError
from sbpc.runtime.nans import NanCheck

aten = torch.ops.aten
Run = Callable[[list[Tensor]], tuple[Any, ...]]


class Boxed(CodeGen):
    """Code of a function that takes its arguments out of one list: nobody else then holds them while it runs."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """The first lines of the function."""
        names = [text.split(":")[0].strip() for text in free_vars if text != "self"]
        taken = f"\n    {', '.join(names)}, = given\n    given.clear()" if names else ""
        return f"def forward(self, given){maybe_return_annotation}:{taken}"


BOUND: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.permute.default: torch.permute,
    aten.reshape.default: torch.reshape,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
}
"""Functions of Python that call just this op when given its arguments: in half the time that it takes by its name."""


def code(gm: GraphModule) -> Run:
    """The code that fx generates: every value is dropped after its last use."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.target = BOUND.get(node.target, node.target)
    graph.set_codegen(Boxed())
    return GraphModule(gm, graph).forward


def interpreter(gm: GraphModule, kind: type[Interpreter] = Interpreter) -> Run:
    """fx's interpreter: slower, every node can be watched."""
    run = kind(gm).run

    def boxed(given: list[Tensor]) -> tuple[Any, ...]:
        taken = given.copy()
        given.clear()
        return run(*taken)

    return boxed


def inductor(gm: GraphModule) -> Run:
    """Inductor's kernels, compiled at the first call; it needs a C++ compiler, on GPUs triton.

    What a program only hands on, such as weights that are saved for the backward, goes around them: each would be made
    anew as a view.
    """
    graph = Graph()
    ends: Any = graph.graph_copy(gm.graph, {})
    places = {node: at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    graph.output(tuple(node for node in ends if node not in places))
    order = [places.get(node) for node in ends]
    handed = [at for at in places.values() if at in order]
    inner, compiled = GraphModule(gm, graph), list[Callable[..., Any]]()

    def boxed(given: list[Tensor]) -> tuple[Any, ...]:
        if not compiled:
            compiled.append(inductor_compile(inner, list(given)))
        kept = {at: given[at] for at in handed}
        made = iter(compiled[0](given))
        return tuple(next(made) if at is None else kept[at] for at in order)

    return boxed


def nans(gm: GraphModule) -> Run:
    """The interpreter that stops at the first node which makes NaN."""
    return interpreter(gm, NanCheck)


EXECUTORS: dict[str, Callable[[GraphModule], Run]] = {
    "code": code,
    "inductor": inductor,
    "interpreter": interpreter,
    "nans": nans,
}


def executor_of(name: str) -> Callable[[GraphModule], Run]:
    """The executor of that name. Raises PlanError if there is none."""
    if name not in EXECUTORS:
        raise PlanError(f"no executor {name!r} is known\n  Known are {', '.join(EXECUTORS)}.")
    return EXECUTORS[name]
