"""Make functions of programs. Each function takes one list and empties it, so that no caller keeps values alive."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.graph import CodeGen

from sbpc._compat import inductor_compile
from sbpc.errors import NanError, PlanError, at_node, check_kinds
from sbpc.graph.expert_rows import COUNTING
from sbpc.graph.operands import ancestors, nodes_in
from sbpc.mesh.states import Ragged
from sbpc.rules.strides import laid_out
from sbpc.runtime.flex_kernels import OPERATORS
from sbpc.runtime.pieces import in_pieces
from sbpc.runtime.recorded import recorded

aten = torch.ops.aten
log, progress = logging.getLogger("sbpc"), logging.getLogger("sbpc.progress")
FEW = 8  # calls, which take no longer than to enter and leave a compiled piece
BoxedFunction = Callable[[list[Tensor]], tuple[Any, ...]]
Executor = Callable[[GraphModule], BoxedFunction]


class BoxedCodeGen(CodeGen):
    """Generates a function that takes its arguments out of one list: nobody else then holds them while it runs."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """Returns the first lines of the function."""
        names = [text.split(":")[0].strip() for text in free_vars if text != "self"]
        taken = f"\n    {', '.join(names)}, = given\n    given.clear()" if names else ""
        return f"def forward(self, given){maybe_return_annotation}:{taken}"


BINDINGS: dict[Any, Callable[..., Any]] = {
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
"""Python functions of torch that call just this op when given its arguments, in half the time that the op object
takes."""


def code(gm: GraphModule) -> BoxedFunction:
    """Runs the code that fx generates, which drops every value after its last use."""
    return generated(GraphModule(gm, kernels(gm)))


def generated(gm: GraphModule) -> BoxedFunction:
    """Runs the code of a program whose ops get their operands as their kernels read them."""
    for node in gm.graph.nodes:
        node.target = BINDINGS.get(node.target, node.target)
    gm.graph.set_codegen(BoxedCodeGen())
    gm.recompile()
    return gm.forward


def kernels(gm: GraphModule) -> Graph:
    """Returns a copy of a program's graph in which each op gets its operands as its kernel reads them."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.target = laid_out(node.target) if node.op == "call_function" else node.target
    return graph


def interpreter(gm: GraphModule, kind: type[Interpreter] = Interpreter) -> BoxedFunction:
    """Runs fx's interpreter: it is slower, and every node can be watched."""
    run = kind(GraphModule(gm, kernels(gm))).run

    def boxed(given: list[Tensor]) -> tuple[Any, ...]:
        values = given.copy()
        given.clear()
        return run(*values)

    return boxed


def inductor(gm: GraphModule) -> BoxedFunction:
    """Runs Inductor's kernels, compiled at the first call; equal layers are compiled once. They need a C++ compiler,
    on GPUs triton.

    Placeholders that the program returns, such as weights that are saved for the backward, go around the kernels:
    Inductor would make a new view of each. Its kernels are for fixed sizes: calls on values of which some are known as
    the program runs, as where ranks share out rows of experts, run as generated code.
    """
    graph = kernels(gm)
    return in_pieces(graph, gm, compiled_later, of_any_size(graph), generated)


def of_any_size(graph: Graph) -> set[Node]:
    """Returns the calls that read or make values whose sizes are known as the program runs, and few ones between."""
    found, sized = set[Node](), set[Node]()
    for node in graph.nodes:
        layouts = node.meta.get("sbp", ())
        states = {type(s) for each in (layouts if isinstance(layouts, tuple) else (layouts,)) for s in each.states}
        reads = any(used in sized for used in node.all_input_nodes)
        if node.target in COUNTING or Ragged in states or (reads and not states):
            sized.add(node)
        if node.op == "call_function" and (reads or node in sized):
            found.add(node)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    runs = [(apart, [*run]) for apart, run in itertools.groupby(calls, found.__contains__)]
    return found.union(*(run for apart, run in runs[1:-1] if not apart and len(run) < FEW))


def compiled_later(piece: GraphModule) -> BoxedFunction:
    """Returns what compiles a program at its first call and runs it."""
    own_in_flight(piece.graph)
    compiled = list[Callable[..., Any]]()
    strides: list[Any] = []  # with which it was compiled; what has others is copied

    def boxed(given: list[Tensor]) -> tuple[Any, ...]:
        if not compiled:
            given[:] = [x.contiguous() if overlaps(x) else x for x in given]
            progress.debug("Inductor compiles %d calls", len(piece.graph.nodes))
            compiled.append(compiled_now(piece, list(given), any(x.is_cuda for x in given)))
            strides.extend(x.stride() for x in given)
        given[:] = [strided(x, known) for x, known in zip(given, strides)]
        return tuple(compiled[0](given))

    return boxed


def compiled_now(piece: GraphModule, given: list[Tensor], on_gpu: bool) -> Callable[..., Any]:
    """Returns what Inductor makes of a program. On a GPU it is given FlexAttention as the operators for which it has
    kernels; where it finds none for their sizes the ops stay, which hold all scores in memory."""
    ops = {node: node.target for node in piece.graph.nodes if on_gpu and node.target in OPERATORS}
    for node, op in ops.items():
        node.target = OPERATORS[op]
    try:
        piece.recompile()
        return inductor_compile(piece, given)
    except Exception as error:  # whatever Inductor makes of it
        if not ops:
            raise
        log.warning("Inductor has no kernel for a FlexAttention, whose scores are all held in memory: %s", error)
        for node, op in ops.items():
            node.target = op
        return compiled_now(piece, given, False)


