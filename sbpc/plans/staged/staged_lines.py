"""The lines that `print(plan)` shows of a plan with stages or of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbpc.plans.staged.pipeline_cost import RUNS
from sbpc.plans.staged.schedules import BACKWARD, FORWARD


def report_lines(plan: Any) -> Sequence[str]:
    """Returns the lines that `print(plan)` shows."""
    cost = plan.cost
    sent = ", ".join(f"{size:,.0f} over {axis}" for axis, size in cost.bytes_sent.items() if size) or "none"
    lines = [
        f"{plan.mesh}: {plan.way}",
        f"{cost.seconds:.4g} s a step: computing {cost.compute_seconds:.4g}, communication that nothing hides "
        f"{cost.exposed_seconds:.4g}, bubble {cost.bubble_seconds:.4g} ({cost.bubble_seconds / max(cost.seconds, 1e-300):.1%}); "
        f"no layouts of {'these stages' if plan.axis else 'this loop'} take less than {cost.lower_bound:.4g} s",
        f"bytes that the busiest rank sends: {sent}",
        f"memory of the busiest rank: {cost.memory['total']:,} bytes; "
        + ", ".join(f"{kind} {size:,}" for kind, size in cost.memory.items() if kind != "total"),
    ]
    for at, (chunk, part) in enumerate(zip(plan.chunks, plan.parts)):
        forward, backward = (part.program(RUNS[kind]).seconds for kind in (FORWARD, BACKWARD))
        lines.append(
            f"chunk {at} on stage {plan.owners[at]}: {span_of(chunk)}; forward {forward:.3g} s, backward {backward:.3g} s, "
            f"{sum(part.homes.values()):,} bytes of parameters, sends {', '.join(chunk.sends.values()) or 'nothing'}"
        )
        lines += [f"  {name}  {layout}" for name, layout in chunk.plan.parameters.items()]
    return lines


def span_of(chunk: Any) -> str:
    """Returns the first and the last module of a chunk."""
    nodes = [node for node in chunk.plan.graph.graph.nodes if node.op == "call_function"]
    named = list(dict.fromkeys(node.meta["module"] for node in nodes if node.meta.get("module")))
    return f"{named[0]} to {named[-1]}" if named else "no module"
