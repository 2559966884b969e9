"""Checks of what `sbpc.plan` is asked, before anything is captured."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule

from sbpc.api.recompute import RECOMPUTE
from sbpc.errors import PinError, PlanError, SbpcError, check_kinds, is_number, shown
from sbpc.graph.ports import PARAMETER
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import OPTIMIZER_STATE

OBJECTIVES = ("seconds", "serial", "bytes")


def check_mesh(mesh: Any) -> None:
    """Raises SbpcError for what is no mesh."""
    if not isinstance(mesh, Mesh):
        raise SbpcError(
            f"the mesh is a {type(mesh).__name__}\n  Give sbpc.Mesh(data=2, tensor=2) or Mesh.from_device_mesh(mesh)."
        )


def check_options(
    *, optimizer: Any = None, memory: Any = None, objective: Any = "seconds", pin: Any = None, spread: Any = False,
    inputs: Any = None, outputs: Any = None, dynamic: Any = None, microbatches: Any = None, panels: Any = None, recompute: Any = "none",
) -> None:  # fmt: skip
    """Raises SbpcError for options of the wrong kind and for what cannot be planned, before anything is captured."""
    check_kinds(
        optimizer=(optimizer, "a text", "None"),
        pin=(pin, "a mapping whose keys are texts", "None"),
        inputs=(inputs, "a list", "None"),
        outputs=(outputs, "a list", "None"),
        recompute=(recompute, "a text"),
        objective=(objective, "a text"),
        spread=(spread, "True or False"),
    )
    for name, text in (pin or {}).items():
        if not isinstance(text, (str, Layout)):
            raise PinError(f"pin {name!r}: {shown(text)} is no layout\n  A layout is a text such as 'S(0)@data', or a sbpc.Layout.")
    for name, count in (("microbatches", microbatches), ("panels", panels)):
        if count is not None and (not is_number(count, int) or count < 1):
            raise SbpcError(f"{name} is {shown(count)}\n  It is an integer from 1 on, or None.")
    if recompute not in RECOMPUTE:
        raise SbpcError(f"recompute is {shown(recompute)}\n  It is one of {', '.join(map(repr, RECOMPUTE))}.")
    if optimizer not in OPTIMIZER_STATE:
        raise SbpcError(f"no optimizer {optimizer!r} is known\n  Known are {', '.join(map(repr, OPTIMIZER_STATE))}.")
    if objective not in OBJECTIVES:
        raise SbpcError(f"no objective {objective!r} is known\n  Known are {', '.join(map(repr, OBJECTIVES))}.")
    if memory is not None and (not is_number(memory, (int, float)) or not memory > 0):
        raise SbpcError(f"memory is {shown(memory)}\n  It is the bytes that a rank has, a positive number.")


def values_pinned(gm: GraphModule, pins: Mapping[str, Any]) -> list[str]:
    """Returns the pins that name no parameter."""
    ports = gm.meta["ports"]
    names = [*(port.name for port in ports.inputs if port.kind == PARAMETER), *ports.tied]
    return [pattern for pattern in pins if not fnmatch.filter(names, pattern)]


def check_parts(gm: GraphModule, pins: Mapping[str, Any], dynamic: Any) -> None:
    """Raises PlanError for what cannot be asked of a step in several micro-batches: their graph has other values."""
    pinned = values_pinned(gm, pins)
    if pinned or dynamic is not None:
        what = f"the pin {pinned[0]!r} of a value" if pinned else "dynamic="
        raise PlanError(f"{what} with microbatches=\n  Pin parameters alone and name no dims, or plan with microbatches=1.")
