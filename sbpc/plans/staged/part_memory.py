"""What a chunk holds on the busiest rank: stored, gathered before the micro-batches, kept by one of them, and for a moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from torch import Tensor
from torch.fx import Node

from sbpc.graph.ports import GRADIENT, PARAMETER, results
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import numel
from sbpc.plans.memory import Life, Moment
from sbpc.plans.plan import Plan
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, FREE

PROGRAMS = (BEFORE, FORWARD, INPUTS, WEIGHTS, AFTER)  # the order in which parts run, whatever that of the graph
FIXED, SAVED, GATHERED = "fixed", "saved", "gathered"
Storage = tuple[int, str]  # its number, and the part that makes it where each makes its own, else ""


def memory_of(plan: Plan, parts: Mapping[Node, str]) -> tuple[dict[str, int], int, int, int, int, int, int, int]:
    """Returns the memory of a chunk as `PartCost` has it, from `homes` on."""
    boxed, mesh, life = plan.unscheduled, plan.mesh, plan.life
    ends = list(zip(plan.ports.outputs, results(boxed)))
    homes = {
        port.name: bytes_at(value, plan.given[port], mesh) for port, value in plan.shapes.items() if port.kind == PARAMETER
    }
    trained = sum(homes[port.name] for port, _ in ends if port.kind == GRADIENT)
    sums = {summand(node, parts) for port, node in ends if port.kind == GRADIENT and node is not None}
    added = sum(bytes_at(node.meta["val"], node.meta["sbp"], mesh) for node in sums)
    added_up = {storage for node in sums for storage in life.values[node]}
    calls = list(in_order(life, parts))
    phase = [PROGRAMS.index(part) for part, _, _ in calls]
    close = {each: at for at, each in enumerate(phase)}
    last, readers = dict[Storage, int](), dict[int, set[str]]()
    for at, (part, reads, makes) in enumerate(calls):
        for storage in (*reads, *makes):
            readers.setdefault(storage[0], set()).add(part)
            if storage[0] not in added_up or part != AFTER:  # behind the micro-batches it is the sum that is read
                last[storage] = at
    kept = {
        storage: kind
        for storage, owner in enumerate(life.owner)
        if (kind := kind_of(parts[owner], readers.get(storage, set()), owner.op == "placeholder")) is not None
    }
    saved, gathered = (sum(life.size[each] for each, kind in kept.items() if kind == which) for which in (SAVED, GATHERED))
    most, alive, held = [0] * len(PROGRAMS), 0, 0  # held: of alive, what has no reader left but was given to the program that runs
    made = first = 0  # gradients so far; what is alive with them when the first micro-batch comes back
    dying, unread = dict[int, int](), dict[int, int]()
    for at, (part, reads, makes) in enumerate(calls):
        for number, place in makes:
            if number not in kept:
                size, storage = life.size[number], (number, place)
                alive += size
                end = last[storage] if number in added_up or life.last[number] < inf else close[phase[at]]
                given = (part, calls[end][0]) == (INPUTS, WEIGHTS)
                unread[end] = unread.get(end, 0) + (size if given else 0)
                end = close[phase[end]] if given else end
                dying[end] = dying.get(end, 0) + size
        most[phase[at]] = max(most[phase[at]], alive)
        first = max(first, alive - held + made) if part in (INPUTS, WEIGHTS) else first
        held += unread.pop(at, 0)
        alive -= dying.pop(at, 0)
        held = 0 if at == close.get(PROGRAMS.index(WEIGHTS)) else held
        made += sum(life.size[each[0]] for each in {*reads, *makes} if each[0] in added_up and last.get(each) == at)
    return homes, trained, added, gathered, saved, max(most[1:-1]), first, max(most[0], most[-1])


def in_order(life: Life, parts: Mapping[Node, str]) -> Iterator[tuple[str, list[Storage], list[Storage]]]:
    """Yields by call its part, what it reads and what it makes.

    The parts follow each other as they run, and what is FREE is made where a part first reads it, in each part anew.
    """
    makers = {made: m for m in life.moments if free(m, parts) for made, _ in m.makes}
    done: set[Storage] = set()

    def of(part: str, storages: Sequence[int]) -> list[Storage]:
        return [(storage, part if storage in makers else "") for storage in storages]

    def call(part: str, moment: Moment) -> Iterator[tuple[str, list[Storage], list[Storage]]]:
        for storage in of(part, moment.reads):
            if storage[1] and storage not in done:
                done.update(of(part, [made for made, _ in makers[storage[0]].makes]))
                yield from call(part, makers[storage[0]])
        yield part, of(part, moment.reads), of(part, [made for made, _ in moment.makes])

    named = [(part_of(moment, parts), moment) for moment in life.moments if not free(moment, parts)]
    for part, moment in sorted(named, key=lambda each: PROGRAMS.index(each[0])):
        yield from call(part, moment)


def part_of(moment: Moment, parts: Mapping[Node, str]) -> str:
    """Returns the part in which a call runs; what is given to a program of its own is there from the first on."""
    part = parts.get(moment.node, FORWARD)
    return FORWARD if part == FREE else part


def free(moment: Moment, parts: Mapping[Node, str]) -> bool:
    """Returns whether a call runs wherever its value is read."""
    return moment.node.op == "call_function" and parts[moment.node] == FREE


def kind_of(part: str, readers: set[str], given: bool) -> str | None:
    """Returns as what a storage is counted, None if it is alive for a moment. part: that makes it. given: a placeholder."""
    if given and part in (BEFORE, FREE):
        return FIXED
    if part == BEFORE and readers - {BEFORE}:
        return GATHERED
    return SAVED if part == FORWARD and readers & {INPUTS, WEIGHTS, AFTER} else None


def summand(node: Node, parts: Mapping[Node, str]) -> Node:
    """Returns what goes into the boxings of a gradient on its way home."""
    while parts[node] == AFTER:
        node = next(used for used in node.all_input_nodes if parts[used] not in (FREE, BEFORE))
    return node


def bytes_at(value: Tensor, layout: Layout | None, mesh: Mesh) -> int:
    """Returns the bytes of a tensor in a layout on the busiest rank."""
    cuts = {} if layout is None else layout.cuts
    return value.element_size() * int(numel(value.shape, [cuts.get(dim, ()) for dim in range(value.dim())], mesh.sizes))
