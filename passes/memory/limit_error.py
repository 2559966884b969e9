"""shortage: what is missing where no plan fits into the memory, and what to do about it."""

from __future__ import annotations

from collections import Counter

from sbpc.errors import lacking
from sbpc.graph.ports import OUTPUT, results
from sbpc.mesh.layout import broadcast
from sbpc.plans.memory import local_bytes
from sbpc.plans.plan import Plan

MUCH = 0.03  # of what a plan takes: a result that takes as much may be the reason


def shortage(plan: Plan, limit: float, least: bool) -> str:
    """Returns the message of the error: what is missing for a plan to fit, and the three tensors that take most at its peak.

    limit: bytes. least: it is known that no plan fits, not only that none was found.
    """
    sizes: Counter[str] = Counter()
    for node, size in plan.life.at_peak():
        sizes[node.name] += size
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
    tensors = ", ".join(f"%{name} {sizes[name]:,}" for name in largest)
    known = f"; no plan takes as little as {int(limit):,}" if least else ""
    what, parts = lacking(plan.memory, limit)
    todo = f"Give more memory, more ranks or a smaller batch{split_outputs(plan, plan.memory['total'])}."
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
