"""Where the micro-batches of a loop come together: before the loop, when all forwards are done, and behind it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch.fx import GraphModule, Node

from sbpc.errors import LoopError, PlanError, at_node
from sbpc.graph.about import RECOMPUTES, maker_of
from sbpc.graph.operands import ancestors, depending_on, is_late, just_in_time, made_of
from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, OUTPUT, PARAMETER, Port, outputs, placeholders, results
from sbpc.mesh.states import Partial, Split
from sbpc.passes.loop.own_order import OwnOrder
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.schedules import forwards_first
from sbpc.rules.local_rows import CASTS, VIEWS
from sbpc.rules.ops.expert_rows import WITHIN

# equally dear, or parts are padded with zeros and added up
JOINS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
WHOLE_BATCH = (
    "Plan without stages=, where micro-batches know such a value of the whole batch; or leave such an op out, as batch "
    "statistics are. To have it of each part of the batch instead, which gives other numbers, step over one part after "
    "the other in module.no_sync()."
)
DROPS = """Which rows are too many for an expert is told of all rows of the batch: with stages=, plan without
  overflow="drop"; capacity= alone stops where a rank gets more."""


class Joins:
    """The joins of a boxed graph whose ranks are the micro-batches, and where its nodes are computed.

    early: joins that are computed before the loop, from the inputs alone. middle: those that are joined when all
    forwards are done, as backwards alone read them, each with the one whose value it has: one that is computed again
    has that of the first. tail: what forwards make of those; it is computed behind the loop, and in backwards that read
    it. body: what a micro-batch computes, in order. reads: what the body leaves for what is joined later.
    """

    def __init__(self, gm: GraphModule, boxed: GraphModule) -> None:
        self.gm, self.boxed, nodes = gm, boxed, boxed.graph.nodes
        own = {node for node in nodes if node.op == "call_function" and not is_whole(node)}
        self.early, joins = self.read_inside(ancestors(own))
        readers = depending_on(user for join in joins for user in join.users)
        self.tail = {node for node in readers if node.op == "call_function" and not is_late(maker_of(node))}
        needed = ancestors(own - self.tail)
        self.middle = {join: first for join, first in joins.items() if join in needed}
        late = self.behind()
        self.reads = self.read_out(late)
        here = (node for node in nodes if node.op != "output" and (node not in late or node in needed))
        self.body = just_in_time(here, self.tail)

    def read_inside(self, needed: Container[Node]) -> tuple[set[Node], dict[Node, Node]]:
        """Returns the joins that are `early`, and others, with the one whose value each has. needed: what depends on
        them is cut or partial. Raises LoopError for what backwards join."""
        known, early, middle = {node.name for node in self.gm.graph.nodes}, set[Node](), dict[Node, Node]()
        for join in [node for node in self.boxed.graph.nodes if is_join(node) and node in needed]:
            maker = maker_of(join)
            # as batch norm: the step has no such value
            if not self.depends(join) and maker.name in known:
                early.add(join)
                continue
            middle[join] = self.first(join, maker.meta.get(RECOMPUTES)) if is_late(maker) else join
        return early, middle

    def first(self, join: Node, name: str | None) -> Node:
        """Returns the join of what was computed before, or else that itself, of which a join is one that is computed
        again. Raises LoopError if there is none."""
        firsts = [node for node in self.boxed.graph.nodes if name is not None and maker_of(node).name == name]
        found = [node for node in firsts if is_join(node)] + [node for node in firsts if node.name == name]
        alike = [node for node in found if how(node) == how(join)]
        if not alike:
            raise self.refused(join)
        return alike[0]

    def depends(self, join: Node) -> str:
        """Returns on what a join depends that is not there before the loop, in words; nothing if on none."""
        reads, ports = ancestors([join]), placeholders(self.boxed).items()
        wrong = (port for port, node in ports if node in reads and port.kind not in (INPUT, BUFFER))
        return next((f"depends on {port.kind} {port.name}" for port in wrong), "")

    def refused(self, join: Node) -> LoopError:
        """Returns the error about a join that comes too late."""
        why = self.depends(join) or "runs in two phases"
        what = f"each micro-batch needs the whole batch's value of this op, which {why}"
        drops = any(is_join(node) and is_for_drops(node) for node in self.boxed.graph.nodes)
        return LoopError(at_node(what, maker_of(join), DROPS if drops else WHOLE_BATCH))

    def read_out(self, late: Container[Node]) -> list[Node]:
        """Returns what the body leaves, in order: what is read behind the loop, then what else backwards read. Raises
        LoopError if forwards make more than a loss of a join: another one, or what reads weights, or rows in an order
        of each micro-batch's own. late: what is behind joins."""
        ends = zip(self.gm.meta["ports"].outputs, results(self.boxed))
        inner = read_behind([node for port, node in ends if port.kind != GRADIENT], late, self.tail)
        weights = made_of(self.boxed, placeholders(self.boxed, PARAMETER).values())
        first = list(dict.fromkeys(self.middle.values()))
        for node in [*first, *(node for node, computed in inner.items() if computed)]:
            own = "choice" in node.meta and isinstance(node.meta["choice"].signatures[0], OwnOrder)
            reads = any(used in weights and used.meta["val"].numel() > 1 for used in node.all_input_nodes)
            if node in self.tail and (node in first or own or reads):
                raise self.refused(min(each for each in ancestors([node]) if is_join(each) and each in late))
        return list(dict.fromkeys([*(node for node, computed in inner.items() if not computed), *first]))

    def behind(self) -> set[Node]:
        """Returns the joins that are not `early`, and all that depends on them."""
        late = {node for node in self.boxed.graph.nodes if is_join(node) and node not in self.early}
        for node in self.boxed.graph.nodes:
            if node.op != "output" and any(used in late for used in node.all_input_nodes):
                late.add(node)
        return late


