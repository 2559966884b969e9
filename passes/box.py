"""box: put boxing nodes on every edge whose two ends disagree; equal boxings of a value are shared."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import LazyGraphModule
from sbpc.boxing.paths import path
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import results
from sbpc.graph.rewrite import called, copied, put
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.plan import Assignment
from sbpc.rules.choices import Choice

ABOUT = ("phase", "stack_trace", "module")


def box(gm: GraphModule, assignment: Assignment, mesh: Mesh) -> GraphModule:
    """The graph with its layouts made true on every edge.

    Before: an annotated graph and a choice for every node. After: `meta["sbp"]` on every value, and on every edge both
    ends have the same layout; a boxing node is `boxing(x, step)` with the Step in `meta["step"]`. A value goes to its alias
    layout first, once, and from there to every other layout that is read. `meta["call"]`, on all but getitems: the name of
    the node of `gm` that a node stands for; on a boxing node that of the node that reads it, of a result that of the node
    that makes it. `meta["of"]`, on a boxing node: the name of the node of `gm` whose value it boxes.
    """
    return Boxer(gm, assignment, mesh).run()


def boxing(x: Tensor, step: str) -> Tensor:
    """One boxing step; at global shapes it changes nothing."""
    return x


class Boxer:
    """The graph being written, and which values stand in which layouts already."""

    def __init__(self, gm: GraphModule, assignment: Assignment, mesh: Mesh) -> None:
        self.gm, self.assignment, self.mesh = gm, assignment, mesh
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.parts: dict[Node, list[Any]] = {}  # the results of a node of several outputs that is taken apart
        self.made: dict[tuple[Node, int, Layout], Node] = {}
        self.due: dict[Node, list[Layout]] = {}
        for node, layout in zip(results(gm), assignment.outputs):
            if node is not None and layout is not None:
                self.due.setdefault(node, []).append(layout)

    def run(self) -> GraphModule:
        """Copy node by node, boxing what each node reads, and results as soon as they exist."""
        for node in self.gm.graph.nodes:
            if node.op == "output":
                outputs = [
                    None if result is None or layout is None else self.at(result, layout)
                    for result, layout in zip(results(self.gm), self.assignment.outputs)
                ]
                self.graph.output(tuple(outputs)).meta.update(node.meta)
                continue
            self.copy(node)
            for layout in self.due.get(node, ()):
                self.at(node, layout)
        result = LazyGraphModule(self.gm, self.graph)  # code is made when it is run
        result.meta.update(self.gm.meta)
        return result

    def copy(self, node: Node) -> None:
        """Copy one node with its operands in the layouts that its choice reads."""
        axes = self.mesh.axes
        if node.target is operator.getitem:
            producer, index = value_of(node)
            if producer in self.parts:
                self.copies[node] = self.parts[producer][index]
                return
            copy = copied(self.graph, node, lambda n: self.copies[n])
            copy.meta["sbp"] = self.copies[producer].meta["sbp"][index]
            self.copies[node] = copy
            return
        choice = self.assignment.choices[node.name]
        boxed = [self.at(operand, choice.input(slot, axes), node) for slot, operand in enumerate(operands(node))]
        if node.meta["candidates"].apart(choice):
            self.take_apart(node, choice, boxed)
            return
        reads = iter(boxed)
        copy = copied(self.graph, node, lambda _: next(reads))
        outputs = tuple(choice.output(index, axes) for index in range(len(choice.signatures[0].outputs)))
        several = isinstance(node.meta.get("val"), (tuple, list))
        copy.meta |= {"choice": choice, "sbp": outputs if several else outputs[0], "call": node.name}
        self.copies[node] = copy

    def take_apart(self, node: Node, choice: Choice, boxed: list[Node]) -> None:
        """The calls that stand for a node of which a factor is split that the op alone cannot bear, and their boxings."""
        candidates, axes = node.meta["candidates"], self.mesh.axes
        names = {index: user.name for user, index in ((user, value_of(user)[1]) for user in node.users)}
        several = isinstance(node.meta["val"], (tuple, list))
        outputs = {n: names.get(at, node.name) if several else node.name for at, n in enumerate(candidates.phases.outputs)}
        about = {key: node.meta[key] for key in ABOUT if key in node.meta}
        values: dict[int, Node] = dict(enumerate(boxed))
        for at, part in enumerate(candidates.phases.parts):
            name = outputs.get(part.number) or f"{node.name}_{part.match.op._schema.name.split('::')[1]}"
            args, kwargs = part.arguments(values)
            made = called(self.graph, part.match.op, args, kwargs, name)
            inner = candidates.part(at, choice)
            meta = {"val": part.val, "match": part.match, "signatures": part.match.signatures, "choice": inner}
            put(made, "meta", {**about, **meta, "sbp": inner.output(0, axes), "call": node.name})
            if "parts" in node.meta:
                factors, dims = node.meta["parts"][part.number]
                made.meta |= {"factors": factors, "dims": (dims,)}
            values[part.number] = self.walk(made, candidates.read(part.number, choice, axes), made, node)
        results: list[Any] = [None if number is None else values[number] for number in candidates.phases.outputs]
        if several:
            self.parts[node] = results
        else:
            (self.copies[node],) = results

    def at(self, node: Node, layout: Layout, reader: Node | None = None) -> Node:
        """The value of `node` in `layout`, boxed if it is not there yet."""
        copy, key = self.copies[node], value_of(node)
        if copy.meta["sbp"] == layout:
            return copy
        place = (*key, layout)
        made = self.made.get(place)
        if made is None:
            alias = self.assignment.aliases[key[0].name, key[1]]
            source = copy if layout == alias else self.at(node, alias, reader)
            made = self.made[place] = self.walk(source, layout, node, reader or node)
        return made

    def walk(self, source: Node, layout: Layout, node: Node, reader: Node) -> Node:
        """The boxing nodes of the cheapest path from a value to a layout."""
        value = node.meta["val"]
        for step in path(source.meta["sbp"], layout, tuple(value.shape), value.element_size(), self.mesh):
            source = called(self.graph, boxing, (source, str(step)), {}, f"box_{node.name}")
            about: dict[str, Any] = {key: reader.meta[key] for key in ABOUT if key in reader.meta}
            producer = value_of(node)[0]
            names = {"of": producer.meta.get("call", producer.name), "call": value_of(reader)[0].name}
            put(source, "meta", {"val": value, "sbp": step.after, "step": step, **names, **about})
        return source
