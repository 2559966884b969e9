"""What a chunk holds on the busiest rank: stored, gathered before the micro-batches, kept by one of them, and for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.graph.ports import INPUT, TANGENT, Port, placeholders, results
from sbpc.mesh.layout import Layout, numel
from sbpc.mesh.mesh import Mesh
from sbpc.plans.memory import POSITION, Life
from sbpc.plans.staged.chunk_programs import ChunkPrograms
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts

Place = tuple[str, int]  # of a storage: the part whose program makes it, "" for what a micro-batch is given, and its number there


@dataclass(frozen=True)
class Kept:
    """Bytes on the busiest rank of what programs of a chunk give, numbers or formulas. A storage is counted once, however many values
    lie in it.

    gathered: what is boxed before the micro-batches. saved: what a micro-batch keeps between forward and backward. handed: what it
    keeps between the two parts of the backward. home: the gradients that were boxed home.
    """

    gathered: Any
    saved: Any
    handed: Any
    home: Any

    @classmethod
    def by(
        cls, chunk: ChunkPrograms, size_of: Callable[[Life], Sequence[Any]] | None = None, given: Callable[[Port], Any] | None = None
    ) -> Kept:
        """Measures a chunk. size_of, given: sizes of the storages of a program and of what a micro-batch is given, if no numbers."""
        places: dict[str, Place | None] = dict.fromkeys(chunk.fixed.values())  # by name of a value where it lies; what is stored: None
        size = dict[Place, Any]()
        late = {name for port, name in chunk.own.items() if port.kind == TANGENT}
        for number, (port, name) in enumerate(chunk.own.items()):
            places[name] = "", number
            number_of = bytes_at(chunk.chunk.shapes[port], chunk.chunk.given[port], chunk.chunk.mesh)
            size["", number] = number_of if given is None else given(port)

        def run(part: str) -> Any:
            program = chunk.program((part,))
            life = Life.of(program.gm, chunk.chunk.mesh)
            sizes = life.size if size_of is None else size_of(life)
            stored = placeholders(program.gm).values()
            there = {life.values[node][0]: places.get(name) for name, node in zip((*program.reads, *program.sums), stored)}
            for name, node in zip(program.gives, results(program.gm)):
                assert node is not None
                storage = life.values[node][0]
                if storage not in there:
                    there[storage] = part, storage
                    size[part, storage] = sizes[storage]
                places[name] = there[storage]
            return sum(each for (maker, _), each in size.items() if maker == part)

        def bytes_of(names: Iterable[str]) -> Any:
            held = {place for name in names if (place := places.get(name)) is not None and place[0] != BEFORE}
            return sum(map(size.__getitem__, held))

        gathered = run(BEFORE)
        run(FORWARD)
        saved = bytes_of((chunk.later[INPUTS] | chunk.later[WEIGHTS]) - late)
        run(INPUTS)
        handed = bytes_of(chunk.later[WEIGHTS])
        return cls(gathered, saved, handed, run(AFTER))


def rise(chunk: ChunkPrograms, which: Parts, gm: GraphModule) -> tuple[int, int]:
    """Returns the most bytes that the program of some parts has alive at once besides what is there before it is given a micro-batch, and
    how many of such that of a whole step has just before its backward begins."""
    life = chunk.life if which == PARTS else Life.of(gm, chunk.chunk.mesh)
    there, beside = arrivals(chunk, which, gm)
    about = ((chunk.chunk.shapes[port], chunk.chunk.given[port]) for port in beside)
    come = sum(bytes_at(*each, chunk.chunk.mesh) for each in about)
    peak = max(life.peak, POSITION * len(chunk.chunk.mesh.axes))  # the second where nothing runs
    before = sum(size for size, node in zip(life.size, life.owner) if node in there)
    return peak + come - before, life.saved - before if which == PARTS and life.saved else 0


def arrivals(chunk: ChunkPrograms, which: Parts, gm: GraphModule) -> tuple[set[Node], list[Port]]:
    """Returns the placeholders of the program of some parts of what does not arrive for it, and the ports of what does, but is read later.

    The inputs of a micro-batch arrive for the forward, and what later stages send back for the backward of inputs.
    """
    arrives, given = {INPUT: FORWARD in which, TANGENT: INPUTS in which}, placeholders(gm)
    come = [port for port in chunk.own if arrives[port.kind]]
    return {node for port, node in given.items() if port not in come}, [port for port in come if port not in given]


def bytes_at(value: Tensor, layout: Layout | None, mesh: Mesh) -> int:
    """Returns the bytes of a tensor in a layout on the busiest rank."""
    cuts = {} if layout is None else layout.cuts
    return value.element_size() * int(numel(value.shape, [cuts.get(dim, ()) for dim in range(value.dim())], mesh.sizes))
