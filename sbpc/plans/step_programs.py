"""The programs of a step that is no loop: its forward, its backward, both as one, and how `no_sync` has them.

They are cut out of the boxed graph in the order in which it runs, and then written for a rank.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from sbpc.graph.ports import (
    GRADIENT,
    INPUT_GRADIENT,
    INPUTS,
    MUTATION,
    OUTPUT,
    OUTPUTS,
    TANGENT,
    Ports,
    placeholders,
    results,
)
from sbpc.graph.rewrite import Copies
from sbpc.plans.plan import Plan
from sbpc.plans.staged import schedules
from sbpc.plans.staged.chunk_programs import value_meta
from sbpc.plans.staged.schedules import WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, PARTS, Parts, constants, parts_of

JOINT, FORWARD, BACKWARD = "joint", "forward", "backward"
UNSENT, UNSENT_JOINT, ENDING = "unsent", "unsent joint", "ending"  # those of `no_sync`: see `ways_home`
SAVED, SUMMED = "saved values", "sums of gradients"
GIVEN, EARLY, LATE = tuple(kind for kind in INPUTS if kind != TANGENT), (OUTPUT, MUTATION), (GRADIENT, INPUT_GRADIENT)


class Interface(NamedTuple):
    """What a program is: the parts that it runs, and what goes in and comes out.

    reads: what another program has left for it, None for nothing; the inputs of some kinds come behind that, then
    the rank's position on each axis. gives: what it leaves for another one, behind the outputs of some kinds.
    """

    which: Parts
    reads: str | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gives: str | None


INTERFACES = {
    JOINT: Interface(PARTS, None, INPUTS, OUTPUTS, None),
    FORWARD: Interface((schedules.FORWARD,), None, GIVEN, EARLY, SAVED),
    BACKWARD: Interface((schedules.INPUTS, WEIGHTS, AFTER), SAVED, (TANGENT,), LATE, None),
    UNSENT: Interface((schedules.INPUTS, WEIGHTS), SAVED, (TANGENT,), (INPUT_GRADIENT,), SUMMED),
    UNSENT_JOINT: Interface(PARTS[:-1], None, INPUTS, (*EARLY, INPUT_GRADIENT), SUMMED),
    ENDING: Interface((AFTER,), SUMMED, (), (GRADIENT,), None),
}


def names_of(ports: Ports) -> tuple[str, ...]:
    """Returns the names of the programs of a step with these ports: without a backward the forward is all."""
    late = any(port.kind in (TANGENT, *LATE) for port in (*ports.inputs, *ports.outputs))
    return tuple(INTERFACES) if late else (JOINT,)


class StepPrograms:
    """The programs of a plan by name, made on first use."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.made: dict[Any, GraphModule] = {}

    def program(self, name: str, rank: int) -> GraphModule:
        """Returns a program of a rank; ranks with equal local shapes share it."""
        if name == JOINT or name not in names_of(self.plan.ports):
            return self.plan.local_at(rank)
        plan, key = self.plan, (name, self.plan.chunk.shape_class(rank))
        if key not in self.made:
            whole = self.cut_out(INTERFACES[name])
            self.made[key] = plan.rewriter.localize(whole, plan.mesh, plan.mesh.coordinates(rank))
        return self.made[key]

    def cut_out(self, piece: Interface) -> GraphModule:
        """Returns a program at global shapes."""
        gm, copies = self.plan.boxed, Copies()
        given, ends = placeholders(gm).items(), zip(self.plan.ports.outputs, results(gm))
        for node in (*self.left.get(piece.reads, ()), *(node for port, node in given if port.kind in piece.inputs)):
            copies[node] = copies.given(node.name, value_meta(node))
        gives = [*(node for port, node in ends if port.kind in piece.outputs), *self.left.get(piece.gives, ())]
        body = [node for node, part in self.parts.items() if part in piece.which or node in self.fixed]
        return copies.extracted(gm, body, gives)

    @functools.cached_property
    def fixed(self) -> set[Node]:
        """What the ways home compute again, as it is no sum of gradients."""
        return constants(self.plan.boxed)

    @functools.cached_property
    def parts(self) -> dict[Node, str]:
        """By node of the boxed graph, in order, its part of the step."""
        return parts_of(self.plan.boxed, None)

    @functools.cached_property
    def left(self) -> dict[str | None, list[Node]]:
        """What programs leave for others."""
        found: dict[str | None, list[Node]] = {}
        for what, name, again in ((SAVED, BACKWARD, ()), (SUMMED, ENDING, self.fixed)):
            piece, ends = INTERFACES[name], zip(self.plan.ports.outputs, results(self.plan.boxed))
            mine = [node for node, part in self.parts.items() if part in piece.which]
            read = [used for node in mine for used in node.all_input_nodes if used not in again]
            read += [node for port, node in ends if port.kind in piece.outputs and node is not None]
            found[what] = [node for node in dict.fromkeys(read) if self.parts[node] not in piece.which]
        return found
