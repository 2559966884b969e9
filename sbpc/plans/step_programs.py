"""The programs of a step that is no loop: its forward, its backward, both as one, and how `no_sync` has them.

They are cut out of the boxed graph in the order in which it runs, and then written for a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from sbpc.graph.ports import GRADIENT, INPUT_GRADIENT, TANGENT, placeholders, results
from sbpc.graph.rewrite import Copies
from sbpc.plans.plan import Plan
from sbpc.plans.staged.chunk_programs import value_meta
from sbpc.plans.staged.schedules import FORWARD as EARLY
from sbpc.plans.staged.schedules import INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, PARTS, Parts, parts_of

JOINT, FORWARD, BACKWARD = "joint", "forward", "backward"
UNSENT, UNSENT_JOINT, ENDING = "unsent", "unsent joint", "ending"
NAMES = (JOINT, FORWARD, BACKWARD, UNSENT, UNSENT_JOINT, ENDING)
LATE = (INPUTS, WEIGHTS, AFTER)
OF_BACKWARD = (GRADIENT, INPUT_GRADIENT)  # which outputs


def names_of(ports: Any) -> tuple[str, ...]:
    """Returns the names of the programs of a step with these ports: without a backward the forward is all."""
    late = [port for port in (*ports.inputs, *ports.outputs) if port.kind in (TANGENT, *OF_BACKWARD)]
    return NAMES if late else (JOINT,)


@dataclass(frozen=True)
class Cut:
    """A piece of the boxed graph: what it reads, the parts that it runs, and what it gives, None for an absent result."""

    reads: Sequence[Node]
    which: Parts
    gives: Sequence[Node | None]


class StepPrograms:
    """The programs of a plan by name, made on first use. Behind what each reads comes the rank's position on each axis.

    joint: every placeholder -> every output. forward: the placeholders but the tangents -> the results, then the values saved for the
    backward. backward: the saved values, then the tangents -> the gradients. unsent, unsent joint: as backward and joint, but the
    ways of parameters' gradients home are apart (`ways_home`): in place of all gradients they give those of arguments, then what these
    ways begin with. ending: this -> the gradients of parameters.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.made: dict[Any, GraphModule] = {}

    def program(self, name: str, rank: int) -> GraphModule:
        """Returns a program of a rank; ranks with equal local shapes share it."""
        if name == JOINT or name not in names_of(self.plan.ports):
            return self.plan.local_at(rank)
        plan, key = self.plan, (name, self.plan.shape_class(rank))
        if key not in self.made:
            self.made[key] = plan.rewriter.localize(self.cut_out(name), plan.mesh, plan.mesh.coordinates(rank))
        return self.made[key]

    def cut_out(self, name: str) -> GraphModule:
        """Returns a program at global shapes."""
        cut, copies = self.cuts[name], Copies()
        for node in cut.reads:
            copies[node] = copies.given(node.name, value_meta(node))
        return copies.extracted(self.plan.boxed, [node for node in self.parts if self.parts[node] in cut.which], cut.gives)

    @functools.cached_property
    def parts(self) -> dict[Node, str]:
        """By node of the boxed graph, in order, its part of the step."""
        return parts_of(self.plan.boxed, None)

    @functools.cached_property
    def cuts(self) -> dict[str, Cut]:
        """By name the piece of the boxed graph that a program is, but the joint one, which is all of it."""
        gm, parts = self.plan.boxed, self.parts
        stored, ends = placeholders(gm), list(zip(gm.meta["ports"].outputs, results(gm)))
        takes = [node for port, node in stored.items() if port.kind != TANGENT]
        tangents = [node for port, node in stored.items() if port.kind == TANGENT]
        early = [node for port, node in ends if port.kind not in OF_BACKWARD]
        late = [node for port, node in ends if port.kind in OF_BACKWARD]
        others, homes = ([node for port, node in ends if port.kind == kind] for kind in (INPUT_GRADIENT, GRADIENT))
        saved = [node for node in self.read_by(LATE, late) if parts[node] == EARLY]
        left = [*others, *(node for node in self.read_by((AFTER,), homes) if parts[node] != AFTER)]
        return {
            FORWARD: Cut(takes, (EARLY,), [*early, *saved]),
            BACKWARD: Cut([*saved, *tangents], LATE, late),
            UNSENT: Cut([*saved, *tangents], (INPUTS, WEIGHTS), left),
            UNSENT_JOINT: Cut([*stored.values()], PARTS[:-1], [*early, *left]),
            ENDING: Cut([node for node in left[len(others) :] if node is not None], (AFTER,), homes),
        }

    def read_by(self, which: Parts, ends: Sequence[Node | None]) -> list[Node]:
        """Returns what some parts read, and these ends, each once."""
        read = [used for node, part in self.parts.items() if part in which for used in node.all_input_nodes]
        return list(dict.fromkeys([*read, *(node for node in ends if node is not None)]))
