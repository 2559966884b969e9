"""The layout problem under limits of bytes: stored values, weights of labels at a moment, bounds of plans that keep
the limits."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.fx import GraphModule, Node

from sbpc.errors import lacking
from sbpc.graph.about import about
from sbpc.graph.operands import is_late
from sbpc.graph.ports import OUTPUT, results
from sbpc.graph.rewrite import Copies, called, rebuild
from sbpc.mesh.layout import broadcast
from sbpc.passes.assign.local_bytes import Place
from sbpc.passes.assign.space import Space
from sbpc.passes.memory.live_bytes import STORED, Moment
from sbpc.plans.options import NONE
from sbpc.plans.plan import Plan
from sbpc.plans.storages import local_bytes
from sbpc.solver import Limit, Proof
from sbpc.solver.fold import Folded


class LimitedSpace(Space):
    """The layout problem of a graph with stored values, in which the bytes of every label are known."""

    weighs_bytes = True

    def weights(self, moment: Moment) -> dict[int, np.ndarray]:
        """Returns, by number of a variable, the bytes that a moment counts, by label. Equal sums are one array."""
        places: dict[int, list[tuple[Place, float]]] = {}
        for (name, place), many in moment.items():
            places.setdefault(self.named[name], []).append((place, many))
        return {at: self.weighed(at, tuple(counted)) for at, counted in places.items()}

    def weighed(self, at: int, counted: tuple[tuple[Place, float], ...]) -> np.ndarray:
        """Returns the bytes at these places of a variable, each so many times, by label."""
        key = (id(self.tables[at]), "weights", counted)
        return self.once(key, lambda: np.sum([many * self.bytes_of(at, place) for place, many in counted], axis=0))


def by_class(folded: Folded, limits: Sequence[Limit]) -> list[Limit]:
    """Returns the limits of the folded problem: the members of a class are weighed together."""
    folded_limits = []
    for limit in limits:
        weights: dict[int, np.ndarray] = {}
        for at, each in limit.weights.items():
            weights[folded.classes[at]] = weights.get(folded.classes[at], 0.0) + each
        folded_limits.append(Limit(weights, limit.most))
    return folded_limits


@dataclass(eq=False)
class PricedBound:
    """A lower bound of plans that keep limits: a plan that does pays at most the sum of the prices, so a bound of
    seconds and payments, less that sum, bounds its seconds. prices: seconds for all of a limit.

    bound: seconds; infinite if it is known that no plan keeps the limits.
    """

    bound: float
    limits: Sequence[Limit] = ()
    prices: Sequence[float] = ()
    proof: Proof = field(default_factory=lambda: Proof([]))


# --- what the backward reads of the forward goes through a node of its own, so that what is kept is a choice ----------
# The layout of that node is what a rank holds of the value between forward and backward: as it was made, as the forward
# read it, or split further. A gathered parameter is kept in this way, or stored in its home and gathered again.
def store(gm: GraphModule) -> GraphModule:
    """The graph with stored values.

    Before: a joint graph at global shapes. After: every value with dims that is there in the forward and read in the
    backward is read in the backward through an `alias`, which stands behind its last reader in the forward.
    """
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    behind: dict[Node, list[Node]] = {}
    for node in order:
        early = [reader for reader in node.users if reader.op != "output" and not is_late(reader)]
        if keeps(node) and not is_late(node) and any(map(is_late, node.users)) and (early or node.op != "placeholder"):
            behind.setdefault(max(early, key=order.__getitem__, default=node), []).append(node)
    kept: dict[Node, Node] = {}

    def write(copies: Copies, node: Node) -> Node:
        copy = copies.keep(node, (ChainMap(kept, copies) if is_late(node) else copies).__getitem__)
        for value in behind.get(node, ()):
            meta = about(node if value.op == "placeholder" else value)
            meta |= {"val": value.meta["val"], "phase": "forward", STORED: value.name}
            kept[value] = called(
                copies.graph, torch.ops.aten.alias.default, (copies[value],), {}, f"{value.name}_stored", meta
            )
        return copy

    return rebuild(gm, write)


def keeps(node: Node) -> bool:
    """Whether a node is one value with dims."""
    value = node.meta.get("val")
    return node.op in ("placeholder", "call_function") and isinstance(value, torch.Tensor) and value.dim() > 0


# --- what is missing where no plan fits into the memory, and what to do about it --------------------------------------
MUCH = 0.03  # of what a plan takes: a result that takes as much may be the reason


def shortage(plan: Plan, limit: float, least: bool) -> str:
    """Returns the message of the error: what is missing for a plan to fit, and the three tensors that take most at
    its peak.

    limit: bytes. least: it is known that no plan fits, not only that none was found.
    """
    sizes: Counter[str] = Counter()
    for node, size in plan.life.at_peak():
        sizes[node.name] += size
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
    tensors = ", ".join(f"%{name} {sizes[name]:,}" for name in largest)
    known = f"; no plan takes as little as {int(limit):,}" if least else ""
    what, parts = lacking(plan.memory, limit)
    again = ", ask for recompute='auto'" if plan.options.train and plan.options.recompute == NONE else ""
    todo = f"Give more memory, more ranks or a smaller batch{again}{split_outputs(plan, plan.memory['total'])}."
    return f"{what}{known}\n  {parts}; the largest tensors: {tensors}\n  {todo}"


def split_outputs(plan: Plan, most: int) -> str:
    """Returns what to do about results of the model that are whole on every rank, if one takes much of `most` bytes."""
    whole = [
        (local_bytes(result, plan.mesh), int(port.name))
        for port, result in zip(plan.boxed.meta["ports"].outputs, results(plan.boxed))
        if port.kind == OUTPUT and result is not None and result.meta["sbp"] == broadcast(plan.mesh.axes)
    ]
    size, at = max(whole, default=(0, 0))
    if size <= MUCH * most or plan.mesh.ranks == 1:
        return ""
    return f", or leave output {at}, {size:,} bytes on every rank, split: see `outputs=`"
