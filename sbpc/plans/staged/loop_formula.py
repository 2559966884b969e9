"""Seconds, bytes sent and bytes held of the busiest stage of a loop over micro-batches as formulas, with their
number as the symbol `m`.

The batch is `batch`, unless `dynamic=` of `sbpc.plan` names it: an input of the body that is a part of an argument
has a dim batch / m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import sympy
from torch.fx import GraphModule, Node

from sbpc.boxing.steps import wire
from sbpc.errors import SbpcError
from sbpc.graph.operands import value_of
from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, PARAMETER, SEED, Port, placeholders
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.mesh import Mesh
from sbpc.plans.chunk import Chunk
from sbpc.plans.cost import Kernel, Terms, Transfer
from sbpc.plans.measure import kernels_and_transfers, sum_kernel
from sbpc.plans.memory import Life
from sbpc.plans.memory_formula import bytes_of, largest, moments_of, storage_formulas, total
from sbpc.plans.staged.chunk_cost import ChunkCost
from sbpc.plans.staged.chunk_programs import ChunkPrograms
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.part_memory import scope
from sbpc.plans.staged.pipeline_cost import Pipeline
from sbpc.plans.staged.schedules import BREADTH_FIRST, LATE, STEP
from sbpc.plans.staged.stage_memory import moments
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts
from sbpc.plans.storages import POSITION
from sbpc.plans.symbolic_sizes import formula, name_dims, symbol

T = TypeVar("T")
M, BATCH = "m", "batch"


def name_parts(gm: GraphModule, loop: Loop, mesh: Mesh, dynamic: Mapping[str, Any]) -> GraphModule | None:
    """Returns a body with symbolic dims; None where a micro-batch or their number is 1.

    dynamic: that of `sbpc.plan` for the whole step. Dims of one element are not told apart, so such a body keeps its
    numbers.
    """
    gm = rebuild(gm)  # of which the plan of a micro-batch has formulas of its own
    cut = {
        name: source.dim for name, source in loop.inputs.items() if source.kind == "argument" and source.dim is not None
    }
    nodes = {port.name: node for port, node in placeholders(gm).items() if port.kind == INPUT and port.name in cut}
    sizes = [node.meta["val"].shape[cut[name]] for name, node in nodes.items()]
    if loop.count == 1 or min(sizes, default=1) == 1:
        return None
    given: dict[str, Any] = {**dynamic, M: loop.count}
    # and the dims that are cut: as one factor of a dim the number of heads, say, is not that of micro-batches
    outside = {M}
    for name, node in nodes.items():
        shape, dim = node.meta["val"].shape, cut[name]
        dims = list(dynamic[node.name]) if node.name in dynamic else [None] * len(shape)
        if dims[dim] is None:
            dims[dim] = BATCH
            given[BATCH] = shape[dim] * loop.count
        outside |= {each.name for each in formula(dims[dim], "a dim").free_symbols}
        dims[dim] = f"({dims[dim]})/{M}"
        given[node.name] = dims
    name_dims(gm, mesh, given, outside)
    return gm


def check_names(gm: GraphModule, mesh: Mesh, dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `dynamic=` of a loop as JSON values. Raises SbpcError for what does not fit the whole step."""
    checked = name_dims(gm, mesh, dynamic)
    if M in gm.meta["dynamic"]:
        raise SbpcError(f"dynamic: {M!r} is the number of micro-batches\n  Call the dim otherwise.")
    return checked


Chunks = Mapping[int, ChunkPrograms]  # of one stage, by number


def terms(plan: Pipeline, chunks: Chunks, numbers: Mapping[str, int], largest: Callable[[], Chunks]) -> Terms:
    """Returns the kernels and transfers of a stage's chunks, with those in the loop m times each, and what makes the
    formula of memory.

    chunks: those of the busiest stage, with symbolic dims if `numbers` has any. largest: gives those of the one that
    takes most bytes.
    """
    m, kernels, transfers = symbol(M), dict[Kernel, Any](), dict[Transfer, Any]()
    mesh = next(iter(chunks.values())).chunk.mesh
    for programs in chunks.values():
        for nodes, times in calls_of(plan, programs, m):
            found, _, moved = kernels_and_transfers(nodes, mesh)
            add(kernels, found, times)
            add(transfers, moved, times)
        for node in programs.summed if plan.schedule != STEP else ():
            kernels[sum_kernel(node)] = kernels.get(sum_kernel(node), 0) + m - 1
    sending = [
        (each, times) for each, times in transfers.items() if wire(each.step, each.shape, each.itemsize, mesh.sizes)[0]
    ]
    named = numbers if plan.schedule == STEP else {M: plan.count, **numbers}
    return Terms(
        mesh, tuple(kernels.items()), tuple(sending), named, lambda sizes: memory_formula(plan, largest(), sizes)
    )


def add(known: dict[T, Any], counts: Mapping[T, int], times: Any) -> None:
    """Adds counts, each so many times, to others."""
    for each, count in counts.items():
        known[each] = known.get(each, 0) + count * times


