"""Add up the gradients of several backwards on each rank, and communicate their sum once: `with module.no_sync():`.

The last calls on a gradient's way home, from the first collective on, are linear: L(a) + L(b) = L(a + b). So the sum may be taken
before them, of what they read, and they run once for all backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.errors import PlanError
from sbpc.graph.operands import made_of
from sbpc.graph.ports import GRADIENT, results
from sbpc.runtime.executors import BoxedFunction
from sbpc.runtime.partition import aten, backward_nodes, ends, extract, saved_for, wait

NO_SYNC = """Within `with module.no_sync():` a backward sends nothing for the gradients of parameters, and leaves `.grad` as it is.

Each rank adds up what it has computed of them. The first backward outside adds that to its own, sends the sum on its way home, and
leaves it in `.grad`, as if every backward had done so:

    for batch in batches[:-1]:
        with module.no_sync():
            module.step(*batch)
    module.step(*batches[-1])
    optimizer.step()

Where `backward` is called counts, not where the forward ran. The sums are held in the layouts in which gradients are computed, in
float32 where these are in 16 bits: that is memory besides what the plan predicts. A stock optimizer does not know them. So end with
a backward outside before `optimizer.step()`, as the sums are else missing there and go into the next backward outside; and drop them
by `module.zero_grad()`, as `optimizer.zero_grad()` does not. `sbpc.Checkpoints` refuses to save while there are any."""
ZERO_GRAD = "Drops the gradients of parameters, and what `no_sync` keeps of them."
C10D = torch.ops._c10d_functional
REDUCING = C10D.all_reduce.default, C10D.reduce_scatter_tensor.default
SENDING = C10D.all_gather_into_tensor.default, C10D.all_to_all_single.default, *REDUCING
LINEAR = (  # in their first argument
    *SENDING, wait, aten.alias.default, aten.clone.default, aten.constant_pad_nd.default, aten.contiguous.default, aten.expand.default,
    aten.index_select.default, aten.masked_fill.Scalar, aten.permute.default, aten.reshape.default, aten.slice.Tensor,
    aten.slice_copy.Tensor, aten.squeeze.dim, aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.view.default,
    aten.view_as_complex.default, aten.view_as_real.default,
)  # fmt: skip
FILLED = {aten.constant_pad_nd.default: 2, aten.masked_fill.Scalar: 2}  # where the number stands that is put beside the argument
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # in which sums are held


@dataclass(frozen=True)
class Apart:
    """The programs of a step in which the ends of the gradients' ways home are apart.

    backward, joint: as those of the whole step, but in place of all gradients they give those of arguments, then what the ends read:
    `sources` values that may be added up, and values that are the same in every step. ending: these -> the gradients of parameters.
    """

    backward: GraphModule
    joint: GraphModule
    ending: GraphModule
    sources: int


def apart(gm: GraphModule) -> Apart:
    """Cuts a local program before the ends of its gradients' ways home."""
    nodes, late = list(gm.graph.nodes), backward_nodes(gm)
    tangents, early_results, late_results = ends(gm)
    wanted = [node for port, node in zip(gm.meta["ports"].outputs, results(gm)) if port.kind == GRADIENT]
    others = [node for node in late_results if node not in wanted]
    ending, sources, constants = way_home(gm, [node for node in wanted if node is not None], [*early_results, *others])
    inputs = [node for node in nodes if node.op == "placeholder" and node not in tangents]
    late_left = [*others, *sources]
    body = [node for node in nodes if node not in ending]
    saved = saved_for(gm, late, late_results)
    backward = extract(gm, [*saved, *tangents], [node for node in body if node in late], [], late_left, constants)
    joint = extract(gm, [*inputs, *tangents], body, early_results, late_left, constants)
    end = extract(gm, [*sources, *constants], [node for node in nodes if node in ending], [], wanted)
    return Apart(backward, joint, end, len(sources))


