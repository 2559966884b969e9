"""memory: of the plans that stay under a limit of bytes per rank, a fast one, found by giving a byte a price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sbpc.errors import MemoryLimitError
from sbpc.memory import Life
from sbpc.plan import Plan


def within(limit: float, plan: Plan, priced: Callable[[float], Plan]) -> Plan:
    """The fastest plan found that stays under `limit` bytes a rank: the price of a byte is raised until the plan fits.

    plan: the fastest without a limit. priced: the plan at a price in seconds a byte, a Lagrange multiplier; the bound of
    the unlimited problem stays valid. Raises MemoryLimitError.
    """
    unit = plan.cost.seconds / plan.cost.memory["total"]
    low, high, best, least = 0.0, unit / 16, None, plan
    while best is None and high <= unit * 2**12:
        tried = priced(high)
        if tried.cost.memory["total"] <= limit:
            best = tried
        else:
            low, high = high, 4 * high
        least = min(least, tried, key=lambda p: p.cost.memory["total"])
    if best is None:
        raise MemoryLimitError(shortage(least, limit))
    for _ in range(4):
        middle = priced((low + high) / 2)
        if middle.cost.memory["total"] <= limit:
            high = (low + high) / 2
            best = min(best, middle, key=lambda p: p.cost.seconds)
        else:
            low = (low + high) / 2
    return best


def shortage(plan: Plan, limit: float) -> str:
    """What is missing for a plan to fit, and the three tensors that hold most at its peak."""
    memory = plan.cost.memory
    sizes: Counter[str] = Counter()
    for node, size in Life.of(plan.boxed, plan.mesh).at_peak():
        sizes[node.name] += size
    most = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
    held = ", ".join(f"%{name} {sizes[name]:,}" for name in most)
    parts = ", ".join(f"{kind} {size:,}" for kind, size in memory.items() if kind != "total")
    over = f"{memory['total'] - int(limit):,} more than the limit of {int(limit):,}"
    return (
        f"the step needs at least {memory['total']:,} bytes a rank, {over}\n"
        f"  of which {parts}; the largest tensors: {held}\n"
        "  Give more memory, more ranks or a smaller batch."
    )
