"""The order of a scheduled graph as numbers, as files hold it: `n` is the nth call of the boxed graph, `~n` waits for
it, and a list has the collectives of one message. What is read is checked, as a file may be a stranger's."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from sbpc.errors import VerifyError
from sbpc.graph.about import must_wait
from sbpc.mesh.mesh import Mesh
from sbpc.plans.measure import sent_by
from sbpc.plans.timeline import COMPUTE, kernel_work_of, kind_of, transfer_work

Numbers = Sequence[int | Sequence[int]]


def numbered(boxed: GraphModule, gm: GraphModule) -> list[int | list[int]]:
    """Returns the order of a scheduled graph; nothing where it waits for every collective at once, as `boxed` does, or
    where its calls have other names."""
    number = {node.name: at for at, node in enumerate(calls_in(boxed))}
    found, waits = list[int | list[int]](), False
    for node in calls_in(gm):
        if "awaits" not in node.meta and node.name not in number:  # as a wait is called as it was
            return []
        if "awaits" in node.meta:
            found.append(~number[node.all_input_nodes[0].name])
            waits = True
        elif (first := node.meta.get("bucket")) is None:
            found.append(number[node.name])
        elif first == node.name:
            found.append([number[node.name]])
        else:
            found[-1].append(number[node.name])  # type: ignore[union-attr]
    return found if waits else []


def order_of(boxed: GraphModule, mesh: Mesh, numbers: Numbers) -> tuple[list[tuple[Node, bool]], dict[Node, Node]]:
    """Returns an order with its buckets, as `sbpc.passes.schedule.schedule.ordered` takes them.

    Raises VerifyError unless every call stands there once, behind what it reads and what it must wait for, and for
    every collective that sends something a wait: behind it, and before all that reads it.
    """
    reader = OrderReader(boxed, mesh)
    for item in numbers:
        if isinstance(item, int):
            reader.wait(~item) if item < 0 else reader.start(item)
        else:
            reader.message(item)
    missing = [node for node in reader.calls if node not in reader.there]
    for node in missing:
        raise VerifyError(f"%{node.name} is not in the order of the calls, or nothing waits for it\n  Plan anew.")
    return reader.order, reader.buckets


def calls_in(gm: GraphModule) -> list[Node]:
    """Returns the calls of a graph."""
    return [node for node in gm.graph.nodes if node.op == "call_function"]


class OrderReader:
    """Reads the numbers of an order. started: the calls so far. there: those whose values may be read."""

    def __init__(self, boxed: GraphModule, mesh: Mesh) -> None:
        self.calls, self.mesh, self.after = calls_in(boxed), mesh, must_wait(boxed)
        self.started, self.there = set[Node](), set[Node]()
        self.order, self.buckets = list[tuple[Node, bool]](), dict[Node, Node]()

    def start(self, number: int) -> Node:
        """Takes in a call, and returns it."""
        node = self.call(number)
        before = [used for used in node.all_input_nodes if used.op == "call_function" and used not in self.there]
        before += [each for each in self.after.get(node, ()) if each not in self.there]
        if node in self.started or before:
            what = "stands twice" if node in self.started else f"runs before %{before[0].name}, on which it waits"
            raise VerifyError(f"%{node.name} {what} in the order of the calls\n  Plan anew.")
        self.started.add(node)
        self.order.append((node, False))
        if not in_flight(node, self.mesh):
            self.there.add(node)
        return node

    def wait(self, number: int) -> None:
        """Takes in the wait for a collective."""
        node = self.call(number)
        if node not in self.started or node in self.there:
            raise VerifyError(f"the order of the calls waits for %{node.name}, which is not on its way\n  Plan anew.")
        self.there.add(node)
        self.order.append((node, True))

    def message(self, numbers: Sequence[int]) -> None:
        """Takes in collectives that go in one message."""
        nodes = [self.start(number) for number in numbers]
        alike = all("step" in node.meta and node not in self.there for node in nodes)
        if len(nodes) < 2 or not alike or len(set(map(kind_of, nodes))) > 1:
            names = ", ".join(f"%{node.name}" for node in nodes) or "nothing"
            raise VerifyError(f"the order of the calls sends {names} in one message\n  Plan anew.")
        self.buckets |= dict.fromkeys(nodes, nodes[0])

    def call(self, number: int) -> Node:
        """Returns the call of a number."""
        if not 0 <= number < len(self.calls):
            raise VerifyError(f"call {number} in the order of {len(self.calls)} calls\n  Plan anew.")
        return self.calls[number]


def in_flight(node: Node, mesh: Mesh) -> bool:
    """Returns whether a call of a boxed graph sends something, for which a node of its own may wait."""
    if "step" in node.meta:
        return transfer_work(node, mesh).stream != COMPUTE
    return sent_by(node) is not None and kernel_work_of(node, mesh).stream != COMPUTE
