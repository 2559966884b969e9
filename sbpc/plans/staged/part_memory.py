"""What a chunk holds on the busiest rank: stored, gathered before the micro-batches, kept by one of them, and for a
moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from sbpc.graph.ports import TANGENT, Port, placeholders, results
from sbpc.mesh.layout import Layout, numel
from sbpc.mesh.mesh import Mesh
from sbpc.plans.memory import Life
from sbpc.plans.staged.chunk_programs import ChunkPrograms, Program
from sbpc.plans.staged.pieces import pieces_in
from sbpc.plans.staged.schedules import FORWARD, INPUTS, LATE, WEIGHTS, piece_of
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts
from sbpc.plans.storages import POSITION

GATHERED, SAVED, HANDED, HOME, ADDED, LEFT = "gathered", "saved", "handed", "home", "added", "left"  # see `kept_by`
# the second: of parts, whose gradients may be the first ones, what comes early or late
# a number: the input of a chunk that has it
Kind = str | int | tuple[Parts, bool]
# of a storage: the part whose program makes it, "" for what a micro-batch is given, and its number there
Place = tuple[str, int]


def kept_by(
    chunk: ChunkPrograms, size_of: Callable[[Life], Sequence[Any]], bytes_of: Callable[[Node], Any]
) -> tuple[dict[Kind, Any], dict[str, list[int]]]:
    """Returns by kind the bytes on the busiest rank of what stays while other programs of a chunk run, and the
    inputs that are among what a micro-batch keeps. A storage is counted once, however many values lie in it.

    GATHERED: what is boxed before the micro-batches. SAVED: what a micro-batch keeps between forward and backward.
    HANDED: what it keeps between the two parts of the backward. HOME: the gradients that were boxed home. ADDED:
    gradients while they add up. LEFT: those of them that do so in their home. size_of, bytes_of: sizes of the
    storages of a program, and of a value by itself; numbers or formulas.
    """
    # by name of a value where it lies; what is stored: None
    places: dict[str, Place | None] = dict.fromkeys(chunk.fixed.values())
    size, given = dict[Place, Any](), placeholders(chunk.boxed)
    late = {name for port, name in chunk.own.items() if port.kind == TANGENT}
    for port, name in chunk.own.items():
        number = chunk.chunk.ports.inputs.index(port)
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

    def keep(kind: str, names: Iterable[str]) -> None:
        held = {place for name in names if (place := places.get(name)) is not None and place[0] != BEFORE}
        found[kind] = sum(map(size.__getitem__, held))
        inputs[kind] = sorted(number for maker, number in held if not maker)

    inputs = dict[str, list[int]]()
    found: dict[Kind, Any] = {number: each for (_, number), each in size.items()}
    found[GATHERED] = run(BEFORE)
    run(FORWARD)
    keep(SAVED, (chunk.later[INPUTS] | chunk.later[WEIGHTS]) - late)
    run(INPUTS)
    keep(HANDED, chunk.later[WEIGHTS])
    sums = {node: bytes_of(node) for node in chunk.summed}
    left = sum(each for node, each in sums.items() if node in chunk.homes)
    return found | {HOME: run(AFTER), ADDED: sum(sums.values()), LEFT: left}, inputs


class Scope(NamedTuple):
    """What the program of some parts has alive, and at which of its moments: those of a piece, see `piece_of`. there:
    the storages that are there before; for what comes early all that it does not make, as it ends before a micro-batch
    comes. beside: the ports of what comes with a micro-batch and is read later."""

    life: Life
    start: int
    end: int
    there: set[int]
    beside: list[Port]


def scope(chunk: ChunkPrograms, which: Parts, program: Program) -> Scope:
    """Returns what is alive while the program of some parts runs."""
    gm = program.gm
    life = chunk.life if which == PARTS else Life.of(gm, chunk.chunk.mesh)
    piece_at, (_, piece) = pieces_in(gm), piece_of(which)
    start, end = (
        next((at for at, moment in enumerate(life.moments) if piece_at.get(moment.node, 0) >= first), len(life.moments))
        for first in (piece, piece + 1)
    )
    made = {storage for moment in life.moments[start:] for storage, _ in moment.makes}
    held = {storage for storage, last in enumerate(life.last) if last >= start and storage not in made}
    if piece > 0:
        return Scope(life, start, end, held, [])
    come, given = () if piece else chunk.chunk.arriving(which), placeholders(gm)
    nodes = {node for port, node in given.items() if port not in come}
    others = {storage for storage, owner in enumerate(life.owner) if owner.op == "placeholder" and owner not in nodes}
    there = {storage for storage, owner in enumerate(life.owner) if owner in nodes}
    return Scope(life, start, end, there | held - others, [port for port in come if port not in given])


def in_flight(chunk: ChunkPrograms, which: Parts, program: Program) -> tuple[Life, set[int]]:
    """Returns the storages that a piece of the program of some parts holds for what comes later: of collectives on
    their way, and of gradients that are home already."""
    life, _, end, _, _ = scope(chunk, which, program)
    home = {node.name for node in chunk.calls[AFTER]}.union(*program.late)
    ends = [] if piece_of(which)[1] < 0 else list(zip(program.gives, results(program.gm)))  # of the action
    others = {life.values[node][0] for name, node in ends if node is not None and name not in home}
    given = {life.values[node][0] for node in placeholders(program.gm).values()}
    made = {storage for moment in life.moments[:end] for storage, _ in moment.makes}
    return life, {storage for storage in made - given - others if life.last[storage] >= end}


def rise(chunk: ChunkPrograms, which: Parts, program: Program) -> tuple[int, int]:
    """Returns the most bytes that the program of some parts has alive at once besides what is there before it is
    given a micro-batch, and how many of such that of a whole step has just before its backward begins."""
    life, start, end, there, beside = scope(chunk, which, program)
    about = ((chunk.chunk.shapes[port], chunk.chunk.given[port]) for port in beside)
    come = sum(bytes_at(*each, chunk.chunk.mesh) for each in about)
    before = sum(map(life.size.__getitem__, there))
    gone = 0  # of what is there, nothing is let go before the end
    positions = POSITION * len(chunk.chunk.mesh.axes)
    peak = before + positions
    dying = Counter[float]()
    for storage in there:
        dying[life.last[storage]] += life.size[storage]
    for at in range(start, end):
        peak = max(peak, life.live[at] + gone)
        gone += dying[at]
    peak -= positions if LATE in which else 0  # which a piece of what comes late is not given
    return peak + come - before, life.saved - before if which == PARTS and life.saved else 0


def bytes_at(value: Tensor, layout: Layout | None, mesh: Mesh) -> int:
    """Returns the bytes of a tensor in a layout on the busiest rank."""
    cuts = {} if layout is None else layout.cuts
    return value.element_size() * int(numel(value.shape, [cuts.get(dim, ()) for dim in range(value.dim())], mesh.sizes))
