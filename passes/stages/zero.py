"""ZeRO, parameter by parameter (Rajbhandari et al. 2020): what every rank holds whole is cut, and gathered when it
is needed.

A parameter is at a level, and each holds fewer bytes and sends more than the one before:

0  it is stored as the fastest layouts of the body have it; its gradient adds up over the micro-batches and is boxed
once 1  it and its optimizer state are cut over all ranks; it is gathered once before the micro-batches, its gradient
scattered once after them 2  its gradient is scattered in every micro-batch, so that the sum is cut, too
3  it is gathered in every micro-batch, once for the forward and once for the backward

Under a memory limit parameters move to higher levels, first those that save the most bytes for each second, until
the step fits.
"""

from __future__ import annotations

import fnmatch
import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
from torch.fx import GraphModule, Node

from sbpc.boxing.paths import seconds
from sbpc.graph.operands import outputs_of, shape_of, value_of
from sbpc.graph.ports import GRADIENT, PARAMETER, Port, placeholders, results
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish, exactly
from sbpc.mesh.states import B, Split
from sbpc.passes.assign.space import Space
from sbpc.plans.chunk import Assignment
from sbpc.plans.plan import Plan
from sbpc.plans.staged.part_memory import bytes_at
from sbpc.rules.choices import Choice, of_stored
from sbpc.solver import Problem, Value, Variable, solve

LEVELS = range(4)
Levels = Mapping[int, int]  # by number of a group; what is missing is at 0
Build = Callable[[Assignment, frozenset[Port]], Plan]


def within_levels(free: Plan, whole: Plan, memory: float, build: Build, best: float = inf) -> Plan:
    """Returns the plan of the fewest moves to higher levels that fits into `memory` bytes on each rank; if none
    does, one that does not.

    free: the plan without moves. whole: the plan of its body. build: makes the plan of a step from layouts of the
    body and what is in the loop. best: seconds of a plan that fits; more moves are not tried once one that does not
    fit is no faster. A move saves about what its parameters take, so what the stages of one plan lack says how many
    moves to try next.
    """
    held = [free.memory_of(stage)["total"] for stage in range(free.stages)]
    fits = free if max(held) <= memory else None
    if not fits and free.cost.seconds >= best:
        return free
    zero = Zero(whole, groups_of(whole.annotated), free.count)
    moves, plan, at = [] if fits else zero.moves(), free, 0
    saved = zero.saved(moves, free)
    few, most = 0, len(moves) + 1  # so many do not fit; no more than so many are needed, if any number fits
    while few + 1 < most:
        wanted = max(bisect_left(by, by[at] + more - memory) for by, more in zip(saved, held))
        at = min(max(wanted, few + 1), most - 1)
        plan = zero.built(moves[:at], build)
        held = [plan.memory_of(stage)["total"] for stage in range(plan.stages)]
        if max(held) <= memory:
            fits, most = plan, at
        elif plan.cost.seconds >= best:
            return fits or plan
        else:
            few = at
    return fits or plan


@dataclass(frozen=True)
class Group:
    """Parameters that go together, since a call reads them and nothing else. nodes: these, and what is made of them
    alone."""

    names: tuple[str, ...]
    nodes: tuple[Node, ...]


def groups_of(gm: GraphModule) -> list[Group]:
    """Returns the groups of all parameters of a body."""
    group: dict[Node, list[Node]] = {node: [node] for port, node in placeholders(gm).items() if port.kind == PARAMETER}
    names = {node: port.name for port, node in placeholders(gm).items()}
    for node in gm.graph.nodes:
        one = node.op == "call_function" and outputs_of(node) == 1 and value_of(node)[0] is node
        if one and node.all_input_nodes and all(used in group for used in node.all_input_nodes):
            joined = list(dict.fromkeys(itertools.chain(*(group[used] for used in node.all_input_nodes), [node])))
            group |= dict.fromkeys(joined, joined)
    each = {id(nodes): nodes for nodes in group.values()}.values()
    return [Group(tuple(names[node] for node in nodes if node in names), tuple(nodes)) for nodes in each]


class Move(NamedTuple):
    """A group of parameters that goes to a higher level, and about how many bytes of a rank that saves."""

    group: int
    level: int
    saved: int