def way_home(gm: GraphModule, wanted: list[Node], others: Sequence[Node | None]) -> tuple[set[Node], list[Node], list[Node]]:
    """Returns the calls at the ends of the gradients' ways home, what they read of gradients, and what else they read.

    wanted: the gradients. others: what else the program gives.
    """
    nodes, tail, given = list(gm.graph.nodes), set[Node](), len(gm.meta["ports"].inputs)
    fixed = made_of(gm, gm.graph.find_nodes(op="placeholder")[given:])  # the rank's positions: the same in every step
    for node in reversed(nodes):
        users = [user for user in node.users if user.op != "output"]
        private = node not in others and (node in wanted or bool(users)) and all(user in tail for user in users)
        if private and summed(node, fixed):
            tail.add(node)
    ending: dict[Node, None] = {}
    for node in nodes:
        if node in tail and (node.target in SENDING or any(used in ending for used in summed(node, fixed))):
            ending[node] = None
    read = [used for node in ending for used in summed(node, fixed)] + wanted
    sources = list(dict.fromkeys(node for node in read if node not in ending))
    constants = list(dict.fromkeys(used for node in ending for used in node.all_input_nodes if used in fixed))
    return set(ending), sources, constants


def summed(node: Node, fixed: set[Node]) -> list[Node]:
    """Returns those operands of a call in which it is jointly linear, all others being the same in every step; none if it is not."""
    if node.op != "call_function" or node in fixed:
        return []
    args: Any = node.args
    if node.target is aten.cat.default:
        operands = list(args[0])
    elif node.target is aten.add.Tensor and len(args) == 2 and not node.kwargs:
        operands = list(args)
    elif node.target in LINEAR or widens(node):
        operands = [args[0]]
    else:
        return []
    op: Any = node.target
    place = FILLED.get(op, len(args))
    reduces_otherwise = op in REDUCING and args[1] != "sum"
    filled = place < len(args) and args[place] != 0
    known = all(isinstance(each, Node) and each not in fixed for each in operands)
    rest = all(used in operands or used in fixed for used in node.all_input_nodes)
    return operands if known and rest and not filled and not reduces_otherwise else []


def widens(node: Node) -> bool:
    """Returns whether a call is a cast that loses nothing."""
    if node.target is not aten._to_copy.default or node.kwargs.keys() != {"dtype"}:
        return False
    given = node.all_input_nodes[0].meta.get("val")
    return isinstance(given, Tensor) and WIDE.get(given.dtype) == node.kwargs["dtype"]


class Collector:
    """Whether backwards collect gradients, `collects`: they do within `no_sync`."""

    collects = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collects while this lasts."""
        before, self.collects = self.collects, True
        try:
            yield
        finally:
            self.collects = before


def within(sums: Collector | None) -> str:
    """Returns what tells a step within `no_sync` from others."""
    return " within no_sync" if sums is not None and sums.collects else ""


class Sums(Collector):
    """What backwards within `no_sync` have computed of gradients, in the order of the sources of `apart`.

    collects: whether `no_sync` is on.
    """

    def __init__(self) -> None:
        self.held = list[Tensor]()
        self.apart: Apart | None = None

    @property
    def on(self) -> bool:
        """Whether the next backward collects, or ends a collection."""
        return self.collects or bool(self.held)

    def drop(self) -> None:
        """Forgets what has been collected."""
        self.held = []

    def gradients(
        self, apart: Apart, ending: BoxedFunction, are_parameters: list[bool], computed: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Takes what a program of `Apart` gives from the gradients of arguments on. Returns all gradients, those of parameters None
        while it collects.

        ending: the compiled one. are_parameters: of every gradient, in order, whether it is that of a parameter. Raises PlanError if
        what has been collected is of another plan.
        """
        if self.held and self.apart is not apart:
            raise PlanError(
                "no_sync has kept gradients of one plan, and now another one runs: the module is in another mode (train or eval),"
                " or its arguments have other shapes\n"
                "  Call backward outside of no_sync before that, or module.zero_grad()."
            )
        first = are_parameters.count(False)
        others, sources, constants = computed[:first], computed[first : first + apart.sources], computed[first + apart.sources :]
        if self.held:
            sums = [held.add_(source) for held, source in zip(self.held, sources)]
        else:
            sums = [source.to(WIDE.get(source.dtype, source.dtype)).contiguous() for source in sources]  # which may be expanded
        whole: list[Tensor | None] = [None] * are_parameters.count(True)
        if self.collects:
            self.apart, self.held = apart, sums
        else:
            self.held = []
            whole = list(ending([*(total.to(source.dtype) for total, source in zip(sums, sources)), *constants]))
        left, homes = iter(others), iter(whole)
        return [next(homes) if is_parameter else next(left) for is_parameter in are_parameters]
