"""What goes into and comes out of a captured program: one port per placeholder and per output, by kind and name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.fx import GraphModule, Node

T = TypeVar("T")
PARAMETER, BUFFER, INPUT, SEED, TANGENT = "parameter", "buffer", "input", "seed", "tangent"
OUTPUT, MUTATION, GRADIENT, INPUT_GRADIENT = "output", "mutation", "gradient", "input_gradient"
INPUTS = (PARAMETER, BUFFER, INPUT, SEED, TANGENT)
OUTPUTS = (OUTPUT, MUTATION, GRADIENT, INPUT_GRADIENT)
HOMES = {GRADIENT: PARAMETER, MUTATION: BUFFER, INPUT_GRADIENT: INPUT}
"""Kinds of outputs that are left in the layout of a placeholder -> the kind of that placeholder."""

ONCE = "once"
"""The key in the meta of the body of a loop over micro-batches: by PARAMETER and GRADIENT, what part of its seconds
a boxing of these counts, as it is done once for all micro-batches. What is not there is done for each."""


@dataclass(frozen=True)
class Port:
    """One placeholder or one output of a program.

    Kinds of placeholders: parameter, buffer (by qualified name; a tied one by its first), input (named "0", "1", ...
    by its place among the tensor leaves of the arguments), seed (0-dim int64, where random numbers are drawn),
    tangent ("0", ... of which output). Kinds of outputs:
    output ("0", ... by its place among the tensor leaves of the outputs), mutation (the new value of a buffer),
    gradient (of the parameter of that name), input_gradient (of the input of that name).
    """

    kind: str
    name: str

    def __hash__(self) -> int:
        return hash(self.name)  # which a text remembers


SEED_PORT = Port(SEED, "seed")


@dataclass(frozen=True)
class Ports:
    """The ports of a program, in the order of its placeholders and of its flat output list.

    arguments, results: the structures (see `sbpc.graph.pytree`) of `(args, kwargs)` and of what the model returns.
    tied: every further name of a tied parameter or buffer -> its first name. unused: trainable parameters that no
    output depends on. frozen: parameters that ask for no gradient. masters: by name of a parameter that is stored in
    float32, the type in which the model has it and its forward reads it.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    arguments: Any = None
    results: Any = None
    tied: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    masters: dict[str, str] = field(default_factory=dict)

    def names_of(self, first: str) -> list[str]:
        """All names of a parameter or buffer, the first of them first."""
        return [first, *(name for name, other in self.tied.items() if other == first)]


def placeholders(gm: GraphModule, *kinds: str) -> dict[Port, Node]:
    """The placeholder of every port of a program, in order, or of those of some kinds; a rank's positions come last
    and have none."""
    stored = zip(gm.meta["ports"].inputs, gm.graph.find_nodes(op="placeholder"))
    return {port: node for port, node in stored if not kinds or port.kind in kinds}


def outputs(gm: GraphModule, *kinds: str) -> list[tuple[Port, Node]]:
    """The ports of a program's results, or of those of some kinds, with their nodes; absent results are left out."""
    ends = zip(gm.meta["ports"].outputs, results(gm))
    return [(port, node) for port, node in ends if node is not None and (not kinds or port.kind in kinds)]


def add_port(ports: dict[Port, T], kind: str, value: T) -> Port:
    """Adds a value under the next port of a kind, "0", "1", ..., and returns that."""
    port = Port(kind, str(sum(each.kind == kind for each in ports)))
    ports[port] = value
    return port


def result_name(place: int) -> str:
    """The name of what is at a place of the output list, in the layout in which it is left; no node has such a name."""
    return f"output {place}"


def results(gm: GraphModule) -> list[Node | None]:
    """The nodes of the flat output list of a captured graph, None for an absent result."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return list(output.args[0])  # type: ignore[arg-type]
