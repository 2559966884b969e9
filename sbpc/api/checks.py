"""Checks of what `sbpc.plan` is asked, before anything is captured."""

from __future__ import annotations

from typing import Any

from sbpc.api.recompute import RECOMPUTE
from sbpc.errors import SbpcError, check_kinds, is_number, shown
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
        spread=(spread, "True or False"),
    )
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
        raise SbpcError(f"memory is {memory!r}\n  It is the bytes that a rank has, a positive number.")