@dataclass
class Zero:
    """The levels of the groups of parameters of a body. plan: the body, its layouts those of level 0. count:
    micro-batches."""

    plan: Plan
    groups: list[Group]
    count: int

    def built(self, moves: Sequence[Move], build: Build) -> Plan:
        """Returns the plan of a step after some moves."""
        levels = {move.group: move.level for move in moves}
        return build(self.assignment(levels), self.in_loop(levels))

    def moves(self) -> list[Move]:
        """Returns all moves of groups to higher levels, first those that save the most bytes for each second more."""
        found: list[tuple[float, Move]] = []
        for number in range(len(self.groups)):
            ways = [(self.bytes(number, level), self.seconds(number, level)) for level in LEVELS]
            level = 0
            while level < LEVELS[-1]:
                rates = {to: rate(ways[level], ways[to]) for to in LEVELS[level + 1 :]}
                before, level = level, max(rates, key=rates.__getitem__)
                if rates[level] > 0:
                    found.append((rates[level], Move(number, level, ways[before][0] - ways[level][0])))
        return [move for _, move in sorted(found, key=lambda each: (-each[0], each[1].level))]

    def saved(self, moves: Sequence[Move], free: Plan) -> list[list[int]]:
        """Returns by stage about how many bytes of its ranks the first moves save, none, one and so on up to all of
        them."""
        stages = {name: free.owners[at] for at, part in enumerate(free.chunk_costs) for name in part.homes}
        stage_of = [stages.get(group.names[0]) for group in self.groups]
        return [
            list(itertools.accumulate((move.saved * (stage_of[move.group] == stage) for move in moves), initial=0))
            for stage in range(free.stages)
        ]

    def in_loop(self, levels: Levels) -> frozenset[Port]:
        """Returns the parameters and gradients that are boxed in every micro-batch."""
        names = [(name, levels.get(number, 0)) for number, group in enumerate(self.groups) for name in group.names]
        gradients = {Port(GRADIENT, name) for name, level in names if level >= 2}
        return frozenset(gradients | {Port(PARAMETER, name) for name, level in names if level >= 3})

    def assignment(self, levels: Levels) -> Assignment:
        """Returns the layouts of the body with groups at these levels."""
        level_of = {name: levels.get(number, 0) for number, group in enumerate(self.groups) for name in group.names}
        ours, cut = self.plan.assignment, self.cut
        moved = {node.name for number, group in enumerate(self.groups) if levels.get(number, 0) for node in group.nodes}
        choices = {name: cut.choices[name] if name in moved else choice for name, choice in ours.choices.items()}
        boxed = {(name, 0) for name in moved}
        outputs = []
        for at, (port, node) in enumerate(zip(self.plan.ports.outputs, results(self.plan.annotated))):
            moves = port.kind == GRADIENT and level_of[port.name] > 0
            outputs.append(cut.outputs[at] if moves else ours.outputs[at])
            boxed |= {name_of(node)} if moves and node is not None else set()
        aliases = {key: cut.aliases[key] if key in boxed else layout for key, layout in ours.aliases.items()}
        return Assignment(choices, aliases, tuple(outputs))

    @cached_property
    def cut(self) -> Assignment:
        """The layouts of the levels from 1 on: those of the plan, but parameters are cut over all ranks where they
        can be and no pin says otherwise, and what is made of them alone is as is best then."""
        gm, mesh = self.plan.annotated, self.plan.mesh
        ours = {node for group in self.groups for node in group.nodes}
        layouts = {name: choice.output(0, mesh.axes) for name, choice in self.plan.assignment.choices.items()}
        names = {node: [node.name] for node in ours} | {
            node: self.plan.ports.names_of(port.name) for port, node in placeholders(gm, PARAMETER).items()
        }
        patterns = list(self.plan.options.pin)
        may_move = {node for node in ours if not any(fnmatch.filter(names[node], pattern) for pattern in patterns)}
        axes = tuple(axis for axis, size in enumerate(mesh.sizes) if size > 1)
        wishes = {}
        for node in gm.graph.nodes:
            if node in may_move and node.op == "placeholder" and may_be_cut(tuple(node.meta["val"].shape), mesh, axes):
                wishes[node.name] = Wish(spread=axes)
            elif node.name in layouts and (node not in may_move or node.op == "placeholder"):
                wishes[node.name] = exactly(layouts[node.name], "as in the plan")
        space = Space(gm, mesh, wishes, {})
        return space.assignment(
            with_best(space, space.known_labels(self.plan.assignment), [group.nodes for group in self.groups])
        )

    def seconds(self, number: int, level: int) -> float:
        """Returns the seconds of a step in which the parameters of a group and their gradients are boxed."""
        assignment = self.cut if level else self.plan.assignment
        gathering = sum(self.boxing(assignment, node) for node in self.groups[number].nodes)
        home = sum(self.boxing(assignment, node) for node in self.gradients[number])
        return gathering * (2 * self.count if level == 3 else 1) + home * (self.count if level >= 2 else 1)

    def bytes(self, number: int, level: int) -> int:
        """Returns about what a rank holds of the parameters of a group: stored, gathered, optimizer state and sums
        of gradients."""
        assignment, mesh = self.cut if level else self.plan.assignment, self.plan.mesh
        axes, copies = mesh.axes, self.plan.options.copies
        total = 0
        for node in self.groups[number].nodes:
            home, wanted = assignment.made(node, axes), self.wanted(assignment, node)
            total += bytes_at(node.meta["val"], home, mesh) * (1 + copies) if node.op == "placeholder" else 0
            total += sum(bytes_at(node.meta["val"], layout, mesh) for layout in wanted) if level < 3 else 0
        for node in self.gradients[number]:
            made = assignment.made(node, axes)
            left = next(iter(self.wanted(assignment, node)), made)
            total += bytes_at(node.meta["val"], left if level >= 2 else made, mesh)
        return total

    @cached_property
    def gradients(self) -> list[list[Node]]:
        """By group the nodes of its gradients that are boxed on their way home."""
        group = {name: number for number, each in enumerate(self.groups) for name in each.names}
        found: list[list[Node]] = [[] for _ in self.groups]
        for port, node in zip(self.plan.ports.outputs, results(self.plan.annotated)):
            if node is not None and port.kind == GRADIENT and self.wanted(self.cut, node):
                found[group[port.name]].append(node)
        return found

    @cached_property
    def places(self) -> dict[Node, list[int]]:
        """By result of the body the numbers of the outputs that it is."""
        found: dict[Node, list[int]] = {}
        for at, node in enumerate(results(self.plan.annotated)):
            if node is not None:
                found.setdefault(node, []).append(at)
        return found

    def wanted(self, assignment: Assignment, node: Node) -> list[Layout]:
        """Returns the other layouts in which a value is read or left."""
        axes = self.plan.mesh.axes
        left = [assignment.outputs[at] for at in self.places.get(node, ())]
        found = dict.fromkeys([*left, *assignment.read(node, axes)])
        return [layout for layout in found if layout not in (None, assignment.made(node, axes))]

    def boxing(self, assignment: Assignment, node: Node) -> float:
        """Returns the seconds in which a value is boxed to all layouts in which it is read or left."""
        wanted = self.wanted(assignment, node)
        if not wanted:
            return 0.0
        producer, index = value_of(node)
        made, alias = assignment.made(node, self.plan.mesh.axes), assignment.aliases[producer.name, index]
        about = (*shape_of(producer, index), self.plan.mesh)
        return seconds(made, alias, *about) + sum(seconds(alias, layout, *about) for layout in wanted)