def read_behind(ends: Iterable[Node | None], late: Container[Node], tail: Container[Node]) -> dict[Node, bool]:
    """Returns what results are made of, in order, and whether it is computed behind the loop; else it is read of the
    loop: joins, and what is the same for all micro-batches. tail: what forwards make of joins."""
    todo = [node for node in ends if node is not None][::-1]
    inner: dict[Node, bool] = {}  # by node whether it is computed behind the loop
    while todo:
        node = todo.pop()
        if node not in inner:
            inner[node] = node in tail or (node in late and not is_join(node) and is_whole(node))
            todo += reversed(node.all_input_nodes) if inner[node] else ()
    return inner


def is_join(node: Node) -> bool:
    """Returns whether micro-batches come together at a node of the boxed graph."""
    return "step" in node.meta and node.meta["step"].collective in JOINS


def is_whole(node: Node) -> bool:
    """Returns whether a value is the same for all micro-batches, and is computed without a cut."""
    layouts = node.meta["sbp"] if isinstance(node.meta["sbp"], tuple) else (node.meta["sbp"],)
    choice = node.meta.get("choice")
    return not any(layout.partial or layout.cuts for layout in layouts) and (choice is None or not choice.cuts())


def how(node: Node) -> Any:
    """Returns how the micro-batches' values come together: "sum", "max", "min", the dim along which they are put, or
    "same"."""
    if not is_join(node):  # the gradient of an argument may be left in parts
        (state,) = node.meta["sbp"].states
        return state.dim if isinstance(state, Split) else state.op if isinstance(state, Partial) else "same"
    (before,), (after,) = node.meta["step"].before.states, node.meta["step"].after.states
    if isinstance(after, Split):
        raise LoopError(at_node("micro-batches exchange parts of this value", maker_of(node), "Plan without stages=."))
    return before.op if isinstance(before, Partial) else before.dim


def in_order(loop: Loop, schedule: str, may_change: bool) -> str:
    """Returns the schedule, or where that must be one with all forwards before the first backward. Raises PlanError
    unless it may change."""
    other = forwards_first(schedule) if loop.joined else schedule
    if other == schedule or may_change:
        return other
    node = dict(outputs(loop.body))[Port(OUTPUT, str(min(loop.joined.values())))]
    what = f"schedule={schedule!r} begins backwards before all forwards are done, and they read the whole batch's value"
    raise PlanError(at_node(f"{what} of this op", node, 'Give schedule="gpipe" or "breadth-first", or leave it out.'))


def is_for_drops(join: Node) -> bool:
    """Returns whether a value tells which rows are too many for their experts."""
    return any(
        user.target is WITHIN or ((user.target in (*CASTS, *VIEWS) or "step" in user.meta) and is_for_drops(user))
        for user in join.users
    )
