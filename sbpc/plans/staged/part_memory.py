"""What a chunk holds on the busiest rank: stored, gathered before the micro-batches, kept by one of them, and for a
moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.graph.ports import TANGENT, Port, placeholders, results
from sbpc.mesh.layout import Layout, numel
from sbpc.mesh.mesh import Mesh
from sbpc.plans.memory import POSITION, Life
from sbpc.plans.staged.chunk_programs import ChunkPrograms
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts

GATHERED, SAVED, HANDED, HOME, ADDED, LEFT = "gathered", "saved", "handed", "home", "added", "left"  # see `kept_by`
# of a storage: the part whose program makes it, "" for what a micro-batch is given, and its number there
Place = tuple[str, int]


def kept_by(
    chunk: ChunkPrograms, size_of: Callable[[Life], Sequence[Any]], bytes_of: Callable[[Node], Any]
) -> dict[str, Any]:
    """Returns by kind the bytes on the busiest rank of what stays while other programs of a chunk run. A storage is
    counted once, however many values lie in it.

    GATHERED: what is boxed before the micro-batches. SAVED: what a micro-batch keeps between forward and backward.
    HANDED: what it keeps between the two parts of the backward. HOME: the gradients that were boxed home. ADDED:
    gradients while they add up. LEFT: those of them that do so in their home. size_of, bytes_of: sizes of the
    storages of a program, and of a value by itself; numbers or formulas.
    """
    # by name of a value where it lies; what is stored: None
    places: dict[str, Place | None] = dict.fromkeys(chunk.fixed.values())
    size, given = dict[Place, Any](), placeholders(chunk.boxed)
    late = {name for port, name in chunk.own.items() if port.kind == TANGENT}
    for number, (port, name) in enumerate(chunk.own.items()):
        places[name] = "", number
        size["", number] = bytes_of(given[port])

    def run(part: str) -> Any:
        program = chunk.program((part,))
        life = Life.of(program.gm, chunk.chunk.mesh)
        sizes, stored = size_of(life), placeholders(program.gm).values()
        there = {life.values[node][0]: places.get(name) for name, node in zip((*program.reads, *program.sums), stored)}
        for name, node in zip(program.gives, results(program.gm)):
            assert node is not None
            storage = life.values[node][0]
            if storage not in there:
                there[storage] = part, storage
                size[part, storage] = sizes[storage]
            places[name] = there[storage]
        return sum(each for (maker, _), each in size.items() if maker == part)

    def of(names: Iterable[str]) -> Any:
        held = {place for name in names if (place := places.get(name)) is not None and place[0] != BEFORE}
        return sum(map(size.__getitem__, held))

    found = {GATHERED: run(BEFORE)}
    run(FORWARD)
    found[SAVED] = of((chunk.later[INPUTS] | chunk.later[WEIGHTS]) - late)
    run(INPUTS)
    found[HANDED] = of(chunk.later[WEIGHTS])
    sums = {node: bytes_of(node) for node in chunk.summed}
    left = sum(each for node, each in sums.items() if node in chunk.homes)
    return found | {HOME: run(AFTER), ADDED: sum(sums.values()), LEFT: left}


def rise(chunk: ChunkPrograms, which: Parts, gm: GraphModule) -> tuple[int, int]:
    """Returns the most bytes that the program of some parts has alive at once besides what is there before it is
    given a micro-batch, and how many of such that of a whole step has just before its backward begins."""
    life = chunk.life if which == PARTS else Life.of(gm, chunk.chunk.mesh)
    there, beside = arrivals(chunk, which, gm)
    about = ((chunk.chunk.shapes[port], chunk.chunk.given[port]) for port in beside)
    come = sum(bytes_at(*each, chunk.chunk.mesh) for each in about)
    peak = max(life.peak, POSITION * len(chunk.chunk.mesh.axes))  # the second where nothing runs
    before = sum(size for size, node in zip(life.size, life.owner) if node in there)
    return peak + come - before, life.saved - before if which == PARTS and life.saved else 0


def arrivals(chunk: ChunkPrograms, which: Parts, gm: GraphModule) -> tuple[set[Node], list[Port]]:
    """Returns the placeholders of a program of what does not arrive for it, and the ports of what does, to be read
    later."""
    come, given = chunk.chunk.arriving(which), placeholders(gm)
    return {node for port, node in given.items() if port not in come}, [port for port in come if port not in given]


def bytes_at(value: Tensor, layout: Layout | None, mesh: Mesh) -> int:
    """Returns the bytes of a tensor in a layout on the busiest rank."""
    cuts = {} if layout is None else layout.cuts
    return value.element_size() * int(numel(value.shape, [cuts.get(dim, ()) for dim in range(value.dim())], mesh.sizes))
