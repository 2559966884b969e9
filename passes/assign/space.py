"""assign: one layout for every value and a home layout for every parameter, as cheap as the solver can find."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.fx import GraphModule, Node

from sbpc.boxing.paths import closure
from sbpc.errors import LayoutError, PinError, at_node
from sbpc.graph.operands import operands, shape_of, tensors_of, value_of
from sbpc.graph.ports import HOMES, Port, placeholders, result_name, results
from sbpc.mesh.layout import broadcast
from sbpc.mesh.layout_codes import decode
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish, exactly
from sbpc.mesh.states import Split
from sbpc.passes.assign.build_tables import narrowed, only_renames, tabulate
from sbpc.passes.assign.label_tables import Table, Tensors
from sbpc.passes.assign.local_bytes import Place, local_bytes
from sbpc.passes.assign.repeated_blocks import runs
from sbpc.plans.plan import Assignment, Plan
from sbpc.rules.choices import Choice, may_cut, of_stored
from sbpc.solver import Bounder, Problem, Proof, Value, Variable, certify, checked_bound, solve, star, total
from sbpc.solver.descent import Descent
from sbpc.solver.fold import fold
from sbpc.solver.problem import gap_of

ORDERED = 3  # on meshes of more wide axes ops cut in mesh order only; what is stored may be cut in any
MANY = 100  # labels of a renaming of dims beyond which those that cannot make a plan cheaper are left out
HOME, MADE = -1, 1 << 20  # numbers of ports: operands from 0 on, outputs that are left somewhere below, those made above
Reader = tuple[int, int]  # a variable, and the number of the port at which it takes a value


class Space:
    """The solver's problem of an annotated graph, and the way back from labels to layouts.

    Before: candidates on every node. After `solve`: a choice for every node, an alias layout for every value, a layout
    for every output. wishes: by node name; outputs: by place in the output list (one that is missing is whole on all
    ranks). priced: bytes may have prices. Raises PinError if a wish leaves a node nothing.
    """

    def __init__(
        self,
        gm: GraphModule,
        mesh: Mesh,
        wishes: Mapping[str, Wish],
        outputs: Mapping[int, Wish],
        priced: bool = False,
    ) -> None:
        self.gm, self.mesh = gm, mesh
        self.multipliers: Proof | None = None  # of what was solved last; None: it needed none
        self.nodes = [node for node in gm.graph.nodes if "candidates" in node.meta]
        self.number = {node: at for at, node in enumerate(self.nodes)}
        self.known: dict[Any, Any] = {}  # tables by kind of node, values by their ports, closures by layouts and shape
        self.tables = [self.table(node, wishes.get(node.name)) for node in self.nodes]
        self.variables = [Variable(node.name, t.seconds, t.digits) for node, t in zip(self.nodes, self.tables)]
        self.values: list[Value] = []
        self.codes: list[np.ndarray] = []  # by value the codes of its layouts
        self.keys: list[tuple[Node, int]] = []
        self.ports: list[int | None] = []
        self.left: dict[int, Tensors] = {}  # by variable of its own what a result is
        readers = self.add_outputs(outputs)
        for at, node in enumerate(self.nodes):
            for slot, operand in enumerate(operands(node)):
                readers.setdefault(value_of(operand), []).append((at, slot))
        if not priced:  # else the bytes of a renaming count too
            self.narrow(readers, wishes)
        for key in sorted(readers, key=lambda item: (self.number[item[0]], item[1])):
            self.add_value(key, readers[key])

    def solve(self, starts: Sequence[Assignment] = ()) -> tuple[Assignment, float]:
        """Returns the cheapest assignment that was found, and a bound in seconds; `gap` then tells how far it may be from the best.

        starts: assignments than which it is not to be slower. Raises LayoutError if no assignment has finite cost.
        """
        known = [self.labels(start) for start in starts]
        solution = solve(self.problem, known, self.classes(), self.classes(1))
        labels = min([solution.labels, *known], key=lambda each: total(self.problem, each))
        seconds = total(self.problem, labels)
        if not np.isfinite(seconds):
            raise LayoutError("no assignment joins these layouts: a boxing between them does not exist\n  Remove pins one by one.")
        self.multipliers = solution.proof
        self.gap = gap_of(seconds, solution.lower_bound)
        return self.assignment(labels), solution.lower_bound

    @property
    def proof(self) -> Proof:
        """The multipliers that bound all plans."""
        if self.multipliers is None:
            self.multipliers = Bounder(self.problem, fold(self.problem, self.classes())).proof
        return self.multipliers

    def bound(self, proof: Proof) -> float:
        """What no assignment costs less than, by the multipliers alone."""
        return checked_bound(self.problem, proof)

    def check(self, assignment: Assignment, proof: Proof) -> tuple[float, float]:
        """What an assignment of this space costs, and the bound that the multipliers give."""
        return self.seconds(assignment), self.bound(proof)

    def certify(self, plan: Plan, limit: float) -> tuple[Plan | None, float]:
        """Returns no other plan, and a bound found in about `limit` CPU seconds; its multipliers are kept if they give a better one."""
        bound, proof = certify(self.problem, self.seconds(plan.assignment), limit)
        if bound > self.bound(self.proof):
            self.multipliers = proof
        return None, bound

    @cached_property
    def problem(self) -> Problem:
        """What is solved, bytes for nothing."""
        return Problem(self.variables, self.values)

    def seconds(self, assignment: Assignment) -> float:
        """What an assignment takes, bytes for nothing."""
        return total(self.problem, self.labels(assignment))

    def classes(self, apart: int = 0) -> list[int]:
        """Returns, by variable, the number of its class: calls at one place of repeated blocks, and what only they read.

        apart: so many blocks at either end of a run of blocks stay on their own.
        """
        numbers: dict[Any, int] = {}
        calls = [at for at, node in enumerate(self.nodes) if node.op == "call_function"]
        tokens = [self.token(at) for at in calls]
        found: dict[int, int] = {}
        for run in runs(tokens):
            for place in range(run.start + apart * run.period, run.stop - apart * run.period):
                at = calls[place]
                key = (run.start, (place - run.start) % run.period, id(self.tables[at]))
                found[at] = numbers.setdefault(key, len(numbers))
        readers: dict[int, list[Any]] = {at: [] for at, node in enumerate(self.nodes) if node.op != "call_function"}
        for value in self.values:
            if value.producer in readers:
                readers[value.producer] += [
                    (found.get(at, -1 - at), place) for (at, _), place in zip(value.consumers, value.places[1:])
                ]
        for at, taken in readers.items():
            key = (*sorted(taken), id(self.tables[at]))
            if taken and all(number >= 0 for number, _ in taken):
                found[at] = numbers.setdefault(key, len(numbers))
        return [found.get(at, len(numbers) + at) for at in range(len(self.variables))]

    def token(self, at: int) -> tuple[Any, ...]:
        """What a call is and what its operands are, as far as that is the same in equal blocks."""
        reads = []
        for operand in operands(self.nodes[at]):
            producer, index = value_of(operand)
            reads.append((id(self.tables[self.number[producer]]), index))
        return (id(self.tables[at]), *reads)

    @cached_property
    def named(self) -> dict[str, int]:
        """The number of each variable, by the name of its node; by that of a result, of the one in whose layout it is left."""
        homes = {result_name(place): at for place, at in enumerate(self.ports) if at is not None}
        return homes | {node.name: at for at, node in enumerate(self.nodes)}

    def bytes_of(self, at: int, place: Place) -> np.ndarray:
        """Returns the bytes on the busiest rank at a place of variable number `at`, by label."""
        key = (id(self.tables[at]), "bytes", place)
        if key not in self.known:
            tensors = tensors_of(self.nodes[at]) if at < len(self.nodes) else self.left[at]
            self.known[key] = local_bytes(self.tables[at], place, tensors)
        sizes: np.ndarray = self.known[key]
        return sizes

    def table(self, node: Node, wish: Wish | None) -> Table:
        """The labels of a node; equal nodes share one table."""
        candidates, match = node.meta["candidates"], node.meta.get("match")
        key: tuple[Any, ...] = (id(candidates), id(match), tensors_of(node) if match is None else ())
        if key not in self.known:
            free = node.op != "call_function" or (match is not None and match.view)
            every = node.op == "placeholder" or sum(size > 1 for size in self.mesh.sizes) <= ORDERED
            self.known[key] = tabulate(candidates, match, tensors_of(node), self.mesh, free, every)
        table: Table = self.known[key]
        if wish is None:
            return table
        key = (*key, wish.states, wish.order, wish.spread)
        if key not in self.known:
            self.known[key] = table.admitted(wish)
        if not len(self.known[key]):
            raise PinError(refusal(node, wish, table, self.mesh))
        return self.known[key]

    def add_outputs(self, wishes: Mapping[int, Wish]) -> dict[tuple[Node, int], list[Reader]]:
        """Variables for outputs that may be left in several layouts; a gradient is read in its parameter's home."""
        readers: dict[tuple[Node, int], list[Reader]] = {}
        left: dict[int, int] = {}
        homes = {port: self.number[node] for port, node in placeholders(self.gm).items()}
        for at, (port, node) in enumerate(zip(self.gm.meta["ports"].outputs, results(self.gm))):
            if node is None:
                self.ports.append(None)
                continue
            if port.kind in HOMES and at not in wishes:
                reader = homes[Port(HOMES[port.kind], port.name)]
            else:
                table = self.output_table(node, wishes.get(at))
                reader = len(self.tables)
                self.tables.append(table)
                self.left[reader] = (shape_of(*value_of(node))[::-1],)
                self.variables.append(Variable(result_name(at), table.seconds, table.digits))
            self.ports.append(reader)
            readers.setdefault(value_of(node), []).append((reader, HOME - left.get(reader, 0)))
            left[reader] = left.get(reader, 0) + 1
        return readers

    def output_table(self, node: Node, wish: Wish | None) -> Table:
        """The layouts that an output may be left in: whole on every rank, or as wished."""
        shape, itemsize = shape_of(*value_of(node))
        found = tabulate(of_stored(shape), None, ((itemsize, shape),), self.mesh, True, True)
        found = found.admitted(exactly(broadcast(self.mesh.axes), "") if wish is None else wish)
        if not len(found):
            assert wish is not None
            raise PinError(
                at_node(f"{wish.reason}: no layout of this output is like that", node, "Ask for another layout.")
            )
        return found

    def taken(self, reader: Reader) -> np.ndarray:
        """The layouts by label in which a reader takes a value."""
        at, place = reader
        return self.tables[at].ins[place] if place >= 0 else self.tables[at].outs[0]

    def narrow(self, readers: Mapping[tuple[Node, int], list[Reader]], wishes: Container[str]) -> None:
        """Leave to what only renames dims the layouts in which its operand is made, or those in which it is read.

        Only where nothing else reads the operand, and one reader the result. Boxing costs the same before and after a
        renaming, and no detour is cheaper than the straight way: from a plan in which the node takes another layout one
        leads to a plan that costs no more, with the node in the layout from which it is boxed, or the one to which its
        result is. With more readers its layouts may be aliases that several of them share.
        """
        for at, node in enumerate(self.nodes):
            table = self.tables[at]
            if len(table) <= MANY or node.name in wishes or len(readers.get((node, 0), ())) != 1:
                continue
            if (id(table), "renames") not in self.known:
                self.known[id(table), "renames"] = only_renames(table, tensors_of(node))
            source = value_of(operands(node)[0]) if operands(node) else (node, 0)
            if not self.known[id(table), "renames"] or len(readers[source]) != 1:
                continue
            made, taken = self.tables[self.number[source[0]]].outs[source[1]], self.taken(readers[node, 0][0])
            key = (id(table), id(made), "narrow", id(taken))
            if key not in self.known:
                self.known[key] = narrowed(table, made, taken)
            self.tables[at] = table = self.known[key]
            self.variables[at] = Variable(node.name, table.seconds, table.digits)

    def add_value(self, key: tuple[Node, int], readers: list[Reader]) -> None:
        """One value: from the layouts that its producer leaves to those that its readers take."""
        producer = self.number[key[0]]
        ports = [self.tables[producer].outs[key[1]], *map(self.taken, readers)]
        shape, itemsize = shape_of(key[0], key[1])
        same = (*map(id, ports), shape, itemsize)
        if same not in self.known:
            codes = np.unique(np.concatenate(list({id(port): port for port in ports}.values())))
            about = (codes.tobytes(), shape, itemsize)
            if about not in self.known:
                self.known[about] = closure(codes, shape, itemsize, self.mesh)
            numbers = {id(port): np.searchsorted(codes, port) for port in ports}
            self.known[same] = codes, [numbers[id(port)] for port in ports], self.known[about]
        codes, (out, *wants), seconds = self.known[same]
        consumers = [(reader, wanted) for (reader, _), wanted in zip(readers, wants)]
        places = (MADE + key[1], *(place for _, place in readers))
        self.values.append(Value(producer, out, consumers, seconds, places))
        self.codes.append(codes)
        self.keys.append(key)

    def labels(self, assignment: Assignment) -> list[int]:
        """The labels that stand for an assignment; a node that has none, or is not to take it here, takes the cheapest one."""
        choices = ((assignment.choices.get(node.name), table) for node, table in zip(self.nodes, self.tables))
        named = [None if choice is None else table.label(choice) for choice, table in choices]
        found = [0 if label is None else label for label in named]
        for at, layout in zip(self.ports, assignment.outputs):
            if at is not None and at >= len(self.nodes):
                table = self.tables[at]
                found.append(next(label for label in range(len(table)) if table.output(0, label) == layout))
        if None in named:
            near = Descent(self.problem)
            for at, label in enumerate(named):
                if label is None:
                    found[at] = int(near.costs(at, found).argmin())
        return found

    def assignment(self, labels: list[int]) -> Assignment:
        """The choices and layouts that the labels stand for."""
        made: dict[tuple[int, int], Choice] = {}
        chosen = {}
        for node, table, label in zip(self.nodes, self.tables, labels):
            if (id(table), label) not in made:
                made[id(table), label] = table.choice(label)
            chosen[node.name] = made[id(table), label]
        aliases = {}
        for key, value, codes in zip(self.keys, self.values, self.codes):
            alias, _ = star(value, labels)
            aliases[key[0].name, key[1]] = decode(int(codes[alias]), self.mesh.axes)
        outputs = tuple(None if at is None else self.tables[at].output(0, labels[at]) for at in self.ports)
        return Assignment(chosen, aliases, outputs)


def refusal(node: Node, wish: Wish, table: Table, mesh: Mesh) -> str:
    """Why no choice of a node meets a wish."""
    shape, _ = shape_of(node, 0)
    offered = [str(decode(code, mesh.axes)) for code in dict.fromkeys(table.outs[0].tolist())]
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