def with_best(space: Space, labels: Sequence[int | None], groups: Iterable[Sequence[Node]]) -> list[int]:
    """Returns the labels of a space with the nodes of each group as is best, all others as they are. Equal groups
    are solved once."""
    found, known = [label or 0 for label in labels], dict[Hashable, list[int]]()
    touching: dict[int, list[Value]] = {}
    for value in space.values:
        for at in dict.fromkeys([value.producer, *(at for at, _ in value.consumers)]):
            touching.setdefault(at, []).append(value)
    for group in groups:
        free = {space.number[node]: place for place, node in enumerate(group)}
        variables, values = [space.variables[at] for at in free], list[Value]()
        key = list(map(id, (variable.costs for variable in variables)))
        for value in dict.fromkeys(value for at in free for value in touching.get(at, ())):
            ends = list[tuple[int, np.ndarray]]()
            for at, layouts in [(value.producer, value.out), *value.consumers]:
                if at in free:
                    ends.append((free[at], layouts))
                    key += free[at], id(layouts)
                else:  # a variable that has no choice
                    ends.append((len(variables), layouts[found[at]][None]))
                    variables.append(Variable("", np.zeros(1), space.variables[at].digits[:1]))
                    key += -1, int(layouts[found[at]])
            values.append(Value(*ends[0], ends[1:], value.closure))
            key.append(id(value.closure))
        if tuple(key) not in known:
            known[tuple(key)] = solve(Problem(variables, values)).labels
        for at, label in zip(free, known[tuple(key)]):
            found[at] = label
    return found


def name_of(node: Node) -> tuple[str, int]:
    """Returns the name of a value in an assignment."""
    producer, index = value_of(node)
    return producer.name, index


def rate(now: tuple[float, float], then: tuple[float, float]) -> float:
    """Returns the bytes that a way saves for each second more than another; both are bytes and seconds."""
    saved, more = now[0] - then[0], then[1] - now[1]
    return saved / more if more > 0 else inf if saved > 0 else -inf


def may_be_cut(shape: tuple[int, ...], mesh: Mesh, axes: Collection[int]) -> bool:
    """Returns whether a tensor may be cut over all of these axes."""
    order = tuple(range(len(mesh.axes)))
    candidates = of_stored(shape)
    by_state: dict[Any, Any] = {signature.outputs[0]: signature for signature in candidates.signatures}
    splits = [state for state in by_state if isinstance(state, Split)]
    for states in itertools.product(*(splits if axis in axes else [B] for axis in order)):
        if candidates.legal(Choice(tuple(by_state[state] for state in states), order), mesh.sizes):
            return True
    return False
