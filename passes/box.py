"""Boxes: puts boxing nodes on every edge whose two ends disagree. Equal boxings of a value are shared."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.boxing.paths import path
from sbpc.graph.about import ORIGIN, about
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import results
from sbpc.graph.rewrite import Copies, called
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.chunk import Assignment
from sbpc.rules.choices import Choice
from sbpc.rules.sum_types import sent_in, sums_of


def box(gm: GraphModule, assignment: Assignment, mesh: Mesh) -> GraphModule:
    """Returns the graph with its layouts made true on every edge.

    Before: an annotated graph and a choice for every node. After: `meta["sbp"]` on every value, and on every edge
    both ends have the same layout; a boxing node is `boxing(x, step)` with the Step in `meta["step"]`. A value goes
    to its alias layout first, once, and from there to every other layout that is read. `meta["call"]` is on all
    nodes but getitems: the name of the node of `gm` for which a node stands, or, on a boxing node, which reads the
    boxed value (which makes it, where the value is a result). `meta["of"]` is on boxing nodes: the name of the node
    of `gm` whose value is boxed.
    """
    return Boxer(gm, assignment, mesh).run()


def boxing(x: Tensor, step: str) -> Tensor:
    """Stands for one boxing step. At global shapes it changes nothing."""
    return x


class Boxer(Copies):
    """Writes the boxed graph, and knows which values stand in which layouts already."""

    def __init__(self, gm: GraphModule, assignment: Assignment, mesh: Mesh) -> None:
        super().__init__()
        self.gm, self.assignment, self.mesh = gm, assignment, mesh
        self.parts: dict[Node, list[Any]] = {}  # the results of a node of several outputs that is taken apart
        self.boxed: dict[tuple[Node, int, Layout], Node] = {}
        self.sent_in = sent_in(gm)
        self.due: dict[Node, list[Layout]] = {}  # by result: the layouts in which it is left
        for node, layout in zip(results(gm), assignment.outputs):
            if node is not None and layout is not None:
                self.due.setdefault(node, []).append(layout)

    def run(self) -> GraphModule:
        """Copies node by node, boxing what each node reads, and results as soon as they exist."""
        for node in self.gm.graph.nodes:
            if node.op == "output":
                outputs = [
                    None if result is None or layout is None else self.at(result, layout)
                    for result, layout in zip(results(self.gm), self.assignment.outputs)
                ]
                self.graph.output(tuple(outputs)).meta.update(node.meta)
                continue
            self.write(node)
            for layout in self.due.get(node, ()):
                self.at(node, layout)
        return self.module(self.gm)

    def write(self, node: Node) -> None:
        """Copies one node with its operands in the layouts that its choice reads."""
        axes = self.mesh.axes
        if node.target is operator.getitem:
            producer, index = value_of(node)
            if producer in self.parts:
                self[node] = self.parts[producer][index]
                return
            self.keep(node).meta["sbp"] = self[producer].meta["sbp"][index]
            return
        choice = self.assignment.choices[node.name]
        boxed = [self.at(operand, choice.input(slot, axes), node) for slot, operand in enumerate(operands(node))]
        if node.meta["candidates"].apart(choice):
            self.take_apart(node, choice, boxed)
            return
        reads = iter(boxed)
        copy = self.keep(node, lambda _: next(reads))
        outputs = tuple(choice.output(index, axes) for index in range(len(choice.signatures[0].outputs)))
        several = isinstance(node.meta.get("val"), (tuple, list))
        copy.meta |= {"choice": choice, "sbp": outputs if several else outputs[0], "call": node.name}

    def take_apart(self, node: Node, choice: Choice, boxed: list[Node]) -> None:
        """Writes the calls, and their boxings, that stand for a node whose choice splits a factor that the op alone
        cannot bear."""
        candidates, axes = node.meta["candidates"], self.mesh.axes
        names = {value_of(user)[1]: user.name for user in node.users}
        several = isinstance(node.meta["val"], (tuple, list))
        outputs = {
            n: names.get(at, node.name) if several else node.name for at, n in enumerate(candidates.phases.outputs)
        }
        values: dict[int, Node] = dict(enumerate(boxed))
        for at, part in enumerate(candidates.phases.parts):
            name = outputs.get(part.number) or f"{node.name}_{part.match.op._schema.name.split('::')[1]}"
            args, kwargs = part.arguments(values)
            inner = candidates.part(at, choice)
            meta = {"val": part.val, "match": part.match, "signatures": part.match.signatures, "choice": inner}
            meta |= {**about(node, ORIGIN), "sbp": inner.output(0, axes), "call": node.name}
            call = called(self.graph, part.match.op, args, kwargs, name, meta)
            if "parts" in node.meta:
                factors, dims = node.meta["parts"][part.number]
                call.meta |= {"factors": factors, "dims": (dims,)}
            values[part.number] = self.walk(call, candidates.read(part.number, choice, axes), call, node)
        results: list[Any] = [None if number is None else values[number] for number in candidates.phases.outputs]
        if several:
            self.parts[node] = results
        else:
            (self[node],) = results

    def at(self, node: Node, layout: Layout, reader: Node | None = None) -> Node:
        """Returns the value of `node` in `layout`, boxed if it is not there yet."""
        copy, (producer, index) = self[node], value_of(node)
        if copy.meta["sbp"] == layout:
            return copy
        key = producer, index, layout
        if key not in self.boxed:
            alias = self.assignment.aliases[producer.name, index]
            source = copy if layout == alias else self.at(node, alias, reader)
            self.boxed[key] = self.walk(source, layout, node, reader or node)
        return self.boxed[key]

    def walk(self, source: Node, layout: Layout, node: Node, reader: Node) -> Node:
        """Writes the boxing nodes of the cheapest path from a value to a layout, and returns the last one."""
        value, producer = node.meta["val"], value_of(node)[0]
        meta = about(reader, ORIGIN)
        meta |= {"val": value, "of": producer.meta.get("call", producer.name), "call": value_of(reader)[0].name}
        sums = self.sent_in.get(value_of(node)) or sums_of(node, node.users)
        for step in path(source.meta["sbp"], layout, tuple(value.shape), value.element_size(), self.mesh, sums):
            meta |= {"sbp": step.after, "step": step}
            source = called(self.graph, boxing, (source, str(step)), {}, f"box_{node.name}", meta)
        return source
