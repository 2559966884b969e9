"""memory: of the plans that stay under a limit of bytes per rank, a fast one, found by giving a byte a price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from sbpc.errors import MemoryLimitError
from sbpc.memory import Life
from sbpc.plan import Plan

HALVINGS = 6  # of the span between a price at which the plan fits and one at which it does not
DEAREST = 1 << 12  # a byte may cost as much as so many steps


def within(limit: float, plan: Plan, priced: Callable[[float], Plan], floor: Callable[[float], float]) -> Plan:
    """The fastest plan found that stays under `limit` bytes a rank: the price of a byte is raised until the plan fits.

    plan: the fastest without a limit. priced: the plan at a price in seconds a byte, a Lagrange multiplier. floor: by
    price, seconds below which no plan under the limit is; the plan carries the highest. Raises MemoryLimitError.
    """
    unit = plan.cost.seconds / plan.cost.memory["total"]
    tried: dict[float, Plan] = {}

    def fits(price: float) -> bool:
        tried[price] = priced(price)
        return tried[price].cost.memory["total"] <= limit

    low, high = 0.0, unit / 16
    while not fits(high):
        low, high = high, 4 * high
        if high > unit * DEAREST:
            raise MemoryLimitError(shortage(min(tried.values(), key=lambda p: p.cost.memory["total"]), limit))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    fitting = [found for found in tried.values() if found.cost.memory["total"] <= limit]
    best = min(fitting, key=lambda found: found.cost.seconds)
    return replace(best, lower_bound=max(0.0, *map(floor, (0.0, low, high))))


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
