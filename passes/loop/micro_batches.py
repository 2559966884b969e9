"""Micro-batches: writes a step as several copies of itself, each on a part of the batch, with the whole batch's
numbers.

The copies are the ranks of a mesh of one axis that run one after another on one device. So the rules that make a
step right on several ranks make it right here: every value is split (each copy has its part), whole (made once, for
all copies), or partial (the copies' values add up). The graph is planned as data parallelism on that axis and
localized for each of its ranks, with local ops in place of collectives: a sum for an all_reduce, a concatenation for
an all_gather. Means, counts of targets, batch statistics and random numbers are thereby those of the whole batch.
What comes out is a captured graph like any other.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import rename
from sbpc.boxing.steps import Step
from sbpc.errors import LayoutError, PinError, PlanError
from sbpc.graph.about import SLICE, must_wait
from sbpc.graph.expert_rows import SCATTER
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import results
from sbpc.graph.rewrite import Writer, mode_of, put, rebuild
from sbpc.mesh.cluster import Cluster, Rate
from sbpc.mesh.collectives import PACKED
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish, both, exactly
from sbpc.mesh.states import Partial, Split, chunk_sizes
from sbpc.passes.annotate import annotate, unshared
from sbpc.passes.assign.expert_structure import Model
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Wishes, wishes
from sbpc.passes.box import box
from sbpc.passes.loop.own_order import OwnOrder, in_own_order
from sbpc.passes.schedule.choice import Overlap, overlapped
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan
from sbpc.rules.choices import local_sizes
from sbpc.rules.match import Shard

aten = torch.ops.aten
AXIS = "copy"
# which `localize` writes as products of matrices, and a plan has as they are
PRODUCTS = (aten.einsum.default, aten.linear.default)
JOINS = "all_gather", "all_to_all"  # which need the parts of all copies at once
ADD = {"sum": aten.add.Tensor, "max": aten.maximum.default, "min": aten.minimum.default}


def micro_batches(gm: GraphModule, count: int, cluster: Cluster, in_turn: bool = True) -> GraphModule:
    """Returns the annotated graph of the same step in `count` micro-batches: calls are repeated on parts of the batch.

    gm: an annotated graph. Parameters, inputs and outputs are those of `gm`; inputs are cut in the graph. in_turn:
    one micro-batch goes all the way before the next one, so that the activations of one are alive; else they go side
    by side. Raises PlanError if the batch cannot be cut so.
    """
    batch_of(gm, count)
    mesh = Mesh(cluster=without_joins(cluster, JOINS if in_turn else ()), **{AXIS: count})
    unroller = Unroller(gm, boxed_for(gm, mesh, Options(baseline="data"), {}, PlanError), count)
    copies = unroller.run()
    return annotate(one_by_one(copies, unroller.copy_of) if in_turn else copies)


def boxed_for(
    gm: GraphModule, mesh: Mesh, options: Options, more: Mapping[str, Wish], kind: type[PlanError]
) -> GraphModule:
    """Returns the boxed graph in which the ranks of `mesh` are the micro-batches. Raises an error of this kind if
    there is none.

    more: wishes besides those that are requested. Micro-batches share out no rows: each has those of its own tokens.
    """
    gm = unshared(gm)
    gm = in_own_order(gm, mesh.ranks) if mesh.ranks > 1 else gm  # one micro-batch is the whole batch
    try:
        asked = wishes(gm, mesh, options)
        assignment, _ = Space(gm, mesh, both(asked.nodes, more, mesh), asked.outputs).solve()
    except (PinError, LayoutError, PlanError) as error:
        raise kind(f"the step cannot run in {mesh.ranks} micro-batches: {error}") from error
    return box(gm, assignment, mesh)


def batch_of(gm: GraphModule, count: int) -> int:
    """Returns the batch of a step. Raises PlanError unless `count` divides it."""
    batch = Model(gm).batch
    if batch % count:
        raise PlanError(f"a batch of {batch} in {count} micro-batches\n  Give a number that divides it.")
    return batch


def without_joins(cluster: Cluster, joins: Sequence[str] = JOINS) -> Cluster:
    """Returns the cluster with what joins copies so dear that it is done only where nothing else will do."""
    others = (rate for rate in cluster.collectives if rate.collective not in joins)
    never = (Rate(name, efficiency=1e-12) for name in PACKED)  # nothing is sent: sums are taken in float32
    # rather than a part of a sum, copies have all of it and take their parts
    dear = (Rate(name, efficiency=1e-4 if name == "reduce_scatter" else 1e-3) for name in joins)
    return replace(cluster, collectives=(*others, *dear, *never))


def one_by_one(gm: GraphModule, copy_of: Mapping[str, int], in_place: bool = False) -> GraphModule:
    """Returns the graph in another order: what can run goes first if it is shared, then if an earlier copy needs it.

    in_place: what is shared and no copy needs stays behind what it stood behind, as the copies are a part of a step.
    copy_of: the number of its copy by the name of a node that is not shared. A count of all targets is a sum of what
    every copy has, and the backward of the first copy needs it: the parts of the sum go before the rest of the later
    copies.
    """
    nodes = list(gm.graph.nodes)
    number = {node: at for at, node in enumerate(nodes)}
    order = networkx.DiGraph((node, user) for node in nodes for user in node.users)
    order.add_nodes_from(nodes)
    order.add_edges_from((each, node) for node, earlier in must_wait(gm).items() for each in earlier)
    shared = len(copy_of)  # more than any copy
    needed = dict.fromkeys(nodes, shared)  # by node, the first copy that needs it
    for node in reversed(nodes):
        needed[node] = min([copy_of.get(node.name, node.meta.get(SLICE, shared)), *map(needed.__getitem__, node.users)])

    start = min((number[node] for node in nodes if node.name in copy_of), default=0)

    def priority(node: Node) -> tuple[int, ...]:
        if in_place:
            return min(number[node], start) if needed[node] < shared else number[node], needed[node], number[node]
        return needed[node] if node.name in copy_of else -1, number[node]

    return rebuild(gm, order=networkx.lexicographical_topological_sort(order, key=priority))


class Unroller(Writer):
    """Writes the copies: by node of the boxed graph, what stands for it in each of them; one node for all if it is
    shared."""

    def __init__(self, gm: GraphModule, boxed: GraphModule, count: int) -> None:
        super().__init__(mode_of(gm))
        self.gm, self.boxed, self.count = gm, boxed, count
        self.copy_of: dict[str, int] = {}

    def run(self) -> GraphModule:
        """Writes node by node, each for all copies."""
        for node in self.boxed.graph.nodes:
            if node.op != "output":
                self.turn_to(node)
                self[node] = self.written(node)
        return self.ended([None if node is None else self[node][0] for node in results(self.boxed)], self.gm.meta)

    def ended(self, outputs: Sequence[Node | None], meta: Mapping[str, Any]) -> GraphModule:
        """Returns the module that gives these nodes of the new graph."""
        self.graph.output(tuple(outputs)).meta.update(self.boxed.graph.output_node().meta)
        return self.module(self.gm, meta)

    def copied(self, node: Node) -> Node:
        """Copies a placeholder or a constant."""
        copy = self.keep(node)
        put(copy, "meta", dict(self.about.meta))
        return copy

    def written(self, node: Node) -> list[Any]:
        """Writes one node, and returns what stands for it in each copy."""
        if node.op in ("placeholder", "get_attr"):
            return [self.copied(node)] * self.count
        if "step" in node.meta:
            return self.moved(node)
        choice = node.meta.get("choice")
        shared = all(
            all(each is copies[0] for each in copies) for copies in map(self.__getitem__, node.all_input_nodes)
        )
        if shared and (choice is None or not choice.cuts()):
            return [self.part_of(node, 0)] * self.count
        return [self.own(at, functools.partial(self.part_of, node, at)) for at in range(self.count)]

    def moved(self, node: Node) -> list[Any]:
        """Writes one boxing."""
        step, copies = node.meta["step"], self[operands(node)[0]]
        for move in MOVES[step.collective]:
            copies = getattr(self, move)(step, copies)
        return copies

    def own(self, at: int, write: Callable[[], Any]) -> Any:
        """Returns what `write` writes, and notes that it is of one copy."""
        before = len(self.graph.nodes)
        made = write()
        self.copy_of |= {
            node.name: at for node in itertools.islice(reversed(self.graph.nodes), len(self.graph.nodes) - before)
        }
        return made

    def part_of(self, node: Node, at: int) -> Any:
        """Writes one call for one copy, by its rule."""
        if node.target is operator.getitem:
            producer, index = value_of(node)
            several = self[producer][at]
            return several[index] if isinstance(several, tuple) else self.named(self.part(several, index), node, at)
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda used: self[used][at])
        match = node.meta.get("match")
        if match is None:
            return self.named(self.call(node.target, *args, **kwargs), node, at)
        choice, sizes = node.meta["choice"], (self.count,)
        if isinstance(choice.signatures[0], OwnOrder):
            return self.named(self.on_own_rows(node, args, kwargs), node, at)
        local = local_sizes(match.sizes.items(), choice, sizes, (at,))
        starts = {factor: self.first(match.sizes[factor], at) for factor in choice.cuts() if factor in match.shifts}
        if match.op in PRODUCTS or not choice.cuts():  # what is whole stays what it is: rows of experts do
            made = Shard(match, self.call, args, kwargs, local, {}).plain()
        else:
            made = match.localize(self.call, args, kwargs, local, starts)
        return self.named(made, node, at) if isinstance(made, Node) else tuple(made)

    def on_own_rows(self, node: Node, args: Any, kwargs: Any) -> Node:
        """Writes a call on the rows of one copy and their numbers."""
        if node.target is SCATTER and node.meta["sbp"].cuts:
            args = (*args[:3], args[3] // self.count, *args[4:])
        elif node.target is aten.index_put.default:  # the places of a permutation, which are numbered from 0 on
            places: Any = node.args[2]
            args = (*args[:2], self.call(aten.arange.default, places.args[0] // self.count, **places.kwargs))
        return self.call(node.target, *args, **kwargs)

    def named(self, made: Node, node: Node, at: int) -> Node:
        """Gives what was written for a node its name, with a number after the first copy, and notes of what it is a
        copy."""
        rename(made, f"{node.name}_{at}" if at else node.name)
        made.meta["origin"] = node.name
        return made

    def first(self, size: int, at: int) -> Node:
        """Writes where a copy's part of a dim of `size` begins: a 0-dim int64."""
        before = sum(chunk_sizes(size, self.count)[:at])
        return self.call(aten.full.default, [], before, dtype=torch.int64, device=torch.device("cpu"))

    def reduced(self, step: Step, copies: list[Any]) -> list[Any]:
        """Writes the sum of partial values, the same for all copies."""
        (state,) = step.before.states
        assert isinstance(state, Partial)
        return [functools.reduce(functools.partial(self.call, ADD[state.op]), copies)] * self.count

    def joined(self, step: Step, copies: list[Any]) -> list[Any]:
        """Writes the parts one after the other, the same for all copies."""
        (state,) = step.before.states
        assert isinstance(state, Split)
        return [self.call(aten.cat.default, copies, state.dim)] * self.count

    def cut(self, step: Step, copies: list[Any]) -> list[Any]:
        """Writes each copy's part of a value."""
        (state,) = step.after.states
        assert isinstance(state, Split)
        sizes = chunk_sizes(copies[0].meta["val"].shape[state.dim], self.count)
        spans = enumerate(zip(copies, itertools.accumulate(sizes), sizes))
        write = functools.partial(self.call, aten.slice.Tensor)
        return [self.own(at, functools.partial(write, x, state.dim, end - size, end)) for at, (x, end, size) in spans]

    def kept(self, step: Step, copies: list[Any]) -> list[Any]:
        """Writes a whole value as a partial one: zeros in all copies but the first."""
        return [copies[0], *(self.call(aten.zeros_like.default, x) for x in copies[1:])]

    def padded(self, step: Step, copies: list[Any]) -> list[Any]:
        """Writes each part in its place among zeros."""
        (state,) = step.before.states
        assert isinstance(state, Split)
        sizes, result = [x.meta["val"].shape[state.dim] for x in copies], []
        for at, x in enumerate(copies):
            pads = [0] * (2 * (x.meta["val"].dim() - 1 - state.dim)) + [sum(sizes[:at]), sum(sizes[at + 1 :])]
            result.append(self.call(aten.constant_pad_nd.default, x, pads))
        return result


