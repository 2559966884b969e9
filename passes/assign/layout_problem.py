"""Builds the layout problem of an annotated graph, and translates between its labels and layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
from torch.fx import GraphModule, Node

from sbpc.boxing.paths import closure
from sbpc.errors import PinError, at_node
from sbpc.graph.operands import operands, shape_of, tensors_of, value_of
from sbpc.graph.ports import BUFFER, GRADIENT, HOMES, ONCE, PARAMETER, Port, placeholders, result_name, results
from sbpc.mesh.layout import broadcast
from sbpc.mesh.layout_codes import decode, elements
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish, exactly
from sbpc.passes.assign.build_tables import narrowed, only_renames, tabulate
from sbpc.passes.assign.label_tables import Table, Tensors
from sbpc.passes.assign.local_bytes import Place, PlaceKind, local_bytes
from sbpc.passes.assign.wishes import refusal
from sbpc.plans.chunk import Assignment
from sbpc.plans.written_calls import is_dense, scores_held
from sbpc.rules.choices import of_stored
from sbpc.rules.sum_types import sent_in, sums_of
from sbpc.solver import Problem, Value, Variable, star
from sbpc.solver.problem import Array
from sbpc.solver.surroundings import Surroundings

ORDERED = 3  # on meshes of more wide axes ops cut in mesh order only; what is stored may be cut in any
MANY = 100  # labels of a renaming of dims beyond which those that cannot make a plan cheaper are left out
# numbers of ports: operands from 0 on, outputs that are left somewhere below, those made above
HOME, MADE = -1, 1 << 20
Key = tuple[Node, int]  # a value: a node, and which of its outputs
Reader = tuple[int, int]  # a variable, and the number of the port at which it takes a value
T = TypeVar("T")


class LayoutProblem:
    """The variables and values of an annotated graph, with a table of labels for every variable.

    wishes: by node name. outputs: wishes by place in the output list; one that is missing is whole on all ranks.
    like: a problem of the same graph and mesh with other wishes, whose tables and boxings are used again; or, with
    `part`, one with the same wishes on a mesh where kernels take so many times as long, whose tables are.

    variables, tables: of nodes first, then of outputs that may be left in several layouts. By value: values; keys,
    which output of which node it is; codes [layouts], of its layouts; sums_of, how it is summed (see the function of
    that name); counted_parts, what part of its seconds a boxing counts, less than 1 where it is done once for all
    micro-batches.
    output_variables: by output the variable in whose layout it is left, None for an absent one. output_tensors: by
    variable of an output, bytes per element and shape.

    Raises PinError if a wish leaves a node nothing.
    """

    weighs_bytes = False  # of labels, as bytes have prices

    def __init__(
        self,
        gm: GraphModule,
        mesh: Mesh,
        wishes: Mapping[str, Wish],
        outputs: Mapping[int, Wish],
        like: LayoutProblem | None = None,
        part: float | None = None,
    ) -> None:
        self.gm, self.mesh, self.parts = gm, mesh, gm.meta.get(ONCE, {})
        self.nodes = [node for node in gm.graph.nodes if "candidates" in node.meta]
        self.number = {node: at for at, node in enumerate(self.nodes)}
        self.known: dict[Any, Any] = {} if like is None or part is not None else like.known  # see `once`
        self.part, self.same_layouts = part, None if part is None else like
        self.class_numbers: dict[int, list[int]] = {}  # see `Space.classes`
        self.tables = [self.table(node, wishes.get(node.name)) for node in self.nodes]
        self.variables = [
            Variable(node.name, self.seconds_of(node, t), t.digits) for node, t in zip(self.nodes, self.tables)
        ]
        self.output_variables: list[int | None] = []
        self.output_tensors: dict[int, Tensors] = {}
        self.gradients = set[Key]()
        self.readers = readers = self.add_outputs(outputs)
        for at, node in enumerate(self.nodes):
            for slot, operand in enumerate(operands(node)):
                readers.setdefault(value_of(operand), []).append((at, slot))
        self.keys = sorted(readers, key=lambda item: (self.number[item[0]], item[1]))
        if not self.weighs_bytes:  # else the bytes of a renaming count too
            self.narrow(readers, wishes)
        sent = sent_in(gm)
        self.sums_of = [
            sent.get(key) or sums_of(key[0], [self.nodes[at] for at, place in readers[key] if place >= 0])
            for key in self.keys
        ]
        self.counted_parts = [self.counted_part(key) for key in self.keys]
        for number, part in enumerate(self.counted_parts):
            if part != 1.0 and self.keys[number] in self.gradients:
                self.add_sums(number, 1 - part)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Returns what was made for the key before, so that equal nodes and values share arrays; else makes it.

        Keys hold the `id` of tables and of their arrays. So every table is made here, and stays.
        """
        if key not in self.known:
            self.known[key] = make()
        made: T = self.known[key]
        return made

    def table(self, node: Node, wish: Wish | None) -> Table:
        """Returns the labels of a node."""
        candidates, match = node.meta["candidates"], node.meta.get("match")
        key: tuple[Any, ...] = (id(candidates), id(match), tensors_of(node) if match is None else ())
        free = node.op != "call_function" or (match is not None and match.view)
        every = node.op == "placeholder" or sum(size > 1 for size in self.mesh.sizes) <= ORDERED
        table = self.once(key, lambda: self.scaled(key, candidates, match, tensors_of(node), self.mesh, free, every))
        if wish is None:
            return table
        admitted = self.once((*key, wish.states, wish.order, wish.spread), lambda: table.admitted(wish))
        if not len(admitted):
            raise PinError(refusal(node, wish, table.outs[0], self.mesh))
        return admitted

    def scaled(self, key: Any, *what: Any) -> Table:
        """Returns the table that `tabulate` makes of `what`; if the problem is one with other weights, from its table,
        unless its seconds are those of links, too."""
        other: Table | None = None if self.same_layouts is None else self.same_layouts.known.get(key)
        if other is None or self.part is None or other.two_phase.any() or other.sharing.any():
            return tabulate(*what)
        return replace(other, mesh=self.mesh, seconds=self.part * other.seconds)

    def output_table(self, node: Node, wish: Wish | None) -> Table:
        """Returns the layouts that an output may be left in: whole on every rank, or as wished."""
        shape, itemsize = shape_of(*value_of(node))
        admits = exactly(broadcast(self.mesh.axes), "") if wish is None else wish
        table = self.once(
            (shape, itemsize, admits),
            lambda: tabulate(of_stored(shape), None, ((itemsize, shape),), self.mesh, True, True).admitted(admits),
        )
        if not len(table):
            assert wish is not None
            todo = (
                "Ask for another layout."
                if shape
                else "It has no dims to split: leave out spread=, or plan the model without its loss."
            )
            raise PinError(at_node(f"{wish.reason}: no layout of this output is like that", node, todo))
        return table

    def add_outputs(self, wishes: Mapping[int, Wish]) -> dict[Key, list[Reader]]:
        """Adds a variable for every output that may be left in several layouts; returns the outputs as readers of
        values.

        A gradient is read in its parameter's home.
        """
        readers: dict[Key, list[Reader]] = {}
        outputs_at = Counter[int]()  # by variable how many outputs are left there
        homes = {port: self.number[node] for port, node in placeholders(self.gm).items()}
        for at, (port, node) in enumerate(zip(self.gm.meta["ports"].outputs, results(self.gm))):
            if node is None:
                self.output_variables.append(None)
                continue
            if port.kind in HOMES and at not in wishes:
                reader = homes[Port(HOMES[port.kind], port.name)]
            else:
                table = self.output_table(node, wishes.get(at))
                reader = len(self.tables)
                self.tables.append(table)
                self.output_tensors[reader] = (shape_of(*value_of(node))[::-1],)
                self.variables.append(Variable(result_name(at), table.seconds, table.digits))
            self.output_variables.append(reader)
            if port.kind == GRADIENT:
                self.gradients.add(value_of(node))
            readers.setdefault(value_of(node), []).append((reader, HOME - outputs_at[reader]))
            outputs_at[reader] += 1
        return readers

    def narrow(self, readers: Mapping[Key, list[Reader]], wishes: Container[str]) -> None:
        """Leaves to what only renames dims the layouts in which its operand is made, or those in which it is read.

        Only where nothing else reads the operand, and one reader the result. Boxing costs the same before and after a
        renaming, and no detour is cheaper than the straight way: from a plan in which the node takes another layout one
        leads to a plan that costs no more, with the node in the layout from which it is boxed, or the one to which its
        result is. With more readers its layouts may be aliases that several of them share.
        """
        for at, node in enumerate(self.nodes):
            table = self.tables[at]
            if len(table) <= MANY or node.name in wishes or len(readers.get((node, 0), ())) != 1:
                continue
            renames = self.once((id(table), "renames"), partial(only_renames, table, tensors_of(node)))
            source = value_of(operands(node)[0]) if operands(node) else (node, 0)
            if not renames or len(readers[source]) != 1:
                continue
            made, taken = self.tables[self.number[source[0]]].outs[source[1]], self.taken(readers[node, 0][0])
            key = (id(table), id(made), "narrow", id(taken))
            self.tables[at] = few = self.once(key, partial(narrowed, table, made, taken))
            self.variables[at] = Variable(node.name, self.seconds_of(node, few), few.digits)

    def seconds_of(self, node: Node, table: Table) -> Array:
        """Returns the seconds of a node by label: a part of them where it runs once for all micro-batches of a loop."""
        part = self.parts.get(PARAMETER, 1.0)
        if part == 1.0 or node.op == "placeholder" or node not in self.fixed:
            return table.seconds
        return self.once((id(table), "once"), lambda: part * table.seconds)

    @cached_property
    def fixed(self) -> set[Node]:
        """The nodes that depend on parameters and buffers, and on nothing else but constants."""
        found = {node for port, node in placeholders(self.gm).items() if port.kind in (PARAMETER, BUFFER)}
        constants = set[Node]()
        for node in self.nodes:
            given = {value_of(used)[0] for used in node.all_input_nodes}
            if node.op == "call_function" and given <= constants:
                constants.add(node)
            elif node.op == "call_function" and given <= constants | found:
                found.add(node)
        return found

    @cached_property
    def named(self) -> dict[str, int]:
        """The number of each variable, by the name of its node; by that of a result, of the one in whose layout it
        is left."""
        homes = {result_name(place): at for place, at in enumerate(self.output_variables) if at is not None}
        return homes | {node.name: at for at, node in enumerate(self.nodes)}

    def bytes_of(self, at: int, place: Place) -> Array:
        """Returns the bytes on the busiest rank at a place of variable number `at`, by label."""
        table = self.tables[at]
        tensors = tensors_of(self.nodes[at]) if at < len(self.nodes) else self.output_tensors[at]
        size = self.once((id(table), "bytes", place), lambda: local_bytes(table, place, tensors))
        if place.kind is PlaceKind.WORKING_SET and is_dense(node := self.nodes[at], self.mesh):
            return size + self.once((id(table), "scores", node), lambda: self.scores(node, table))
        return size

    def scores(self, node: Node, table: Table) -> Array:
        """Returns what FlexAttention without a kernel holds besides operands and results, by label."""
        layouts = [[decode(code, self.mesh.axes) for code in codes.tolist()] for codes in table.ins]
        return np.array([float(scores_held(node, each, self.mesh)) for each in zip(*layouts)])

    @cached_property
    def problem(self) -> Problem:
        """What is solved, bytes for nothing."""
        return Problem(self.variables, self.values)

    def taken(self, reader: Reader) -> Array:
        """Returns the layouts by label in which a reader takes a value."""
        at, place = reader
        return self.tables[at].ins[place] if place >= 0 else self.tables[at].outs[0]

    def counted_part(self, key: Key) -> float:
        """Returns what part of its seconds a boxing of a value counts: less than 1 where it is boxed once for all
        micro-batches of a loop."""
        of_gradient = all(place < 0 for _, place in self.readers[key])
        return float(self.parts.get(PARAMETER if key[0] in self.fixed else GRADIENT if of_gradient else "", 1.0))

    @cached_property
    def values(self) -> list[Value]:
        """Every value, from the layouts that its producer leaves to those that its readers take. A bound of every call
        by itself needs none."""
        return [self.value(number, *self.boxed(number)[1:]) for number in range(len(self.keys))]

    @cached_property
    def codes(self) -> list[Array]:
        """The codes of its layouts, by value."""
        return [self.boxed(number)[0] for number in range(len(self.keys))]

    def boxed(self, number: int) -> tuple[Array, list[Array], Array]:
        """Returns `boxings` of a value."""
        key, sums = self.keys[number], self.sums_of[number]
        ports = [self.tables[self.number[key[0]]].outs[key[1]], *map(self.taken, self.readers[key])]
        about = shape_of(*key)
        return self.once((*map(id, ports), *about, sums), lambda: self.boxings(ports, *about, sums))

    def value(self, number: int, layouts: list[Array], seconds: Array) -> Value:
        """Returns a value. layouts: by port and label. seconds: between them, where all of them count."""
        key, part = self.keys[number], self.counted_parts[number]
        if part != 1.0:
            full = seconds
            seconds = self.once((id(full), part), lambda: full * part)
        readers = self.readers[key]
        consumers = [(at, wants) for (at, _), wants in zip(readers, layouts[1:])]
        places = (MADE + key[1], *(place for _, place in readers))
        return Value(self.number[key[0]], layouts[0], consumers, seconds, places)

    def add_sums(self, number: int, part: float) -> None:
        """Adds to the costs of what makes a gradient that it is added to those of other micro-batches."""
        key, (codes, (out, *_), full) = self.keys[number], self.boxed(number)
        at = self.number[key[0]]
        variable = self.variables[at]
        sums = self.once((id(full), "sums"), lambda: self.sums(codes, full, *shape_of(*key)))
        costs = self.once((id(variable.costs), id(out), part, id(sums)), lambda: variable.costs + part * sums[out])
        self.variables[at] = replace(variable, costs=costs)

    def sums(self, codes: Array, boxings: Array, shape: tuple[int, ...], itemsize: int) -> Array:
        """Returns by layout the seconds of adding a value to another one: there, or where it may be boxed before, as
        a plan under a limit of memory does. So they bound both."""
        size = elements(codes, shape, self.mesh.sizes)
        added: Array = (boxings + self.mesh.cluster.kernel_seconds("add", size, 3 * itemsize * size)).min(axis=1)
        return added

    def boxings(
        self, ports: list[Array], shape: tuple[int, ...], itemsize: int, sums: str | None
    ) -> tuple[Array, list[Array], Array]:
        """Returns the codes of all layouts at these ports, by port and label which of them it is, and the seconds
        between them. sums: see
        `sums_of`."""
        codes = np.unique(np.concatenate(list({id(port): port for port in ports}.values())))
        key = codes.tobytes(), shape, itemsize, sums
        seconds = self.once(key, lambda: closure(codes, shape, itemsize, self.mesh, sums))
        numbers = {id(port): np.searchsorted(codes, port) for port in ports}
        return codes, [numbers[id(port)] for port in ports], seconds

    def known_labels(self, assignment: Assignment) -> list[int | None]:
        """Returns the labels of an assignment; None for a node that has none, or is not to take it here."""
        by_choice: dict[tuple[int, int], int | None] = {}  # equal nodes share tables, and mostly their choices
        labels = []
        for node, table in zip(self.nodes, self.tables):
            choice = assignment.choices.get(node.name)
            key = id(choice), id(table)
            if key not in by_choice:
                by_choice[key] = None if choice is None else table.label(choice)
            labels.append(by_choice[key])
        for at, layout in zip(self.output_variables, assignment.outputs):
            if at is not None and at >= len(self.nodes):
                table = self.tables[at]
                labels.append(next(label for label in range(len(table)) if table.output(0, label) == layout))
        return labels

    def labels(self, assignment: Assignment) -> list[int]:
        """Returns the labels of an assignment; a node that has none, or is not to take it here, takes the cheapest
        one."""
        known = self.known_labels(assignment)
        labels = [label or 0 for label in known]
        if None in known:
            surroundings = Surroundings(self.problem)
            for at in (at for at, label in enumerate(known) if label is None):
                labels[at] = int(surroundings.costs(at, labels).argmin())
        return labels

    def assignment(self, labels: list[int]) -> Assignment:
        """Returns the choices and layouts that the labels stand for."""
        chosen = {
            node.name: self.once((id(table), "choice", label), partial(table.choice, label))
            for node, table, label in zip(self.nodes, self.tables, labels)
        }
        aliases = {}
        for key, value, codes in zip(self.keys, self.values, self.codes):
            alias, _ = star(value, labels)
            aliases[key[0].name, key[1]] = decode(int(codes[alias]), self.mesh.axes)
        outputs = tuple(None if at is None else self.tables[at].output(0, labels[at]) for at in self.output_variables)
        return Assignment(chosen, aliases, outputs)
