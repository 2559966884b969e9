"""Check before a step of stages that module and arguments are as they were planned: programs would compute something else in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import PlanError
from sbpc.graph.guards import Guards
from sbpc.graph.ports import GRADIENT, INPUT, PARAMETER, Port
from sbpc.plans.plan import Plan
from sbpc.runtime import bind
from sbpc.runtime.step import check_autocast, check_stored, check_trained


def check_step(plan: Plan, module: nn.Module, guards: Guards, leaves: Sequence[Tensor], where: torch.device) -> None:
    """Raises PlanError for arguments of other shapes, another mode, autocast or number, and where gradients are turned off."""
    for port, planned in plan.shapes.items():
        if port.kind == INPUT:
            bind.check(f"argument {port.name}", leaves[int(port.name)], planned)
    if not torch.is_grad_enabled():
        raise PlanError("gradients are turned off, and a step of stages computes them\n  Call it outside of torch.no_grad().")
    check_autocast(plan.options.dtype, where)
    bind.check_modes(module, plan)
    if (error := guards.broken()) is not None:
        raise error


def check_weights(plan: Plan, mine: Iterable[int], values: Mapping[Port, Any], place: tuple[int, ...], where: torch.device) -> None:
    """Raises PlanError for a parameter of this rank's chunks that is no longer as it was planned. place: on the mesh of the stage."""
    trained = {port.name for port in plan.ports.outputs if port.kind == GRADIENT}
    for chunk in (plan.chunks[at] for at in mine):
        for port, planned in chunk.shapes.items():
            if port.kind == PARAMETER:
                value, layout = values.get(port), chunk.given[port]
                check_stored(port, value, planned, layout.local_shape(planned.shape, chunk.mesh.sizes, place), layout, where)
                check_trained(port, values[port], port.name in trained)
