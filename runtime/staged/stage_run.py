"""What a chunk holds while micro-batches run, whoever moves the values: the run on real ranks and the simulation
share this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sbpc._compat import storage_of
from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, Port
from sbpc.plans.chunk import Chunk
from sbpc.plans.staged.chunk_programs import ChunkPrograms
from sbpc.plans.staged.loop import JOINED, Loop
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS, piece_of
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, Parts

Values = dict[str, Any]
# by the last part of a program what reads it
LATER = {BEFORE: (), FORWARD: (INPUTS, WEIGHTS), INPUTS: (WEIGHTS,), WEIGHTS: (), AFTER: ()}


class StageRun:
    """One chunk on one rank during a step.

    fixed: values that are the same for all micro-batches. positions: the rank's place on each axis. batches: the
    values of each micro-batch in flight. added: the gradients so far. homes: gradients in their home. parted: of
    a program of which something comes early or late, by its parts, whether it adds to sums, and what its next piece
    reads.
    """

    def __init__(self, chunk: Chunk, programs: ChunkPrograms, fixed: Values, positions: Sequence[Tensor]) -> None:
        self.chunk, self.programs, self.fixed, self.positions = chunk, programs, fixed, positions
        self.batches: dict[int, Values] = {}
        self.added: Values = {}
        self.homes: Values = {}
        self.parted: dict[Parts, tuple[bool, list[Any]]] = {}

    def adds(self, which: Parts) -> bool:
        """Returns whether earlier micro-batches have left sums of the gradients that some parts make, or a piece of
        them."""
        parts, piece = piece_of(which)
        if piece > 0:
            return self.parted[parts][0]
        return not self.added.keys().isdisjoint(self.programs.makes(which))

    def given(self, which: Parts, batch: int) -> list[Any]:
        """Returns the inputs of the program of some parts, or of a piece of it."""
        parts, piece = piece_of(which)
        if piece > 0:
            return self.parted[parts][1].copy()
        values, program = self.batches.get(batch, {}), self.programs.program(parts, self.adds(parts))
        reads = program.early if piece else program.reads
        found = [values[name] if name in values else self.fixed[name] for name in reads]
        _, early = self.parted.pop(parts, (False, ()))
        return [*early, *found, *(self.added[name] for name in program.sums), *self.positions]

    def take(self, which: Parts, batch: int, results: Sequence[Any]) -> Values:
        """Keeps what the program of some parts gave, as long as others read it, and gradients as sums. Returns it by
        name. Behind it stands what the rest of the program reads, if something comes late."""
        adding = self.adds(which)
        program = self.programs.program(which, adding)
        late = frozenset().union(*program.late)
        now = [name for name in program.gives if name not in late]
        named = dict(zip(now, results))
        if program.late:
            self.parted[which] = adding, list(results[len(now) :])
        home = set(self.programs.home.values()) - set(self.programs.accumulated.values())
        self.homes |= {name: value for name, value in named.items() if name in home}
        self.fixed |= {name: value for name, value in named.items() if name in self.programs.before}
        values = self.batches.pop(batch, {}) | named
        read = frozenset().union(*(self.programs.later[part] for part in LATER[which[-1]]))
        if read:
            self.batches[batch] = {
                name: value for name, value in values.items() if name in read and name not in self.fixed
            }
        if not program.added and (fresh := self.programs.makes(which) & named.keys()):
            self.add({name: named[name] for name in fresh})
        return named

    def take_piece(self, which: Parts, results: Sequence[Any]) -> None:
        """Keeps the gradients that a piece of the program of some parts gave, and what the next one reads."""
        (parts, piece), adding = piece_of(which), self.adds(which)
        names = self.programs.program(parts, adding).late[piece - 1] if piece > 0 else ()
        self.homes |= dict(zip(names, results))
        self.parted[parts] = adding, list(results[len(names) :])

    def add(self, gradients: Values) -> None:
        """Takes a micro-batch's gradients as the first ones of sums, each in memory of its own."""
        others = (self.fixed, self.added, *self.batches.values())
        taken = {storage_of(value) for each in others for value in each.values() if isinstance(value, Tensor)}
        for name, value in gradients.items():
            whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
            own = whole and storage_of(value) not in taken
            self.added[name] = value if own else value.clone(memory_format=torch.contiguous_format)
            taken.add(storage_of(self.added[name]))

    def gradients(self) -> dict[Port, Tensor]:
        """Returns the gradients in their homes, each in memory of its own."""
        found: dict[Port, Tensor] = {}
        seen = {storage_of(value) for value in self.fixed.values() if isinstance(value, Tensor)}
        for port, name in self.programs.home.items():
            value = self.homes.pop(name) if name in self.homes else self.added[name]
            found[port] = value.clone() if storage_of(value) in seen else value
            seen.add(storage_of(found[port]))
        return found


