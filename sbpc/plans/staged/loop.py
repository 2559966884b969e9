"""A step as a loop over micro-batches: what is done around it, and what goes in and comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from sbpc.errors import PlanError
from sbpc.graph.ports import Port, Ports

JOINED = "joined"


@dataclass(frozen=True)
class Source:
    """Where an input of the body comes from.

    kind: "argument" (tensor leaf `number` of the arguments, cut into parts along `dim`, or whole where that is
    None), "before" (result `number` of what is computed before the loop), "index" (the number of the micro-batch),
    JOINED (output `number` of the body, joined when all forwards are done: backwards read it).
    """

    kind: str
    number: int
    dim: int | None = None


@dataclass(frozen=True)
class Loop:
    """A step as a loop over `count` micro-batches.

    graph: `body`, None in a plan that was read from a file. before: from the inputs and buffers of the step, whole,
    to what every micro-batch reads. after: from the joined outputs of the body to the results of the step.
    inputs: by name of an input of the body where it comes from. joins: by number of an output of the body how the
    micro-batches' values come together: "sum", "max", "min", "same", or the dim along which they are put. ports,
    shapes: those of the whole step, see `Plan`.
    """

    count: int
    graph: GraphModule | None
    before: GraphModule
    after: GraphModule
    inputs: Mapping[str, Source]
    joins: tuple[Any, ...]
    ports: Ports
    shapes: Mapping[Port, Tensor]

    @property
    def joined(self) -> dict[str, int]:
        """By name of an input of the body that comes when all forwards are done, which output of the body it is."""
        return {name: source.number for name, source in self.inputs.items() if source.kind == JOINED}

    @property
    def body(self) -> GraphModule:
        """The annotated graph that a micro-batch runs; its gradients add up over the micro-batches. Raises PlanError
        if it was not kept."""
        if self.graph is None:
            raise PlanError(
                "a plan that was read from a file holds its chunks alone\n  Plan the model anew with sbpc.plan."
            )
        return self.graph
