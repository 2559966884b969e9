"""Executors: what runs a program. Each makes a function of one list, which it empties, so that values die early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.graph import CodeGen

from sbpc._compat import inductor_compile
from sbpc.errors import PlanError
from sbpc.runtime.nans import NanCheck

Run = Callable[[list[Tensor]], tuple[Any, ...]]


class Boxed(CodeGen):
    """Code of a function that takes its arguments out of one list: nobody else then holds them while it runs."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """The first lines of the function."""
        names = [text.split(":")[0].strip() for text in free_vars if text != "self"]
        taken = f"\n    {', '.join(names)}, = given\n    given.clear()" if names else ""
        return f"def forward(self, given){maybe_return_annotation}:{taken}"


def code(gm: GraphModule) -> Run:
    """The code that fx generates: every value is dropped after its last use."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
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
    """Inductor's kernels, compiled at the first call; it needs a C++ compiler, on GPUs triton."""
    compiled: list[Callable[..., Any]] = []

    def boxed(given: list[Tensor]) -> tuple[Any, ...]:
        if not compiled:
            compiled.append(inductor_compile(gm, list(given)))
        taken = given.copy()
        given.clear()
        return tuple(compiled[0](*taken))

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
