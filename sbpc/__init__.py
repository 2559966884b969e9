"""sbpc: a compiler for distributed PyTorch. A model for one device in, the program of every rank of a mesh out.

`import sbpc` loads nothing else. A name is looked up in its file when it is first used: some need torch's
distributed tensors, sympy and the table of rules, which take two seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbpc.api.buckets import buckets
    from sbpc.api.loading import load, load_module
    from sbpc.api.planning import baseline, plan
    from sbpc.api.sweep import sweep
    from sbpc.errors import SbpcError
    from sbpc.mesh.cluster import Cluster
    from sbpc.mesh.layout import Layout
    from sbpc.mesh.mesh import Mesh
    from sbpc.mesh.states import B, P, Partial, S
    from sbpc.plans.plan import Plan
    from sbpc.rules.proof.probe import probe
    from sbpc.rules.proof.rule_files import load_rules
    from sbpc.rules.proof.user_rules import rule
    from sbpc.runtime.exported import load_programs
    from sbpc.runtime.module import parallelize
    from sbpc.runtime.one_process.simulate import simulate
    from sbpc.runtime.start.process_groups import start, stop
    from sbpc.runtime.state.checkpoint import Checkpoints
    from sbpc.runtime.state.whole import full_state_dict

FILES = {
    "api.buckets": ("buckets",),
    "api.loading": ("load", "load_module"),
    "api.planning": ("baseline", "plan"),
    "api.sweep": ("sweep",),
    "errors": ("SbpcError",),
    "mesh.cluster": ("Cluster",),
    "mesh.layout": ("Layout",),
    "mesh.mesh": ("Mesh",),
    "mesh.states": ("B", "P", "Partial", "S"),
    "plans.plan": ("Plan",),
    "rules.proof.probe": ("probe",),
    "rules.proof.rule_files": ("load_rules",),
    "rules.proof.user_rules": ("rule",),
    "runtime.exported": ("load_programs",),
    "runtime.module": ("parallelize",),
    "runtime.one_process.simulate": ("simulate",),
    "runtime.start.process_groups": ("start", "stop"),
    "runtime.state.checkpoint": ("Checkpoints",),
    "runtime.state.whole": ("full_state_dict",),
}
ROOMS = (
    "api", "boxing", "cli", "errors", "graph", "inspect", "integrations", "mesh", "passes", "plans", "rules", "runtime",
    "solver",
)  # fmt: skip

__all__ = [
    "B",
    "Checkpoints",
    "Cluster",
    "Layout",
    "Mesh",
    "P",
    "Partial",
    "Plan",
    "S",
    "SbpcError",
    "baseline",
    "buckets",
    "full_state_dict",
    "load",
    "load_module",
    "load_programs",
    "load_rules",
    "parallelize",
    "plan",
    "probe",
    "rule",
    "simulate",
    "start",
    "stop",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Returns a public name, or a room, and keeps it."""
    if name in ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    for file, names in FILES.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(f"{__name__}.{file}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, with what a module has besides."""
    return sorted({*globals(), *__all__, *ROOMS})
