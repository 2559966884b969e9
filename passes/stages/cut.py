"""Cuts the body of a loop into stages: a graph for each, with what it receives and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from sbpc.errors import PlanError, at_node
from sbpc.graph.about import SENDS, about
from sbpc.graph.operands import is_late, made_of
from sbpc.graph.ports import GRADIENT, INPUT, OUTPUT, PARAMETER, TANGENT, Port, Ports, add_port, outputs, placeholders
from sbpc.graph.pytree import structures
from sbpc.graph.rewrite import Copies
from sbpc.passes.stages.balance import Places, stage_at

aten = torch.ops.aten


@dataclass
class StageGraph:
    """The graph of one stage.

    graph: a captured graph, whose inputs are those of the body that it reads, then what it receives in the forward;
    its tangents are what it receives in the backward, and its outputs those of the body, then what it sends.
    arguments: by its inputs, the name of the body's input. results: by its outputs, the number of the body's output.
    receives, sends: by port, the name of the value.
    """

    graph: GraphModule
    arguments: dict[Port, str]
    results: dict[Port, int]
    receives: dict[Port, str]
    sends: dict[Port, str]


def cut(body: GraphModule, places: Places, cuts: Sequence[int], joined: Mapping[str, int]) -> list[StageGraph]:
    """Returns the pieces of a body. places: of its calls. cuts: the first place of every stage but the first. joined:
    see `Loop`; such a value comes where its output is made.

    A gradient that is the sum of terms of several stages has a term in each. Raises PlanError if a stage would need
    a value of a later one before that has it.
    """
    return Cutter(body, places, cuts, joined).pieces()


class Cutter:
    """Sorts nodes into stages, and writes a graph for each.

    fixed: what is the same in all micro-batches. It is made once a step, by every stage that reads it: it never
    crosses.
    """

    def __init__(self, body: GraphModule, places: Places, cuts: Sequence[int], joined: Mapping[str, int]) -> None:
        self.body, self.count, self.joined = body, len(cuts) + 1, joined
        self.stage = {node: stage_at(place, cuts) for node, place in places.items()}
        ends = dict(outputs(body))
        for port, node in placeholders(body, INPUT).items():
            if port.name in joined:
                made = ends[Port(OUTPUT, str(joined[port.name]))]
                self.stage |= dict.fromkeys(node.users, self.stage_of(made))
        inputs = placeholders(body, INPUT, TANGENT).values()
        self.fixed = made_of(
            body, (node for node in body.graph.nodes if not node.all_input_nodes and node not in inputs)
        )
        self.terms: list[tuple[Port, Node, int]] = []  # outputs of the body by stage: port, value, stage
        self.added: set[Node] = set()  # sums over stages, which are left out
        for port, node in outputs(body):
            self.terms += [(port, term, self.stage_of(term)) for term in self.split(port, node)]

    def stage_of(self, node: Node) -> int:
        """Returns the stage of a value; what depends on no parameter is the last one's, where the loss is."""
        return self.stage.get(node, self.count - 1)

    def split(self, port: Port, node: Node) -> list[Node]:
        """Returns the terms of a gradient, one for each stage that has one."""
        plain = (
            node.target is aten.add.Tensor
            and len(node.args) == 2
            and not node.kwargs
            and len(node.all_input_nodes) == 2
        )
        if port.kind != GRADIENT or not plain or set(node.users) != {self.body.graph.output_node()}:
            return [node]
        added = {node}
        terms = [term for used in node.all_input_nodes for term in self.inner(used, added)]
        if len({self.stage_of(term) for term in terms}) < len(terms):
            return [node]
        self.added |= added
        return terms

    def inner(self, node: Node, added: set[Node]) -> list[Node]:
        """Returns the terms of an operand of a sum that nothing else reads. added: takes the sums that they replace."""
        plain = node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs and len(node.users) == 1
        if not plain or len({self.stage_of(used) for used in node.all_input_nodes}) < 2:
            return [node]
        added.add(node)
        return [term for used in node.all_input_nodes for term in self.inner(used, added)]

    def pieces(self) -> list[StageGraph]:
        """Returns the pieces, first stage first."""
        needs = [self.needed(stage) for stage in range(self.count)]
        sent: list[dict[Node, None]] = [{} for _ in needs]  # by stage the values that others read
        for stage, (_, received) in enumerate(needs):
            for node in received:
                self.check(node, stage)
                sent[self.stage[node]][node] = None
        return [self.piece(stage, *needs[stage], list(sent[stage])) for stage in range(self.count)]

    def needed(self, stage: int) -> tuple[set[Node], list[Node]]:
        """Returns the nodes of a stage, and the values that it receives, in the order of the graph.

        What is the same in all micro-batches is received by none: every stage that reads it makes it once a step.
        """
        stored = placeholders(self.body)
        ends = [node for _, node, at in self.terms if at == stage]
        ends += [
            stored[Port(PARAMETER, port.name)] for port, _, at in self.terms if at == stage and port.kind == GRADIENT
        ]
        apart = self.fixed | self.added
        todo = [node for node, at in self.stage.items() if at == stage and node not in apart] + ends
        inside, received = set[Node](), set[Node]()
        while todo:
            node = todo.pop()
            if node in inside or node in received:
                continue
            if node not in self.fixed and self.stage.get(node, stage) != stage:
                received.add(node)
                continue
            inside.add(node)
            todo += node.all_input_nodes
        order = [node for node in self.body.graph.nodes if node in received]
        return inside, order

    def check(self, node: Node, stage: int) -> None:
        """Raises PlanError if a stage needs a value before the stage that makes it has it."""
        early = any(not is_late(user) and self.stage.get(user) == stage for user in node.users)
        backwards = self.stage[node] > stage
        if (early and backwards) or (is_late(node) and not backwards):
            what = f"stage {stage} needs this value of stage {self.stage[node]} before that computes it"
            raise PlanError(at_node(what, node, "Cut the model into fewer stages."))

    def piece(self, stage: int, inside: set[Node], received: list[Node], sent: list[Node]) -> StageGraph:
        """Writes the graph of a stage. Its outputs are gradients, those of the body, and what it sends."""
        takes, leaves = dict[Port, Node](), dict[Port, Node]()
        arguments, gives = dict[Port, str](), dict[Port, int]()
        for port, node in placeholders(self.body).items():
            if node in inside and port.kind == INPUT:  # what is joined behind the forwards comes as a gradient does
                arguments[add_port(takes, TANGENT if port.name in self.joined else INPUT, node)] = port.name
            elif node in inside:
                takes[port] = node
        in_order = sorted(received, key=lambda node: self.comes_late(node, stage))
        receives = {
            add_port(takes, TANGENT if self.comes_late(node, stage) else INPUT, node): node.name for node in in_order
        }
        for port, node, at in self.terms:
            if at == stage and port.kind == OUTPUT:
                gives[add_port(leaves, OUTPUT, node)] = int(port.name)
            elif at == stage:
                leaves[port] = node
        sends = {add_port(leaves, OUTPUT, node): node.name for node in sent}
        copies = Copies()
        for node in takes.values():
            copies[node] = copies.given(node.name, about(node, ("val", SENDS)))
        for node in self.body.graph.nodes:
            if node in inside and node.op != "placeholder":
                copies.keep(node)
        copies.left(leaves.values(), self.body.graph.output_node().meta)
        graph = copies.module(self.body, self.body.meta | {"ports": self.ports(tuple(takes), tuple(leaves))})
        return StageGraph(graph, arguments, gives, receives, sends)

    def comes_late(self, node: Node, stage: int) -> bool:
        """Returns whether a value is received for the backward: nothing of the stage's forward reads it."""
        return is_late(node) or self.stage[node] > stage

    def ports(self, takes: tuple[Port, ...], leaves: tuple[Port, ...]) -> Ports:
        """Returns the ports of a stage."""
        old, names = self.body.meta["ports"], {port.name for port in takes}
        counts = (sum(port.kind == kind for port in ports) for kind, ports in ((INPUT, takes), (OUTPUT, leaves)))
        tied = {name: first for name, first in old.tied.items() if first in names}
        frozen = tuple(name for name in old.frozen if name in names)
        return Ports(takes, leaves, **structures(*counts), tied=tied, frozen=frozen)
