"""A lower bound of a step in stages: what its schedule takes at least, however fast the layouts are.

Let f, i and w be what a micro-batch's forward, the backward of its inputs and that of its weights take at least in a
chunk; a stage with the chunks C, of which the first one is c, works on m micro-batches. It begins after a forward of
all chunks before c. The last thing that it makes for others is an i of c: each micro-batch's backward leaves the
stage through c, after its forwards, and, unless the schedule puts w off, after the w of all but that micro-batch in
c. Then come the i of the chunks before, and the w of chunk 0. So

    T >= sum of f before c + m * sum over C of (f + i + w) - w of c + sum of i before c + w of chunk 0

for c > 0, in which m * w is left out where w is put off; and T >= sum of f before c + m * sum over C of (f + i + w)
in any case. Each gradient is added to those of earlier micro-batches m - 1 times, which counts as part of w.

Where p stages share cores, one that computes alone is up to `sharing` times as fast, and all of them together are no
faster than where all compute: so T is at least that bound divided by `sharing`, and a p-th part of what all stages
compute.
"""

from __future__ import annotations

from collections.abc import Mapping

from sbpc.graph.ports import GRADIENT, results
from sbpc.mesh.mesh import Mesh
from sbpc.plans.chunk import Chunk
from sbpc.plans.plan import Plan
from sbpc.plans.staged.part_memory import ADDED
from sbpc.plans.staged.pipeline_cost import Pipeline
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS

WORK = (FORWARD, INPUTS, WEIGHTS)


def stages_bound(plan: Plan, least: Mapping[str, float]) -> float:
    """Returns seconds that the schedule of a plan takes at least. least: by name of a call the seconds of its kernel
    in any layout."""
    parts = [least_of(each, plan.inner, least) for each in plan.chunks]
    longest = max(stage_bound(plan, parts, stage) for stage in range(plan.stages))
    return max(longest / plan.alone, sum(sum(busy(plan, each).values()) for each in parts) / plan.stages)


def least_of(chunk: Chunk, mesh: Mesh, least: Mapping[str, float]) -> dict[str, float]:
    """Returns what a micro-batch takes at least in each part of a chunk, and under ADDED what it takes to add its
    gradients to others.

    mesh: of a stage.
    """
    found = dict.fromkeys((*WORK, ADDED), 0.0)
    for node, part in chunk.parts.items():
        # what another chunk sends has the name of the call that made it
        if part in WORK and node.op == "call_function":
            found[part] += least.get(node.name, 0.0)
    ends = zip(chunk.ports.outputs, results(chunk.bare))
    for value in (
        node.meta["val"]
        for node in dict.fromkeys(node for port, node in ends if port.kind == GRADIENT)
        if node is not None
    ):
        share = value.numel() / mesh.ranks
        found[ADDED] += float(mesh.cluster.kernel_seconds("add", share, 3 * value.element_size() * share))
    return found


def busy(plan: Pipeline, least: Mapping[str, float]) -> dict[str, float]:
    """Returns what all micro-batches take at least in each part of a chunk. least: what one takes."""
    return {part: plan.count * least[part] + (part == WEIGHTS) * (plan.count - 1) * least[ADDED] for part in WORK}


def stage_bound(plan: Pipeline, parts: list[dict[str, float]], stage: int) -> float:
    """Returns the bound of one stage. parts: by chunk the least seconds of a micro-batch in each part."""
    mine = plan.chunks_on(stage)
    first, before = parts[mine[0]], parts[: mine[0]]
    each = [busy(plan, parts[at]) for at in mine]
    alone = sum(one[FORWARD] for one in before) + sum(sum(one.values()) for one in each)
    if not before:
        return alone
    tail = sum(one[INPUTS] for one in before) + parts[0][WEIGHTS]
    late = sum(one[WEIGHTS] for one in each) if plan.schedule == "zbv" else first[WEIGHTS] + first[ADDED]
    return max(alone, alone - late + tail)
