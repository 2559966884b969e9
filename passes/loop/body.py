"""The loop over micro-batches: cuts a step into the body, which one micro-batch runs, and what is done once before
and after it.

The micro-batches are the ranks of a mesh of one axis, as in `sbpc.passes.loop.micro_batches`, so the rules
themselves say what each value is: cut (a micro-batch has its part), whole (the same for all), or partial (the
micro-batches' values add up). Here one body is written for all of them; which one it is, is an input. Where
micro-batches come together their values are joined after the loop. What all micro-batches read of the whole batch,
such as a count of targets, is computed before the loop, from the inputs alone. What forwards make and only backwards
read of the whole batch, such as how many tokens went to each expert, is joined when all forwards are done.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sbpc.boxing.steps import Step
from sbpc.errors import LoopError, PlanError, at_node
from sbpc.graph.about import maker_of
from sbpc.graph.operands import ancestors, depending_on, operands, value_of
from sbpc.graph.ports import (
    BUFFER,
    GRADIENT,
    INPUT,
    ONCE,
    OUTPUT,
    PARAMETER,
    TANGENT,
    Port,
    add_port,
    outputs,
    placeholders,
    results,
)
from sbpc.graph.pytree import structures
from sbpc.graph.rewrite import Copies, rebuild
from sbpc.mesh.cluster import CLUSTERS
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish
from sbpc.mesh.states import B, Partial, Split
from sbpc.passes.annotate import annotate
from sbpc.passes.loop.joins import JOINS, Joins, how, is_join, is_whole
from sbpc.passes.loop.micro_batches import AXIS, Unroller, batch_of, boxed_for, without_joins
from sbpc.passes.loop.one_loss import one_loss, uncast_gradients
from sbpc.plans.options import Options
from sbpc.plans.staged.loop import JOINED, Loop, Source
from sbpc.rules.choices import Candidates
from sbpc.rules.sum_types import begins_sums

aten = torch.ops.aten
OUTSIDE = 1e-6  # what a byte that crosses once, outside the loop, counts beside one in it
INDEX = "micro_batch"  # the placeholder for the number of the micro-batch


def loop_of(gm: GraphModule, count: int) -> Loop:
    """Returns an annotated step as a loop over `count` micro-batches, the same on every cluster.

    Raises PlanError if the batch does not divide, LoopError if a micro-batch cannot run without what others
    computed: the op is named.
    """
    batch = batch_of(gm, count)
    try:
        step = annotate(uncast_gradients(one_loss(gm)) if placeholders(gm, TANGENT) else rebuild(gm))
    except PlanError as error:  # it has no loss
        raise LoopError(str(error)) from error
    step.meta[ONCE] = {PARAMETER: OUTSIDE, GRADIENT: OUTSIDE}
    cut_evenly(step)
    mesh = Mesh(cluster=without_joins(CLUSTERS["ideal"], JOINS), **{AXIS: count})  # the micro-batches are its ranks
    leaves = [node.meta["val"] for node in placeholders(step, INPUT).values()]
    cut = [f"S(0)@{AXIS}" if count > 1 and leaf.dim() and leaf.shape[0] == batch else None for leaf in leaves]
    more = partial_gradients(step) | of_parameters_alone(step) if count > 1 else {}
    return BodyWriter(step, boxed_for(step, mesh, Options(inputs=cut, baseline="data"), more, LoopError), count).loop()


def cut_evenly(gm: GraphModule) -> None:
    """Leaves the nodes of a graph only cuts into equal parts: all micro-batches run one body."""
    known: dict[Candidates, Candidates] = {}
    for node in gm.graph.nodes:
        if (had := node.meta.get("candidates")) is not None:
            all_factors = frozenset(factor for factor, _ in had.sizes)
            node.meta["candidates"] = known.setdefault(had, replace(had, divides=all_factors))


def of_parameters_alone(gm: GraphModule) -> dict[str, Wish]:
    """Returns the wishes that what depends on parameters and no input, as a penalty on weights, is whole: parts
    would be padded."""
    on_parameters, on_inputs = (depending_on(placeholders(gm, kind).values()) for kind in (PARAMETER, INPUT))
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and value_of(node)[0] is node]
    found = [node for node in calls if node in on_parameters and node not in on_inputs]
    return {node.name: Wish(((0, B),), reason="it depends on parameters alone") for node in found}


def partial_gradients(gm: GraphModule) -> dict[str, Wish]:
    """Returns the wishes that gradients of parameters are sums over the micro-batches, where their ops have such a
    signature."""
    wishes = {}
    for port, node in outputs(gm, GRADIENT):
        producer, index = value_of(operands(node)[0] if begins_sums(node) else node)
        if not index and Partial() in {signature.outputs[0] for signature in producer.meta["signatures"]}:
            wishes[producer.name] = Wish(((0, Partial()),), reason=f"the gradient of {port.name}")
    return wishes


class BodyWriter(Unroller):
    """Writes the body: by node of the boxed graph, a list of the one node that stands for it."""

    def __init__(self, gm: GraphModule, boxed: GraphModule, count: int) -> None:
        super().__init__(gm, boxed, count)
        self.joins = Joins(gm, boxed)
        self.starts: dict[int, Node] = {}
        self.ports: dict[Port, Source | None] = {}  # of the placeholders
        self.index: Node

    def loop(self) -> Loop:
        """Writes the three parts."""
        self.placeholders()
        for node in self.joins.body:
            if node not in self:
                self.turn_to(node)
                self[node] = [self.copied(node)] if node.op == "get_attr" else self.written(node)
        return self.finished()

    # --- the body -----------------------------------------------------------------------------------------------------
    def turn_to(self, node: Node) -> None:
        super().turn_to(node)
        if node in self.joins.tail or node in self.joins.middle:  # it is computed where backwards read it
            self.about.meta["phase"] = "backward"

    def placeholders(self) -> None:
        """Writes all placeholders: those of the step, with inputs as a micro-batch has them, early joins, the
        micro-batch's number, and what is joined when all forwards are done."""
        for port, node in placeholders(self.boxed).items():
            self.turn_to(node)
            copy = self.copied(node)
            self[node] = [copy]
            if port.kind != INPUT:
                self.ports[port] = None
                continue
            (state,) = node.meta["sbp"].states
            dim = state.dim if isinstance(state, Split) else None
            if dim is not None:
                copy.meta["val"] = part(node.meta["val"], dim, self.count)
            add_port(self.ports, INPUT, Source("argument", int(port.name), dim))
        joins = [node for node in self.boxed.graph.nodes if node in self.joins.early]
        whole = [self.given(f"whole_{place}", {"val": join.meta["val"]}) for place, join in enumerate(joins)]
        for place in range(len(joins)):
            add_port(self.ports, INPUT, Source("before", place))
        with self.mode:
            self.index = self.given(INDEX, {"val": torch.empty((), dtype=torch.int64)})
        add_port(self.ports, INPUT, Source("index", 0))
        given = dict(zip(joins, whole))
        for join, first in self.joins.middle.items():
            self.turn_to(join)
            if first not in given:
                like = first.meta["val"]  # the half of an op in two phases has no value of the capture
                with self.mode:
                    value = self.given(f"joined_{first.name}", {"val": torch.empty(like.shape, dtype=like.dtype)})
                add_port(self.ports, INPUT, Source(JOINED, self.joins.reads.index(first)))
                given[first] = self.call(aten.clone.default, value)  # the stage that makes it sends it to others
        for join in [*joins, *self.joins.middle]:
            value = given[self.joins.middle.get(join, join)]
            self.turn_to(join)
            self[join] = self.cut(join.meta["step"], [value]) if join.meta["sbp"].cuts else [value]

    def written(self, node: Node) -> list[Any]:
        """Writes one node, and returns what stands for it."""
        if "step" in node.meta:
            return self.moved(node)
        if (match := node.meta.get("match")) is not None:
            for factor in node.meta["choice"].cuts():
                self.check_even(match.sizes[factor], node)
        return [self.part_of(node, 0)]

    def check_even(self, size: int, node: Node) -> None:
        """Raises LoopError if a dim does not come out even."""
        if size % self.count:
            what = f"a dim of {size} cannot be cut into {self.count} equal parts, one for each micro-batch"
            raise LoopError(at_node(what, maker_of(node), "Give a number of micro-batches that divides it."))

    def first(self, size: int, at: int) -> Any:
        """Writes where a micro-batch's part of a dim of `size` begins: a 0-dim int64."""
        if size not in self.starts:
            self.starts[size] = self.call(aten.mul.Scalar, self.index, size // self.count)
        return self.starts[size]

    def cut(self, step: Step, copies: list[Any]) -> list[Any]:
        """Writes the micro-batch's part of a whole value."""
        (state,) = step.after.states
        assert isinstance(state, Split)
        size = copies[0].meta["val"].shape[state.dim]
        self.check_even(size, copies[0])
        places = self.call(aten.arange.default, size // self.count, dtype=torch.int64, device=torch.device("cpu"))
        places = self.call(aten.add.Tensor, places, self.first(size, 0))
        return [self.call(aten.index_select.default, copies[0], state.dim, places)]

    def kept(self, step: Step, copies: list[Any]) -> list[Any]:
        """Writes a whole value as a partial one: zeros in all micro-batches but the first."""
        return [self.masked(copies[0])]

    def masked(self, value: Node) -> Node:
        """Writes a value in the first micro-batch, zeros in the others."""
        mask = self.call(aten.eq.Scalar, self.index, 0)
        mask = self.call(aten._to_copy.default, mask, dtype=value.meta["val"].dtype)
        return self.call(aten.mul.Tensor, value, mask)

    def padded(self, step: Step, copies: list[Any]) -> list[Any]:
        """Raises LoopError: a part among zeros has the size of the whole batch."""
        what = "a micro-batch would need this value for the whole batch, zeros but for its own part"
        raise LoopError(at_node(what, copies[0], "Plan without stages=."))

    # --- what is done once --------------------------------------------------------------------------------------------
    def finished(self) -> Loop:
        """Returns the loop: the body with its outputs, and the graphs around it."""
        ports, reads = self.gm.meta["ports"], self.joins.reads
        ends = list(zip(ports.outputs, results(self.boxed)))
        once = [node for port, node in ends if port.kind != GRADIENT]
        leaves: dict[Port, Node | None] = {
            port: None if node is None else self.summed(port, node) for port, node in ends if port.kind == GRADIENT
        }
        leaves |= {Port(OUTPUT, str(at)): self.left_of(node) for at, node in enumerate(reads)}
        inputs = {port.name: source for port, source in self.ports.items() if source is not None}
        given = replace(ports, inputs=tuple(self.ports), outputs=tuple(leaves), **structures(len(inputs), len(reads)))
        body = self.ended(list(leaves.values()), self.gm.meta | {"ports": given})
        body.graph.eliminate_dead_code()  # what is computed before the loop
        before = Copies()
        for node in placeholders(self.gm, INPUT, BUFFER).values():
            before.keep(node)
        after = Copies()
        for at, node in enumerate(reads):
            after[node] = after.given(f"loop_{at}", {"val": node.meta["val"]})
        behind = ancestors((node for node in once if node is not None), after)
        for node in [each for each in self.boxed.graph.nodes if each in behind and each not in after]:
            if "step" in node.meta:  # values are whole behind the loop
                after[node] = after[operands(node)[0]]
            else:
                after.keep(node)
        after.left(once)
        by_name = {node.name: node for node in self.gm.graph.nodes}
        whole = [by_name[maker_of(node).name] for node in self.boxed.graph.nodes if node in self.joins.early]
        return Loop(
            self.count,
            annotate(body),
            before.extracted(self.gm, self.gm.graph.nodes, whole),
            after.module(self.boxed, {}),
            inputs,
            tuple(map(how, reads)),
            ports,
            {port: node.meta["val"] for port, node in placeholders(self.gm).items()},
        )

    def left_of(self, node: Node) -> Node:
        """Returns what the body leaves of a node that is read behind it: a copy of what is given to the body."""
        self.turn_to(node)
        (value,) = self[operands(node)[0] if is_join(node) else node]
        return self.call(aten.clone.default, value) if value.op in ("placeholder", "get_attr") else value

    def summed(self, port: Port, node: Node) -> Node:
        """Returns what adds up to a gradient over the micro-batches; of one that they all have, the first one's."""
        if self.count == 1:
            return self[node][0]
        if is_join(node) and how(node) == "sum":
            return self[operands(node)[0]][0]
        if node in self and is_whole(node):
            self.turn_to(node)
            return self.masked(self[node][0])
        what = f"the gradient of {port.name} is not a sum over the micro-batches"
        raise LoopError(at_node(what, maker_of(node), "Plan without stages=."))


def part(value: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Returns a tensor without data of the size of one micro-batch's part."""
    shape = [size // count if at == dim else size for at, size in enumerate(value.shape)]
    return value.new_empty(shape)
