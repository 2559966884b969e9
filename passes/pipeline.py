"""The pipeline: the passes in order, with a check and a clock after each; capture comes before, in `sbpc.api`."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from sbpc import codec, programs
from sbpc.cost import OPTIMIZER_STATE
from sbpc.errors import MemoryLimitError
from sbpc.graphtext import graph_text
from sbpc.layout import Layout
from sbpc.measure import local_bytes
from sbpc.mesh import Mesh
from sbpc.passes.annotate import annotate
from sbpc.passes.assign import Space, kept
from sbpc.passes.box import box
from sbpc.passes.lift import lift
from sbpc.passes.localize import localize
from sbpc.passes.normalize import normalize
from sbpc.passes.verify import verify, verify_annotated, verify_assigned, verify_captured
from sbpc.pins import Wish
from sbpc.plan import Assignment, Plan, Rewriter

log = logging.getLogger("sbpc")
REWRITER = Rewriter(box, localize, verify, codec.save, programs.save)
FRONT: tuple[tuple[str, Callable[[GraphModule], GraphModule], Callable[[GraphModule], int]], ...] = (
    ("normalize", normalize, verify_captured),
    ("lift", lift, verify_captured),
    ("annotate", annotate, verify_annotated),
)


@dataclass
class Stages:
    """Clocks and dumps the stages of one run of the pipeline.

    dump: a folder for the text of the graph after each pass, or None. times: CPU seconds by pass.
    """

    dump: Path | None = None
    times: dict[str, float] = field(default_factory=dict)
    shown: int = 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the CPU seconds of a block under a name."""
        start = time.process_time()
        yield
        self.times[name] = self.times.get(name, 0.0) + time.process_time() - start
        log.info("%s: %.2f s", name, self.times[name])

    def show(self, name: str, gm: GraphModule) -> None:
        """Write the text of the graph after a pass, if asked to."""
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            (self.dump / f"{self.shown}_{name}.txt").write_text(graph_text(gm))
            self.shown += 1


@contextmanager
def uncollected() -> Iterator[None]:
    """While this lasts Python does not look for cycles to collect, which takes as long as the passes themselves."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def front(captured: GraphModule, stages: Stages) -> GraphModule:
    """From the captured to the annotated graph."""
    verify_captured(captured)
    stages.show("capture", captured)
    gm = captured
    for name, run, check in FRONT:
        with stages.timed(name):
            gm = run(gm)
        with stages.timed("verify"):
            check(gm)
        stages.show(name, gm)
    return gm


def finish(
    gm: GraphModule,
    mesh: Mesh,
    wishes: Mapping[str, Wish],
    outputs: Mapping[int, Wish],
    options: dict[str, Any],
    stages: Stages,
) -> Plan:
    """From the annotated graph to the plan; the boxed and local graphs are made on first use, or here when dumping.

    Raises MemoryLimitError if the plan does not fit into `options["memory"]` and none that does is found.
    """
    solved_on = objective_mesh(mesh, options.get("objective", "seconds"))
    with stages.timed("assign"):
        space = Space(gm, solved_on, wishes, outputs)
        assignment, bound = space.solve()
    bound = bound if solved_on is mesh else 0.0
    plan = make_plan(gm, mesh, assignment, bound, options, stages)
    if options.get("memory") is not None and plan.cost.memory["total"] > options["memory"]:
        with stages.timed("assign"):
            plan = within_memory(plan, space, options["memory"], stages)
    if stages.dump is not None:
        stages.show("assign", plan.graph)
        stages.show("box", plan.boxed)
        stages.show("localize", plan.local)
    return plan


def within_memory(plan: Plan, space: Space, limit: float, stages: Stages) -> Plan:
    """The fastest plan found that stays under `limit` bytes a rank: a byte is given a price, raised until the plan fits.

    The price is a Lagrange multiplier; the bound of the unlimited problem stays valid. Raises MemoryLimitError.
    """
    copies = 1 + OPTIMIZER_STATE[plan.options.get("optimizer")]
    held = kept(plan.graph, copies)

    def at(price: float) -> Plan:
        assignment, _ = space.solve(held, price)
        return make_plan(plan.graph, plan.mesh, assignment, plan.lower_bound, plan.options, stages)

    unit = plan.cost.seconds / plan.cost.memory["total"]
    low, high, best, least = 0.0, unit / 16, None, plan
    while best is None and high <= unit * 2**12:
        tried = at(high)
        if tried.cost.memory["total"] <= limit:
            best = tried
        else:
            low, high = high, 4 * high
        least = min(least, tried, key=lambda p: p.cost.memory["total"])
    if best is None:
        raise MemoryLimitError(shortage(least, limit))
    for _ in range(4):
        middle = at((low + high) / 2)
        if middle.cost.memory["total"] <= limit:
            high = (low + high) / 2
            best = min(best, middle, key=lambda p: p.cost.seconds)
        else:
            low = (low + high) / 2
    return best


def shortage(plan: Plan, limit: float) -> str:
    """What is missing for a plan to fit, and the three tensors that hold most of what it takes."""
    memory = plan.cost.memory
    sizes = {
        node.name: local_bytes(node, plan.mesh)
        for node in plan.boxed.graph.nodes
        if node.op in ("placeholder", "call_function")
        and "sbp" in node.meta
        and not isinstance(node.meta["sbp"], tuple)
    }
    most = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
    held = ", ".join(f"%{name} {sizes[name]:,}" for name in most)
    parts = ", ".join(f"{kind} {size:,}" for kind, size in memory.items() if kind != "total")
    over = f"{memory['total'] - int(limit):,} more than the limit of {int(limit):,}"
    return (
        f"the step needs at least {memory['total']:,} bytes a rank, {over}\n"
        f"  of which {parts}; the largest tensors: {held}\n"
        "  Give more memory, more ranks or a smaller batch."
    )


def make_plan(
    gm: GraphModule, mesh: Mesh, assignment: Assignment, bound: float, options: dict[str, Any], stages: Stages
) -> Plan:
    """The plan of an assignment, checked; `meta["sbp"]` of its graph mirrors the chosen layouts."""
    with stages.timed("verify"):
        verify_assigned(gm, assignment, mesh)
    plan = Plan(mesh, gm, assignment, REWRITER, bound, options, stages.times)
    layouts: dict[str, Layout] = plan.layouts
    for node in gm.graph.nodes:
        if node.name in layouts:
            node.meta["sbp"] = layouts[node.name]
    return plan


def objective_mesh(mesh: Mesh, objective: str) -> Mesh:
    """The mesh whose seconds the solver minimises: for "bytes" one where nothing but bytes costs."""
    if objective == "seconds":
        return mesh
    from dataclasses import replace
    from math import inf

    free = replace(mesh.cluster, name="bytes", peak=inf, memory_bandwidth=inf, launch=0.0, collectives=())
    links = replace(
        free, intra_latency=0.0, inter_latency=0.0, intra_bandwidth=1.0, inter_bandwidth=1.0, ranks_per_node=1 << 30
    )
    return Mesh(cluster=links, **dict(zip(mesh.axes, mesh.sizes)))
