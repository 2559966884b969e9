"""assign: one layout for every value and a home layout for every parameter, as cheap as the solver can find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from sbpc.boxing import closure
from sbpc.choices import Candidates, Choice, may_cut, of_stored, operands, stored, value_of
from sbpc.errors import LayoutError, PinError, at_node
from sbpc.layout import Layout, broadcast
from sbpc.mesh import Mesh
from sbpc.pins import Wish
from sbpc.plan import Assignment, results
from sbpc.ports import GRADIENT, HOMES, PARAMETER, Port, placeholders
from sbpc.pricing import apart_seconds, call_seconds
from sbpc.solver import Problem, Value, Variable, solve, star, total
from sbpc.states import Split


class Space:
    """The solver's problem of an annotated graph, and the way back from labels to layouts.

    Before: candidates on every node. After `solve`: a choice for every node, an alias layout for every value, a layout
    for every output. wishes: by node name; outputs: by place in the output list (one that is missing is whole on all
    ranks). Raises PinError if a wish leaves a node nothing.
    """

    def __init__(self, gm: GraphModule, mesh: Mesh, wishes: Mapping[str, Wish], outputs: Mapping[int, Wish]) -> None:
        self.gm, self.mesh = gm, mesh
        self.nodes = [node for node in gm.graph.nodes if "candidates" in node.meta]
        self.number = {node: at for at, node in enumerate(self.nodes)}
        self.tables: dict[Any, Table] = {}
        self.choices: list[tuple[Choice, ...]] = []
        self.variables: list[Variable] = []
        self.ins: list[list[list[Layout]]] = []  # by node, operand and label
        self.outs: list[list[list[Layout]]] = []  # by node, output and label
        for node in self.nodes:
            self.add_node(node, wishes.get(node.name))
        self.values: list[Value] = []
        self.layouts: list[list[Layout]] = []
        self.keys: list[tuple[Node, int]] = []
        self.ports: list[int | None] = []
        readers = self.add_outputs(outputs)
        for node in self.nodes:
            for slot, operand in enumerate(operands(node)):
                readers.setdefault(value_of(operand), []).append((self.number[node], self.ins[self.number[node]][slot]))
        for key in sorted(readers, key=lambda item: (self.number[item[0]], item[1])):
            self.add_value(key, readers[key])

    def solve(self, held: Mapping[str, float] | None = None, price: float = 0.0) -> tuple[Assignment, float]:
        """The cheapest assignment and its bound, where a byte that a rank keeps costs `price` seconds.

        held: by node, how many times its bytes are kept (a parameter with its gradient and optimizer state); see `kept`.
        Raises LayoutError if no assignment has finite cost.
        """
        variables = [
            replace(variable, costs=variable.costs + price * held[variable.name] * self.bytes_of(at))
            if held and variable.name in held
            else variable
            for at, variable in enumerate(self.variables)
        ]
        problem = Problem(variables, self.values)
        solution = solve(problem)
        if not np.isfinite(solution.seconds):
            raise LayoutError(
                "no assignment joins these layouts: a boxing between them does not exist\n  Remove pins one by one."
            )
        return self.assignment(self.alike(problem, solution.labels)), solution.lower_bound

    def alike(self, problem: Problem, labels: list[int]) -> list[int]:
        """Labels that cost no more, in which equal blocks run alike where that is possible: each block's labels are
        tried on all the others. Of plans that cost the same, a person reads the regular one more easily."""
        best, least = labels, total(problem, labels)
        for block in sorted({place[0] for place in self.places.values() if place}):
            pattern = {place[1:]: at for at, place in self.places.items() if place and place[0] == block}
            tried = list(best)
            for at, place in self.places.items():
                source = pattern.get(place[1:]) if place else None
                if source is not None and self.choices[at] == self.choices[source]:
                    tried[at] = best[source]
            seconds = total(problem, tried)
            if tried != best and seconds <= least * (1 + 1e-12):
                best, least = tried, min(seconds, least)
        return best

    @cached_property
    def places(self) -> dict[int, tuple[Any, ...]]:
        """By number of a node of a numbered block ("blocks.1.up"): its block's number, then what it is in the block."""
        seen: Counter[tuple[Any, ...]] = Counter()
        found: dict[int, tuple[Any, ...]] = {}
        names = {node: port.name for port, node in placeholders(self.gm).items()}
        for at, node in enumerate(self.nodes):
            path = names.get(node, node.meta.get("module", "")).split(".")
            block = next((place for place, part in enumerate(path) if part.isdigit()), None)
            if block is not None:
                rest = (
                    ".".join((*path[:block], "*", *path[block + 1 :])),
                    str(node.target) if node.op != "placeholder" else node.op,
                )
                key = (int(path[block]), *rest, node.meta.get("phase", ""))
                found[at] = (*key, seen[key])
                seen[key] += 1
        return found

    def bytes_of(self, at: int) -> np.ndarray:
        """Bytes of all outputs of node number `at` on the busiest rank, by label."""
        total = np.zeros(len(self.choices[at]))
        for index, column in enumerate(self.outs[at]):
            shape, itemsize = shape_of(self.nodes[at], index)
            total += [
                itemsize * float(np.prod(layout.local_shape(shape, self.mesh.sizes, (0,) * len(self.mesh.sizes))))
                for layout in column
            ]
        return total

    def add_node(self, node: Node, wish: Wish | None) -> None:
        """One variable whose labels are the legal choices of the node."""
        table = self.table(node)
        keep = list(range(len(table.choices)))
        if wish is not None:
            keep = [at for at in keep if wish.admits(table.outs[0][at])]
            if not keep:
                raise PinError(refusal(node, wish, table, self.mesh))
        self.choices.append(tuple(table.choices[at] for at in keep))
        self.ins.append([[column[at] for at in keep] for column in table.ins])
        self.outs.append([[column[at] for at in keep] for column in table.outs])
        self.variables.append(Variable(node.name, table.seconds[keep], table.digits[keep]))

    def table(self, node: Node) -> Table:
        """The choices of a node with their layouts and seconds; equal nodes share one."""
        key = (node.meta["candidates"], node.target if node.op == "call_function" else node.op, tensors_of(node))
        if key not in self.tables:
            self.tables[key] = Table(node, self.mesh)
        return self.tables[key]

    def add_outputs(self, wishes: Mapping[int, Wish]) -> dict[tuple[Node, int], list[tuple[int, list[Layout]]]]:
        """Variables for outputs that may be left in several layouts; a gradient is read in its parameter's home."""
        readers: dict[tuple[Node, int], list[tuple[int, list[Layout]]]] = {}
        ports = self.gm.meta["ports"]
        homes = placeholders(self.gm)
        for at, (port, node) in enumerate(zip(ports.outputs, results(self.gm))):
            if node is None:
                self.ports.append(None)
                continue
            if port.kind in HOMES and at not in wishes:
                reader = self.number[homes[Port(HOMES[port.kind], port.name)]]
                allowed = self.outs[reader][0]
            else:
                allowed = self.allowed_outputs(node, wishes.get(at))
                reader = len(self.variables)
                self.choices.append(tuple(stored(layout) for layout in allowed))
                digits = np.array(
                    [
                        [state.dim + 1 if isinstance(state, Split) else 0 for state in layout.states]
                        for layout in allowed
                    ]
                )
                self.variables.append(Variable(f"output {at}", np.zeros(len(allowed)), digits))
                self.ins.append([])
                self.outs.append([allowed])
            self.ports.append(reader)
            readers.setdefault(value_of(node), []).append((reader, allowed))
        return readers

    def allowed_outputs(self, node: Node, wish: Wish | None) -> list[Layout]:
        """The layouts that an output may be left in: whole on every rank, or as wished."""
        whole = broadcast(self.mesh.axes)
        if wish is None:
            return [whole]
        shape, _ = shape_of(*value_of(node))
        found = [choice.output(0, self.mesh.axes) for choice in of_stored(shape).choices(self.mesh.sizes)]
        found = [layout for layout in found if wish.admits(layout)]
        if not found:
            raise PinError(
                at_node(f"{wish.reason}: no layout of this output is like that", node, "Ask for another layout.")
            )
        return found

    def add_value(self, key: tuple[Node, int], readers: list[tuple[int, list[Layout]]]) -> None:
        """One value: from the layouts that its producer leaves to those that its readers take."""
        producer = self.number[key[0]]
        out = self.outs[producer][key[1]]
        numbers: dict[Layout, int] = {}
        columns = [[numbers.setdefault(layout, len(numbers)) for layout in c] for c in (out, *(c for _, c in readers))]
        layouts = list(numbers)
        shape, itemsize = shape_of(key[0], key[1])
        seconds = closure(layouts, shape, itemsize, self.mesh)
        consumers = [(reader, np.array(column)) for (reader, _), column in zip(readers, columns[1:])]
        self.values.append(Value(producer, np.array(columns[0]), consumers, seconds))
        self.layouts.append(layouts)
        self.keys.append(key)

    def assignment(self, labels: list[int]) -> Assignment:
        """The choices and layouts that the labels stand for."""
        chosen = {node.name: self.choices[at][labels[at]] for at, node in enumerate(self.nodes)}
        aliases = {}
        for key, value, layouts in zip(self.keys, self.values, self.layouts):
            alias, _ = star(value, labels)
            aliases[key[0].name, key[1]] = layouts[alias]
        outputs = tuple(None if at is None else self.outs[at][0][labels[at]] for at in self.ports)
        return Assignment(chosen, aliases, outputs)