# By collective or local op: the methods that write it, one after the other.
MOVES = {
    "all_gather": ("joined",),
    "all_reduce": ("reduced",),
    "all_to_all": ("joined", "cut"),
    "keep": ("kept",),
    "pad": ("padded",),
    "reduce_scatter": ("reduced", "cut"),
    "slice": ("cut",),
}


def in_halves(plan: Plan, asked: Wishes, options: Options, made: Callable[[GraphModule, Assignment], Plan]) -> Plan:
    """Returns the plan of the same step in two micro-batches side by side, in the layouts of `plan`.

    asked: what the user wants. options: of the plan to be returned. made: makes the plan of a graph and an
    assignment. The bounds are those of `plan`: a kernel or a collective of half the size takes no less than half the
    time, so two halves in any layouts are busy for no less than the mean of two steps of whole batches, one in the
    layouts of each. Raises PlanError if the batch cannot be halved.
    """
    mesh, prover = plan.mesh, plan.problem
    gm = micro_batches(plan.annotated, 2, mesh.cluster, in_turn=False)
    space = Space(gm, mesh, both(asked.nodes, same_layouts(plan, gm), mesh), asked.outputs)
    halves = made(gm, space.solve()[0])
    if isinstance(prover, Overlap):
        prover = replace(prover, whole=plan)
    return overlapped(halves, options, prover, plan.lower_bound, plan.serial_bound)


def same_layouts(plan: Plan, gm: GraphModule) -> dict[str, Wish]:
    """Returns, for what stands for a node of the plan's graph in `gm`, that its first output is laid out as there."""
    wishes = {}
    for node in gm.graph.nodes:
        choice = plan.assignment.choices.get(node.meta.get("origin", node.name))
        if choice is not None and ("origin" in node.meta or node.op == "placeholder"):
            wishes[node.name] = exactly(choice.output(0, plan.mesh.axes), f"%{node.name} as in the whole batch")
    return wishes