def fastest(gm: GraphModule) -> BoxedFunction:
    """Runs what is fastest on the device of the first call, launched call by call: Inductor's kernels on a GPU with
    triton, else generated code, which is as fast on CPUs and there at once."""
    made = list[BoxedFunction]()

    def boxed(given: list[Tensor]) -> tuple[Any, ...]:
        if not made:
            on_gpu = any(x.is_cuda for x in given) and importlib.util.find_spec("triton") is not None
            made.append(inductor(gm) if on_gpu else code(gm))
        return made[0](given)

    return boxed


def auto(gm: GraphModule) -> BoxedFunction:
    """Runs what is `fastest`, as a CUDA graph where launches bound the step on one GPU."""
    return recorded(fastest(gm), gm, strict=False)


def graph(gm: GraphModule) -> BoxedFunction:
    """Replays what is `fastest` as a CUDA graph. Raises PlanError for what no CUDA graph can hold."""
    return recorded(fastest(gm), gm, strict=True)


def own_in_flight(graph: Graph) -> None:
    """Gives collectives that another program waits for memory of their own to read, if what they read was added to in
    place, and lets the program return that.

    Inductor makes a sum in memory that it lets go behind the program's last call, and returns the sum where it was
    before. The collective would read what others write there meanwhile.
    """
    for node in list(graph.nodes):
        if "_c10d_functional" not in str(node.target) or "wait_tensor" in str(node.target):
            continue
        source, awaited = node.args[0], any("wait_tensor" in str(user.target) for user in node.users)
        if not awaited and any("_." in str(each.target) for each in ancestors([source])):
            with graph.inserting_before(node):
                own = graph.call_function(aten.clone.default, (source,))
            for user in (node, graph.output_node()):
                user.replace_input_with(source, own)


def overlaps(x: Tensor) -> bool:
    """Returns whether elements of a tensor may share memory, as those of an expanded one do: it cannot be copied
    into."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride <= reach and x.numel():
            return True
        reach += (size - 1) * stride
    return False


def strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns a tensor with these strides: itself or a copy. What a dim of one element has makes no difference."""
    if x.stride() == strides or all(a == b or size == 1 for a, b, size in zip(x.stride(), strides, x.shape)):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


BROUGHT = tuple(f"_c10d_functional.{name}" for name in ("all_gather", "all_to_all", "reduce_scatter"))  # when awaited
UNINITIALISED = ("aten.empty", "aten.new_empty", *BROUGHT)  # whose results may hold NaN from earlier use of the memory


class NanCheck(Interpreter):
    """Runs a program node by node. The first value with a NaN ends it with an error that names its node and this
    rank."""

    def run_node(self, n: Node) -> Any:
        """Runs one node and looks at its value."""
        value = super().run_node(n)
        if n.op == "output" or str(n.target).startswith(UNINITIALISED) or not has_nan(value):
            return value
        rank = os.environ.get("RANK", "0")
        if n.op == "placeholder":
            what = f"rank {rank}: %{n.name} holds NaN before the program begins"
            raise NanError(at_node(what, n, "Look at the data, or at what the last step of the optimizer did."))
        half = n.meta.get("phase", "forward")
        if str(n.target).startswith("_c10d_functional."):
            what, todo = "is the first to hold NaN, which came from another rank", "See what the other ranks say."
        else:
            what, todo = "is the first to make NaN", "Its operands hold none; they are:\n    " + operands(self, n)
        raise NanError(at_node(f"rank {rank}: %{n.name} in the {half} {what}", n, todo))


def operands(run: Interpreter, n: Node) -> str:
    """Returns a line for each operand of a node with the range of its values."""
    lines = []
    for used in dict.fromkeys(nodes_in((n.args, n.kwargs))):
        value = run.env.get(used)
        if isinstance(value, torch.Tensor) and value.numel():
            low, high = value.min().item(), value.max().item()
            lines.append(f"%{used.name} {tuple(value.shape)} from {low:.3g} to {high:.3g}")
    return "\n    ".join(lines) or "none"


def has_nan(value: Any) -> bool:
    """Returns whether a value is a tensor with a NaN, or holds one."""
    if isinstance(value, (tuple, list)):
        return any(map(has_nan, value))
    floating = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return floating and bool(torch.isnan(value).any())


EXECUTORS: dict[str, Executor] = {
    "auto": auto,
    "code": code,
    "graph": graph,
    "inductor": inductor,
    "interpreter": interpreter,
    "nans": functools.partial(interpreter, kind=NanCheck),
}


def executor_of(name: str) -> Executor:
    """Returns the executor of that name. Raises PlanError if there is none."""
    check_kinds(PlanError, executor=(name, "a text"))
    if name not in EXECUTORS:
        raise PlanError(f"no executor {name!r} is known\n  Known are {', '.join(EXECUTORS)}.")
    return EXECUTORS[name]