class Table:
    """The legal choices of one node: per choice its seconds, its digits, and the layout of each operand and output."""

    def __init__(self, node: Node, mesh: Mesh) -> None:
        candidates: Candidates = node.meta["candidates"]
        self.choices = candidates.choices(mesh.sizes)
        first = candidates.signatures[0]
        self.ins = [[c.input(slot, mesh.axes) for c in self.choices] for slot in range(len(first.inputs))]
        self.outs = [[c.output(index, mesh.axes) for c in self.choices] for index in range(len(first.outputs))]
        place = {signature: at for at, signature in enumerate(candidates.signatures)}
        self.digits = np.array([[place[s] for s in c.signatures] for c in self.choices])
        self.seconds = np.zeros(len(self.choices))
        if node.op == "call_function":
            self.seconds = self.compute_seconds(node, candidates, mesh)

    def compute_seconds(self, node: Node, candidates: Candidates, mesh: Mesh) -> np.ndarray:
        """Seconds of the local op under every choice."""
        match, tensors, columns = node.meta.get("match"), tensors_of(node), (*self.ins, *self.outs)
        seconds = call_seconds(match, self.choices, tensors, columns, float(np.prod(shape_of(node, 0)[0])), mesh)
        apart = [at for at, choice in enumerate(self.choices) if candidates.apart(choice)]
        if apart:
            seconds[apart] = apart_seconds(candidates, [self.choices[at] for at in apart], tensors[: len(self.ins)], mesh)
        return seconds


