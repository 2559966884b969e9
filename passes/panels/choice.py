"""Chooses how many panels the products of a plan are cut into, by simulating the step with each number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from sbpc.mesh.mesh import Mesh
from sbpc.passes.panels.cut import Move, cuts, in_panels, moves
from sbpc.passes.schedule.choice import Overlap, overlapped
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan

PANELS = 2, 4, 8
Made = Callable[[GraphModule, Assignment], Plan]  # the plan of a graph and an assignment


def faster_in_panels(plan: Plan, gain: float, made: Made) -> Plan:
    """Returns the plan with what is exposed beside products in panels if that is faster, and fits; else the plan.

    gain: the fraction of the step that panels must save. Each collective goes in as many as save most by `saved`, or
    stays whole.
    """
    found = moves(plan)
    best = {move: max(PANELS, key=lambda panels: saved(move, panels, plan.mesh)) for move in found}
    saves = {move: seconds for move, panels in best.items() if (seconds := saved(move, panels, plan.mesh)) > 0}
    if not saves:
        return plan
    tried = with_panels(
        plan, found, [(move, best[move]) for move in sorted(saves, key=lambda move: -saves[move])], made
    )
    fits = tried.cost.memory["total"] <= (plan.options.memory or math.inf)
    return tried if fits and tried.cost.seconds < (1 - gain) * plan.cost.seconds else plan


def all_in_panels(plan: Plan, panels: int, made: Made) -> Plan:
    """Returns the plan with all that is next to products in so many panels, as far as sizes divide."""
    found = moves(plan)
    return with_panels(plan, found, [(move, panels) for move in sorted(found, key=lambda move: -move.seconds)], made)


def fitting_in_panels(free: Plan, nearest: Plan, options: Options, panels: int | None, made: Made) -> Plan | None:
    """Returns the fastest plan with these options that fits into their memory by its panels; None if none does.

    free: the plan without a limit, whose bounds hold for all plans. nearest: of the plans of a search for one that
    fits the smallest. panels: in how many, or None for the number with which a plan is fastest.
    """
    plans = [overlapped(plan, options, of_whole(free), free.lower_bound, free.serial_bound) for plan in (free, nearest)]
    cut = [all_in_panels(plan, count, made) for plan in plans for count in ([panels] if panels else PANELS)]
    most = options.memory or math.inf
    return min(
        (plan for plan in cut if plan.cost.memory["total"] <= most), key=lambda plan: plan.cost.seconds, default=None
    )


def saved(move: Move, panels: int, mesh: Mesh) -> float:
    """Returns the seconds that panels of one move may save: all but the first, or the last, go beside those of the
    products.

    No more is hidden than what is exposed, and than the products take. What they make is put together at the end,
    and each further panel costs a latency and launches.
    """
    hidden = min(move.exposed, move.beside) * (1 - 1 / panels)
    return hidden - move.joining - (panels - 1) * (move.latency + mesh.cluster.launch * len(move.ends))


def with_panels(plan: Plan, found: Sequence[Move], wanted: Iterable[tuple[Move, int]], made: Made) -> Plan:
    """Returns the plan of the same step with the wanted moves in panels.

    Its bounds are those of `plan`: panels send as many bytes and compute as much as the whole, in kernels none of
    which is faster.
    """
    decided = cuts(plan, found, wanted)
    cut = made(*in_panels(plan, found, decided))
    options = replace(plan.options, panels=max((each.panels for each in decided.values()), default=1))
    return overlapped(cut, options, of_whole(plan), plan.lower_bound, plan.serial_bound)


def of_whole(plan: Plan) -> Overlap | None:
    """Returns the prover of a plan whose graph is written anew in panels."""
    prover = plan.prover
    if prover is None:
        return None
    if isinstance(prover, Overlap):
        return replace(prover, whole=prover.whole or plan)
    return Overlap(prover, prover, 1.0, plan.lower_bound, plan)