def micro_batch(
    name: str, batch: int, leaves: Sequence[Tensor], before: Sequence[Tensor], joined: Joined, where: Any = None
) -> Tensor:
    """Returns an input of the body for a micro-batch, whole. leaves: the tensors of the step's arguments. where: on
    which device its number is made, as a CUDA graph can hold no copy of one of the CPU."""
    loop, source = joined.loop, joined.loop.inputs[name]
    if source.kind == "index":
        return torch.full((), batch, device=where)
    if source.kind == "before":
        return before[source.number]
    if source.kind == JOINED:
        return joined.whole(source.number)
    leaf = leaves[source.number]
    return leaf if source.dim is None else leaf.chunk(loop.count, source.dim)[batch]


def before_loop(
    loop: Loop, leaves: Sequence[Tensor], buffers: Mapping[str, Tensor], where: torch.device
) -> list[Tensor]:
    """Returns what every micro-batch reads of the whole batch. Of the arguments those come to a device that are read
    here."""
    given = [
        leaves[int(p.name)] if p.kind == INPUT else buffers[p.name]
        for p in loop.ports.inputs
        if p.kind in (INPUT, BUFFER)
    ]
    read = [bool(node.users) for node in loop.before.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        return list(loop.before(*(value.to(where) if reads else value for value, reads in zip(given, read))))


class Joined:
    """What comes out of the body, joined over the micro-batches."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.values: dict[int, dict[int, Tensor]] = {}
        self.came = Counter[int]()
        self.known: dict[int, Tensor] = {}

    def take(self, number: int, batch: int, value: Tensor) -> None:
        """Takes output `number` of a micro-batch, whole. A sum goes on from that of the micro-batches before."""
        how, values = self.loop.joins[number], self.values.setdefault(number, {})
        self.came[number] += 1
        if values and goes_on(how, value):
            value = join(how, [values.popitem()[1], value])
        if how != "same" or not values:
            values[batch] = value

    def results(self, numbers: Sequence[int]) -> list[Tensor]:
        """Returns these outputs, joined as the loop says."""
        return [self.whole(number) for number in numbers]

    def whole(self, number: int) -> Tensor:
        """Returns the values of all micro-batches as one. What is the same for all may have been made once, before
        them."""
        how, values = self.loop.joins[number], self.values[number]
        if number not in self.known:
            assert how == "same" or self.came[number] == self.loop.count, "all micro-batches leave it"
            parts = [values[at] for at in sorted(values)]
            self.known[number] = parts[0] if how == "same" else join(how, parts)
            values.clear()
        return self.known[number]

    def after(self, joined: Sequence[Tensor]) -> dict[Port, Any]:
        """Returns the results of the step from all joined outputs, in order."""
        with torch.no_grad():
            values = self.loop.after(*joined)
        ports = [port for port in self.loop.ports.outputs if port.kind != GRADIENT]
        return dict(zip(ports, values))


def goes_on(how: Any, value: Tensor) -> bool:
    """Returns whether values are joined one after the other, as they come. Narrow floating-point numbers are not added
    up so, as each sum would be rounded."""
    narrow = value.is_floating_point() and value.itemsize < torch.float32.itemsize
    return how in ("max", "min") or (how == "sum" and not narrow)


def join(how: Any, values: Sequence[Tensor]) -> Tensor:
    """Returns the values of all micro-batches as one, put along a dim or combined."""
    if isinstance(how, int):
        return torch.cat(list(values), how)
    stacked = torch.stack(list(values))
    return stacked.sum(0, dtype=stacked.dtype) if how == "sum" else stacked.amax(0) if how == "max" else stacked.amin(0)