def tensors_of(node: Node) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Bytes per element and global shape of every operand and output; an output that is not a tensor has no elements."""
    places = [value_of(operand) for operand in operands(node)]
    return tuple(shape_of(*place)[::-1] for place in (*places, *((node, index) for index in range(outputs_of(node)))))


def outputs_of(node: Node) -> int:
    """How many outputs a node has."""
    value = node.meta.get("val")
    return len(value) if isinstance(value, (tuple, list)) else 1


def shape_of(node: Node, index: int) -> tuple[tuple[int, ...], int]:
    """Global shape and bytes per element of an output of a node."""
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        value = value[index]
    return (tuple(value.shape), value.element_size()) if isinstance(value, torch.Tensor) else ((0,), 0)


def refusal(node: Node, wish: Wish, table: Table, mesh: Mesh) -> str:
    """Why no choice of a node meets a wish."""
    shape, _ = shape_of(node, 0)
    offered = list(dict.fromkeys(str(layout) for layout in table.outs[0]))
    for axis, state in wish.states:
        if isinstance(state, Split) and state.dim >= len(shape):
            return at_node(
                f"{wish.reason}: the tensor has no dim {state.dim}", node, f"Its dims are 0 to {len(shape) - 1}."
            )
        if isinstance(state, Split) and not may_cut(shape[state.dim], (mesh.sizes[axis],), False, True):
            what = f"dim {state.dim} of {tuple(shape)} cannot be split over axis {mesh.axes[axis]!r}"
            why = f"{shape[state.dim]} elements, {mesh.sizes[axis]} ranks"
            return at_node(
                f"{wish.reason}: {what}: {why}", node, "Pin another dim, or pad it to a multiple of the axis."
            )
    more = ", ..." if len(offered) > 8 else ""
    return at_node(f"{wish.reason} cannot be met", node, f"It can be left in {', '.join(offered[:8])}{more}.")


def kept(gm: GraphModule, copies: int) -> dict[str, float]:
    """By node, how often its bytes are alive at the peak: parameters with `copies` tensors for each that is trained, and
    values of the forward that the backward reads."""
    ports = gm.meta["ports"]
    trained = {port.name for port in ports.outputs if port.kind == GRADIENT}
    found = {}
    for port, node in placeholders(gm).items():
        if port.kind == PARAMETER:
            found[node.name] = 1.0 + (copies if port.name in trained else 0)
    for node in gm.graph.nodes:
        if node.meta.get("phase") == "backward":
            for operand in operands(node):
                producer, _ = value_of(operand)
                match = producer.meta.get("match")
                if (
                    producer.op == "call_function"
                    and producer.meta.get("phase") != "backward"
                    and not (match and match.view)
                ):
                    found[producer.name] = 1.0
    return found