def calls_of(plan: Pipeline, programs: ChunkPrograms, count: T) -> Iterator[tuple[Iterable[Node], T | int]]:
    """Yields the calls of a chunk with how often each runs in a step. count: of micro-batches, a number or a
    formula."""
    if plan.schedule == STEP:
        yield programs.program(PARTS).gm.graph.nodes, 1
        return
    for part, nodes in programs.calls.items():
        yield nodes, 1 if part in (BEFORE, AFTER) else count


def memory_formula(plan: Pipeline, chunks: Chunks, sizes: Sequence[sympy.Symbol]) -> sympy.Expr:
    """Returns the bytes of a stage at its peak as `Pipeline.memory_of` counts them, with as many micro-batches in
    flight as in this plan; where all are, as with "gpipe", with as many fewer than `m`.
    """
    of = {at: ChunkMemory(chunk, sizes) for at, chunk in chunks.items()}
    peaks: dict[Any, None] = {}
    stage = plan.owners[next(iter(chunks))]
    for moment in moments(plan, stage):
        flying = {key: times for key, times in moment.flying.items() if times}
        more = symbol(M) - plan.count if plan.schedule.startswith(("gpipe", BREADTH_FIRST)) else 0
        each = ((of[at].held(kind), times, times < 0) for (at, kind), times in sorted(flying.items(), key=str))
        held = sympy.Add(*((times - more if saved else times + more) * size for size, times, saved in each))
        held += sympy.Add(*(of[at].held(kind) for at, kind in moment.once))
        for rise in of[moment.chunk].rises(moment.which, moment.first) if moment.which else [sympy.Integer(0)]:
            peaks[held + rise] = None
    if plan.schedule == STEP:  # what the optimizer's step reads together
        peaks[sympy.Add(*(each.trained for each in of.values()))] = None
    most = largest([dict(term.as_coeff_Mul()[::-1] for term in sympy.Add.make_args(peak)) for peak in peaks])
    copies = plan.options.copies
    stored, trained = (sympy.Add(*(getattr(each, name) for each in of.values())) for name in ("stored", "trained"))
    return copies * trained + sympy.Max(*dict.fromkeys(stored + total(each) for each in most), evaluate=False)


class ChunkMemory(ChunkCost):
    """What a chunk holds on the busiest rank, as formulas in the sizes of axes and the dims of its graph."""

    def __init__(self, chunk: ChunkPrograms, sizes: Sequence[sympy.Symbol]) -> None:
        self.programs, self.known, self.sizes, self.mesh = chunk, {}, sizes, chunk.chunk.mesh
        self.given = {port: self.bytes_of(node) for port, node in placeholders(chunk.boxed).items()}
        self.stored = sympy.Add(*(size for port, size in self.given.items() if port.kind in (PARAMETER, BUFFER, SEED)))
        ends = [port for port in chunk.chunk.ports.outputs if port.kind == GRADIENT]
        self.trained = sympy.Add(*(self.given[Port(PARAMETER, port.name)] for port in ends))

    def size_of(self, life: Life) -> Sequence[Any]:
        return storage_formulas(life, self.mesh, self.sizes)

    def bytes_of(self, node: Node) -> Any:
        return bytes_of(*value_of(node), self.mesh, self.sizes)

    def rises(self, which: Parts, first: bool) -> list[Any]:
        """Returns what a program has alive at moments of which one is its most, besides what is there before it is
        given a micro-batch."""
        program = self.programs.program(which, not (first and self.programs.begins(which)))
        life, start, end, there, beside = scope(self.programs, which, program)
        size = self.size_of(life)
        always = (0 if LATE in which else POSITION * len(self.mesh.axes)) + sympy.Add(
            *map(self.given.__getitem__, beside)
        )
        rest = sympy.Add(*map(size.__getitem__, sorted(there)))
        for storage in there:  # which is let go at the end at the earliest
            life.last[storage] = math.inf
        return [always + total(moment) - rest for moment in largest(moments_of(life, size, start, end)) or [{}]]


def with_dims(chunk: Chunk, source: GraphModule) -> Chunk:
    """Returns a chunk, boxed anew, whose graph has the symbolic dims that values of the same names have in `source`."""
    known, gm = {node.name: node for node in source.graph.nodes}, rebuild(chunk.annotated)
    for node in gm.graph.nodes:
        if node.op != "output" and node.name in known:
            take_dims(node, known[node.name])
    return replace(chunk, bare=gm, ready=None)


def take_dims(node: Node, source: Node) -> None:
    """Gives a node the dims of its source; a value that a chunk receives may be one of several results."""
    producer, index = value_of(source)
    if "dims" not in producer.meta:
        return
    if source is not producer and node.op == "placeholder":
        node.meta["dims"] = (producer.meta["dims"][index],)
        return
    node.meta |= {key: source.meta[key] for key in ("dims", "factors", "parts") if key in source.meta}
